"""The room that receivers share."""

from __future__ import annotations

from streaming.source.receiving.room import Room
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


def test_a_batch_without_room_takes_nothing() -> None:
    harness = Harness()
    harness.receive([*one(0), *one(1)])
    assert harness.receiver.take_into_batch(0, 1 << 30)[1:] == (0, 0)
    assert harness.receiver.take_into_batch(10, 0)[1:] == (0, 0)
    assert harness.receiver.waiting == 2
    assert harness.take().num_rows == 2
