"""Turns: which job may begin, and how its task is told."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streaming.release.driver.job import Job
from streaming.release.driver.turns import Turns
from streaming.release.task.turn_file import RunEndedError, wait_for_turn
from tests.support.tracker.messages import TOPIC
from tracker.in_flight import IN_ORDER, PLANNED


def job(tick: int, *due: int, key: bytes = b"k", kind: int = IN_ORDER | PLANNED) -> Job:
    """A job with messages of one key."""
    keys = {(TOPIC, key): (min(due), max(due))}
    return Job(
        tick=tick, kind=kind, lane=f"lane {tick}", assignments=(), due=np.array(due), is_in_order=True, keys=keys
    )


def turns(folder: Path, unwritable: set[tuple[str, str]] | None = None) -> Turns:
    return Turns(threading.Condition(), threading.Event(), lambda: unwritable or set(), folder)


def test_one_waits_for_all_that_come_before_it_and_for_no_other(tmp_path: Path) -> None:
    all_turns = turns(tmp_path)
    first, same_time, earlier, other_key = job(1, 10, 20), job(2, 20), job(3, 9), job(4, 50, key=b"other")
    short = job(5, 5, kind=IN_ORDER)
    planned = job(5, 6)
    for one in (first, same_time, earlier, other_key, short, planned):
        all_turns.add(one)
    assert [all_turns.must_wait(one) for one in (first, same_time, earlier, other_key, short, planned)] == [
        *(False, True, False, False, False, True)
    ]
    all_turns.end(short)
    assert not all_turns.must_wait(planned)


def test_a_task_that_waits_is_told_when_its_turn_has_come_and_what_is_left_open(tmp_path: Path) -> None:
    all_turns = turns(tmp_path, {(TOPIC, "b")})
    jobs = [job(1, 10), job(2, 10), job(3, 10)]
    for one in jobs:
        all_turns.add(one)
    files = [all_turns.begin(one) for one in jobs]
    assert files[0] == ""
    assert wait_for_turn(files[0], lambda: None) == set()
    all_turns.end(jobs[0])
    assert [Path(file).exists() for file in files[1:]] == [True, False]
    assert wait_for_turn(files[1], lambda: None) == {(TOPIC, "b")}
    assert all_turns.begin(jobs[1]) == "", "also when it is sent again"
    all_turns.end(jobs[1])
    assert wait_for_turn(files[2], lambda: None) == {(TOPIC, "b")}


def test_a_task_waits_no_longer_than_its_run_lives(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    all_turns = turns(folder)
    for one in (job(1, 10), last := job(2, 10)):
        all_turns.add(one)
    file = all_turns.begin(last)
    with pytest.raises(RunEndedError):
        wait_for_turn(file, lambda: folder.rmdir() if folder.exists() else None)


@pytest.mark.slow
def test_a_shaped_one_and_one_on_another_machine_begin_when_their_turn_has_come(tmp_path: Path) -> None:
    shaped = replace(job(2, 10), shaped={(TOPIC, 0): (10, 10)})
    for all_turns, then in ((turns(tmp_path), shaped), (Turns(threading.Condition(), threading.Event()), job(2, 10))):
        first = job(1, 10)
        all_turns.add(first)
        all_turns.add(then)
        threading.Timer(0.1, all_turns.end, [first]).start()
        assert all_turns.begin(then) == ""
        assert not all_turns.must_wait(then)
