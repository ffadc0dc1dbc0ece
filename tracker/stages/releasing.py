"""Releases due rows: decides to which subscriptions each row goes now, and what happens to the others."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa

from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.commands.control import Control
from tracker.commands.holding.giving_up import GivenUp
from tracker.commands.schema import OUTCOME_ROWS
from tracker.dead_letter_targets import dead_letters_in
from tracker.in_flight import PLANNED, SENDING, InFlight, Release
from tracker.key_order import KeyOrder
from tracker.messages import are_recurring, concat, has_occurrences, in_order, int64, is_rejected, where
from tracker.shaping.shaper import Shaper
from tracker.stages.tick_in_progress import TickInProgress
from tracker.stages.unwritable import sent_rejects
from tracker.subscriptions import Subscriptions


class Releasing:
    """Makes releases of due rows.

    Args:
        subscriptions: the subscriptions of each source topic.
        tracker: takes back the rows that wait for places.
        control: decides to which subscriptions a message goes.
        shaper: gives messages their places.
        in_flight: keeps the releases until they are confirmed.
    """

    def __init__(
        self,
        subscriptions: Subscriptions,
        tracker: DelayedDeliveryTracker,
        control: Control,
        shaper: Shaper,
        in_flight: InFlight,
    ) -> None:
        self._subscriptions = subscriptions
        self._tracker = tracker
        self._control = control
        self._shaper = shaper
        self._in_flight = in_flight
        self._key_order = KeyOrder(subscriptions)

    def release(self, step: TickInProgress, kind: int, rows: pa.Table) -> int:
        """Hands out due rows, except those that `release_in_order` hands out.

        Args:
            step: the tick: the release and the messages that are given up are added to it.
            kind: of the release.
            rows: as MESSAGES, in the order of sending, removed from the tracker.

        Returns:
            how many rows are handed out, those of `release_in_order` included.
        """
        if not rows.num_rows:
            return 0
        masks = self._control.hand_out(rows, step.moment)
        next_sequence = partial(self._control.next_sequence, step.moment)
        recurs = are_recurring(rows)
        # Dead letters go to another topic, which may be writable.
        spared = np.where(recurs, masks, masks & dead_letters_in(rows, self._subscriptions))
        given_up, others = step.giving_up.reject(rows, masks & ~spared, next_sequence)
        masks = spared | others
        placed = None
        if self._shaper:
            masks, placed, waiting = self._shaper.shape(
                rows, masks, step.moment, step.tick.cutoff, have_waited=kind == PLANNED
            )
            for queue, of_queue in waiting:
                self._tracker.put_back(queue, of_queue)
        is_wanted = is_rejected(rows) | (masks != 0)
        rows = where(rows.append_column("subscription_mask", pa.array(masks)), is_wanted)
        if placed is not None and placed.num_rows:
            rows = in_order(concat([rows, placed], rows.schema))
        if has_occurrences(rows):
            rows, given_up = self._move_on(step, rows, given_up)
        n: int = rows.num_rows
        if given_up.rejects.num_rows:
            rejects = sent_rejects(step.tick.unwritable, given_up.rejects)
            rejects = rejects.append_column("subscription_mask", pa.array(np.zeros(rejects.num_rows, np.int64)))
            rows = in_order(concat([rows, rejects], rows.schema))
        self._hand_over(step, kind, self._key_order.take(rows))
        step.given_up.append(given_up)
        return n

    def release_in_order(self, step: TickInProgress) -> None:
        """Hands out the messages that have to come in order, of all rows that `release` got in this tick."""
        for kind, rows in self._key_order.releases(step.moment.released):
            self._hand_over(step, kind, rows)

    def _hand_over(self, step: TickInProgress, kind: int, rows: pa.Table) -> None:
        """Makes a release of rows, if there are any, and keeps it until it is confirmed."""
        if rows.num_rows:
            release = Release(step.tick.tick, kind, rows.replace_schema_metadata({SENDING: step.tick.sending}))
            self._in_flight.add(release)
            step.effects.releases.append(release)

    def _move_on(self, step: TickInProgress, rows: pa.Table, given_up: GivenUp) -> tuple[pa.Table, GivenUp]:
        """Moves the recurring messages of a release on to their next occurrence, and gives up unwritable occurrences.

        Args:
            step: the tick.
            rows: as MESSAGES and `subscription_mask`.
            given_up: the other messages of the release that are given up.

        Returns:
            the rows with further occurrences that are due, and `given_up` with occurrences that are given up.
        """
        masks = int64(rows, "subscription_mask")
        rows, shaped = rows.drop_columns(["subscription_mask"]), self._shaper.shaped_masks(rows)
        rows, masks = self._control.occurrences.hand_out(rows, masks, step.moment, step.tick.cutoff, shaped)
        more, masks = step.giving_up.reject(rows, masks, partial(self._control.next_sequence, step.moment))
        is_wanted = is_rejected(rows) | (masks != 0)
        rows = where(rows.append_column("subscription_mask", pa.array(masks)), is_wanted)
        outcomes = concat([given_up.outcomes, more.outcomes], OUTCOME_ROWS)
        rejects = [given_up.rejects, more.rejects, self._control.occurrences.failed.take()]
        return rows, GivenUp(concat(rejects), outcomes)
