"""A run of commands of one kind, and what it is decided to do for a subscription."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.match import entry_results, last_rows_of, results_of, rows_of
from tracker.commands.message_state.moves import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from tracker.commands.message_state.remaining import Remaining
from tracker.commands.moment import Moment
from tracker.commands.outcome_rows import Pairs
from tracker.commands.retries import CLOCKS_MILLIS
from tracker.commands.schema import CANCEL, OF_SCHEDULES, RESCHEDULE, RETRY, SKIP
from tracker.commands.standing import Standing, standing
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
from tracker.subscriptions import Subscriptions
from tracker.wire.delaylake_pb2 import Result


@dataclass(frozen=True)
class Decision:
    """The effect of a run on the messages that its commands name for one subscription.

    Attributes:
        subscription: its number.
        pairs: int64, (n,): indexes of the run's pairs that are for it; those of one command are adjacent.
        rows: as KNOWN, (n,): their messages.
        standing: of these.
        payload_row: int64, (n,): the index of each message's row among the run's payload rows; -1: none.
        number: int64, (n,): of a recurring message its next occurrence; else 0.
        result: int64, (n,): numbers of the enum Result.
        reason: n reasons, empty where the command is applied.
        applied: int64, (m,): which of the n are applied, each message once.
        is_shared: bool, (n,): the pair shares one result with its entry.
        starts: bool, (n,): the pair is the first of its command.
        until: int64, (n,), ms since the epoch: when the last of the message's rows is past.
    """

    subscription: int
    pairs: Int64Array
    rows: pa.Table
    standing: Standing
    payload_row: Int64Array
    number: Int64Array
    result: Int64Array
    reason: list[str]
    applied: Int64Array
    is_shared: BoolArray
    starts: BoolArray
    until: Int64Array

    @property
    def answered(self) -> Int64Array:
        """Which of the n get an outcome of their own."""
        return np.flatnonzero(self.starts | ~self.is_shared)

    @property
    def last_due(self) -> Int64Array:
        """When each message was due last, as far as it is known, int64, (n,), ms since the epoch; 0: it is not."""
        _, _, moves, moved_to = self.standing
        return np.where(moves > 0, np.where(moved_to < HELD_DELIVER_AT, moved_to, 0), int64(self.rows, "deliver_at"))

    @property
    def applied_rows(self) -> pa.Table:
        """As KNOWN, (m,): the messages to which the command is applied."""
        return self.rows.take(pa.array(self.applied))


class Run:
    """Commands of one kind, in pairs with the messages that they name, in which no message is moved to two times.

    Args:
        pairs: of commands and messages.
        in_state: as MESSAGES, rows that have not been handed out, with what this tick has moved so far.
    """

    def __init__(self, pairs: Pairs, in_state: Sequence[pa.Table]) -> None:
        self.pairs = pairs
        self.commands = pairs.commands.take(pa.array(pairs.command))
        self.rows = pairs.known.take(pa.array(pairs.row))
        self.kind: str = self.commands["kind"][0].as_py()
        self.payload_rows = pairs.payload_rows
        if has_occurrences(self.payload_rows):  # the next one may have become that in this tick
            self.payload_rows = concat([self.payload_rows, *in_state])
        self._in_state = in_state
        self._masks = int64(self.commands, "subscriptions")

    def with_payload(self, payload_rows: pa.Table) -> Run:
        """Returns the same run with other payload rows."""
        run = copy(self)
        run.payload_rows = payload_rows
        return run

    @property
    def is_moving(self) -> bool:
        """Whether it gives messages another time."""
        return self.kind in (RESCHEDULE, RETRY, *OF_SCHEDULES)

    @property
    def subscriptions(self) -> range:
        """The numbers of the subscriptions that it may be for."""
        return range(int(self._masks.max(initial=0)).bit_length())

    @cached_property
    def messages(self) -> pa.Table:
        """The messages that it names, each once, as KNOWN."""
        return self.rows.take(pa.array(np.unique(self.pairs.row, return_index=True)[1]))

    @cached_property
    def is_whole(self) -> BoolArray:
        """Which pairs are of a command that is answered, and kept, by entry.

        Only one that cancels whole entries is, where all of the entry is here.
        """
        command = self.pairs.command
        is_whole: BoolArray = (int64(self.commands, "batch_index") < 0) & (self.kind in (CANCEL, SKIP))
        if has_keys(self.pairs.known):
            is_whole &= np.bincount(command)[command] >= int64(self.rows, "batch_size")
        return is_whole

    def decide(self, subscription: int, subscriptions: Subscriptions, remaining: Remaining, moment: Moment) -> Decision:
        """Decides what to do for a subscription, and changes nothing.

        Args:
            subscription: its number.
            subscriptions: those of each source topic.
            remaining: which subscriptions each message still goes to.
            moment: of this tick.
        """
        chosen = np.flatnonzero(self._masks >> subscription & 1)
        rows, row = self.rows.take(pa.array(chosen)), self.pairs.row[chosen]
        due = int64(rows, "deliver_at")
        stand = standing(remaining, subscription, rows, self.pairs.is_released[row], moment)
        is_late = stand.is_late
        if self.kind == RETRY:
            is_late = is_late & (np.where(stand.moves > 0, stand.moved_to, due) <= moment.now + CLOCKS_MILLIS)
            # Due, but not handed out: it waits for a place, or a command before this one has moved it to now.
            is_late &= ~self._are_in_state(rows, stand.moves, subscription, subscriptions)
        names = subscriptions.names_of(rows["topic"], subscription)
        payload_row = rows_of(rows, self.payload_rows, stand.moves, names)
        number = self._occurrences(payload_row)
        if self.kind == RETRY or self.payload_rows["attempt"].null_count < self.payload_rows.num_rows:
            payload_row = np.where(number > 0, payload_row, last_rows_of(rows, self.payload_rows, names))
        is_paused = stand.moved_to == PAUSED_DELIVER_AT
        result, reason = results_of(self.kind, stand.cancelled, is_late, payload_row >= 0, number > 0, is_paused)
        applied = np.flatnonzero(result == Result.APPLIED)
        first = np.unique(row[applied], return_index=True)[1]
        result[np.delete(applied, first)] = Result.ALREADY_APPLIED
        is_shared, starts = entry_results(self.pairs.command[chosen], self.is_whole[chosen], result)
        return Decision(
            subscription=subscription,
            pairs=chosen,
            rows=rows,
            standing=stand,
            payload_row=payload_row,
            number=number,
            result=result,
            reason=reason,
            applied=applied[np.sort(first)],
            is_shared=is_shared,
            starts=starts,
            until=np.maximum(due, stand.moved_to),
        )

    def _are_in_state(
        self, rows: pa.Table, sequences: Int64Array, subscription: int, subscriptions: Subscriptions
    ) -> BoolArray:
        """Tells of which messages the row of their last move for a subscription is in state: bool, (rows,).

        Args:
            rows: as KNOWN.
            sequences: int64, (rows,): of the last moves; 0: there is none.
            subscription: its number.
            subscriptions: those of each source topic.
        """
        ids = ["ledger_id", "entry_id", "batch_index"]
        in_state = concat(self._in_state)
        number = subscription_numbers(in_state, subscriptions.names)
        in_state = in_state.filter(pc.or_(pc.is_null(in_state["subscription"]), pa.array(number == subscription)))
        in_state = with_columns(in_state, sequence=pc.fill_null(in_state["sequence"], 0))
        last = rows.select(ids).append_column("sequence", pa.array(sequences))
        return is_among(last, in_state, [*ids, "sequence"])

    def _occurrences(self, payload_row: Int64Array) -> Int64Array:
        """Returns which occurrence of a recurring message each row is, int64, (n,); 0: its message does not recur.

        Args:
            payload_row: int64, (n,): indexes of payload rows; -1: no row.
        """
        numbers = np.zeros(len(payload_row), np.int64)
        if has_occurrences(self.payload_rows):
            of_rows = pc.fill_null(self.payload_rows["occurrence"], 0).to_numpy()
            numbers[payload_row >= 0] = of_rows[payload_row[payload_row >= 0]]
        return numbers
