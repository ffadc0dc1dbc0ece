"""Chunks of messages that never come whole, or are larger than may be: what they take is bounded."""

from __future__ import annotations

import sys
from itertools import count

from broker.position import START, Position
from broker.protocol.chunks import ChunkAssembler, Whole
from broker.protocol.wire.pulsar_pb2 import MessageMetadata

MOST = 10_000

_ENTRIES = count()


def add(chunks: ChunkAssembler, uuid: bytes, chunk_id: int, of: int, size: int, now: float = 0.0) -> Whole | None:
    position = Position(1, next(_ENTRIES))
    metadata = MessageMetadata(uuid=uuid, n_chunks=of, chunk_id=chunk_id, chunked_size=size * of)
    return chunks.add(position, START, metadata, b"x" * size, now)


def test_a_message_that_is_too_large_is_whole_without_its_payload_and_takes_no_room() -> None:
    chunks = ChunkAssembler(10 * MOST, MOST)
    for i in range(19):
        assert add(chunks, b"large", i, 20, 1_000) is None
        assert chunks._bytes <= MOST
    whole = add(chunks, b"large", 19, 20, 1_000)
    assert whole is not None
    assert whole.payload is None
    assert chunks._bytes == 0


def test_large_ones_that_are_never_whole_leave_room_for_others() -> None:
    chunks = ChunkAssembler(10 * MOST, MOST)
    for i in range(100):
        add(chunks, b"never %d" % i, 0, 2, 9_000)
        assert chunks._bytes <= 10 * MOST
    assert add(chunks, b"honest", 0, 2, 4_000) is None
    for i in range(100, 200):
        add(chunks, b"never %d" % i, 0, 2, 9_000)
    whole = add(chunks, b"honest", 1, 2, 4_000)
    assert whole is not None
    assert whole.payload == b"x" * 8_000


def test_ten_times_as_many_as_may_wait_are_bounded_also_with_ids_of_a_megabyte() -> None:
    chunks = ChunkAssembler(10 * MOST, MOST, max_messages=100)
    for i in range(1_000):
        add(chunks, b"%d" % i + b"u" * (1 << 20), 0, 2, 1)
    assert len(chunks._begun) == 100
    assert sum(map(sys.getsizeof, chunks._begun)) < 100 * 100
    assert len(chunks.given_up) == 900


def test_chunks_without_bytes_are_bounded_too() -> None:
    chunks = ChunkAssembler(10 * MOST, MOST)
    for i in range(1_000):
        assert add(chunks, b"empty", i, 2**31 - 1, 0) is None
        assert sum(len(one.parts or ()) + len(one.entries) for one in chunks._begun.values()) <= 2 * MOST // 200


def test_a_whole_message_names_the_entries_of_its_chunks() -> None:
    chunks = ChunkAssembler(10 * MOST, MOST)
    for chunk_id in range(3):
        add(chunks, b"a", chunk_id, 4, 100)
        add(chunks, b"b", chunk_id, 4, 100)
    whole = add(chunks, b"a", 3, 4, 100)
    assert whole is not None
    first = whole.first.entry_id
    assert [one.entry_id - first for one in whole.entries] == [0, 2, 4, 6]
