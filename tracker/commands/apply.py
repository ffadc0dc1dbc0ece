"""Applying commands to the messages that they name."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.match import entry_results, match, results_of, rows_of, runs, times_of
from tracker.commands.moment import Moment, is_out_ahead
from tracker.commands.operations import Operations
from tracker.commands.outcome_rows import Pairs, out_of_batch, outcomes_of
from tracker.commands.remaining import Remaining
from tracker.commands.schema import CANCEL, OUTCOME_ROWS, RESCHEDULE, RESTORE, SKIP
from tracker.messages import BoolArray, concat, int64, message_ids, where, with_columns
from tracker.subscriptions import ALSO_LATER, Subscriptions
from tracker.wire.delaylake_pb2 import Result


class Executor:
    """Applies commands to messages that are known.

    Args:
        subscriptions: those of each source topic.
        remaining: which subscriptions each message still goes to.
        operations: to which rows of type CANCEL, RESTORE and MOVE are added.
        remembered_millis: how long a message is remembered as cancelled beyond its time, ms.
    """

    def __init__(
        self, subscriptions: Subscriptions, remaining: Remaining, operations: Operations, remembered_millis: int
    ) -> None:
        self._subscriptions = subscriptions
        self._remaining = remaining
        self._operations = operations
        self._remembered_millis = remembered_millis

    def apply(
        self, commands: pa.Table, known: pa.Table, is_released: BoolArray, payload_rows: pa.Table, moment: Moment
    ) -> tuple[pa.Table, pa.Table]:
        """Applies commands to known messages.

        Args:
            commands: as COMMAND_ROWS, none of the kinds ANSWER and REPEAT.
            known: as KNOWN, the messages of the entries that they name, as far as they are known.
            is_released: bool, (known,): the message has been handed out.
            payload_rows: as MESSAGES, rows of the messages that are rescheduled or restored.
            moment: of this tick.

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
        outcomes = out_of_batch(self._subscriptions, commands, command, size, is_named)
        command, row = command[is_named], row[is_named]
        order = np.lexsort((row_index[is_named], command))
        command, row = command[order], row[order]
        payload_row = rows_of(known, payload_rows)
        for start, end in runs(commands):
            first, last = np.searchsorted(command, [start, end])
            part = slice(first, last)
            if first < last:
                pairs = Pairs(commands, command[part], known, row[part], is_released, payload_rows, payload_row)
                outcomes += self._apply_run(pairs, moment)
        return concat(outcomes, OUTCOME_ROWS), where(commands, unmatched)

    def _apply_run(self, pairs: Pairs, moment: Moment) -> list[pa.Table]:
        """Applies commands of one kind, each to the messages that it names."""
        commands, command, row = pairs.commands, pairs.command, pairs.row
        kind = commands["kind"][int(command[0])].as_py()
        rows = pairs.known.take(pa.array(row))
        # Only a command that cancels whole entries is answered, and kept, by entry.
        is_whole = (int64(commands, "batch_index")[command] < 0) & (kind in (CANCEL, SKIP))
        masks = int64(commands, "subscriptions")[command]
        due = int64(rows, "deliver_at")
        ledgers, entries, indexes = message_ids(rows)
        sizes = int64(rows, "batch_size")
        _, distinct = np.unique(row, return_index=True)
        originals = rows.take(pa.array(distinct))
        wanted = self._remaining.mask_with_removed(originals) != 0
        outcomes = []
        for subscription in range(int(masks.max(initial=0)).bit_length()):
            sequence = self._operations.next_sequence(moment)
            chosen = np.flatnonzero(masks >> subscription & 1)
            at = ledgers[chosen], entries[chosen], indexes[chosen]
            cancelled = self._remaining.cancelled.contains(subscription, *at)
            moves, moved_to, _ = self._remaining.moved.find(subscription, *at)
            is_out = (moved_to <= moment.released) | is_out_ahead(rows.take(pa.array(chosen)), moved_to, moves, moment)
            is_late = np.where(moves > 0, is_out, pairs.is_released[row[chosen]])
            is_late |= self._remaining.delivered.contains(subscription, *at)
            has_payload = pairs.payload_row[row[chosen]] >= 0
            result, reason = results_of(kind, cancelled, is_late, has_payload)
            applied = np.flatnonzero(result == Result.APPLIED)
            _, first = np.unique(row[chosen[applied]], return_index=True)
            repeated = np.ones(len(applied), np.bool_)
            repeated[first] = False
            result[applied[repeated]] = Result.ALREADY_APPLIED
            applied = applied[~repeated]
            # Of a message that was moved before, one more row is unwanted; by a restore one less.
            self._remaining.unwanted_moves += int((moves[applied] > 0).sum()) * (-1 if kind == RESTORE else 1)

            is_shared, starts = entry_results(command[chosen], is_whole[chosen], result)
            now = chosen[applied]
            times = np.maximum(int64(commands, "deliver_at")[command[chosen]], moment.now)
            until = np.maximum(due[chosen], moved_to) + self._remembered_millis
            if kind == RESTORE:
                self._remaining.cancelled.remove(subscription, ledgers[now], entries[now], indexes[now], sizes[now])
            elif kind == RESCHEDULE:
                moving = pairs.payload_rows.take(pa.array(pairs.payload_row[row[now]]))
                self._operations.move(moving, subscription, times[applied], sequence)
            else:
                as_entry = (is_shared[applied] | (indexes[now] < 0)).astype(np.bool_)
                whole, single = now[as_entry], now[~as_entry]
                ends = until[applied]
                self._remaining.cancelled.add_entries(subscription, ledgers[whole], entries[whole], ends[as_entry])
                self._remaining.cancelled.add_messages(
                    subscription, ledgers[single], entries[single], indexes[single], sizes[single], ends[~as_entry]
                )
            answers = outcomes_of(self._subscriptions, pairs, chosen, result, reason, is_shared, starts, subscription)
            is_applied = pc.equal(answers["result"], int(Result.APPLIED))
            new_times = times[np.flatnonzero(starts | ~is_shared)] if kind == RESCHEDULE else None
            outcomes.append(
                with_columns(
                    answers,
                    sequence=pc.if_else(is_applied, sequence, None),
                    deliver_at=answers["deliver_at"] if new_times is None else pc.if_else(is_applied, new_times, None),
                )
            )
            if kind != RESCHEDULE:
                done = answers.filter(is_applied)
                operation = "RESTORE" if kind == RESTORE else "CANCEL"
                ends = times_of(done, rows.take(pa.array(chosen)), np.maximum(due[chosen], moved_to))
                self._operations.add(operation, done, sequence, ends)
        outcomes.append(self._for_later(pairs, kind, is_whole, moment))
        still_wanted = self._remaining.mask_with_removed(originals) != 0
        self._remaining.count_unwanted(where(originals, wanted & ~still_wanted), 1)
        self._remaining.count_unwanted(where(originals, ~wanted & still_wanted), -1)
        return outcomes

    def _for_later(self, pairs: Pairs, kind: str, is_whole: BoolArray, moment: Moment) -> pa.Table:
        """Returns outcomes for subscriptions that are added later: when one is, these are what applies to it."""
        later = pc.fill_null(pairs.commands["also_later"], False).to_numpy(zero_copy_only=False)
        chosen = np.flatnonzero(later[pairs.command])
        if not len(chosen):
            return OUTCOME_ROWS.empty_table()
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
