"""Recurring messages in a shard: single behaviours."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.support.tracker.messages import TOPIC, batches, command, commands
from tests.support.tracker.recurring import NAMES, SECOND, Job, recurring
from tracker.commands.kinds import CANCEL, PAUSE_SCHEDULE, RESCHEDULE, RESTORE, RESUME_SCHEDULE, SKIP, SKIP_NEXT
from tracker.message_state.changes import PAUSED_DELIVER_AT
from tracker.messages import concat
from tracker.rebuilt import OCCURRENCES_DONE, Rebuilt
from tracker.wire.delaylake_pb2 import Result

MINUTE, DAY = 60_000, 86_400_000


def test_each_occurrence_is_handed_out_once_for_each_subscription_with_its_number() -> None:
    job = Job()
    job.step(recurring(0, 5 * SECOND))
    job.run(40)
    for name in NAMES[TOPIC]:
        assert job.got[name] == [(0, n + 1, (5 + 10 * n) * SECOND) for n in range(4)]


@pytest.mark.parametrize(
    ("misfire", "later", "n"), [("once", 5, 0), ("once", 41, 2), ("skip", 41, 2), ("skip", 141, 2), ("all", 41, 0)]
)
def test_a_misfire_is_counted_for_each_subscription(misfire: str, later: int, n: int) -> None:
    job = Job(lookahead=SECOND)
    job.step(recurring(0, 5 * SECOND, misfire=misfire))
    job.run(3)
    assert job.step(later=later * SECOND).status["misfires"] == n
    assert [job.step().status["misfires"] for _ in range(20)] == [0] * 20


def test_a_message_that_does_not_recur_has_no_occurrence() -> None:
    job = Job()
    job.step(batches([(1, 0, -1, 1, 5 * SECOND)]))
    job.run(10)
    assert job.got["a"] == [(0, None, 5 * SECOND)]


def test_it_ends_after_so_many_times() -> None:
    job = Job()
    job.step(recurring(0, 5 * SECOND, repeatTimes="2"))
    job.run(60)
    assert job.numbers() == [1, 2]
    assert job.order(CANCEL, 0, at=5 * SECOND) == [Result.TOO_LATE, Result.TOO_LATE]


@pytest.mark.parametrize("start", [0, 2 * SECOND, 8 * SECOND, 100 * SECOND])
def test_its_row_is_sealed_with_the_seal_epoch_in_which_it_came_however_soon_it_is_due(start: int) -> None:
    job = Job()
    job.step(recurring(0, start), seals=False)
    effects = job.step()
    assert [
        (r["occurrence"], r["deliver_at"], r["sequence"]) for r in effects.bucket.to_pylist() if r["sequence"] is None
    ] == [(1, start, None)]


def test_one_that_is_due_when_it_comes_goes_out_at_once_and_recurs() -> None:
    job = Job()
    job.step(recurring(0, 1 * SECOND))
    job.run(25)
    assert job.times() == [1, 11, 21]


def test_occurrences_within_the_lookahead_go_out_in_one_tick() -> None:
    job = Job(lookahead=3_000)
    job.step(recurring(0, 2 * SECOND, "@every 1s"))
    assert job.times() == [2, 3, 4]
    job.run(5)
    assert job.times() == list(range(2, 10))
    assert job.numbers() == list(range(1, 9))


@pytest.mark.parametrize(
    ("misfire", "times"),
    [("once", [5, 605, 615]), ("all", [*range(5, 620, 10)]), ("skip", [605, 615])],
)
def test_what_a_job_that_was_down_makes_up_for(misfire: str, times: list[int]) -> None:
    job = Job()
    job.step(recurring(0, 5 * SECOND, misfire=misfire))
    job.step(later=600 * SECOND - job.now)
    job.run(20)
    assert job.times() == times
    assert job.numbers() == list(range(1, len(times) + 1))


def test_nothing_was_missed_before_the_message_was_published() -> None:
    job = Job()
    job.now = 30 * DAY
    job.step(recurring(0, 5 * SECOND, published=job.now, misfire="all"))
    job.run(21)
    # The first one, late, and those after it by the clock of the first one: at 5 s, 15 s, ...
    assert job.times() == [5, 30 * 86_400 + 5, 30 * 86_400 + 15]
    assert job.numbers() == [1, 2, 3]
    job.step(later=30 * SECOND)
    assert job.numbers() == [1, 2, 3, 4, 5, 6]


def test_what_is_late_by_less_than_a_minute_was_not_missed() -> None:
    job = Job()
    job.step(recurring(0, 5 * SECOND, misfire="skip"))
    job.step(later=40 * SECOND)
    job.run(5)
    assert job.times() == [5, 45]


def test_of_very_many_that_were_missed_some_go_out_in_each_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracker.commands.occurrences.MOST_AT_ONCE", 7)
    job = Job()
    job.step(recurring(0, 5 * SECOND, misfire="all"))
    job.step(later=300 * SECOND)
    assert len(job.got["a"]) == 8
    assert job.order(CANCEL, 0, (1,), at=5 * SECOND) == [Result.APPLIED]
    job.run(20)
    assert job.times() == [*range(5, 325, 10)]
    assert len(job.got["b"]) == 8


@pytest.mark.parametrize("kind", [CANCEL, SKIP])
def test_a_cancel_or_skip_ends_it_for_the_subscriptions_that_it_names(kind: str) -> None:
    job = Job()
    job.step(recurring(0, 5 * SECOND))
    job.run(20)
    assert job.order(kind, 0, (1,), at=5 * SECOND) == [Result.APPLIED]
    assert job.order(kind, 0, (1,), at=5 * SECOND) == [Result.ALREADY_APPLIED]
    job.run(30)
    assert job.numbers("a") == [1, 2, 3, 4, 5]
    assert job.numbers("b") == [1, 2]


def test_a_restore_before_the_next_occurrence_takes_it_up_again() -> None:
    job = Job()
    job.step(recurring(0, 5 * SECOND))
    job.run(6)
    assert job.order(CANCEL, 0, at=5 * SECOND) == [Result.APPLIED] * 2
    assert job.order(RESTORE, 0, (0,)) == [Result.APPLIED]
    job.run(20)
    assert job.times("a") == [5, 15, 25]
    assert job.times("b") == [5]
    assert job.order(RESTORE, 0, (1,)) != [Result.APPLIED]


@pytest.mark.slow
@pytest.mark.parametrize(("to", "times"), [(7, [5, 7, 25]), (18, [5, 18, 25]), (38, [5, 38, 45])])
def test_a_reschedule_moves_the_next_occurrence_only(to: int, times: list[int]) -> None:
    job = Job()
    job.step(recurring(0, 5 * SECOND))
    job.run(5)
    assert job.order(RESCHEDULE, 0, (0,), at=to * SECOND) == [Result.APPLIED]
    job.run(40)
    assert job.times("a")[:3] == times
    assert job.numbers("a")[:3] == [1, 2, 3]
    assert job.times("b") == [5, 15, 25, 35, 45]


def test_skipping_the_next_occurrence_leaves_a_gap_in_the_numbers() -> None:
    job = Job()
    job.step(recurring(0, 5 * SECOND, repeatTimes="4"))
    job.run(6)
    job.requests += 1
    outcomes = job.step(order=command("s", 1, 0, (0,), kind=SKIP_NEXT)).outcomes.to_pylist()
    assert [(o["result"], o["operation"], o["occurrence"], o["deliver_at"]) for o in outcomes] == [
        (Result.APPLIED, "SKIP_NEXT", 2, 15 * SECOND)
    ]
    job.run(60)
    assert (job.numbers("a"), job.times("a")) == ([1, 3, 4], [5, 25, 35])
    assert job.numbers("b") == [1, 2, 3, 4]


def test_two_skips_of_the_next_occurrence_in_one_tick_skip_two() -> None:
    job = Job()
    job.step(recurring(0, 25 * SECOND))
    job.step(recurring(1, 25 * SECOND), order=command("s1", 1, 0, kind=SKIP_NEXT))
    both = commands([command("s2", 1, 0, kind=SKIP_NEXT), command("s3", 1, 0, kind=SKIP_NEXT)])
    assert both.num_rows == 2
    assert job.order(SKIP_NEXT, 0, (0,)) == [Result.APPLIED]
    assert job.order(SKIP_NEXT, 0, (0,)) == [Result.APPLIED]
    job.run(70)
    assert job.numbers("a") == [4, 5]


def test_skipping_the_last_occurrence_ends_it() -> None:
    job = Job()
    job.step(recurring(0, 5 * SECOND, repeatTimes="2"))
    job.run(6)
    assert job.order(SKIP_NEXT, 0) == [Result.APPLIED] * 2
    assert job.order(SKIP_NEXT, 0) == [Result.TOO_LATE] * 2
    job.run(40)
    assert job.numbers() == [1]
    assert job.step().status["delayed"] == 0


def test_a_message_that_does_not_recur_has_no_next_occurrence_to_skip() -> None:
    job = Job()
    job.step(batches([(1, 0, -1, 1, 50 * SECOND)]))
    effects = job.step(order=command("s", 1, 0, (0,), kind=SKIP_NEXT))
    assert effects.outcomes["result"].to_pylist() == [Result.INVALID]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misfire", "times"), [("once", [5, 15, 115]), ("all", [5, *range(15, 120, 10)]), ("skip", [5, 115])]
)
def test_a_pause_holds_it_back_and_its_end_makes_up_for_what_was_missed(misfire: str, times: list[int]) -> None:
    job = Job()
    job.step(recurring(0, 5 * SECOND, misfire=misfire))
    job.run(6)
    job.pause(0b01, True)
    job.run(100 - job.now // SECOND)
    assert job.times("a") == [5]
    job.pause(0b01, False, later=10 * SECOND)
    job.run(8)
    nominal = [time for time in job.times("a") if time != job.now // SECOND]
    assert job.numbers("a") == list(range(1, len(times) + 1))
    assert nominal[-1] == times[-1]
    assert job.times("b") == [*range(5, 120, 10)]


def test_of_what_was_done_before_a_rebuild_nothing_comes_again() -> None:
    job = Job()
    done = [(0, 1, 0, -1, 1, 5 * SECOND), (0, 1, 0, -1, 2, 15 * SECOND), (0, 1, 0, -1, 4, 35 * SECOND)]
    columns = [pa.array(column, pa.int64()) for column in zip(*done, strict=True)]
    rebuilt = Rebuilt(occurrences=pa.table(columns, names=OCCURRENCES_DONE.names[:6]))  # as an earlier version has it
    job.step(recurring(0, 5 * SECOND, misfire="all"), later=41 * SECOND, rebuilt=rebuilt)
    job.run(30)
    assert job.numbers("a") == [3, 5, 6, 7]
    assert job.times("a") == [25, 45, 55, 65]
    assert job.numbers("b") == [1, 2, 3, 4, 5, 6, 7]
    assert ("occurrences_done", (0, 0)) not in job.store.values


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("kind", "times", "got"),
    [
        (SKIP_NEXT, "9", [(4, 35), (5, 45)]),
        (RESCHEDULE, "9", [(3, 31), (4, 35), (5, 45)]),
        (PAUSE_SCHEDULE, "9", []),
        (SKIP_NEXT, "2", None),
        (RESCHEDULE, "2", None),
        (PAUSE_SCHEDULE, "2", None),
    ],
)
def test_a_command_after_a_rebuild_is_for_the_first_occurrence_that_was_not_done(
    kind: str, times: str, got: list[tuple[int, int]] | None, is_first: bool
) -> None:
    """Also where it is read before its message comes in again; `got` is None where nothing is left of it."""
    job = Job(behind=1)
    done = [(0, 1, 0, -1, 1, 5 * SECOND), (0, 1, 0, -1, 2, 15 * SECOND)]
    columns = [pa.array(column, pa.int64()) for column in zip(*done, strict=True)]
    rebuilt = Rebuilt(occurrences=pa.table(columns, names=OCCURRENCES_DONE.names[:6]))
    order = command("r", 1, 0, (0,), -1, 31 * SECOND if kind == RESCHEDULE else None, kind=kind)
    job.step(later=20 * SECOND, rebuilt=rebuilt)
    came = recurring(0, 5 * SECOND, repeatTimes=times)
    if is_first:
        assert job.step(order=order).status["waiting_commands"] == 1
        effects = job.step(came)
    else:
        effects = job.step(came, order=order)
    [outcome] = effects.outcomes.to_pylist()
    assert outcome["result"] == (Result.TOO_LATE if got is None else Result.APPLIED)
    assert outcome["occurrence"] == (None if got is None else 3)
    job.run(50 - job.now // SECOND)
    assert list(zip(job.numbers("a"), job.times("a"), strict=True)) == (got or [])


@pytest.mark.parametrize("misfire", ["once", "all", "skip"])
@pytest.mark.parametrize("later", [8, 100])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_resume_after_a_rebuild_ends_the_pause_that_the_rebuild_has_found(
    is_first: bool, later: int, misfire: str
) -> None:
    """Also where it is read before its message comes in again."""
    job = Job(behind=1)
    done = [(0, 1, 0, -1, 1, 5 * SECOND, None), (0, 1, 0, -1, 2, 0, PAUSED_DELIVER_AT)]
    columns = [pa.array(column, pa.int64()) for column in zip(*done, strict=True)]
    rebuilt = Rebuilt(occurrences=pa.table(columns, names=OCCURRENCES_DONE.names[:7]))
    job.step(later=later * SECOND, rebuilt=rebuilt)
    order = command("r", 1, 0, (0,), -1, kind=RESUME_SCHEDULE)
    came = recurring(0, 5 * SECOND, repeatTimes="3", misfire=misfire)
    if is_first:
        job.step(order=order)
        effects = job.step(came)
    else:
        effects = job.step(came, order=order)
    [outcome] = effects.outcomes.to_pylist()
    assert (outcome["result"], outcome["occurrence"]) == (Result.APPLIED, 2)
    job.run(40)
    assert job.numbers("a") == [2, 3]


def test_a_rule_that_can_t_be_read_or_chooses_no_day_ends_its_own_schedule_alone() -> None:
    """An earlier version may have taken in what this one does not."""
    job = Job()
    rows = [
        recurring(0, 5 * SECOND),
        recurring(1, 5 * SECOND, "FREQ=MONTHLY;BYMONTH=11;BYDAY=1MO,12TU"),
        recurring(2, 5 * SECOND, "FREQ=MONTHLY;BYDAY=20MO"),
        recurring(3, 5 * SECOND, "0 9 * * *", timeZone="Middle/Earth"),
        recurring(4, 5 * SECOND, "FREQ=NEVER"),
        recurring(5, 5 * SECOND, "FREQ=SECONDLY", repeatTimes="many"),
        recurring(6, 5 * SECOND, "FREQ=SECONDLY;INTERVAL=10", misfire="perhaps"),
        recurring(7, 5 * SECOND, "* * * * *", scheduleKey="k"),
    ]
    effects = [job.step(concat(rows)), *(job.step() for _ in range(70))]
    rejects = concat(one.rejects for one in effects).to_pylist()
    wrong = {3: "timeZone", 4: "repeat", 5: "repeatTimes", 6: "misfire"}
    assert {row["entry_id"] for row in rejects} == wrong.keys()
    assert all(f"the occurrences after 1: {wrong[row['entry_id']]} is n" in row["reason"] for row in rejects)
    assert job.numbers("a", 0) == job.numbers("b", 0) == [1, 2, 3, 4, 5, 6, 7]
    assert [job.numbers("a", entry) for entry in range(1, 7)] == [[1]] * 6
    assert job.numbers("a", 7) == [1, 2]
