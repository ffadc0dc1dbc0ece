"""The Pulsar clients that a worker process keeps."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from conf.settings import Settings
from streaming.release.task import process_clients


class Client:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_a_client_is_closed_when_no_call_of_it_is_left_and_the_next_task_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_clients, "_clients", {})
    monkeypatch.setattr(process_clients, "connect", lambda *_, **options: options and Client())
    first: Any = process_clients.pulsar_client(Settings())
    assert process_clients.pulsar_client(Settings()) is first
    is_unused = threading.Event()

    def until_unused() -> None:
        is_unused.wait(60)

    process_clients.forget_clients(until_unused)
    assert process_clients.pulsar_client(Settings()) is not first
    assert not first.closed.is_set()
    is_unused.set()
    assert first.closed.wait(60)
