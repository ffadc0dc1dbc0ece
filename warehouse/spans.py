"""How what lies in many spans of time is spread over it, as if each span were evenly filled."""

from __future__ import annotations

import numpy as np

from tracker.messages import Int64Array


def times_of(first: Int64Array, last: Int64Array, size: np.ndarray, wanted: np.ndarray) -> Int64Array:
    """Returns the times before which there is as much as is wanted.

    Args:
        first, last: of the spans, both inclusive, ms since the epoch, (spans,); there is one at least.
        size: how much there is in each, float64, (spans,).
        wanted: float64, (times,), ascending.

    Returns:
        ms since the epoch, (times,), ascending; the end of the last span where there is not so much.
    """
    begin = int(first.min())
    starts, ends = (first - begin).astype(np.float64), (last + 1 - begin).astype(np.float64)
    density = size / (ends - starts)
    times, changes = np.concatenate([starts, ends]), np.concatenate([density, -density])
    order = np.argsort(times, kind="stable")
    times = times[order]
    slope = np.cumsum(changes[order])[:-1].clip(0)
    before = np.concatenate([[0.0], np.cumsum(slope * np.diff(times))])
    found: Int64Array = begin + np.ceil(np.interp(wanted, before, times)).astype(np.int64)
    return found
