"""How the messages of schedule keys stand: which wait, and how one is superseded."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tracker.commands.control import Control
from tracker.commands.message_state.moves import HELD_DELIVER_AT
from tracker.commands.moment import Moment, are_released
from tracker.commands.outcome_rows import superseded
from tracker.commands.schema import OUTCOME_ROWS
from tracker.commands.standing import standing
from tracker.messages import BoolArray, concat, int64, message_ids, where
from tracker.subscriptions import ALSO_LATER, Subscriptions, by_topic


class KeyedMessages:
    """Tells how messages with a schedule key stand, and cancels those that are superseded.

    Args:
        control: has what commands have done to messages.
        subscriptions: those of each source topic.
    """

    def __init__(self, control: Control, subscriptions: Subscriptions) -> None:
        self._remaining = control.remaining
        self._operations = control.operations
        self._remembered_millis = control.remembered_millis
        self._subscriptions = subscriptions

    def supersede(
        self, rows: pa.Table, yields_to: pa.Array, since: pa.Array, is_new: BoolArray, moment: Moment
    ) -> pa.Table:
        """Cancels messages that another one with their schedule key supersedes, for all subscriptions they wait for.

        Args:
            rows: as KNOWN, distinct messages.
            yields_to: strings, (rows,): the position of the other message.
            since: int64, (rows,), ms since the epoch: when the first message of the key was published.
            is_new: bool, (rows,): the message came in only in this tick: neither the tracker nor a table gets its row.
            moment: of this tick.

        Returns:
            OUTCOME_ROWS, also for subscriptions that are added later.

        Raises:
            SequencesExhaustedError: the tick has more commands and moves than there are sequences.
        """
        is_released = are_released(rows, is_new, moment)
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
            self._remaining.cancel(subscription, done, int64(done, "batch_index") < 0, until + self._remembered_millis)
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

    def are_waiting(self, rows: pa.Table, moment: Moment) -> tuple[BoolArray, BoolArray, BoolArray]:
        """Tells which messages of earlier ticks wait for a subscription.

        Args:
            rows: as KNOWN.
            moment: of this tick.

        Returns:
            three masks, bool, (rows,): which wait for any subscription; which for one for which their time has not
            come, so that they are not held back, while none has had them; and of which the time has come for all, also
            where they are cancelled.
        """
        is_released = _are_released_before(rows, moment)
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

    def are_past_for_all(self, rows: pa.Table, moment: Moment) -> BoolArray:
        """Tells of which messages of earlier ticks the time has come for all subscriptions, whatever their topic.

        Args:
            rows: with the columns of KNOWN, but for the topic.
            moment: of this tick.

        Returns:
            bool, (rows,).
        """
        is_released = _are_released_before(rows, moment)
        past = np.ones(rows.num_rows, np.bool_)
        for subscription in range(self._subscriptions.most):
            is_retry = self._remaining.moved.are_retries(subscription, *message_ids(rows))
            past &= standing(self._remaining, subscription, rows, is_released, moment).is_late | is_retry
        return past

    def are_cancelled(self, rows: pa.Table) -> BoolArray:
        """Tells which messages are cancelled for any subscription, whatever their topic: bool, (rows,)."""
        found = np.zeros(rows.num_rows, np.bool_)
        if self._remaining.cancelled:
            for subscription in range(self._subscriptions.most):
                found |= self._remaining.cancelled.contains(subscription, *message_ids(rows))
        return found


def _are_released_before(rows: pa.Table, moment: Moment) -> BoolArray:
    """Tells which messages of earlier ticks have been handed out, if they have not been moved."""
    return are_released(rows, np.zeros(rows.num_rows, np.bool_), moment)
