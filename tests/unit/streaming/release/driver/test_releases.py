"""Releases from their lane to the tables, driven step by step: what may be sent, written and confirmed when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streaming.release.driver.lane_release import LaneRelease, Remainder, SentRelease
from streaming.release.driver.releases import Releases
from streaming.release.driver.transitions import ReleaseEvent, ReleaseState, TransitionError
from tests.support.tracker.messages import TOPIC

TARGET = (TOPIC, "a")


def release(tick: int, lane: str = "planned0", due: int = 5) -> LaneRelease:
    return LaneRelease(tick=tick, kind=1, lane=lane, assignments=(), due=np.array([due, due + 1]), n_bytes=10)


def batch(releases: Releases, tick: int, *added: LaneRelease, unwritable: Any = None) -> None:
    releases.begin_batch(tick, unwritable or {})
    for one in added:
        releases.add(one)
    releases.end_batch(tick, cutoff=100 * tick)


def send(releases: Releases, lane: str, *left: tuple[str, str]) -> LaneRelease:
    """Sends the next release of a lane; it leaves remainders for some recipients."""
    one = releases.begin_next(lane)
    assert one is not None
    for event in (ReleaseEvent.TIME, ReleaseEvent.UNBLOCKED):
        releases.note(one, event)
    releases.end(SentRelease(one, remainders=[Remainder(one, recipient) for recipient in left]), ReleaseEvent.COMPLETE)
    return one


def test_a_lane_gives_its_oldest_first_and_each_once() -> None:
    releases = Releases()
    batch(releases, 1, release(3), release(1), release(2, lane="other"))
    assert [releases.begin_next("planned0").tick for _ in range(2)] == [1, 3]  # type: ignore[union-attr]
    assert releases.begin_next("planned0") is None
    assert releases.state((2, 1)) == ReleaseState.QUEUED


def test_ticks_are_confirmed_up_to_the_first_release_that_is_not_written() -> None:
    releases = Releases()
    batch(releases, 1, release(1))
    batch(releases, 2)
    batch(releases, 3, release(3, lane="planned1"))
    send(releases, "planned1")
    releases.note_written(one.release for one in releases.take_named(set()))
    assert releases.progress(10).confirmed == 0
    send(releases, "planned0")
    [first] = releases.take_named(set())
    assert releases.state(first.release.id) == ReleaseState.WRITING
    assert releases.progress(10).confirmed == 0, "it may fail yet"
    releases.note_written([first.release])
    found = releases.progress(10)
    assert (found.confirmed, found.settled, found.in_flight, found.in_flight_bytes) == (3, 300, 0, 0)
    assert releases.state(first.release.id) is None


def test_what_is_in_flight_is_due_soon_and_all_its_bytes_count() -> None:
    releases = Releases()
    batch(releases, 1, release(1), release(2, due=9))
    assert [(releases.progress(soon).in_flight, releases.progress(soon).in_flight_bytes) for soon in (4, 5, 9)] == [
        *((0, 20), (1, 20), (3, 20))
    ]


def test_what_is_open_is_named_by_an_offset_before_it_or_anything_later_of_its_lane_is_written() -> None:
    releases = Releases()
    batch(releases, 1, release(1))
    batch(releases, 2, release(2))
    batch(releases, 3, release(3, lane="planned1"))
    send(releases, "planned0", TARGET)
    send(releases, "planned0")
    send(releases, "planned1")
    is_open = {(TARGET, (1, 1))}
    assert [one.release.tick for one in releases.take_named(is_open)] == [3]
    assert releases.take_named(is_open) == []
    releases.begin_batch(4, {TOPIC: {"a": {"open": [], "recalled": [[1, 1]]}}})
    assert [one.release.tick for one in releases.take_named(is_open)] == [1, 2]


def test_a_part_that_is_closed_again_need_not_be_named() -> None:
    releases = Releases()
    batch(releases, 1, release(1))
    send(releases, "planned0", TARGET)
    assert [one.release.tick for one in releases.take_named(set())] == [1]


def test_what_an_earlier_run_has_written_is_confirmed_and_not_sent() -> None:
    releases = Releases()
    batch(releases, 4, release(1))
    one = releases.begin_next("planned0")
    assert one is not None
    releases.end(SentRelease(one), ReleaseEvent.WRITTEN_BEFORE)
    releases.note_written(found.release for found in releases.take_named(set()))
    assert releases.progress(10).confirmed == 4


def test_a_target_has_nothing_on_its_way_when_all_is_written_that_came_before_it_was_parked() -> None:
    releases = Releases()
    batch(releases, 1, release(1), release(2, lane="far", due=50))
    assert releases.is_on_its_way(TARGET, 10), "no offset parks it yet"
    batch(releases, 3, release(3, lane="planned1"), unwritable={TOPIC: {"a": {"open": []}}})
    assert releases.is_on_its_way(TARGET, 10)
    remainder = Remainder(release(1), TARGET)
    assert not releases.is_written(remainder)
    send(releases, "planned0")
    releases.note_written(one.release for one in releases.take_named(set()))
    assert releases.is_written(remainder)
    assert not releases.is_on_its_way(TARGET, 10), "what is due far from now was dispatched before the clock was set"
    assert releases.is_on_its_way(TARGET, 50)


def test_nothing_is_sent_or_written_twice() -> None:
    releases = Releases()
    batch(releases, 1, release(1))
    one = send(releases, "planned0")
    with pytest.raises(TransitionError):
        releases.note(one, ReleaseEvent.UNBLOCKED)
    with pytest.raises(TransitionError):
        releases.note_written([one])
