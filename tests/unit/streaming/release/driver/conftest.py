"""What the tests of the driver's side of releases share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from streaming.release.driver import spark_jobs
from tests.support.service.fake_releaser import NAMES, Job, Tables


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def one(tables: Tables | None = None, names: Sequence[str] = NAMES, **changes: Any) -> Job:
        job = Job(tmp_path, tables, names, **changes)
        made.append(job)
        monkeypatch.setattr(spark_jobs, "send_releases", job.send)
        monkeypatch.setattr(spark_jobs, "can_write", job.probe)
        return job

    yield one
    for job in made:
        job.releaser.stop()
