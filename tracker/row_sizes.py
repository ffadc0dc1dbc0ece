"""How many bytes rows have, and cuts of tables by bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.messages import Int64Array

# Rows with a payload from this size on are large: of these the bytes are bounded, too, and not their number alone.
LARGE_BYTES = 4096

# The most rows of a release: a row's place in it has 22 bits in its sequence id.
MAX_RELEASE_ROWS = 1 << 20

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


def in_parts(rows: pa.Table) -> Iterator[pa.Table]:
    """Yields a table's rows in parts of at most PART_ROWS rows and about PART_BYTES bytes; a row is in one part."""
    if rows.num_rows <= PART_ROWS and rows.nbytes <= PART_BYTES:
        if rows.num_rows:
            yield rows
        return
    sizes, start = row_sizes(rows), 0
    while start < len(sizes):
        end = start + fitting(sizes[start : start + PART_ROWS], PART_BYTES)
        yield rows.slice(start, end - start)
        start = end


class Budget(NamedTuple):
    """What rows may have together.

    Attributes:
        rows: their number.
        n_bytes: about their bytes.
    """

    rows: int
    n_bytes: int

    @property
    def is_spent(self) -> bool:
        """Whether it has nothing left."""
        return self.rows <= 0 or self.n_bytes <= 0

    def of(self, rows: pa.Table) -> tuple[int, Budget]:
        """Returns how many of the first rows fit, at least one while it is not spent, and what it has left."""
        if self.is_spent:
            return 0, self
        sizes = row_sizes(rows)
        n = fitting(sizes[: self.rows], self.n_bytes)
        return n, Budget(self.rows - n, self.n_bytes - int(sizes[:n].sum()))
