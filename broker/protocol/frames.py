"""Frames of Pulsar's binary protocol: from bytes to commands and back.

A frame is its size (4 bytes, big-endian), the size of a command (4 bytes), the command, and what may follow it: the
entry of a message. Source: https://pulsar.apache.org/docs/next/developing-binary-protocol/#framing
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from broker.client import PulsarError
from broker.protocol.wire.pulsar_pb2 import Command

PROTOCOL_VERSION = 20
DEFAULT_MAX_MESSAGE_BYTES = 5 << 20  # where the broker does not say another
_PADDING_BYTES = 64 << 10  # beside the message a frame has a command, perhaps with a bit for each message of a batch
_SIZES = struct.Struct(">II")
_COMPACT_BYTES = 1 << 20  # the buffer is moved to its start when so much of it has been read


class ProtocolError(PulsarError):
    """The broker has sent what is no frame, or none that a client can take. The connection is of no use any more."""


class Frame(NamedTuple):
    """A command, and the bytes behind it: an entry's, where the command is MESSAGE; else none."""

    command: Command
    entry: bytes


class FrameDecoder:
    """Cuts what a connection receives into frames. It holds at most one frame and what was fed last.

    Attributes:
        max_message_bytes: the largest message; the broker says it when the connection is made.
    """

    def __init__(self) -> None:
        self.max_message_bytes = DEFAULT_MAX_MESSAGE_BYTES
        self._buffer = bytearray()
        self._start = 0  # of what has not been read yet

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Takes bytes in the order in which they came; yields the frames that are whole by now.

        Raises:
            ProtocolError: the bytes are no frames, or a frame is larger than the broker's largest message.
        """
        self._buffer += data
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        buffer, start = self._buffer, self._start
        there = len(buffer) - start
        if there < _SIZES.size:
            return None
        size, command_size = _SIZES.unpack_from(buffer, start)
        if size > self.max_message_bytes + _PADDING_BYTES:
            raise ProtocolError(f"the broker sends a frame of {size} bytes; its largest has {self.max_message_bytes}")
        if command_size + 4 > size:
            raise ProtocolError(f"the broker sends a frame of {size} bytes with a command of {command_size}")
        if there < size + 4:
            return None
        begin, end = start + _SIZES.size, start + 4 + size
        with memoryview(buffer) as view:
            command_bytes = bytes(view[begin : begin + command_size])
            entry = bytes(view[begin + command_size : end])
        self._start = end
        if end == len(buffer):
            buffer.clear()
            self._start = 0
        elif end > _COMPACT_BYTES:
            del buffer[:end]
            self._start = 0
        try:
            return Frame(Command.FromString(command_bytes), entry)
        except DecodeError as error:
            raise ProtocolError("the broker sends a command that can't be read") from error


def encode(kind: Command.Type, **fields: Any) -> bytes:
    """Returns the frame of a command without an entry.

    Args:
        kind: the command's type.
        fields: the field of that type, as a message or a mapping.
    """
    body = Command(type=kind, **fields).SerializeToString()
    return _SIZES.pack(len(body) + 4, len(body)) + body
