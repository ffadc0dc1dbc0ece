"""Messages of schedule keys that are due when they come in, wait after their time, or have been had by some only."""

from __future__ import annotations

import pytest

from tests.support.tracker.keyed import Job, by_key, entries, keyed, recurring
from tests.support.tracker.messages import TOPIC
from tracker.commands.kinds import RESCHEDULE
from tracker.messages import concat
from tracker.schemas import PauseChange
from tracker.subscriptions import Subscriptions
from tracker.wire.delaylake_pb2 import Result

PAUSE, RESUME = PauseChange("pause", TOPIC, 1, True), PauseChange("resume", TOPIC, 1, False)
PAUSE_BOTH, RESUME_BOTH = PauseChange("pause", TOPIC, 3, True), PauseChange("resume", TOPIC, 3, False)


def test_a_schedule_that_begins_at_once_is_ended_by_a_newer_message_of_its_key() -> None:
    job = Job(2)
    job.step(later=1_000)
    job.step(recurring(0, 1_000, 1_000))
    for _ in range(3):
        job.step(later=5_000)
    assert entries(job, "a") == [0, 0]
    job.step(keyed(1, "k", 40_000, 16_000))
    for _ in range(8):
        job.step(later=5_000)
    assert entries(job, "a") == entries(job, "b") == [0, 0, 1]


def test_a_schedule_that_begins_at_once_is_known_by_its_key() -> None:
    job = Job(2)
    job.step(later=1_000)
    job.step(recurring(0, 1_000, 1_000))
    job.step(later=1_000)
    assert {row["result"] for row in job.step(orders=[by_key("c", "k")])} == {Result.APPLIED}
    for _ in range(4):
        job.step(later=5_000)
    assert entries(job, "a") == [0]


@pytest.mark.parametrize(("mode", "delivered"), [("replace", [99]), ("keep", [0]), ("debounce", [99])])
def test_of_messages_that_were_published_while_one_of_their_key_waited_one_is_delivered(
    mode: str, delivered: list[int]
) -> None:
    job = Job(2)
    job.step(later=60_000)
    job.step(concat(keyed(n, "k", n * 10 + 5_000, n * 10, scheduleMode=mode) for n in range(100)))
    job.step(later=5_000)
    assert entries(job, "a") == entries(job, "b") == delivered
    assert len(job.superseded()) == 99


def test_a_key_begins_anew_with_the_message_that_was_published_after_the_time_of_the_one_before() -> None:
    job = Job(2)
    job.step(later=60_000)
    published = [*range(0, 20_000, 2_000), 40_000]
    rule = {"scheduleMode": "debounce", "debounceMax": "8s"}
    job.step(concat(keyed(n, "k", at + 5_000, at, -1, 1, **rule) for n, at in enumerate(published)))
    # The first goes on until 8 s: the last message before that is that of 6 s. The next one begins at 8 s.
    assert entries(job, "a") == [3, 7, 9, 10]
    assert {row["deliver_at"] for row in job.outcomes if row["entry_id"] == 64} == {0}


@pytest.mark.parametrize("is_together", [True, False])
def test_of_messages_that_are_due_while_their_subscriptions_are_paused_the_last_one_goes_out(
    is_together: bool,
) -> None:
    job = Job(2)
    job.step(later=1_000, pauses=[PAUSE_BOTH])
    rows = [keyed(n, "k", 1_000, 1_000) for n in range(10)]
    for some in [concat(rows)] if is_together else rows:
        job.step(some)
    job.step(pauses=[RESUME_BOTH])
    job.step(later=1)
    assert entries(job, "a") == entries(job, "b") == [9]


def test_what_is_due_while_one_subscription_is_paused_is_delivered_to_the_other_and_replaced_for_that_one() -> None:
    job = Job(2)
    job.step(later=1_000, pauses=[PAUSE])
    job.step(concat([keyed(0, "k", 1_000, 1_000), keyed(1, "k", 1_000, 1_000)]))
    job.step(keyed(2, "k", 1_000, 1_000))
    job.step(keyed(3, "k", 3_000, 1_000, scheduleMode="keep"))
    job.step(later=5_000)
    job.step(pauses=[RESUME])
    job.step(later=1)
    assert entries(job, "b") == [0, 1, 2, 3]
    # Those of one batch had been delivered to the other: each counts.
    assert entries(job, "a") == [0, 2, 3]


def test_what_is_due_at_once_and_waits_for_its_place_is_replaced() -> None:
    job = Job(1)
    job.subscriptions = Subscriptions({TOPIC: ["a", "b"]}, shaping={TOPIC: {0: '{"rate": 0.01, "burst": 1}'}})
    job.step(later=1_000)
    job.step(keyed(0, None, 1_000, 1_000))
    for n in range(1, 4):
        job.step(keyed(n, "k", job.now, job.now), later=1_000)
    for _ in range(4):
        job.step(later=100_000)
    assert entries(job, "b") == [0, 1, 2, 3]
    assert entries(job, "a") == [0, 3]


@pytest.mark.parametrize(("mode", "delivered"), [("debounce", [0, 1]), ("keep", [0, 1])])
def test_a_message_that_one_subscription_has_had_is_not_the_first_of_its_key_any_more(
    mode: str, delivered: list[int]
) -> None:
    job = Job(2)
    job.step()
    job.step(keyed(0, "k", 5_000, 0, scheduleMode="debounce", debounceMax="8s"))
    job.step(orders=[by_key("r", "k", RESCHEDULE, 100_000, (1,))])
    job.step(later=6_000)
    job.step(keyed(1, "k", 13_000, 6_000, scheduleMode=mode, debounceMax="8s"))
    job.step(later=6_500)
    assert entries(job, "a") == [0]
    job.step(later=2_000)
    assert entries(job, "a") == delivered
    job.step(later=100_000)
    assert entries(job, "b") == ([1] if mode == "debounce" else [0, 1])
