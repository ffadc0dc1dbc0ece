"""What commands wait for, with receivers that are driven by hand."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from broker.position import START, Position, SourceTopic
from broker.pulsar_admin.topic_questions import Cursor
from streaming.checkpoint.offset import Offset
from streaming.source.barriers import Barriers
from streaming.source.receiving.receiver import Limits, Receiver, TopicAccess
from streaming.source.receiving.unreadable_messages import Acceptance
from tests.support.servers.fake_pulsar import FakeBroker, FakeConsumer, one
from tests.support.service.harness import wait_until

CONTROL, ORDERS = (f"persistent://public/default/{name}" for name in ("control", "orders"))


def receiver(topic: str, after: Position, end: Position) -> tuple[Receiver, FakeConsumer]:
    """One of a topic whose broker has sent all up to its end."""
    broker = FakeBroker()
    broker.cursor_of = lambda: Cursor(after, end.next, end, {end.ledger_id: end.entry_id + 1})
    made = Receiver(
        SourceTopic(topic, topic, -1),
        TopicAccess(lambda: FakeConsumer([]), broker),  # type: ignore[arg-type]
        after,
        Limits(1_000, 1 << 20),
        Acceptance(0, 1_000),
    )
    made._consumer = consumer = FakeConsumer([], end)
    return made, consumer


def test_an_entry_at_the_end_of_the_control_topic_that_no_consumer_gets_is_taken_once() -> None:
    """Expired, cleared or encrypted: it is in a batch, and none comes again and again because of it."""
    end = Position(3, 5)
    control, consumer = receiver(CONTROL, Position(3, 1), end)
    orders, _ = receiver(ORDERS, Position(1, 5), Position(1, 5))
    orders.wait_for(Position(1, 5), 0)
    barriers = Barriers({CONTROL: control, ORDERS: orders}, CONTROL, [ORDERS], ())
    assert control.topic_end() == end
    for _ in range(2):
        control.receive(consumer)  # nothing comes
    taken = barriers.take()
    assert taken is not None
    commands, ends = taken
    assert ends == {ORDERS: "1:5"}
    assert control.take_into_batch(1_000, 1 << 20, commands[CONTROL]) == (end, 1, 0)
    assert control.are_in_batches(end)
    assert barriers.take() is None

    consumer.script.extend(one(6, 3))
    control.receive(consumer)
    taken = barriers.take()
    assert taken is not None
    assert taken[0] == {CONTROL: Position(3, 6)}


def test_commands_of_a_source_topic_that_is_not_connected_wait_and_nothing_blocks() -> None:
    control, consumer = receiver(CONTROL, Position(3, 1), Position(3, 2))
    orders, _ = receiver(ORDERS, Position(1, 5), Position(1, 5))
    orders._consumer = None
    barriers = Barriers({CONTROL: control, ORDERS: orders}, CONTROL, [ORDERS], ())
    consumer.script.extend(one(2, 3))
    control.receive(consumer)
    assert barriers.take() is None
    barriers._silent_since[ORDERS] -= 60
    taken = barriers.take()
    assert taken == ({CONTROL: Position(3, 2)}, {ORDERS: None})
    offset = barriers.advance(Offset(), Offset(tick=7, positions={ORDERS: "1:5"}), taken[1])
    assert (offset.barriers, offset.ingested_through) == ([[7, {ORDERS: None}]], 0)


def with_a_late_answer() -> tuple[Barriers, Receiver, FakeConsumer, threading.Event]:
    """Barriers with a command, where the broker says where the source topic ends once the event is set.

    Returns:
        the barriers, the control topic's receiver and its consumer, and the event.
    """
    control, consumer = receiver(CONTROL, Position(3, 1), Position(3, 2))
    orders, orders_consumer = receiver(ORDERS, Position(1, 5), Position(1, 5))
    orders.wait_for(Position(1, 5), 0)
    answers = threading.Event()

    def last_entry() -> Position:
        assert answers.wait(60)
        return Position(1, 5)

    orders_consumer.last_entry = last_entry  # type: ignore[method-assign]
    barriers = Barriers({CONTROL: control, ORDERS: orders}, CONTROL, [ORDERS], ())
    consumer.script.extend(one(2, 3))
    control.receive(consumer)
    return barriers, control, consumer, answers


def test_a_broker_that_does_not_answer_where_a_topic_ends_holds_up_no_batch_and_commands_for_a_while() -> None:
    barriers, _, _, answers = with_a_late_answer()
    begun = time.monotonic()
    try:
        assert barriers.take() is None
        barriers._silent_since[ORDERS] -= 60
        taken = barriers.take()
        assert taken == ({CONTROL: Position(3, 2)}, {ORDERS: None})
        offset = barriers.advance(Offset(), Offset(tick=7, positions={ORDERS: "1:5"}), taken[1])
        for tick in range(8, 12):
            offset = barriers.advance(offset, Offset(tick=tick, positions={ORDERS: "1:5"}), None)
        assert (offset.barriers, offset.ingested_through) == ([[7, {ORDERS: None}]], 0)
        assert time.monotonic() - begun < 10
    finally:
        answers.set()
    # What was asked before says nothing of what has come since.
    wait_until(
        lambda: barriers.advance(offset, Offset(tick=12, positions={ORDERS: "1:5"}), None).barriers == [], 10, ""
    )


def test_commands_go_into_a_batch_when_a_late_answer_has_come() -> None:
    barriers, control, consumer, answers = with_a_late_answer()
    assert barriers.take() is None
    # One that comes after the question is for the next batch.
    consumer.script.extend(one(3, 3))
    control.receive(consumer)
    answers.set()
    taken = wait_until(barriers.take, 10, "the commands")
    assert taken == ({CONTROL: Position(3, 2)}, {ORDERS: "1:5"})
    assert wait_until(barriers.take, 10, "the last one") == ({CONTROL: Position(3, 3)}, {ORDERS: "1:5"})


def test_what_a_command_names_may_come_of_a_topic_that_can_only_be_looked_up_later() -> None:
    control, consumer = receiver(CONTROL, Position(3, 1), Position(3, 2))
    receivers = {CONTROL: control}
    looked_up: set[str] = set()
    barriers = Barriers(receivers, CONTROL, [ORDERS], looked_up)
    consumer.script.extend(one(2, 3))
    control.receive(consumer)
    taken = barriers.take()
    assert taken == ({CONTROL: Position(3, 2)}, {ORDERS: None})
    first = barriers.advance(Offset(), Offset(tick=7), taken[1])
    assert (first.barriers, first.ingested_through) == ([[7, {ORDERS: None}]], 0)

    partition = f"{ORDERS}-partition-0"
    found, _ = receiver(partition, Position(-1, -1), Position(1, 5))
    found.source = SourceTopic(partition, ORDERS, 0)
    receivers[partition] = found
    looked_up.add(ORDERS)
    second = barriers.advance(first, Offset(tick=8, positions={partition: "1:4"}), None)
    assert (second.barriers, second.ingested_through) == ([[7, {partition: "1:5"}]], 0)
    third = barriers.advance(second, Offset(tick=9, positions={partition: "1:5"}), None)
    assert (third.barriers, third.ingested_through) == ([], 7)


def test_the_partitions_that_have_a_position_are_not_all_while_their_topic_has_not_been_looked_up() -> None:
    """A skip of a message of the other one would be answered that there is none."""
    control, consumer = receiver(CONTROL, Position(3, 1), Position(3, 2))
    first_name, other_name = (f"{ORDERS}-partition-{i}" for i in range(2))
    known, _ = receiver(first_name, Position(1, 5), Position(1, 5))
    known.source = SourceTopic(first_name, ORDERS, 0)
    known.wait_for(Position(1, 5), 0)
    receivers = {CONTROL: control, first_name: known}
    looked_up: set[str] = set()
    barriers = Barriers(receivers, CONTROL, [ORDERS], looked_up)
    consumer.script.extend(one(2, 3))
    control.receive(consumer)
    taken = barriers.take()
    assert taken == ({CONTROL: Position(3, 2)}, {ORDERS: None, first_name: "1:5"})
    positions = {first_name: "1:5"}
    last = barriers.advance(Offset(barriers=[[6, {ORDERS: None}]]), Offset(tick=7, positions=positions), taken[1])
    assert last.barriers == [[6, {ORDERS: None}], [7, {ORDERS: None, first_name: "1:5"}]]

    other, _ = receiver(other_name, START, Position(2, 0))
    other.source = SourceTopic(other_name, ORDERS, 1)
    receivers[other_name] = other
    looked_up.add(ORDERS)
    last = barriers.advance(last, Offset(tick=8, positions=positions), None)
    assert last.ingested_through == 0
    last = barriers.advance(last, Offset(tick=9, positions=positions | {other_name: "2:0"}), None)
    assert (last.barriers, last.ingested_through) == ([], 7)


def test_a_topics_first_messages_are_passed_when_they_are_in_a_batch_and_not_when_they_have_come() -> None:
    """They may come while an offset is made, or wait because the senders are behind."""
    control, consumer = receiver(CONTROL, Position(3, 1), Position(3, 2))
    orders, orders_consumer = receiver(ORDERS, START, Position(1, 0))
    barriers = Barriers({CONTROL: control, ORDERS: orders}, CONTROL, [ORDERS], ())
    consumer.script.extend(one(2, 3))
    control.receive(consumer)
    assert barriers.take() is None
    assert barriers._waiting is not None
    barriers._waiting = replace(barriers._waiting, deadline=0.0)
    taken = barriers.take()
    assert taken == ({CONTROL: Position(3, 2)}, {ORDERS: "1:0"})

    orders_consumer.script.extend(one(0, 1))
    orders.receive(orders_consumer)
    first = barriers.advance(Offset(), Offset(tick=7), taken[1])
    assert (first.barriers, first.ingested_through) == ([[7, {ORDERS: "1:0"}]], 0)
    assert orders.take_into_batch(1_000, 1 << 20)[:2] == (Position(1, 0), 1)
    second = barriers.advance(first, Offset(tick=8, positions={ORDERS: "1:0"}), None)
    assert (second.barriers, second.ingested_through) == ([], 7)
