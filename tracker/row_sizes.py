"""How many bytes rows have, and cuts of tables by bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.messages import BoolArray, Int64Array

# Rows with a payload from this size on are large: of these the bytes are bounded, too, and not their number alone.
LARGE_BYTES = 4096

PART_ROWS = 20_000  # the most rows in a packed value, so that rows of state and shuffle stay of moderate size
PART_BYTES = 8 << 20  # likewise about the most bytes: Spark's JVM holds several copies of a value at a time


def payload_sizes(rows: pa.Table) -> Int64Array:
    """Returns the bytes of each row's payload, int64, (rows,); 0: there is none."""
    if not rows.num_rows or "payload" not in rows.column_names:
        return np.zeros(rows.num_rows, np.int64)
    sizes: Int64Array = pc.fill_null(pc.binary_length(rows["payload"]), 0).to_numpy().astype(np.int64)
    return sizes


def row_sizes(rows: pa.Table) -> Int64Array:
    """Returns about how many bytes each row has, int64, (rows,): its payload, an equal share of the other columns."""
    sizes = payload_sizes(rows)
    others = max(0, int(rows.nbytes) - int(sizes.sum()))
    all_columns: Int64Array = sizes + others // max(1, rows.num_rows)
    return all_columns


def fitting(sizes: Int64Array, most: int) -> int:
    """Returns how many of the first rows have at most so many bytes together; at least one, if there are rows.

    Args:
        sizes: int64, (rows,): bytes of each row.
        most: bytes.
    """
    return min(len(sizes), max(1, int(np.searchsorted(np.cumsum(sizes), most, "right"))))


def in_parts(rows: pa.Table, most_rows: int = PART_ROWS) -> Iterator[pa.Table]:
    """Yields a table's rows in parts of at most so many rows and about PART_BYTES bytes; a row is in one part."""
    if rows.num_rows <= most_rows and rows.nbytes <= PART_BYTES:
        if rows.num_rows:
            yield rows
        return
    sizes, start = row_sizes(rows), 0
    while start < len(sizes):
        end = start + fitting(sizes[start : start + most_rows], PART_BYTES)
        yield rows.slice(start, end - start)
        start = end


# The most rows of a release: a row's place in it has 22 bits in its sequence id.
_RELEASE_ROWS = 1 << 20


class Budget:
    """What the rows of a release may have together. Large rows that do not fit are left for a later one.

    So are the last of very many rows, because a row's place in a release has a field of fixed width.

    Args:
        n_bytes: about the bytes of large rows. At least one of them fits.
        are_large: tells which rows are large: bool, (rows,).
    """

    def __init__(self, n_bytes: int, are_large: Callable[[pa.Table], BoolArray]) -> None:
        self._left = n_bytes
        self._rows_left = _RELEASE_ROWS
        self._are_large = are_large

    def fitting(self, rows: pa.Table) -> BoolArray:
        """Tells which rows fit, bool, (rows,): of the large ones the first; what they have is taken off the budget."""
        large = self._are_large(rows)
        fits: BoolArray = ~large
        if large.any() and self._left > 0:
            sizes = row_sizes(rows)[large]
            n = fitting(sizes, self._left)
            fits[np.flatnonzero(large)[:n]] = True
            self._left -= int(sizes[:n].sum())
        fits &= np.cumsum(fits) <= self._rows_left
        self._rows_left -= int(fits.sum())
        return fits
