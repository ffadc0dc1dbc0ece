"""Dispatches due rows: decides to which subscriptions each row goes now, and what happens to the others.

What has to come in order gets releases of its own, what is parked for a subscription that is resumed, or slow, goes out
in rounds, and rows for which the tick has failed are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.commands.occurrences import Occurrences
from tracker.commands.outcomes import NOT_DELIVERED
from tracker.context import Context
from tracker.giving_up import GivenUp, cancelled, rejected, select_sent_rejects
from tracker.in_flight import IN_ORDER, PLANNED, SENDING, SUBSCRIPTION_MASK, InFlight, Release
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.message_state.parking import Parking, Round
from tracker.messages import (
    MESSAGES,
    BoolArray,
    are_recurring,
    concat,
    empty_table,
    has_occurrences,
    in_order,
    in_order_of_dues,
    int64,
    is_rejected,
    message_ids,
    order_keys,
    typed,
    where,
    with_columns,
)
from tracker.schemas import OUTCOME_ROWS
from tracker.shaping.shaper import Shaper
from tracker.subscriptions import Subscriptions, by_topic, dead_letters_in
from tracker.tick import TickInProgress


class KeyOrder:
    """Takes messages that have to come in order out of a tick's releases, and makes releases of their own.

    Messages due by the last tick's cutoff go into one release, on short notice, those due later into another, planned.
    So all messages of the first, in every shard, come before all messages of the second.
    """

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions
        self._taken: list[pa.Table] = []

    def take_ordered(self, rows: pa.Table) -> pa.Table:
        """Takes the messages that have to come in order out of a release.

        Args:
            rows: as `Release.rows`.

        Returns:
            the other rows; `subscription_mask` has the subscriptions for which a row was not taken.
        """
        masks_in_order = self._subscriptions.in_order
        if not masks_in_order or not rows.num_rows:
            return rows
        masks = int64(rows, SUBSCRIPTION_MASK)
        has_key: BoolArray = pc.is_valid(order_keys(rows)).to_numpy()
        taken = np.where(
            has_key & ~is_rejected(rows), masks & by_topic(rows, lambda topic: masks_in_order.get(topic, 0)), 0
        )
        if not taken.any():
            return rows
        self._taken.append(where(with_columns(rows, **{SUBSCRIPTION_MASK: pa.array(taken)}), taken != 0))
        left = with_columns(rows, **{SUBSCRIPTION_MASK: pa.array(masks & ~taken)})
        return where(left, (masks & ~taken != 0) | is_rejected(rows))

    def make_releases(self, last_cutoff: int) -> Iterator[tuple[int, pa.Table]]:
        """Yields the kind and the rows of each release made of the messages taken, in order of time.

        Args:
            last_cutoff: cutoff of the previous tick, the same in all shards, ms since the epoch.
        """
        if not self._taken:
            return
        rows, self._taken = in_order(concat(self._taken, self._taken[0].schema)), []
        is_short = int64(rows, "deliver_at") <= last_cutoff
        for kind, chosen in ((IN_ORDER, is_short), (IN_ORDER | PLANNED, ~is_short)):
            if chosen.any():
                yield kind, where(rows, chosen)


class Dispatcher:
    """Dispatches due rows in releases.

    Args:
        tracker: takes back the rows that wait for places; has the parked rows that are not sealed yet.
        parking: decides to which subscriptions a message goes.
        occurrences: moves recurring messages on.
        shaper: gives messages their places.
        in_flight: keeps the releases until they are confirmed.
    """

    def __init__(
        self,
        context: Context,
        tracker: DelayedDeliveryTracker,
        parking: Parking,
        occurrences: Occurrences,
        shaper: Shaper,
        in_flight: InFlight,
    ) -> None:
        self._context = context
        self._subscriptions = context.subscriptions
        self._tracker = tracker
        self._parking = parking
        self._occurrences = occurrences
        self._shaper = shaper
        self._in_flight = in_flight
        self._key_order = KeyOrder(context.subscriptions)

    def drain_parked(self, step: TickInProgress) -> dict[str, dict[str, tuple[int, bool]]]:
        """Moves messages that are parked for resumed subscriptions and slow destinations to now, a round for each.

        The input has the sealed ones that all shards together dispatch. Those that are not sealed yet go with those
        that were due after them, or when the input has all sealed ones.

        Returns:
            as `Effects.drained`.
        """
        found: dict[str, dict[str, tuple[int, bool]]] = {}
        drains, rounds = step.tick.drains, step.input.rounds
        targets = {(topic, name) for of_all in (drains, rounds) for topic, names in of_all.items() for name in names}
        unsealed = self._tracker.find_rows(()) if targets else empty_table(MESSAGES)
        for topic, name in sorted(targets):
            one = rounds.get(topic, {}).get(name, Round())
            rows = _parked_for(step.input.drained, topic, name)
            others = in_order_of_dues(_parked_for(unsealed, topic, name))
            if self._parking.is_resumed(topic, name):
                # All shards begin and end the rounds together: messages of a key are in any of them.
                first = others if one.until is None else _due_before(others, one.until)
                self._parking.drain_parked(concat([rows, first]), topic, name)
                self._parking.note_round(topic, name, one)
            elif (most := drains.get(topic, {}).get(name)) is not None:
                first = others.slice(0, most) if one.until is None else _due_before(others, one.until)
                n = self._parking.drain_parked(concat([rows, first]), topic, name)
                found.setdefault(topic, {})[name] = n, one.until is not None or first.num_rows < others.num_rows
        return found

    def dispatch_due(self, step: TickInProgress, kind: int, rows: pa.Table) -> int:
        """Dispatches due rows, except those that `dispatch_in_order` dispatches.

        Args:
            step: the tick: the release and the messages that are given up are added to it.
            kind: of the release.
            rows: as MESSAGES, in the order of sending, removed from the tracker.

        Returns:
            how many rows are dispatched, those of `dispatch_in_order` included.
        """
        waits = step.expiring.wait_for_end(rows) if rows.num_rows else np.zeros(0, np.bool_)
        if waits.any():
            self._tracker.put_off(where(rows, waits))
            rows = where(rows, ~waits)
        if not rows.num_rows:
            return 0
        masks = self._parking.choose_subscriptions(rows)
        ended = step.expiring.find_ended(rows, masks)
        # An occurrence that has expired is moved on as if it were sent.
        passed = np.where(are_recurring(rows), ended, 0) if ended.any() else ended
        step.expiring.expire_rows(rows, ended & ~passed)
        masks = self._parking.park_due(rows, masks & ~ended)
        # Dead letters go to another topic, which may be writable.
        spared = np.where(are_recurring(rows), masks, masks & dead_letters_in(rows, self._subscriptions))
        given_up, others = step.giving_up.reject_rows(rows, masks & ~spared)
        masks = spared | others
        placed = None
        if self._shaper:
            masks, placed, waiting = self._shaper.shape_rows(rows, masks, have_waited=kind == PLANNED)
            for queue, queue_rows, ends in waiting:
                self._tracker.put_back(queue, queue_rows, ends)
        masks = masks | passed
        is_wanted = is_rejected(rows) | (masks != 0)
        rows = where(rows.append_column("subscription_mask", pa.array(masks)), is_wanted)
        if placed is not None and placed.num_rows:
            rows = in_order(concat([rows, placed], rows.schema))
        if has_occurrences(rows):
            rows, given_up = self._move_on(step, rows, given_up)
        n: int = rows.num_rows
        if given_up.rejects.num_rows:
            rejects = select_sent_rejects(step.tick.unwritable, step.tick.parked_rejects, given_up.rejects)
            rejects = rejects.append_column("subscription_mask", pa.array(np.zeros(rejects.num_rows, np.int64)))
            rows = in_order(concat([rows, rejects], rows.schema))
        self._add_release(step, kind, self._key_order.take_ordered(rows))
        step.given_up.append(given_up)
        return n

    def expire_parked(self, step: TickInProgress, rows: pa.Table) -> None:
        """Has messages expire that are parked, and whose end has come, as PARKED_ENDS.

        Those for which the tick has failed stay parked, and are judged when they are dispatched.
        """
        rows, _ = split_failed(step, rows)
        for topic in rows["topic"].unique().to_pylist():
            for number, name in enumerate(self._subscriptions.names.get(topic, ())):
                found = _of_subscription(rows, topic, name)
                found = where(found, step.expiring.are_current(found, number))
                recurs = are_recurring(found)
                if (others := where(found, ~recurs)).num_rows:
                    step.expiring.expire_parked(others, number, self._context.next_sequence())
                if (recurring := where(found, recurs)).num_rows:
                    sequence = self._context.next_sequence()
                    step.expiring.expire_parked(recurring, number, sequence)
                    self._occurrences.skip_next(typed(recurring, MESSAGES), number, sequence)
                    step.given_up.append(GivenUp(self._occurrences.failed.take_rejects()))

    def dispatch_in_order(self, step: TickInProgress) -> None:
        """Dispatches the messages that have to come in order, of all rows that `dispatch_due` got in this tick."""
        for kind, rows in self._key_order.make_releases(self._context.released):
            self._add_release(step, kind, rows)

    def give_up_failed(self, step: TickInProgress, rows: pa.Table) -> GivenUp:
        """Gives rows, as MESSAGES, up for all their subscriptions: those for which a tick has failed.

        The tick's input says why it has failed for each row, as `tracker.tick_failures` has found out.
        """
        rows = typed(where(rows, ~is_rejected(rows)), MESSAGES)
        rejects, outcomes = [], []
        ids = zip(*(ids.tolist() for ids in message_ids(rows)), strict=True)
        whys = pa.array([step.input.why_failed[one] for one in ids], pa.string())
        pairs = pa.table({"topic": rows["topic"], "why": whys})
        pairs = pairs.group_by(["topic", "why"], use_threads=False).aggregate([])
        for topic, why in zip(pairs["topic"].to_pylist(), pairs["why"].to_pylist(), strict=True):
            topic_rows = rows.filter(pc.and_(pc.equal(rows["topic"], topic), pc.equal(whys, why)))
            for number, name in enumerate(self._subscriptions.names.get(topic, ())):
                if not self._subscriptions.active(topic) >> number & 1:
                    continue
                found = topic_rows.filter(pc.equal(pc.fill_null(topic_rows["subscription"], name), name))
                if found.num_rows:
                    reason, sequence = f"{NOT_DELIVERED}{name}: it {why}", self._context.next_sequence()
                    outcomes.append(cancelled(found, name, reason, sequence, self._context.tick, self._context.now))
                    rejects.append(rejected(found, reason))
        return GivenUp(concat(rejects), concat(outcomes, OUTCOME_ROWS))

    def _add_release(self, step: TickInProgress, kind: int, rows: pa.Table) -> None:
        """Makes a release of rows, if there are any, and keeps it until it is confirmed."""
        if rows.num_rows:
            release = Release(step.tick.tick, kind, rows.replace_schema_metadata({SENDING: step.tick.sending}))
            self._in_flight.add_release(release)
            step.effects.releases.append(release)

    def _move_on(self, step: TickInProgress, rows: pa.Table, given_up: GivenUp) -> tuple[pa.Table, GivenUp]:
        """Moves the recurring messages of a release on to their next occurrence, and gives up unwritable occurrences.

        Args:
            rows: as MESSAGES and `subscription_mask`.
            given_up: the other messages of the release that are given up.

        Returns:
            the rows with further occurrences that are due, and `given_up` with occurrences that are given up.
        """
        masks = int64(rows, "subscription_mask")
        rows, shaped = rows.drop_columns(["subscription_mask"]), self._shaper.shaped_masks(rows)
        ended = step.expiring.find_ended(rows, np.where(are_recurring(rows), masks, 0))
        # What follows an expired one may have to be parked, so it comes in the next tick.
        waits = shaped | (ended & by_topic(rows, self._parking.parked_mask)) if ended.any() else shaped
        rows, masks = self._occurrences.dispatch_occurrences(rows, masks, waits, ended)
        ended = step.expiring.find_ended(rows, np.where(are_recurring(rows), masks, 0))
        step.expiring.expire_rows(rows, ended)
        masks = masks & ~ended
        more, masks = step.giving_up.reject_rows(rows, masks)
        is_wanted = is_rejected(rows) | (masks != 0)
        rows = where(rows.append_column("subscription_mask", pa.array(masks)), is_wanted)
        outcomes = concat([given_up.outcomes, more.outcomes], OUTCOME_ROWS)
        rejects = [given_up.rejects, more.rejects, self._occurrences.failed.take_rejects()]
        return rows, GivenUp(concat(rejects), outcomes)


def split_failed(step: TickInProgress, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Splits due rows, as MESSAGES, into those that are dispatched, and those for which the tick has failed."""
    if not step.input.fails or not rows.num_rows:
        return rows, rows.slice(0, 0)
    ids = zip(*(ids.tolist() for ids in message_ids(rows)), strict=True)
    fails = np.array([one in step.input.fails for one in ids], np.bool_)
    return where(rows, ~fails), where(rows, fails)


def _due_before(rows: pa.Table, until: int) -> pa.Table:
    return rows.filter(pc.fill_null(pc.less(rows["was_due"], until), False)) if rows.num_rows else rows


def _of_subscription(rows: pa.Table, topic: str, name: str) -> pa.Table:
    return rows.filter(pc.and_(pc.equal(rows["topic"], topic), pc.equal(rows["subscription"], name)))


def _parked_for(rows: pa.Table, topic: str, name: str) -> pa.Table:
    if not rows.num_rows:
        return rows
    is_parked = pc.and_(pc.equal(rows["deliver_at"], HELD_DELIVER_AT), pc.equal(rows["topic"], topic))
    return rows.filter(pc.fill_null(pc.and_(is_parked, pc.equal(rows["subscription"], name)), False))
