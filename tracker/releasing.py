"""Releases due rows: decides to which subscriptions each row goes now, and what happens to the others.

What has to come in order gets releases of its own, slow destinations get rounds of what is held back for them,
and rows for which the tick has failed are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.commands.control import Control
from tracker.commands.outcomes import NOT_DELIVERED
from tracker.giving_up import GivenUp, cancelled, sent_rejects
from tracker.in_flight import IN_ORDER, PLANNED, SENDING, SUBSCRIPTION_MASK, InFlight, Release
from tracker.message_state.moves import HELD_DELIVER_AT
from tracker.messages import (
    MESSAGES,
    BoolArray,
    are_recurring,
    concat,
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

    Args:
        subscriptions: the subscriptions of each source topic.
    """

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions
        self._taken: list[pa.Table] = []

    def take(self, rows: pa.Table) -> pa.Table:
        """Takes the messages that have to come in order out of a release.

        Args:
            rows: as `Release.rows`.

        Returns:
            the other rows; `subscription_mask` has the subscriptions for which a row was not taken.
        """
        of = self._subscriptions.in_order
        if not of or not rows.num_rows:
            return rows
        masks = int64(rows, SUBSCRIPTION_MASK)
        has_key: BoolArray = pc.is_valid(order_keys(rows)).to_numpy()
        taken = np.where(has_key & ~is_rejected(rows), masks & by_topic(rows, lambda topic: of.get(topic, 0)), 0)
        if not taken.any():
            return rows
        self._taken.append(where(with_columns(rows, **{SUBSCRIPTION_MASK: pa.array(taken)}), taken != 0))
        left = with_columns(rows, **{SUBSCRIPTION_MASK: pa.array(masks & ~taken)})
        return where(left, (masks & ~taken != 0) | is_rejected(rows))

    def releases(self, last_cutoff: int) -> Iterator[tuple[int, pa.Table]]:
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


def without_failed(step: TickInProgress, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Splits due rows, as MESSAGES, into those that are handed out, and those for which the tick has failed."""
    if not step.input.fails or not rows.num_rows:
        return rows, rows.slice(0, 0)
    ids = zip(*(ids.tolist() for ids in message_ids(rows)), strict=True)
    fails = np.array([one in step.input.fails for one in ids], np.bool_)
    return where(rows, ~fails), where(rows, fails)


def give_up(
    step: TickInProgress, rows: pa.Table, subscriptions: Subscriptions, next_sequence: Callable[[], int]
) -> GivenUp:
    """Gives rows up for all their subscriptions.

    Args:
        step: the tick; its input says why it has failed for each row.
        rows: as MESSAGES.
        subscriptions: the subscriptions of each source topic.
        next_sequence: returns the next sequence of the shard.
    """
    rows = typed(where(rows, ~is_rejected(rows)), MESSAGES)
    rejects, outcomes = [], []
    ids = zip(*(ids.tolist() for ids in message_ids(rows)), strict=True)
    whys = pa.array([step.input.why_failed[one] for one in ids], pa.string())
    pairs = pa.table({"topic": rows["topic"], "why": whys}).group_by(["topic", "why"], use_threads=False).aggregate([])
    for topic, why in zip(pairs["topic"].to_pylist(), pairs["why"].to_pylist(), strict=True):
        is_one = pc.and_(pc.equal(rows["topic"], topic), pc.equal(whys, why))
        of_topic = rows.filter(is_one)
        for number, name in enumerate(subscriptions.names.get(topic, ())):
            if subscriptions.active(topic) >> number & 1:
                is_own = pc.equal(pc.fill_null(of_topic["subscription"], name), name)
                found = of_topic.filter(is_own)
                if not found.num_rows:
                    continue
                n, reason = found.num_rows, f"{NOT_DELIVERED}{name}: it {why}"
                outcomes.append(cancelled(found, name, reason, next_sequence(), step.tick.tick, step.tick.now))
                nothing = {"subscription": pa.nulls(n, pa.string()), "sequence": pa.nulls(n, pa.int64())}
                rejects.append(
                    with_columns(found, reason=pa.array([reason] * n), was_due=pa.nulls(n, pa.int64()), **nothing)
                )
    return GivenUp(concat(rejects), concat(outcomes, OUTCOME_ROWS))


class Draining:
    """Drains what waits for slow destinations, the first messages first.

    Args:
        tracker: has the rows that are not sealed yet.
        control: moves messages.
    """

    def __init__(self, tracker: DelayedDeliveryTracker, control: Control) -> None:
        self._tracker = tracker
        self._control = control

    def drain(self, step: TickInProgress) -> dict[str, dict[str, tuple[int, bool]]]:
        """Moves messages for the targets of `Tick.drains` to now; returns `Effects.drained`.

        The input has as many of the sealed ones as all shards together may hand out. Those that are not sealed yet go
        with those that were due after them, or when the input has all sealed ones.
        """
        found: dict[str, dict[str, tuple[int, bool]]] = {}
        if not step.tick.drains:
            return found
        unsealed = self._tracker.find(())
        for topic, names in step.tick.drains.items():
            for name, most in names.items():
                rows = _held_for(step.input.drained, topic, name)
                others = in_order_of_dues(_held_for(unsealed, topic, name))
                until = step.input.drained_until.get(topic, {}).get(name)
                first = others.slice(0, most) if until is None else _due_by(others, until)
                n = self._control.drain(concat([rows, first]), topic, name, step.moment)
                found.setdefault(topic, {})[name] = n, until is not None or first.num_rows < others.num_rows
        return found


def _due_by(rows: pa.Table, until: int) -> pa.Table:
    return rows.filter(pc.fill_null(pc.less_equal(rows["was_due"], until), False)) if rows.num_rows else rows


def _held_for(rows: pa.Table, topic: str, name: str) -> pa.Table:
    if not rows.num_rows:
        return rows
    is_held = pc.and_(pc.equal(rows["deliver_at"], HELD_DELIVER_AT), pc.equal(rows["topic"], topic))
    return rows.filter(pc.fill_null(pc.and_(is_held, pc.equal(rows["subscription"], name)), False))


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
