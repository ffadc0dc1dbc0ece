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


def test_as_many_destinations_as_there_are_clients_share_none_and_one_that_hangs_is_forgotten_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker that throttles one reads nothing more from its connection, also after it has answered all."""
    monkeypatch.setattr(process_clients, "_clients", {})
    monkeypatch.setattr(process_clients, "_numbers", {})
    monkeypatch.setattr(process_clients, "connect", lambda *_, **options: options and Client())
    targets = [("topic", f"s{i}") for i in range(process_clients._MOST_KEPT + 1)]
    numbers = [process_clients.number_of(target) for target in targets[:-1]]
    assert all(process_clients.is_alone(target) for target in targets[:-1])
    clients: list[Any] = [process_clients.pulsar_client(Settings(), number) for number in [0, *numbers]]
    assert len(set(clients)) == len(targets)
    assert process_clients.number_of(targets[-1]) == numbers[0]
    assert [process_clients.is_alone(target) for target in (targets[0], targets[1], targets[-1])] == [
        False,
        True,
        False,
    ]

    process_clients.forget_clients(number=numbers[0])
    assert clients[1].closed.wait(60)
    kept: list[Any] = [process_clients.pulsar_client(Settings(), number) for number in [0, *numbers]]
    assert [one is before for one, before in zip(kept, clients, strict=True)] == [True, False] + [True] * len(kept[2:])
