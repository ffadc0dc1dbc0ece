"""The room that receivers share."""

from __future__ import annotations

from typing import Any

from streaming.source.receiving.room import Room, queue_size
from tests.support.servers.fake_pulsar import one
from tests.support.service.receiver_harness import Harness

MIB = 1 << 20


def test_receivers_share_a_room_and_each_may_keep_a_little() -> None:
    room = Room(10 * MIB)
    room.note("a", 9 * MIB)
    assert room.has_room("a")
    room.note("b", 2 * MIB)
    assert not room.has_room("a")
    assert not room.has_room("b")
    assert room.has_room("c"), "it keeps nothing yet"
    room.note("a", MIB)
    assert room.has_room("b")


def test_clients_fetch_ahead_as_much_as_their_share() -> None:
    assert queue_size(100, receivers=1, max_bytes=32 * MIB, most=2_000) == 2_000
    assert queue_size(MIB, receivers=1, max_bytes=32 * MIB, most=2_000) == 32
    assert queue_size(MIB, receivers=60, max_bytes=32 * MIB, most=2_000) == 1


def test_a_batch_without_room_takes_nothing() -> None:
    harness = Harness()
    harness.receive([*one(0), *one(1)])
    assert harness.receiver.take_into_batch(0, 1 << 30)[1:] == (0, 0)
    assert harness.receiver.take_into_batch(10, 0)[1:] == (0, 0)
    assert harness.receiver.waiting == 2
    assert harness.take().num_rows == 2


def with_queue(harness: Harness, sizes: list[float], size_of: Any) -> None:
    limits = harness.receiver._limits

    def queue(mean: float) -> int:
        sizes.append(mean)
        return int(size_of(mean))

    harness.receiver._limits = type(limits)(
        limits.max_delay_millis, limits.max_size, limits.max_messages, limits.max_bytes, None, queue
    )


def test_before_any_message_has_come_they_count_as_large() -> None:
    harness, sizes = Harness(max_size=5_000), list[float]()
    with_queue(harness, sizes, lambda mean: 10)
    assert harness.receiver.begin_queue() == 10
    assert sizes == [5_000]


def test_small_messages_that_come_fast_get_a_longer_queue_and_large_ones_a_shorter_one() -> None:
    harness, sizes = Harness(max_size=1_000_000), list[float]()
    with_queue(harness, sizes, lambda mean: max(1, 100_000 // mean))
    assert harness.receiver.begin_queue() == 1
    harness.receive([message for i in range(3) for message in one(i, payload=b"x" * 100)])
    assert not harness.receiver._is_cut_off, "three messages are no hurry"
    harness.receive([message for i in range(3, 6) for message in one(i, payload=b"x" * 100)])
    assert harness.receiver._is_cut_off
    harness.receiver._is_cut_off = False
    longer = harness.receiver.begin_queue()
    assert longer > 100
    harness.receive([message for i in range(6, 9) for message in one(i, payload=b"x" * 500_000)])
    assert harness.receiver._is_cut_off
    assert harness.receiver.begin_queue() < longer / 2
