"""The room that receivers share."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.source.receiving.room import Room
from tests.support.fuzzing.examples import examples
from tests.support.servers.fake_pulsar import FakeConsumer, one
from tests.support.service.harness import wait_until
from tests.support.service.receiver_harness import Harness

MIB = 1 << 20


def test_receivers_share_a_room_and_each_may_keep_a_little() -> None:
    room = Room(10 * MIB)
    assert room.take("a", 9 * MIB)
    assert not room.take("b", 2 * MIB)
    assert room.take("c", MIB // 2), "it keeps nothing yet"
    assert not room.take("d", 2 * MIB), "b waits for longer"
    room.note("a", MIB, is_all=True)
    assert room.take("b", 2 * MIB)
    assert room.take("d", 2 * MIB)
    assert room.total_bytes == 5 * MIB + MIB // 2


def test_what_is_larger_than_the_room_comes_when_little_else_is_kept() -> None:
    room = Room(4 * MIB)
    assert room.take("a", 2 * MIB)
    assert not room.take("b", 5 * MIB)
    assert room.take("c", 1_000), "a small one waits for nobody"
    room.note("a", 0, is_all=True)
    assert room.take("b", 5 * MIB)


def test_a_receiver_that_stops_leaves_its_room_and_its_place() -> None:
    room = Room(4 * MIB)
    assert room.take("a", 4 * MIB)
    assert not room.take("b", 2 * MIB)
    assert not room.take("c", 2 * MIB)
    room.leave("b")
    room.leave("a")
    assert room.take("c", 2 * MIB)
    assert room.total_bytes == 2 * MIB


def test_who_waits_in_a_thread_has_its_turn_when_there_is_room() -> None:
    room, came = Room(4 * MIB), []

    def wait(name: str) -> None:
        if room.take(name, 3 * MIB, 20):
            came.append(name)

    assert room.take("a", 4 * MIB)
    threads = []
    for name in "bc":
        threads.append(threading.Thread(target=wait, args=[name]))
        threads[-1].start()
        wait_until(lambda name=name: name in room._tickets, 5, "it waits")  # type: ignore[misc]
    room.note("a", 0, is_all=True)
    threads[0].join(5)
    assert came == ["b"]
    room.note("b", 0, is_all=True)
    threads[1].join(5)
    assert came == ["b", "c"]


@given(
    sizes=st.lists(st.lists(st.sampled_from([100, 50_000, MIB, 5 * MIB]), max_size=12), min_size=1, max_size=12),
    choose=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(100), deadline=None)
def test_all_get_their_room_in_the_end_and_together_they_keep_little(sizes: list[list[int]], choose: object) -> None:
    """Each receiver takes a message, keeps it, and forgets it some time later, when its batch is committed."""
    room, left = Room(8 * MIB), {str(i): list(own) for i, own in enumerate(sizes)}
    kept: dict[str, list[int]] = {name: [] for name in left}
    largest, idle = max([0, *(size for own in sizes for size in own)]), 0
    while any(left.values()):
        name = choose.choice(sorted(name for name, own in left.items() if own))  # type: ignore[attr-defined]
        if room.take(name, left[name][0]):
            kept[name].append(left[name].pop(0))
            room.note(name, sum(kept[name]), is_all=True)
            idle = 0
        elif any(kept.values()) and choose.random() < 0.3:  # type: ignore[attr-defined]
            other = choose.choice(sorted(name for name, own in kept.items() if own))  # type: ignore[attr-defined]
            kept[other].pop(0)
            room.note(other, sum(kept[other]))
        else:
            idle += 1
        assert idle < 10_000, "nobody gets on"
        assert room.total_bytes <= 8 * MIB + 2 * MIB + largest


def test_a_receiver_without_room_keeps_what_it_has_and_holds_the_next_entry_in_its_hand() -> None:
    room = Room(MIB)
    harness = Harness(max_size=MIB, room=room)
    assert room.take("others", MIB // 2)
    consumer = FakeConsumer([*one(0), *one(1, payload=b"x" * MIB), *one(2)])
    harness.receiver.receive(consumer)
    assert harness.take().num_rows == 1
    assert len(consumer.script) == 1, "the large one is in hand"
    room.note("others", 0, is_all=True)
    harness.receiver.receive(consumer)
    assert harness.take()["entry_id"].to_pylist() == [1]
    harness.receiver.receive(consumer)
    assert harness.take()["entry_id"].to_pylist() == [2]


def test_a_batch_without_room_takes_nothing() -> None:
    harness = Harness()
    harness.receive([*one(0), *one(1)])
    assert harness.receiver.take_into_batch(0, 1 << 30)[1:] == (0, 0)
    assert harness.receiver.take_into_batch(10, 0)[1:] == (0, 0)
    assert harness.receiver.waiting == 2
    assert harness.take().num_rows == 2
