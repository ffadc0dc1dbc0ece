"""A token bucket that gives places in time, in columns: the generic cell rate algorithm (ITU-T I.371).

Its whole state is one time, `next`: when the place after the last one given would be, if nothing were saved up. A place
is at most `burst - 1` intervals before it, so that in any time t there are at most `burst + t / interval` places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracker.messages import Int64Array
from tracker.sharding import Place

FloatArray = npt.NDArray[np.float64]

_TOLERANCE = 1e-6  # of an interval: what rounding may take from a time


@dataclass(frozen=True)
class Bucket:
    """The places of one shard. Those of all shards together are as many as rate and burst allow, and no more.

    A shard has its share of the rate and of the burst. Where the burst has less than one message for each shard, there
    is nothing to save up: all shards' places are on one grid, of which each shard has every n-th.

    Attributes:
        interval: between two places of the shard, ms.
        burst: of the shard; 0: places are on the grid.
        offset: of the shard's places on the grid, ms.
    """

    interval: float
    burst: int
    offset: float = 0.0

    @staticmethod
    def of(rate: float, burst: int, place: Place) -> Bucket:
        """Returns a shard's part of a rate, messages a second, and of a burst."""
        interval = 1000 / rate * place.shards
        if burst < place.shards:
            return Bucket(interval, 0, 1000 / rate * place.number)
        return Bucket(interval, burst // place.shards + (place.number < burst % place.shards))

    def places(self, times: FloatArray, next_time: float) -> tuple[FloatArray, float]:
        """Gives each message the next free place at its time or later.

        Args:
            times: float64, (n,), ms, ascending: before which the messages must not go.
            next_time: the state, ms; any time long past: nothing was given.

        Returns:
            the places, float64, (n,), ms, ascending; and the state after them.
        """
        if not len(times):
            return times, next_time
        n, order = len(times), np.arange(len(times))
        if not self.burst:
            first = np.ceil((np.append(next_time, times) - self.offset) / self.interval - _TOLERANCE)
            slots = np.maximum(np.maximum.accumulate(first[1:] - order), first[0]) + order
            places = slots * self.interval + self.offset
            return np.maximum(places, times), float(places[-1] + self.interval)
        # The state after the i-th one is `least[i] + (i + 1) * interval`.
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
        # By key, or of all keys the first ones, the second ones and so on: whichever takes fewer rounds.
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
    """Returns which of the places that shards have together are one shard's, from 0 on: each one's are spread evenly.

    Args:
        counts: how many places each shard has.
        own: the shard's number.

    Returns:
        int64, (counts[own],), ascending. The shards' ranks are distinct, and none is left out.
    """
    shards = np.repeat(np.arange(len(counts)), counts)
    evenly = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in counts]) if counts else np.zeros(0)
    order = np.lexsort([shards, evenly])
    return np.flatnonzero(shards[order] == own).astype(np.int64)
