"""Entries of Pulsar's ledgers: from the bytes behind a MESSAGE command to messages as they were sent.

An entry has, each if it is there: the broker's metadata (magic 0x0e02, size, bytes), a CRC32C of what follows (magic
0x0e01, 4 bytes), then the size of its metadata, the metadata, and a payload: of one message, of a chunk, or of a batch.
A batch has for each message the size of its metadata, the metadata, and the payload.
Source: https://pulsar.apache.org/docs/next/developing-binary-protocol/#framing
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import google_crc32c
from google.protobuf.message import DecodeError

from broker.protocol.compression import CompressionError, decompress
from broker.protocol.encryption import DecryptionError, Decryptor
from broker.protocol.wire.pulsar_pb2 import BatchedMetadata, BrokerEntryMetadata, MessageMetadata
from conf.errors import DelayLakeError
from tracker.properties import RESERVED_PREFIX

_BROKER_METADATA, _CHECKSUM = b"\x0e\x02", b"\x0e\x01"
_SIZE = struct.Struct(">I")
_MAX_METADATA_BYTES = 5 << 20  # of all messages of a batch: an empty property has two bytes, and a hundred in memory
_MAX_PROPERTIES = 100_000
MAX_BATCH = 100_000  # messages: compressed, an entry may say that it has millions of nothing

# The property with which a replicating broker sends an entry's position, `ledger:entry`.
SOURCE_POSITION = "__MSG_PROP_REPL_SOURCE_POSITION"

NOT_DECRYPTED = "encrypted, and no key that decrypts it is in the settings (pulsar.crypto_private_key_file)"


def is_dropped(name: str) -> bool:
    """Whether a property of a message that comes in is not passed on: the job gives it itself, or a broker did."""
    return name.startswith(RESERVED_PREFIX) or name == SOURCE_POSITION


class EntryError(DelayLakeError):
    """An entry can't be read. Its text says why, for people.

    Attributes:
        raw: what there is of it.
    """

    raw = b""


class Envelope(NamedTuple):
    """An entry whose payload has not been looked into yet."""

    metadata: MessageMetadata
    header: bytes  # the metadata as it came
    payload: bytes  # as it is in the ledger: perhaps encrypted and compressed
    last_index: int | None  # broker entry index of the entry's last message; None: the broker does not send it

    @property
    def is_chunk(self) -> bool:
        """Whether the entry is a part of a message."""
        return self.metadata.n_chunks > 1


class Message(NamedTuple):
    """A message as its producer has sent it."""

    batch_index: int  # the place in its entry; -1: the entry is one message
    key: bytes | None  # None: absent, or null
    is_key_base64: bool  # whether `key` is the base64 of a key that was given as bytes; else it was given as text
    ordering_key: bytes | None
    properties: list[tuple[bytes, bytes]]
    payload: bytes | None  # None: a null value
    event_time: int  # ms since the epoch; 0: none


def is_batch(metadata: MessageMetadata) -> bool:
    """Whether an entry is a batch, perhaps of one message."""
    return metadata.HasField("n_messages")


def open_envelope(entry: bytes) -> Envelope:
    """Takes an entry apart.

    Raises:
        EntryError: it is damaged.
    """
    last_index, at = None, 0
    if entry[:2] == _BROKER_METADATA:
        size = _size(entry, 2)
        at = 6 + size
        try:
            broker_metadata = BrokerEntryMetadata.FromString(_cut(entry, 6, size))
        except DecodeError as error:
            raise EntryError("the broker's metadata can't be read") from error
        last_index = broker_metadata.index if broker_metadata.HasField("index") else None
    if entry[at : at + 2] == _CHECKSUM:
        expected = _size(entry, at + 2)
        at += 6
        if google_crc32c.value(entry[at:]) != expected:
            raise EntryError("its checksum is wrong")
    size = _size(entry, at)
    header = _cut(entry, at + 4, size)
    try:
        metadata = MessageMetadata.FromString(header)
    except DecodeError as error:
        raise EntryError("its metadata can't be read") from error
    return Envelope(metadata, header, entry[at + 4 + size :], last_index)


def decrypted(envelope: Envelope, decryptor: Decryptor | None) -> bytes:
    """Returns an entry's payload without its encryption; perhaps it is compressed, or a part of what is compressed.

    Raises:
        EntryError: no key decrypts it.
    """
    if not envelope.metadata.encryption_keys:
        return envelope.payload
    if decryptor is None:
        raise EntryError(NOT_DECRYPTED)
    try:
        return decryptor.decrypt(envelope.metadata, envelope.payload)
    except DecryptionError as error:
        raise EntryError(NOT_DECRYPTED) from error


def decompressed(metadata: MessageMetadata, payload: bytes, max_size: int) -> bytes:
    """Returns an entry's payload without its compression.

    Args:
        metadata: of the entry, or of a chunked message's last chunk.
        payload: decrypted; of a chunked message of all its chunks.
        max_size: the most bytes of the payload when decompressed.

    Raises:
        EntryError: it can't be read.
    """
    try:
        return decompress(payload, metadata.compression, metadata.uncompressed_size, max_size)
    except CompressionError as error:
        raise EntryError(str(error)) from error


def messages_of(metadata: MessageMetadata, payload: bytes) -> list[Message]:
    """Returns the messages of an entry, or the one of a chunked message, in their order.

    Args:
        metadata: of the entry, or of a chunked message's last chunk.
        payload: decompressed.

    Raises:
        EntryError: they can't be read.
    """
    if is_batch(metadata):
        return _batched(metadata.n_messages, payload)
    return [_message(-1, metadata, payload)]


def batched_message(batch_index: int, metadata: bytes, payload: bytes) -> Message:
    """Returns a message of a batch.

    Args:
        batch_index: its place in the batch.
        metadata: its own.
        payload: its own.

    Raises:
        EntryError: it can't be read.
    """
    return _message(batch_index, _batched_metadata(batch_index, metadata), payload)


def _batched(n: int, payload: bytes) -> list[Message]:
    """Returns the messages of a batch.

    Raises:
        EntryError: it does not have `n` messages, or they can't be read.
    """
    if not 0 < n <= MAX_BATCH:
        raise EntryError(f"it is a batch of {n} messages")
    at, found, n_metadata = 0, [], 0
    for batch_index in range(n):
        size = _size(payload, at)
        n_metadata += size
        if n_metadata > _MAX_METADATA_BYTES:
            raise EntryError(f"its messages have more than {_MAX_METADATA_BYTES} bytes of metadata")
        metadata = _batched_metadata(batch_index, _cut(payload, at + 4, size))
        at += 4 + size
        body = _cut(payload, at, metadata.payload_size)
        at += metadata.payload_size
        found.append(_message(batch_index, metadata, body))
    return found


def _batched_metadata(batch_index: int, metadata: bytes) -> BatchedMetadata:
    try:
        return BatchedMetadata.FromString(metadata)
    except DecodeError as error:
        raise EntryError(f"the metadata of its message {batch_index} can't be read") from error


def _message(batch_index: int, metadata: MessageMetadata | BatchedMetadata, payload: bytes) -> Message:
    if len(metadata.properties) > _MAX_PROPERTIES:
        raise EntryError(f"a message has {len(metadata.properties)} properties, the most are {_MAX_PROPERTIES}")
    key, ordering_key = metadata.partition_key, metadata.ordering_key
    return Message(
        batch_index,
        key if (key or metadata.HasField("partition_key")) and not metadata.is_key_null else None,
        metadata.is_key_base64,
        ordering_key if ordering_key or metadata.HasField("ordering_key") else None,
        [(text.key, text.value) for text in metadata.properties],
        None if metadata.is_null_value else payload,
        metadata.event_time,
    )


def is_acknowledged(batch_index: int, ack_set: Sequence[int]) -> bool:
    """Whether the bit of a message is 0 in an entry's ack set: words of 64 bits; what is behind the last word is 0."""
    if not ack_set:
        return False
    word = batch_index >> 6
    return word >= len(ack_set) or not ack_set[word] >> (batch_index & 63) & 1


def ack_set_of(batch_indexes: Iterable[int]) -> list[int]:
    """Returns the ack set of an entry of which these messages are not acknowledged: signed words of 64 bits."""
    bits = 0
    for batch_index in batch_indexes:
        bits |= 1 << batch_index
    n_words = (bits.bit_length() + 63) >> 6
    return [
        int.from_bytes(bits.to_bytes(8 * n_words, "little")[8 * i : 8 * i + 8], "little", signed=True)
        for i in range(n_words)
    ]


def _size(data: bytes, at: int) -> int:
    if at + 4 > len(data):
        raise EntryError("it is cut off")
    return int(_SIZE.unpack_from(data, at)[0])


def _cut(data: bytes, at: int, size: int) -> bytes:
    if size < 0 or at + size > len(data):
        raise EntryError("it is cut off")
    return data[at : at + size]
