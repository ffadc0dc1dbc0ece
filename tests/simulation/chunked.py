"""Puts the chunks at destinations together, as consumers of Pulsar's clients do, by messages.md alone."""

from __future__ import annotations

from broker.protocol.wire.pulsar_pb2 import MessageMetadata
from tests.simulation.accounts import require

_KEPT_SECONDS = 60.0  # from its first chunk on: `expireTimeOfIncompleteChunkedMessage`


class ChunkedMessages:
    """The messages of which chunks have come, and not all ("Chunking" in Pulsar's "Messaging").

    A message is there with its last chunk. Chunks of an attempt that was cut off stay behind, and are dropped.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[bytes]] = {}  # by topic and UUID
        self._since: dict[str, float] = {}  # likewise: when the first one came, seconds

    def whole(self, topic: str, metadata: MessageMetadata, payload: bytes, now: float) -> bytes | None:
        """Takes a chunk; returns the payload of its message if that is whole now.

        Args:
            now: seconds.
        """
        uuid = f"{topic} {metadata.uuid.decode()}"
        parts = self._parts.setdefault(uuid, [])
        self._since.setdefault(uuid, now)
        require(metadata.chunk_id >= len(parts), f"chunk {metadata.chunk_id} of {uuid} has come twice")
        require(metadata.chunk_id == len(parts), f"chunk {len(parts)} of {uuid} has not come")
        parts.append(payload)
        if len(parts) < metadata.n_chunks:
            return None
        require(now <= self._since[uuid] + _KEPT_SECONDS, f"the last chunk of {uuid} comes when the others are dropped")
        found = b"".join(parts)
        require(len(found) == metadata.chunked_size, f"the chunks of {uuid} have {len(found)} bytes")
        return found
