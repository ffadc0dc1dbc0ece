"""A rule that fails stops its own message alone, whatever it raises and whenever it is computed."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.support.tracker.messages import TOPIC, batches
from tests.support.tracker.recurring import NAMES, SECOND, Job, recurring
from tracker.commands.kinds import SKIP_NEXT
from tracker.commands.outcomes import NOT_DELIVERED
from tracker.recurrence.recurrence import Recurrence
from tracker.wire.delaylake_pb2 import Result

# Both have an occurrence every 10 seconds; the first one fails from its third occurrence on.
FAILS, WELL = "5,15,25,35,45,55 * * * * *", "5/10 * * * * *"
RRULE_FAILS = "FREQ=SECONDLY;INTERVAL=10"


@pytest.fixture(params=[IndexError("x"), KeyError(1), RecursionError(), AssertionError("no\nline")], ids=repr)
def _planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Recurrence._next

    def fail(self: Recurrence, after: int, start: int) -> int | None:
        if self.repeat in (FAILS, RRULE_FAILS) and after >= 25 * SECOND:
            raise request.param
        return compute(self, after, start)

    monkeypatch.setattr(Recurrence, "_next", fail)


@pytest.mark.usefixtures("_planted")
@pytest.mark.parametrize("misfire", ["once", "all", "skip"])
@pytest.mark.parametrize("repeat", [FAILS, RRULE_FAILS])
def test_its_occurrence_goes_out_it_is_rejected_with_the_reason_and_its_neighbours_go_on(
    repeat: str, misfire: str
) -> None:
    job = Job(is_replayed=True)
    both = [recurring(entry, 5 * SECOND, rule, misfire=misfire) for entry, rule in enumerate((repeat, WELL))]
    plain = batches([(1, 2, -1, 1, 25 * SECOND), (1, 3, -1, 1, 26 * SECOND)])
    rejects = [job.step(pa.concat_tables([*both, plain])).rejects]
    rejects += [job.step().rejects for _ in range(50)]
    for name in NAMES[TOPIC]:
        of = {entry: [(n, at) for e, n, at in job.got[name] if e == entry] for entry in range(4)}
        times = [(n + 1, (5 + 10 * n) * SECOND) for n in range(5)]
        assert of[0] == times[:3]
        assert of[1] == times
        assert (of[2], of[3]) == ([(None, 25 * SECOND)], [(None, 26 * SECOND)])
    rows = pa.concat_tables(rejects).to_pylist()
    assert [row["entry_id"] for row in rows] == [0, 0]
    for row, name in zip(rows, NAMES[TOPIC], strict=True):
        assert row["reason"].startswith(f"{NOT_DELIVERED}{name}: the occurrences after 3: repeat fails with ")
        assert repr(repeat) in row["reason"]
        assert "\n" not in row["reason"]


@pytest.mark.usefixtures("_planted")
def test_what_was_missed_goes_out_before_it_fails() -> None:
    job = Job(is_replayed=True)
    job.step(recurring(0, 5 * SECOND, FAILS, misfire="all"))
    late = job.step(later=60 * SECOND)
    assert job.numbers() == [1, 2, 3]
    assert [row["entry_id"] for row in late.rejects.to_pylist()] == [0, 0]


@pytest.mark.usefixtures("_planted")
def test_a_command_that_skips_to_an_occurrence_that_fails_ends_the_schedule() -> None:
    job = Job(is_replayed=True)
    job.step(pa.concat_tables([recurring(0, 5 * SECOND, FAILS), recurring(1, 5 * SECOND, WELL)]))
    job.run(20)
    assert job.order(SKIP_NEXT, 0) == [Result.APPLIED] * 2
    job.run(30)
    assert [(entry, n) for entry, n, _ in job.got["a"] if entry == 0] == [(0, 1), (0, 2)]
    assert [n for entry, n, _ in job.got["a"] if entry == 1] == [1, 2, 3, 4, 5]


def test_a_schedule_that_ends_as_it_should_is_not_rejected() -> None:
    job = Job()
    by_number = recurring(0, 5 * SECOND, WELL, repeatTimes="2")
    by_time = recurring(1, 5 * SECOND, WELL, repeatUntil=str(20 * SECOND))
    job.step(pa.concat_tables([by_number, by_time]))
    assert sum(job.step().rejects.num_rows for _ in range(40)) == 0
    assert sorted(one[:2] for one in job.got["a"]) == [(0, 1), (0, 2), (1, 1), (1, 2)]
