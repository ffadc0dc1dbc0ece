"""What comes from a topic partition is received once, whole and none lost, whatever the connection does."""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streaming.source.receiving.receiver
from broker.position import START, EntrySet, Position
from broker.protocol.byte_budget import ByteBudget
from broker.protocol.chunks import ChunkAssembler
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.entries import NOT_DECRYPTED, EntryError, Envelope
from broker.protocol.session import DisconnectedError
from broker.pulsar_admin.topic_questions import Cursor
from streaming.source.receiving.receiver import Limits, Receiver, TopicAccess
from streaming.source.receiving.unreadable_messages import Acceptance
from tests.support.fuzzing.examples import examples
from tests.support.servers.fake_pulsar import FakeBroker, FakeConsumer, batch, chunk, messages_in, one
from tests.support.service.harness import wait_until
from tests.support.service.receiver_harness import SOURCE, Harness
from tracker.messages import concat


def test_what_an_exception_interrupts_is_received_again_and_nothing_of_it_is_lost() -> None:
    harness = Harness()
    harness.receive([*one(0), *one(1), DisconnectedError("gone"), *one(0), *one(1), *one(2)])
    harness.take()
    assert harness.ids() == [(5, 0, -1), (5, 1, -1), (5, 2, -1)]


def test_a_reconnection_within_a_chunk_gives_each_message_once() -> None:
    harness = Harness()
    harness.receive([*one(0), *one(1), *one(0), *one(1), *batch(2, 3), *one(3)])
    harness.take()
    assert harness.ids() == [(5, 0, -1), (5, 1, -1), (5, 2, 0), (5, 2, 1), (5, 2, 2), (5, 3, -1)]


def test_messages_that_come_some_milliseconds_apart_are_built_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeConsumer):
        def receive(self, timeout_seconds: float) -> ReceivedEntry | None:
            return None if self.script and timeout_seconds < 0.01 else super().receive(timeout_seconds)

    monkeypatch.setattr(streaming.source.receiving.receiver, "_SECONDS_AT_ONCE", 60)
    harness = Harness()
    harness.receiver.receive(Slow([*one(0), *one(1), *batch(2, 2)]))
    assert harness.take(max_messages=1).num_rows == 4, "one chunk, which a batch takes whole"


def test_what_is_waited_for_is_kept_as_soon_as_it_has_come_and_not_with_what_follows() -> None:
    harness = Harness()
    consumer = FakeConsumer([*one(0), *one(1), *one(2), *one(3)], end=Position(5, 1))
    harness.receiver._consumer = consumer
    assert harness.receiver.topic_end() == (5, 1)
    harness.receiver.receive(consumer)
    assert harness.receiver.read_to == (5, 1)
    harness.receiver.receive(consumer)
    assert harness.receiver.read_to == (5, 3), "nobody waits any more"


def test_a_receiver_waits_for_the_next_entry_for_as_long_as_its_limits_say() -> None:
    waits: list[float] = []

    class Asked(FakeConsumer):
        def receive(self, timeout_seconds: float) -> ReceivedEntry | None:
            waits.append(timeout_seconds)
            return super().receive(timeout_seconds)

    broker: Any = FakeBroker()
    limits = Limits(1_000, 1 << 20, next_seconds=0.001)
    receiver = Receiver(SOURCE, TopicAccess(lambda: Asked([]), broker), START, limits, Acceptance(0, 1_000))
    receiver.receive(Asked([*one(0), None, None]))
    assert waits[1:] == [0, 0.001]
    assert receiver.waiting == 1


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
def test_without_room_nothing_is_received_and_no_chunked_message_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = FakeConsumer([*chunk(0, "u", 0, 2), *one(1), *one(2), *chunk(3, "u", 1, 2), *one(4)])
    broker: Any = FakeBroker()
    access = TopicAccess(lambda: consumer, broker)
    receiver = Receiver(SOURCE, access, START, Limits(2, 1 << 20), Acceptance(0, 1_000))
    receiver._chunked._max_seconds = 0.05
    receiver.start()
    try:
        wait_until(lambda: receiver.waiting == 2, 5, "two messages")
        time.sleep(0.1)  # longer than chunks may take
        assert receiver.last_received == Position(5, 2)
        receiver.take_into_batch(10, 1_000)
        wait_until(lambda: receiver.last_received == Position(5, 4), 5, "the others, with the chunked one")
    finally:
        receiver.stop()
    assert receiver.rows(START, Position(5, 4), 0)["entry_id"].to_pylist() == [1, 2, 3, 4]


def test_a_batch_without_room_takes_nothing() -> None:
    harness = Harness()
    harness.receive([*one(0), *one(1)])
    assert harness.receiver.take_into_batch(0, 1 << 30)[1:] == (0, 0)
    assert harness.receiver.take_into_batch(10, 0)[1:] == (0, 0)
    assert harness.receiver.waiting == 2
    assert harness.take().num_rows == 2


def test_what_is_kept_counts_until_its_batch_is_committed_and_nothing_after_a_stop() -> None:
    share = ByteBudget(1 << 20, 1 << 20, 1 << 20).join()
    harness = Harness(share=share)
    share.note(handed=500)
    harness.receive([*one(0, payload=b"x" * 400), *chunk(1, "u", 0, 2)])
    assert share.handed == 0
    assert 400 < share.kept < 1_000
    harness.take()
    assert share.held_bytes == 0
    harness.receiver.stop()
    harness.receive(one(2))
    assert share.held_bytes == 0
    assert not share.reserve(100)


def test_a_receiver_is_not_idle_while_its_consumer_waits_for_a_turn_and_does_not_look_for_an_end() -> None:
    budget = ByteBudget(1_000, 100, 100)
    other, share = budget.join(), budget.join()
    assert other.reserve(1_000)
    assert not share.reserve(500)
    harness = Harness(share=share)
    consumer = harness.receive([])
    assert harness.receiver.is_idle
    consumer._share = share
    assert not harness.receiver.is_idle, "at once: a new consumer may begin with waiting"
    harness.broker.cursor_of = lambda: pytest.fail("the broker is asked")
    harness.receiver._await_entry(Position(5, 1))
    harness.receiver.receive(consumer)
    assert not harness.receiver.is_idle
    assert harness.receiver.waits_for_turn
    other.leave()
    assert share.reserve(500)
    harness.broker.cursor_of = lambda: Cursor(START, START, START, {})
    harness.receiver.receive(consumer)
    assert harness.receiver.is_idle
    harness.receiver._close()
    assert not harness.receiver.is_idle, "the next consumer has not asked for messages yet"


@pytest.mark.parametrize("comes_with_turn", [False, True])
def test_no_chunked_message_is_given_up_for_the_time_in_which_a_turn_was_waited_for(
    comes_with_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(streaming.source.receiving.receiver, "time", SimpleNamespace(monotonic=lambda: now))
    budget = ByteBudget(1_000, 100, 100)
    other, share = budget.join(), budget.join()
    harness = Harness(share=share)
    harness.receive(chunk(0, "u", 0, 2))
    assert other.reserve(1_000)
    assert not share.reserve(500)

    class Waiting(FakeConsumer):
        def receive(self, timeout_seconds: float) -> ReceivedEntry | None:
            nonlocal now
            if share.is_waiting:
                now += 100  # seconds, of which chunks have 90
                other.leave()
                assert share.reserve(500), "its turn has come while it waited"
                return super().receive(0) if comes_with_turn else None
            return super().receive(timeout_seconds)

    consumer = Waiting([*chunk(1, "u", 1, 2)])
    consumer._share = share
    while consumer.script:
        harness.receiver.receive(consumer)
    assert harness.take()["entry_id"].to_pylist() == [1]


@pytest.mark.parametrize(("steps", "seconds", "comes"), [(1, 100, True), (19, 5, False), (17, 5, True)])
def test_a_chunked_message_is_given_up_after_a_minute_and_a_half_but_not_for_the_time_in_which_the_job_stood_still(
    steps: int, seconds: int, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(streaming.source.receiving.receiver, "time", SimpleNamespace(monotonic=lambda: now))
    harness = Harness()
    harness.receive(chunk(0, "u", 0, 2))
    for _ in range(steps):
        now += seconds
        harness.receiver.receive(FakeConsumer([None]))
    harness.receive(chunk(1, "u", 1, 2))
    assert harness.take()["entry_id"].to_pylist() == [1] * comes


def test_a_chunked_message_is_whole_whose_last_chunk_comes_with_other_entries_after_the_job_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(streaming.source.receiving.receiver, "time", SimpleNamespace(monotonic=lambda: now))
    harness = Harness()
    harness.receive(chunk(0, "u", 0, 2))

    class Paused(FakeConsumer):
        def receive(self, timeout_seconds: float) -> ReceivedEntry | None:
            nonlocal now
            now += 100 * (len(self.script) == 1)
            return super().receive(timeout_seconds)

    consumer = Paused([*one(1), *chunk(2, "u", 1, 2)])
    while consumer.script:
        harness.receiver.receive(consumer)
    assert harness.take()["entry_id"].to_pylist() == [1, 2]


@pytest.mark.slow
def test_who_waits_for_an_entry_has_it_hurried_meanwhile() -> None:
    budget = ByteBudget(1_000, 100, 100)
    other, share = budget.join(), budget.join()
    harness = Harness(share=share)
    assert other.reserve(1_000)
    assert not share.reserve(500)
    assert not harness.receiver.wait_for(Position(5, 1), 0.01)
    assert share.reserve(500), "its turn came at once"
    assert not share.reserve(600), "and it is one among others again"


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
        script: list[ReceivedEntry | Exception | None] = []
        for _ in range(chance.randint(0, 3)):
            waiting = entries[first:]
            coming = [m for e in chance.sample(waiting, len(waiting)) for m in e]
            script += coming[: chance.randint(0, len(coming))]
            script += chance.choice([[], [DisconnectedError("gone")], [None]])
        upto = chance.randint(first + 1, len(entries))
        in_order: list[ReceivedEntry | Exception | None] = [m for e in entries[first:upto] for m in e]
        harness.receive(script + in_order)
        for _ in range(chance.randint(0, 3)):
            harness.take(chance.randint(1, 5))
        # A broker that sends in the topic's order has sent all before what is acknowledged.
        if positions[upto - 1] >= harness.position:
            harness.receiver.acknowledge(harness.position)
            first = bisect_right(positions, harness.position)
    harness.receive(one(0, 9))
    while harness.position < (9, 0):
        harness.take()
    expected = Counter(messages_in(m for e in entries for m in e))
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
    assert Counter(before.ids() + after.ids()) == Counter(messages_in(messages))
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

    def test_nothing_is_passed_over_while_the_consumer_changes_or_the_broker_is_silent(self) -> None:
        end = Position(5, 9)
        harness = self.harness(Position(5, 10), end)
        harness.receiver._await_entry(end)
        for _ in range(3):
            harness.receiver.receive(FakeConsumer([], end))
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
        here, there = FakeConsumer([], end), FakeConsumer([], end)

        def idle(consumer: FakeConsumer) -> bool:
            harness.receiver.receive(consumer)
            return harness.receiver.wait_for(end, 0)

        assert not idle(here)
        assert not idle(there), "the consumer is another than in the round before"
        there.script.extend(one(3))
        assert not idle(there), "something came"
        assert not idle(there)
        assert idle(there)
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


class TestChunkedMessages:
    def acknowledged(self, harness: Harness, entry: int) -> list[Position]:
        consumer = FakeConsumer([])
        harness.receiver._consumer = consumer
        harness.receiver.acknowledge(Position(5, entry))
        return consumer.acknowledged

    def test_a_message_comes_with_its_last_chunk_and_with_all_its_bytes(self) -> None:
        harness = Harness()
        harness.receive(
            [
                *chunk(0, "a", 0, 3, payload=b"1"),
                *chunk(1, "b", 0, 2, payload=b"x"),
                *chunk(2, "a", 1, 3, payload=b"2"),
                *chunk(3, "b", 1, 2, payload=b"y"),
                *chunk(4, "a", 2, 3, payload=b"3"),
            ]
        )
        rows = harness.take()
        assert rows["payload"].to_pylist() == [b"xy", b"123"]
        assert rows["entry_id"].to_pylist() == [3, 4]

    def test_chunks_that_come_again_are_passed_over_and_no_message_comes_twice(self) -> None:
        harness = Harness()
        first, last = chunk(0, "a", 0, 2, payload=b"1"), chunk(2, "a", 1, 2, payload=b"2")
        harness.receive([*first, *one(1), DisconnectedError("gone"), *first, *one(1), *last])
        harness.receive([*first, *one(1), *last, *one(3)])
        assert harness.take()["payload"].to_pylist() == [b"x", b"12", b"x"]

    def test_the_first_chunk_of_a_message_that_is_not_whole_is_not_acknowledged(self) -> None:
        harness = Harness()
        harness.receive([*one(0), *chunk(1, "a", 0, 2), *one(2), *one(3)])
        assert self.acknowledged(harness, 2) == [(5, 0)]
        assert self.acknowledged(harness, 3) == []
        harness.receive([*chunk(4, "a", 1, 2), *one(5)])
        assert self.acknowledged(harness, 3) == [], "the message is not in what is acknowledged"
        assert self.acknowledged(harness, 4) == [(5, 4)]

    def test_messages_in_chunks_that_lie_in_each_other_are_each_kept_until_they_are_whole(self) -> None:
        harness = Harness()
        harness.receive([*one(0), *chunk(1, "a", 0, 2), *chunk(2, "b", 0, 2), *one(3)])
        assert self.acknowledged(harness, 3) == [(5, 0)]
        harness.receive(chunk(5, "a", 1, 2))
        assert self.acknowledged(harness, 5) == [(5, 1)], "which is the first chunk of no message that is not durable"
        harness.receive([*chunk(6, "b", 1, 2), *one(7)])
        assert self.acknowledged(harness, 7) == [(5, 7)]

    def test_a_message_that_never_gets_whole_holds_up_nothing_for_ever_and_is_named(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        harness = Harness()
        harness.receive([*one(0), *chunk(1, "a", 0, 2), *one(2)])
        assert self.acknowledged(harness, 2) == [(5, 0)]
        harness.receiver._chunked._max_seconds = -1.0
        harness.receive(one(3))
        assert "a chunked message that begins with 5:1" in caplog.text
        assert self.acknowledged(harness, 3) == [(5, 3)]

    def test_what_follows_it_is_acknowledged_also_where_nothing_more_comes(self) -> None:
        harness = Harness()
        harness.receive([*one(0), *chunk(1, "a", 0, 2), *one(2)])
        assert self.acknowledged(harness, 2) == [(5, 0)]
        harness.receiver._chunked._max_seconds = -1.0
        consumer = harness.receive([])
        assert consumer.acknowledged == [(5, 2)]

    def test_it_is_given_up_also_where_the_topic_is_never_idle(self) -> None:
        harness = Harness()
        harness.receive([*one(0), *chunk(1, "a", 0, 2), *one(2)])
        harness.receiver._chunked._max_seconds = -1.0
        consumer = FakeConsumer([*one(3), *one(4)])
        harness.receiver.receive(consumer)
        assert harness.receiver._chunked.may_be_acknowledged is None

    def test_a_new_consumer_gets_all_chunks_again_and_they_have_all_the_time_again(self) -> None:
        chunks = ChunkAssembler(1 << 20, 1 << 20, max_seconds=90.0)
        [first], [last] = chunk(0, "a", 0, 2, payload=b"1"), chunk(1, "a", 1, 2, payload=b"2")
        for entry, now in ((first, 0.0), (last, 150.0)):
            assert isinstance(entry.envelope, Envelope)
            chunks.begin_anew(now)
            whole = chunks.add(entry.position, START, entry.envelope.metadata, entry.envelope.payload, now)
        assert whole is not None
        assert whole.payload == b"12"

    def test_a_run_that_follows_gets_what_was_not_whole_before_it(self) -> None:
        before = Harness()
        before.receive([*one(0), *chunk(1, "a", 0, 2, payload=b"1"), *one(2)])
        before.take()
        after = Harness(before.position, before.broker)
        assert self.acknowledged(after, 2) == [], "the first chunk has not come to this run yet"
        after.receive([*chunk(1, "a", 0, 2, payload=b"1"), *one(2), *one(3)])
        assert self.acknowledged(after, 3) == []
        after.receive(chunk(4, "a", 1, 2, payload=b"2"))
        assert after.take()["payload"].to_pylist() == [b"x", b"12"]
        assert after.ids() == [(5, 3, -1), (5, 4, -1)]
        assert self.acknowledged(after, 4) == [(5, 4)]

    def test_a_message_with_too_many_bytes_is_rejected_when_its_last_chunk_has_come(self) -> None:
        harness = Harness()
        harness.receiver._chunked._max_bytes = 10
        parts = [part for n in range(4) for part in chunk(n, "a", n, 4, payload=b"1234")]
        harness.receive([*parts, *one(4)])
        rows = harness.take()
        assert rows["entry_id"].to_pylist() == [3, 4]
        assert "more than may wait" in rows["reason"][0].as_py()
        assert rows["reason"][1].as_py() is None


def test_a_damaged_entry_is_put_aside_with_its_bytes_and_no_other_is_lost() -> None:
    error = EntryError("its checksum is wrong")
    error.raw = b"raw"
    damaged = ReceivedEntry(Position(5, 1), error, (), 1, 3)
    harness = Harness()
    harness.receive([*one(0), damaged, *one(2)])
    rows = harness.take()
    assert harness.ids() == [(5, 0, -1), (5, 1, -1), (5, 2, -1)]
    assert rows["reason"].to_pylist() == [None, "its checksum is wrong", None]
    assert rows["payload"].to_pylist() == [b"x", b"raw", b"x"]


def test_of_a_batch_what_somebody_else_acknowledged_is_put_aside() -> None:
    [entry] = batch(0, 3)
    harness = Harness()
    harness.receive([entry._replace(ack_set=(0b101,)), *one(1)])
    reasons = harness.take()["reason"].to_pylist()
    assert [reason is None for reason in reasons] == [True, False, True, True]
    assert "somebody else acknowledged it" in reasons[1]


def test_what_another_cluster_sent_is_left_out_without_its_bytes() -> None:
    [foreign] = one(0, props={"deliverAt": "soon"})
    assert isinstance(foreign.envelope, Envelope)
    foreign.envelope.metadata.replicated_from = b"east"
    harness = Harness(takes_replicated=False)
    harness.receive([foreign, *one(1)])
    rows = harness.take()
    assert rows["reason"].to_pylist() == ["replicated from east", None]
    assert rows["payload"].to_pylist() == [None, b"x"]


def test_a_batch_that_cannot_be_read_is_rejected_message_by_message_and_leaves_no_gap_in_the_indexes() -> None:
    [entry] = batch(1, 3)
    assert isinstance(entry.envelope, Envelope)
    entry.envelope.metadata.encryption_keys.add(name=b"theirs", value=b"?")
    indexed = entry._replace(envelope=entry.envelope._replace(last_index=8))
    harness = Harness()
    harness.receive([*one(0), indexed, *one(2)])
    rows = harness.take()
    assert harness.ids() == [(5, 0, -1), (5, 1, 0), (5, 1, 1), (5, 1, 2), (5, 2, -1)]
    assert rows["reason"].to_pylist() == [None, *[NOT_DECRYPTED] * 3, None]
    assert rows["payload"].to_pylist() == [b"x", entry.envelope.payload, None, None, b"x"]
    assert rows["first_index"].to_pylist()[1:4] == [6, 6, 6]
    assert rows["batch_size"].to_pylist()[1:4] == [3, 3, 3]


def test_a_batch_that_says_that_it_has_millions_of_messages_is_one_rejected_message() -> None:
    [entry] = batch(0, 1)
    assert isinstance(entry.envelope, Envelope)
    entry.envelope.metadata.n_messages = 2**31 - 1
    harness = Harness()
    harness.receive([entry, *one(1)])
    assert harness.take()["reason"].to_pylist() == ["it is a batch of 2147483647 messages", None]
