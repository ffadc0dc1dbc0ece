"""Trying whether a destination can be written."""

from __future__ import annotations

import pulsar
import pytest

from conf.settings import Settings
from streaming.release.task import process_clients
from streaming.release.task.can_write import can_write


class Client:
    """A client whose broker answers a new producer with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def get_topic_partitions(self, topic: str) -> list[str]:
        return [topic]

    def create_producer(self, topic: str) -> None:
        raise self._error


@pytest.mark.parametrize(("error", "is_forgotten"), [(pulsar.TopicTerminated("no"), False), (pulsar.Timeout(), True)])
def test_the_client_is_kept_after_a_refusal_for_the_next_release(
    error: Exception, is_forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(process_clients, "pulsar_client", lambda settings: Client(error))
    monkeypatch.setattr(process_clients, "forget_clients", lambda: forgotten.append(True))
    [reason] = can_write(Settings().model_dump_json(), ["t"])
    assert type(error).__name__ in reason
    assert bool(forgotten) == is_forgotten
