"""Turns: which job may begin, and how its task is told."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf.times import Moment
from streaming.release.driver.lane_release import LaneRelease, SentRelease
from streaming.release.driver.release_sender import OrderSignals
from streaming.release.driver.releases import Releases
from streaming.release.driver.run_context import RunStates
from streaming.release.driver.transitions import ReleaseEvent, ReleaseState
from streaming.release.driver.unwritable_destinations import RetryRules, UnwritableDestinations
from streaming.release.task.order_signal import RunEndedError, wait_for_signal
from tests.support.tracker.messages import TOPIC
from tracker.in_flight import IN_ORDER, PLANNED


def release(tick: int, *due: int, key: bytes = b"k", kind: int = IN_ORDER | PLANNED) -> LaneRelease:
    """A job with messages of one key."""
    keys = {(TOPIC, key): (min(due), max(due))}
    return LaneRelease(
        tick=tick, kind=kind, lane=f"lane {tick}", assignments=(), due=np.array(due), is_in_order=True, keys=keys
    )


class Run:
    """The releases of a run, and who lets them begin."""

    def __init__(self, folder: Path | None, unwritable: set[tuple[str, str]] | None = None) -> None:
        self.releases = Releases()
        topics = dict.fromkeys(unwritable or (), "destination")
        destinations = UnwritableDestinations(topics, RetryRules(retry_max_seconds=1), self.releases)
        for recipient in topics:
            destinations.add(recipient, "away", [], Moment(0, 0.0))
        states = RunStates(self.releases, destinations)
        self.lock = states.lock
        self.order_signals = OrderSignals(states, folder)

    def add(self, release: LaneRelease) -> None:
        self.releases.add(release)
        assert self.releases.begin_next(release.lane) == release
        self.releases.note(release, ReleaseEvent.TIME)

    def end(self, release: LaneRelease) -> None:
        with self.lock:
            if self.releases.state(release.id) == ReleaseState.BLOCKED:
                self.releases.note(release, ReleaseEvent.UNBLOCKED)
            self.releases.end(SentRelease(release), ReleaseEvent.COMPLETE)
            self.order_signals.announce()


def test_one_waits_for_all_that_come_before_it_and_for_no_other(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first, same_time, earlier, other_key = (
        release(1, 10, 20),
        release(2, 20),
        release(3, 9),
        release(4, 50, key=b"other"),
    )
    short = release(5, 5, kind=IN_ORDER)
    planned = replace(release(5, 6), lane="planned")
    for one in (first, same_time, earlier, other_key, short, planned):
        run.add(one)
    waits = [run.releases.must_wait(one.id) for one in (first, same_time, earlier, other_key, short, planned)]
    assert waits == [False, True, False, False, False, True]
    run.end(short)
    assert not run.releases.must_wait(planned.id)


def test_a_task_that_waits_is_told_when_its_turn_has_come_and_what_is_left_open(tmp_path: Path) -> None:
    run = Run(tmp_path, {(TOPIC, "b")})
    releases = [release(1, 10), release(2, 10), release(3, 10)]
    for one in releases:
        run.add(one)
    files = [run.order_signals.begin(one) for one in releases]
    assert files[0] == ""
    assert wait_for_signal(files[0], lambda: None) == set()
    run.end(releases[0])
    assert [Path(file).exists() for file in files[1:]] == [True, False]
    assert wait_for_signal(files[1], lambda: None) == {(TOPIC, "b")}
    run.releases.note(releases[1], ReleaseEvent.LOST)
    assert run.order_signals.begin(releases[1]) == "", "also when it is sent again"
    run.end(releases[1])
    assert wait_for_signal(files[2], lambda: None) == {(TOPIC, "b")}


def test_a_task_waits_no_longer_than_its_run_lives(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run(folder)
    for one in (release(1, 10), last := release(2, 10)):
        run.add(one)
    file = run.order_signals.begin(last)
    with pytest.raises(RunEndedError):
        wait_for_signal(file, lambda: folder.rmdir() if folder.exists() else None)


@pytest.mark.slow
def test_a_shaped_one_and_one_on_another_machine_begin_when_their_turn_has_come(tmp_path: Path) -> None:
    shaped = replace(release(2, 10), shaped={(TOPIC, 0): (10, 10)})
    for run, then in ((Run(tmp_path), shaped), (Run(None), release(2, 10))):
        first = release(1, 10)
        run.add(first)
        run.add(then)
        run.order_signals.begin(first)
        threading.Timer(0.1, run.end, [first]).start()
        assert run.order_signals.begin(then) == ""
        assert not run.releases.must_wait(then.id)
