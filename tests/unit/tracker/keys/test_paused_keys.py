"""Recurring messages of schedule keys that are paused: named by their key, replaced, and kept."""

from __future__ import annotations

import pytest

from tests.support.tracker.keyed import Job, by_key, entries, keyed, recurring
from tracker.commands.kinds import CANCEL, PAUSE_SCHEDULE, RESUME_SCHEDULE, SKIP_NEXT
from tracker.wire.delaylake_pb2 import Result


def paused(shards: int, idle_millis: int = 600_000) -> Job:
    """A job in which a message of a key recurs every 10 s from the 2nd on, and is paused after its first occurrence."""
    job = Job(shards, idle_millis=idle_millis)
    job.step(later=1_000)
    job.step(recurring(0, 2_000, 1_000))
    for _ in range(3):
        job.step(later=1_000)
    assert results(job, "p", PAUSE_SCHEDULE) == [Result.APPLIED] * 2
    for _ in range(10):
        job.step(later=5_000)
    assert entries(job, "a") == entries(job, "b") == [0]
    return job


def results(job: Job, request: str, kind: str) -> list[object]:
    told = job.step(orders=[by_key(request, "k", kind)])
    return [row["result"] for row in told]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_schedule_is_resumed_by_its_key(shards: int) -> None:
    job = paused(shards)
    assert results(job, "again", PAUSE_SCHEDULE) == [Result.ALREADY_APPLIED] * 2
    assert results(job, "r", RESUME_SCHEDULE) == [Result.APPLIED] * 2
    job.step(later=1_000)
    assert entries(job, "a") == entries(job, "b") == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("idle_millis", [0, 600_000])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_key_names_its_schedule_for_each_command_and_none_once_it_has_ended(shards: int, idle_millis: int) -> None:
    job = paused(shards, idle_millis)
    assert results(job, "r", RESUME_SCHEDULE) == [Result.APPLIED] * 2
    assert results(job, "again", RESUME_SCHEDULE) == [Result.ALREADY_APPLIED] * 2
    assert results(job, "s", SKIP_NEXT) == [Result.APPLIED] * 2
    [skipped] = {(row["occurrence"], row["schedule_key"]) for row in job.outcomes if row["operation"] == "SKIP_NEXT"}
    assert skipped == (3, "k")
    job.step(later=10_000)
    job.step(later=10_000)
    assert entries(job, "a") == entries(job, "b") == [0, 0, 0]
    assert results(job, "c", CANCEL) == [Result.APPLIED] * 2
    job.step(later=100_000)
    assert results(job, "p2", PAUSE_SCHEDULE) == [Result.NOT_FOUND] * 2


@pytest.mark.parametrize("idle_millis", [0, 600_000])
def test_a_newer_message_of_its_key_takes_its_place_and_is_not_paused(idle_millis: int) -> None:
    job = paused(2, idle_millis)
    job.step(recurring(1, job.now + 3_000, job.now))
    for _ in range(4):
        job.step(later=1_000)
    assert job.superseded() == {(0, "1")}
    assert results(job, "r", RESUME_SCHEDULE) == [Result.ALREADY_APPLIED] * 2
    job.step(later=10_000)
    assert entries(job, "a") == entries(job, "b") == [0, 1, 1]


def test_one_that_would_keep_it_yields_to_it() -> None:
    job = paused(2)
    job.step(keyed(1, "k", job.now + 3_000, job.now, scheduleMode="keep"))
    for _ in range(4):
        job.step(later=1_000)
    assert job.superseded() == {(1, "0")}
    assert results(job, "r", RESUME_SCHEDULE) == [Result.APPLIED] * 2
    job.step(later=1_000)
    assert entries(job, "a") == entries(job, "b") == [0, 0]
