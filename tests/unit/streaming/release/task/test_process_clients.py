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


def test_as_many_destinations_as_there_are_connections_share_none_and_one_that_hangs_is_forgotten_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker that throttles one reads nothing more from its connection, also after it has answered all."""
    monkeypatch.setattr(process_clients, "_brokers", {})
    monkeypatch.setattr(process_clients, "_numbers", {})
    monkeypatch.setattr(process_clients, "Brokers", Brokers)
    recipients = [("topic", f"s{i}") for i in range(process_clients._MOST_KEPT + 1)]
    numbers = [process_clients.number_of(recipient) for recipient in recipients[:-1]]
    assert all(process_clients.is_alone(recipient) for recipient in recipients[:-1])
    made: list[Any] = [process_clients.brokers(Settings(), number) for number in [0, *numbers]]
    assert len(set(made)) == len(recipients)
    assert process_clients.number_of(recipients[-1]) == numbers[0]
    assert [process_clients.is_alone(recipient) for recipient in (recipients[0], recipients[1], recipients[-1])] == [
        False,
        True,
        False,
    ]

    process_clients.forget_brokers(number=numbers[0])
    assert [one.is_closed for one in made] == [False, True] + [False] * len(made[2:])
    kept: list[Any] = [process_clients.brokers(Settings(), number) for number in [0, *numbers]]
    assert [one is before for one, before in zip(kept, made, strict=True)] == [True, False] + [True] * len(kept[2:])
