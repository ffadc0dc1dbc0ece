"""Schedules that are paused one by one, in a shard."""

from __future__ import annotations

import pytest

from tests.support.tracker.messages import batches, command
from tests.support.tracker.recurring import SECOND, Job, recurring
from tracker.commands.kinds import CANCEL, PAUSE_SCHEDULE, RESCHEDULE, RESTORE, RESUME_SCHEDULE, SKIP_NEXT
from tracker.wire.delaylake_pb2 import Result


def paused(bits: tuple[int, ...] = (0,), **properties: str) -> Job:
    """A job in which a message recurs every 10 s from the 5th on, and is paused after its first occurrence."""
    job = Job()
    job.step(recurring(0, 5 * SECOND, "@every 10s", 0, **properties))
    job.run(6)
    assert job.order(PAUSE_SCHEDULE, 0, bits) == [Result.APPLIED] * len(bits)
    return job


def run_until(job: Job, second: int) -> None:
    job.run(second - job.now // SECOND)


@pytest.mark.slow
@pytest.mark.parametrize("sealed_each", [1, 3])
def test_a_paused_schedule_waits_for_its_subscription_alone(sealed_each: int) -> None:
    job = paused()
    for n in range(100):
        job.step(seals=n % sealed_each == 0)
    assert job.times("a") == [5]
    assert len(job.times("b")) > 5


def test_the_command_is_told_with_its_occurrence_and_repeated_does_nothing_more() -> None:
    job = Job()
    job.step(recurring(0, 5 * SECOND))
    job.run(6)

    def told(kind: str) -> list[tuple[int, str, int | None, int | None]]:
        job.requests += 1
        outcomes = job.step(order=command(f"r{job.requests}", 1, 0, (0,), kind=kind)).outcomes.to_pylist()
        return [(one["result"], one["operation"], one["occurrence"], one["deliver_at"]) for one in outcomes]

    assert told(RESUME_SCHEDULE) == [(Result.ALREADY_APPLIED, "RESUME_SCHEDULE", None, None)]
    assert told(PAUSE_SCHEDULE) == [(Result.APPLIED, "PAUSE_SCHEDULE", 2, None)]
    assert told(PAUSE_SCHEDULE) == [(Result.ALREADY_APPLIED, "PAUSE_SCHEDULE", None, None)]
    assert told(RESUME_SCHEDULE) == [(Result.APPLIED, "RESUME_SCHEDULE", 2, 15 * SECOND)]
    assert told(RESUME_SCHEDULE) == [(Result.ALREADY_APPLIED, "RESUME_SCHEDULE", None, None)]
    job.run(20)
    assert job.times("a") == job.times("b")[: len(job.times("a"))] == [5, 15, 25]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misfire", "times"), [("once", [5, 15, 115]), ("all", [5, *range(15, 120, 10)]), ("skip", [5, 115])]
)
def test_what_was_missed_when_it_is_resumed_is_treated_as_misfire_says(misfire: str, times: list[int]) -> None:
    job = paused(misfire=misfire)
    run_until(job, 108)
    assert job.order(RESUME_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    run_until(job, 117)
    assert job.numbers("a") == list(range(1, len(times) + 1))
    assert job.times("a")[-1] == times[-1]
    if misfire == "all":
        assert job.times("a") == times


@pytest.mark.slow
def test_occurrences_that_were_missed_do_not_count() -> None:
    job = paused(repeatTimes="3")
    run_until(job, 98)
    job.order(RESUME_SCHEDULE, 0, (0,))
    job.run(60)
    assert job.numbers("a") == [1, 2, 3]
    assert job.times("a")[2] == 105
    assert job.step().status["delayed"] == 0


def test_a_first_occurrence_can_be_paused_before_it_is_in_a_bucket_and_when_it_is_near() -> None:
    for start in (30, 4):
        job = Job()
        job.step(recurring(0, start * SECOND, misfire="all"), seals=False)
        assert job.order(PAUSE_SCHEDULE, 0) == [Result.APPLIED] * 2
        job.run(40)
        assert job.times("a") == job.times("b") == []
        assert job.order(RESUME_SCHEDULE, 0) == [Result.APPLIED] * 2
        job.run(2)
        assert job.times("a") == job.times("b") == list(range(start, job.now // SECOND + 1, 10))


def test_skipping_the_next_occurrence_leaves_it_paused() -> None:
    job = paused()
    run_until(job, 48)
    assert job.order(SKIP_NEXT, 0, (0,)) == [Result.APPLIED]
    run_until(job, 60)
    assert job.order(PAUSE_SCHEDULE, 0, (0,)) == [Result.ALREADY_APPLIED]
    assert job.times("a") == [5]
    assert job.order(RESUME_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    run_until(job, 66)
    assert job.numbers("a") == [1, 3, 4]
    assert job.times("a")[2] == 65


def test_skipping_its_last_occurrence_ends_it() -> None:
    job = paused(bits=(0, 1), repeatTimes="2")
    assert job.order(SKIP_NEXT, 0) == [Result.APPLIED] * 2
    assert job.order(RESUME_SCHEDULE, 0) == [Result.TOO_LATE] * 2
    job.run(20)
    assert job.numbers() == [1]
    assert job.step().status["delayed"] == 0


@pytest.mark.slow
def test_it_can_be_cancelled_and_restored_whenever_and_is_paused_still() -> None:
    job = paused()
    assert job.order(CANCEL, 0, (0,), at=5 * SECOND) == [Result.APPLIED]
    for kind in (PAUSE_SCHEDULE, RESUME_SCHEDULE, SKIP_NEXT):
        assert job.order(kind, 0, (0,)) == [Result.INVALID]
    run_until(job, 100)
    assert job.order(RESTORE, 0, (0,)) == [Result.APPLIED]
    job.run(20)
    assert job.times("a") == [5]
    assert job.order(RESUME_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    job.run(1)
    assert job.numbers("a") == [1, 2]


def test_a_paused_one_is_not_rescheduled() -> None:
    job = paused()
    assert job.order(RESCHEDULE, 0, (0,), at=0) == [Result.INVALID]
    job.run(20)
    assert job.times("a") == [5]


def test_a_rescheduled_occurrence_gets_its_time_by_the_rule_back() -> None:
    job = Job()
    job.step(recurring(0, 25 * SECOND))
    assert job.order(RESCHEDULE, 0, (0,), at=90 * SECOND) == [Result.APPLIED]
    assert job.order(PAUSE_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    assert job.order(RESUME_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    job.run(40)
    assert job.times("a") == job.times("b") == [25, 35]


@pytest.mark.parametrize("is_held_first", [True, False])
def test_a_pause_of_the_subscription_ends_no_pause_of_a_schedule_nor_the_other_way_round(is_held_first: bool) -> None:
    job = Job()
    job.step(recurring(0, 5 * SECOND, misfire="all"))
    job.run(6)
    if is_held_first:
        job.pause(0b01, True)
        run_until(job, 20)
        assert job.order(PAUSE_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    else:
        assert job.order(PAUSE_SCHEDULE, 0, (0,)) == [Result.APPLIED]
        job.pause(0b01, True)
    run_until(job, 40)
    job.pause(0b01, False)
    run_until(job, 60)
    assert job.times("a") == [5]
    job.pause(0b01, True)
    assert job.order(RESUME_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    run_until(job, 70)
    assert job.times("a") == [5]
    job.pause(0b01, False)
    run_until(job, 76)
    assert job.times("a") == [5, 15, 25, 35, 45, 55, 65, 75]


def test_a_message_that_does_not_recur_is_no_schedule() -> None:
    job = Job()
    job.step(batches([(1, 0, -1, 1, 50 * SECOND)]))
    for kind in (PAUSE_SCHEDULE, RESUME_SCHEDULE):
        assert job.order(kind, 0, (0,)) == [Result.INVALID]
    job.run(60)
    assert job.times("a") == [50]
