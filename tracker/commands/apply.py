"""Answers the commands of a tick, and applies them: the effects of what `tracker.commands.decide` has decided."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.decide import NEW_TIMES, CommandGroup, Decision
from tracker.commands.kinds import (
    ANSWER,
    PAUSE_SCHEDULE,
    REPEAT,
    RESTORE,
    RESUME_SCHEDULE,
    RETRY,
    SINGLE_ACK_KINDS,
    SKIP_NEXT,
    Effect,
)
from tracker.commands.match import (
    Named,
    Pairs,
    each_subscription,
    entry_results,
    match_messages,
    split_groups,
    times_of,
)
from tracker.commands.occurrences import Occurrences
from tracker.commands.outcomes import Verdicts, answers_of, command_steps, out_of_batch_outcomes, outcomes_of
from tracker.commands.repeats import FirstAnswers, Repeats, RequestLog
from tracker.commands.retries import retry_rows
from tracker.commands.waiting import EarlyCommands, WaitingCommands
from tracker.context import Context
from tracker.ends import moved_ends
from tracker.message_state.state import MessageState
from tracker.messages import (
    MESSAGES,
    Int64Array,
    attempts_of,
    concat,
    empty_table,
    int64,
    is_rejected,
    message_ids,
    where,
    with_columns,
)
from tracker.rebuilt import REBUILT_KEPT_MILLIS, REBUILT_TICK
from tracker.schemas import KNOWN, OUTCOME_ROWS
from tracker.subscriptions import ALSO_LATER, by_topic
from tracker.wire.delaylake_pb2 import Result


@dataclass(frozen=True)
class Application:
    """A decision that is being carried out, for n pairs of command and message, of which m are applied.

    Attributes:
        decision: what the group does for one subscription.
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

    def apply_commands(self, commands: pa.Table, named: Named) -> tuple[pa.Table, pa.Table]:
        """Applies commands to known messages of this shard.

        A message with a schedule key may be in another shard than its entry, and so the command may come to both.

        Args:
            commands: as COMMAND_ROWS, none of the kinds ANSWER and REPEAT.
            named: the known messages of the entries that the commands name.

        Returns:
            the outcomes, as OUTCOME_ROWS; and the commands whose entry is not known, as COMMAND_ROWS.

        Raises:
            SequencesExhaustedError: the tick has more commands and moves than there are sequences.
        """
        command, row = match_messages(commands, named)
        unmatched = np.ones(commands.num_rows, np.bool_)
        unmatched[command] = False
        batch_index = int64(commands, "batch_index")[command]
        row_index, size = int64(named.known, "batch_index")[row], int64(named.known, "batch_size")[row]
        is_named = (batch_index < 0) | (batch_index == row_index) | ((batch_index == 0) & (row_index < 0))
        own = self._context.are_answered_here(commands)[command]
        subscriptions = self._context.subscriptions
        outcomes = out_of_batch_outcomes(subscriptions, commands, command[own], size[own], is_named[own])
        is_named &= self._context.shard_id.has(named.known)[row]
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
        self._state.move_messages(moved_ends(rows, times), decision.subscription, times, application.sequence)

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
        rows, state = application.payload_rows, self._state
        rows, times = retry_rows(
            rows,
            commands,
            decision.last_due[applied],
            state.moved.attempts(subscription, message_ids(rows)),
            self._context.subscriptions,
            subscription,
            self._context.now,
        )
        application.times[applied], application.attempts[applied] = times, attempts_of(rows)
        if not rows.num_rows:
            return
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


_NO_MESSAGES = MESSAGES.empty_table()


def _none_in_state(known: pa.Table) -> pa.Table:
    return _NO_MESSAGES


_NO_OUTCOMES = OUTCOME_ROWS.empty_table()


class Control:
    """Answers the commands of a tick, and applies them to the messages that they name.

    A cancel or skip applies to a message that is known and not dispatched yet; the time that a cancel names need not be
    the message's. A command for a message that is not known waits until all messages published before it have come in.
    Then a skip is NOT_FOUND, and a cancel waits further, until two tick times after the time that it names.

    Args:
        state: knows to which subscriptions each message still goes, and records what commands change.
        occurrences: moves recurring messages on to their next occurrence.
    """

    def __init__(self, context: Context, state: MessageState, occurrences: Occurrences) -> None:
        self._context = context
        self._subscriptions = context.subscriptions
        self._executor = Executor(context, state, occurrences)
        self._waiting = WaitingCommands(context.store)
        self._early = EarlyCommands(context, state, self._waiting)
        self._requests = RequestLog(context.store)

    @property
    def n_waiting(self) -> int:
        """The number of command rows that wait for their message."""
        return len(self._waiting)

    def find_repeats(
        self, commands: pa.Table, request_ids: Mapping[str, int], first_answers: FirstAnswers
    ) -> Repeats | None:
        """Finds out which commands of a tick come again, and remembers the request ids of the others.

        Args:
            commands: as COMMAND_ROWS: this shard's commands.
            request_ids: by request id, for the commands of all shards: the hash of the first command's body.
            first_answers: reads the answers to repeated request ids.

        Returns:
            what `apply_commands` needs; None: no shard has a command.
        """
        if not request_ids and not commands.num_rows:
            return None
        now = self._context.now
        remembered = self._requests.find_ids([*request_ids, *commands["request_id"].to_pylist()], now)
        repeats = Repeats(remembered, request_ids, first_answers(remembered.keys()))
        self._requests.add_ids({r: body for r, body in request_ids.items() if r not in repeats.known}, now)
        return repeats

    def apply_commands(
        self, commands: pa.Table, named: Named, repeats: Repeats, waiting_outcomes: pa.Table = _NO_OUTCOMES
    ) -> pa.Table:
        """Applies the commands of a tick.

        Args:
            commands: as COMMAND_ROWS: this shard's commands.
            named: the known messages of the entries that the commands name. The home of an entry has all of its
                messages, another shard only its own.
            repeats: tells which commands come again.
            waiting_outcomes: as OUTCOME_ROWS: the result of `apply_waiting` in this tick.

        Returns:
            as OUTCOME_ROWS.

        Raises:
            SequencesExhaustedError: the tick has more commands and moves than there are sequences.
        """
        is_repeat = repeats.are_repeats(commands)
        again, commands = where(commands, is_repeat), where(commands, ~is_repeat)
        is_here = self._context.are_answered_here(again)
        # Of a command that came twice in this tick another shard has the first answers for its messages.
        elsewhere = where(again, ~is_here & pc.equal(again["kind"], REPEAT).to_numpy(zero_copy_only=False))
        again = where(again, is_here)
        is_answer = pc.equal(commands["kind"], ANSWER).to_numpy(zero_copy_only=False)
        answers = answers_of(self._subscriptions, where(commands, is_answer))
        sequences = self._context.next_sequences(command_steps(answers))
        outcomes = [with_columns(answers, sequence=pa.array(sequences))]
        commands = where(commands, ~is_answer)
        is_nowhere = int64(commands, "ledger_id") < 0
        if is_nowhere.any():
            reason = "no message waits under this key"
            outcomes.append(answers_of(self._subscriptions, where(commands, is_nowhere), Result.NOT_FOUND, reason))
            commands = where(commands, ~is_nowhere)
        applied, unmatched = self._executor.apply_commands(commands, named)
        outcomes.append(applied)
        if unmatched.num_rows:
            outcomes += self._early.answer_unmatched(unmatched)
        so_far = concat([waiting_outcomes, *outcomes], OUTCOME_ROWS)
        if again.num_rows:
            outcomes += self._answer_again(again, repeats, so_far)
        if elsewhere.num_rows:
            repeated, _ = self._answer_again(elsewhere, repeats.of_this_tick(), so_far)
            outcomes.append(repeated)
        return concat(outcomes, OUTCOME_ROWS)

    def _answer_again(self, commands: pa.Table, repeats: Repeats, so_far: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Answers repeats, as COMMAND_ROWS; see `Repeats.answer_again`."""
        index, names = each_subscription(commands, self._subscriptions.names)
        commands = with_columns(commands.take(pa.array(index)), subscription=pa.array(names, pa.string()))
        return repeats.answer_again(commands, index, so_far, self._context.tick)

    def apply_waiting(
        self,
        messages: pa.Table,
        added: pa.Table | None = None,
        elsewhere: pa.Table = _NO_MESSAGES,
        done: pa.Table = _NO_MESSAGES,
        find_in_state: Callable[[pa.Table], pa.Table] = _none_in_state,
    ) -> pa.Table:
        """Applies the commands that waited for messages which came in, before these are added to the tracker.

        Args:
            messages: as MESSAGES: this shard's messages.
            added: those of `messages` that will be added to the tracker; None: all.
            elsewhere: as KNOWN: messages that other shards have, of entries whose home is this shard.
            done: those of `messages` that came in again after a rebuild and are done with.
            find_in_state: gets messages, as KNOWN; returns their rows in state, as MESSAGES. After a rebuild what is
                done with may be parked, or wait for a place, in a row of its own.

        Returns:
            as OUTCOME_ROWS.
        """
        known = pa.concat_tables([messages.select(KNOWN.names), elsewhere.select(KNOWN.names)])
        commands = self._waiting.take_commands(known)
        if not commands.num_rows:
            return _NO_OUTCOMES
        commands = self._with_added(commands.drop_columns("tick"))
        is_done = np.append(is_rejected(messages), np.zeros(elsewhere.num_rows, np.bool_))
        has_retries = pc.any(pc.equal(commands["kind"], RETRY)).as_py()
        in_state = find_in_state(known) if has_retries else empty_table(MESSAGES)
        named = Named(known, is_done, concat([messages if added is None else added, done]), in_state)
        outcomes, unmatched = self._executor.apply_commands(commands, named)
        unmatched = where(unmatched, self._context.are_answered_here(unmatched))
        reason = "the topic has no such message"
        return concat([outcomes, answers_of(self._subscriptions, unmatched, Result.NOT_FOUND, reason)], OUTCOME_ROWS)

    def add_waiting(self, commands: pa.Table) -> None:
        """Has commands, as COMMAND_ROWS, wait in this shard, too: their messages may come in here from this tick on."""
        self._waiting.add_missing(commands, self._context.tick)

    def wait_again(self, topics: Collection[str]) -> None:
        """Has the waiting commands for some topics wait for messages that were published before this tick.

        The topics have their route again, or a new subscription: what was published may not have been read yet. Or
        other shards wait with this one from now on: all of them give up in the same tick.
        """
        self._waiting.wait_again(topics, self._context.tick)

    def expire_waiting(self) -> pa.Table:
        """Removes waiting commands whose message can no longer come in; returns their outcomes, as OUTCOME_ROWS."""
        return self._early.expire_waiting()

    def rebuild(self, waiting: pa.Table, request_ids: Mapping[str, int]) -> None:
        """Restores the state after a rebuild.

        Args:
            waiting: as COMMAND_ROWS: commands that wait for their messages.
            request_ids: by request id of answered commands: the hash of the command's body.
        """
        self._waiting.add_commands(waiting, REBUILT_TICK)
        self._requests.add_ids(request_ids, self._context.now)

    def save(self) -> None:
        """Writes the changes to the store."""
        self._waiting.save()

    def _with_added(self, commands: pa.Table) -> pa.Table:
        """Adds to waiting commands with `also_later` the subscriptions that were added since."""
        subscriptions = self._subscriptions
        later = pc.fill_null(commands["also_later"], False).to_numpy(zero_copy_only=False)
        added = np.where(later, by_topic(commands, subscriptions.active), 0)
        # Not those for which the command was answered NOT_ALLOWED.
        is_skip = pc.is_in(commands["kind"], pa.array(SINGLE_ACK_KINDS)).to_numpy(zero_copy_only=False)
        cumulative = by_topic(commands, lambda topic: subscriptions.cumulative.get(topic, 0))
        added &= ~np.where(is_skip, cumulative, 0)
        return with_columns(commands, subscriptions=pa.array(int64(commands, "subscriptions") | added))
