"""Decides what commands do to the messages that they name: one table of condition, result and reason an operation."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import (
    CANCEL,
    OPERATIONS,
    PAUSE_SCHEDULE,
    POSTPONE,
    RESCHEDULE,
    RESTORE,
    RESUME_SCHEDULE,
    RETRY,
    SKIP,
    SKIP_NEXT,
    Effect,
)
from tracker.commands.match import Pairs, entry_results, last_payload_rows_of, payload_rows_of
from tracker.commands.outcomes import Verdicts
from tracker.commands.retries import CLOCKS_MILLIS
from tracker.context import Context
from tracker.due_time import MAX_TIME_MILLIS
from tracker.message_state.changes import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from tracker.message_state.state import DeliveryState, MessageState
from tracker.messages import (
    BoolArray,
    Int64Array,
    concat,
    has_keys,
    has_occurrences,
    int64,
    is_among,
    subscription_numbers,
    with_columns,
)
from tracker.subscriptions import numbers_in
from tracker.wire.delaylake_pb2 import Result

# Why a message can't be retried by its id.
NOT_KEPT = "its payload is not kept: send the message back with the property retryOf"


class When(Enum):
    """A condition of a message for one subscription."""

    CANCELLED = auto()
    NOT_CANCELLED = auto()
    DISPATCHED = auto()
    NOT_DISPATCHED = auto()
    CANCELLED_BEFORE_DISPATCH = auto()
    NOT_KEPT = auto()  # no row with its payload is at hand, so it can't be moved
    RECURRING = auto()
    NOT_RECURRING = auto()
    PAUSED = auto()  # the schedule of a recurring message
    NOT_PAUSED = auto()


class Case(NamedTuple):
    """What a command is answered, and that it does nothing, if a condition of its message holds."""

    when: When
    result: int  # a number of the enum Result
    reason: str = ""


_CANCELLED = Case(When.CANCELLED, Result.INVALID, "cancelled: restore it first")
_DISPATCHED = Case(When.DISPATCHED, Result.TOO_LATE, "released")
_NOT_KEPT = Case(When.NOT_KEPT, Result.TOO_LATE, "not kept any more")

_CANCEL_CASES = (Case(When.CANCELLED, Result.ALREADY_APPLIED), _DISPATCHED)
_MOVE_CASES = (_CANCELLED, Case(When.PAUSED, Result.INVALID, "paused: resume it first"), _DISPATCHED, _NOT_KEPT)

# By operation its cases: the first whose condition holds is the result. If none holds, the command is applied.
CASES: dict[str, tuple[Case, ...]] = {
    CANCEL: _CANCEL_CASES,
    SKIP: _CANCEL_CASES,
    RESCHEDULE: _MOVE_CASES,
    POSTPONE: _MOVE_CASES,
    RESTORE: (
        Case(When.NOT_CANCELLED, Result.ALREADY_APPLIED),
        Case(When.DISPATCHED, Result.TOO_LATE, "its time is past"),
        _NOT_KEPT,
    ),
    RETRY: (
        Case(
            When.RECURRING,
            Result.INVALID,
            "a recurring message is not retried by its id: send the delivered one back",
        ),
        Case(When.CANCELLED_BEFORE_DISPATCH, Result.INVALID, "cancelled: restore it first"),
        Case(When.NOT_DISPATCHED, Result.ALREADY_APPLIED, "it waits"),
        Case(When.NOT_KEPT, Result.NOT_FOUND, NOT_KEPT),
    ),
    SKIP_NEXT: (
        _CANCELLED,
        Case(When.NOT_RECURRING, Result.INVALID, "the message does not recur: skip it"),
        _DISPATCHED,
        _NOT_KEPT,
    ),
    PAUSE_SCHEDULE: (
        _CANCELLED,
        Case(When.PAUSED, Result.ALREADY_APPLIED),
        Case(
            When.NOT_RECURRING,
            Result.INVALID,
            "the message does not recur: reschedule it, or pause the subscription",
        ),
        _DISPATCHED,
        _NOT_KEPT,
    ),
    RESUME_SCHEDULE: (
        _CANCELLED,
        Case(When.NOT_RECURRING, Result.INVALID, "the message does not recur: resume the subscription"),
        _DISPATCHED,
        _NOT_KEPT,
        Case(When.NOT_PAUSED, Result.ALREADY_APPLIED, "it is not paused"),
    ),
}


def _within(times: Int64Array, now: int) -> Int64Array:
    return np.clip(times, now, MAX_TIME_MILLIS - 1)


# By operation that moves messages: when they are due then, by when they are due before, and what the command says, as
# COMMAND_ROWS.deliver_at has it: int64, (n,), each; and the time now. All in ms since the epoch but what is said.
NEW_TIMES: dict[str, Callable[[Int64Array, Int64Array, int], Int64Array]] = {
    RESCHEDULE: lambda _, at, now: np.maximum(at, now),
    POSTPONE: lambda due, by, now: _within(due + by, now),
}


@dataclass(frozen=True)
class Conditions:
    """Conditions of n messages for one subscription, bool, (n,) each.

    Attributes:
        cancelled: the message is cancelled.
        dispatched: the message has been dispatched.
        has_payload: the message has a payload row, so that it can be moved.
        recurs: the message is a recurring one, and has a payload row.
        paused: the message is a recurring one that is paused.
    """

    cancelled: BoolArray
    dispatched: BoolArray
    has_payload: BoolArray
    recurs: BoolArray
    paused: BoolArray

    def hold(self, when: When) -> BoolArray:
        """Tells for which messages a condition holds: bool, (n,)."""
        match when:
            case When.CANCELLED:
                return self.cancelled
            case When.NOT_CANCELLED:
                return ~self.cancelled
            case When.DISPATCHED:
                return self.dispatched
            case When.NOT_DISPATCHED:
                return ~self.dispatched
            case When.CANCELLED_BEFORE_DISPATCH:
                return self.cancelled & ~self.dispatched
            case When.NOT_KEPT:
                return ~self.has_payload
            case When.RECURRING:
                return self.recurs
            case When.NOT_RECURRING:
                return self.has_payload & ~self.recurs
            case When.PAUSED:
                return self.paused
            case When.NOT_PAUSED:
                return ~self.paused


def results_of(operation: str, conditions: Conditions) -> tuple[Int64Array, list[str]]:
    """Returns the results of commands of one operation, a key of CASES, for n messages and one subscription.

    Returns:
        numbers of the enum Result, int64, (n,), and n reasons, empty where the command is applied.
    """
    cases = CASES[operation]
    holds = [conditions.hold(case.when) for case in cases]
    result = np.select(holds, [int(case.result) for case in cases], int(Result.APPLIED))
    reason = np.select(holds, [case.reason for case in cases], "")
    return result.astype(np.int64), reason.tolist()


@dataclass(frozen=True)
class Decision:
    """The decision what a group does for one subscription, for n pairs of command and message.

    Attributes:
        subscription: its number.
        verdicts: on these n pairs.
        rows: as KNOWN, (n,): their messages.
        state: the delivery state of these messages for the subscription.
        payload_row: int64, (n,): the index of each message's row among the group's payload rows; -1: none.
        number: int64, (n,): number of a recurring message's next occurrence; 0: it does not recur.
        applied: int64, (m,): indexes of the pairs that are applied, one for each message.
        until: int64, (n,), ms since the epoch: when the last row of the message is past.
    """

    subscription: int
    verdicts: Verdicts
    rows: pa.Table
    state: DeliveryState
    payload_row: Int64Array
    number: Int64Array
    applied: Int64Array
    until: Int64Array

    @property
    def last_due(self) -> Int64Array:
        """When each message was due last, int64, (n,), ms since the epoch; 0: not known."""
        _, _, moves, moved_to = self.state
        return np.where(moves > 0, np.where(moved_to < HELD_DELIVER_AT, moved_to, 0), int64(self.rows, "deliver_at"))

    def due_times(self, payload_rows: pa.Table, now: int) -> Int64Array:
        """Returns when messages are due to which commands are applied, int64, (m,), ms since the epoch.

        A parked message counts from the time at which it came due.

        Args:
            payload_rows: as MESSAGES, (m,): their rows.
            now: ms since the epoch.
        """
        due = self.last_due[self.applied]
        parked = pc.coalesce(payload_rows["was_due"], payload_rows["deliver_at"]).to_numpy()
        return np.where(due > 0, due, np.where(parked < HELD_DELIVER_AT, parked, now))

    @property
    def applied_rows(self) -> pa.Table:
        """The messages to which commands are applied, as KNOWN, (m,)."""
        return self.rows.take(pa.array(self.applied))


class CommandGroup:
    """Commands of one kind, paired with the messages that they name. They move no message to two different times.

    Args:
        pairs: of commands and messages.
        moves: as MESSAGES: rows of messages that this tick has moved so far.
    """

    def __init__(self, pairs: Pairs, moves: list[pa.Table]) -> None:
        self.pairs = pairs
        self.commands = pairs.commands.take(pa.array(pairs.command))
        self.rows = pairs.known.take(pa.array(pairs.row))
        self.kind: str = self.commands["kind"][0].as_py()
        self.operation = OPERATIONS[self.kind]
        self.payload_rows = pairs.named.payload_rows
        self._in_state = [pairs.named.in_state, *moves]
        # An earlier command of this tick may have made the next occurrence, or the row of a retry, with its number.
        if has_occurrences(self.payload_rows) or any(rows["attempt"].null_count < rows.num_rows for rows in moves):
            self.payload_rows = concat([self.payload_rows, *self._in_state])
        self._masks = int64(self.commands, "subscriptions")

    def with_payload(self, payload_rows: pa.Table) -> CommandGroup:
        """Returns the same group with other payload rows."""
        group = copy(self)
        group.payload_rows = payload_rows
        return group

    @property
    def is_moving(self) -> bool:
        """Whether the commands move messages to another time."""
        return self.operation.wants_payload and self.kind != RESTORE

    @property
    def subscriptions(self) -> range:
        """The numbers of the subscriptions that the commands may be for."""
        return numbers_in(self._masks)

    @cached_property
    def messages(self) -> pa.Table:
        """The messages that the commands name, each once, as KNOWN."""
        return self.rows.take(pa.array(np.unique(self.pairs.row, return_index=True)[1]))

    @cached_property
    def is_whole(self) -> BoolArray:
        """The pairs whose command cancels a whole entry, and is answered and stored for it as a whole: bool, (pairs,).

        All messages of the entry have to be in this shard.
        """
        command = self.pairs.command
        is_whole: BoolArray = (int64(self.commands, "batch_index") < 0) & self.operation.cancels_message
        if has_keys(self.pairs.known):
            is_whole &= np.bincount(command)[command] >= int64(self.rows, "batch_size")
        return is_whole

    def decide(self, subscription: int, context: Context, state: MessageState) -> Decision:
        """Decides what to do for a subscription, given by its number, and changes no state."""
        chosen = np.flatnonzero(self._masks >> subscription & 1)
        rows, row = self.rows.take(pa.array(chosen)), self.pairs.row[chosen]
        due = int64(rows, "deliver_at")
        delivery = state.delivery_state(subscription, rows, self.pairs.named.are_dispatched[row])
        dispatched = delivery.is_late
        if self.kind == RETRY:
            last_due = np.where(delivery.moves > 0, delivery.moved_to, due)
            dispatched = dispatched & (last_due <= context.now + CLOCKS_MILLIS)
            # A due row in state is not dispatched yet: it waits for a place, or an earlier command has moved it to now.
            dispatched &= ~self._are_in_state(rows, delivery.moves, subscription, context)
        names = context.subscriptions.names_of(rows["topic"], subscription)
        payload_row = payload_rows_of(rows, self.payload_rows, delivery.moves, names)
        number = self._occurrence_numbers(payload_row)
        needs_last = self.kind == RETRY or (self.operation.effect is Effect.MOVE and self.operation.adds_up)
        if needs_last or self.payload_rows["attempt"].null_count < self.payload_rows.num_rows:
            payload_row = np.where(number > 0, payload_row, last_payload_rows_of(rows, self.payload_rows, names))
        # By its row: the state does not have yet what a rebuild says of an occurrence that comes next.
        paused = np.append(int64(self.payload_rows, "deliver_at"), 0)[payload_row] == PAUSED_DELIVER_AT
        conditions = Conditions(delivery.cancelled, dispatched, payload_row >= 0, number > 0, paused)
        result, reason = results_of(self.kind, conditions)
        applied = np.flatnonzero(result == Result.APPLIED)
        first = np.unique(row[applied], return_index=True)[1]
        result[np.delete(applied, first)] = Result.ALREADY_APPLIED
        is_shared, starts = entry_results(self.pairs.command[chosen], self.is_whole[chosen], result)
        return Decision(
            subscription=subscription,
            verdicts=Verdicts(chosen, result, reason, is_shared, starts),
            rows=rows,
            state=delivery,
            payload_row=payload_row,
            number=number,
            applied=applied[np.sort(first)],
            until=np.maximum(due, delivery.moved_to),
        )

    def _are_in_state(self, rows: pa.Table, sequences: Int64Array, subscription: int, context: Context) -> BoolArray:
        """Tells which messages have the row that counts for a subscription in state: bool, (rows,).

        Args:
            rows: as KNOWN.
            sequences: int64, (rows,): the sequence of the message's last move for the subscription; 0: none.
            subscription: its number.
        """
        ids = ["ledger_id", "entry_id", "batch_index"]
        in_state = concat(self._in_state)
        number = subscription_numbers(in_state, context.subscriptions.names)
        in_state = in_state.filter(pc.or_(pc.is_null(in_state["subscription"]), pa.array(number == subscription)))
        in_state = with_columns(in_state, sequence=pc.fill_null(in_state["sequence"], 0))
        last = rows.select(ids).append_column("sequence", pa.array(sequences))
        return is_among(last, in_state, [*ids, "sequence"])

    def _occurrence_numbers(self, payload_row: Int64Array) -> Int64Array:
        """Returns the occurrence numbers of payload rows, int64, (n,); 0: no row, or its message does not recur.

        Args:
            payload_row: int64, (n,): indexes of payload rows; -1: no row.
        """
        numbers = np.zeros(len(payload_row), np.int64)
        if has_occurrences(self.payload_rows):
            all_numbers = pc.fill_null(self.payload_rows["occurrence"], 0).to_numpy()
            numbers[payload_row >= 0] = all_numbers[payload_row[payload_row >= 0]]
        return numbers
