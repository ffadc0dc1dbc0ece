"""A token bucket on columns, which gives messages places in time: the generic cell rate algorithm (ITU-T I.371).

Its whole state is one time: the next place, if no burst were saved up. A place may be up to `burst - 1` intervals
before this time, so that a span t has at most `burst + t / interval` places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracker.messages import Int64Array
from tracker.sharding import ShardId

FloatArray = npt.NDArray[np.float64]

_TOLERANCE = 1e-6  # intervals: the largest rounding error of a time


@dataclass(frozen=True)
class Bucket:
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
    def of(rate: float, burst: int, shard_id: ShardId) -> Bucket:
        """Returns a shard's part of a rate, messages a second, and of a burst."""
        interval = 1000 / rate * shard_id.shards
        if burst < shard_id.shards:
            return Bucket(interval, 0, 1000 / rate * shard_id.number)
        return Bucket(interval, burst // shard_id.shards + (shard_id.number < burst % shard_id.shards))

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
        of_keys, starts = np.unique(keys[order], return_index=True)
        counts = np.diff(np.append(starts, len(keys)))
        # Either key by key, or the first messages of all keys, then the second ones, and so on: in fewer rounds.
        if len(of_keys) <= counts.max(initial=0):
            for key, start, count in zip(of_keys.tolist(), starts.tolist(), counts.tolist(), strict=True):
                rows = order[start : start + count]
                places[rows], after[key] = self.places(times[rows], float(after[key]))
            return places, after
        for i in range(int(counts.max(initial=0))):
            has_more = counts > i
            rows, of = order[starts[has_more] + i], of_keys[has_more]
            places[rows], after[of] = self._one_each(times[rows], after[of])
        return places, after

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
