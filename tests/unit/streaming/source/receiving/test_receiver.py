"""What comes from a topic partition is received once, whole and none lost, whatever the connection does."""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pulsar
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streaming.source.receiving.receiver
from broker.clusters.replication import SOURCE_POSITION
from broker.position import START, EntrySet, Position, SourceTopic
from broker.pulsar_admin.topic_questions import Cursor
from streaming.source.receiving.chunked_messages import ChunkedMessages
from streaming.source.receiving.details import NotKnownYetError
from streaming.source.receiving.receiver import Limits, Receiver
from tests.support.fuzzing.examples import examples
from tests.support.servers.fake_pulsar import FakeBroker, FakeConsumer, FakeId, FakeMessage, NoUtf8, batch, one
from tests.support.service.harness import wait_until
from tracker.messages import concat
from tracker.properties.schedule import MAX_TIME_MILLIS
from warehouse.message_schemas import MessageSchema

TOPIC = "persistent://public/default/t"
SOURCE = SourceTopic(TOPIC, TOPIC, -1)

Script = Sequence[FakeMessage | Exception]


class Harness:
    """A receiver that is driven by hand, and what is taken of it, batch after batch."""

    def __init__(
        self, after: Position = START, broker: FakeBroker | None = None, max_size: int = 1_000, details: Any = None
    ) -> None:
        self.broker: Any = broker or FakeBroker()
        limits = Limits(max_delay_millis=0, max_size=max_size, max_messages=1_000, max_bytes=1 << 20)
        consumers: Any = FakeConsumer
        side: Any = self.broker
        self.receiver = Receiver(
            SOURCE,
            consumers,
            after=after,
            limits=limits,
            broker=side,
            details=details,
            on_received=lambda: None,
        )
        self.taken: list[pa.Table] = []
        self.position = after

    def receive(self, script: Script, end: Position = START) -> FakeConsumer:
        """Receives all of a script; an exception in it ends the connection, and what follows is of the next one."""
        consumer = FakeConsumer(script, end)
        self.receiver._consumer = consumer
        self.ended = False  # whether the connection has ended with the script
        while consumer.script:
            try:
                self.receiver.receive(consumer)
                self.ended = False
            except pulsar.PulsarException:
                self.ended = True
        for _ in range(2):  # what is passed over has to be idle twice
            self.receiver.receive(consumer)
        return consumer

    def take(self, max_messages: int = 1_000_000) -> pa.Table:
        end, _, _ = self.receiver.cut(max_messages, 1 << 30)
        rows = self.receiver.rows(self.position, end, 0)
        self.receiver.forget(end)
        self.position = end
        self.taken.append(rows)
        return rows

    def ids(self) -> list[tuple[int, int, int]]:
        rows = concat(self.taken)
        return list(zip(*(rows[c].to_pylist() for c in ("ledger_id", "entry_id", "batch_index")), strict=True))


def rows_of(script: Script, max_size: int = 1_000) -> list[dict[str, Any]]:
    harness = Harness(max_size=max_size)
    harness.receive(script)
    rows: list[dict[str, Any]] = harness.take().to_pylist()
    return rows


@pytest.mark.parametrize(
    "fields",
    [
        {"props": {"scheduleKey": ""}},
        {"props": {"repeat": "every day"}},
        {"props": {}, "happened": -1},
        {"props": {}, "payload": b"x" * 1_001},
    ],
)
def test_what_is_rejected_is_due_at_once_and_not_when_it_was_to_be_delivered(fields: dict[str, Any]) -> None:
    """Its release would be sent then, and keep a lane until then."""
    fields["props"] |= {"deliverAt": str(MAX_TIME_MILLIS)}
    [row] = rows_of(one(0, **fields))
    assert row["reason"]
    assert row["deliver_at"] <= row["publish_time"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"key": NoUtf8}, "what is not UTF-8 can't be read: key"),
        ({"props": NoUtf8}, "what is not UTF-8 can't be read: properties"),
        ({"producer": NoUtf8}, "what is not UTF-8 can't be read: producer's name"),
        ({"key": NoUtf8, "props": NoUtf8}, "what is not UTF-8 can't be read: key, properties"),
        ({"happened": 2**63}, f"the event time {2**63} is negative or beyond 2^63"),
        ({"happened": -1}, "the event time -1 is negative or beyond 2^63"),
        ({"published": MAX_TIME_MILLIS + 1}, f"the publish time {MAX_TIME_MILLIS + 1} is beyond the year 9999"),
        ({"published": 2**64 - 1}, f"the publish time {2**64 - 1} is beyond the year 9999"),
        ({"props": {"deliverAt": "soon"}}, "deliverAt is no whole number of milliseconds: 'soon'"),
        ({"props": {"deliverAfter": str(MAX_TIME_MILLIS)}}, "is beyond the year 9999"),
        ({"props": {"repeat": "every day"}}, "repeat is no cron expression"),
        ({"props": {"repeat": "@every 1m", "misfire": "never"}}, "misfire is none of once, all, skip: 'never'"),
        ({"props": {"repeat": "@every 1m", "repeatUntil": "5"}}, "repeatUntil is before the first occurrence"),
        ({"props": {"k": "\ud800"}}, "it can't be"),
        ({"key": 7}, "it can't be"),
    ],
)
def test_a_message_that_cannot_be_taken_is_put_aside_with_its_bytes_and_no_other_is_lost(
    fields: dict[str, Any], reason: str
) -> None:
    rows = rows_of([*one(0), *one(1, payload=b"odd", **fields), *batch(2, 2), *one(3)])
    assert [(row["entry_id"], row["batch_index"]) for row in rows] == [(0, -1), (1, -1), (2, 0), (2, 1), (3, -1)]
    assert reason in rows[1]["reason"]
    assert rows[1]["payload"] == b"odd"
    assert [row["reason"] for row in rows[:1] + rows[2:]] == [None] * 4


def test_what_was_read_of_a_message_that_cannot_be_taken_is_kept() -> None:
    [row] = rows_of(one(0, key="k", props={"deliverAt": "soon"}, happened=7))
    assert (row["key"], row["properties"], row["event_time"]) == ("k", [("deliverAt", "soon")], 7)


def test_an_ordering_key_of_bytes_is_taken_as_it_is() -> None:
    rows = rows_of([*one(0, ordering="o"), *one(1, ordering=NoUtf8)])
    assert [row["ordering_key"] for row in rows] == ["o", None]
    assert [row["ordering_key_bytes"] for row in rows] == [None, b"\xff"]
    assert [row["reason"] for row in rows] == [None, None]


class Details:
    """What a broker knows, as far as it answers."""

    def __init__(self, schemas: dict[bytes, MessageSchema | None]) -> None:
        self.schemas = schemas
        self.answers = True

    def schema(self, version: bytes) -> tuple[bytes, MessageSchema | None]:
        if not self.answers:
            raise NotKnownYetError
        return version, self.schemas[version]

    def key_encoding(self, key: str, producer: str, schema: Any, position: Position, batch_index: int) -> str | None:
        return "base64" if key == "/w==" else None


VERSION = b"\0" * 7 + b"\1"


def test_the_details_of_messages_go_with_them() -> None:
    harness = Harness(details=Details({VERSION: MessageSchema("STRING", "", {}), VERSION[:-1] + b"\xff": None}))
    large = VERSION[:-1] + b"\xff"  # the client takes a version for text
    harness.receive([*one(0, key="/w=="), *one(1, version=VERSION), *one(2, version=large), *batch(3, 2, key="k")])
    rows = harness.take().to_pylist()
    assert [row["key_encoding"] for row in rows] == ["base64", None, None, None, None]
    assert [row["schema_version"] for row in rows] == [None, VERSION, large, None, None]
    assert [row["reason"] for row in rows] == [
        None,
        None,
        "the source topic has no version 255 of its schema any more",
        None,
        None,
    ]


def test_messages_whose_details_cannot_be_told_now_are_received_later() -> None:
    details = Details({VERSION: MessageSchema("STRING", "", {})})
    harness = Harness(details=details)
    script = [*one(0), *batch(1, 2, version=VERSION), *one(2)]
    details.answers = False
    consumer = FakeConsumer(script)
    with pytest.raises(NotKnownYetError):
        harness.receiver.receive(consumer)
    assert not harness.take().num_rows
    details.answers = True
    harness.receive(script)
    harness.take()
    assert harness.ids() == [(5, 0, -1), (5, 1, 0), (5, 1, 1), (5, 2, -1)]


def test_the_size_counts_bytes_keys_and_what_properties_take() -> None:
    def reason(**fields: Any) -> str | None:
        [row] = rows_of(one(0, **fields), max_size=1_000)
        result: str | None = row["reason"]
        return result

    assert reason(payload=b"x" * 1_000) is None
    assert reason(payload=b"x" * 1_001) == "1001 bytes are too many to be delivered with their delaylake properties"
    assert reason(payload=b"x" * 990, key="k" * 10) is None
    assert reason(payload=b"x" * 990, key="k" * 11) is not None
    assert reason(payload=b"x" * 990, ordering="€" * 4) is not None
    assert reason(payload=b"x" * 970, props={"€": "€" * 5}) is None, "30 bytes, 12 of them not the text's"
    assert reason(payload=b"x" * 970, props={"€": "€" * 6}) is not None
    assert reason(payload=b"", props={f"k{i:03}": "" for i in range(100)}) is not None


def test_properties_with_our_prefix_are_not_taken_over() -> None:
    # The last one is the broker's own, of what it replicated.
    props = {"delaylake.messageId": "1:2:3:4", "a": "b", "delaylake.": "", "delaylakeX": "c", SOURCE_POSITION: "7:1"}
    [row] = rows_of(one(0, props=props))
    assert row["properties"] == [("a", "b"), ("delaylakeX", "c")]
    assert row["reason"] is None


def test_what_is_sent_back_is_a_retry_whatever_time_and_key_it_has() -> None:
    given = {"retryOf": "1:7:-1:-1", "retrySubscription": "a", "retryReason": "no"}
    before = {"delaylake.attempt": "1", "delaylake.reasons": '["first"]', "deliverAt": "soon", "scheduleKey": ""}
    [row] = rows_of(one(0, props=given | before))
    assert (row["reason"], row["attempt"], row["schedule_key"]) == (None, 2, None)
    assert json.loads(row["retry_reasons"]) == ["first", "no"]
    assert not any(name.startswith("delaylake.") for name, _ in row["properties"])
    bytes_key = {"delaylake.keyEncoding": "base64"}
    assert [rows_of(one(0, key="/wA=", props=p | bytes_key))[0]["key_encoding"] for p in (given, {})] == [
        "base64",
        None,
    ]
    [anew] = rows_of(one(0, props=given | before | {"redriveRequest": "r"}))
    assert (anew["reason"], anew["attempt"], anew["retry_reasons"]) == (None, 0, None)
    [wrong] = rows_of(one(0, props=given | {"retryAfter": "soon"}))
    assert (wrong["reason"][:11], wrong["attempt"], wrong["retry_reasons"]) == ("retryAfter ", None, None)


def test_a_recurring_message_comes_with_its_first_occurrence() -> None:
    every, named, once = rows_of(
        [
            *one(0, published=7_000, props={"repeat": "@every 90s", "delaylake.occurrence": "9"}),
            *one(1, published=7_000, props={"repeat": "0 18 * * *", "deliverAfter": "5000", "timeZone": "Asia/Tokyo"}),
            *one(2, published=7_000, props={"timeZone": "nowhere"}),
        ]
    )
    assert (every["deliver_at"], every["occurrence"], every["properties"]) == (97_000, 1, [("repeat", "@every 90s")])
    assert (named["deliver_at"], named["occurrence"]) == (12_000, 1)
    assert (once["occurrence"], once["reason"]) == (None, None)


def test_a_delivered_occurrence_begins_no_schedule_of_its_own() -> None:
    properties = {"repeat": "@every 90s", "deliverAt": "7000", "scheduleKey": "k"}
    delivered = {"delaylake.messageId": "7:0:-1:-1", "delaylake.occurrence": "3", "delaylake.source": "another"}
    rows = rows_of(
        [
            *one(0, published=9_000, props=properties | delivered),
            *one(1, published=9_000, props={**properties, "delaylake.messageId": "7:0:-1:-1"}),
        ]
    )
    assert [(row["occurrence"], row["schedule_key"], row["deliver_at"]) for row in rows] == [
        (None, None, 7_000),
        (1, "k", 7_000),
    ]
    assert dict(rows[0]["properties"]) == properties


def test_a_message_without_a_time_is_due_now_where_its_producers_clock_is_ahead() -> None:
    ahead, behind = rows_of([*one(0, published=MAX_TIME_MILLIS), *one(1, published=1_000)])
    assert ahead["deliver_at"] < MAX_TIME_MILLIS - 1_000_000_000
    assert behind["deliver_at"] == 1_000


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
        receiver.cut(10, 1_000)
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
        assert harness.receiver.end() == end
        assert not harness.receiver.wait_for(end, 0)
        harness.receive([], end)
        assert harness.receiver.wait_for(end, 0)
        assert harness.receiver.waiting == 2, "what was passed over is to get into a batch"
        assert harness.take().num_rows == 1
        assert harness.position == end
        assert harness.receiver.is_cut_to(end)

    def test_what_comes_after_all_is_taken(self) -> None:
        end = Position(5, 9)
        harness = self.harness(Position(5, 10), end)
        harness.receiver._want(end)
        harness.receive([], end)
        harness.take()
        harness.receive([*one(9), *one(10)])
        harness.take()
        assert harness.ids() == [(5, 9, -1), (5, 10, -1)]

    def test_nothing_is_passed_over_that_the_broker_has_still_to_send(self) -> None:
        end = Position(5, 9)
        harness = self.harness(end, end)
        harness.receiver._want(end)
        harness.receive([], end)
        assert not harness.receiver.wait_for(end, 0)

    def test_nothing_is_passed_over_while_the_connection_changes_or_the_broker_is_silent(self) -> None:
        end = Position(5, 9)
        harness = self.harness(Position(5, 10), end)
        harness.receiver._want(end)
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
        harness.receiver._want(end)
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
            harness.receiver._want(Position(5, entry))
            harness.receiver.receive(consumer)
            read.append([n for n in (7, 8, 9) if harness.receiver.read_to >= (5, n)])
        assert read == [[], [7], [7, 8]]

    def test_what_comes_after_it_was_passed_over_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        end = Position(5, 9)
        harness = self.harness(Position(5, 10), end)
        harness.receiver._want(end)
        harness.receive([], end)
        harness.take()
        harness.receive(one(9))
        assert "entry 5:9 came after the batches had passed it" in caplog.text
        harness.receive(one(10))
        harness.take()
        assert harness.ids() == [(5, 9, -1), (5, 10, -1)]

    def test_a_topic_that_ends_before_what_is_wanted_was_read(self) -> None:
        harness = self.harness(Position(5, 10), Position(5, 9))
        harness.receiver._want(Position(5, 20))
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
