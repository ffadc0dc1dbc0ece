"""Postponed messages: each is due so much later than it would have been."""

from __future__ import annotations

import pytest

from tests.support.tracker.keyed import Job as KeyedJob
from tests.support.tracker.keyed import by_key, keyed
from tests.support.tracker.messages import batches, command, commands
from tests.support.tracker.recurring import SECOND, Job, recurring
from tracker.commands.decode import decode
from tracker.commands.kinds import PAUSE_SCHEDULE, POSTPONE, RESCHEDULE
from tracker.commands.match import split_groups
from tracker.due_time import MAX_TIME_MILLIS
from tracker.messages import MESSAGES, with_columns
from tracker.schemas import SubscriptionRule
from tracker.wire.delaylake_pb2 import ControlCommand, PostponeMessages, Result, SkipEntry

ORDERS = "persistent://public/default/orders"


def one_message() -> Job:
    job = Job()
    job.step(batches([(1, 0, -1, 1, 20 * SECOND)]))
    return job


@pytest.mark.parametrize(("by", "due"), [(7, [27]), (-5, [15]), (-100, [2])])
def test_it_counts_from_when_the_message_is_due_and_never_from_before_now(by: int, due: list[int]) -> None:
    job = one_message()
    assert job.order(POSTPONE, 0, (0,), at=by * SECOND) == [Result.APPLIED]
    job.run(40)
    assert (job.times("a"), job.times("b")) == (due, [20])


def test_it_adds_up_also_after_a_reschedule() -> None:
    job = one_message()
    for kind, at in ((POSTPONE, 5), (RESCHEDULE, 30), (POSTPONE, 5), (POSTPONE, -2)):
        assert job.order(kind, 0, (0,), at=at * SECOND) == [Result.APPLIED]
    job.run(40)
    assert job.times("a") == [33]


def test_two_of_one_message_in_one_tick_are_applied_one_after_the_other() -> None:
    rows = [command("r1", 1, 0, cancel_at=5, kind=POSTPONE), command("r2", 1, 0, cancel_at=5, kind=POSTPONE)]
    assert split_groups(commands([*rows, command("r3", 1, 9, cancel_at=8, kind=POSTPONE)])) == [(0, 1), (1, 3)]


def test_of_a_recurring_message_it_is_the_next_occurrence_alone() -> None:
    job = Job(is_replayed=True)
    job.step(recurring(0, 5 * SECOND))
    job.run(5)
    assert job.order(POSTPONE, 0, (0,), at=4 * SECOND) == [Result.APPLIED]
    job.run(40)
    assert job.times("a")[:4] == [5, 19, 25, 35]
    assert job.numbers("a")[:4] == [1, 2, 3, 4]
    assert job.times("b")[:4] == [5, 15, 25, 35]
    assert job.order(PAUSE_SCHEDULE, 0, (0,)) == [Result.APPLIED]
    assert job.order(POSTPONE, 0, (0,), at=4 * SECOND) == [Result.INVALID]


def test_what_a_pause_holds_back_counts_from_when_it_came_due() -> None:
    job = one_message()
    job.pause(0b01, True)
    job.run(30)
    assert job.times("a") == []
    assert job.order(POSTPONE, 0, (0,), at=15 * SECOND) == [Result.APPLIED]
    job.pause(0b01, False)
    job.run(10)
    assert job.times("a") == [35]


def test_it_waits_for_a_message_that_has_not_come() -> None:
    job = Job(behind=1)
    order = command("r", 1, 0, (0,), -1, 7 * SECOND, kind=POSTPONE)
    [waits] = job.step(order=order).outcomes.to_pylist()
    assert (waits["result"], waits["deliver_at"]) == (Result.WAITING, 7 * SECOND)
    [applied] = job.step(batches([(1, 0, -1, 1, 20 * SECOND)])).outcomes.to_pylist()
    assert (applied["result"], applied["deliver_at"]) == (Result.APPLIED, 27 * SECOND)
    job.run(40)
    assert job.times("a") == [27]


def test_by_its_schedule_key() -> None:
    job = KeyedJob(2, is_replayed=True)
    job.step(keyed(0, "k", 20_000, 0))
    answers = job.step(orders=[by_key("p", "k", POSTPONE, 5_000)])
    assert {(row["result"], row["deliver_at"]) for row in answers} == {(Result.APPLIED, 25_000)}
    assert {row["result"] for row in job.step(orders=[by_key("n", "nobody's", POSTPONE, 5)])} == {Result.NOT_FOUND}


def postpone(by: int, **fields: object) -> ControlCommand:
    content = PostponeMessages(entries=[SkipEntry(ledger_id=1, entry_id=2)], by_millis=by)
    return ControlCommand(request_id="r", topic=ORDERS, postpone=content, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("by", [0, MAX_TIME_MILLIS, -MAX_TIME_MILLIS, 2**62, -(2**62)])
def test_by_nothing_or_beyond_all_times_is_invalid(by: int) -> None:
    rows = MESSAGES.empty_table()
    rows = batches([(9, 0, -1, 1, 0)], payload=postpone(by).SerializeToString())
    read = decode(with_columns(rows), {ORDERS: [SubscriptionRule("a", False)]})
    [row] = read.commands.to_pylist()
    assert (row["kind"], row["result"], "by_millis" in row["reason"]) == ("answer", Result.INVALID, True)


def test_two_by_different_times_are_two_commands_under_one_request_id() -> None:
    rules = {ORDERS: [SubscriptionRule("a", False)]}
    bodies = [
        decode(batches([(9, 0, -1, 1, 0)], payload=postpone(by).SerializeToString()), rules).request_ids["r"]
        for by in (5, 5, 6)
    ]
    assert bodies[0] == bodies[1] != bodies[2]
