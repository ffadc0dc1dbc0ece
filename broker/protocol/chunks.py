"""Puts chunked messages together: those that their producers cut because they are larger than an entry may be."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from broker.position import Position
from broker.protocol.wire.pulsar_pb2 import MessageMetadata

_PART_BYTES = 200  # of a part in memory beside its own, of which it may have none


@dataclass
class _Begun:
    """A message of which chunks have come, and some are missing."""

    before: Position
    first: Position
    since: float  # when its first chunk came, seconds
    n_parts: int = 0
    parts: list[bytes] | None = field(default_factory=list)  # None: they are too many bytes
    entries: list[Position] = field(default_factory=list)  # of the parts
    n_bytes: int = 0  # of the parts, and _PART_BYTES for each


@dataclass(frozen=True)
class Whole:
    """A chunked message all of whose chunks have come.

    Attributes:
        before: the last entry that came before its first chunk.
        first: the entry of its first chunk.
        metadata: of its last chunk.
        payload: of all chunks; perhaps compressed. None: it has more bytes than may wait.
        entries: of all chunks; empty where the payload is None.
    """

    before: Position
    first: Position
    metadata: MessageMetadata
    payload: bytes | None
    entries: tuple[Position, ...]


@dataclass(frozen=True)
class Incomplete:
    """A chunked message that is given up: the entry of its first chunk, and why."""

    first: Position
    reason: str


class ChunkAssembler:
    """Collects chunks by message, in any interleaving, bounded in bytes, messages and time. Not thread-safe.

    Args:
        max_bytes: the most bytes of incomplete messages together, with 200 for each chunk. Where there are more, the
            largest one's are dropped.
        max_message_bytes: the most bytes of a message; those of a larger one are dropped.
        max_messages: the most incomplete messages.
        max_seconds: how long a message waits for its last chunk.
    """

    def __init__(
        self, max_bytes: int, max_message_bytes: int, max_messages: int = 1_000, max_seconds: float = 90.0
    ) -> None:
        self._max_bytes, self._max_message_bytes = max_bytes, max_message_bytes
        self._max_messages = max_messages
        self._max_seconds = max_seconds
        self._begun: dict[bytes, _Begun] = {}  # by a digest of the uuid, which may be of any length; oldest first
        self._bytes = 0
        self.given_up: list[Incomplete] = []  # the caller empties it

    @property
    def may_be_acknowledged(self) -> Position | None:
        """The last entry before all incomplete messages; None: no message is incomplete."""
        return min((message.before for message in self._begun.values()), default=None)

    def add(
        self, position: Position, before: Position, metadata: MessageMetadata, part: bytes, now: float
    ) -> Whole | None:
        """Takes a chunk; returns its message if that is whole now. A chunk that comes again is passed over.

        Args:
            position: the chunk's entry.
            before: the last entry that came before it.
            metadata: of the chunk.
            part: its payload, decrypted.
            now: a monotonic clock, seconds.
        """
        self.expire(now)
        uuid, chunk_id = _short(metadata.uuid), metadata.chunk_id
        begun = self._begun.get(uuid)
        if begun is not None and chunk_id == 0 and position != begun.first:
            self._give_up(uuid, "its producer began it again")
            begun = None
        if begun is None:
            if chunk_id:
                return None  # the first chunk is from before the subscription, or its message was given up
            if len(self._begun) >= self._max_messages:
                self._give_up(next(iter(self._begun)), f"{self._max_messages} others have begun since")
            begun = self._begun[uuid] = _Begun(before, position, now)
        if chunk_id < begun.n_parts:
            return None
        if chunk_id > begun.n_parts:
            self._give_up(uuid, f"its chunk {begun.n_parts} did not come")
            return None
        begun.n_parts += 1
        self._keep(begun, position, part)
        if begun.n_parts < metadata.n_chunks:
            return None
        payload = None if begun.parts is None else b"".join(begun.parts)
        self._forget(uuid)
        return Whole(begun.before, begun.first, metadata, payload, tuple(begun.entries))

    def begin_anew(self, now: float) -> None:
        """Lets all messages wait from now on: a new consumer gets all of their chunks again."""
        for begun in self._begun.values():
            begun.since = now

    def expire(self, now: float) -> None:
        """Gives up the messages whose chunks have not come in time."""
        for uuid, begun in list(self._begun.items()):
            if now - begun.since <= self._max_seconds:
                return
            self._give_up(uuid, f"only {begun.n_parts} of its chunks came within {self._max_seconds:.0f} s")

    def _keep(self, begun: _Begun, position: Position, part: bytes) -> None:
        """Keeps a part; drops the parts of a message that is too large, or for which there is no room."""
        if begun.parts is None:
            return
        begun.parts.append(part)
        begun.entries.append(position)
        begun.n_bytes += len(part) + _PART_BYTES
        self._bytes += len(part) + _PART_BYTES
        if begun.n_bytes > self._max_message_bytes:
            self._drop_parts(begun)
        while self._bytes > self._max_bytes:
            self._drop_parts(max(self._begun.values(), key=lambda message: message.n_bytes))

    def _drop_parts(self, begun: _Begun) -> None:
        self._bytes -= begun.n_bytes
        begun.parts, begun.entries, begun.n_bytes = None, [], 0

    def _give_up(self, uuid: bytes, reason: str) -> None:
        self.given_up.append(Incomplete(self._begun[uuid].first, reason))
        self._forget(uuid)

    def _forget(self, uuid: bytes) -> None:
        self._bytes -= self._begun.pop(uuid).n_bytes


def _short(uuid: bytes) -> bytes:
    return hashlib.blake2b(uuid, digest_size=16).digest()
