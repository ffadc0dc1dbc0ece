"""A topic partition, its broker and its consumer without Pulsar, as far as `Receiver` sees them."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from broker.client import PulsarError
from broker.position import START, Position
from broker.protocol.consumer import EntryConsumer, ReceivedEntry
from broker.protocol.entries import Envelope, is_batch
from broker.protocol.wire.pulsar_pb2 import BatchedMetadata, MessageMetadata
from broker.pulsar_admin.topic_questions import Cursor


def one(entry: int, ledger: int = 5, **fields: Any) -> list[ReceivedEntry]:
    """An entry that is one message; see `_metadata` and `_of_message` for the fields."""
    payload = fields.pop("payload", b"x")
    metadata = _metadata(fields)
    _of_message(metadata, payload, fields)
    return [_received(Position(ledger, entry), metadata, payload or b"")]


def batch(entry: int, size: int, ledger: int = 5, **fields: Any) -> list[ReceivedEntry]:
    """An entry that is a batch."""
    payload = fields.pop("payload", b"x")
    metadata = _metadata(fields)
    metadata.n_messages = size
    body = b""
    for _ in range(size):
        single = BatchedMetadata(payload_size=len(payload or b""))
        _of_message(single, payload, fields)
        data = single.SerializeToString()
        body += struct.pack(">I", len(data)) + data + (payload or b"")
    return [_received(Position(ledger, entry), metadata, body)]


def chunk(entry: int, uuid: str, n: int, size: int, ledger: int = 5, **fields: Any) -> list[ReceivedEntry]:
    """An entry that is the chunk `n`, from 0, of `size`."""
    payload = fields.pop("payload", b"x")
    metadata = _metadata(fields)
    _of_message(metadata, payload, fields)
    metadata.uuid, metadata.chunk_id, metadata.n_chunks = uuid.encode(), n, size
    return [_received(Position(ledger, entry), metadata, payload)]


def _metadata(fields: dict[str, Any]) -> MessageMetadata:
    """What an entry's messages have in common: `published`, `producer`, `version`, `native`."""
    metadata = MessageMetadata(
        producer_name=_bytes(fields.pop("producer", "p")), sequence_id=1, publish_time=fields.pop("published", 1_000)
    )
    if version := fields.pop("version", b""):
        metadata.schema_version = version
    if native := fields.pop("native", 0):
        metadata.deliver_at_time = native
    return metadata


def _of_message(metadata: Any, payload: bytes | None, fields: dict[str, Any]) -> None:
    """Sets `key`, `is_key_bytes`, `ordering`, `props`, `happened`."""
    unknown = fields.keys() - {"key", "is_key_bytes", "ordering", "props", "happened"}
    assert not unknown, unknown
    if "key" in fields:
        metadata.partition_key = _bytes(fields["key"])
    metadata.is_key_base64 = fields.get("is_key_bytes", False)
    if "ordering" in fields:
        metadata.ordering_key = _bytes(fields["ordering"])
    for name, value in fields.get("props", {}).items():
        metadata.properties.add(key=_bytes(name), value=_bytes(value))
    metadata.event_time = fields.get("happened", 0)
    metadata.is_null_value = payload is None


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode(errors="surrogatepass")


def _received(position: Position, metadata: MessageMetadata, payload: bytes) -> ReceivedEntry:
    envelope = Envelope(metadata, metadata.SerializeToString(), payload, None)
    return ReceivedEntry(position, envelope, (), max(metadata.n_messages, 1), len(payload))


def messages_in(entries: Iterable[ReceivedEntry]) -> list[tuple[int, int, int]]:
    """The ids of the messages in entries, as (ledger, entry, batch index)."""
    found = []
    for entry in entries:
        assert isinstance(entry.envelope, Envelope)
        indexes = range(entry.n_messages) if is_batch(entry.envelope.metadata) else [-1]
        found += [(*entry.position, index) for index in indexes]
    return found


class FakeConsumer(EntryConsumer):
    """Gives entries and raises exceptions in the order of a script; None in it is a while without an entry."""

    def __init__(self, script: Sequence[ReceivedEntry | Exception | None], end: Position = START) -> None:
        self.script = deque(script)
        self.end = end
        self.acknowledged: list[Position] = []
        self._share = None

    @property
    def max_message_bytes(self) -> int:
        return 5 << 20

    def receive(self, timeout_seconds: float) -> ReceivedEntry | None:
        if not self.script:
            return None
        item = self.script.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def last_entry(self) -> Position:
        return self.end

    def acknowledge(self, last: Position) -> None:
        self.acknowledged.append(last)

    def close(self) -> None:
        pass


class FakeBroker:
    """What `TopicQuestions` answers. An attribute may be set while it is used."""

    def __init__(self) -> None:
        self.cursor_of: Callable[[], Cursor] = lambda: Cursor(START, START, START, {})
        self.is_down = False

    def last_index(self, topic: str, position: Position) -> int | None:
        return None

    def cursor(self, topic: str) -> Cursor:
        self._answer()
        return self.cursor_of()

    def _answer(self) -> None:
        if self.is_down:
            raise PulsarError("no answer")
