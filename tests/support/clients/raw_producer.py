"""Sends any bytes as an entry, as an attacker would: Pulsar's clients check what they send."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import google_crc32c

from broker.protocol.frames import encode
from broker.protocol.wire.pulsar_pb2 import BatchedMetadata, Command, MessageMetadata

_PRODUCER, _SEND, _RECEIPT, _SEND_ERROR, _PRODUCER_SUCCESS = 5, 6, 7, 8, 17
_CHECKSUM = b"\x0e\x01"
_SIZE, _SIZES = struct.Struct(">I"), struct.Struct(">II")


def entry(metadata: MessageMetadata, payload: bytes, *, is_checked: bool = True) -> bytes:
    """An entry of these parts, whatever they are.

    Args:
        is_checked: whether it has its checksum.
    """
    described = metadata.SerializeToString()
    body = _SIZE.pack(len(described)) + described + payload
    return _CHECKSUM + _SIZE.pack(google_crc32c.value(body)) + body if is_checked else body


def batch(messages: Iterable[tuple[BatchedMetadata, bytes]]) -> bytes:
    """The payload of a batch; sizes that are given are kept, however wrong."""
    parts = []
    for metadata, payload in messages:
        if not metadata.HasField("payload_size"):
            metadata.payload_size = len(payload)
        described = metadata.SerializeToString()
        parts += [_SIZE.pack(len(described)), described, payload]
    return b"".join(parts)


def metadata(sequence_id: int, published: int, **fields: Any) -> MessageMetadata:
    """The metadata of an entry, with what the broker asks for."""
    return MessageMetadata(**{"producer_name": b"raw", "sequence_id": sequence_id, "publish_time": published, **fields})


class RawProducer:
    """A producer on a connection of its own.

    Args:
        name: of the producer; empty: the broker gives it one.

    Raises:
        OSError: the broker ends the connection.
    """

    def __init__(self, service_url: str, topic: str, name: str = "") -> None:
        address = urlsplit(service_url)
        self._socket = socket.create_connection((address.hostname or "", address.port or 0), timeout=30)
        self._reader = self._socket.makefile("rb")
        self._sent = 0
        self.refused = 0
        self._socket.sendall(encode(Command.CONNECT, connect={"client_version": "raw", "protocol_version": 20}))
        self._next()
        lookup = {"topic": topic, "request_id": 1, "authoritative": False}
        self._socket.sendall(encode(Command.LOOKUP, lookup=lookup))
        self._next()
        fields = _text(1, topic.encode()) + _number(2, 1) + _number(3, 2)
        self._command(_PRODUCER, fields + (_text(4, name.encode()) if name else b""))
        if self._next() != _PRODUCER_SUCCESS:
            raise OSError("the broker takes no producer")

    def send(self, entry_bytes: bytes, sequence_id: int, n_messages: int = 1, *, is_chunk: bool = False) -> None:
        """Sends an entry, and does not wait for its receipt."""
        fields = _number(1, 1) + _number(2, sequence_id) + _number(3, n_messages) + _number(7, is_chunk)
        self._command(_SEND, fields, entry_bytes)
        self._sent += 1

    def flush(self) -> None:
        """Waits until the broker has taken or refused all that was sent."""
        while self._sent:
            kind = self._next()
            if kind in (_RECEIPT, _SEND_ERROR):
                self._sent -= 1
                self.refused += kind == _SEND_ERROR

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def _command(self, kind: int, fields: bytes, entry_bytes: bytes = b"") -> None:
        body = _number(1, kind) + _text(kind, fields)
        self._socket.sendall(_SIZES.pack(4 + len(body) + len(entry_bytes), len(body)) + body + entry_bytes)

    def _next(self) -> int:
        """Waits for a command; returns its type, which is its first field. Its number is below 128."""
        while True:
            size, command_size = _SIZES.unpack(self._read(_SIZES.size))
            command = self._read(command_size)
            self._read(size - 4 - command_size)
            if command[1] != Command.PING:
                return command[1]
            self._socket.sendall(encode(Command.PONG, pong={}))

    def _read(self, n: int) -> bytes:
        data = self._reader.read(n)
        if len(data) < n:
            raise ConnectionError("the broker has ended the connection")
        return data


def _varint(value: int) -> bytes:
    parts = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
