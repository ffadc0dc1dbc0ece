"""The table of what commands are answered, against what is said of each operation in words."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.support.tracker.control_desk import Desk
from tracker.commands.apply import Executor
from tracker.commands.decide import CASES, NEW_TIMES, NOT_KEPT, Conditions, When, results_of
from tracker.commands.kinds import (
    CANCEL,
    OPERATIONS,
    PAUSE_SCHEDULE,
    RESTORE,
    RESUME_SCHEDULE,
    RETRY,
    SKIP,
    Effect,
)
from tracker.wire.delaylake_pb2 import Result

# A message has a payload row where it recurs, and recurs where it is paused.
MESSAGES = [
    (cancelled, dispatched, has_payload, recurs, paused)
    for cancelled, dispatched, has_payload, recurs, paused in product([False, True], repeat=5)
    if has_payload >= recurs >= paused
]


def said(operation: str, cancelled: bool, dispatched: bool, has_payload: bool, recurs: bool, paused: bool) -> int:
    """What a command of an operation is answered, as docs/control.md says it."""
    if operation in (CANCEL, SKIP):
        if cancelled:
            return Result.ALREADY_APPLIED
        return Result.TOO_LATE if dispatched else Result.APPLIED
    if operation == RESTORE:
        if not cancelled:
            return Result.ALREADY_APPLIED
        return Result.TOO_LATE if dispatched or not has_payload else Result.APPLIED
    if operation == RETRY:
        if recurs or (cancelled and not dispatched):
            return Result.INVALID
        if not dispatched:
            return Result.ALREADY_APPLIED
        return Result.APPLIED if has_payload else Result.NOT_FOUND
    if cancelled:
        return Result.INVALID
    if OPERATIONS[operation].effect is Effect.MOVE and paused:
        return Result.INVALID
    if operation == PAUSE_SCHEDULE and paused:
        return Result.ALREADY_APPLIED
    if OPERATIONS[operation].is_of_schedule and has_payload and not recurs:
        return Result.INVALID
    if dispatched or not has_payload:
        return Result.TOO_LATE
    return Result.ALREADY_APPLIED if operation == RESUME_SCHEDULE and not paused else Result.APPLIED


@pytest.mark.parametrize("operation", CASES)
def test_each_message_gets_the_result_that_is_said_and_a_reason_where_it_is_told_why(operation: str) -> None:
    columns = np.array(MESSAGES, np.bool_).T
    results, reasons = results_of(operation, Conditions(*columns))
    assert results.tolist() == [said(operation, *message) for message in MESSAGES]
    told = {Result.INVALID, Result.TOO_LATE, Result.NOT_FOUND}
    assert all(reason for result, reason in zip(results.tolist(), reasons, strict=True) if result in told)
    assert not any(reason for result, reason in zip(results.tolist(), reasons, strict=True) if result == Result.APPLIED)


def test_each_operation_on_messages_has_cases_and_an_effect(desk: Desk) -> None:
    of_messages = {kind for kind, operation in OPERATIONS.items() if not operation.is_of_subscription}
    assert CASES.keys() == of_messages
    executor = Executor(desk.context, desk.state, desk.occurrences)
    assert executor._own_effects.keys() <= of_messages
    assert {OPERATIONS[kind].effect for kind in of_messages - executor._own_effects.keys()} == executor._effects.keys()
    assert NEW_TIMES.keys() == {kind for kind in of_messages if OPERATIONS[kind].effect is Effect.MOVE}


def test_each_condition_is_in_some_case_and_no_case_is_hidden_by_those_before_it() -> None:
    assert {case.when for cases in CASES.values() for case in cases} == set(When)
    conditions = Conditions(*np.array(MESSAGES, np.bool_).T)
    for cases in CASES.values():
        is_decided = np.zeros(len(MESSAGES), np.bool_)
        for case in cases:
            assert (conditions.hold(case.when) & ~is_decided).any(), case
            is_decided |= conditions.hold(case.when)


def test_a_retry_by_id_of_what_is_not_kept_says_what_to_do_instead() -> None:
    columns = np.array([(False, True, False, False, False)], np.bool_).T
    results, reasons = results_of(RETRY, Conditions(*columns))
    assert (results.tolist(), reasons) == ([Result.NOT_FOUND], [NOT_KEPT])
