"""Commands that come before their message: whether they wait for it, and how long."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tests.support.tracker.control_desk import ALONE, TICK_MILLIS, Desk, results
from tests.support.tracker.messages import command, messages, positions
from tracker.commands.kinds import RETRY
from tracker.rebuilt import MOVED, NOT_TO_DELIVER, Rebuilt
from tracker.wire.delaylake_pb2 import Result

MARGIN = 2 * TICK_MILLIS
MESSAGE = {"subscription": 0, "ledger_id": 1, "entry_id": 7, "batch_index": -1}  # that of ALONE, for "a"


@pytest.mark.parametrize("cancel_at", [None, 50_000])
def test_a_command_that_is_ahead_of_its_message_waits_and_is_applied(desk: Desk, cancel_at: int | None) -> None:
    desk.at(5, 10_000, ingested_through=4)
    assert desk.apply(command("r", 1, 7, [0, 1], cancel_at=cancel_at)) == [("a", Result.WAITING), ("b", Result.WAITING)]
    assert desk.control.n_waiting == 1
    desk.restart()
    desk.at(6, 10_100, ingested_through=4)
    assert desk.arrive(messages([(1, 6, 50_000), (2, 7, 50_000)])) == []
    assert desk.arrive(ALONE) == [("a", Result.APPLIED), ("b", Result.APPLIED)]
    assert desk.subscription_mask(ALONE) == [0]
    assert desk.control.n_waiting == 0
    assert desk.expire() == []


def test_a_message_that_was_cancelled_before_it_came_is_counted_as_unwanted(desk: Desk) -> None:
    """It is tracked all the same, so that it can be restored."""
    desk.at(5, 10_000, ingested_through=4)
    desk.apply(command("r", 1, 7, [0, 1]))
    desk.arrive(ALONE)
    assert desk.state.unwanted == 1


def test_a_message_that_came_late_is_cancelled_though_its_time_is_past(desk: Desk) -> None:
    desk.at(5, 10_000, ingested_through=4)
    desk.apply(command("r", 1, 7, [0]))
    desk.at(6, 60_000, ingested_through=4)
    assert desk.arrive(ALONE) == [("a", Result.APPLIED)]


def test_a_skip_waits_until_what_was_published_before_it_has_come(desk: Desk) -> None:
    desk.at(5, 10_000, ingested_through=4)
    assert desk.apply(command("r", 1, 7, [1])) == [("b", Result.WAITING)]
    assert desk.at(6, 99_000, ingested_through=4).expire() == []
    assert desk.at(7, 99_000, ingested_through=5).expire() == [("b", Result.NOT_FOUND)]
    assert desk.control.n_waiting == 0
    assert desk.arrive(ALONE) == []


def test_a_skip_of_what_is_not_there_is_not_found(desk: Desk) -> None:
    assert desk.at(5, 10_000).apply(command("r", 1, 7, [0])) == [("a", Result.NOT_FOUND)]
    assert desk.control.n_waiting == 0


def test_a_cancel_in_advance_waits_until_two_ticks_after_its_time(desk: Desk) -> None:
    desk.at(5, 10_000)
    assert desk.apply(command("r", 1, 7, [0], cancel_at=50_000)) == [("a", Result.WAITING)]
    cancels = desk.state.take_cancels()
    assert cancels["deliver_at"].to_pylist() == [50_000 - MARGIN]
    assert desk.at(6, 50_000 + MARGIN - 1).expire() == []
    assert desk.at(7, 50_000 + MARGIN).expire() == [("a", Result.NOT_FOUND)]


def test_a_cancel_in_advance_is_due_now_at_the_earliest(desk: Desk) -> None:
    desk.at(5, 10_000)
    desk.apply(command("r", 1, 7, [0], cancel_at=10_500))
    assert desk.state.take_cancels()["deliver_at"].to_pylist() == [10_000]


def test_a_cancel_in_advance_outlasts_its_time_where_messages_may_still_come(desk: Desk) -> None:
    desk.at(5, 10_000, ingested_through=4)
    assert desk.apply(command("r", 1, 7, [0], cancel_at=9_000)) == [("a", Result.WAITING)]
    assert desk.at(6, 90_000, ingested_through=4).expire() == []
    assert desk.arrive(ALONE) == [("a", Result.APPLIED)]


def test_a_cancel_of_a_past_time_is_too_late_where_no_message_can_come(desk: Desk) -> None:
    assert desk.at(5, 10_000).apply(command("r", 1, 7, [0], cancel_at=10_000)) == [("a", Result.TOO_LATE)]
    assert desk.control.n_waiting == 0


def test_a_command_waits_only_for_its_topic_and_partition(desk: Desk) -> None:
    desk.at(5, 10_000, ingested_through=4)
    desk.apply(command("r", 1, 7, [0], partition=2))
    assert desk.arrive(messages([(1, 7, 50_000)], partition=3)) == [("a", Result.NOT_FOUND)]
    desk.apply(command("s", 1, 7, [0], partition=2))
    assert desk.arrive(messages([(1, 7, 50_000)], partition=2)) == [("a", Result.APPLIED)]


@pytest.mark.parametrize(("waits", "result"), [(True, Result.ALREADY_APPLIED), (False, Result.APPLIED)])
def test_a_retry_does_nothing_where_a_message_that_comes_again_waits_for_a_place(
    desk: Desk, waits: bool, result: int
) -> None:
    """After a rebuild the message was parked, and is due now: it was sent only if its row has left the state."""
    desk.at(5, 60_000, ingested_through=4)
    assert desk.apply(command("r", 1, 7, [0], kind=RETRY)) == [("a", Result.WAITING)]
    desk.state.move_messages(ALONE, 0, np.array([60_000]), desk.context.next_sequence())
    moved = desk.state.take_moves()
    desk.at(6, 61_000, ingested_through=4)

    def find_in_state(known: pa.Table) -> pa.Table:
        assert positions(known) == [(1, 7)]
        return moved if waits else moved.slice(0, 0)

    outcomes = desk.control.apply_waiting(ALONE, ALONE.slice(0, 0), done=ALONE, find_in_state=find_in_state)
    assert results(outcomes) == [("a", result)]


def test_a_retry_of_a_message_that_comes_again_after_a_rebuild_follows_the_last_one_that_was_delivered(
    desk: Desk,
) -> None:
    """With the number of an earlier retry a second rebuild took it for delivered, and it never came."""
    until, delivered_at = 9_000_000, 40_000
    done = pa.Table.from_pylist([{**MESSAGE, "until": until}], NOT_TO_DELIVER)
    last = {"sequence": 3, "deliver_at": delivered_at, "until": until, "attempt": 2}
    desk.rebuild(Rebuilt(delivered=done, moved=pa.Table.from_pylist([MESSAGE | last], MOVED)))
    desk.at(5, 60_000, ingested_through=4)
    assert desk.apply(command("r", 1, 7, [0], kind=RETRY)) == [("a", Result.WAITING)]
    outcomes = desk.control.apply_waiting(ALONE)
    assert results(outcomes) == [("a", Result.APPLIED)]
    assert outcomes["attempt"].to_pylist() == [3]
    assert desk.state.take_moves()["attempt"].to_pylist() == [3]
