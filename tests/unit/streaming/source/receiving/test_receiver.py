"""What comes from a topic partition is received once, whole and none lost, whatever the connection does."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from itertools import cycle
from typing import Any

import pulsar
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streaming.source.receiving.receiver
from broker.position import START, EntrySet, Position
from broker.pulsar_admin.topic_questions import Cursor
from streaming.source.receiving import chunked_messages
from streaming.source.receiving.chunked_messages import ChunkedMessages
from streaming.source.receiving.receiver import Limits, Receiver
from tests.support.fuzzing.examples import examples
from tests.support.servers.fake_pulsar import FakeBroker, FakeConsumer, FakeId, FakeMessage, batch, one
from tests.support.service.harness import wait_until
from tests.support.service.receiver_harness import SOURCE, TOPIC, Harness
from tracker.messages import concat


def test_what_an_exception_interrupts_is_received_again_and_nothing_of_it_is_lost() -> None:
    harness = Harness()
    harness.receive([*one(0), *one(1), pulsar.ConnectError(), *one(0), *one(1), *one(2)])
    harness.take()
    assert harness.ids() == [(5, 0, -1), (5, 1, -1), (5, 2, -1)]


def test_a_reconnection_within_a_chunk_gives_each_message_once() -> None:
    harness = Harness()
    harness.receive([*one(0), *one(1), *batch(2, 3)[:2], *one(0), *one(1), *batch(2, 3), *one(3)])
    harness.take()
    assert harness.ids() == [(5, 0, -1), (5, 1, -1), (5, 2, 0), (5, 2, 1), (5, 2, 2), (5, 3, -1)]


def test_messages_that_come_some_milliseconds_apart_are_built_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeConsumer):
        def receive(self, timeout_millis: int) -> FakeMessage:
            if self.script and timeout_millis < 10:
                raise pulsar.Timeout
            return super().receive(timeout_millis)

    monkeypatch.setattr(streaming.source.receiving.receiver, "_CHUNK_SECONDS", 60)
    harness = Harness()
    harness.receiver.receive(Slow([*one(0), *one(1), *batch(2, 2)]))
    assert harness.take(max_messages=1).num_rows == 4, "one chunk, which a batch takes whole"


def test_an_entry_of_which_the_rest_does_not_come_is_not_taken_in_part() -> None:
    harness = Harness()
    harness.receive([*one(0), *batch(1, 3)[:2], pulsar.Timeout(), *one(0), *batch(1, 3)])
    harness.take()
    assert harness.ids() == [(5, 0, -1), (5, 1, 0), (5, 1, 1), (5, 1, 2)]


def test_an_acknowledgement_that_was_lost_brings_nothing_again() -> None:
    harness = Harness()
    harness.receive([*one(0), *one(1)])
    harness.take()
    harness.receiver.acknowledge(Position(5, 1))
    harness.receive([*one(0), *one(1), *one(2)])
    harness.take()
    assert harness.ids() == [(5, 0, -1), (5, 1, -1), (5, 2, -1)]


def test_an_acknowledgement_of_a_topics_last_entry_is_repeated_and_no_other() -> None:
    harness = Harness()
    harness.receive([*one(0), *one(1)])
    harness.take()
    consumer = FakeConsumer([])
    harness.receiver._consumer = consumer
    harness.receiver.acknowledge(Position(5, 1))
    harness.receiver.acknowledge_again(Position(5, 2))
    assert consumer.acknowledged == [(5, 1)], "the next one repeats it"
    harness.receiver.acknowledge_again(Position(5, 1))
    assert consumer.acknowledged == [(5, 1), (5, 1)]


@pytest.mark.slow
def test_without_room_for_long_the_consumer_is_closed_and_opened_again_when_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming.source.receiving.receiver, "_ROOM_SECONDS", 0.05)
    consumers: list[FakeConsumer] = []

    def subscribe() -> Any:
        consumers.append(FakeConsumer([*one(0), *one(1)][len(consumers) :]))
        return consumers[-1]

    limits = Limits(max_delay_millis=0, max_size=1_000, max_messages=1, max_bytes=1 << 20)
    broker: Any = FakeBroker()
    receiver = Receiver(
        SOURCE, subscribe, after=START, limits=limits, broker=broker, details=None, on_received=lambda: None
    )
    receiver.start()
    try:
        wait_until(lambda: receiver.waiting and receiver._consumer is None, 5, "the consumer is closed")
        assert len(consumers) == 1
        receiver.take_into_batch(10, 1_000)
        wait_until(lambda: receiver.last_received == Position(5, 1), 5, "the second message")
        assert len(consumers) == 2
    finally:
        receiver.stop()


# What the broker has: entries of 1 to 3 messages in ledgers, some of them gone.
topics = st.lists(st.tuples(st.integers(5, 7), st.integers(0, 12), st.integers(1, 3)), min_size=1, max_size=14).map(
    lambda entries: sorted({(ledger, entry): size for ledger, entry, size in entries}.items())
)


@given(topic=topics, seed=st.integers(0, 2**32))
@settings(max_examples=examples(200), deadline=None)
def test_each_message_is_in_one_batch_wherever_the_consumer_reconnects_repeats_and_reorders(
    topic: list[tuple[tuple[int, int], int]], seed: int
) -> None:
    """The consumer begins again at any entry that is not acknowledged, by itself or after an error, anywhere."""
    entries = [one(entry, ledger) if size == 1 else batch(entry, size, ledger) for (ledger, entry), size in topic]
    positions = [Position(*position) for position, _ in topic]
    harness, chance = Harness(), random.Random(seed)
    first = 0  # of the entries, that is not acknowledged
    while first < len(entries):
        script: list[FakeMessage | Exception] = []
        for _ in range(chance.randint(0, 3)):
            waiting = entries[first:]
            coming = [m for e in chance.sample(waiting, len(waiting)) for m in e]
            script += coming[: chance.randint(0, len(coming))]
            script += chance.choice([[], [pulsar.ConnectError()], [pulsar.Timeout()]])
        upto = chance.randint(first + 1, len(entries))
        in_order: list[FakeMessage | Exception] = [m for e in entries[first:upto] for m in e]
        harness.receive(script + in_order)
        if harness.ended:  # the rest of an entry has not come
            harness.receive(in_order)
        for _ in range(chance.randint(0, 3)):
            harness.take(chance.randint(1, 5))
        # A broker that sends in the topic's order has sent all before what is acknowledged.
        if positions[upto - 1] >= harness.position:
            harness.receiver.acknowledge(harness.position)
            first = bisect_right(positions, harness.position)
    harness.receive(one(0, 9))
    while harness.position < (9, 0):
        harness.take()
    expected = Counter((m.id.ledger, m.id.entry, m.id.index) for e in entries for m in e)
    assert Counter(harness.ids()) == expected + Counter([(9, 0, -1)])


@given(topic=topics, data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_a_run_that_follows_begins_after_the_last_batch_of_the_one_before(
    topic: list[tuple[tuple[int, int], int]], data: st.DataObject
) -> None:
    entries = [(one(entry, ledger) if size == 1 else batch(entry, size, ledger)) for (ledger, entry), size in topic]
    messages = [m for e in entries for m in e]
    before = Harness()
    before.receive(messages)
    before.take(data.draw(st.integers(1, len(messages))))
    after = Harness(before.position)
    after.receive(messages)
    after.take()
    assert Counter(before.ids() + after.ids()) == Counter((m.id.ledger, m.id.entry, m.id.index) for m in messages)
    again = Harness()
    again.receive(messages)
    replayed = again.receiver.rows(START, before.position, 0)
    assert replayed.equals(concat(before.taken)), "a batch that is read again is the same"


def test_entries_are_found_in_any_order_they_are_added() -> None:
    entries = EntrySet()
    added = [(5, 3), (5, 4), (6, 0), (5, 1), (5, 0), (6, 1)]
    for position in added:
        assert Position(*position) not in entries
        entries.add(Position(*position))
        assert Position(*position) in entries
    assert Position(5, 2) not in entries
    assert Position(6, 2) not in entries
    assert entries.gaps(Position(5, 0)) == [((5, 1), (5, 3)), ((5, 4), (6, 0))]
    assert entries.gaps(Position(5, 4)) == [((5, 4), (6, 0))]
    entries.forget(Position(5, 3))
    assert Position(5, 1) not in entries
    assert Position(5, 3) in entries


class TestWhatNoConsumerGets:
    """Expired, skipped and aborted entries at the end of a topic."""

    def harness(self, next_read: Position, end: Position) -> Harness:
        harness = Harness()
        harness.broker.cursor_of = lambda: Cursor(START, next_read, end, {5: end.entry_id + 1})
        return harness

    def test_all_is_read_when_the_broker_has_sent_it_and_nothing_comes(self) -> None:
        end = Position(5, 9)
        harness = self.harness(Position(5, 10), end)
        harness.receive(one(3), end)
        assert harness.receiver.topic_end() == end
        assert not harness.receiver.wait_for(end, 0)
        harness.receive([], end)
        assert harness.receiver.wait_for(end, 0)
        assert harness.receiver.waiting == 2, "what was passed over is to get into a batch"
        assert harness.take().num_rows == 1
        assert harness.position == end
        assert harness.receiver.are_in_batches(end)

    def test_what_comes_after_all_is_taken(self) -> None:
        end = Position(5, 9)
        harness = self.harness(Position(5, 10), end)
        harness.receiver._await_entry(end)
        harness.receive([], end)
        harness.take()
        harness.receive([*one(9), *one(10)])
        harness.take()
        assert harness.ids() == [(5, 9, -1), (5, 10, -1)]

    def test_nothing_is_passed_over_that_the_broker_has_still_to_send(self) -> None:
        end = Position(5, 9)
        harness = self.harness(end, end)
        harness.receiver._await_entry(end)
        harness.receive([], end)
        assert not harness.receiver.wait_for(end, 0)

    def test_nothing_is_passed_over_while_the_connection_changes_or_the_broker_is_silent(self) -> None:
        end = Position(5, 9)
        harness = self.harness(Position(5, 10), end)
        harness.receiver._await_entry(end)
        answers = cycle(["here", "there"])
        harness.broker.connection = lambda topic: next(answers)
        harness.receive([], end)
        assert not harness.receiver.wait_for(end, 0)
        silent = self.harness(Position(5, 10), end)
        silent.broker.is_down = True
        assert not silent.receiver.wait_for(end, 0)
        silent.receive([], end)
        assert not silent.receiver.wait_for(end, 0)

    def test_nothing_is_passed_over_at_once(self) -> None:
        end = Position(5, 9)
        harness = self.harness(Position(5, 10), end)
        harness.receiver._await_entry(end)
        consumer: Any = FakeConsumer([])

        def idle(address: str = "here") -> bool:
            harness.broker.address = address
            harness.receiver.receive(consumer)
            return harness.receiver.wait_for(end, 0)

        assert not idle()
        assert not idle("there"), "the connection is another than in the round before"
        consumer.script.extend(one(3))
        assert not idle("there"), "something came"
        assert not idle("there")
        assert idle("there")
        assert harness.take()["entry_id"].to_pylist() == [3]

    def test_what_is_wanted_more_and_more_passes_a_round_later(self) -> None:
        harness = self.harness(Position(5, 10), Position(5, 9))
        consumer: Any = FakeConsumer([])
        read = []
        for entry in (7, 8, 9):
            harness.receiver._await_entry(Position(5, entry))
            harness.receiver.receive(consumer)
            read.append([n for n in (7, 8, 9) if harness.receiver.read_to >= (5, n)])
        assert read == [[], [7], [7, 8]]

    def test_what_comes_after_it_was_passed_over_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        end = Position(5, 9)
        harness = self.harness(Position(5, 10), end)
        harness.receiver._await_entry(end)
        harness.receive([], end)
        harness.take()
        harness.receive(one(9))
        assert "entry 5:9 came after the batches had passed it" in caplog.text
        harness.receive(one(10))
        harness.take()
        assert harness.ids() == [(5, 9, -1), (5, 10, -1)]

    def test_a_topic_that_ends_before_what_is_wanted_was_read(self) -> None:
        harness = self.harness(Position(5, 10), Position(5, 9))
        harness.receiver._await_entry(Position(5, 20))
        harness.receive([], Position(5, 9))
        assert harness.receiver.rows(START, Position(5, 20), 0).num_rows == 0


def chunked(first: int, last: int) -> list[FakeMessage]:
    """A message whose first chunk is one entry and whose last is another."""
    return [FakeMessage(FakeId(5, last, first_chunk=Position(5, first)))]


class TestChunkedMessages:
    def harness(self, *first_chunks: int) -> Harness:
        harness = Harness()
        harness.broker.cursor_of = lambda: Cursor(START, START, START, {5: 100})
        harness.broker.chunks = {Position(5, entry) for entry in first_chunks}
        return harness

    def acknowledged(self, harness: Harness, entry: int) -> list[Position]:
        consumer = FakeConsumer([])
        harness.receiver._consumer = consumer
        harness.receiver.acknowledge(Position(5, entry))
        return consumer.acknowledged

    def test_the_first_chunk_of_a_message_that_is_not_whole_is_not_acknowledged(self) -> None:
        harness = self.harness(1)
        harness.receive([*one(0), *one(2), *one(3)])
        assert self.acknowledged(harness, 2) == [(5, 0)]
        assert self.acknowledged(harness, 3) == []
        harness.receive([*chunked(1, 4), *one(5)])
        assert self.acknowledged(harness, 3) == [], "the message is not in what is acknowledged"
        assert self.acknowledged(harness, 4) == [(5, 4)]

    def test_messages_in_chunks_that_lie_in_each_other_are_each_kept_until_they_are_whole(self) -> None:
        harness = self.harness(1, 2)
        harness.receive([*one(0), *one(3)])
        assert self.acknowledged(harness, 3) == [(5, 0)]
        harness.receive(chunked(1, 5))
        assert self.acknowledged(harness, 5) == []
        harness.receive([*chunked(2, 6), *one(7)])
        assert self.acknowledged(harness, 7) == [(5, 7)]

    def test_a_message_that_never_gets_whole_holds_up_nothing_for_ever(self) -> None:
        now = 0.0
        broker: Any = FakeBroker()
        broker.cursor_of = lambda: Cursor(START, START, START, {5: 100})
        broker.chunks = {Position(5, 1)}
        messages = ChunkedMessages(TOPIC, broker, lambda: now)
        gaps = [(Position(5, 0), Position(5, 2))]
        assert messages.limit(Position(5, 2), gaps) == (5, 0)
        now = 60.0
        assert messages.limit(Position(5, 3), gaps) == (5, 0)
        now = 600.0
        assert messages.limit(Position(5, 4), gaps) == (5, 4)

    def test_a_run_that_follows_knows_what_was_not_whole_before_it(self) -> None:
        before = self.harness(1)
        before.receive([*one(0), *one(2)])
        before.take()
        after = Harness(before.position, before.broker)
        after.broker.cursor_of = lambda: Cursor(Position(5, 0), START, START, {5: 100})
        after.receive([*one(2), *one(3)])
        after.take()
        assert self.acknowledged(after, 3) == []
        after.receive(chunked(1, 4))
        after.take()
        assert after.ids() == [(5, 3, -1), (5, 4, -1)]
        assert self.acknowledged(after, 4) == [(5, 4)]

    def test_nothing_beyond_a_gap_is_acknowledged_while_the_broker_does_not_say_what_is_in_it(self) -> None:
        harness = self.harness()
        harness.receive([*one(0), *one(2)])
        harness.broker.is_down = True
        assert self.acknowledged(harness, 2) == []
        harness.broker.is_down = False
        assert self.acknowledged(harness, 2) == [(5, 2)]

    def test_the_broker_is_asked_once_of_each_missing_entry(self) -> None:
        harness = self.harness()
        harness.receive([*one(0), *one(4), *one(5), *one(0, ledger=8)])
        for _ in range(3):
            self.acknowledged(harness, 5)
        assert harness.broker.questions == [(5, 1), (5, 2), (5, 3)]

    def test_ten_times_as_many_first_chunks_as_are_asked_about_at_once_hold_up_nothing_for_ever(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunked_messages, "_MAX_QUESTIONS", 20)
        now = 0.0
        broker: Any = FakeBroker()
        broker.cursor_of = lambda: Cursor(START, START, START, {5: 1_000})
        broker.chunks = {Position(5, entry) for entry in range(200)}
        messages = ChunkedMessages(TOPIC, broker, lambda: now)
        gaps = [(Position(5, -1), Position(5, 200))]
        most = 0
        for _ in range(40):
            last = messages.limit(Position(5, 200), gaps)
            most = max(most, len(messages._begun))
            now += 30.0
        assert last == (5, 200)
        assert most <= 4 * 20  # those of 90 s
        assert len(messages._begun) == 0
