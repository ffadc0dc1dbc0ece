"""Computes the distribution over time of rows in many overlapping spans, as if each span were evenly filled."""

from __future__ import annotations

import numpy as np

from tracker.messages import Int64Array


def times_of(first: Int64Array, last: Int64Array, size: np.ndarray, wanted: np.ndarray) -> Int64Array:
    """Returns the times before which given amounts lie.

    Args:
        first, last: begin and end of each span, both inclusive, ms since the epoch, int64, (spans,); at least one.
        size: the amount in each span, float64, (spans,).
        wanted: the amounts, float64, (times,), ascending.

    Returns:
        ms since the epoch, int64, (times,), ascending; the end of the last span for amounts above the total.
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
