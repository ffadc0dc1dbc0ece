"""Releases from their lane to the tables, driven step by step: what may be sent, written and confirmed when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streaming.release.driver.job import FinishedJob, Job, OpenPart
from streaming.release.driver.releases import Releases
from streaming.release.driver.transitions import ReleaseEvent, ReleaseState, TransitionError
from tests.support.tracker.messages import TOPIC

TARGET = (TOPIC, "a")


def job(tick: int, lane: str = "planned0", due: int = 5) -> Job:
    return Job(tick=tick, kind=1, lane=lane, assignments=(), due=np.array([due, due + 1]), n_bytes=10)


def batch(releases: Releases, tick: int, *jobs: Job, unwritable: Any = None) -> None:
    releases.begin_batch(tick, unwritable or {})
    for one in jobs:
        releases.add(one)
    releases.end_batch(tick, cutoff=100 * tick)


def send(releases: Releases, lane: str, *left: tuple[str, str]) -> Job:
    """Sends the next release of a lane; it leaves open parts for some targets."""
    one = releases.begin_next(lane)
    assert one is not None
    for event in (ReleaseEvent.TIME, ReleaseEvent.TURN):
        releases.note(one, event)
    releases.end(FinishedJob(one, parts=[OpenPart(one, target) for target in left]), ReleaseEvent.COMPLETE)
    return one


def test_a_lane_gives_its_oldest_first_and_each_once() -> None:
    releases = Releases()
    batch(releases, 1, job(3), job(1), job(2, lane="other"))
    assert [releases.begin_next("planned0").tick for _ in range(2)] == [1, 3]  # type: ignore[union-attr]
    assert releases.begin_next("planned0") is None
    assert releases.state((2, 1)) == ReleaseState.QUEUED


def test_ticks_are_confirmed_up_to_the_first_release_that_is_not_written() -> None:
    releases = Releases()
    batch(releases, 1, job(1))
    batch(releases, 2)
    batch(releases, 3, job(3, lane="planned1"))
    send(releases, "planned1")
    releases.note_written(one.job for one in releases.take_named(set()))
    assert releases.progress(10).confirmed == 0
    send(releases, "planned0")
    [first] = releases.take_named(set())
    assert releases.state(first.job.release) == ReleaseState.WRITING
    assert releases.progress(10).confirmed == 0, "it may fail yet"
    releases.note_written([first.job])
    found = releases.progress(10)
    assert (found.confirmed, found.settled, found.in_flight, found.in_flight_bytes) == (3, 300, 0, 0)
    assert releases.state(first.job.release) is None


def test_what_is_in_flight_is_due_soon_and_all_its_bytes_count() -> None:
    releases = Releases()
    batch(releases, 1, job(1), job(2, due=9))
    assert [(releases.progress(soon).in_flight, releases.progress(soon).in_flight_bytes) for soon in (4, 5, 9)] == [
        *((0, 20), (1, 20), (3, 20))
    ]


def test_what_is_open_is_named_by_an_offset_before_it_or_anything_later_of_its_lane_is_written() -> None:
    releases = Releases()
    batch(releases, 1, job(1))
    batch(releases, 2, job(2))
    batch(releases, 3, job(3, lane="planned1"))
    send(releases, "planned0", TARGET)
    send(releases, "planned0")
    send(releases, "planned1")
    is_open = {(TARGET, (1, 1))}
    assert [one.job.tick for one in releases.take_named(is_open)] == [3]
    assert releases.take_named(is_open) == []
    releases.begin_batch(4, {TOPIC: {"a": {"open": [], "recalled": [[1, 1]]}}})
    assert [one.job.tick for one in releases.take_named(is_open)] == [1, 2]


def test_a_part_that_is_closed_again_need_not_be_named() -> None:
    releases = Releases()
    batch(releases, 1, job(1))
    send(releases, "planned0", TARGET)
    assert [one.job.tick for one in releases.take_named(set())] == [1]


def test_what_an_earlier_run_has_written_is_confirmed_and_not_sent() -> None:
    releases = Releases()
    batch(releases, 4, job(1))
    one = releases.begin_next("planned0")
    assert one is not None
    releases.end(FinishedJob(one), ReleaseEvent.WRITTEN_BEFORE)
    releases.note_written(found.job for found in releases.take_named(set()))
    assert releases.progress(10).confirmed == 4


def test_a_target_has_nothing_on_its_way_when_all_is_written_that_came_before_it_was_parked() -> None:
    releases = Releases()
    batch(releases, 1, job(1), job(2, lane="far", due=50))
    assert releases.is_on_its_way(TARGET, 10), "no offset parks it yet"
    batch(releases, 3, job(3, lane="planned1"), unwritable={TOPIC: {"a": {"open": []}}})
    assert releases.is_on_its_way(TARGET, 10)
    part = OpenPart(job(1), TARGET)
    assert not releases.is_written(part)
    send(releases, "planned0")
    releases.note_written(one.job for one in releases.take_named(set()))
    assert releases.is_written(part)
    assert not releases.is_on_its_way(TARGET, 10), "what is due far from now was dispatched before the clock was set"
    assert releases.is_on_its_way(TARGET, 50)


def test_nothing_is_sent_or_written_twice() -> None:
    releases = Releases()
    batch(releases, 1, job(1))
    one = send(releases, "planned0")
    with pytest.raises(TransitionError):
        releases.note(one, ReleaseEvent.TURN)
    with pytest.raises(TransitionError):
        releases.note_written([one])
