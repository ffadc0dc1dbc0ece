"""One subscription whose messages are shaped, in one shard: gives messages their places, and postpones places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.moment import Moment
from tracker.commands.schema import SEQUENCE_BITS
from tracker.messages import BoolArray, Int64Array, int64
from tracker.shaping.bucket import Bucket, FloatArray, own_ranks
from tracker.shaping.open_time import OpenTime
from tracker.shaping.rule import ShapingRule
from tracker.sharding import ShardId

# A message may be this late, ms, before places are postponed; or half the time in which the burst is saved up, if that
# is less.
_LATE_MILLIS = 500.0

# The most places that a shard gives a subscription in a tick on its own: more would keep all other messages waiting.
MOST_PLACES = 50_000

_NO_KEY = ""

_NO_RULE = ShapingRule(rate=None, burst=1, is_per_key=False, windows=())


@dataclass
class TargetState:
    """The saved state of a `Target`. Times are ms since the epoch.

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


class Target:
    """A subscription whose messages are shaped, in one shard: gives messages places, and postpones places.

    Args:
        rule: how its messages are shaped; None: not any more.
        shard_id: which shard this is.
        state: its saved state; None: a new one.
    """

    def __init__(self, rule: ShapingRule | None, shard_id: ShardId, state: TargetState | None = None) -> None:
        self._rule = rule or _NO_RULE
        self._shard_id = shard_id
        self.state = state or TargetState()
        self._assigned: FloatArray = np.zeros(0)  # places that this tick's offset gives, ms since the epoch
        self._n_waiting = 0  # messages that waited when the tick began
        self._is_rebuilt = False  # in this tick

    @property
    def shares_places(self) -> bool:
        """Whether the offset gives all shards places together, for messages beyond each shard's own share."""
        return self._rule.rate is not None and not self._rule.is_per_key and self._shard_id.shards > 1

    def begin(self, n_waiting: int) -> None:
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
        self.state = TargetState(last=last, floor=self._state_after(last))
        self._is_rebuilt = True

    def assign(self, after: int, waiting: Sequence[int]) -> None:
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

    def places(self, rows: pa.Table, moment: Moment, cutoff: int, have_waited: bool) -> tuple[FloatArray, BoolArray]:
        """Gives places to rows that come due.

        Args:
            rows: as MESSAGES, of this subscription.
            moment: of this tick.
            cutoff: of this tick, ms since the epoch.
            have_waited: whether the first `max_from_queue` rows of the queue are among the rows. If not, the rows are
                to wait behind those in the queue.

        Returns:
            the places, float64, (rows,), ms since the epoch, and which rows had one before: bool, (rows,). A place of
            NaN means that the row gets none in this tick.
        """
        rule, due = self._rule, int64(rows, "deliver_at")
        opened = OpenTime(rule.windows, min(moment.now, int(due.min())))
        places = due.astype(np.float64)
        has_place = self._have_places(rows, moment)
        if has_place.any():
            places[has_place] = self._current_places(rows.filter(pa.array(has_place)), opened)
            # A place that is outside the windows, because the settings have changed, does not count. Without a rate
            # every time within the windows is a place.
            has_place &= opened.is_open(places if rule.rate is not None else np.maximum(places, moment.now))
        new = np.flatnonzero(~has_place)
        if not have_waited and self._n_waiting:
            places[new] = np.nan
        elif len(new):
            keys = rows["key"].take(pa.array(new)) if rule.is_per_key else None
            times = np.maximum(due[new], moment.now).astype(np.float64)
            n = min(len(self._assigned), len(new))
            places[new[:n]] = np.maximum(self._assigned[:n], times[:n])
            new, times = new[n:], opened.to_open(times[n:])
            if not self.shares_places:
                n = MOST_PLACES
            elif self._n_waiting > self.max_from_queue:
                n = 0
            else:  # on its own a shard gives only places up to this tick's cutoff
                n = self._number_of_places(times, opened, cutoff)
            places[new[n:]] = np.nan
            new, times, keys = new[:n], times[:n], None if keys is None else keys[:n]
            places[new] = opened.to_real(self._take(times, keys, opened))
        return places, has_place

    def postpone_late(self, rows: pa.Table, moment: Moment) -> None:
        """Postpones all places if rows have missed theirs, unless places were postponed in this tick already.

        Args:
            rows: as MESSAGES: rows of this subscription that come due in this tick at their places.
            moment: of this tick.
        """
        if self.is_postponed_at(moment):
            return
        rows = rows.filter(pa.array(self._have_places(rows, moment)))
        if self._rule.rate is None or not rows.num_rows:
            return
        opened = OpenTime(self._rule.windows, min(moment.now, int(int64(rows, "deliver_at").min())))
        times = self._current_places(rows, opened)
        if times.min() < moment.now - self._slack:
            self.postpone(float(times.min()), moment.now, moment)

    def postpone_in_all_shards(self, first: float, until: float, moment: Moment) -> None:
        """Postpones all places if messages may have missed theirs. All shards do so alike, by the same time.

        Otherwise the places of two shards would overlap. The arguments are the same in all shards.

        Args:
            first: messages with places before this time have been sent in time, ms since the epoch.
            until: the place at `first` is postponed to this time, ms since the epoch.
            moment: of this tick.
        """
        state = self.state
        # After a rebuild, messages keep the places that the tables have, and `first` says nothing about them.
        if not self.shares_places or self._is_rebuilt or self.is_postponed_at(moment):
            return
        first = max(first, state.postponed_to)
        if state.last >= first and first < until - self._slack:
            self.postpone(first, until, moment)
            state.postponed_to = max(state.postponed_to, until)

    def is_postponed_at(self, moment: Moment) -> bool:
        """Tells whether places have been postponed in this tick."""
        return any(tick == moment.tick for tick, _ in self.state.postponements)

    def postpone(self, first: float, until: float, moment: Moment) -> None:
        """Postpones all places, so that the place at `first` is at `until`; both ms since the epoch."""
        state, opened = self.state, OpenTime(self._rule.windows, min(first, moment.now))
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
            state.postponements.append([moment.tick, by])

    def _have_places(self, rows: pa.Table, moment: Moment) -> BoolArray:
        """Tells which rows have a place that counts: bool, (rows,).

        If the rate has been lowered, places that were given before do not count: their rows get new ones.
        """
        has_place: BoolArray = np.asarray(pc.is_valid(rows["shaped_from"]))
        state, rate = self.state, [self._rule.rate, self._rule.burst, self._rule.is_per_key]
        if state.rate and state.rate != rate and state.last > moment.now and _is_less(rate, state.rate):
            state.valid_from, state.last_invalid = moment.tick, max(state.last_invalid, state.last)
            state.last, state.postponements, state.next_times = moment.now, [], {}
            state.floor = self._state_after(moment.now)
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
        if self._rule.rate is None:
            return times
        bucket, state = Bucket.of(self._rule.rate, self._rule.burst, self._shard_id), self.state
        if keys is None:
            names, numbers = [_NO_KEY], np.zeros(len(times), np.int64)
        else:
            encoded = pc.fill_null(keys.cast(pa.string()), _NO_KEY).combine_chunks().dictionary_encode()
            names, numbers = encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)
        before = np.array([state.next_times.get(name, state.floor) for name in names])
        if keys is None:
            places, after = bucket.places(times, float(opened.to_open(before)[0]))
            states = np.array([after])
        else:
            places, states = bucket.places_of_keys(times, numbers, opened.to_open(before))
        state.next_times |= dict(zip(names, opened.to_real(states).tolist(), strict=True))
        return places

    def _number_of_places(self, times: FloatArray, opened: OpenTime, cutoff: int) -> int:
        """Returns for how many messages the shard has places until the cutoff, by their earliest times in open time."""
        if self._rule.rate is None:
            return MOST_PLACES
        before = self.state.next_times.get(_NO_KEY, self.state.floor)
        bucket = Bucket.of(self._rule.rate, self._rule.burst, self._shard_id)
        places, _ = bucket.places(times, float(opened.to_open(np.array([before]))[0]))
        return int((opened.to_real(places) <= cutoff).sum())

    def _current_places(self, rows: pa.Table, opened: OpenTime) -> FloatArray:
        """Returns the places of rows after all postponements: float64, (rows,), ms since the epoch."""
        places = int64(rows, "deliver_at").astype(np.float64)
        if not self.state.postponements:
            return places
        of_tick = _ticks(rows)
        by = np.zeros(len(places))
        for tick, millis in self.state.postponements:
            by += np.where(of_tick < tick, millis, 0.0)
        is_later = by > 0
        places[is_later] = opened.to_real(opened.to_open(places[is_later]) + by[is_later])
        return places

    def _state_after(self, last: int) -> float:
        """Returns a token bucket's state after a last place, without saved burst; both ms since the epoch."""
        if self._rule.rate is None:
            return float(last)
        bucket = Bucket.of(self._rule.rate, self._rule.burst, self._shard_id)
        opened = OpenTime(self._rule.windows, last)
        after = opened.to_open(np.array([float(last)])) + max(1, bucket.burst) * bucket.interval
        return float(opened.to_real(after)[0])

    @property
    def _slack(self) -> float:
        """How late messages may be, ms, before places are postponed."""
        rate = self._rule.rate
        return _LATE_MILLIS if rate is None else min(_LATE_MILLIS, 500 * self._rule.burst / rate)


def _ticks(rows: pa.Table) -> Int64Array:
    """Returns the tick in which each row got its place, int64, (rows,); 0: not known."""
    ticks: Int64Array = pc.fill_null(rows["sequence"], 0).to_numpy().astype(np.int64) >> SEQUENCE_BITS
    return ticks


def _is_less(rate: Sequence[Any], before: Sequence[Any]) -> bool:
    """Tells whether a rate allows fewer messages than the rate before; both as `TargetState.rate`."""
    if rate[0] is None:
        return False
    return before[0] is None or rate[0] < before[0] or rate[1] < before[1] or rate[2] != before[2]
