"""Shapes due messages: gives each message for a subscription with a rate or windows its place in time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.waiting_rows import Queue
from tracker.commands.moment import Moment
from tracker.commands.operations import Operations
from tracker.dead_letter_targets import dead_letters_in
from tracker.messages import (
    MESSAGES,
    BoolArray,
    Int64Array,
    concat,
    empty_table,
    int64,
    subscription_numbers,
    typed,
    where,
    with_columns,
)
from tracker.properties.schedule import MAX_TIME_MILLIS
from tracker.shaping.rule import ShapingRule
from tracker.shaping.target import Target, TargetState
from tracker.sharding import ShardId
from tracker.store import Store
from tracker.subscriptions import Subscriptions, by_topic

_TABLE = "shaping"

# How many unconfirmed ticks are remembered with their times. Beyond these, the first two are merged into one.
_MOST_UNCONFIRMED = 100

# The largest rounding error of a place, ms: one that is this much after its message's time is at this time.
_TOLERANCE_MILLIS = 0.01

# About how long it takes after a start until messages in flight can be sent again, ms.
_START_MILLIS = 3_000

_PLACED = MESSAGES.append(pa.field("subscription_mask", pa.int64()))

# The places that a tick's offset gives, by source topic and subscription: a time, ms since the epoch, after which they
# are; and by shard how many waiting messages get one.
Places = Mapping[str, Mapping[str, tuple[int, Sequence[int]]]]


class Shaped(NamedTuple):
    """Due rows after shaping. A row for a subscription that is in none of these fields was moved to its place."""

    masks: Int64Array  # (rows,): the subscriptions to which each row goes as it is, as bits
    placed: pa.Table  # further rows for this release, with another time: MESSAGES and `subscription_mask`, int64
    waiting: list[tuple[Queue, pa.Table]]  # as MESSAGES: rows without a place, which are to wait in their queues


class Shaper:
    """Gives messages places: at most as many as their subscription's rate and burst allow, and within its windows.

    A due message takes the next free place from its time on. If the place is after the cutoff, the message is moved
    there, and goes out when it comes due again; so it can be listed, cancelled and rebuilt as any moved message. A row
    that has a place has its original time in `shaped_from`.

    Messages beyond a shard's own share of the rate wait for the next tick. Its offset has places for the waiting rows
    of all shards, divided by how many wait in each. So the whole rate is used, however messages are distributed.

    If places were missed, because the job stood still, all places of the subscription are postponed by the same time. A
    row that got its place before is moved by this time when it comes due.

    Args:
        store: where the state is kept.
        subscriptions: the subscriptions of each source topic, with their shaping rules.
        operations: collects the moves.
        shard_id: which shard this is.
    """

    def __init__(self, store: Store, subscriptions: Subscriptions, operations: Operations, shard_id: ShardId) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._operations = operations
        self._shard_id = shard_id
        self._saved = store.get(_TABLE, (0, 0))
        saved = json.loads(self._saved) if self._saved else {}
        self._targets = {
            (topic, number): Target(self._rule(topic, number), shard_id, TargetState(*state))
            for topic, number, *state in saved.get("targets", ())
        }
        # Unconfirmed ticks, as [tick, its time in ms since the epoch], ascending; needed where shards share places.
        self._unconfirmed: list[list[int]] = saved.get("unconfirmed", [])
        self._this_tick: list[int] = []
        self.n_moved = 0  # messages that this tick moved to a place after its cutoff

    def __bool__(self) -> bool:
        """Whether any subscription's messages are shaped."""
        return bool(self._subscriptions.shaping)

    def begin(self, moment: Moment, confirmed: int) -> None:
        """Begins a tick.

        Args:
            moment: of this tick.
            confirmed: number of the last confirmed tick.
        """
        self._unconfirmed = [one for one in self._unconfirmed if one[0] > confirmed]
        self._this_tick = [moment.tick, moment.now]

    def waiting(self, counts: Mapping[Queue, int]) -> dict[str, dict[str, list[int]]]:
        """Returns by source topic and subscription how many rows wait for a later tick, and the last place given, ms.

        Args:
            counts: by queue: how many rows wait.
        """
        found: dict[str, dict[str, list[int]]] = {}
        for (topic, name), n in counts.items():
            number = self._subscriptions.names[topic].index(name)
            found.setdefault(topic, {})[name] = [n, self._target(topic, number).state.last]
        return found

    def assign(self, places: Places, counts: Mapping[Queue, int]) -> None:
        """Takes this shard's part of the places that the tick's offset gives to waiting rows of all shards.

        The places of each shard are spread evenly among all of them (see `tracker.shaping.bucket.own_ranks`).

        Args:
            places: those of the tick's offset.
            counts: by queue: how many rows have waited since an earlier tick.
        """
        for (topic, name), n in counts.items():
            if (number := self._number(topic, name)) is not None:
                self._target(topic, number).begin(n)
        for topic, names in places.items():
            for number, name in enumerate(self._subscriptions.names.get(topic, ())):
                if name in names and self._rule(topic, number) is not None:
                    self._target(topic, number).assign(*names[name])

    def max_from_queue(self, queue: Queue) -> int | None:
        """Returns how many rows of a queue come due again in this tick; None: all, as they are not shaped any more."""
        number = self._number(*queue)
        return None if number is None else self._target(queue[0], number).max_from_queue

    @property
    def last_places(self) -> dict[str, dict[str, int]]:
        """By source topic and subscription name: the last place given, ms since the epoch."""
        found: dict[str, dict[str, int]] = {}
        for (topic, number), target in self._targets.items():
            names = self._subscriptions.names.get(topic, ())
            if target.state.last and number < len(names):
                found.setdefault(topic, {})[names[number]] = target.state.last
        return found

    def postpone_in_flight(self, since: Mapping[tuple[str, int], int], moment: Moment) -> None:
        """Postpones places after a start, by as much as messages in flight are sent late.

        Where shards share places, all of them postpone by the same time: the most that any of them may need.

        Args:
            since: by topic and subscription number: when its first message in flight is due, ms since the epoch.
            moment: of this tick.
        """
        until = moment.now + _START_MILLIS
        unsent = min([moment.released + 1, *(time for _, time in self._unconfirmed)])
        for target in self._targets.values():
            target.postpone_in_all_shards(unsent, until, moment)
        for (topic, number), first in since.items():
            rule = self._rule(topic, number)
            if rule is not None and rule.rate is not None and first < until:
                target = self._target(topic, number)
                if not target.is_postponed_at(moment):
                    target.postpone(first, until, moment)

    def rebuild(self, until: Mapping[str, Mapping[str, int]]) -> None:
        """Begins after a rebuild: messages that come due go after the last place that was given.

        Args:
            until: as `last_places`, of all shards together.
        """
        for topic, rules in self._subscriptions.shaping.items():
            for number in rules:
                last = until.get(topic, {}).get(self._subscriptions.names[topic][number], 0)
                if last:
                    self._target(topic, number).rebuild(last)

    def postpone_late(self, rows: pa.Table, moment: Moment) -> None:
        """Postpones the places of subscriptions whose rows have missed theirs.

        Args:
            rows: as MESSAGES: all rows that come due in this tick, before any of them is shaped.
            moment: of this tick.
        """
        for target in self._targets.values():
            target.postpone_in_all_shards(moment.released + 1, moment.now, moment)
        self._postpone_own_late(rows, moment)

    def _postpone_own_late(self, rows: pa.Table, moment: Moment) -> None:
        """Postpones, in this shard alone, places of subscriptions whose rows (as MESSAGES) have missed theirs."""
        if rows["shaped_from"].null_count == rows.num_rows:
            return
        placed = rows.filter(pc.is_valid(rows["shaped_from"]))
        # A row that has a place is for one subscription.
        own = np.left_shift(1, np.maximum(subscription_numbers(placed, self._subscriptions.names), 0))
        for topic, number, chosen in self._by_target(placed, self.shaped_masks(placed) & own):
            self._target(topic, number).postpone_late(placed.take(pa.array(chosen)), moment)

    def shape(self, rows: pa.Table, masks: Int64Array, moment: Moment, cutoff: int, *, have_waited: bool) -> Shaped:
        """Gives due rows their places; those with a place after the cutoff are moved there.

        Args:
            rows: as MESSAGES, in the order of delivery.
            masks: int64, (rows,): the subscriptions that each row goes to, as bits.
            moment: of this tick.
            cutoff: of this tick, ms since the epoch.
            have_waited: whether the rows taken from the queues in this tick are among the rows; they go first.
        """
        nothing = empty_table(_PLACED)
        shaped = masks & self.shaped_masks(rows)
        if not shaped.any():
            return Shaped(masks, nothing, [])
        masks = masks.copy()
        placed: list[pa.Table] = []
        waiting: list[tuple[Queue, pa.Table]] = []
        for topic, number, chosen in self._by_target(rows, shaped):
            target = self._target(topic, number)
            of_target = rows if len(chosen) == rows.num_rows else rows.take(pa.array(chosen))
            due = int64(of_target, "deliver_at")
            places, has_place = target.places(of_target, moment, cutoff, have_waited)
            if (has_none := np.isnan(places)).any():
                masks[chosen[has_none]] &= ~(1 << number)
                queue = topic, self._subscriptions.names[topic][number]
                waiting.append((queue, self._of_subscription(where(of_target, has_none), number)))
                chosen, of_target, due = chosen[~has_none], where(of_target, ~has_none), due[~has_none]
                places, has_place = places[~has_none], has_place[~has_none]
            # The last possible time is a place for any number of messages: the times beyond it have other meanings.
            at = np.ceil(np.minimum(places, MAX_TIME_MILLIS) - _TOLERANCE_MILLIS).astype(np.int64)
            # An overdue row goes out as it is, if there is a place now.
            is_kept = at <= np.where(has_place, due, np.maximum(due, moment.now))
            masks[chosen[~is_kept]] &= ~(1 << number)
            is_later = ~is_kept & (at > cutoff)
            in_time = self._retimed(of_target, at, ~is_kept & ~is_later)
            if in_time.num_rows:
                names = self._subscriptions.names_of(in_time["topic"], number)
                in_time = with_columns(in_time, subscription=names)
                bits = pa.array(np.full(in_time.num_rows, 1 << number))
                placed.append(typed(in_time, MESSAGES).append_column("subscription_mask", bits))
            later = self._retimed(of_target, at, is_later)
            if later.num_rows:
                original, sequence = where(of_target, is_later), self._operations.next_sequence(moment)
                shaped_from = int64(later, "shaped_from")
                self._operations.move(original, number, at[is_later], sequence, shaped_from=shaped_from)
                target.state.last = max(target.state.last, int(at[is_later].max()))
                self.n_moved += later.num_rows
        return Shaped(masks, concat(placed, nothing.schema), waiting)

    def save(self) -> None:
        """Writes the changes to the store."""
        if not self._targets and self._saved is None:
            return
        state = [[*key, *vars(t.state).values()] for key, t in sorted(self._targets.items())]
        saved = {"targets": state} | self._kept_unconfirmed()
        data = json.dumps(saved, separators=(",", ":")).encode()
        if data != self._saved:
            self._store.put(_TABLE, (0, 0), data)
            self._saved = data

    def _kept_unconfirmed(self) -> dict[str, list[list[int]]]:
        if not any(target.shares_places for target in self._targets.values()):
            return {}
        ticks = [*self._unconfirmed, self._this_tick]
        if len(ticks) > _MOST_UNCONFIRMED:  # merged: the earlier time counts until the later tick is confirmed
            ticks[:2] = [[ticks[1][0], min(ticks[0][1], ticks[1][1])]]
        return {"unconfirmed": ticks}

    def forget_past(self, now: int) -> None:
        """Forgets token buckets that are full again, and places before `now`, ms since the epoch."""
        self._targets = {key: target for key, target in self._targets.items() if target.state.forget_past(now)}

    def _of_subscription(self, rows: pa.Table, number: int) -> pa.Table:
        """Returns rows for one subscription only."""
        return with_columns(rows, subscription=self._subscriptions.names_of(rows["topic"], number))

    def _target(self, topic: str, number: int) -> Target:
        key = topic, number
        if key not in self._targets:
            self._targets[key] = Target(self._rule(topic, number), self._shard_id)
        return self._targets[key]

    def _number(self, topic: str, name: str) -> int | None:
        """Returns the number of a subscription; None: it is not shaped, or does not exist."""
        names = self._subscriptions.names.get(topic, ())
        number = names.index(name) if name in names else None
        return None if number is None or self._rule(topic, number) is None else number

    def _rule(self, topic: str, number: int) -> ShapingRule | None:
        text = self._subscriptions.shaping.get(topic, {}).get(number)
        return None if text is None else ShapingRule.from_json(text)

    def shaped_masks(self, rows: pa.Table) -> Int64Array:
        """Returns the subscriptions for which each row is shaped, as bits, int64, (rows,). Dead letters are not."""
        shaping = self._subscriptions.shaping
        masks = by_topic(rows, lambda topic: sum(1 << number for number in shaping.get(topic, ())))
        return masks & ~dead_letters_in(rows, self._subscriptions)

    def _by_target(self, rows: pa.Table, masks: Int64Array) -> Iterator[tuple[str, int, Int64Array]]:
        """Yields topic and number of each shaped subscription, with the indexes of its rows, int64, ascending."""
        topics = rows["topic"].combine_chunks().dictionary_encode()
        indices = topics.indices.to_numpy()
        for i, topic in enumerate(topics.dictionary.to_pylist()):
            for number in self._subscriptions.shaping.get(topic, ()):
                chosen = np.flatnonzero((indices == i) & (masks >> number & 1 > 0))
                if len(chosen):
                    yield topic, number, chosen

    @staticmethod
    def _retimed(rows: pa.Table, at: Int64Array, chosen: BoolArray) -> pa.Table:
        """Returns the chosen rows, moved to the times `at`, with their original time in `shaped_from`."""
        rows = where(rows, chosen)
        if not rows.num_rows:
            return rows
        shaped_from = pc.coalesce(rows["shaped_from"], rows["was_due"], rows["deliver_at"])
        was_due = pa.nulls(rows.num_rows, pa.int64())
        return with_columns(rows, deliver_at=pa.array(at[chosen]), shaped_from=shaped_from, was_due=was_due)
