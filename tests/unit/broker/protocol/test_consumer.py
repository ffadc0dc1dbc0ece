"""A consumer with a share of a budget: when it asks the broker for more, and what becomes of its turn."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from broker.protocol import consumer as consumer_module
from broker.protocol.byte_budget import ByteBudget
from broker.protocol.connection import Connection
from broker.protocol.consumer import EntryConsumer
from broker.protocol.frames import Frame
from broker.protocol.session import DisconnectedError
from broker.protocol.wire.pulsar_pb2 import Command, LastMessageId
from tests.support.service.harness import wait_until

MIB = 1 << 20


class Broker:
    """A connection to a broker with one topic, which has entries up to `last`."""

    max_message_bytes = 5 * MIB

    def __init__(self) -> None:
        self.last = 0
        self.asked = 0  # for the last entry
        self.permits: dict[int, int] = {}  # by consumer
        self.attached: list[EntryConsumer] = []
        self.error: DisconnectedError | None = None

    def attach(self, consumer: EntryConsumer) -> int:
        self.attached.append(consumer)
        return len(self.attached) - 1

    def detach(self, own_id: int) -> None: ...

    def request(self, kind: Command.Type, name: str, **fields: Any) -> Any:
        if kind != Command.GET_LAST_MESSAGE_ID:
            return None
        self.asked += 1
        return LastMessageId(id={"ledger_id": 5, "entry_id": self.last & ((1 << 64) - 1)})

    def send(self, kind: Command.Type, **fields: Any) -> None:
        if self.error is not None:
            raise self.error
        flow = fields["flow"]
        self.permits[flow["consumer_id"]] = self.permits.get(flow["consumer_id"], 0) + flow["permits"]

    def deliver(self, consumer: EntryConsumer, entry: int, n_bytes: int) -> None:
        message = Command(type=Command.MESSAGE, message={"consumer_id": 0, "id": {"ledger_id": 5, "entry_id": entry}})
        consumer.received(Frame(message, b"x" * n_bytes))  # damaged, and an entry all the same

    def consumer(self, budget: ByteBudget) -> EntryConsumer:
        connection = cast(Connection, self)
        return EntryConsumer(connection, "t", "s", max_bytes=MIB, max_messages=1_000, share=budget.join())


def test_a_topic_with_a_backlog_waits_for_its_turn_and_one_without_does_not() -> None:
    broker, budget = Broker(), ByteBudget(5 * MIB, 1_000, 1_000)
    first, second = broker.consumer(budget), broker.consumer(budget)
    broker.last = -1
    third = broker.consumer(budget)
    assert broker.permits == {0: 1, 2: 1}
    assert [c.waits_for_turn for c in (first, second, third)] == [False, True, False]
    broker.deliver(third, 0, MIB)
    assert third.receive(0) is not None
    assert broker.permits == {0: 1, 2: 1}
    broker.deliver(first, 0, 4 * MIB)
    assert first.receive(0) is not None
    first.close()
    share = first._share
    assert share is not None
    assert share.handed == 4 * MIB, "whoever got it has it still"
    assert second.waits_for_turn
    share.leave()
    third._share.note(handed=0)  # type: ignore[union-attr]
    budget.wake()
    assert second.receive(0) is None
    assert broker.permits == {0: 1, 1: 1, 2: 1}
    assert not second.waits_for_turn


def test_who_waits_asks_when_its_turn_comes_and_does_not_ask_the_broker_meanwhile() -> None:
    broker, budget = Broker(), ByteBudget(5 * MIB, 1_000, 1_000)
    first, second = broker.consumer(budget), broker.consumer(budget)
    asked, came = broker.asked, []
    thread = threading.Thread(target=lambda: came.append(second.receive(20)))
    thread.start()
    assert first.receive(0.01) is None
    assert broker.asked == asked
    first.close()
    wait_until(lambda: broker.permits.get(1), 5, "its permit")
    broker.deliver(second, 1, 100)
    thread.join()
    assert came[0] is not None


def test_a_reservation_for_what_does_not_come_ends_and_the_permit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last entry of a topic may be a marker, which the broker does not send."""
    monkeypatch.setattr(consumer_module, "_SILENT_SECONDS", 0.0)
    broker, budget = Broker(), ByteBudget(5 * MIB, 1_000, 1_000)
    first, second = broker.consumer(budget), broker.consumer(budget)
    assert first.receive(0.01) is None
    assert second.waits_for_turn, "the entry may be on its way"
    broker.last = -1
    assert first.receive(0.01) is None
    broker.last = 7
    assert second.receive(0) is None
    assert broker.permits == {0: 1, 1: 1}
    third = broker.consumer(budget)
    assert third.waits_for_turn
    monkeypatch.setattr(consumer_module, "_MOST_SILENT_SECONDS", 0.0)
    assert second.receive(0.01) is None
    assert third.receive(0) is None
    assert broker.permits == {0: 1, 1: 1, 2: 1}


def test_a_broker_that_takes_long_to_say_where_a_topic_ends_keeps_no_reservation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(Broker):
        def request(self, kind: Command.Type, name: str, **fields: Any) -> Any:
            if kind == Command.GET_LAST_MESSAGE_ID:
                monkeypatch.setattr(consumer_module, "_MOST_SILENT_SECONDS", 0.0)  # so long does the answer take
            return super().request(kind, name, **fields)

    broker, budget = Slow(), ByteBudget(5 * MIB, 1_000, 1_000)
    first, second = broker.consumer(budget), broker.consumer(budget)
    monkeypatch.setattr(consumer_module, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(consumer_module, "_MOST_SILENT_SECONDS", 5.0)
    assert second.waits_for_turn
    assert first.receive(0) is None
    assert second.receive(0) is None
    assert broker.permits == {0: 1, 1: 1}


def test_who_needs_less_than_its_turn_wakes_the_next_one() -> None:
    broker, budget = Broker(), ByteBudget(5 * MIB, 1_000, 1_000)
    first, second, third = (broker.consumer(budget) for _ in range(3))
    woken = []
    third._share.on_turn = lambda: woken.append(third)  # type: ignore[union-attr]
    first.close()
    assert not woken
    second._flow._open = 1  # as when it has got permits since it began to wait
    second.receive(0)
    assert woken == [third]


def test_who_pauses_gives_up_its_turn_and_waits_for_another_later() -> None:
    broker, budget = Broker(), ByteBudget(5 * MIB, 1_000, 1_000)
    first, second, third = (broker.consumer(budget) for _ in range(3))
    second.pause()
    first.close()
    assert third.receive(0) is None
    assert broker.permits == {0: 1, 2: 1}
    assert second.receive(0) is None
    assert second.waits_for_turn
    third.close()
    assert second.receive(0) is None
    assert broker.permits == {0: 1, 1: 1, 2: 1}


@pytest.mark.slow
def test_a_connection_that_ends_with_thousands_that_wait_ends_all_of_them() -> None:
    broker, budget = Broker(), ByteBudget(5 * MIB, 1_000, 1_000)
    consumers = [broker.consumer(budget) for _ in range(3_000)]
    assert sum(consumer.waits_for_turn for consumer in consumers) == 2_999
    broker.error = DisconnectedError("the connection has ended")
    for consumer in consumers:
        consumer.disconnected(broker.error)
    for consumer in consumers:
        with pytest.raises(DisconnectedError):
            consumer.receive(0)
        consumer.close()
    assert budget.held_bytes == 0
    assert not budget._waiting
