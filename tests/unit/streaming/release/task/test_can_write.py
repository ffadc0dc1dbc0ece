"""Trying whether a destination can be written."""

from __future__ import annotations

import pytest

from broker.client import NoAnswerError
from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import ServerError
from conf.settings import Settings
from streaming.release.task import process_clients
from streaming.release.task.can_write import can_write


class Brokers:
    """A broker that answers a new producer with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def partitions(self, topic: str) -> int:
        return 0

    def produce(self, topic: str) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "is_forgotten"),
    [(RefusedError(ServerError.TopicTerminatedError, b"no"), False), (NoAnswerError("nothing"), True)],
)
def test_the_connections_are_kept_after_a_refusal_for_the_next_release(
    error: Exception, is_forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(process_clients, "brokers", lambda settings: Brokers(error))
    monkeypatch.setattr(process_clients, "forget_brokers", lambda: forgotten.append(True))
    assert list(can_write(Settings().model_dump_json(), ["t"])) == [str(error)]
    assert bool(forgotten) == is_forgotten


def test_a_topic_that_wants_a_schema_can_be_written_unless_it_is_for_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RefusedError(ServerError.IncompatibleSchema, b"no")
    monkeypatch.setattr(process_clients, "brokers", lambda settings: Brokers(error))
    settings = Settings.model_validate({"routes": [{"source": "persistent://a/b/t", "subscriptions": [{"name": "s"}]}]})
    topics = ["persistent://a/b/t-s", "persistent://a/b/t-rejects"]
    assert list(can_write(settings.model_dump_json(), topics)) == ["", "IncompatibleSchema: no"]
