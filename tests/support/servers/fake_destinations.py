"""Destinations without Pulsar, as far as a task that sends sees them: topics with deduplication, and producers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from broker.client import PulsarError
from broker.position import Position
from broker.protocol.building import LargeMessage, OutgoingEntry, OutgoingMessage, single_entry
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.entries import Message, messages_of, open_envelope
from broker.protocol.sending import Outgoing, RefusedEntry


class Seen(NamedTuple):
    """What a consumer sees of a message."""

    properties: dict[str, str]
    message: Message


def seen_in(entry: OutgoingEntry) -> list[Seen]:
    """What a consumer sees of an entry's messages."""
    envelope = open_envelope(entry.data)
    return [
        Seen({name.decode(): value.decode() for name, value in message.properties}, message)
        for message in messages_of(envelope.metadata, envelope.payload)
    ]


def seen(message: OutgoingMessage) -> Seen:
    """What a consumer sees of a message."""
    [found] = seen_in(single_entry(message, b"p", 1))
    return found


@dataclass
class FakeProducer:
    """A producer whose entries are answered at once."""

    brokers: FakeBrokers
    topic: str
    name: bytes
    last_sequence_id: int
    schema_version: bytes = b""
    is_open: bool = True
    error: PulsarError | None = None
    repeated_to: int = -1
    n_pending: int = 0
    n_answers: int = 0
    is_in_chunks: bool = False
    max_message_bytes: int = 5 << 20
    has_arrived: bool = True
    refused: list[RefusedEntry] = field(default_factory=list)

    def send(self, entry: Outgoing, is_more: bool = False) -> None:
        entry = entry.whole() if isinstance(entry, LargeMessage) else entry
        if not self.brokers.take(self.topic, self.name.decode(), entry):
            self.repeated_to = entry.highest_sequence_id
        self.last_sequence_id = max(self.last_sequence_id, entry.highest_sequence_id)

    def flush(self) -> None:
        pass

    def take_refused(self) -> list[RefusedEntry]:
        refused, self.refused = self.refused, []
        return refused

    def close(self) -> Callable[[float], None]:
        return lambda seconds: None


@dataclass
class FakeReading:
    """Reads the entries of a topic partition, in order."""

    entries: deque[ReceivedEntry]
    n_read: int = 0

    def has_more(self) -> Position | None:
        return self.entries[-1].position if self.entries else None

    def receive(self, timeout_seconds: float) -> ReceivedEntry | None:
        self.n_read += 1
        return self.entries.popleft() if self.entries else None

    def close(self) -> None:
        pass


@dataclass
class FakeBrokers:
    """The connections to a cluster, with what has arrived there."""

    last: dict[tuple[str, str], int] = field(default_factory=dict)  # by topic and producer the last sequence id
    entries: list[tuple[str, str, OutgoingEntry]] = field(default_factory=list)  # topic, producer, entry

    def partitions(self, topic: str) -> int:
        return 0

    def produce(self, topic: str, name: str = "", schema: Any = None, on_progress: Any = None) -> Any:
        return FakeProducer(self, topic, name.encode(), self.last.get((topic, name), -1))

    def begin_producing(self, *_: Any) -> None:
        return None

    def partition_names(self, topic: str) -> list[str]:
        return [topic]

    def read(self, topic: str, start: Position, **_: Any) -> Any:
        """Reads the entries of a topic after one: they have ids from 0 on."""
        data = [entry.data for to, _, entry in self.entries if to == topic]
        found = [ReceivedEntry(Position(1, i), open_envelope(one), (), 1, len(one)) for i, one in enumerate(data)]
        return FakeReading(deque(one for one in found if one.position > start))

    def take(self, topic: str, name: str, entry: OutgoingEntry) -> bool:
        """Takes an entry, as a broker with deduplication does; returns whether it is new."""
        if entry.sequence_id <= self.last.get((topic, name), -1):
            return False
        self.last[topic, name] = entry.highest_sequence_id
        self.entries.append((topic, name, entry))
        return True

    def arrived(self, topic: str) -> list[Seen]:
        """What has come to a topic."""
        return [one for to, _, entry in self.entries if to == topic for one in seen_in(entry)]

    def close(self) -> None:
        pass
