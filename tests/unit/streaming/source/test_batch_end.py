"""When a batch ends and what is acknowledged, with the time, the backlog and the feedback as arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conf.settings import IngestSettings
from conf.times import Moment
from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.source.batch_end import Acknowledgements, Backlog, BatchEnds, may_rest, why_not_taking
from streaming.source.clock import Clock, ClockSettings
from tests.support.tracker.fake_index import FakeIndex
from tracker.message_state.changes import HELD_DELIVER_AT

NOW = 1_000_000
LOOKAHEAD = 2_000
LIMITS = IngestSettings(max_messages_per_batch=1_000, max_bytes_per_batch=1 << 20)
NOTHING = Backlog(0, 0, lambda soon: False, is_taken=True)
RESTING = Offset(run_id="run", cutoff=NOW + LOOKAHEAD, near_until=NOW + 100_000)
IDLE = Feedback(next_due=HELD_DELIVER_AT)


class Ends:
    """Batches, of which the first has ended; `seconds` is the time since then."""

    def __init__(self) -> None:
        clock = Clock(ClockSettings("run", LOOKAHEAD, 5_000, 10_000))
        self.ends = BatchEnds(LIMITS, clock)
        clock.next(RESTING, Moment(NOW, 100.0), IDLE, FakeIndex(newest=1))
        self.ends.note_end(100.0)

    def is_due(
        self, backlog: Backlog, seconds: float, last: Offset = RESTING, feedback: Feedback = IDLE, rests: bool = True
    ) -> bool:
        return self.ends.is_due(backlog, last, Moment(NOW, 100.0 + seconds), feedback, lambda: rests)


@pytest.mark.parametrize(
    ("backlog", "is_urgent"),
    [
        (NOTHING, False),
        (replace(NOTHING, messages=1), False),
        (replace(NOTHING, messages=500), True),
        (replace(NOTHING, messages=1, n_bytes=1 << 20), True),
        (replace(NOTHING, messages=1, has_due=lambda soon: soon >= NOW + LOOKAHEAD), True),
        (replace(NOTHING, messages=1, has_due=lambda soon: soon > NOW + LOOKAHEAD), False),
        (replace(NOTHING, messages=1_000, is_taken=False), False),
    ],
    ids=["nothing", "a message", "half a batch", "a batch of bytes", "due soon", "due later", "not taken"],
)
def test_what_is_urgent_ends_a_batch_at_once(backlog: Backlog, is_urgent: bool) -> None:
    assert Ends().is_due(backlog, 0.001) == is_urgent


def test_what_is_not_urgent_waits_for_an_interval_that_follows_from_how_long_batches_take() -> None:
    a_message = replace(NOTHING, messages=1)
    quick, slow = Ends(), Ends()
    for n in range(15):
        for ends, seconds in ((quick, 0.1), (slow, 0.6)):
            ends.ends.note_end(200.0 + n)
            ends.ends.note_ready(200.0 + n + seconds)
            ends.ends.note_end(100.0)
    assert [quick.is_due(a_message, seconds) for seconds in (0.59, 0.61)] == [False, True]
    assert [slow.is_due(a_message, seconds) for seconds in (0.89, 0.91)] == [False, True]
    assert not quick.is_due(NOTHING, 0.61), "nothing has come, and there is nothing to do"
    assert not quick.is_due(replace(a_message, is_taken=False), 0.61)


A_MESSAGE = replace(NOTHING, messages=1)


@pytest.mark.parametrize(
    ("backlog", "last", "feedback"),
    [
        (replace(NOTHING, has_rounds=True), RESTING, IDLE),
        (NOTHING, replace(RESTING, rejects_since={"t": 1}), IDLE),
        (NOTHING, RESTING, replace(IDLE, unwritable={"t": {"s": {"since": 1, "open": []}}})),
        (NOTHING, replace(RESTING, run_id="another"), IDLE),
        (A_MESSAGE, replace(RESTING, barriers=[[1, {}]]), IDLE),
        (A_MESSAGE, RESTING, replace(IDLE, waiting=(0, {"t": {"s": [[1, NOW]]}}))),
        (A_MESSAGE, RESTING, replace(IDLE, next_due=RESTING.cutoff)),
    ],
    ids=["parked", "rejects", "unwritable", "a new run", "commands wait", "waits for places", "waits for room"],
)
def test_what_somebody_waits_for_does_not_wait_as_long_as_messages_that_are_due_later(
    backlog: Backlog, last: Offset, feedback: Feedback
) -> None:
    assert [Ends().is_due(backlog, seconds, last, feedback) for seconds in (0.29, 0.31)] == [False, True]


def test_a_seal_epoch_ends_in_time_also_where_messages_wait() -> None:
    ends = Ends()
    ends.ends.note_end(104.8)
    assert [ends.is_due(A_MESSAGE, seconds, rests=False) for seconds in (5.09, 5.11)] == [False, True]


def test_what_comes_due_in_state_waits_for_the_interval() -> None:
    last, soon = replace(RESTING, cutoff=NOW), replace(IDLE, next_due=NOW + 1_000)
    assert [Ends().is_due(NOTHING, seconds, last, soon) for seconds in (0.59, 0.61)] == [False, True]


def test_the_interval_is_at_most_half_the_lookahead() -> None:
    short = replace(IDLE, lookahead_millis=800)
    assert [Ends().is_due(A_MESSAGE, seconds, feedback=short) for seconds in (0.39, 0.41)] == [False, True]


@pytest.mark.parametrize(
    ("last", "feedback"),
    [
        (replace(RESTING, positions={"t": "1:1"}), IDLE),
        (replace(RESTING, barriers=[[1, {}]]), IDLE),
        (RESTING, replace(IDLE, in_flight=1)),
        (RESTING, replace(IDLE, next_due=None)),
        (RESTING, replace(IDLE, next_due=NOW)),
    ],
    ids=["not durable", "a command waits", "in flight", "nothing is known", "something comes due"],
)
def test_the_job_rests_only_where_nothing_is_left_to_do(last: Offset, feedback: Feedback) -> None:
    assert may_rest(RESTING, {}, IDLE)
    assert not may_rest(last, {}, feedback)


def test_batches_take_no_messages_while_senders_are_behind_a_disk_is_full_or_old_commands_have_not_come() -> None:
    assert why_not_taking(replace(IDLE, in_flight=10), 10, None) is None
    behind = why_not_taking(replace(IDLE, in_flight=11_000), 10, "full", ["c"])
    assert behind == "the senders are behind, with 11,000 messages in flight"
    assert "MiB in flight" in (why_not_taking(replace(IDLE, in_flight_bytes=1 << 40), 10, None) or "")
    assert why_not_taking(IDLE, 10, "full", ["c"]) == "full"
    commands = why_not_taking(IDLE, 10, None, ["c", "d"])
    assert commands == "commands that were sent before the start have not all come: c, d"


def test_entries_are_acknowledged_once_when_a_committed_batch_says_that_their_seal_epoch_is_durable() -> None:
    found = Acknowledgements()
    for number in (1, 2, 3):
        found.note_seal_epoch(number, {"t": f"1:{number}"})
    assert found.note_commit(0) is None
    assert found.note_commit(2) == {"t": "1:2"}
    assert found.durable == {"t": "1:2"}
    assert found.note_commit(2) is None, "a batch that ends no seal epoch"
    assert found.note_commit(1) is None
    assert found.note_commit(3) == {"t": "1:3"}
    assert found.note_commit(4) == {}, "of a seal epoch of the run before the positions are not known"
