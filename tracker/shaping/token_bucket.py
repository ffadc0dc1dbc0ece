"""The rule by which a subscription's messages are shaped, its token bucket, and the open time that fills it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from conf.shaping import DAYS, Rate, Window, minutes
from conf.time_zones import time_zone
from tracker.in_flight import PLACE, SENDING, SUBSCRIPTION_MASK, Release
from tracker.messages import BoolArray, Int64Array, int64
from tracker.sharding import ShardId


@dataclass(frozen=True)
class OpenWindow:
    """A span of time, every week, in which messages may go out.

    Attributes:
        days: weekdays on which the window begins; Monday is 0.
        start: minutes from midnight.
        end: minutes from midnight of the day on which the window begins; more than `start`, perhaps on the next day.
        time_zone: IANA name.
    """

    days: tuple[int, ...]
    start: int
    end: int
    time_zone: str


@dataclass(frozen=True)
class ShapingRule:
    """How a subscription's messages are shaped.

    Attributes:
        rate: messages a second; None: no limit.
        burst: how many messages may go out at once after a pause.
        is_per_key: whether rate and burst are those of each key, or of the subscription as a whole.
        windows: when messages may go out; empty: always.
    """

    rate: float | None
    burst: int
    is_per_key: bool
    windows: tuple[OpenWindow, ...]

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_json(text: str) -> ShapingRule:
        """Reads a rule that `rule_of` wrote."""
        rule = json.loads(text)
        windows = tuple(OpenWindow(tuple(days), *others) for days, *others in rule.get("windows", ()))
        return ShapingRule(rule.get("rate"), rule.get("burst", 1), rule.get("per_key", False), windows)


def rule_of(rate: Rate | None, windows: Sequence[Window]) -> str | None:
    """Returns a subscription's shaping rule as JSON; None: its messages are not shaped.

    Args:
        rate: the subscription's setting; None: no rate.
        windows: the subscription's setting.
    """
    if rate is None and not windows:
        return None
    rule: dict[str, object] = {}
    if rate is not None:
        rule |= {"rate": rate.messages_per_second, "burst": rate.most_at_once, "per_key": rate.per == "key"}
    if windows:
        rule["windows"] = [_recorded(window) for window in windows]
    return json.dumps(rule)


def _recorded(window: Window) -> list[object]:
    start, end = minutes(window.start), minutes(window.end)
    days = sorted({DAYS.index(day) for day in window.days})
    return [days, start, end if end > start else end + 24 * 60, window.time_zone]


# Key in the JSON of `Tick.sending`: the subscriptions whose messages are shaped, their rates, and the tick's time.
SHAPED = "shaped"


def recorded(now: int, rules: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    """Returns the value to record under SHAPED with a tick's releases.

    Args:
        now: time of the tick, ms since the epoch.
        rules: by source topic and subscription number: the shaping rule, as `rule_of` returns it.
    """
    rates: dict[str, dict[str, list[Any]]] = {}
    for topic, topic_rules in rules.items():
        for number, text in topic_rules.items():
            rule = ShapingRule.from_json(text)
            if rule.rate is not None:
                rates.setdefault(topic, {})[str(number)] = [rule.rate, rule.burst, rule.is_per_key]
    numbers = {topic: sorted(topic_rules) for topic, topic_rules in rules.items()}
    return {"now": now, "subscriptions": numbers} | ({"rates": rates} if rates else {})


def spans(rows: pa.Table) -> dict[tuple[str, int], tuple[int, int]]:
    """Returns when the first and the last shaped message of each subscription is due.

    A message that was overdue when it was dispatched counts as due at that time.

    Args:
        rows: as `Release.rows`, with the metadata.

    Returns:
        by topic and subscription number: first and last time, ms since the epoch.
    """
    sending = json.loads((rows.schema.metadata or {}).get(SENDING.encode(), b"{}"))
    found: dict[tuple[str, int], tuple[int, int]] = {}
    if SHAPED not in sending or not rows.num_rows:
        return found
    due = np.maximum(int64(rows, "deliver_at"), sending[SHAPED]["now"])
    masks = int64(rows, SUBSCRIPTION_MASK)
    topics = rows["topic"].combine_chunks().dictionary_encode()
    indices = topics.indices.to_numpy()
    for i, topic in enumerate(topics.dictionary.to_pylist()):
        for number in sending[SHAPED]["subscriptions"].get(topic, ()):
            dues = due[(indices == i) & (masks >> number & 1 > 0)]
            if len(dues):
                found[topic, number] = int(dues.min()), int(dues.max())
    return found


def first_due(releases: Iterable[Release]) -> dict[tuple[str, int], int]:
    """Returns when the first shaped message of each subscription is due that may not have been sent.

    Args:
        releases: those in flight. Open ones are not counted, because they wait for their destination.

    Returns:
        by topic and subscription number: ms since the epoch.
    """
    found: dict[tuple[str, int], int] = {}
    for release in releases:
        if PLACE not in release.rows.column_names:
            for target, (first, _) in spans(release.rows).items():
                found[target] = min(first, found.get(target, first))
    return found


FloatArray = npt.NDArray[np.float64]

_TOLERANCE = 1e-6  # intervals: the largest rounding error of a time


@dataclass(frozen=True)
class TokenBucket:
    """A shard's part of a subscription's token bucket. All shards together give as many places as rate and burst allow.

    A shard has its share of the rate and of the burst. If the burst is less than one message for each shard, no burst
    is saved up: the places of all n shards are on one grid, and each shard has every n-th.

    Attributes:
        interval: time between two places of the shard, ms.
        burst: the shard's share, messages; 0: its places are on the grid.
        offset: the shard's first place on the grid, ms.
    """

    interval: float
    burst: int
    offset: float = 0.0

    @staticmethod
    def share_of(rate: float, burst: int, shard_id: ShardId) -> TokenBucket:
        """Returns a shard's part of a rate, messages a second, and of a burst."""
        interval = 1000 / rate * shard_id.shards
        if burst < shard_id.shards:
            return TokenBucket(interval, 0, 1000 / rate * shard_id.number)
        return TokenBucket(interval, burst // shard_id.shards + (shard_id.number < burst % shard_id.shards))

    def places(self, times: FloatArray, next_time: float) -> tuple[FloatArray, float]:
        """Gives each message the next free place at its time or later.

        Args:
            times: float64, (n,), ms, ascending: the earliest time of each message.
            next_time: the bucket's state, ms; any time long past: no place was given.

        Returns:
            the places, float64, (n,), ms, ascending; and the state after them, ms.
        """
        if not len(times):
            return times, next_time
        n, order = len(times), np.arange(len(times))
        if not self.burst:
            first = np.ceil((np.append(next_time, times) - self.offset) / self.interval - _TOLERANCE)
            slots = np.maximum(np.maximum.accumulate(first[1:] - order), first[0]) + order
            places = slots * self.interval + self.offset
            return np.maximum(places, times), float(places[-1] + self.interval)
        # The state after the i-th place is `least[i] + (i + 1) * interval`.
        least = np.maximum(np.maximum.accumulate(times - order * self.interval), next_time)
        before = np.append(next_time, least[:-1]) + order * self.interval
        return np.maximum(times, before - (self.burst - 1) * self.interval), float(least[-1] + n * self.interval)

    def places_of_keys(
        self, times: FloatArray, keys: Int64Array, next_times: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Gives each message the next free place in the bucket of its key.

        Args:
            times: as in `places`.
            keys: int64, (n,): the number of each message's key.
            next_times: float64, (keys,): the state of each key's bucket.

        Returns:
            the places, float64, (n,); and the states after them, float64, (keys,).
        """
        places, after = times.copy(), next_times.copy()
        order = np.argsort(keys, kind="stable")
        distinct_keys, starts = np.unique(keys[order], return_index=True)
        counts = np.diff(np.append(starts, len(keys)))
        # Either key by key, or the first messages of all keys, then the second ones, and so on: in fewer rounds.
        if len(distinct_keys) <= counts.max(initial=0):
            for key, start, count in zip(distinct_keys.tolist(), starts.tolist(), counts.tolist(), strict=True):
                rows = order[start : start + count]
                places[rows], after[key] = self.places(times[rows], float(after[key]))
            return places, after
        for i in range(int(counts.max(initial=0))):
            has_more = counts > i
            rows, of = order[starts[has_more] + i], distinct_keys[has_more]
            places[rows], after[of] = self._one_each(times[rows], after[of])
        return places, after

    def kept_before(self, times: FloatArray, keys: Int64Array, next_times: FloatArray, ends: FloatArray) -> BoolArray:
        """Tells which messages get a place before their end, in order; the others take none.

        Args:
            times, keys, next_times: as in `places_of_keys`.
            ends: float64, (n,), ms.

        Returns:
            bool, (n,).
        """
        origin = float(times[0]) if len(times) else 0.0  # small numbers are rounded less
        # By key: the next slot of the grid, or the bucket's state, ms after the origin.
        after = [self._slot(time) if not self.burst else time - origin for time in next_times.tolist()]
        kept = []
        for time, key, end in zip(times.tolist(), keys.tolist(), ends.tolist(), strict=True):
            before = after[key]
            if not self.burst:
                slot = max(self._slot(time), before)
                place, then = max(slot * self.interval + self.offset, time), slot + 1
            else:
                first = time - origin
                place = max(first, before - (self.burst - 1) * self.interval) + origin
                then = max(first, before) + self.interval
            kept.append(place < end)
            if kept[-1]:
                after[key] = then
        return np.array(kept, np.bool_)

    def _slot(self, time: float) -> float:
        """Returns the number of the first place on the grid at a time, ms, or later."""
        return math.ceil((time - self.offset) / self.interval - _TOLERANCE)

    def _one_each(self, times: FloatArray, next_times: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Gives one message of each bucket a place: its place and the state after it, float64, (n,)."""
        if not self.burst:
            slots = np.ceil((np.maximum(times, next_times) - self.offset) / self.interval - _TOLERANCE)
            places = slots * self.interval + self.offset
            return np.maximum(places, times), places + self.interval
        places = np.maximum(times, next_times - (self.burst - 1) * self.interval)
        return places, np.maximum(times, next_times) + self.interval


def own_ranks(counts: Sequence[int], own: int) -> Int64Array:
    """Divides consecutive places among shards, each shard's spread evenly; returns the ranks of one shard's places.

    Args:
        counts: how many places each shard gets.
        own: the shard's number.

    Returns:
        int64, (counts[own],), ascending, from 0. Each rank belongs to exactly one shard.
    """
    shards = np.repeat(np.arange(len(counts)), counts)
    evenly = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in counts]) if counts else np.zeros(0)
    order = np.lexsort([shards, evenly])
    return np.flatnonzero(shards[order] == own).astype(np.int64)


_DAY_MILLIS = 24 * 3600 * 1000

_WEEK_MILLIS = 7 * _DAY_MILLIS

_MONDAY_MILLIS = 4 * _DAY_MILLIS  # 1970-01-05 was a Monday

_DAYS_AT_ONCE = 28

# The windows are computed for so many days from the origin on: a hundred years. After that it is always open.
_MOST_DAYS = 36_525

_LAST_DAY = date(9999, 12, 25)  # a window may end two days later, in any time zone, and no date is after 9999

_FOREVER = 1e18


class OpenTime:
    """A monotone map between real time and open time, which stands still while no window is open.

    A token bucket that is filled in open time gives no places while the windows are closed, and saves no burst up.

    Args:
        windows: empty: it is always open, and open time is real time. From a hundred years on, or from the end of the
            year 9999, it is always open.
        since: ms since the epoch: the earliest time that will be asked for. Open time begins in the week before it.
    """

    def __init__(self, windows: Sequence[OpenWindow], since: float) -> None:
        self._windows = windows
        origin = int((since - _MONDAY_MILLIS) // _WEEK_MILLIS - 1) * _WEEK_MILLIS + _MONDAY_MILLIS
        # Two days earlier: a day begins up to 14 hours before that of UTC, depending on the time zone.
        self._origin = origin
        self._day = datetime.fromtimestamp(origin / 1000, UTC).date() - timedelta(days=2)
        self._last_day = min(self._day, _LAST_DAY - timedelta(days=_MOST_DAYS)) + timedelta(days=_MOST_DAYS)
        self._starts = self._ends = self._open_before = np.zeros(0)
        self._spans: list[tuple[float, float]] = []

    def to_open(self, times: FloatArray) -> FloatArray:
        """Converts real times, ms since the epoch, to open time, ms; while closed, to that of the next opening.

        Args:
            times: float64, (n,).

        Returns:
            float64, (n,).
        """
        if not self._windows or not len(times):
            return times
        self._extend_to(float(times.max()))
        at = np.searchsorted(self._starts, times, "right") - 1
        first = np.maximum(at, 0)
        within = np.clip(times - self._starts[first], 0, self._ends[first] - self._starts[first])
        return np.where(at < 0, 0, self._open_before[first] + within)

    def to_real(self, opens: FloatArray) -> FloatArray:
        """Converts open times, ms, to real times, ms since the epoch; at an opening, to its real time.

        Args:
            opens: float64, (n,).

        Returns:
            float64, (n,).
        """
        if not self._windows or not len(opens):
            return opens
        while not len(self._starts) or opens.max() >= self._total:
            self._extend()
        at = np.maximum(np.searchsorted(self._open_before, opens, "right") - 1, 0)
        return self._starts[at] + (opens - self._open_before[at])

    def is_open(self, times: FloatArray) -> npt.NDArray[np.bool_]:
        """Tells at which real times, ms since the epoch, it is open: bool, (n,)."""
        if not self._windows or not len(times):
            return np.ones(len(times), np.bool_)
        self._extend_to(float(times.max()))
        at = np.searchsorted(self._starts, times, "right") - 1
        is_open: npt.NDArray[np.bool_] = (at >= 0) & (times < self._ends[np.maximum(at, 0)])
        return is_open

    @property
    def _total(self) -> float:
        return float(self._open_before[-1] + self._ends[-1] - self._starts[-1])

    def _extend_to(self, time: float) -> None:
        while self._day < self._last_day and (not len(self._starts) or self._day_millis <= time + 2 * _DAY_MILLIS):
            self._extend()

    @property
    def _day_millis(self) -> int:
        return int(datetime(self._day.year, self._day.month, self._day.day, tzinfo=UTC).timestamp() * 1000)

    def _extend(self) -> None:
        """Adds the windows of further days; more days each time, so that places far ahead take few steps."""
        days = max(_DAYS_AT_ONCE, len(self._starts) // max(1, len(self._windows)))
        for _ in range(min(days, (self._last_day - self._day).days)):
            self._spans += self._of_day(self._day)
            self._day += timedelta(days=1)
        if self._day >= self._last_day:
            self._spans.append((float(self._day_millis), _FOREVER))
        merged: list[list[float]] = []
        for start, end in sorted(self._spans):
            start = max(start, self._origin)
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            elif start < end:
                merged.append([start, end])
        spans = np.array(merged, np.float64).reshape(-1, 2)
        self._starts, self._ends = spans[:, 0], spans[:, 1]
        self._open_before = np.cumsum(self._ends - self._starts) - (self._ends - self._starts)

    def _of_day(self, day: date) -> Iterator[tuple[int, int]]:
        for window in self._windows:
            if day.weekday() in window.days:
                start, end = (_millis(day, at, window.time_zone) for at in (window.start, window.end))
                if start < end:
                    yield start, end


def _millis(day: date, minutes: int, zone: str) -> int:
    """Returns a time of day in a time zone as ms since the epoch.

    A time that the clocks skip is moved after the gap, by as much as it is within it. A time that comes twice means the
    first of the two.
    """
    local = datetime(day.year, day.month, day.day, tzinfo=time_zone(zone)) + timedelta(minutes=minutes)
    return int(local.timestamp() * 1000)
