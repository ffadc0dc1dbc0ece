"""Groups of rows with the same values in several columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tracker.messages import Int64Array

_SMALL = 1 << 16  # values in a range up to this are looked up in a table; others are sorted


def groups_of(*columns: npt.NDArray[Any]) -> tuple[Int64Array, Int64Array]:
    """Numbers the groups of rows that have the same values, in the order in which they first occur.

    Args:
        columns: integers or bools, each (rows,).

    Returns:
        int64, (rows,): the group of each row; int64, (groups,): the index of the first row of each.
    """
    n = len(columns[0])
    groups, many = np.zeros(n, np.int64), 1
    for column in columns:
        if n and (column != column[0]).any():
            numbers, k = _numbered(column.astype(np.int64))
            groups, many = _numbered(groups * k + numbers)
    first = np.zeros(many if n else 0, np.int64)
    first[groups[::-1]] = np.arange(n)[::-1]  # the last one that is written stays
    order = np.argsort(first)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return ranks[groups], first[order]


def _numbered(values: Int64Array) -> tuple[Int64Array, int]:
    """Numbers values without gaps: the number of each, int64, (rows,), and how many there are."""
    least, most = int(values.min()), int(values.max())
    if most - least >= _SMALL:
        found, numbers = np.unique(values, return_inverse=True)
        return numbers, len(found)
    occurs = np.zeros(most - least + 1, np.int64)
    occurs[values - least] = 1
    return (np.cumsum(occurs) - 1)[values - least], int(occurs.sum())
