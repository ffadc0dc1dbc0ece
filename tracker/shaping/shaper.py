"""One subscription whose messages are shaped, in one shard: gives messages their places, and postpones places."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.time_slots import Queue
from tracker.context import Context
from tracker.due_time import MAX_TIME_MILLIS
from tracker.ends import NO_END, due_times, ends_of, may_expire
from tracker.message_state.state import MessageState
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
from tracker.schemas import SEQUENCE_BITS
from tracker.shaping.token_bucket import FloatArray, OpenTime, ShapingRule, TokenBucket, own_ranks
from tracker.subscriptions import by_topic, dead_letters_in

# A message may be this late, ms, before places are postponed; or half the time in which the burst is saved up, if that
# is less.
_LATE_MILLIS = 500.0

# The most places that a shard gives a subscription in a tick on its own: more would keep all other messages waiting.
MOST_PLACES = 50_000

# Of rows that may expire so many get places together as have them within this time, ms.
_PLACES_AHEAD_MILLIS = 5_000

_NO_KEY = ""

_NO_RULE = ShapingRule(rate=None, burst=1, is_per_key=False, windows=())


@dataclass
class ShapingState:
    """The saved state of a `ShapedSubscription`. Times are ms since the epoch.

    Attributes:
        next_times: by key: the state of its token bucket, as a real time; without keys that of `_NO_KEY`.
        last: the last place to which a message was moved.
        postponements: [tick, open time in ms]: all places given before the tick are later by this time.
        floor: the state of each token bucket that is not in `next_times`, after a rebuild, postponement or lower rate.
        rate: messages a second, burst, and whether by key, when the last places were given; empty: not known.
        valid_from: a tick: places given before it do not count, because the rate was lowered; 0: all places count.
        last_invalid: the last of the places that do not count.
        postponed_to: to which time all shards together postponed their first place.
    """

    next_times: dict[str, float] = field(default_factory=dict)
    last: int = 0
    postponements: list[list[float]] = field(default_factory=list)
    floor: float = 0.0
    rate: list[Any] = field(default_factory=list)
    valid_from: int = 0
    last_invalid: int = 0
    postponed_to: float = 0.0

    def forget_past(self, now: int) -> bool:
        """Resets times that are past at `now`, ms since the epoch; returns whether any state is left."""
        if self.last <= now:
            self.last, self.postponements = 0, []
        if self.floor <= now:
            self.floor = 0.0
        if self.postponed_to <= now:
            self.postponed_to = 0.0
        if self.last_invalid <= now:
            self.valid_from = self.last_invalid = 0
        self.next_times = {name: time for name, time in self.next_times.items() if time > now}
        return bool(self.next_times or self.last or self.floor or self.valid_from)


class ShapedSubscription:
    """A subscription whose messages are shaped, in one shard: gives messages places, and postpones places.

    Args:
        rule: how its messages are shaped; None: not any more.
        state: its saved state; None: a new one.
    """

    def __init__(self, rule: ShapingRule | None, context: Context, state: ShapingState | None = None) -> None:
        self._rule = rule or _NO_RULE
        self._context = context
        self._shard_id = context.shard_id
        self.state = state or ShapingState()
        self._assigned: FloatArray = np.zeros(0)  # places that this tick's offset gives, ms since the epoch
        self._n_waiting = 0  # messages that waited when the tick began
        self._is_rebuilt = False  # in this tick

    @property
    def shares_places(self) -> bool:
        """Whether the offset gives all shards places together, for messages beyond each shard's own share."""
        return self._rule.rate is not None and not self._rule.is_per_key and self._shard_id.shards > 1

    @property
    def most_places_ahead(self) -> int:
        """How many rows get places together that may have expired by then: their places are lost to others."""
        if self._rule.rate is None:
            return MOST_PLACES
        ahead = self._context.now + _PLACES_AHEAD_MILLIS - self.state.last
        return 0 if ahead < 0 else 1 + int(self._rule.rate * min(ahead, _PLACES_AHEAD_MILLIS) / 1000)

    def begin_tick(self, n_waiting: int) -> None:
        """Begins a tick.

        Args:
            n_waiting: how many messages have waited since an earlier tick.
        """
        self._n_waiting = n_waiting

    @property
    def max_from_queue(self) -> int:
        """How many of the messages that wait come due again in this tick: there are no more places."""
        return len(self._assigned) if self.shares_places else MOST_PLACES

    def rebuild(self, last: int) -> None:
        """Begins after a rebuild: messages that come due go after the last place that was given, ms since the epoch."""
        # No burst is saved up: all places before may have been used.
        self.state = ShapingState(last=last, floor=self._state_after(last))
        self._is_rebuilt = True

    def assign_places(self, after: int, waiting: Sequence[int]) -> None:
        """Takes this shard's part of the places that the tick's offset gives to waiting messages of all shards.

        Args:
            after: the places are after this time, ms since the epoch.
            waiting: by shard: how many waiting messages get a place; at least one where any wait.
        """
        if self._rule.rate is None or not self.shares_places:
            return
        opened, interval = OpenTime(self._rule.windows, after), 1000 / self._rule.rate
        begin = float(opened.to_open(np.array([float(after)]))[0])
        ranks = own_ranks(waiting, self._shard_id.number)
        self._assigned = opened.to_real(begin + interval * (ranks + 1).astype(np.float64))
        end = float(opened.to_real(np.array([begin + sum(waiting) * interval]))[0])
        self.state.last = max(self.state.last, ceil(end))
        self.state.next_times[_NO_KEY] = self._state_after(self.state.last)

    def give_places(
        self, rows: pa.Table, have_waited: bool, ends: Int64Array | None = None
    ) -> tuple[FloatArray, BoolArray]:
        """Gives places to rows that come due. A row whose place would not be before its end takes none from others.

        Args:
            rows: as MESSAGES, of this subscription.
            have_waited: whether the first `max_from_queue` rows of the queue are among the rows. If not, the rows are
                to wait behind those in the queue.
            ends: int64, (rows,), ms since the epoch: when the messages expire, later than now; None: never.

        Returns:
            the places, float64, (rows,), ms since the epoch, and which rows had one before: bool, (rows,). A place of
            NaN means that the row gets none in this tick; one at its end, that it waits until it expires.
        """
        rule, due = self._rule, int64(rows, "deliver_at")
        opened = OpenTime(rule.windows, min(self._context.now, int(due.min())))
        places = due.astype(np.float64)
        has_place = self._have_places(rows)
        if has_place.any():
            places[has_place] = self._current_places(rows.filter(pa.array(has_place)), opened)
            # A place that is outside the windows, because the settings have changed, does not count. Without a rate
            # every time within the windows is a place.
            has_place &= opened.is_open(places if rule.rate is not None else np.maximum(places, self._context.now))
        last = np.full(len(places), np.inf) if ends is None else np.where(ends < NO_END, ends, np.inf)
        new = np.flatnonzero(~has_place)
        if not have_waited and self._n_waiting:
            places[new] = np.nan
        elif len(new):
            keys = rows["key"].take(pa.array(new)) if rule.is_per_key else None
            times = np.maximum(due[new], self._context.now).astype(np.float64)
            n, own = self._assigned_places(times, last[new])
            places[new[:n]] = own
            new, times = new[n:], opened.to_open(times[n:])
            if not self.shares_places:
                n = MOST_PLACES
            elif self._n_waiting > self.max_from_queue:
                n = 0
            else:  # on its own a shard gives only places up to this tick's cutoff
                n = self._number_of_places(times, opened)
            places[new[n:]] = np.nan
            new, times, keys = new[:n], times[:n], None if keys is None else keys[:n]
            places[new] = self._take_before(times, keys, opened, last[new])
        return self._at_ends(places, last), has_place

    def _at_ends(self, places: FloatArray, last: FloatArray) -> FloatArray:
        """Returns places, (rows,), with the end where a place is not before it; within the cutoff the row waits."""
        is_late = places >= last
        # A row that is moved to a time within the cutoff would go out then.
        return np.where(is_late, np.where(last <= self._context.cutoff, np.nan, last), places)

    def _assigned_places(self, times: FloatArray, last: FloatArray) -> tuple[int, FloatArray]:
        """Gives rows the places that the tick's offset has assigned; those that would be late leave theirs to others.

        Args:
            times: float64, (rows,), ms since the epoch: the earliest time of each.
            last: float64, (rows,), ms since the epoch: the places have to be before these.

        Returns:
            for how many of the first rows it was decided, and their places, infinite where there is none in time.
        """
        if np.isinf(last).all():
            n = min(len(self._assigned), len(times))
            return n, np.maximum(self._assigned[:n], times[:n])
        found: list[float] = []
        taken = 0
        for time, end in zip(times.tolist(), last.tolist(), strict=True):
            if taken == len(self._assigned):
                break
            place = max(float(self._assigned[taken]), time)
            found.append(place if place < end else np.inf)
            taken += place < end
        return len(found), np.array(found, np.float64)

    def _take_before(
        self, times: FloatArray, keys: pa.ChunkedArray | None, opened: OpenTime, last: FloatArray
    ) -> FloatArray:
        """Takes places, as `_take`, for those rows that get one before their end; the others take none.

        Args:
            last: float64, (n,), ms since the epoch: the ends.

        Returns:
            float64, (n,), ms since the epoch; infinite: none.
        """
        before, places = dict(self.state.next_times), opened.to_real(self._take(times, keys, opened))
        is_kept = places < last
        if is_kept.all():
            return places
        if (bucket := self._bucket) is not None:
            self.state.next_times = before
            # No message gets a later place than where all take one: later ends need no open time.
            ends = opened.to_open(np.minimum(last, places.max() + 1)) - _TOLERANCE_MILLIS
            names, numbers = _key_numbers(keys, len(times))
            is_kept = bucket.kept_before(times, numbers, self._next_times(names, opened), ends)
            if is_kept.any():
                kept_keys = None if keys is None else keys.filter(pa.array(is_kept))
                places[is_kept] = opened.to_real(self._take(times[is_kept], kept_keys, opened))
        return np.where(is_kept, places, np.inf)

    def postpone_late(self, rows: pa.Table) -> None:
        """Postpones all places if rows have missed theirs, unless places were postponed in this tick already.

        Args:
            rows: as MESSAGES: rows of this subscription that come due in this tick at their places.
        """
        if self.is_postponed:
            return
        rows = rows.filter(pa.array(self._have_places(rows)))
        if self._rule.rate is None or not rows.num_rows:
            return
        opened = OpenTime(self._rule.windows, min(self._context.now, int(int64(rows, "deliver_at").min())))
        times = self._current_places(rows, opened)
        if times.min() < self._context.now - self._slack:
            self.postpone(float(times.min()), self._context.now)

    def postpone_in_all_shards(self, first: float, until: float) -> None:
        """Postpones all places if messages may have missed theirs. All shards do so alike, by the same time.

        Otherwise the places of two shards would overlap. The arguments are the same in all shards.

        Args:
            first: messages with places before this time have been sent in time, ms since the epoch.
            until: the place at `first` is postponed to this time, ms since the epoch.
        """
        state = self.state
        # After a rebuild, messages keep the places that the tables have, and `first` says nothing about them.
        if not self.shares_places or self._is_rebuilt or self.is_postponed:
            return
        first = max(first, state.postponed_to)
        if state.last >= first and first < until - self._slack:
            self.postpone(first, until)
            state.postponed_to = max(state.postponed_to, until)

    @property
    def is_postponed(self) -> bool:
        """Whether places have been postponed in this tick."""
        return any(tick == self._context.tick for tick, _ in self.state.postponements)

    def postpone(self, first: float, until: float) -> None:
        """Postpones all places, so that the place at `first` is at `until`; both ms since the epoch."""
        state, opened = self.state, OpenTime(self._rule.windows, min(first, self._context.now))
        start, end = opened.to_open(np.array([first, until]))
        by = float(end - start)
        if by <= 0:
            return
        state.floor = max(state.floor, 0 if self._rule.is_per_key else until)
        names = list(state.next_times)
        times = opened.to_open(np.maximum(np.array([state.next_times[name] for name in names]), first)) + by
        state.next_times = dict(zip(names, opened.to_real(times).tolist(), strict=True))
        if state.last:
            state.last = int(opened.to_real(opened.to_open(np.array([float(state.last)])) + by)[0])
            state.postponements.append([self._context.tick, by])

    def _have_places(self, rows: pa.Table) -> BoolArray:
        """Tells which rows have a place that counts: bool, (rows,).

        If the rate has been lowered, places that were given before do not count: their rows get new ones.
        """
        has_place: BoolArray = np.asarray(pc.is_valid(rows["shaped_from"]))
        state, rate = self.state, [self._rule.rate, self._rule.burst, self._rule.is_per_key]
        if state.rate and state.rate != rate and state.last > self._context.now and _is_less(rate, state.rate):
            state.valid_from, state.last_invalid = self._context.tick, max(state.last_invalid, state.last)
            state.last, state.postponements, state.next_times = self._context.now, [], {}
            state.floor = self._state_after(self._context.now)
        state.rate = rate
        if state.valid_from and has_place.any():
            has_place = has_place & (_ticks(rows) >= state.valid_from)
        return has_place

    def _take(self, times: FloatArray, keys: pa.ChunkedArray | None, opened: OpenTime) -> FloatArray:
        """Takes places from the token buckets.

        Args:
            times: float64, (n,), open time, ms, ascending: the earliest time of each message.
            keys: strings, (n,): the key of each; None: the rate is that of the subscription as a whole.
            opened: the windows.

        Returns:
            the places, float64, (n,), open time, ms.
        """
        if (bucket := self._bucket) is None:
            return times
        names, numbers = _key_numbers(keys, len(times))
        before = self._next_times(names, opened)
        if keys is None:
            places, after = bucket.places(times, float(before[0]))
            states = np.array([after])
        else:
            places, states = bucket.places_of_keys(times, numbers, before)
        self.state.next_times |= dict(zip(names, opened.to_real(states).tolist(), strict=True))
        return places

    @property
    def _bucket(self) -> TokenBucket | None:
        """The shard's part of the token bucket; None: there is no rate."""
        rule = self._rule
        return None if rule.rate is None else TokenBucket.share_of(rule.rate, rule.burst, self._shard_id)

    def _next_times(self, names: Sequence[str], opened: OpenTime) -> FloatArray:
        """Returns the state of each key's bucket, float64, (names,), open time, ms."""
        return opened.to_open(np.array([self.state.next_times.get(name, self.state.floor) for name in names]))

    def _number_of_places(self, times: FloatArray, opened: OpenTime) -> int:
        """Returns for how many messages the shard has places until the cutoff, by their earliest times in open time."""
        if (bucket := self._bucket) is None:
            return MOST_PLACES
        places, _ = bucket.places(times, float(self._next_times([_NO_KEY], opened)[0]))
        return int((opened.to_real(places) <= self._context.cutoff).sum())

    def _current_places(self, rows: pa.Table, opened: OpenTime) -> FloatArray:
        """Returns the places of rows after all postponements: float64, (rows,), ms since the epoch."""
        places = int64(rows, "deliver_at").astype(np.float64)
        if not self.state.postponements:
            return places
        ticks_given = _ticks(rows)
        by = np.zeros(len(places))
        for tick, millis in self.state.postponements:
            by += np.where(ticks_given < tick, millis, 0.0)
        is_later = by > 0
        places[is_later] = opened.to_real(opened.to_open(places[is_later]) + by[is_later])
        return places

    def _state_after(self, last: int) -> float:
        """Returns a token bucket's state after a last place, without saved burst; both ms since the epoch."""
        if (bucket := self._bucket) is None:
            return float(last)
        opened = OpenTime(self._rule.windows, last)
        after = opened.to_open(np.array([float(last)])) + max(1, bucket.burst) * bucket.interval
        return float(opened.to_real(after)[0])

    @property
    def _slack(self) -> float:
        """How late messages may be, ms, before places are postponed."""
        rate = self._rule.rate
        return _LATE_MILLIS if rate is None else min(_LATE_MILLIS, 500 * self._rule.burst / rate)


def _key_numbers(keys: pa.ChunkedArray | None, n: int) -> tuple[list[str], Int64Array]:
    """Returns the distinct keys of n messages, and the number of each one's key, int64, (n,); None: all have none."""
    if keys is None:
        return [_NO_KEY], np.zeros(n, np.int64)
    encoded = pc.fill_null(keys.cast(pa.string()), _NO_KEY).combine_chunks().dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def _ticks(rows: pa.Table) -> Int64Array:
    """Returns the tick in which each row got its place, int64, (rows,); 0: not known."""
    ticks: Int64Array = pc.fill_null(rows["sequence"], 0).to_numpy().astype(np.int64) >> SEQUENCE_BITS
    return ticks


def _is_less(rate: Sequence[Any], before: Sequence[Any]) -> bool:
    """Tells whether a rate allows fewer messages than the rate before; both as `ShapingState.rate`."""
    if rate[0] is None:
        return False
    return before[0] is None or rate[0] < before[0] or rate[1] < before[1] or rate[2] != before[2]


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
    # As MESSAGES: rows without a place, which are to wait in their queues; and when they expire, None: never.
    waiting: list[tuple[Queue, pa.Table, Int64Array | None]]


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
        context: of the shard; its subscriptions have the shaping rules.
        state: records the moves.
    """

    def __init__(self, context: Context, state: MessageState) -> None:
        self._context = context
        self._subscriptions = context.subscriptions
        self._state = state
        self._saved = context.store.get(_TABLE, (0, 0))
        saved = json.loads(self._saved) if self._saved else {}
        self._shaped = {
            (topic, number): ShapedSubscription(self._rule(topic, number), context, ShapingState(*saved_state))
            for topic, number, *saved_state in saved.get("targets", ())
        }
        # Unconfirmed ticks, as [tick, its time in ms since the epoch], ascending; needed where shards share places.
        self._unconfirmed: list[list[int]] = saved.get("unconfirmed", [])
        # Until when the last start put off what was in flight, ms since the epoch: it may still be in flight.
        self._put_off_to: int = saved.get("put_off_to", 0)
        self._this_tick: list[int] = []
        self.n_moved = 0  # messages that this tick moved to a place after its cutoff

    def __bool__(self) -> bool:
        """Whether any subscription's messages are shaped."""
        return bool(self._subscriptions.shaping)

    def begin_tick(self, confirmed: int) -> None:
        """Begins a tick.

        Args:
            confirmed: number of the last confirmed tick.
        """
        self._unconfirmed = [one for one in self._unconfirmed if one[0] > confirmed]
        self._this_tick = [self._context.tick, self._context.now]

    def count_waiting(
        self, counts: Mapping[Queue, int], with_ends: Collection[Queue] = ()
    ) -> dict[str, dict[str, list[int]]]:
        """Returns by source topic and subscription how many rows wait for a later tick, and the last place given, ms.

        Args:
            counts: by queue: how many rows wait.
            with_ends: the queues of which rows may expire: of these as many as have places within seconds.
        """
        found: dict[str, dict[str, list[int]]] = {}
        for (topic, name), n in counts.items():
            subscription = self._subscription(topic, self._subscriptions.names[topic].index(name))
            most = subscription.most_places_ahead if (topic, name) in with_ends else n
            found.setdefault(topic, {})[name] = [min(n, most), subscription.state.last]
        return found

    def assign_places(self, places: Places, counts: Mapping[Queue, int]) -> None:
        """Takes this shard's part of the places that the tick's offset gives to waiting rows of all shards.

        The places of each shard are spread evenly among all of them (see `tracker.shaping.token_bucket.own_ranks`).

        Args:
            places: those of the tick's offset.
            counts: by queue: how many rows have waited since an earlier tick.
        """
        for (topic, name), n in counts.items():
            if (number := self._number(topic, name)) is not None:
                self._subscription(topic, number).begin_tick(n)
        for topic, names in places.items():
            for number, name in enumerate(self._subscriptions.names.get(topic, ())):
                if name in names and self._rule(topic, number) is not None:
                    self._subscription(topic, number).assign_places(*names[name])

    def max_from_queue(self, queue: Queue) -> int | None:
        """Returns how many rows of a queue come due again in this tick; None: all, as they are not shaped any more."""
        number = self._number(*queue)
        return None if number is None else self._subscription(queue[0], number).max_from_queue

    @property
    def last_places(self) -> dict[str, dict[str, int]]:
        """By source topic and subscription name: the last place given, ms since the epoch."""
        found: dict[str, dict[str, int]] = {}
        for (topic, number), subscription in self._shaped.items():
            names = self._subscriptions.names.get(topic, ())
            if subscription.state.last and number < len(names):
                found.setdefault(topic, {})[names[number]] = subscription.state.last
        return found

    def postpone_in_flight(self, since: Mapping[tuple[str, int], int]) -> None:
        """Postpones places after a start, by as much as messages in flight are sent late.

        Where shards share places, all of them postpone by the same time: the most that any of them may need. What an
        earlier start has put off, and was not sent since, is late by the time since then alone.

        Args:
            since: by topic and subscription number: when its first message in flight is due, ms since the epoch.
        """
        until = self._context.now + _START_MILLIS
        put_off_to, self._put_off_to = min(self._put_off_to, self._context.now), until
        unsent = max(put_off_to, min([self._context.released + 1, *(time for _, time in self._unconfirmed)]))
        for subscription in self._shaped.values():
            subscription.postpone_in_all_shards(unsent, until)
        for (topic, number), first in since.items():
            rule = self._rule(topic, number)
            if rule is not None and rule.rate is not None and first < until:
                subscription = self._subscription(topic, number)
                if not subscription.is_postponed:
                    subscription.postpone(max(first, put_off_to), until)

    def rebuild(self, until: Mapping[str, Mapping[str, int]]) -> None:
        """Begins after a rebuild: messages that come due go after the last place that was given.

        Args:
            until: as `last_places`, of all shards together.
        """
        for topic, rules in self._subscriptions.shaping.items():
            for number in rules:
                last = until.get(topic, {}).get(self._subscriptions.names[topic][number], 0)
                if last:
                    self._subscription(topic, number).rebuild(last)

    def postpone_late(self, rows: pa.Table) -> None:
        """Postpones the places of subscriptions whose rows have missed theirs.

        Args:
            rows: as MESSAGES: all rows that come due in this tick, before any of them is shaped.
        """
        for subscription in self._shaped.values():
            subscription.postpone_in_all_shards(self._context.released + 1, self._context.now)
        self._postpone_own_late(rows)

    def _postpone_own_late(self, rows: pa.Table) -> None:
        """Postpones, in this shard alone, places of subscriptions whose rows (as MESSAGES) have missed theirs."""
        if rows["shaped_from"].null_count == rows.num_rows:
            return
        placed = rows.filter(pc.is_valid(rows["shaped_from"]))
        # A row that has a place is for one subscription.
        own = np.left_shift(1, np.maximum(subscription_numbers(placed, self._subscriptions.names), 0))
        for topic, number, chosen in self._by_subscription(placed, self.shaped_masks(placed) & own):
            self._subscription(topic, number).postpone_late(placed.take(pa.array(chosen)))

    def shape_rows(self, rows: pa.Table, masks: Int64Array, *, have_waited: bool) -> Shaped:
        """Gives due rows their places; those with a place after the cutoff are moved there.

        Args:
            rows: as MESSAGES, in the order of delivery.
            masks: int64, (rows,): the subscriptions that each row goes to, as bits.
            have_waited: whether the rows taken from the queues in this tick are among the rows; they go first.
        """
        nothing = empty_table(_PLACED)
        shaped = masks & self.shaped_masks(rows)
        if not shaped.any():
            return Shaped(masks, nothing, [])
        masks = masks.copy()
        placed: list[pa.Table] = []
        waiting: list[tuple[Queue, pa.Table, Int64Array | None]] = []
        for topic, number, chosen in self._by_subscription(rows, shaped):
            subscription = self._subscription(topic, number)
            shaped_rows = rows if len(chosen) == rows.num_rows else rows.take(pa.array(chosen))
            due = int64(shaped_rows, "deliver_at")
            ends = None
            if may_expire(shaped_rows, self._subscriptions):
                ends = ends_of(shaped_rows, number, self._subscriptions)
            places, has_place = subscription.give_places(shaped_rows, have_waited, ends)
            if (has_none := np.isnan(places)).any():
                masks[chosen[has_none]] &= ~(1 << number)
                queue = topic, self._subscriptions.names[topic][number]
                none_ends = None if ends is None else ends[has_none]
                waiting.append((queue, self._of_subscription(where(shaped_rows, has_none), number), none_ends))
                chosen, shaped_rows, due = chosen[~has_none], where(shaped_rows, ~has_none), due[~has_none]
                places, has_place = places[~has_none], has_place[~has_none]
            # The last possible time is a place for any number of messages: the times beyond it have other meanings.
            at = np.ceil(np.minimum(places, MAX_TIME_MILLIS) - _TOLERANCE_MILLIS).astype(np.int64)
            # An overdue row goes out as it is, if there is a place now.
            is_kept = at <= np.where(has_place, due, np.maximum(due, self._context.now))
            masks[chosen[~is_kept]] &= ~(1 << number)
            is_later = ~is_kept & (at > self._context.cutoff)
            has_no_place = np.zeros(len(at), np.bool_)
            if ends is not None:
                has_no_place = is_later & (at >= ends[~has_none])
                is_later &= ~has_no_place
            in_time = self._retimed(shaped_rows, at, ~is_kept & ~is_later & ~has_no_place)
            if in_time.num_rows:
                names = self._subscriptions.names_of(in_time["topic"], number)
                in_time = with_columns(in_time, subscription=names)
                bits = pa.array(np.full(in_time.num_rows, 1 << number))
                placed.append(typed(in_time, MESSAGES).append_column("subscription_mask", bits))
            later = self._retimed(shaped_rows, at, is_later)
            if later.num_rows:
                original, sequence = where(shaped_rows, is_later), self._context.next_sequence()
                was_due, shaped_from = original["was_due"], int64(later, "shaped_from")
                self._state.move_messages(original, number, at[is_later], sequence, was_due, shaped_from)
                subscription.state.last = max(subscription.state.last, int(at[is_later].max()))
            if has_no_place.any():  # these rows wait for nothing but their end
                original, sequence = where(shaped_rows, has_no_place), self._context.next_sequence()
                self._state.move_messages(original, number, at[has_no_place], sequence, due_times(original))
            self.n_moved += int((is_later | has_no_place).sum())
        return Shaped(masks, concat(placed, nothing.schema), waiting)

    def save(self) -> None:
        """Writes the changes to the store."""
        if not self._shaped and self._saved is None:
            return
        state = [[*key, *vars(t.state).values()] for key, t in sorted(self._shaped.items())]
        saved: dict[str, Any] = {"targets": state} | self._kept_unconfirmed()
        if self._put_off_to:
            saved["put_off_to"] = self._put_off_to
        data = json.dumps(saved, separators=(",", ":")).encode()
        if data != self._saved:
            self._context.store.put(_TABLE, (0, 0), data)
            self._saved = data

    def _kept_unconfirmed(self) -> dict[str, list[list[int]]]:
        if not any(subscription.shares_places for subscription in self._shaped.values()):
            return {}
        ticks = [*self._unconfirmed, self._this_tick]
        if len(ticks) > _MOST_UNCONFIRMED:  # merged: the earlier time counts until the later tick is confirmed
            ticks[:2] = [[ticks[1][0], min(ticks[0][1], ticks[1][1])]]
        return {"unconfirmed": ticks}

    def forget_past(self, now: int) -> None:
        """Forgets token buckets that are full again, and places before `now`, ms since the epoch."""
        self._shaped = {
            key: subscription for key, subscription in self._shaped.items() if subscription.state.forget_past(now)
        }

    def _of_subscription(self, rows: pa.Table, number: int) -> pa.Table:
        """Returns rows for one subscription only."""
        return with_columns(rows, subscription=self._subscriptions.names_of(rows["topic"], number))

    def _subscription(self, topic: str, number: int) -> ShapedSubscription:
        key = topic, number
        if key not in self._shaped:
            self._shaped[key] = ShapedSubscription(self._rule(topic, number), self._context)
        return self._shaped[key]

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

    def _by_subscription(self, rows: pa.Table, masks: Int64Array) -> Iterator[tuple[str, int, Int64Array]]:
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
        return with_columns(rows, deliver_at=pa.array(at[chosen]), shaped_from=shaped_from)
