"""A group of consecutive commands of one kind, and the decision what to do for a subscription."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import CANCEL, OPERATIONS, POSTPONE, RESTORE, RETRY, SKIP
from tracker.commands.match import entry_results, last_payload_rows_of, payload_rows_of, results_of
from tracker.commands.outcomes import Pairs
from tracker.commands.retries import CLOCKS_MILLIS
from tracker.context import Moment
from tracker.due_time import MAX_TIME_MILLIS
from tracker.message_state.moves import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from tracker.message_state.remaining import DeliveryState, Remaining, delivery_state
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
from tracker.subscriptions import Subscriptions, numbers_in
from tracker.wire.delaylake_pb2 import Result


@dataclass(frozen=True)
class Decision:
    """The decision what a group does for one subscription, for n pairs of command and message.

    Attributes:
        subscription: its number.
        pairs: int64, (n,): the indexes of these pairs among the group's pairs. Pairs of one command are adjacent.
        rows: as KNOWN, (n,): their messages.
        state: the delivery state of these messages for the subscription.
        payload_row: int64, (n,): the index of each message's row among the group's payload rows; -1: none.
        number: int64, (n,): number of a recurring message's next occurrence; 0: it does not recur.
        result: int64, (n,): numbers of the enum Result.
        reason: n reasons, empty where the command is applied.
        applied: int64, (m,): indexes of the pairs that are applied, one for each message.
        is_shared: bool, (n,): the pair shares one result with its entry.
        starts: bool, (n,): the pair is the first of its command.
        until: int64, (n,), ms since the epoch: when the last row of the message is past.
    """

    subscription: int
    pairs: Int64Array
    rows: pa.Table
    state: DeliveryState
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
        """The indexes of the pairs that get an outcome of their own, int64."""
        return np.flatnonzero(self.starts | ~self.is_shared)

    @property
    def last_due(self) -> Int64Array:
        """When each message was due last, int64, (n,), ms since the epoch; 0: not known."""
        _, _, moves, moved_to = self.state
        return np.where(moves > 0, np.where(moved_to < HELD_DELIVER_AT, moved_to, 0), int64(self.rows, "deliver_at"))

    def postponed(self, payload_rows: pa.Table, by: Int64Array, now: int) -> Int64Array:
        """Returns when postponed messages are due then, int64, (m,), ms since the epoch; not before now.

        Args:
            payload_rows: as MESSAGES, (m,): the rows of the messages to which commands are applied.
            by: int64, (m,): by how many ms.
            now: ms since the epoch.
        """
        due = self.last_due[self.applied]
        # A message that is held back counts from the time at which it came due.
        held = pc.coalesce(payload_rows["was_due"], payload_rows["deliver_at"]).to_numpy()
        due = np.where(due > 0, due, np.where(held < HELD_DELIVER_AT, held, now))
        postponed: Int64Array = np.clip(due + by, now, MAX_TIME_MILLIS - 1)
        return postponed

    @property
    def applied_rows(self) -> pa.Table:
        """The messages to which commands are applied, as KNOWN, (m,)."""
        return self.rows.take(pa.array(self.applied))


class CommandGroup:
    """Commands of one kind, paired with the messages that they name. They move no message to two different times.

    Args:
        pairs: of commands and messages.
        in_state: as MESSAGES: rows that have not been handed out, with those that this tick has moved so far.
    """

    def __init__(self, pairs: Pairs, in_state: Sequence[pa.Table]) -> None:
        self.pairs = pairs
        self.commands = pairs.commands.take(pa.array(pairs.command))
        self.rows = pairs.known.take(pa.array(pairs.row))
        self.kind: str = self.commands["kind"][0].as_py()
        self.payload_rows = pairs.payload_rows
        if has_occurrences(self.payload_rows):  # an earlier command of this tick may have made the next occurrence
            self.payload_rows = concat([self.payload_rows, *in_state])
        self._in_state = in_state
        self._masks = int64(self.commands, "subscriptions")

    def with_payload(self, payload_rows: pa.Table) -> CommandGroup:
        """Returns the same group with other payload rows."""
        group = copy(self)
        group.payload_rows = payload_rows
        return group

    @property
    def is_moving(self) -> bool:
        """Whether the commands move messages to another time."""
        return OPERATIONS[self.kind].wants_payload and self.kind != RESTORE

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
        is_whole: BoolArray = (int64(self.commands, "batch_index") < 0) & (self.kind in (CANCEL, SKIP))
        if has_keys(self.pairs.known):
            is_whole &= np.bincount(command)[command] >= int64(self.rows, "batch_size")
        return is_whole

    def decide(self, subscription: int, subscriptions: Subscriptions, remaining: Remaining, moment: Moment) -> Decision:
        """Decides what to do for a subscription, and changes no state.

        Args:
            subscription: its number.
            subscriptions: the subscriptions of each source topic.
            remaining: knows to which subscriptions each message still goes.
            moment: of this tick.
        """
        chosen = np.flatnonzero(self._masks >> subscription & 1)
        rows, row = self.rows.take(pa.array(chosen)), self.pairs.row[chosen]
        due = int64(rows, "deliver_at")
        state = delivery_state(remaining, subscription, rows, self.pairs.is_released[row], moment)
        is_late = state.is_late
        if self.kind == RETRY:
            is_late = is_late & (np.where(state.moves > 0, state.moved_to, due) <= moment.now + CLOCKS_MILLIS)
            # A due row in state is not handed out yet: it waits for a place, or an earlier command has moved it to now.
            is_late &= ~self._are_in_state(rows, state.moves, subscription, subscriptions)
        names = subscriptions.names_of(rows["topic"], subscription)
        payload_row = payload_rows_of(rows, self.payload_rows, state.moves, names)
        number = self._occurrences(payload_row)
        if self.kind in (POSTPONE, RETRY) or self.payload_rows["attempt"].null_count < self.payload_rows.num_rows:
            payload_row = np.where(number > 0, payload_row, last_payload_rows_of(rows, self.payload_rows, names))
        is_paused = state.moved_to == PAUSED_DELIVER_AT
        result, reason = results_of(self.kind, state.cancelled, is_late, payload_row >= 0, number > 0, is_paused)
        applied = np.flatnonzero(result == Result.APPLIED)
        first = np.unique(row[applied], return_index=True)[1]
        result[np.delete(applied, first)] = Result.ALREADY_APPLIED
        is_shared, starts = entry_results(self.pairs.command[chosen], self.is_whole[chosen], result)
        return Decision(
            subscription=subscription,
            pairs=chosen,
            rows=rows,
            state=state,
            payload_row=payload_row,
            number=number,
            result=result,
            reason=reason,
            applied=applied[np.sort(first)],
            is_shared=is_shared,
            starts=starts,
            until=np.maximum(due, state.moved_to),
        )

    def _are_in_state(
        self, rows: pa.Table, sequences: Int64Array, subscription: int, subscriptions: Subscriptions
    ) -> BoolArray:
        """Tells which messages have the row that counts for a subscription in state: bool, (rows,).

        Args:
            rows: as KNOWN.
            sequences: int64, (rows,): the sequence of the message's last move for the subscription; 0: none.
            subscription: its number.
            subscriptions: the subscriptions of each source topic.
        """
        ids = ["ledger_id", "entry_id", "batch_index"]
        in_state = concat(self._in_state)
        number = subscription_numbers(in_state, subscriptions.names)
        in_state = in_state.filter(pc.or_(pc.is_null(in_state["subscription"]), pa.array(number == subscription)))
        in_state = with_columns(in_state, sequence=pc.fill_null(in_state["sequence"], 0))
        last = rows.select(ids).append_column("sequence", pa.array(sequences))
        return is_among(last, in_state, [*ids, "sequence"])

    def _occurrences(self, payload_row: Int64Array) -> Int64Array:
        """Returns the occurrence numbers of payload rows, int64, (n,); 0: no row, or its message does not recur.

        Args:
            payload_row: int64, (n,): indexes of payload rows; -1: no row.
        """
        numbers = np.zeros(len(payload_row), np.int64)
        if has_occurrences(self.payload_rows):
            of_rows = pc.fill_null(self.payload_rows["occurrence"], 0).to_numpy()
            numbers[payload_row >= 0] = of_rows[payload_row[payload_row >= 0]]
        return numbers
