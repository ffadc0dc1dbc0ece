"""Unpacks received entries: decrypts and decompresses them, and puts chunks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from broker.position import Position
from broker.protocol.chunks import Whole
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.encryption import Decryptor
from broker.protocol.entries import MAX_BATCH, EntryError, decompressed, decrypted, is_batch
from broker.protocol.wire.pulsar_pb2 import MessageMetadata

# An entry may be so many times as large as the largest message when decompressed: some KB may become any size.
_MOST_DECOMPRESSED = 4

AddChunk = Callable[[Position, MessageMetadata, bytes], Whole | None]


class UnpackedEntry(NamedTuple):
    """An entry with its payload; or, where that can't be read, with what there is of it.

    Attributes:
        position: of the entry; of a chunked message, that of its last chunk.
        metadata: of the entry; None: it can't be read.
        header: the metadata as it came.
        payload: decrypted and decompressed; of a chunked message, that of all chunks. None: it can't be read.
        ack_set: tells which of the messages somebody else has acknowledged.
        last_index: broker entry index of its last message; None: the broker does not send it.
        failure: why it can't be read; empty: it is read.
        raw: its payload as it is in the ledger, or all its bytes where it can't be read; of a chunked message, those of
            its last chunk.
    """

    position: Position
    metadata: MessageMetadata | None
    header: bytes
    payload: bytes | None
    ack_set: Sequence[int]
    last_index: int | None
    failure: str
    raw: bytes

    @property
    def batch_indexes(self) -> Sequence[int]:
        """The batch index of each of its messages, also where they can't be read: the broker's indexes count them."""
        if self.metadata is None or not is_batch(self.metadata):
            return [-1]
        n = self.metadata.n_messages
        return range(n) if 0 < n <= MAX_BATCH else [-1]  # else nobody knows how many there are

    @property
    def n_messages(self) -> int:
        """The number of its messages."""
        return len(self.batch_indexes)


def unpack(
    entry: ReceivedEntry, decryptor: Decryptor | None, add_chunk: AddChunk, max_message_bytes: int
) -> UnpackedEntry | None:
    """Unpacks an entry; None: it is a chunk of a message that is not whole yet.

    Args:
        entry: from the consumer.
        decryptor: of the settings' key; None: there is none.
        add_chunk: called with a chunk's entry, metadata and payload; returns the message where it is whole now.
        max_message_bytes: the largest message that the broker sends.
    """
    envelope = entry.envelope
    if isinstance(envelope, EntryError):
        return unreadable(entry, str(envelope))
    metadata = envelope.metadata
    try:
        part = decrypted(envelope, decryptor)
        payload: bytes | None = part
        if envelope.is_chunk:
            whole = add_chunk(entry.position, metadata, part)
            if whole is None:
                return None
            payload = whole.payload
        if payload is None:
            return unreadable(entry, f"its chunks have {metadata.chunked_size} bytes, more than may wait")
        payload = decompressed(metadata, payload, _MOST_DECOMPRESSED * max_message_bytes)
    except EntryError as error:
        return unreadable(entry, str(error))
    raw = envelope.payload
    return UnpackedEntry(
        entry.position, metadata, envelope.header, payload, entry.ack_set, envelope.last_index, "", raw
    )


def unreadable(entry: ReceivedEntry, failure: str) -> UnpackedEntry:
    """Returns an entry that can't be read, or is not to be, with what there is of it.

    Args:
        entry: from the consumer.
        failure: why.
    """
    envelope = entry.envelope
    if isinstance(envelope, EntryError):
        return UnpackedEntry(entry.position, None, b"", None, (), None, failure, envelope.raw)
    metadata, header, raw, last_index = envelope.metadata, envelope.header, envelope.payload, envelope.last_index
    return UnpackedEntry(entry.position, metadata, header, None, entry.ack_set, last_index, failure, raw)
