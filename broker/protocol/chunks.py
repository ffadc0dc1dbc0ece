"""Puts chunked messages together: those that their producers cut because they are larger than an entry may be."""

from __future__ import annotations

from dataclasses import dataclass, field

from broker.position import Position
from broker.protocol.wire.pulsar_pb2 import MessageMetadata


@dataclass
class _Begun:
    """A message of which chunks have come, and some are missing."""

    first: Position
    n_chunks: int
    size: int
    since: float  # when its first chunk came, seconds
    parts: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Whole:
    """A chunked message all of whose chunks have come."""

    first: Position  # the entry of its first chunk
    metadata: MessageMetadata  # of its last chunk
    payload: bytes  # of all chunks; perhaps compressed


@dataclass(frozen=True)
class Incomplete:
    """A chunked message that is given up."""

    first: Position
    reason: str


class ChunkAssembler:
    """Collects chunks by message, in any interleaving, bounded in bytes and in time.

    Args:
        max_bytes: the most bytes of incomplete messages together.
        max_messages: the most incomplete messages.
        max_seconds: how long a message waits for its last chunk.
    """

    def __init__(self, max_bytes: int, max_messages: int = 1_000, max_seconds: float = 60.0) -> None:
        self._max_bytes = max_bytes
        self._max_messages = max_messages
        self._max_seconds = max_seconds
        self._begun: dict[bytes, _Begun] = {}  # by uuid, oldest first
        self._bytes = 0
        self.given_up: list[Incomplete] = []  # since the caller has emptied it

    @property
    def first_begun(self) -> Position | None:
        """The first entry that an incomplete message needs; None: no message is incomplete."""
        return min((message.first for message in self._begun.values()), default=None)

    def add(self, position: Position, metadata: MessageMetadata, part: bytes, now: float) -> Whole | None:
        """Takes a chunk; returns its message if that is whole now. A chunk that comes again is passed over.

        Args:
            position: the chunk's entry.
            metadata: of the chunk.
            part: its payload, decrypted.
            now: a monotonic clock, seconds.
        """
        self.expire(now)
        uuid, chunk_id = metadata.uuid, metadata.chunk_id
        begun = self._begun.get(uuid)
        if begun is not None and chunk_id == 0:
            if position == begun.first:
                return None
            self._give_up(uuid, "its producer began it again")
            begun = None
        if begun is None:
            if chunk_id:
                return None  # the first chunk is from before the subscription, or its message was given up
            begun = self._begun[uuid] = _Begun(position, metadata.n_chunks, metadata.chunked_size, now)
        elif chunk_id < len(begun.parts):
            return None
        elif chunk_id > len(begun.parts):
            self._give_up(uuid, f"its chunk {len(begun.parts)} did not come")
            return None
        begun.parts.append(part)
        self._bytes += len(part)
        if len(begun.parts) == begun.n_chunks:
            self._forget(uuid)
            return Whole(begun.first, metadata, b"".join(begun.parts))
        while self._bytes > self._max_bytes or len(self._begun) > self._max_messages:
            self._give_up(next(iter(self._begun)), "chunked messages with more bytes have begun than may wait")
        return None

    def expire(self, now: float) -> None:
        """Gives up the messages whose chunks have not come in time."""
        for uuid, begun in list(self._begun.items()):
            if now - begun.since <= self._max_seconds:
                return
            self._give_up(uuid, f"{len(begun.parts)} of its {begun.n_chunks} chunks came in {self._max_seconds:.0f} s")

    def _give_up(self, uuid: bytes, reason: str) -> None:
        self.given_up.append(Incomplete(self._begun[uuid].first, reason))
        self._forget(uuid)

    def _forget(self, uuid: bytes) -> None:
        self._bytes -= sum(map(len, self._begun.pop(uuid).parts))
