"""The Python client over Pulsar: what it publishes, and when a command is answered."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest
from delaylake import Client, DelayLakeError, Invalid, MessageId, NoAnswer, NotFound, Outcome, TooLate, Unavailable
from delaylake.broker import Broker
from delaylake.commands import cancel, command

from tracker.wire.delaylake_pb2 import ControlCommand, ControlOutcome, Result

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
NOON_MILLIS = 1_896_091_200_000


class FakePulsar:
    """A Pulsar client whose producers answer with a result's name, and whose reader has what it is given."""

    def __init__(self, result: str = "Ok") -> None:
        self.sent: list[tuple[str, bytes, dict[str, Any]]] = []
        self.outcomes: list[ControlOutcome] = []
        self._result = result

    def create_producer(self, topic: str, **_: Any) -> Any:
        if "missing" in topic:
            raise pulsar.TopicNotFound

        def send_async(payload: bytes, answered: Any, **more: Any) -> None:
            self.sent.append((topic, payload, more))
            if self._result != "silence":
                answered(SimpleNamespace(name=self._result), pulsar.MessageId(2, 7, 5, -1))

        return SimpleNamespace(send_async=send_async)

    def create_reader(self, *_: Any) -> Any:
        def read_next(_: int) -> Any:
            if not self.outcomes:
                raise pulsar.Timeout
            outcome = self.outcomes.pop(0)
            return SimpleNamespace(partition_key=lambda: outcome.request_id, data=outcome.SerializeToString)

        return SimpleNamespace(read_next=read_next)

    def close(self) -> None: ...


def client_of(fake: Any, timeout: float = 5.0) -> Client:
    client = Client(broker="pulsar://127.0.0.1:1", timeout_seconds=timeout)
    assert client._broker is not None
    client._broker._client = fake
    return client


def told(
    result: Result, subscription: str = "a", batch_index: int = -1, has_more: bool = False, ledger: int = 7
) -> ControlOutcome:
    return ControlOutcome(
        request_id="mine",
        subscription=subscription,
        ledger_id=ledger,
        entry_id=0,
        batch_index=batch_index,
        has_more=has_more,
        result=result,
    )


def test_a_message_is_sent_with_its_time_and_its_id_knows_it() -> None:
    fake = FakePulsar()
    with client_of(fake) as lake:
        message = lake.schedule("orders", "ü", at=NOON, key="k", properties={"region": "eu"}, event_time=NOON)
    assert (message, message.deliver_at) == (MessageId(7, 5, 2), NOON)
    [(topic, payload, more)] = fake.sent
    assert (topic, payload) == ("persistent://public/default/orders", "ü".encode())
    assert more["properties"] == {"region": "eu", "deliverAt": str(NOON_MILLIS)}
    assert (more["partition_key"], more["event_timestamp"]) == ("k", NOON_MILLIS)


@pytest.mark.parametrize(
    ("result", "error"),
    [("Timeout", NoAnswer), ("MessageTooBig", Invalid), ("ConnectError", Unavailable), ("silence", NoAnswer)],
)
def test_a_message_that_is_not_taken(result: str, error: type[DelayLakeError]) -> None:
    with client_of(FakePulsar(result), 0.1) as lake:
        with pytest.raises(DelayLakeError) as raised:
            lake.schedule("orders", b"", at=NOON)
        assert type(raised.value) is error
        with pytest.raises(NotFound):
            lake.schedule("missing", b"", at=NOON)


def test_commands_are_those_of_the_control_topic() -> None:
    fake = FakePulsar()
    with client_of(fake, 0.01) as lake:
        there: Any = {"subscription": "a", "request_id": "mine"}
        for ask in (
            lambda: lake.cancel("orders", "7:0", deliver_at=NOON, **there),
            lambda: lake.skip("orders", "7:0:2:3", **there),
            lambda: lake.restore("orders", "7:0", **there),
            lambda: lake.reschedule("orders", "7:0", at=NOON, **there),
            lambda: lake.deliver_now("orders", "7:0", **there),
            lambda: lake.retry("orders", "7:0", reason="no", **there),
        ):
            with pytest.raises(NoAnswer) as raised:
                ask()
            assert raised.value.request_id == "mine"
        assert lake._broker is not None
        assert not lake._broker._waiting
    sent = [ControlCommand.FromString(payload) for _, payload, _ in fake.sent]
    kinds = ["cancel", "skip", "restore", "reschedule", "reschedule", "retry"]
    assert [one.WhichOneof("operation") for one in sent] == kinds
    assert {(one.request_id, *one.subscriptions) for one in sent} == {("mine", "a")}
    assert [one.topic.rpartition("/")[2] for one in sent] == ["orders", "orders-partition-2", *["orders"] * 4]
    assert sent[0].cancel.deliver_at == sent[3].reschedule.deliver_at == NOON_MILLIS
    assert (sent[5].retry.reason, sent[5].retry.after_millis) == ("no", 0)
    assert (list(sent[1].skip.entries[0].batch_indexes), sent[4].reschedule.deliver_at) == ([3], 0)


def answer(of: Any, *outcomes: ControlOutcome) -> Future[list[Outcome]]:
    """What a command is told after these outcomes, the last of which is its last."""
    fake: Any = FakePulsar()
    client = client_of(fake)
    assert client._broker is not None
    broker: Broker = client._broker
    future = broker.send(of)
    fake.outcomes += outcomes
    future.exception(5)
    client.close()
    return future


def test_a_command_is_answered_by_the_last_outcome_of_its_message() -> None:
    entry = command("skip", "orders", "7:0", "a", "mine")
    found = answer(
        entry,
        told(Result.APPLIED, "b"),
        told(Result.WAITING),
        told(Result.APPLIED, batch_index=0, has_more=True),
        told(Result.ALREADY_APPLIED, batch_index=1),
    )
    assert [(one.message.batch_index, one.result) for one in found.result()] == [(0, "APPLIED"), (1, "ALREADY_APPLIED")]
    one = command("skip", "orders", "7:0:1", "a", "mine")
    found = answer(one, told(Result.TOO_LATE, batch_index=1))
    assert isinstance(found.exception(), TooLate)
    whole = answer(one, told(Result.NOT_FOUND, "", ledger=-1))
    assert isinstance(whole.exception(), NotFound)
    waiting = answer(cancel("orders", "7:0", "a", "mine", NOON), told(Result.WAITING))
    assert [o.result for o in waiting.result()] == ["WAITING"]
