"""A subscription whose messages are shaped: which places it has given, and which are next."""

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
from tracker.sharding import Place

# Messages may be so late, ms, and by half of what a burst may save up, if that is less, without places being put off.
_LATE_MILLIS = 500.0

# So many messages of a subscription a shard gives places in a tick, where it does so alone: more of them would keep all
# others waiting.
MOST_PLACES = 50_000

_NO_KEY = ""

_NO_RULE = ShapingRule(rate=None, burst=1, is_per_key=False, windows=())


@dataclass
class TargetState:
    """The state of a subscription's rate.

    Attributes:
        next_times: by key the state of its bucket as a real time, ms since the epoch; without keys that of `_NO_KEY`.
        last: the last place that was given to a message that was moved to it, ms since the epoch.
        floor: after a rebuild the state of each bucket that is not in `next_times`.
        put_off: [tick, open time in ms]: by how much all places given before that tick are later now.
        rate: messages a second, burst, and whether by key, by which the last places were given; empty: not known.
        since: places given before this tick are those of a rate that was higher: they count no more.
        since_until: the last of these, ms since the epoch.
        first: where the first place is since all shards put theirs off, ms since the epoch.
    """

    next_times: dict[str, float] = field(default_factory=dict)
    last: int = 0
    put_off: list[list[float]] = field(default_factory=list)
    floor: float = 0.0
    rate: list[Any] = field(default_factory=list)
    since: int = 0
    since_until: int = 0
    first: float = 0.0

    def forget_past(self, now: int) -> bool:
        """Forgets what is past, ms since the epoch; returns whether anything is left."""
        if self.last <= now:
            self.last, self.put_off = 0, []
        if self.floor <= now:
            self.floor = 0.0
        if self.first <= now:
            self.first = 0.0
        if self.since_until <= now:
            self.since = self.since_until = 0
        self.next_times = {name: time for name, time in self.next_times.items() if time > now}
        return bool(self.next_times or self.last or self.floor or self.since)


class Target:
    """A subscription whose messages are shaped, in one shard: gives messages places, and puts places off.

    Args:
        rule: how it is shaped; None: no more.
        place: which shard this is.
        state: what is kept of it.
    """

    def __init__(self, rule: ShapingRule | None, place: Place, state: TargetState | None = None) -> None:
        self._rule = rule or _NO_RULE
        self._place = place
        self.state = state or TargetState()
        self._given: FloatArray = np.zeros(0)  # places of this tick's offset, real time
        self._n_waiting = 0  # messages that waited when the tick began
        self._is_rebuilt = False  # in this tick

    @property
    def shares_places(self) -> bool:
        """Whether shards get places together for what is beyond their own shares."""
        return self._rule.rate is not None and not self._rule.is_per_key and self._place.shards > 1

    def begin(self, n_waiting: int) -> None:
        """Begins a tick.

        Args:
            n_waiting: how many messages wait since an earlier one.
        """
        self._n_waiting = n_waiting

    @property
    def most_of_waiting(self) -> int:
        """How many of the messages that wait are to come due again in this tick: there are places for no more."""
        return len(self._given) if self.shares_places else MOST_PLACES

    def begin_after(self, last: int) -> None:
        """Begins after a rebuild: what comes due goes after the last place that was given, ms since the epoch."""
        # Without a burst: of the places before nothing can have been saved up.
        self.state = TargetState(last=last, floor=self._full(last))
        self._is_rebuilt = True

    def give(self, after: int, waiting: Sequence[int]) -> None:
        """Takes over the places that the tick's offset gives to what waits in all shards.

        Args:
            after: the time after which they are, ms since the epoch.
            waiting: how many messages that wait get one, by shard; of a shard in which some wait, at least one.
        """
        if self._rule.rate is None or not self.shares_places:
            return
        opened, interval = OpenTime(self._rule.windows, after), 1000 / self._rule.rate
        begin = float(opened.to_open(np.array([float(after)]))[0])
        ranks = own_ranks(waiting, self._place.number)
        self._given = opened.to_real(begin + interval * (ranks + 1).astype(np.float64))
        end = float(opened.to_real(np.array([begin + sum(waiting) * interval]))[0])
        self.state.last = max(self.state.last, ceil(end))
        self.state.next_times[_NO_KEY] = self._full(self.state.last)

    def places(self, rows: pa.Table, moment: Moment, cutoff: int, have_waited: bool) -> tuple[FloatArray, BoolArray]:
        """Gives places to rows that come due.

        Args:
            rows: as MESSAGES, of this subscription.
            moment: of this tick.
            cutoff: of this tick, ms since the epoch.
            have_waited: whether the first of what has waited since an earlier tick, `most_of_waiting`, are among the
                rows. If not, they wait behind it.

        Returns:
            the places, float64, (rows,), ms since the epoch, and which rows had one before. NaN is the place of a row
            that gets none in this tick.
        """
        rule, due = self._rule, int64(rows, "deliver_at")
        opened = OpenTime(rule.windows, min(moment.now, int(due.min())))
        places = due.astype(np.float64)
        has_place = self._have_places(rows, moment)
        if has_place.any():
            places[has_place] = self._put_off_places(rows.filter(pa.array(has_place)), opened)
            # Other windows in the settings than when the place was given: it needs another one. Without a rate there is
            # a place whenever it is open.
            has_place &= opened.is_open(places if rule.rate is not None else np.maximum(places, moment.now))
        new = np.flatnonzero(~has_place)
        if not have_waited and self._n_waiting:
            places[new] = np.nan
        elif len(new):
            keys = rows["key"].take(pa.array(new)) if rule.is_per_key else None
            times = np.maximum(due[new], moment.now).astype(np.float64)
            n = min(len(self._given), len(new))
            places[new[:n]] = np.maximum(self._given[:n], times[:n])
            new, times = new[n:], opened.to_open(times[n:])
            if not self.shares_places:
                n = MOST_PLACES
            elif self._n_waiting > self.most_of_waiting:
                n = 0
            else:  # alone a shard gives only places of this tick
                n = self._number_of_places(times, opened, cutoff)
            places[new[n:]] = np.nan
            new, times, keys = new[:n], times[:n], None if keys is None else keys[:n]
            places[new] = opened.to_real(self._take(times, keys, opened))
        return places, has_place

    def notice_late(self, rows: pa.Table, moment: Moment) -> None:
        """Puts places off where rows could not be kept to theirs, unless they were put off in this tick.

        Args:
            rows: as MESSAGES, those of this subscription that come due in this tick and were given places.
            moment: of this tick.
        """
        if self.is_put_off_at(moment):
            return
        rows = rows.filter(pa.array(self._have_places(rows, moment)))
        if self._rule.rate is None or not rows.num_rows:
            return
        opened = OpenTime(self._rule.windows, min(moment.now, int(int64(rows, "deliver_at").min())))
        times = self._put_off_places(rows, opened)
        if times.min() < moment.now - self._slack:
            self.put_off(float(times.min()), moment.now, moment)

    def put_off_with_others(self, first: float, until: float, moment: Moment) -> None:
        """Puts places off by the same time in all shards, if places may be past: else those of two would overlap.

        All shards know how far places were given, and since when they may not have been kept.

        Args:
            first: before this time all places have been kept, ms since the epoch; the same in all shards.
            until: to when the place at that time is put off, ms since the epoch; the same, too.
            moment: of this tick.
        """
        state = self.state
        # What a rebuild found keeps its places, and the last cutoff is then that of any message.
        if not self.shares_places or self._is_rebuilt or self.is_put_off_at(moment):
            return
        first = max(first, state.first)
        if state.last >= first and first < until - self._slack:
            self.put_off(first, until, moment)
            state.first = max(state.first, until)

    def is_put_off_at(self, moment: Moment) -> bool:
        """Whether places have been put off in this tick."""
        return any(tick == moment.tick for tick, _ in self.state.put_off)

    def put_off(self, first: float, until: float, moment: Moment) -> None:
        """Puts all places off, so that the one at `first` is at `until`; both ms since the epoch."""
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
            state.put_off.append([moment.tick, by])

    def _have_places(self, rows: pa.Table, moment: Moment) -> BoolArray:
        """Tells which rows have a place that counts: bool, (rows,).

        Where the rate is lower than it was, those that were given before have none any more: they get new ones.
        """
        has_place: BoolArray = np.asarray(pc.is_valid(rows["shaped_from"]))
        state, rate = self.state, [self._rule.rate, self._rule.burst, self._rule.is_per_key]
        if state.rate and state.rate != rate and state.last > moment.now and _is_less(rate, state.rate):
            state.since, state.since_until = moment.tick, max(state.since_until, state.last)
            state.last, state.put_off, state.next_times = moment.now, [], {}
            state.floor = self._full(moment.now)
        state.rate = rate
        if state.since and has_place.any():
            has_place = has_place & (_ticks(rows) >= state.since)
        return has_place

    def _take(self, times: FloatArray, keys: pa.ChunkedArray | None, opened: OpenTime) -> FloatArray:
        """Takes places from the buckets, in open time, for times in open time: float64, (n,)."""
        if self._rule.rate is None:
            return times
        bucket, state = Bucket.of(self._rule.rate, self._rule.burst, self._place), self.state
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
        """Returns for how many messages the shard has places until the cutoff, ms; times are in open time."""
        if self._rule.rate is None:
            return MOST_PLACES
        before = self.state.next_times.get(_NO_KEY, self.state.floor)
        bucket = Bucket.of(self._rule.rate, self._rule.burst, self._place)
        places, _ = bucket.places(times, float(opened.to_open(np.array([before]))[0]))
        return int((opened.to_real(places) <= cutoff).sum())

    def _put_off_places(self, rows: pa.Table, opened: OpenTime) -> FloatArray:
        """Returns where the places of rows are now: float64, (rows,), ms since the epoch."""
        places = int64(rows, "deliver_at").astype(np.float64)
        if not self.state.put_off:
            return places
        of_tick = _ticks(rows)
        by = sum((np.where(of_tick < tick, millis, 0.0) for tick, millis in self.state.put_off), np.zeros(len(places)))
        is_later = by > 0
        places[is_later] = opened.to_real(opened.to_open(places[is_later]) + by[is_later])
        return places

    def _full(self, last: int) -> float:
        """Returns the state of a bucket of which the last place was at a time, and nothing is saved up: ms."""
        if self._rule.rate is None:
            return float(last)
        bucket = Bucket.of(self._rule.rate, self._rule.burst, self._place)
        opened = OpenTime(self._rule.windows, last)
        after = opened.to_open(np.array([float(last)])) + max(1, bucket.burst) * bucket.interval
        return float(opened.to_real(after)[0])

    @property
    def _slack(self) -> float:
        """How late messages may be, ms, before places are put off."""
        rate = self._rule.rate
        return _LATE_MILLIS if rate is None else min(_LATE_MILLIS, 500 * self._rule.burst / rate)


def _ticks(rows: pa.Table) -> Int64Array:
    """Returns in which tick rows were given their places, int64, (rows,); 0: that is not known."""
    ticks: Int64Array = pc.fill_null(rows["sequence"], 0).to_numpy().astype(np.int64) >> SEQUENCE_BITS
    return ticks


def _is_less(rate: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether places of a rate before are more than a rate allows; both as `TargetState.rate`."""
    if rate[0] is None:
        return False
    return before[0] is None or rate[0] < before[0] or rate[1] < before[1] or rate[2] != before[2]
