"""What is known of a shard's messages that are not as they came: cancelled, moved, delivered before, not wanted."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.mutable_bucket import Chunks
from tracker.context import Context
from tracker.message_state.changes import CancelledMessages, Compression, Moved
from tracker.messages import (
    MESSAGES,
    BoolArray,
    Int64Array,
    MessageIds,
    attempts_of,
    concat,
    empty_table,
    has_occurrences,
    int64,
    message_ids,
    subscription_numbers,
    typed,
    where,
    with_columns,
)
from tracker.rebuilt import Rebuilt
from tracker.recurrence.columns import NEVER, PendingOccurrences
from tracker.schemas import CANCEL_ROWS
from tracker.subscriptions import by_topic, numbers_in

_TABLE = "control"


class DeliveryState(NamedTuple):
    """The delivery state of n messages for a subscription.

    Attributes:
        cancelled: bool, (n,): the message is cancelled.
        is_late: bool, (n,): the message has been dispatched.
        moves: int64, (n,): the sequence of the message's last move; 0: none.
        moved_to: int64, (n,), ms since the epoch: the time to which that move moved it; 0: none.
    """

    cancelled: BoolArray
    is_late: BoolArray
    moves: Int64Array
    moved_to: Int64Array


class MessageState:
    """Knows to which subscriptions each message still goes, and records for the delayed index what changes that.

    Rows of type CANCEL, RESTORE and MOVE are kept until they are sealed; rows of moved messages go to the tracker in
    the same tick. Rows that go to no subscription any more are unwanted; they are counted.

    Args:
        compression: how the bitmaps of cancelled messages are compressed.

    Attributes:
        cancelled: the messages that are cancelled or skipped.
        delivered: the messages that were delivered before a rebuild: they are not delivered again, and no command
            changes them any more.
        rejected: the messages that were rejected before a rebuild, for subscription 0: they are not rejected again.
        moved: the last move of each message.
        moves: the new rows of moved messages, as MESSAGES, that `take_moves` returns next.
        unwanted_moves: how many rows of moved messages are unwanted.
        paused: by topic: a mask of the subscriptions that are paused.
        draining: of `Parking`: (topic, subscription's number, the values of `Resuming`).
        parked_ends: of `tracker.ends.ParkedEnds`: its attribute `meta`.
    """

    def __init__(self, context: Context, compression: Compression | None = None) -> None:
        store = context.store
        self._context = context
        self._subscriptions = context.subscriptions
        self.cancelled = CancelledMessages(store, compression)
        self.delivered = CancelledMessages(store, compression, "delivered")
        self.rejected = CancelledMessages(store, compression, "rejected")
        self.moved = Moved(store)
        self.moves: list[pa.Table] = []
        self._saved = store.get(_TABLE, (0, 0))
        # Earlier versions did not save the last values: they are empty.
        saved: list[Any] = json.loads(self._saved) if self._saved else [0, 0, 0, {}]
        defaults: list[Any] = [{}, {}, [], []]
        self._to_seal = Chunks(store, "cancels", CANCEL_ROWS, *saved[:2])
        self.unwanted_moves: int = saved[2]
        self.paused: dict[str, int] = saved[3]
        # By topic: how many rows with which messages came are unwanted. A subscription that is added wants them again.
        self._unwanted: dict[str, int]
        # By topic: how many numbers are in use. More than before mean that a subscription was added.
        self._numbers: dict[str, int]
        self._unwanted, self._numbers, self.draining, self.parked_ends = [*saved[4:], *defaults[len(saved) - 4 :]]
        for topic, names in self._subscriptions.names.items():
            if len(names) > self._numbers.get(topic, len(names)):
                self._unwanted.pop(topic, None)
            self._numbers[topic] = len(names)

    @property
    def has_exceptions(self) -> bool:
        """Whether any message has been cancelled, skipped, moved, or was delivered before a rebuild."""
        return bool(self.cancelled) or bool(self.moved) or bool(self.delivered)

    @property
    def unwanted(self) -> int:
        """The number of unwanted rows: those that still wait, but go to no subscription any more."""
        return self.unwanted_moves + sum(self._unwanted.values())

    def subscription_masks(self, rows: pa.Table) -> Int64Array:
        """Returns the subscriptions to which rows go. A row goes to none for which a later row of its message counts.

        Args:
            rows: as MESSAGES, or only topic, ledger_id, entry_id and batch_index.

        Returns:
            masks, int64, (rows,): bit i is the topic's subscription of number i.
        """
        return self.without_removed(rows, self.masks_with_removed(rows))

    def without_removed(self, rows: pa.Table, masks: Int64Array) -> Int64Array:
        """Returns masks of rows, int64, (rows,), without the subscriptions that are not in the settings any more."""
        return masks & by_topic(rows, self._subscriptions.active) if self._subscriptions.removed else masks

    def masks_with_removed(self, rows: pa.Table) -> Int64Array:
        """Returns the subscriptions to which rows go, as `subscription_masks`, removed subscriptions included."""
        masks = by_topic(rows, self._subscriptions.all_of)
        if "sequence" in rows.column_names and rows["subscription"].null_count < rows.num_rows:
            masks &= self.addressed_to(rows)
        # After a rebuild, rows of later occurrences may come up whose move is not known: these do not count.
        are_moved = "sequence" in rows.column_names and rows["sequence"].null_count < rows.num_rows
        if not (self.has_exceptions or are_moved) or not rows.num_rows:
            return masks
        position = message_ids(rows)
        sequence = np.zeros(rows.num_rows, np.int64)
        if are_moved:
            sequence = pc.fill_null(rows["sequence"], 0).to_numpy()
        for subscription in numbers_in(masks):
            is_left = self.cancelled.contains(subscription, position)
            is_left |= self.moved.find_moves(subscription, position)[0] != sequence
            is_left |= self.delivered.contains(subscription, position)
            masks[is_left] &= ~(1 << subscription)
        return masks

    def are_done(self, messages: pa.Table) -> BoolArray:
        """Tells which messages are done with: each subscription has got them, or a later row of them counts.

        Such messages come in again after a rebuild. A message that is only cancelled is not done with: it may be
        restored.

        Args:
            messages: as MESSAGES: the rows with which the messages come in.

        Returns:
            bool, (messages,).
        """
        left = by_topic(messages, self._subscriptions.active)
        if self.delivered or self.moved:
            position = message_ids(messages)
            for subscription in numbers_in(left):
                is_done = self.delivered.contains(subscription, position)
                is_done |= self.moved.find_moves(subscription, position)[0] > 0
                left[is_done] &= ~(1 << subscription)
        return np.asarray(left == 0, np.bool_)

    def were_rejected(self, messages: pa.Table) -> BoolArray:
        """Tells which messages were rejected before a rebuild: bool, (messages,).

        Args:
            messages: as MESSAGES: the rows with which the messages come in.
        """
        if not self.rejected:
            return np.zeros(messages.num_rows, np.bool_)
        return self.rejected.contains(0, message_ids(messages))

    def addressed_to(self, rows: pa.Table) -> Int64Array:
        """Returns a mask of the subscriptions that each row is for, int64, (rows,).

        It is -1, all subscriptions, for a row that names none; 0 for a row that names one which its topic lacks.
        """
        if rows["subscription"].null_count == rows.num_rows:
            return np.full(rows.num_rows, -1, dtype=np.int64)
        numbers = subscription_numbers(rows, self._subscriptions.names)
        masks = np.where(numbers < 0, 0, 1 << np.maximum(numbers, 0))
        masks[pc.is_null(rows["subscription"]).to_numpy(zero_copy_only=False)] = -1
        return masks

    def without_retried(self, rows: pa.Table, masks: Int64Array) -> Int64Array:
        """Returns masks of rows in flight without the subscriptions for which a later retry of the message counts.

        Args:
            rows: as MESSAGES.
            masks: int64, (rows,): the subscriptions, as bits.
        """
        masks = masks.copy()
        for subscription in numbers_in(masks) if self.moved else ():
            is_retried = self.moved.attempts(subscription, message_ids(rows)) > attempts_of(rows)
            masks[is_retried] &= ~(1 << subscription)
        return masks

    def times_moved_to(self, known: pa.Table) -> set[int]:
        """Returns the times to which messages have been moved, ms since the epoch, for any subscription.

        Args:
            known: as KNOWN. If some have not been moved, 0 is among the times.
        """
        times: set[int] = set()
        for subscription in range(self._subscriptions.max_count if self.moved else 0):
            times.update(self.moved.find_moves(subscription, message_ids(known))[1].tolist())
        return times

    def cancel_messages(self, subscription: int, rows: pa.Table, as_entry: BoolArray, until: Int64Array) -> None:
        """Remembers messages as cancelled for a subscription.

        Args:
            subscription: its number.
            rows: with ledger_id, entry_id, batch_index and batch_size.
            as_entry: bool, (rows,): all messages of the entry are cancelled.
            until: int64, (rows,), ms since the epoch: the message is remembered until then.
        """
        ledgers, entries, indexes = message_ids(rows)
        sizes = int64(rows, "batch_size")
        whole, single = as_entry, ~as_entry
        self.cancelled.add_entries(subscription, ledgers[whole], entries[whole], until[whole])
        self.cancelled.add_messages(
            subscription, MessageIds(ledgers[single], entries[single], indexes[single]), sizes[single], until[single]
        )

    def count_unwanted_new(self, messages: pa.Table) -> None:
        """Counts new messages, as MESSAGES, that go to no subscription, before they are added to the tracker."""
        if self.has_exceptions:
            self.count_unwanted(where(messages, self.masks_with_removed(messages) == 0), 1)

    def count_unwanted(self, rows: pa.Table, sign: int) -> None:
        """Counts unwanted rows.

        Args:
            rows: as MESSAGES or KNOWN.
            sign: 1: they are unwanted from now on; -1: they are gone, or go to a subscription again.
        """
        if not rows.num_rows:
            return
        if "sequence" in rows.column_names:
            self.unwanted_moves += sign * (rows.num_rows - rows["sequence"].null_count)
            rows = rows.filter(pc.is_null(rows["sequence"]))
        counts = rows.group_by("topic").aggregate([([], "count_all")])
        for topic, n in zip(counts["topic"].to_pylist(), counts["count_all"].to_pylist(), strict=True):
            self._unwanted[topic] = self._unwanted.get(topic, 0) + sign * n

    def delivery_state(self, subscription: int, rows: pa.Table, are_dispatched: BoolArray) -> DeliveryState:
        """Returns the delivery state of messages for a subscription.

        Args:
            subscription: its number.
            rows: with the columns of KNOWN, except the topic.
            are_dispatched: bool, (rows,): the message has been dispatched, assuming that it was not moved.
        """
        ids = message_ids(rows)
        moves, moved_to, _ = self.moved.find_moves(subscription, ids)
        are_out = (moved_to <= self._context.released) | self._context.are_dispatched_ahead(rows, moved_to, moves)
        is_late = np.where(moves > 0, are_out, are_dispatched) | self.delivered.contains(subscription, ids)
        return DeliveryState(self.cancelled.contains(subscription, ids), is_late, moves, moved_to)

    def record_operation(
        self, operation: str, rows: pa.Table, sequence: int | Int64Array, deliver_at: Int64Array
    ) -> None:
        """Keeps rows for the delayed index until they are sealed.

        Args:
            operation: CANCEL, RESTORE or MOVE.
            rows: with the columns of CANCEL_ROWS except operation, sequence and deliver_at; attempt is optional.
            sequence: of all rows; or int64, (rows,).
            deliver_at: int64, (rows,), ms since the epoch.
        """
        n = rows.num_rows
        values = {
            "occurrence": pa.nulls(n, pa.int64()),
            **{name: rows[name] for name in CANCEL_ROWS.names if name in rows.column_names},
            "operation": pa.array([operation] * n, pa.string()),
            "sequence": pa.array(np.full(n, sequence)),
            "deliver_at": pa.array(deliver_at),
        }
        self._to_seal.add_rows(typed(values, CANCEL_ROWS))

    def move_messages(
        self,
        rows: pa.Table,
        subscription: int,
        times: Int64Array,
        sequence: int | Int64Array,
        was_due: Int64Array | pa.ChunkedArray | None = None,
        shaped_from: Int64Array | None = None,
    ) -> None:
        """Gives messages another row, at another time, for one subscription; `take_moves` returns these rows.

        Args:
            rows: as MESSAGES, the rows that the messages have.
            subscription: its number.
            times: int64, (rows,), ms since the epoch: when the new rows are due.
            sequence: of all moves; or int64, (rows,).
            was_due: the new rows' column of that name, int64, (rows,), ms since the epoch; None: null in all.
            shaped_from: likewise. None, null, ends the effect of earlier shaping.
        """
        self.moves.append(self.make_moved_rows(rows, subscription, times, sequence, was_due, shaped_from))

    def make_moved_rows(
        self,
        rows: pa.Table,
        subscription: int,
        times: Int64Array,
        sequence: int | Int64Array,
        was_due: Int64Array | pa.ChunkedArray | None = None,
        shaped_from: Int64Array | None = None,
    ) -> pa.Table:
        """Moves messages as `move_messages` does, but leaves it to the caller to add the new rows to the tracker.

        Args:
            rows: as MESSAGES, the rows that the messages have.
            subscription: its number.
            times: int64, (rows,), ms since the epoch: when the new rows are due.
            sequence: of all moves; or int64, (rows,).
            was_due: the new rows' column of that name, int64, (rows,), ms since the epoch; None: null in all.
            shaped_from: likewise.

        Returns:
            the new rows, as MESSAGES, (rows,), in the order of `rows`.
        """
        position, n = message_ids(rows), rows.num_rows
        until = int64(rows, "deliver_at") + self._context.remembered_millis
        attempts = attempts_of(rows)
        self.moved.put(subscription, position, np.full(n, sequence), times, until, attempts)
        names = self._subscriptions.names_of(rows["topic"], subscription)
        sequences = pa.array(np.full(n, sequence))
        due_before = pa.nulls(n, pa.int64()) if was_due is None else was_due
        moved = with_columns(
            rows,
            deliver_at=pa.array(times),
            subscription=names,
            sequence=sequences,
            was_due=due_before if isinstance(due_before, pa.ChunkedArray) else pa.array(due_before),
            shaped_from=pa.nulls(n, pa.int64()) if shaped_from is None else pa.array(shaped_from),
        )
        if has_occurrences(rows):
            by_rule = pc.coalesce(rows["occurrence_at"], rows["deliver_at"])
            moved = with_columns(
                moved, occurrence_at=pc.if_else(pc.is_valid(rows["occurrence"]), by_rule, rows["occurrence_at"])
            )
        # The MOVE row says which of the two rows counts, so it is kept until both are past.
        self.record_operation("MOVE", moved, sequence, np.maximum(times, int64(rows, "deliver_at")))
        return moved

    def replace_occurrences(
        self,
        rows: pa.Table,
        subscription: int,
        pending: PendingOccurrences,
        is_replaced: BoolArray,
        sequence: int,
    ) -> None:
        """Replaces the pending occurrences of recurring messages by their next ones; `take_moves` returns the new rows.

        Args:
            rows: as MESSAGES: the rows of the occurrences pending so far.
            subscription: its number.
            pending: the next occurrences, (rows,).
            is_replaced: bool, (rows,): the occurrence pending so far is not dispatched. The delayed index gets a MOVE,
                by which the tables say that it is not pending.
            sequence: of the moves.
        """
        n = rows.num_rows
        has_next = pending.times != NEVER
        times = np.where(has_next, pending.times, self._context.released)
        until = int64(rows, "deliver_at") + self._context.remembered_millis
        self.moved.put(subscription, message_ids(rows), np.full(n, sequence), times, until, np.zeros(n, np.int64))
        following = with_columns(
            rows,
            deliver_at=pa.array(times),
            subscription=self._subscriptions.names_of(rows["topic"], subscription),
            sequence=pa.array(np.full(n, sequence)),
            occurrence=pa.array(pending.numbers, mask=~has_next),
            occurrence_at=pa.array(pending.by_rule, mask=pending.by_rule == NEVER),
            was_due=pa.array(pending.was_due, mask=pending.was_due == NEVER),
            shaped_from=pa.nulls(n, pa.int64()),
        )
        self.moves.append(where(following, has_next))
        if is_replaced.any():
            last = np.maximum(times, int64(rows, "deliver_at"))
            self.record_operation("MOVE", where(following, is_replaced), sequence, last[is_replaced])

    def take_moves(self) -> pa.Table:
        """Removes and returns the new rows of moved messages, as MESSAGES, which the caller adds to the tracker."""
        if not self.moves:
            return empty_table(MESSAGES)
        moves = concat(self.moves)
        self.moves = []
        return moves

    def take_cancels(self) -> pa.Table:
        """Removes and returns the rows of type CANCEL, RESTORE and MOVE for the delayed index, as CANCEL_ROWS."""
        return self._to_seal.take_all()

    def rebuild(self, rebuilt: Rebuilt) -> None:
        """Restores the state after a rebuild."""
        for messages, rows in (
            (self.cancelled, rebuilt.cancelled),
            (self.delivered, rebuilt.delivered),
            (self.rejected, rebuilt.rejected),
        ):
            _add_positions(messages, rows)
            messages.save()
        subscriptions = int64(rebuilt.moved, "subscription")
        for subscription in np.unique(subscriptions).tolist():
            moved = where(rebuilt.moved, subscriptions == subscription)
            sequences, times = int64(moved, "sequence"), int64(moved, "deliver_at")
            until = int64(moved, "until")
            self.moved.put(subscription, message_ids(moved), sequences, times, until, attempts_of(moved))
        self.unwanted_moves = rebuilt.unwanted
        self.paused = dict(rebuilt.paused)

    def drop_expired(self, cutoff: int) -> None:
        """Forgets cancelled, delivered and moved messages that are past at the cutoff, ms since the epoch."""
        self.cancelled.drop_expired(cutoff)
        self.delivered.drop_expired(cutoff)
        self.rejected.drop_expired(cutoff)
        self.moved.drop_expired(cutoff)

    def save(self) -> None:
        """Writes the changes to the store."""
        self.cancelled.save()
        self.delivered.save()
        self.rejected.save()
        self.moved.save()
        sealed = [self._to_seal.n_chunks, self._to_seal.n_rows]
        saved = [*sealed, self.unwanted_moves, self.paused, self._unwanted, self._numbers]
        if self.draining or self.parked_ends:
            saved.append(self.draining)
        if self.parked_ends:
            saved.append(self.parked_ends)
        data = json.dumps(saved).encode()
        if data != self._saved:
            self._context.store.put(_TABLE, (0, 0), data)
            self._saved = data


def _add_positions(messages: CancelledMessages, rows: pa.Table) -> None:
    """Adds rows of NOT_TO_DELIVER to a set of messages."""
    subscriptions = int64(rows, "subscription")
    for subscription in np.unique(subscriptions).tolist():
        own = where(rows, subscriptions == subscription)
        is_whole = int64(own, "batch_index") < 0
        whole, single = where(own, is_whole), where(own, ~is_whole)
        messages.add_entries(subscription, int64(whole, "ledger_id"), int64(whole, "entry_id"), int64(whole, "until"))
        # The sizes of the batches are not known here. With this size messages never add up to a whole entry.
        messages.add_messages(
            subscription,
            message_ids(single),
            np.full(single.num_rows, np.iinfo(np.int32).max),
            int64(single, "until"),
        )
