"""Turns: which job may begin, and how its task is told."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streaming.release.driver.destinations import Destinations, Moment, RetryRules
from streaming.release.driver.job import FinishedJob, Job
from streaming.release.driver.job_sender import Turns
from streaming.release.driver.releases import Releases
from streaming.release.driver.transitions import ReleaseEvent, ReleaseState
from streaming.release.task.turn_file import RunEndedError, wait_for_turn
from tests.support.tracker.messages import TOPIC
from tracker.in_flight import IN_ORDER, PLANNED


def job(tick: int, *due: int, key: bytes = b"k", kind: int = IN_ORDER | PLANNED) -> Job:
    """A job with messages of one key."""
    keys = {(TOPIC, key): (min(due), max(due))}
    return Job(
        tick=tick, kind=kind, lane=f"lane {tick}", assignments=(), due=np.array(due), is_in_order=True, keys=keys
    )


class Run:
    """The releases of a run, and who lets them begin."""

    def __init__(self, folder: Path | None, unwritable: set[tuple[str, str]] | None = None) -> None:
        self.lock = threading.Condition()
        self.releases = Releases()
        topics = dict.fromkeys(unwritable or (), "destination")
        destinations = Destinations(topics, RetryRules(retry_max_seconds=1), self.releases)
        for target in topics:
            destinations.add(target, "away", [], Moment(0, 0.0))
        self.turns = Turns(self.lock, self.releases, destinations, threading.Event(), folder)

    def add(self, job: Job) -> None:
        self.releases.add(job)
        assert self.releases.begin_next(job.lane) == job
        self.releases.note(job, ReleaseEvent.TIME)

    def end(self, job: Job) -> None:
        with self.lock:
            if self.releases.state(job.release) == ReleaseState.BEHIND:
                self.releases.note(job, ReleaseEvent.TURN)
            self.releases.end(FinishedJob(job), ReleaseEvent.COMPLETE)
            self.turns.announce()


def test_one_waits_for_all_that_come_before_it_and_for_no_other(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first, same_time, earlier, other_key = job(1, 10, 20), job(2, 20), job(3, 9), job(4, 50, key=b"other")
    short = job(5, 5, kind=IN_ORDER)
    planned = replace(job(5, 6), lane="planned")
    for one in (first, same_time, earlier, other_key, short, planned):
        run.add(one)
    waits = [run.releases.must_wait(one.release) for one in (first, same_time, earlier, other_key, short, planned)]
    assert waits == [False, True, False, False, False, True]
    run.end(short)
    assert not run.releases.must_wait(planned.release)


def test_a_task_that_waits_is_told_when_its_turn_has_come_and_what_is_left_open(tmp_path: Path) -> None:
    run = Run(tmp_path, {(TOPIC, "b")})
    jobs = [job(1, 10), job(2, 10), job(3, 10)]
    for one in jobs:
        run.add(one)
    files = [run.turns.begin(one) for one in jobs]
    assert files[0] == ""
    assert wait_for_turn(files[0], lambda: None) == set()
    run.end(jobs[0])
    assert [Path(file).exists() for file in files[1:]] == [True, False]
    assert wait_for_turn(files[1], lambda: None) == {(TOPIC, "b")}
    run.releases.note(jobs[1], ReleaseEvent.LOST)
    assert run.turns.begin(jobs[1]) == "", "also when it is sent again"
    run.end(jobs[1])
    assert wait_for_turn(files[2], lambda: None) == {(TOPIC, "b")}


def test_a_task_waits_no_longer_than_its_run_lives(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = Run(folder)
    for one in (job(1, 10), last := job(2, 10)):
        run.add(one)
    file = run.turns.begin(last)
    with pytest.raises(RunEndedError):
        wait_for_turn(file, lambda: folder.rmdir() if folder.exists() else None)


@pytest.mark.slow
def test_a_shaped_one_and_one_on_another_machine_begin_when_their_turn_has_come(tmp_path: Path) -> None:
    shaped = replace(job(2, 10), shaped={(TOPIC, 0): (10, 10)})
    for run, then in ((Run(tmp_path), shaped), (Run(None), job(2, 10))):
        first = job(1, 10)
        run.add(first)
        run.add(then)
        run.turns.begin(first)
        threading.Timer(0.1, run.end, [first]).start()
        assert run.turns.begin(then) == ""
        assert not run.releases.must_wait(then.release)
