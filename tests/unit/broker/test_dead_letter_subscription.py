"""Reading dead letters without a broker: connections that end, entries that can't be read, and what is acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from broker import dead_letter_subscription
from broker.client import NoAnswerError, PulsarError
from broker.dead_letter_subscription import DeadLetterConsumer, is_busy
from broker.position import Position
from broker.protocol.building import OutgoingMessage, batch_entry, single_entry
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.entries import EntryError, ack_set_of, open_envelope
from broker.protocol.session import DisconnectedError, RefusedError
from broker.protocol.wire.pulsar_pb2 import MessageMetadata, ServerError

TOPIC = "persistent://public/default/orders-a-dlq"


def received(number: int, data: bytes, ack_set: tuple[int, ...] = (), **metadata: Any) -> ReceivedEntry:
    envelope = open_envelope(data)
    envelope.metadata.MergeFrom(MessageMetadata(**metadata))
    return ReceivedEntry(Position(1, number), envelope, ack_set, 1, len(data))


def single(number: int, **metadata: Any) -> ReceivedEntry:
    return received(number, single_entry(OutgoingMessage(1, b"%d" % number), b"p", 1_000).data, **metadata)


def batch(number: int, n: int, ack_set: tuple[int, ...] = ()) -> ReceivedEntry:
    messages = [OutgoingMessage(i + 1, b"%d.%d" % (number, i)) for i in range(n)]
    return received(number, batch_entry(messages, b"p", 1_000).data, ack_set)


class Topic:
    """Brokers, admin API and consumers of one topic partition.

    Args:
        entries: those that are not acknowledged.
        ends_after: how many entries each consumer gets before its connection ends.
        acknowledged: so many entries behind them are acknowledged already.
    """

    def __init__(self, *entries: ReceivedEntry, ends_after: Sequence[int] = (), acknowledged: int = 0) -> None:
        self.entries, self.ends_after, self.behind = entries, deque(ends_after), acknowledged
        self.acknowledged: list[tuple[int, list[int]]] = []
        self.busy_for = 0
        self.opened = 0
        self.fails_to_acknowledge = 0
        self.max_message_bytes = 5 << 20
        self.is_connected = True

    def subscribe(self, topic: str, subscription: str, **_: Any) -> Any:
        assert (topic, subscription) == (TOPIC, "delaylake-redrive")
        if self.busy_for:
            self.busy_for -= 1
            raise RefusedError(ServerError.ConsumerBusy, b"busy")
        self.opened += 1
        done = {number for number, ack_set in self.acknowledged if not ack_set}
        self.left = deque(one for one in self.entries if one.position.entry_id not in done)
        self.ends_in = self.ends_after.popleft() if self.ends_after else -1
        return self

    def backlog(self, topic: str, subscription: str) -> int:
        return len(self.entries) - len({number for number, ack_set in self.acknowledged if not ack_set})

    def last_entry(self) -> Position:
        return Position(1, len(self.entries) - 1 + self.behind)

    def receive(self, timeout_seconds: float) -> ReceivedEntry | None:
        if self.ends_in == 0:
            raise DisconnectedError("the connection has ended")
        self.ends_in -= 1
        return self.left.popleft() if self.left else None

    def acknowledge_each(self, entries: Sequence[tuple[Position, Sequence[int]]]) -> None:
        if self.fails_to_acknowledge:
            self.fails_to_acknowledge -= 1
            raise DisconnectedError("the connection has ended")
        self.acknowledged += [(at.entry_id, list(ack_set)) for at, ack_set in entries]

    def close(self) -> None:
        raise PulsarError("no answer")


def opened(topic: Any, busy_seconds: float = 5.0) -> DeadLetterConsumer:
    return DeadLetterConsumer(topic, topic, TOPIC, busy_seconds)


def payloads(consumer: DeadLetterConsumer) -> list[bytes | None]:
    return [message.payload for _, message in consumer.messages()]


def test_it_ends_with_what_was_there_though_the_last_ones_are_acknowledged() -> None:
    assert payloads(opened(Topic(single(0), batch(1, 2), acknowledged=3))) == [b"0", b"1.0", b"1.1"]
    assert payloads(opened(Topic())) == []


@pytest.mark.parametrize("ends_after", [(0, 1, 2), (2, 2, 3)])
def test_after_a_lost_connection_none_comes_twice(ends_after: tuple[int, ...]) -> None:
    topic = Topic(*map(single, range(4)), ends_after=ends_after)
    consumer = opened(topic)
    assert payloads(consumer) == [b"0", b"1", b"2", b"3"]
    assert (topic.opened, consumer.n_unreadable) == (4, 0)


def test_connections_that_end_before_any_further_entry_are_given_up() -> None:
    topic = Topic(single(0), single(1), ends_after=[1] * 50)
    with pytest.raises(NoAnswerError, match="sends no more, though it has more"):
        payloads(opened(topic))
    assert topic.opened == 1 + 10


def test_what_can_not_be_read_is_counted_and_the_others_come(caplog: pytest.LogCaptureFixture) -> None:
    of_chunks = {"uuid": b"u", "n_chunks": 2}
    topic = Topic(
        single(0),
        single(1, n_messages=3),
        ReceivedEntry(Position(1, 2), EntryError("it is damaged"), (), 1, 5),
        single(3, encryption_keys=[{"name": b"k"}]),
        single(4, compression=1, uncompressed_size=2**31),
        single(5, **of_chunks, chunk_id=0),
        single(6, uuid=b"never", n_chunks=2**31 - 1, chunk_id=0, chunked_size=1),
        single(7, uuid=b"before", n_chunks=3, chunk_id=1),
        single(8, **of_chunks, chunk_id=1),
        single(9),
    )
    consumer = opened(topic)
    assert payloads(consumer) == [b"0", b"58", b"9"]
    assert consumer.n_unreadable == 6
    assert "the entry 1:3 can't be read, and stays: it is encrypted" in caplog.text
    assert "6 entries can't be read, and stay" in caplog.text


def test_of_many_that_can_not_be_read_the_log_names_some(caplog: pytest.LogCaptureFixture) -> None:
    consumer = opened(Topic(*(single(i, n_messages=-1) for i in range(200))))
    assert payloads(consumer) == []
    assert len(caplog.records) == 21


def test_an_entry_is_acknowledged_when_all_of_it_is_and_a_chunked_message_with_all_its_chunks() -> None:
    of_chunks = {"uuid": b"u", "n_chunks": 2}
    topic = Topic(
        batch(0, 3, (0b101,)), single(1, **of_chunks, chunk_id=0), single(2), single(3, **of_chunks, chunk_id=1)
    )
    consumer = opened(topic)
    found = list(consumer.messages())
    assert [message.payload for _, message in found] == [b"0.0", b"0.2", b"2", b"13"]
    first, third, alone, chunked = found
    consumer.acknowledge([third, alone])
    assert topic.acknowledged == [(0, ack_set_of({0})), (2, [])]
    consumer.acknowledge([first, chunked])
    assert topic.acknowledged[2:] == [(0, []), (1, []), (3, [])]


def test_an_acknowledgement_is_repeated_by_the_next_consumer() -> None:
    topic = Topic(single(0), single(1))
    consumer = opened(topic)
    found = list(consumer.messages())
    topic.fails_to_acknowledge = 1
    consumer.acknowledge(found)
    assert (topic.acknowledged, topic.opened) == ([(0, []), (1, [])], 2)


def test_another_consumer_is_waited_for_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_subscription, "_BUSY_SECONDS", 0.001)
    topic = Topic(single(0))
    topic.busy_for = 3
    assert payloads(opened(topic)) == [b"0"]
    topic.busy_for = 10**9
    with pytest.raises(RefusedError) as error:
        opened(topic, 0.01)
    assert is_busy(error.value)
