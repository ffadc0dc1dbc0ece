"""Applies commands to the messages that they name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.decide import CommandGroup, Decision
from tracker.commands.kinds import (
    CANCEL,
    OPERATIONS,
    PAUSE_SCHEDULE,
    POSTPONE,
    RESCHEDULE,
    RESTORE,
    RETRY,
    SKIP,
    Effect,
)
from tracker.commands.match import entry_results, match, split_groups, times_of
from tracker.commands.occurrences import Occurrences
from tracker.commands.outcomes import Pairs, out_of_batch, outcomes_of
from tracker.commands.retries import retry_rows
from tracker.context import Moment
from tracker.due_time import MAX_TIME_MILLIS
from tracker.message_state.operations import Operations
from tracker.message_state.remaining import Remaining
from tracker.messages import (
    MESSAGES,
    BoolArray,
    Int64Array,
    attempts_of,
    concat,
    empty_table,
    int64,
    message_ids,
    where,
    with_columns,
)
from tracker.rebuilt import REBUILT_KEPT_MILLIS
from tracker.schemas import OUTCOME_ROWS
from tracker.subscriptions import ALSO_LATER, Subscriptions
from tracker.wire.delaylake_pb2 import Result


@dataclass(frozen=True)
class ShardOwnership:
    """Which commands and messages belong to a shard. A message with a schedule key may be in another than its entry.

    Attributes:
        commands: bool, (commands,): this shard answers the command if its message is not known.
        known: bool, (known,): this shard has the message, and answers. If not, another shard does.
    """

    commands: BoolArray
    known: BoolArray


class Executor:
    """Applies commands to known messages.

    Args:
        subscriptions: the subscriptions of each source topic.
        remaining: knows to which subscriptions each message still goes.
        operations: collects rows of type CANCEL, RESTORE and MOVE.
        occurrences: moves recurring messages on to their next occurrence.
        remembered_millis: how long after its time a message is remembered as cancelled, ms.
    """

    def __init__(
        self,
        subscriptions: Subscriptions,
        remaining: Remaining,
        operations: Operations,
        occurrences: Occurrences,
        remembered_millis: int,
    ) -> None:
        self._subscriptions = subscriptions
        self._remaining = remaining
        self._operations = operations
        self._occurrences = occurrences
        self._remembered_millis = remembered_millis

    def apply(
        self,
        commands: pa.Table,
        known: pa.Table,
        is_released: BoolArray,
        payload_rows: pa.Table,
        moment: Moment,
        ownership: ShardOwnership | None = None,
        in_state: pa.Table | None = None,
    ) -> tuple[pa.Table, pa.Table]:
        """Applies commands to known messages.

        Args:
            commands: as COMMAND_ROWS, none of the kinds ANSWER and REPEAT.
            known: as KNOWN: the known messages of the entries that the commands name.
            is_released: bool, (known,): the message has been handed out, assuming that it was not moved.
            payload_rows: as MESSAGES: rows of the messages that commands move or restore.
            moment: of this tick.
            ownership: which commands and messages belong to this shard; None: all.
            in_state: as MESSAGES: rows of these messages that have not been handed out; None: there are none.

        Returns:
            the outcomes, as OUTCOME_ROWS; and the commands whose entry is not known, as COMMAND_ROWS.

        Raises:
            SequencesExhaustedError: the tick has more commands and moves than there are sequences.
        """
        command, row = match(commands, known)
        unmatched = np.ones(commands.num_rows, np.bool_)
        unmatched[command] = False
        batch_index = int64(commands, "batch_index")[command]
        row_index, size = int64(known, "batch_index")[row], int64(known, "batch_size")[row]
        is_named = (batch_index < 0) | (batch_index == row_index) | ((batch_index == 0) & (row_index < 0))
        outcomes = []
        if ownership is None:
            outcomes += out_of_batch(self._subscriptions, commands, command, size, is_named)
        else:
            own = ownership.commands[command]
            outcomes += out_of_batch(self._subscriptions, commands, command[own], size[own], is_named[own])
            is_named &= ownership.known[row]
        command, row, row_index = command[is_named], row[is_named], row_index[is_named]
        order = np.lexsort((row_index, command))
        command, row = command[order], row[order]
        for start, end in split_groups(commands):
            first, last = np.searchsorted(command, [start, end])
            part = slice(first, last)
            if first < last:
                pairs = Pairs(commands, command[part], known, row[part], is_released, payload_rows)
                rows = [empty_table(MESSAGES) if in_state is None else in_state, *self._operations.moves]
                outcomes += self._apply_group(CommandGroup(pairs, rows), moment)
        return concat(outcomes, OUTCOME_ROWS), where(commands, unmatched)

    def _apply_group(self, group: CommandGroup, moment: Moment) -> list[pa.Table]:
        """Applies a group for all subscriptions; returns tables as OUTCOME_ROWS."""
        wanted = self._remaining.mask_with_removed(group.messages) != 0
        outcomes = [self._apply_for(subscription, group, moment) for subscription in group.subscriptions]
        outcomes.append(self._for_later(group, moment))
        if group.kind != RETRY:
            still_wanted = self._remaining.mask_with_removed(group.messages) != 0
            self._remaining.count_unwanted(where(group.messages, wanted & ~still_wanted), 1)
            self._remaining.count_unwanted(where(group.messages, ~wanted & still_wanted), -1)
        return outcomes

    def _apply_for(self, subscription: int, group: CommandGroup, moment: Moment) -> pa.Table:
        """Applies a group for one subscription; returns its OUTCOME_ROWS."""
        sequence = self._operations.next_sequence(moment)
        if group.is_moving:
            group = group.with_payload(self._occurrences.without_done(group.payload_rows, subscription, moment.now))
        decision = group.decide(subscription, self._subscriptions, self._remaining, moment)
        # A message that was moved before has a second row. A command makes that row unwanted, a restore wanted again. A
        # retried message has no row left.
        if group.kind != RETRY:
            n_moved = int((decision.state.moves[decision.applied] > 0).sum())
            self._remaining.unwanted_moves += -n_moved if group.kind == RESTORE else n_moved
        times, attempts = self._execute(group, decision, sequence, moment)
        outcomes = outcomes_of(
            self._subscriptions,
            group.pairs,
            decision.pairs,
            decision.result,
            decision.reason,
            decision.is_shared,
            decision.starts,
            subscription,
        )
        is_applied = pc.equal(outcomes["result"], int(Result.APPLIED))
        if not group.is_moving:
            outcomes = with_columns(outcomes, sequence=pc.if_else(is_applied, sequence, None))
            done = outcomes.filter(is_applied)
            operation = "RESTORE" if group.kind == RESTORE else "CANCEL"
            self._operations.add(operation, done, sequence, times_of(done, decision.rows, decision.until))
            return outcomes
        answered = decision.answered
        attempt, number = attempts[answered], decision.number[answered]
        has_time = pc.and_(is_applied, group.kind != PAUSE_SCHEDULE)
        return with_columns(
            outcomes,
            sequence=pc.if_else(is_applied, sequence, None),
            deliver_at=pc.if_else(has_time, times[answered], None),
            attempt=pc.if_else(is_applied, pa.array(attempt, mask=attempt <= 0), None).cast(pa.int32()),
            occurrence=pc.if_else(is_applied, pa.array(number, mask=number <= 0), None),
        )

    def _execute(
        self, group: CommandGroup, decision: Decision, sequence: int, moment: Moment
    ) -> tuple[Int64Array, Int64Array]:
        """Carries out a decision.

        Returns:
            two arrays, int64, (n,), with a value for each pair of the decision: the new time of a message that got one,
            ms since the epoch; the number of its retry, 0 if it is none.
        """
        subscription, applied, rows = decision.subscription, decision.applied, decision.applied_rows
        commands = group.commands.take(pa.array(decision.pairs))
        times = np.maximum(int64(commands, "deliver_at"), moment.now)
        attempts = np.zeros(len(times), np.int64)
        if group.kind == RESTORE:
            self._remaining.cancelled.remove(subscription, *message_ids(rows), int64(rows, "batch_size"))
            return times, attempts
        if group.kind in (CANCEL, SKIP):
            as_entry = decision.is_shared[applied] | (int64(rows, "batch_index") < 0)
            self._remaining.cancel(subscription, rows, as_entry, decision.until[applied] + self._remembered_millis)
            return times, attempts
        payload_rows = group.payload_rows.take(pa.array(decision.payload_row[applied]))
        if group.kind == POSTPONE:
            by = int64(commands, "deliver_at")[applied]
            times[applied] = decision.postponed(payload_rows, by, moment.now)
        if group.kind in (RESCHEDULE, POSTPONE):
            self._operations.move(payload_rows, subscription, times[applied], sequence)
        elif group.kind == RETRY:
            commands = commands.take(pa.array(applied))
            for i, reason in zip(applied.tolist(), commands["reason"].to_pylist(), strict=True):
                decision.reason[i] = reason or ""
            retried, times[applied] = retry_rows(
                payload_rows, commands, decision.last_due[applied], self._subscriptions, subscription, moment.now
            )
            attempts[applied] = attempts_of(retried)
            self._retry(retried, subscription, times[applied], sequence, moment)
        else:
            times[applied] = self._occurrences.apply_command(group.kind, payload_rows, subscription, sequence, moment)
        return times, attempts

    def _retry(self, rows: pa.Table, subscription: int, times: Int64Array, sequence: int, moment: Moment) -> None:
        """Moves messages that have been handed out to another time, even if they were cancelled afterwards.

        Args:
            rows: as MESSAGES, distinct, with the attempts of the retries.
            subscription: its number.
            times: int64, (rows,), ms since the epoch.
            sequence: of the command.
            moment: of this tick.
        """
        if not rows.num_rows:
            return
        remaining = self._remaining
        was_delivered = remaining.delivered.contains(subscription, *message_ids(rows))
        for messages in (remaining.cancelled, remaining.delivered):
            some = where(rows, messages.contains(subscription, *message_ids(rows)))
            if some.num_rows:
                messages.remove(subscription, *message_ids(some), int64(some, "batch_size"))
        self._operations.move(rows, subscription, times, sequence)
        if was_delivered.any():
            # Earlier rows, which may still come in again after the rebuild, do not count because of this move.
            again, n = where(rows, was_delivered), int(was_delivered.sum())
            until, sequences = np.full(n, moment.now + REBUILT_KEPT_MILLIS), np.full(n, sequence)
            new_times, attempts = times[was_delivered], attempts_of(again)
            remaining.moved.put(subscription, *message_ids(again), sequences, new_times, until, attempts)

    def _for_later(self, group: CommandGroup, moment: Moment) -> pa.Table:
        """Returns outcomes for subscriptions that are added later: a subscription that is added takes them over."""
        pairs = group.pairs
        chosen = np.flatnonzero(pc.fill_null(group.commands["also_later"], False).to_numpy(zero_copy_only=False))
        if not len(chosen):
            return empty_table(OUTCOME_ROWS)
        is_late = pairs.is_released[pairs.row[chosen]]
        result = np.where(is_late, int(Result.TOO_LATE), int(Result.APPLIED))
        shared, starts = entry_results(pairs.command[chosen], group.is_whole[chosen], result)
        if group.kind in (CANCEL, SKIP):
            # A later subscription gets no message that has been handed out, and no schedule that has begun.
            result[result == Result.TOO_LATE] = Result.ALREADY_APPLIED
        reason = np.where(result == Result.TOO_LATE, "released", "").tolist()
        answers = outcomes_of(self._subscriptions, pairs, chosen, result, reason, shared, starts, ALSO_LATER)
        is_applied = pc.equal(answers["result"], int(Result.APPLIED))
        is_move = OPERATIONS[group.kind].effect == Effect.MOVE
        times = int64(group.commands, "deliver_at")[chosen]
        if group.kind == POSTPONE:
            times = times + int64(group.rows, "deliver_at")[chosen]
        times = np.clip(times, moment.now, MAX_TIME_MILLIS - 1)
        of_row = pa.array(times[np.flatnonzero(starts | ~shared)])
        return with_columns(
            answers,
            sequence=pc.if_else(is_applied, self._operations.next_sequence(moment), None),
            deliver_at=pc.if_else(pc.and_(is_applied, is_move), of_row, answers["deliver_at"]),
        )
