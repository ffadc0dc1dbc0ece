"""Reading a topic without a subscription: what comes, where it ends, and what the service can't have sent."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from broker.client import NoAnswerError, PulsarError
from broker.position import START, Position
from broker.protocol.building import OutgoingMessage, encoded_property, single_entry
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.entries import EntryError, open_envelope
from broker.protocol.reading import before_time, messages_in, read_entries, read_messages
from broker.protocol.wire.pulsar_pb2 import MessageMetadata

TOPIC = "persistent://public/default/orders"


def entry(number: int, properties: dict[str, str] | None = None, producer: bytes = b"p", **metadata: Any) -> Any:
    encoded = [encoded_property(*one) for one in (properties or {}).items()]
    data = single_entry(OutgoingMessage(1, b"x", encoded), producer, 1_000 + number).data
    envelope = open_envelope(data)
    envelope.metadata.MergeFrom(MessageMetadata(**metadata))
    return ReceivedEntry(Position(1, number), envelope, (), 1, len(data))


class Topic:
    """A broker with one topic; entries that are markers have no metadata, and are not sent."""

    def __init__(self, *entries: Any, markers: int = 0, is_silent: bool = False) -> None:
        self.entries, self.markers, self.is_silent = entries, markers, is_silent
        self.acknowledged = self.started = START
        self.is_closed = False

    def read(self, topic: str, start: Position, **_: Any) -> Any:
        self.started = start
        # As a broker may, it begins one entry early.
        self.left = deque(one for one in self.entries if one.position.next > start)
        return self

    def has_more(self) -> Position | None:
        last = Position(1, len(self.entries) - 1 + self.markers)
        needed = [one.position for one in self.entries if one.position > self.acknowledged]
        return last if needed or self.is_silent else None

    def receive(self, timeout_seconds: float) -> ReceivedEntry | None:
        return None if self.is_silent or not self.left else self.left.popleft()

    def acknowledge(self, last: Position) -> None:
        self.acknowledged = last

    def close(self) -> None:
        self.is_closed = True


def read(topic: Any, after: Position = START) -> list[int]:
    return [one.position.entry_id for one in read_entries(topic, TOPIC, after)]


def test_it_yields_what_comes_after_an_entry_and_no_other() -> None:
    topic = Topic(*map(entry, range(4)))
    assert read(topic) == [0, 1, 2, 3]
    assert topic.is_closed
    assert read(topic, Position(1, 1)) == [2, 3]
    assert read(Topic()) == []


def test_it_ends_where_the_last_entries_are_none_that_the_broker_sends() -> None:
    assert read(Topic(*map(entry, range(3)), markers=2)) == [0, 1, 2]


def test_it_says_so_where_what_is_there_does_not_come() -> None:
    with pytest.raises(NoAnswerError, match="no entry after -1:-1 comes, though 1:1 is there"):
        read(Topic(entry(0), entry(1), is_silent=True))


def test_it_is_closed_when_nobody_reads_on() -> None:
    topic: Any = Topic(*map(entry, range(3)))
    entries = read_entries(topic, TOPIC)
    next(entries)
    entries.close()
    assert topic.is_closed


def test_only_what_the_service_can_have_sent_is_a_message() -> None:
    topic: Any = Topic(
        entry(0, {"a": "1"}),
        entry(1, n_chunks=2, chunk_id=0, chunked_size=1),
        entry(2, encryption_keys=[{"name": b"k"}]),
        entry(3, producer=b"\xff"),
        entry(4, compression=1, uncompressed_size=2**31),
        entry(5, n_messages=3),
        ReceivedEntry(Position(1, 6), EntryError("damaged"), (), 1, 5),
        entry(7, {"b": "2"}, producer=b"q"),
        entry(8, {"c": "3"}, compression=1, uncompressed_size=0),
    )
    found = list(read_messages(topic, TOPIC))
    assert [(one.position, one.published, one.producer, one.properties) for one in found] == [
        (Position(1, 0), 1_000, "p", {"a": "1"}),
        (Position(1, 7), 1_007, "q", {"b": "2"}),
    ]


def test_a_message_in_chunks_has_arrived_with_its_last_one() -> None:
    """The service sends that when the others have arrived; some chunks alone are no message."""
    parts: dict[str, Any] = {"n_chunks": 3, "chunked_size": 3}
    topic: Any = Topic(
        entry(0, {"a": "1"}, uuid=b"first", chunk_id=0, **parts),
        entry(1, {"a": "1"}, uuid=b"first", chunk_id=1, **parts),
        *(entry(2 + i, {"a": "1"}, uuid=b"again", chunk_id=i, **parts) for i in range(3)),
        entry(5, {"b": "2"}, uuid=b"other", chunk_id=0, **parts),
    )
    found = list(read_messages(topic, TOPIC))
    assert [(one.position, one.properties) for one in found] == [(Position(1, 4), {"a": "1"})]


def test_a_property_that_is_no_text_leaves_out_its_message() -> None:
    one = entry(0, {"a": "1"})
    one.envelope.metadata.properties[0].value = b"\xff"
    assert list(messages_in(TOPIC, one)) == []


class Admin:
    def __init__(self, found: Any) -> None:
        self.found = found

    def entry_published_at(self, topic: str, time: int) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    ("found", "time", "expected"),
    [
        ((7, 3), 5, Position(7, 2)),
        (None, 5, START),
        (PulsarError("no answer"), 5, START),
        ((7, 3), 0, START),
    ],
)
def test_where_nobody_says_what_was_published_when_all_is_read(found: Any, time: int, expected: Position) -> None:
    admin: Any = Admin(found)
    assert before_time(admin, TOPIC, time) == expected
