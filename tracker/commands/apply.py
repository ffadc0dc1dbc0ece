"""Applies commands to the messages that they name: the effects of what `tracker.commands.decide` has decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.decide import NEW_TIMES, CommandGroup, Decision
from tracker.commands.kinds import (
    PAUSE_SCHEDULE,
    RESTORE,
    RESUME_SCHEDULE,
    RETRY,
    SKIP_NEXT,
    Effect,
)
from tracker.commands.match import Named, Pairs, entry_results, match_messages, split_groups, times_of
from tracker.commands.occurrences import Occurrences
from tracker.commands.outcomes import Verdicts, out_of_batch_outcomes, outcomes_of
from tracker.commands.retries import retry_rows
from tracker.context import Context
from tracker.message_state.state import MessageState
from tracker.messages import (
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
from tracker.subscriptions import ALSO_LATER
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


@dataclass(frozen=True)
class Application:
    """A decision that is being carried out, for n pairs of command and message, of which m are applied.

    Attributes:
        group: the commands.
        decision: what they do for one subscription.
        commands: as COMMAND_ROWS, (n,): the command of each pair.
        sequence: of all effects.
        times: int64, (n,), ms since the epoch: the new time of a message that gets one; the effects set it.
        attempts: int64, (n,): the number of a message's retry; 0: it is none. RETRY sets it.
    """

    group: CommandGroup
    decision: Decision
    commands: pa.Table
    sequence: int
    times: Int64Array
    attempts: Int64Array

    @property
    def payload_rows(self) -> pa.Table:
        """The rows of the messages to which commands are applied, as MESSAGES, (m,)."""
        return self.group.payload_rows.take(pa.array(self.decision.payload_row[self.decision.applied]))


class Executor:
    """Applies commands to known messages.

    Args:
        context: of the shard.
        state: knows to which subscriptions each message still goes, and records what changes that.
        occurrences: moves recurring messages on to their next occurrence.
    """

    def __init__(self, context: Context, state: MessageState, occurrences: Occurrences) -> None:
        self._context = context
        self._state = state
        self._occurrences = occurrences
        # Carry out a decision: by effect, and by operation for those that do more than their effect says.
        self._effects: dict[Effect, Callable[[Application], None]] = {
            Effect.CANCEL: self._cancel,
            Effect.RESTORE: self._restore,
            Effect.MOVE: self._move,
        }
        self._own_effects: dict[str, Callable[[Application], None]] = {
            RETRY: self._retry,
            SKIP_NEXT: self._change_schedules(occurrences.skip_next),
            PAUSE_SCHEDULE: self._change_schedules(occurrences.pause_schedules),
            RESUME_SCHEDULE: self._change_schedules(occurrences.resume_schedules),
        }

    def apply_commands(
        self, commands: pa.Table, named: Named, ownership: ShardOwnership | None = None
    ) -> tuple[pa.Table, pa.Table]:
        """Applies commands to known messages.

        Args:
            commands: as COMMAND_ROWS, none of the kinds ANSWER and REPEAT.
            named: the known messages of the entries that the commands name.
            ownership: which commands and messages belong to this shard; None: all.

        Returns:
            the outcomes, as OUTCOME_ROWS; and the commands whose entry is not known, as COMMAND_ROWS.

        Raises:
            SequencesExhaustedError: the tick has more commands and moves than there are sequences.
        """
        command, row = match_messages(commands, named.known)
        unmatched = np.ones(commands.num_rows, np.bool_)
        unmatched[command] = False
        batch_index = int64(commands, "batch_index")[command]
        row_index, size = int64(named.known, "batch_index")[row], int64(named.known, "batch_size")[row]
        is_named = (batch_index < 0) | (batch_index == row_index) | ((batch_index == 0) & (row_index < 0))
        own = np.ones(len(command), np.bool_) if ownership is None else ownership.commands[command]
        subscriptions = self._context.subscriptions
        outcomes = out_of_batch_outcomes(subscriptions, commands, command[own], size[own], is_named[own])
        if ownership is not None:
            is_named &= ownership.known[row]
        command, row, row_index = command[is_named], row[is_named], row_index[is_named]
        order = np.lexsort((row_index, command))
        command, row = command[order], row[order]
        for start, end in split_groups(commands):
            first, last = np.searchsorted(command, [start, end])
            part = slice(first, last)
            if first < last:
                pairs = Pairs(commands, command[part], named, row[part])
                outcomes += self._apply_group(CommandGroup(pairs, self._state.moves))
        return concat(outcomes, OUTCOME_ROWS), where(commands, unmatched)

    def _apply_group(self, group: CommandGroup) -> list[pa.Table]:
        """Applies a group for all subscriptions; returns tables as OUTCOME_ROWS."""
        state = self._state
        wanted = state.masks_with_removed(group.messages) != 0
        outcomes = [self._apply_for(subscription, group) for subscription in group.subscriptions]
        outcomes.append(self._answer_for_later(group))
        if group.kind != RETRY:
            still_wanted = state.masks_with_removed(group.messages) != 0
            state.count_unwanted(where(group.messages, wanted & ~still_wanted), 1)
            state.count_unwanted(where(group.messages, ~wanted & still_wanted), -1)
        return outcomes

    def _apply_for(self, subscription: int, group: CommandGroup) -> pa.Table:
        """Applies a group for one subscription; returns its OUTCOME_ROWS."""
        sequence = self._context.next_sequence()
        if group.is_moving:
            group = group.with_payload(self._occurrences.without_done(group.payload_rows, subscription))
        decision = group.decide(subscription, self._context, self._state)
        # A message that was moved before has a second row. A command makes that row unwanted, a restore wanted again. A
        # retried message has no row left.
        if group.kind != RETRY:
            n_moved = int((decision.state.moves[decision.applied] > 0).sum())
            self._state.unwanted_moves += -n_moved if group.kind == RESTORE else n_moved
        commands = group.commands.take(pa.array(decision.verdicts.chosen))
        times, attempts = np.zeros(commands.num_rows, np.int64), np.zeros(commands.num_rows, np.int64)
        application = Application(group, decision, commands, sequence, times, attempts)
        carry_out = self._own_effects.get(group.kind) or self._effects[group.operation.effect]
        carry_out(application)
        outcomes = outcomes_of(self._context.subscriptions, group.pairs, decision.verdicts, subscription)
        is_applied = pc.equal(outcomes["result"], int(Result.APPLIED))
        if not group.is_moving:
            outcomes = with_columns(outcomes, sequence=pc.if_else(is_applied, sequence, None))
            done = outcomes.filter(is_applied)
            operation = "RESTORE" if group.kind == RESTORE else "CANCEL"
            self._state.record_operation(operation, done, sequence, times_of(done, decision.rows, decision.until))
            return outcomes
        answered = decision.verdicts.answered
        attempt, number = application.attempts[answered], decision.number[answered]
        has_time = pc.and_(is_applied, group.operation.effect is not Effect.HOLD)
        return with_columns(
            outcomes,
            sequence=pc.if_else(is_applied, sequence, None),
            deliver_at=pc.if_else(has_time, times[answered], None),
            attempt=pc.if_else(is_applied, pa.array(attempt, mask=attempt <= 0), None).cast(pa.int32()),
            occurrence=pc.if_else(is_applied, pa.array(number, mask=number <= 0), None),
        )

    def _cancel(self, application: Application) -> None:
        decision, rows = application.decision, application.decision.applied_rows
        as_entry = decision.verdicts.is_shared[decision.applied] | (int64(rows, "batch_index") < 0)
        until = decision.until[decision.applied] + self._context.remembered_millis
        self._state.cancel_messages(decision.subscription, rows, as_entry, until)

    def _restore(self, application: Application) -> None:
        rows = application.decision.applied_rows
        sizes = int64(rows, "batch_size")
        self._state.cancelled.remove(application.decision.subscription, message_ids(rows), sizes)

    def _move(self, application: Application) -> None:
        decision, applied = application.decision, application.decision.applied
        rows, now = application.payload_rows, self._context.now
        said = int64(application.commands, "deliver_at")[applied]
        times = NEW_TIMES[application.group.kind](decision.due_times(rows, now), said, now)
        application.times[applied] = times
        self._state.move_messages(rows, decision.subscription, times, application.sequence)

    def _retry(self, application: Application) -> None:
        """Moves messages that have been dispatched to another time, even if they were cancelled afterwards."""
        decision, applied, subscription = (
            application.decision,
            application.decision.applied,
            application.decision.subscription,
        )
        commands = application.commands.take(pa.array(applied))
        for i, reason in zip(applied.tolist(), commands["reason"].to_pylist(), strict=True):
            decision.verdicts.reason[i] = reason or ""
        rows, times = retry_rows(
            application.payload_rows,
            commands,
            decision.last_due[applied],
            self._context.subscriptions,
            subscription,
            self._context.now,
        )
        application.times[applied], application.attempts[applied] = times, attempts_of(rows)
        if not rows.num_rows:
            return
        state = self._state
        was_delivered = state.delivered.contains(subscription, message_ids(rows))
        for messages in (state.cancelled, state.delivered):
            some = where(rows, messages.contains(subscription, message_ids(rows)))
            if some.num_rows:
                messages.remove(subscription, message_ids(some), int64(some, "batch_size"))
        state.move_messages(rows, subscription, times, application.sequence)
        if was_delivered.any():
            # Earlier rows, which may still come in again after the rebuild, do not count because of this move.
            again, n = where(rows, was_delivered), int(was_delivered.sum())
            until = np.full(n, self._context.now + REBUILT_KEPT_MILLIS)
            sequences = np.full(n, application.sequence)
            state.moved.put(
                subscription, message_ids(again), sequences, times[was_delivered], until, attempts_of(again)
            )

    @staticmethod
    def _change_schedules(change: Callable[[pa.Table, int, int], Int64Array]) -> Callable[[Application], None]:
        """Returns the effect that changes schedules by a method of `Occurrences`."""

        def effect(application: Application) -> None:
            decision = application.decision
            times = change(application.payload_rows, decision.subscription, application.sequence)
            application.times[decision.applied] = times

        return effect

    def _answer_for_later(self, group: CommandGroup) -> pa.Table:
        """Returns outcomes for subscriptions that are added later: a subscription that is added takes them over."""
        pairs = group.pairs
        chosen = np.flatnonzero(pc.fill_null(group.commands["also_later"], False).to_numpy(zero_copy_only=False))
        if not len(chosen):
            return empty_table(OUTCOME_ROWS)
        is_late = pairs.named.are_dispatched[pairs.row[chosen]]
        result = np.where(is_late, int(Result.TOO_LATE), int(Result.APPLIED))
        shared, starts = entry_results(pairs.command[chosen], group.is_whole[chosen], result)
        if group.operation.cancels_message:
            # A later subscription gets no message that has been dispatched, and no schedule that has begun.
            result[result == Result.TOO_LATE] = Result.ALREADY_APPLIED
        reason = np.where(result == Result.TOO_LATE, "released", "").tolist()
        verdicts = Verdicts(chosen, result, reason, shared, starts)
        answers = outcomes_of(self._context.subscriptions, pairs, verdicts, ALSO_LATER)
        is_applied = pc.equal(answers["result"], int(Result.APPLIED))
        answers = with_columns(answers, sequence=pc.if_else(is_applied, self._context.next_sequence(), None))
        if group.operation.effect is not Effect.MOVE:
            return answers
        due, said = (int64(rows, "deliver_at")[chosen] for rows in (group.rows, group.commands))
        times = pa.array(NEW_TIMES[group.kind](due, said, self._context.now)[verdicts.answered])
        return with_columns(answers, deliver_at=pc.if_else(is_applied, times, answers["deliver_at"]))
