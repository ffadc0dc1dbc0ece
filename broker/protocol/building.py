"""Builds entries: from messages as they shall arrive to the bytes behind a SEND command.

The metadata is encoded here and not by protobuf's classes: that takes a third of the time. Field numbers are those of
`MessageMetadata` and `BatchedMetadata` in proto/pulsar.proto.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import google_crc32c

from broker.protocol.wire.pulsar_pb2 import Command

_CHECKSUM = b"\x0e\x01"
_SIZE = struct.Struct(">I")
_SIZES = struct.Struct(">II")

# A field begins with its number * 8, + 2 where it has a length, as a varint.
_ALONE = {"properties": b"\x22", "key": b"\x32", "event_time": b"\x60", "is_base64": b"\x88\x01\x01"}
_ALONE |= {"ordering_key": b"\x92\x01", "is_null": b"\xc8\x01\x01"}
_BATCHED = {"properties": b"\x0a", "key": b"\x12", "event_time": b"\x28", "is_base64": b"\x30\x01"}
_BATCHED |= {"ordering_key": b"\x3a", "is_null": b"\x48\x01"}

_SPARE_BYTES = 512  # of the largest entry: broker and bookie add some, and a chunk has some fields more

_LONGEST_NAME = 200  # bytes of a producer's name in a UUID
_LONGEST_KEPT = 256  # characters of a property's name that is remembered: whoever publishes chooses it

_SHORT = [bytes([n]) for n in range(128)]  # varints of one byte


class OutgoingMessage(NamedTuple):
    """A message as it shall arrive."""

    sequence_id: int
    payload: bytes | None  # None: a null value
    properties: Sequence[bytes] = ()  # as `encoded_property` returns them
    key: bytes | None = None  # None: absent
    is_key_base64: bool = False  # `key` is the base64 of a key that is bytes
    ordering_key: bytes | None = None
    event_time: int = 0  # ms since the epoch; 0: none


class OutgoingEntry(NamedTuple):
    """An entry that is ready to be sent."""

    sequence_id: int  # of its first message
    highest_sequence_id: int  # of its last message
    n_messages: int
    data: bytes
    is_chunk: bool = False  # it is a chunk of its message


class LargeMessage(NamedTuple):
    """A message that may be too large for one entry; how large that may be the broker says when it is sent.

    Attributes:
        sequence_id: of the message.
        metadata: of its entry.
        payload: of its entry.
    """

    sequence_id: int
    metadata: bytes
    payload: bytes

    @property
    def highest_sequence_id(self) -> int:
        """The same as of any entry: it is one message."""
        return self.sequence_id

    @property
    def n_messages(self) -> int:
        """1."""
        return 1

    @property
    def n_bytes(self) -> int:
        """The bytes of metadata and payload."""
        return len(self.metadata) + len(self.payload)

    def is_one_entry(self, max_bytes: int) -> bool:
        """Whether it is sent as one entry, where these have so many bytes at most."""
        return self.n_bytes + _SPARE_BYTES <= max_bytes

    def can_be_sent(self, max_bytes: int) -> bool:
        """Whether it can be sent, as one entry or in chunks: these must not be metadata for the most part."""
        return self.is_one_entry(max_bytes) or len(self.metadata) <= max_bytes // 2 - _SPARE_BYTES

    def whole(self) -> OutgoingEntry:
        """Returns the message as one entry."""
        return OutgoingEntry(self.sequence_id, self.sequence_id, 1, _entry(self.metadata, self.payload))


class Chunks:
    """An attempt to send a message in chunks. All have its sequence id and metadata, as Pulsar's clients do it.

    Each attempt has a UUID of its own: where a chunk comes again under the same one, consumers of Pulsar's C++ client,
    and of those made of it, lose the message.

    Args:
        message: `LargeMessage.is_one_entry` is false, and `can_be_sent` is true.
        producer: the producer's name.
        max_bytes: the most bytes of an entry.
    """

    def __init__(self, message: LargeMessage, producer: bytes, max_bytes: int) -> None:
        self._sequence_id = message.sequence_id
        self._payload = message.payload
        self._size = max_bytes - len(message.metadata) - _SPARE_BYTES  # of a chunk's payload
        self._n = -(-len(message.payload) // self._size)
        uuid = b"%b-%d-%b" % (producer[:_LONGEST_NAME], message.sequence_id, secrets.token_hex(8).encode())
        sizes = b"\xd8\x01%b\xe0\x01%b" % (_varint(self._n), _varint(len(message.payload)))
        self._metadata = b"%b\xd2\x01%b%b%b" % (message.metadata, _varint(len(uuid)), uuid, sizes)
        self._n_sent = 0

    @property
    def is_last_sent(self) -> bool:
        """Whether `next_entry` has returned all chunks."""
        return self._n_sent == self._n

    def next_entry(self) -> OutgoingEntry:
        """Returns the next chunk."""
        chunk_id = self._n_sent
        self._n_sent += 1
        payload = self._payload[chunk_id * self._size : self._n_sent * self._size]
        data = _entry(b"%b\xe8\x01%b" % (self._metadata, _varint(chunk_id)), payload)
        return OutgoingEntry(self._sequence_id, self._sequence_id, 1, data, is_chunk=True)


def encoded_property(name: str, value: str) -> bytes:
    """Returns a property as a message's metadata has it, without the field's number."""
    data = value.encode()
    size = len(data)
    first = _named(name) if len(name) <= _LONGEST_KEPT else _name_field(name)
    text = first + (_SHORT[size] if size < 128 else _varint(size)) + data
    size = len(text)
    return (_SHORT[size] if size < 128 else _varint(size)) + text


def single_entry(
    message: OutgoingMessage, producer: bytes, published: int, schema_version: bytes = b""
) -> OutgoingEntry:
    """Builds the entry of one message.

    Args:
        producer: the producer's name.
        published: the publish time, ms since the epoch.
        schema_version: as the broker gave it; empty: the message has no schema.

    Raises:
        ValueError: a number is negative, or beyond 64 bits.
    """
    payload = message.payload or b""
    metadata = _shared(message.sequence_id, producer, published, schema_version, len(payload))
    data = _entry(metadata + _of_message(message, _ALONE), payload)
    return OutgoingEntry(message.sequence_id, message.sequence_id, 1, data)


def large_message(
    message: OutgoingMessage, producer: bytes, published: int, schema_version: bytes = b""
) -> LargeMessage:
    """Encodes a message that may be too large for one entry. Arguments and errors are those of `single_entry`."""
    payload = message.payload or b""
    metadata = _shared(message.sequence_id, producer, published, schema_version, len(payload))
    return LargeMessage(message.sequence_id, metadata + _of_message(message, _ALONE), payload)


def batch_entry(
    messages: Sequence[OutgoingMessage], producer: bytes, published: int, schema_version: bytes = b""
) -> OutgoingEntry:
    """Builds the entry of a batch; of one message, too, it is a batch.

    Args:
        messages: at least one, with ascending sequence ids.
        producer: as of `single_entry`; so are the others.

    Raises:
        ValueError: a number is negative, or beyond 64 bits.
    """
    parts: list[bytes] = []
    for message in messages:
        payload = message.payload or b""
        metadata = b"%b\x18%b\x40%b" % (
            _of_message(message, _BATCHED),
            _varint(len(payload)),
            _varint(message.sequence_id),
        )
        parts += (_SIZE.pack(len(metadata)), metadata, payload)
    first, last = messages[0].sequence_id, messages[-1].sequence_id
    body = b"".join(parts)
    metadata = b"%b\x58%b\xc0\x01%b" % (
        _shared(first, producer, published, schema_version, len(body)),
        _varint(len(messages)),
        _varint(last),
    )
    return OutgoingEntry(first, last, len(messages), _entry(metadata, body))


def send_frame(producer_id: int, entry: OutgoingEntry) -> bytes:
    """Returns the frame that sends an entry."""
    send = {
        "producer_id": producer_id,
        "sequence_id": entry.sequence_id,
        "n_messages": entry.n_messages,
        "highest_sequence_id": entry.highest_sequence_id,
    }
    if entry.is_chunk:
        send["is_chunk"] = True
    command = Command(type=Command.SEND, send=send).SerializeToString()
    return _SIZES.pack(4 + len(command) + len(entry.data), len(command)) + command + entry.data


def _shared(sequence_id: int, producer: bytes, published: int, schema_version: bytes, size: int) -> bytes:
    """Returns the fields that each entry has: producer, sequence id, publish time, size, and schema version."""
    fields = b"\x0a%b%b\x10%b\x18%b\x48%b" % (
        _varint(len(producer)),
        producer,
        _varint(sequence_id),
        _varint(published),
        _varint(size),
    )
    if schema_version:
        fields += b"\x82\x01" + _varint(len(schema_version)) + schema_version
    return fields


def _of_message(message: OutgoingMessage, numbers: dict[str, bytes]) -> bytes:
    """Returns the fields of a message beside its sequence id and its size."""
    _, payload, properties, key, is_key_base64, ordering_key, event_time = message
    number = numbers["properties"]
    fields = number + number.join(properties) if properties else b""
    if key is not None:
        fields += numbers["key"] + _varint(len(key)) + key
        if is_key_base64:
            fields += numbers["is_base64"]
    if ordering_key is not None:
        fields += numbers["ordering_key"] + _varint(len(ordering_key)) + ordering_key
    if event_time:
        fields += numbers["event_time"] + _varint(event_time)
    if payload is None:
        fields += numbers["is_null"]
    return fields


def _entry(metadata: bytes, payload: bytes) -> bytes:
    body = b"%b%b%b" % (_SIZE.pack(len(metadata)), metadata, payload)
    return b"%b%b%b" % (_CHECKSUM, _SIZE.pack(google_crc32c.value(body)), body)


def _name_field(name: str) -> bytes:
    """Returns a property's first field, its name, and the number of its second."""
    data = name.encode()
    return b"\x0a%b%b\x12" % (_varint(len(data)), data)


_named = lru_cache(maxsize=10_000)(_name_field)


def _varint(number: int) -> bytes:
    """Returns a number as protobuf has it: seven bits a byte, the lowest first.

    Raises:
        ValueError: it is negative, or beyond 64 bits.
    """
    if 0 <= number < 128:
        return _SHORT[number]
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{number} is negative or beyond 64 bits")
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)
