"""The delivery state of messages with a schedule key: which ones wait; and cancelling those that are superseded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from tracker.commands.outcomes import superseded_outcomes
from tracker.context import Context
from tracker.keys.live_keys import KeyHash, LiveKeys, last_messages
from tracker.message_state.moves import HELD_DELIVER_AT
from tracker.message_state.state import MessageState
from tracker.messages import BoolArray, concat, int64, message_ids, where
from tracker.properties import MessagePosition, key_hash
from tracker.schemas import OUTCOME_ROWS
from tracker.store import Store
from tracker.subscriptions import ALSO_LATER, by_topic, numbers_in


class KeyedMessages:
    """Tells which messages with a schedule key wait, and cancels those that are superseded.

    Args:
        context: of the shard.
        state: knows which messages commands have cancelled and moved.
    """

    def __init__(self, context: Context, state: MessageState) -> None:
        self._context = context
        self._subscriptions = context.subscriptions
        self._state = state

    def supersede_messages(self, rows: pa.Table, yields_to: pa.Array, since: pa.Array, is_new: BoolArray) -> pa.Table:
        """Cancels superseded messages, for all subscriptions for which they wait.

        Args:
            rows: as KNOWN, distinct messages.
            yields_to: strings, (rows,): the position of the message of the same key that supersedes each.
            since: int64, (rows,), ms since the epoch: when the first message of the key was published.
            is_new: bool, (rows,): the message came in in this tick. Its row goes neither to the tracker nor to a table.

        Returns:
            as OUTCOME_ROWS, also for subscriptions that are added later.

        Raises:
            SequencesExhaustedError: the tick has more commands and moves than there are sequences.
        """
        are_dispatched = self._context.are_dispatched(rows, is_new)
        kept = where(rows, ~is_new)
        wanted = self._state.masks_with_removed(kept) != 0
        masks = by_topic(rows, self._subscriptions.all_of)
        is_cancelled = np.zeros(rows.num_rows, np.bool_)
        outcomes = []
        for subscription in numbers_in(masks):
            chosen = np.flatnonzero(masks >> subscription & 1)
            chosen_rows = rows.take(pa.array(chosen))
            cancelled, is_late, moves, moved_to = self._state.delivery_state(
                subscription, chosen_rows, are_dispatched[chosen]
            )
            is_retry = self._state.moved.are_retries(subscription, message_ids(chosen_rows))
            now = np.flatnonzero(~cancelled & ~is_late & ~is_retry)
            if not len(now):
                continue
            self._state.unwanted_moves += int((moves[now] > 0).sum())
            until = np.maximum(int64(chosen_rows, "deliver_at"), moved_to)[now]
            done, chosen = chosen_rows.take(pa.array(now)), chosen[now]
            self._state.cancel_messages(
                subscription, done, int64(done, "batch_index") < 0, until + self._context.remembered_millis
            )
            is_cancelled[chosen] = True
            sequence = self._context.next_sequence()
            names = self._subscriptions.names_of(done["topic"], subscription)
            at = pa.array(chosen)
            outcomes.append(
                superseded_outcomes(done, names, yields_to.take(at), since.take(at), sequence, self._context.now)
            )
            is_kept = ~is_new[chosen]
            self._state.record_operation("CANCEL", where(outcomes[-1], is_kept), sequence, until[is_kept])
        # A subscription that is added later gets the messages that wait in the delayed index, except these.
        later = np.flatnonzero(is_cancelled & ~is_new)
        if len(later):
            at, names = pa.array(later), pa.repeat(ALSO_LATER, len(later))
            sequence = self._context.next_sequence()
            found = superseded_outcomes(
                rows.take(at), names, yields_to.take(at), since.take(at), sequence, self._context.now
            )
            outcomes.append(found)
        still_wanted = self._state.masks_with_removed(kept) != 0
        self._state.count_unwanted(where(kept, wanted & ~still_wanted), 1)
        return concat(outcomes, OUTCOME_ROWS)

    def are_waiting(self, rows: pa.Table) -> tuple[BoolArray, BoolArray, BoolArray]:
        """Tells which messages of earlier ticks wait.

        Args:
            rows: as KNOWN.

        Returns:
            three masks, bool, (rows,):
            1. The message waits for at least one subscription.
            2. It waits for its time (is not parked) for at least one subscription, and none has got it yet.
            3. Its time has come for all subscriptions, whether it is cancelled or not.
        """
        are_dispatched = self._context.are_dispatched(rows)
        masks = by_topic(rows, self._subscriptions.all_of)
        wanted = self._state.without_removed(rows, masks)
        waits, waits_for_time, has_been_had, is_past = np.zeros((4, rows.num_rows), np.bool_)
        is_past[:] = True
        for subscription in numbers_in(masks):
            is_of = masks >> subscription & 1 > 0
            cancelled, is_late, _, moved_to = self._state.delivery_state(subscription, rows, are_dispatched)
            # A retry has nothing to do with the message's schedule key.
            is_late |= self._state.moved.are_retries(subscription, message_ids(rows))
            is_waiting = is_of & ~cancelled & ~is_late
            waits |= is_waiting
            waits_for_time |= is_waiting & (moved_to != HELD_DELIVER_AT)
            has_been_had |= (wanted >> subscription & 1 > 0) & ~cancelled & is_late
            is_past &= is_late | ~is_of
        return waits, waits_for_time & ~has_been_had, is_past

    def are_past_for_all(self, rows: pa.Table) -> BoolArray:
        """Tells which messages of earlier ticks are past for all subscriptions. They need no topic.

        Args:
            rows: with the columns of KNOWN, except the topic.

        Returns:
            bool, (rows,).
        """
        are_dispatched = self._context.are_dispatched(rows)
        past = np.ones(rows.num_rows, np.bool_)
        for subscription in range(self._subscriptions.max_count):
            is_retry = self._state.moved.are_retries(subscription, message_ids(rows))
            past &= self._state.delivery_state(subscription, rows, are_dispatched).is_late | is_retry
        return past

    def are_cancelled(self, rows: pa.Table) -> BoolArray:
        """Tells which messages are cancelled for at least one subscription: bool, (rows,). They need no topic."""
        found = np.zeros(rows.num_rows, np.bool_)
        if self._state.cancelled:
            for subscription in range(self._subscriptions.max_count):
                found |= self._state.cancelled.contains(subscription, message_ids(rows))
        return found


class TakenOver:
    """Remembers, for messages that superseded another one of their key before a rebuild, when the key began.

    Such a message comes in again after the rebuild, but the superseded one does not wait any more. Without this the key
    would begin again with the message, and `debounceMax` would count from it.

    Args:
        store: where they are kept.
    """

    def __init__(self, store: Store) -> None:
        self._rows = LiveKeys(store, "schedule_keys_taken_over")

    def add_messages(self, rows: pa.Table) -> None:
        """Adds the rows of LIVE_KEYS that have `comes_again`."""
        named = zip(rows["topic"].to_pylist(), last_messages(rows), strict=True)
        self._rows.update({_hash_of(topic, message.position): message for topic, message in named})

    def take_since(self, topics: Iterable[str], positions: Sequence[MessagePosition]) -> dict[MessagePosition, int]:
        """Looks messages up, forgets the ones found, and returns when their keys began.

        Args:
            topics: the topic of each message.
            positions: the position of each message.

        Returns:
            by position: publish time of the first message since the key began again, ms since the epoch.
        """
        if not len(self._rows):
            return {}
        hashes = [_hash_of(topic, position) for topic, position in zip(topics, positions, strict=True)]
        found = self._rows.find_hot(hashes)
        self._rows.update(dict.fromkeys(found))
        return {position: found[one].since for one, position in zip(hashes, positions, strict=True) if one in found}

    def sweep(self, now: int) -> None:
        """Forgets messages that have been remembered long enough, in a part of the map.

        Args:
            now: ms since the epoch.
        """

        def judge(rows: pa.Table) -> tuple[BoolArray, BoolArray]:
            return int64(rows, "deliver_at") <= now, np.zeros(rows.num_rows, np.bool_)

        self._rows.sweep(judge, now, now, 0)

    def save(self) -> None:
        """Writes the changes to the store."""
        self._rows.save()


def _hash_of(topic: str, position: MessagePosition) -> KeyHash:
    return key_hash(topic, str(position))
