"""To which subscriptions each message still goes, and the delivery state of messages for one of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.context import Moment, is_out_ahead
from tracker.message_state.cancelled import CancelledMessages, Compression
from tracker.message_state.moves import Moved
from tracker.messages import BoolArray, Int64Array, attempts_of, int64, message_ids, subscription_numbers, where
from tracker.rebuilt import Rebuilt
from tracker.store import Store
from tracker.subscriptions import Subscriptions, by_topic, numbers_in


class Remaining:
    """Knows to which subscriptions each message still goes, and counts the unwanted rows, which go to none.

    Args:
        store: where the state is kept.
        subscriptions: the subscriptions of each source topic.
        compression: how the bitmaps of cancelled messages are compressed.
        unwanted_moves: first value of `counts`, which the caller saves.
        unwanted: second value of `counts`.
        numbers: third value of `counts`.

    Attributes:
        cancelled: the messages that are cancelled or skipped.
        delivered: the messages that were delivered before a rebuild: they are not delivered again, and no command
            changes them any more.
        moved: the last move of each message.
        unwanted_moves: how many rows of moved messages are unwanted.
    """

    def __init__(
        self,
        store: Store,
        subscriptions: Subscriptions,
        compression: Compression | None,
        unwanted_moves: int,
        unwanted: dict[str, int],
        numbers: dict[str, int],
    ) -> None:
        self._subscriptions = subscriptions
        self.cancelled = CancelledMessages(store, compression)
        self.delivered = CancelledMessages(store, compression, "delivered")
        self.moved = Moved(store)
        self.unwanted_moves = unwanted_moves
        # By topic: how many rows with which messages came are unwanted. A subscription that is added wants them again.
        self._unwanted = unwanted
        # By topic: how many numbers are in use. More than before mean that a subscription was added.
        self._numbers = numbers
        for topic, names in subscriptions.names.items():
            if len(names) > numbers.get(topic, len(names)):
                unwanted.pop(topic, None)
            numbers[topic] = len(names)

    @property
    def counts(self) -> tuple[int, dict[str, int], dict[str, int]]:
        """The counts that the caller saves: `unwanted_moves`; by topic other unwanted rows; by topic numbers in use."""
        return self.unwanted_moves, self._unwanted, self._numbers

    @property
    def has_exceptions(self) -> bool:
        """Whether any message has been cancelled, skipped, moved, or was delivered before a rebuild."""
        return bool(self.cancelled) or bool(self.moved) or bool(self.delivered)

    @property
    def unwanted(self) -> int:
        """The number of unwanted rows: those that still wait, but go to no subscription any more."""
        return self.unwanted_moves + sum(self._unwanted.values())

    def subscription_mask(self, rows: pa.Table) -> Int64Array:
        """Returns the subscriptions to which rows go. A row goes to none for which a later row of its message counts.

        Args:
            rows: as MESSAGES, or only topic, ledger_id, entry_id and batch_index.

        Returns:
            masks, int64, (rows,): bit i is the topic's subscription of number i.
        """
        return self.without_removed(rows, self.mask_with_removed(rows))

    def without_removed(self, rows: pa.Table, masks: Int64Array) -> Int64Array:
        """Returns masks of rows, int64, (rows,), without the subscriptions that are not in the settings any more."""
        return masks & by_topic(rows, self._subscriptions.active) if self._subscriptions.removed else masks

    def mask_with_removed(self, rows: pa.Table) -> Int64Array:
        """Returns the subscriptions to which rows go, as `subscription_mask`, removed subscriptions included."""
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
            is_left = self.cancelled.contains(subscription, *position)
            is_left |= self.moved.find(subscription, *position)[0] != sequence
            is_left |= self.delivered.contains(subscription, *position)
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
                is_done = self.delivered.contains(subscription, *position)
                is_done |= self.moved.find(subscription, *position)[0] > 0
                left[is_done] &= ~(1 << subscription)
        return np.asarray(left == 0, np.bool_)

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
            is_retried = self.moved.attempts(subscription, *message_ids(rows)) > attempts_of(rows)
            masks[is_retried] &= ~(1 << subscription)
        return masks

    def moved_to(self, known: pa.Table) -> set[int]:
        """Returns the times to which messages have been moved, ms since the epoch, for any subscription.

        Args:
            known: as KNOWN. If some have not been moved, 0 is among the times.
        """
        times: set[int] = set()
        for subscription in range(self._subscriptions.max_count if self.moved else 0):
            times.update(self.moved.find(subscription, *message_ids(known))[1].tolist())
        return times

    def cancel(self, subscription: int, rows: pa.Table, as_entry: BoolArray, until: Int64Array) -> None:
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
            subscription, ledgers[single], entries[single], indexes[single], sizes[single], until[single]
        )

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

    def rebuild(self, rebuilt: Rebuilt) -> None:
        """Restores the state after a rebuild."""
        for messages, rows in ((self.cancelled, rebuilt.cancelled), (self.delivered, rebuilt.delivered)):
            add_positions(messages, rows)
            messages.save()
        subscriptions = int64(rebuilt.moved, "subscription")
        for subscription in np.unique(subscriptions).tolist():
            moved = where(rebuilt.moved, subscriptions == subscription)
            sequences, times = int64(moved, "sequence"), int64(moved, "deliver_at")
            until = int64(moved, "until")
            self.moved.put(subscription, *message_ids(moved), sequences, times, until, attempts_of(moved))
        self.unwanted_moves = rebuilt.unwanted

    def drop_expired(self, cutoff: int) -> None:
        """Forgets cancelled, delivered and moved messages that are past at the cutoff, ms since the epoch."""
        self.cancelled.drop_expired(cutoff)
        self.delivered.drop_expired(cutoff)
        self.moved.drop_expired(cutoff)

    def save(self) -> None:
        """Writes the changes to the store, except `counts`, which the caller saves."""
        self.cancelled.save()
        self.delivered.save()
        self.moved.save()


class DeliveryState(NamedTuple):
    """The delivery state of n messages for a subscription.

    Attributes:
        cancelled: bool, (n,): the message is cancelled.
        is_late: bool, (n,): the message has been handed out.
        moves: int64, (n,): the sequence of the message's last move; 0: none.
        moved_to: int64, (n,), ms since the epoch: the time to which that move moved it; 0: none.
    """

    cancelled: BoolArray
    is_late: BoolArray
    moves: Int64Array
    moved_to: Int64Array


def delivery_state(
    remaining: Remaining, subscription: int, rows: pa.Table, is_released: BoolArray, moment: Moment
) -> DeliveryState:
    """Returns the delivery state of messages for a subscription.

    Args:
        remaining: knows to which subscriptions each message still goes.
        subscription: its number.
        rows: with the columns of KNOWN, except the topic.
        is_released: bool, (rows,): the message has been handed out, assuming that it was not moved.
        moment: of this tick.
    """
    at = message_ids(rows)
    moves, moved_to, _ = remaining.moved.find(subscription, *at)
    is_out = (moved_to <= moment.released) | is_out_ahead(rows, moved_to, moves, moment)
    is_late = np.where(moves > 0, is_out, is_released) | remaining.delivered.contains(subscription, *at)
    return DeliveryState(remaining.cancelled.contains(subscription, *at), is_late, moves, moved_to)


def add_positions(messages: CancelledMessages, rows: pa.Table) -> None:
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
            int64(single, "ledger_id"),
            int64(single, "entry_id"),
            int64(single, "batch_index"),
            np.full(single.num_rows, np.iinfo(np.int32).max),
            int64(single, "until"),
        )
