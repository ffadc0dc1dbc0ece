"""What the tests of the intake share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

import streaming.source.receivers
from conf.settings import Settings
from status.alerts import Alerts
from streaming.release.feedback import FeedbackFile
from streaming.source.intake import Intake
from tests.support.service.intake import Client


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Client:
    client = Client()
    monkeypatch.chdir(tmp_path)  # the checkpoint is in there
    for name in ("connect", "Brokers"):
        monkeypatch.setattr(streaming.source.receivers, name, lambda _: client)
    monkeypatch.setattr(streaming.source.receivers, "SourceWatch", mock.Mock())
    return client


_NO_ROWS = pa.schema([(name, pa.int64()) for name in ("slot", "n", "n_bytes")]).empty_table()


@pytest.fixture
def start(client: Client, tmp_path: Path) -> Iterator[Any]:
    made = []

    def begin(settings: Settings, run_id: str, alerts: Alerts | None = None, shards: int = 1) -> Intake:
        tables: Any = SimpleNamespace(version=lambda name: 0, query=lambda *_: _NO_ROWS, check_epoch=lambda: None)
        feedback, keys = FeedbackFile(tmp_path / "feedback"), [*range(shards)]
        made.append(Intake(settings, run_id, feedback, keys, tables, alerts or Alerts()))
        return made[-1]

    yield begin
    for intake in made:
        intake.stop()
