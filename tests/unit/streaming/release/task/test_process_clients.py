"""The connections that a worker process keeps."""

from __future__ import annotations

import os
from typing import Any

import pytest

from conf.settings import Settings
from streaming.release.task import process_clients


class Brokers:
    def __init__(self, *_: Any) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_connections_are_kept_until_they_are_forgotten_and_the_next_task_has_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_clients, "_brokers", {})
    monkeypatch.setattr(process_clients, "Brokers", Brokers)
    first: Any = process_clients.brokers(Settings())
    assert id(process_clients.brokers(Settings())) == id(first)
    monkeypatch.setattr(os, "getpid", lambda: 1)  # a fork, which can't use what its parent has
    second: Any = process_clients.brokers(Settings())
    assert second is not first
    process_clients.forget_brokers()
    last: Any = process_clients.brokers(Settings())
    assert (first.is_closed, second.is_closed) == (False, True)
    assert last is not second
