"""Applying commands to the messages that they name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.match import entry_results, match, runs, times_of
from tracker.commands.message_state.moves import HELD_DELIVER_AT
from tracker.commands.message_state.rebuilt import REBUILT_KEPT_MILLIS
from tracker.commands.message_state.remaining import Remaining
from tracker.commands.moment import Moment
from tracker.commands.occurrences import Occurrences
from tracker.commands.operations import Operations
from tracker.commands.outcome_rows import Pairs, out_of_batch, outcomes_of, superseded
from tracker.commands.retries import retry_rows
from tracker.commands.run import Decision, Run
from tracker.commands.schema import CANCEL, OUTCOME_ROWS, PAUSE_SCHEDULE, RESCHEDULE, RESTORE, RETRY, SKIP
from tracker.commands.standing import standing
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
from tracker.subscriptions import ALSO_LATER, Subscriptions, by_topic
from tracker.wire.delaylake_pb2 import Result


@dataclass(frozen=True)
class ShardOwnership:
    """Which commands and messages are a shard's own: a message with a schedule key may be in another than its entry.

    Attributes:
        commands: bool, (commands,): this shard answers for the command where its message is not known.
        known: bool, (known,): the message is here; else another shard has it, and answers.
    """

    commands: BoolArray
    known: BoolArray


class Executor:
    """Applies commands to messages that are known.

    Args:
        subscriptions: those of each source topic.
        remaining: which subscriptions each message still goes to.
        operations: to which rows of type CANCEL, RESTORE and MOVE are added.
        occurrences: moves recurring messages on.
        remembered_millis: how long a message is remembered as cancelled beyond its time, ms.
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
            known: as KNOWN, the messages of the entries that they name, as far as they are known.
            is_released: bool, (known,): the message has been handed out.
            payload_rows: as MESSAGES, rows of the messages that are rescheduled, restored or retried.
            moment: of this tick.
            ownership: which commands and messages are this shard's; None: all.
            in_state: as MESSAGES, rows of the messages that have not been handed out; None: there are none.

        Returns:
            OUTCOME_ROWS, and the COMMAND_ROWS whose entry is not known.

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
        for start, end in runs(commands):
            first, last = np.searchsorted(command, [start, end])
            part = slice(first, last)
            if first < last:
                pairs = Pairs(commands, command[part], known, row[part], is_released, payload_rows)
                rows = [empty_table(MESSAGES) if in_state is None else in_state, *self._operations.moves]
                outcomes += self._apply_run(Run(pairs, rows), moment)
        return concat(outcomes, OUTCOME_ROWS), where(commands, unmatched)

    def _apply_run(self, run: Run, moment: Moment) -> list[pa.Table]:
        """Applies commands of one kind, each to the messages that it names; returns OUTCOME_ROWS."""
        wanted = self._remaining.mask_with_removed(run.messages) != 0
        outcomes = [self._apply_for(subscription, run, moment) for subscription in run.subscriptions]
        outcomes.append(self._for_later(run, moment))
        if run.kind != RETRY:
            still_wanted = self._remaining.mask_with_removed(run.messages) != 0
            self._remaining.count_unwanted(where(run.messages, wanted & ~still_wanted), 1)
            self._remaining.count_unwanted(where(run.messages, ~wanted & still_wanted), -1)
        return outcomes

    def _apply_for(self, subscription: int, run: Run, moment: Moment) -> pa.Table:
        """Applies a run for one subscription; returns its OUTCOME_ROWS."""
        sequence = self._operations.next_sequence(moment)
        if run.is_moving:
            run = run.with_payload(self._occurrences.next_rows(run.payload_rows, subscription, moment.now))
        decision = run.decide(subscription, self._subscriptions, self._remaining, moment)
        # A message that was moved before has a second row: a command makes it unwanted, a restore wanted again. A
        # retried message has no row left.
        if run.kind != RETRY:
            n_moved = int((decision.standing.moves[decision.applied] > 0).sum())
            self._remaining.unwanted_moves += -n_moved if run.kind == RESTORE else n_moved
        times, attempts = self._do(run, decision, sequence, moment)
        outcomes = outcomes_of(
            self._subscriptions,
            run.pairs,
            decision.pairs,
            decision.result,
            decision.reason,
            decision.is_shared,
            decision.starts,
            subscription,
        )
        is_applied = pc.equal(outcomes["result"], int(Result.APPLIED))
        if not run.is_moving:
            outcomes = with_columns(outcomes, sequence=pc.if_else(is_applied, sequence, None))
            done = outcomes.filter(is_applied)
            operation = "RESTORE" if run.kind == RESTORE else "CANCEL"
            self._operations.add(operation, done, sequence, times_of(done, decision.rows, decision.until))
            return outcomes
        answered = decision.answered
        attempt, number = attempts[answered], decision.number[answered]
        has_time = pc.and_(is_applied, run.kind != PAUSE_SCHEDULE)
        return with_columns(
            outcomes,
            sequence=pc.if_else(is_applied, sequence, None),
            deliver_at=pc.if_else(has_time, times[answered], None),
            attempt=pc.if_else(is_applied, pa.array(attempt, mask=attempt <= 0), None).cast(pa.int32()),
            occurrence=pc.if_else(is_applied, pa.array(number, mask=number <= 0), None),
        )

    def _do(self, run: Run, decision: Decision, sequence: int, moment: Moment) -> tuple[Int64Array, Int64Array]:
        """Does what is decided.

        Returns:
            for each pair of the decision the time of the message, ms since the epoch, where it got another one, and the
            number of its retry, else 0: int64, (n,) each.
        """
        subscription, applied, rows = decision.subscription, decision.applied, decision.applied_rows
        commands = run.commands.take(pa.array(decision.pairs))
        times = np.maximum(int64(commands, "deliver_at"), moment.now)
        attempts = np.zeros(len(times), np.int64)
        if run.kind == RESTORE:
            self._remaining.cancelled.remove(subscription, *message_ids(rows), int64(rows, "batch_size"))
            return times, attempts
        if run.kind in (CANCEL, SKIP):
            as_entry = decision.is_shared[applied] | (int64(rows, "batch_index") < 0)
            self._cancel(subscription, rows, as_entry, decision.until[applied] + self._remembered_millis)
            return times, attempts
        payload_rows = run.payload_rows.take(pa.array(decision.payload_row[applied]))
        if run.kind == RESCHEDULE:
            self._operations.move(payload_rows, subscription, times[applied], sequence)
        elif run.kind == RETRY:
            commands = commands.take(pa.array(applied))
            for i, reason in zip(applied.tolist(), commands["reason"].to_pylist(), strict=True):
                decision.reason[i] = reason or ""
            retried, times[applied] = retry_rows(
                payload_rows, commands, decision.last_due[applied], self._subscriptions, subscription, moment.now
            )
            attempts[applied] = attempts_of(retried)
            self._retry(retried, subscription, times[applied], sequence, moment)
        else:
            times[applied] = self._occurrences.command(run.kind, payload_rows, subscription, sequence, moment)
        return times, attempts

    def _retry(self, rows: pa.Table, subscription: int, times: Int64Array, sequence: int, moment: Moment) -> None:
        """Moves messages that have been handed out to another time, also where they were cancelled afterwards.

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
            # By the move it is known from now on that earlier rows are not wanted, also those that are to come again.
            again, n = where(rows, was_delivered), int(was_delivered.sum())
            until, sequences = np.full(n, moment.now + REBUILT_KEPT_MILLIS), np.full(n, sequence)
            new_times, attempts = times[was_delivered], attempts_of(again)
            remaining.moved.put(subscription, *message_ids(again), sequences, new_times, until, attempts)

    def supersede(
        self,
        rows: pa.Table,
        yields_to: pa.Array,
        since: pa.Array,
        is_new: BoolArray,
        is_released: BoolArray,
        moment: Moment,
    ) -> pa.Table:
        """Cancels messages that another one with their schedule key supersedes, for all subscriptions they wait for.

        Args:
            rows: as KNOWN, distinct messages.
            yields_to: strings, (rows,): the position of the other message.
            since: int64, (rows,), ms since the epoch: when the first message of the key was published.
            is_new: bool, (rows,): the message came in only in this tick: neither the tracker nor a table gets its row.
            is_released: bool, (rows,): the message has been handed out.
            moment: of this tick.

        Returns:
            OUTCOME_ROWS, also for subscriptions that are added later.
        """
        kept = where(rows, ~is_new)
        wanted = self._remaining.mask_with_removed(kept) != 0
        masks = by_topic(rows, self._subscriptions.known)
        is_cancelled = np.zeros(rows.num_rows, np.bool_)
        outcomes = []
        for subscription in range(int(masks.max(initial=0)).bit_length()):
            chosen = np.flatnonzero(masks >> subscription & 1)
            of_chosen = rows.take(pa.array(chosen))
            cancelled, is_late, moves, moved_to = standing(
                self._remaining, subscription, of_chosen, is_released[chosen], moment
            )
            is_retry = self._remaining.moved.are_retries(subscription, *message_ids(of_chosen))
            now = np.flatnonzero(~cancelled & ~is_late & ~is_retry)
            if not len(now):
                continue
            self._remaining.unwanted_moves += int((moves[now] > 0).sum())
            until = np.maximum(int64(of_chosen, "deliver_at"), moved_to)[now]
            done, chosen = of_chosen.take(pa.array(now)), chosen[now]
            self._cancel(subscription, done, int64(done, "batch_index") < 0, until + self._remembered_millis)
            is_cancelled[chosen] = True
            sequence = self._operations.next_sequence(moment)
            names = self._subscriptions.names_of(done["topic"], subscription)
            at = pa.array(chosen)
            outcomes.append(superseded(done, names, yields_to.take(at), since.take(at), sequence, moment.now))
            is_kept = ~is_new[chosen]
            self._operations.add("CANCEL", where(outcomes[-1], is_kept), sequence, until[is_kept])
        # A subscription that is added later gets what waits in the delayed index, but for these.
        later = np.flatnonzero(is_cancelled & ~is_new)
        if len(later):
            at, names = pa.array(later), pa.repeat(ALSO_LATER, len(later))
            sequence = self._operations.next_sequence(moment)
            found = superseded(rows.take(at), names, yields_to.take(at), since.take(at), sequence, moment.now)
            outcomes.append(found)
        still_wanted = self._remaining.mask_with_removed(kept) != 0
        self._remaining.count_unwanted(where(kept, wanted & ~still_wanted), 1)
        return concat(outcomes, OUTCOME_ROWS)

    def waiting(self, rows: pa.Table, is_released: BoolArray, moment: Moment) -> tuple[BoolArray, BoolArray, BoolArray]:
        """Tells which messages wait for a subscription.

        Args:
            rows: as KNOWN.
            is_released: bool, (rows,): the message has been handed out.
            moment: of this tick.

        Returns:
            three masks, bool, (rows,): which wait for any subscription; which for one for which their time has not
            come, so that they are not held back, while none has had them; and of which the time has come for all, also
            where they are cancelled.
        """
        masks = by_topic(rows, self._subscriptions.known)
        wanted = self._remaining.without_removed(rows, masks)
        waits, waits_for_time, has_been_had, is_past = np.zeros((4, rows.num_rows), np.bool_)
        is_past[:] = True
        for subscription in range(int(masks.max(initial=0)).bit_length()):
            is_of = masks >> subscription & 1 > 0
            cancelled, is_late, _, moved_to = standing(self._remaining, subscription, rows, is_released, moment)
            # A retry has nothing to do with the message's schedule key.
            is_late |= self._remaining.moved.are_retries(subscription, *message_ids(rows))
            is_waiting = is_of & ~cancelled & ~is_late
            waits |= is_waiting
            waits_for_time |= is_waiting & (moved_to != HELD_DELIVER_AT)
            has_been_had |= (wanted >> subscription & 1 > 0) & ~cancelled & is_late
            is_past &= is_late | ~is_of
        return waits, waits_for_time & ~has_been_had, is_past

    def is_past(self, rows: pa.Table, is_released: BoolArray, moment: Moment) -> BoolArray:
        """Tells of which messages the time has come for all subscriptions, whatever topic they are of: bool, (rows,).

        Args:
            rows: with the columns of KNOWN, but for the topic.
            is_released: bool, (rows,): the message has been handed out, where it was not moved.
            moment: of this tick.
        """
        past = np.ones(rows.num_rows, np.bool_)
        for subscription in range(self._subscriptions.most):
            is_retry = self._remaining.moved.are_retries(subscription, *message_ids(rows))
            past &= standing(self._remaining, subscription, rows, is_released, moment).is_late | is_retry
        return past

    def _cancel(self, subscription: int, rows: pa.Table, as_entry: BoolArray, until: Int64Array) -> None:
        """Remembers messages as cancelled, some of them with their whole entry, until they are past, ms."""
        ledgers, entries, indexes = message_ids(rows)
        sizes = int64(rows, "batch_size")
        whole, single = as_entry, ~as_entry
        self._remaining.cancelled.add_entries(subscription, ledgers[whole], entries[whole], until[whole])
        self._remaining.cancelled.add_messages(
            subscription, ledgers[single], entries[single], indexes[single], sizes[single], until[single]
        )

    def _for_later(self, run: Run, moment: Moment) -> pa.Table:
        """Returns outcomes for subscriptions that are added later: when one is, these are what applies to it."""
        pairs = run.pairs
        chosen = np.flatnonzero(pc.fill_null(run.commands["also_later"], False).to_numpy(zero_copy_only=False))
        if not len(chosen):
            return empty_table(OUTCOME_ROWS)
        is_late = pairs.is_released[pairs.row[chosen]]
        result = np.where(is_late, int(Result.TOO_LATE), int(Result.APPLIED))
        shared, starts = entry_results(pairs.command[chosen], run.is_whole[chosen], result)
        if run.kind in (CANCEL, SKIP):
            # No later subscription gets what has been handed out, nor a schedule that has begun.
            result[result == Result.TOO_LATE] = Result.ALREADY_APPLIED
        reason = np.where(result == Result.TOO_LATE, "released", "").tolist()
        answers = outcomes_of(self._subscriptions, pairs, chosen, result, reason, shared, starts, ALSO_LATER)
        is_applied = pc.equal(answers["result"], int(Result.APPLIED))
        times = np.maximum(int64(run.commands, "deliver_at")[chosen], moment.now)
        of_row = pa.array(times[np.flatnonzero(starts | ~shared)])
        return with_columns(
            answers,
            sequence=pc.if_else(is_applied, self._operations.next_sequence(moment), None),
            deliver_at=pc.if_else(is_applied, of_row, None) if run.kind == RESCHEDULE else answers["deliver_at"],
        )
