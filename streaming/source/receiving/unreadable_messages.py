"""Which messages are rejected as they come in: those that nobody can read, and those that could not be delivered.

Each becomes a row with its ids, the reason and its payload alone, so that it is in `rejects`. `row_builder.py` asks for
each message; `ordinary_rows.py` leaves to it those that it can't read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.protocol.consumer import ReceivedEntry
from broker.protocol.encryption import Decryptor
from broker.protocol.entries import EntryError, Message, is_batch
from broker.protocol.wire.pulsar_pb2 import NONE
from conf.errors import one_line
from conf.message_size import FIELD_BYTES
from streaming.source.receiving.details import MessageDetails
from streaming.source.receiving.recurring import Recurring
from tracker.messages import MESSAGES
from warehouse.message_schemas import MOST_BYTES, MOST_VERSIONS, version_number

MOST_KEPT = 2  # a payload of so many times the largest message's size is no row's: Spark would need memory for it
ACKNOWLEDGED = "somebody else acknowledged it on the job's subscription"
MAX_EVENT_TIME = 2**63 - 1
_TOO_MANY = "bytes are too many to be delivered with their delaylake properties"

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Acceptance:
    """Which messages of a topic are accepted, and what it takes to read them.

    Attributes:
        max_delay_millis: the longest delay of a message, ms; 0: any.
        max_size: the most bytes of a message: of payload, keys and properties together.
        details: looks up schemas; None: messages have none, as on the control topic.
        recurring: accepts recurring messages; None: their number is not limited.
        takes_replicated: whether messages that were published in another cluster are ingested, too.
        decryptor: decrypts entries; None: encrypted ones are rejected.
    """

    max_delay_millis: int
    max_size: int
    details: MessageDetails | None = None
    recurring: Recurring | None = None
    takes_replicated: bool = True
    decryptor: Decryptor | None = None

    def why_undeliverable(self, message: Message, n_bytes: int) -> str | None:
        """Returns why a message that can be read, with its `size_of`, could not be delivered; None: it could."""
        if message.event_time > MAX_EVENT_TIME:
            return f"the event time {message.event_time} is negative or beyond 2^63"
        if n_bytes > self.max_size:
            return f"{n_bytes} {_TOO_MANY}"
        return None

    def why_far_too_large(self, payload: bytes | None) -> str | None:
        """Returns why not even the reject has a message's payload, but that of its entry; None: it has its own."""
        return self._why_far_too_large(len(payload or b""))

    def why_not_decompressed(self, entry: ReceivedEntry) -> str | None:
        """Returns why an entry is rejected as it is, because its only message says that it is far too large; or None.

        Decompressing it would take a thousand times as long as sending it.
        """
        envelope = entry.envelope
        if isinstance(envelope, EntryError) or envelope.is_chunk or is_batch(envelope.metadata):
            return None
        metadata = envelope.metadata
        is_packed = metadata.compression != NONE and not metadata.encryption_keys
        return self._why_far_too_large(metadata.uncompressed_size) if is_packed else None

    def _why_far_too_large(self, n_bytes: int) -> str | None:
        return f"{n_bytes} {_TOO_MANY}; here is its entry's payload" if n_bytes > MOST_KEPT * self.max_size else None


def size_of(message: Message) -> int:
    """Returns the bytes of payload, keys and properties together."""
    n_bytes = len(message.key or b"") + len(message.ordering_key or b"") + len(message.payload or b"")
    return n_bytes + sum(len(name) + len(value) + FIELD_BYTES for name, value in message.properties)


def why_without_schema(version: bytes) -> str:
    """Returns the reason to reject a message whose version of the schema is not to be had."""
    return (
        f"the source topic has no version {version_number(version)} of its schema any more, or has had "
        f"more than {MOST_VERSIONS:,}, or definitions of more than {MOST_BYTES >> 20} MiB"
    )


def read_texts(message: Message, is_producer_named: bool) -> tuple[str | None, dict[str, str], str | None]:
    """Reads a message's texts.

    Args:
        message: which can be read.
        is_producer_named: whether its producer's name is a text.

    Returns:
        (key, properties, reason): the reason names what is no text, and of which nothing is returned.
    """
    wrong = []
    key, properties = None, {}
    try:
        key = None if message.key is None else message.key.decode()
    except UnicodeDecodeError:
        wrong.append("key")
    try:
        properties = {name.decode(): value.decode() for name, value in message.properties}
    except UnicodeDecodeError:
        wrong.append("properties")
    if not is_producer_named:
        wrong.append("producer's name")
    return key, properties, f"what is not UTF-8 can't be read: {', '.join(wrong)}" if wrong else None


def rejected_row(ids: Row, now: int, payload: bytes | None, reason: str) -> Row:
    """Returns the row of a rejected message, with its ids, payload and reason alone.

    Args:
        ids: values of the columns from `ledger_id` on, as many as are known.
        now: the row's times, ms since the epoch.
    """
    values: dict[str, Any] = {"deliver_at": now, "publish_time": now, "event_time": 0, "payload": payload}
    values |= {"reason": reason, "properties": []}
    return ids + tuple(values.get(name) for name in MESSAGES.names[2 + len(ids) :])


def why_unreadable(error: Exception) -> str:
    """Returns a failure as a part of a reason: one short line."""
    return one_line(error)[:200] or type(error).__name__
