"""Applying commands to the messages that they name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.match import entry_results, last_rows_of, match, results_of, rows_of, runs, times_of
from tracker.commands.moment import Moment, is_out_ahead
from tracker.commands.moves import HELD_DELIVER_AT
from tracker.commands.occurrences import Occurrences
from tracker.commands.operations import Operations
from tracker.commands.outcome_rows import Pairs, out_of_batch, outcomes_of, superseded
from tracker.commands.rebuilt import REBUILT_KEPT_MILLIS
from tracker.commands.remaining import Remaining
from tracker.commands.retries import CLOCKS_MILLIS, retry_rows
from tracker.commands.schema import CANCEL, OUTCOME_ROWS, RESCHEDULE, RESTORE, RETRY, SKIP, SKIP_NEXT
from tracker.messages import (
    BoolArray,
    Int64Array,
    attempts_of,
    concat,
    empty_table,
    has_keys,
    has_occurrences,
    int64,
    message_ids,
    where,
    with_columns,
)
from tracker.subscriptions import ALSO_LATER, Subscriptions, by_topic
from tracker.wire.delaylake_pb2 import Result


@dataclass(frozen=True)
class Here:
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
        here: Here | None = None,
    ) -> tuple[pa.Table, pa.Table]:
        """Applies commands to known messages.

        Args:
            commands: as COMMAND_ROWS, none of the kinds ANSWER and REPEAT.
            known: as KNOWN, the messages of the entries that they name, as far as they are known.
            is_released: bool, (known,): the message has been handed out.
            payload_rows: as MESSAGES, rows of the messages that are rescheduled, restored or retried.
            moment: of this tick.
            here: which commands and messages are this shard's; None: all.

        Returns:
            OUTCOME_ROWS, and the COMMAND_ROWS whose entry is not known.

        Raises:
            SequencesExhausted: the tick has more commands and moves than there are sequences.
        """
        command, row = match(commands, known)
        unmatched = np.ones(commands.num_rows, np.bool_)
        unmatched[command] = False
        batch_index = int64(commands, "batch_index")[command]
        row_index, size = int64(known, "batch_index")[row], int64(known, "batch_size")[row]
        is_named = (batch_index < 0) | (batch_index == row_index) | ((batch_index == 0) & (row_index < 0))
        outcomes = []
        if here is None:
            outcomes += out_of_batch(self._subscriptions, commands, command, size, is_named)
        else:
            own = here.commands[command]
            outcomes += out_of_batch(self._subscriptions, commands, command[own], size[own], is_named[own])
            is_named &= here.known[row]
        command, row, row_index = command[is_named], row[is_named], row_index[is_named]
        order = np.lexsort((row_index, command))
        command, row = command[order], row[order]
        for start, end in runs(commands):
            first, last = np.searchsorted(command, [start, end])
            part = slice(first, last)
            if first < last:
                pairs = Pairs(commands, command[part], known, row[part], is_released, payload_rows)
                outcomes += self._apply_run(pairs, moment)
        return concat(outcomes, OUTCOME_ROWS), where(commands, unmatched)

    def _apply_run(self, pairs: Pairs, moment: Moment) -> list[pa.Table]:
        """Applies commands of one kind, each to the messages that it names."""
        commands, command, row = pairs.commands, pairs.command, pairs.row
        kind = commands["kind"][int(command[0])].as_py()
        rows = pairs.known.take(pa.array(row))
        # Only a command that cancels whole entries is answered, and kept, by entry, where all of it is here.
        is_whole = (int64(commands, "batch_index")[command] < 0) & (kind in (CANCEL, SKIP))
        if has_keys(pairs.known):
            is_whole &= np.bincount(command)[command] >= int64(rows, "batch_size")
        masks = int64(commands, "subscriptions")[command]
        due = int64(rows, "deliver_at")
        ledgers, entries, indexes = message_ids(rows)
        sizes = int64(rows, "batch_size")
        payload_rows = pairs.payload_rows
        if has_occurrences(payload_rows):  # the next one may have become that in this tick
            payload_rows = concat([payload_rows, *self._operations.moves])
        attempts = np.zeros(len(row), np.int64)
        has_attempts = payload_rows["attempt"].null_count < payload_rows.num_rows
        _, distinct = np.unique(row, return_index=True)
        originals = rows.take(pa.array(distinct))
        wanted = self._remaining.mask_with_removed(originals) != 0
        outcomes = []
        for subscription in range(int(masks.max(initial=0)).bit_length()):
            sequence = self._operations.next_sequence(moment)
            chosen = np.flatnonzero(masks >> subscription & 1)
            of_chosen = rows.take(pa.array(chosen))
            cancelled, is_late, moves, moved_to = self._standing(
                subscription, of_chosen, pairs.is_released[row[chosen]], moment
            )
            if kind == RETRY:
                is_late &= np.where(moves > 0, moved_to, due[chosen]) <= moment.now + CLOCKS_MILLIS
            payload_row = rows_of(of_chosen, payload_rows, moves)
            number = _numbers(payload_rows, payload_row)
            if kind == RETRY or has_attempts:
                names = self._subscriptions.names_of(of_chosen["topic"], subscription)
                payload_row = np.where(number > 0, payload_row, last_rows_of(of_chosen, payload_rows, names))
            result, reason = results_of(kind, cancelled, is_late, payload_row >= 0, number > 0)
            applied = np.flatnonzero(result == Result.APPLIED)
            _, first = np.unique(row[chosen[applied]], return_index=True)
            repeated = np.ones(len(applied), np.bool_)
            repeated[first] = False
            result[applied[repeated]] = Result.ALREADY_APPLIED
            applied = applied[~repeated]
            # Of a message that was moved before, one more row is unwanted; by a restore one less. The rows of one that
            # is retried are gone.
            if kind != RETRY:
                self._remaining.unwanted_moves += int((moves[applied] > 0).sum()) * (-1 if kind == RESTORE else 1)

            is_shared, starts = entry_results(command[chosen], is_whole[chosen], result)
            now = chosen[applied]
            times = np.maximum(int64(commands, "deliver_at")[command[chosen]], moment.now)
            until = np.maximum(due[chosen], moved_to) + self._remembered_millis
            if kind == RESTORE:
                self._remaining.cancelled.remove(subscription, ledgers[now], entries[now], indexes[now], sizes[now])
            elif kind == RESCHEDULE:
                moving = payload_rows.take(pa.array(payload_row[applied]))
                self._operations.move(moving, subscription, times[applied], sequence)
            elif kind == RETRY:
                for i in applied.tolist():
                    reason[i] = pairs.commands["reason"][int(command[chosen[i]])].as_py() or ""
                before = payload_rows.take(pa.array(payload_row[applied]))
                of_commands = pairs.commands.take(pa.array(command[now]))
                last_due = np.where(moves > 0, np.where(moved_to < HELD_DELIVER_AT, moved_to, 0), due[chosen])[applied]
                retried, times[applied] = retry_rows(
                    before, of_commands, last_due, self._subscriptions, subscription, moment.now
                )
                attempts[now] = attempts_of(retried)
                self._retry(retried, subscription, times[applied], sequence, moment)
            elif kind == SKIP_NEXT:
                moving = payload_rows.take(pa.array(payload_row[applied]))
                times[applied] = self._occurrences.skip(moving, subscription, sequence, moment)
            else:
                as_entry = (is_shared[applied] | (indexes[now] < 0)).astype(np.bool_)
                self._cancel(subscription, rows.take(pa.array(now)), as_entry, until[applied])
            answers = outcomes_of(self._subscriptions, pairs, chosen, result, reason, is_shared, starts, subscription)
            is_applied = pc.equal(answers["result"], int(Result.APPLIED))
            is_moving = kind in (RESCHEDULE, RETRY, SKIP_NEXT)
            answered = np.flatnonzero(starts | ~is_shared)
            of_moved = pc.and_(is_applied, is_moving)
            numbers = pa.array(number[answered], mask=number[answered] <= 0)
            outcomes.append(
                with_columns(
                    answers,
                    sequence=pc.if_else(is_applied, sequence, None),
                    deliver_at=pc.if_else(of_moved, times[answered], None),
                    attempt=pc.if_else(is_applied, attempts[chosen[answered]], None).cast(pa.int32())
                    if kind == RETRY
                    else answers["attempt"],
                    occurrence=pc.if_else(of_moved, numbers, None),
                )
            )
            if not is_moving:
                done = answers.filter(is_applied)
                operation = "RESTORE" if kind == RESTORE else "CANCEL"
                ends = times_of(done, rows.take(pa.array(chosen)), np.maximum(due[chosen], moved_to))
                self._operations.add(operation, done, sequence, ends)
        outcomes.append(self._for_later(pairs, kind, is_whole, moment))
        if kind != RETRY:
            still_wanted = self._remaining.mask_with_removed(originals) != 0
            self._remaining.count_unwanted(where(originals, wanted & ~still_wanted), 1)
            self._remaining.count_unwanted(where(originals, ~wanted & still_wanted), -1)
        return outcomes

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
            cancelled, is_late, moves, moved_to = self._standing(subscription, of_chosen, is_released[chosen], moment)
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
            come, so that they are not held back; and of which the time has come for all, also where they are cancelled.
        """
        masks = by_topic(rows, self._subscriptions.known)
        waits, waits_for_time, is_past = np.zeros((3, rows.num_rows), np.bool_)
        is_past[:] = True
        for subscription in range(int(masks.max(initial=0)).bit_length()):
            is_of = masks >> subscription & 1 > 0
            cancelled, is_late, _, moved_to = self._standing(subscription, rows, is_released, moment)
            # A retry has nothing to do with the message's schedule key.
            is_late |= self._remaining.moved.are_retries(subscription, *message_ids(rows))
            is_waiting = is_of & ~cancelled & ~is_late
            waits |= is_waiting
            waits_for_time |= is_waiting & (moved_to < HELD_DELIVER_AT)
            is_past &= is_late | ~is_of
        return waits, waits_for_time, is_past

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
            past &= self._standing(subscription, rows, is_released, moment)[1] | is_retry
        return past

    def _standing(
        self, subscription: int, rows: pa.Table, is_released: BoolArray, moment: Moment
    ) -> tuple[BoolArray, BoolArray, Int64Array, Int64Array]:
        """Returns how messages stand with a subscription.

        Returns:
            which are cancelled, and which have been handed out, bool, (rows,); the sequence of each one's last move,
            and the time to which it was moved, ms since the epoch, int64, (rows,), 0 where there is none.
        """
        at = message_ids(rows)
        cancelled = self._remaining.cancelled.contains(subscription, *at)
        moves, moved_to, _ = self._remaining.moved.find(subscription, *at)
        is_out = (moved_to <= moment.released) | is_out_ahead(rows, moved_to, moves, moment)
        is_late = np.where(moves > 0, is_out, is_released)
        is_late |= self._remaining.delivered.contains(subscription, *at)
        return cancelled, is_late, moves, moved_to

    def _cancel(self, subscription: int, rows: pa.Table, as_entry: BoolArray, until: Int64Array) -> None:
        """Remembers messages as cancelled, some of them with their whole entry, until they are past, ms."""
        ledgers, entries, indexes = message_ids(rows)
        sizes = int64(rows, "batch_size")
        whole, single = as_entry, ~as_entry
        self._remaining.cancelled.add_entries(subscription, ledgers[whole], entries[whole], until[whole])
        self._remaining.cancelled.add_messages(
            subscription, ledgers[single], entries[single], indexes[single], sizes[single], until[single]
        )

    def _for_later(self, pairs: Pairs, kind: str, is_whole: BoolArray, moment: Moment) -> pa.Table:
        """Returns outcomes for subscriptions that are added later: when one is, these are what applies to it."""
        later = pc.fill_null(pairs.commands["also_later"], False).to_numpy(zero_copy_only=False)
        chosen = np.flatnonzero(later[pairs.command])
        if not len(chosen):
            return empty_table(OUTCOME_ROWS)
        is_late = pairs.is_released[pairs.row[chosen]]
        result = np.where(is_late, int(Result.TOO_LATE), int(Result.APPLIED))
        reason = np.where(is_late, "released", "").tolist()
        shared, starts = entry_results(pairs.command[chosen], is_whole[chosen], result)
        answers = outcomes_of(self._subscriptions, pairs, chosen, result, reason, shared, starts, ALSO_LATER)
        is_applied = pc.equal(answers["result"], int(Result.APPLIED))
        times = np.maximum(int64(pairs.commands, "deliver_at")[pairs.command[chosen]], moment.now)
        of_row = pa.array(times[np.flatnonzero(starts | ~shared)])
        return with_columns(
            answers,
            sequence=pc.if_else(is_applied, self._operations.next_sequence(moment), None),
            deliver_at=pc.if_else(is_applied, of_row, None) if kind == RESCHEDULE else answers["deliver_at"],
        )


def _numbers(payload_rows: pa.Table, index: Int64Array) -> Int64Array:
    """Returns which occurrence of a recurring message each row is, int64, (n,); 0: its message does not recur.

    Args:
        payload_rows: as MESSAGES.
        index: int64, (n,): of rows; -1: no row.
    """
    numbers = np.zeros(len(index), np.int64)
    if has_occurrences(payload_rows):
        of_rows = pc.fill_null(payload_rows["occurrence"], 0).to_numpy()
        numbers[index >= 0] = of_rows[index[index >= 0]]
    return numbers
