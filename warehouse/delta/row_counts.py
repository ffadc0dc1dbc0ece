"""Counts a table's rows by time, from the statistics of its files and row groups where these suffice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tracker.messages import BoolArray, Int64Array, int64
from warehouse.delta.parquet import column_statistics
from warehouse.delta.snapshot import Snapshot

_KINDS = ("min", "max", "null_count")


@dataclass(frozen=True)
class RowCounts:
    """Counts the rows of a table in bins of time.

    Attributes:
        time: name of an int64 column.
        start, end: only rows with a time in [start, end) count.
        equal: only rows with these values in other columns count.
        bin_of: returns the bins of times, both int64, (times,); must be monotonic.
    """

    time: str
    start: int
    end: int
    equal: Mapping[str, str | int]
    bin_of: Callable[[Int64Array], Int64Array]

    def count(self, snapshot: Snapshot, name: str) -> Counter[int]:
        """Returns the number of rows in each bin for a version of a table; bins without rows may be missing.

        A file that lies in one bin is counted by the log's statistics, a row group of the other files by their footers.
        The columns are read only for the remaining row groups.
        """
        files = snapshot.files(name)
        names = {f"{kind}.{column}": f"{kind}.{column}" for kind in _KINDS for column in self._columns}
        found, is_left = self._by_statistics(snapshot.known(name, {"rows": "num_records", **names}))
        for path in files["path"].filter(pa.array(is_left)).to_pylist():
            with snapshot.open(name, path) as file:
                found += self._of_file(file)
        return found

    def of_times(self, times: Int64Array) -> Counter[int]:
        """Returns the number of times, int64, (times,), in each bin; those outside [start, end) are left out."""
        bins, counts = np.unique(self.bin_of(times[(times >= self.start) & (times < self.end)]), return_counts=True)
        return Counter(dict(zip(bins.tolist(), counts.tolist(), strict=True)))

    @property
    def _columns(self) -> list[str]:
        return [self.time, *self.equal]

    def _of_file(self, file: pq.ParquetFile) -> Counter[int]:
        found, is_left = self._by_statistics(_of_row_groups(file.metadata, self._columns))
        rows = file.read_row_groups(np.flatnonzero(is_left).tolist(), columns=self._columns)
        for column, value in self.equal.items():
            rows = rows.filter(pc.equal(rows[column], value))
        return found + self.of_times(int64(rows.filter(pc.is_valid(rows[self.time])), self.time))

    def _by_statistics(self, parts: pa.Table) -> tuple[Counter[int], BoolArray]:
        """Counts files or row groups ("parts") by their statistics, where these suffice.

        Args:
            parts: a row for each part, with `rows`, and `min.`, `max.` and `null_count.` of each column; null: unknown.
                Long texts may be cut there: bounds that no row need have.

        Returns:
            the counts; and a mask, bool, (parts,), of the parts whose rows have to be read.
        """
        first, last, rows = (_or_zero(parts[n]) for n in (f"min.{self.time}", f"max.{self.time}", "rows"))
        bounded = _true(pc.and_(pc.is_valid(parts[f"min.{self.time}"]), pc.is_valid(parts[f"max.{self.time}"])))
        is_out = bounded & ((last < self.start) | (first >= self.end))
        is_whole = bounded & (first >= self.start) & (last < self.end) & (self.bin_of(first) == self.bin_of(last))
        is_whole &= _true(pc.is_valid(parts["rows"])) & _true(pc.equal(parts[f"null_count.{self.time}"], 0))
        for column, value in self.equal.items():
            type_ = pa.string() if isinstance(value, str) else pa.int64()
            least, greatest = (parts[f"{kind}.{column}"].cast(type_) for kind in ("min", "max"))
            nulls = parts[f"null_count.{column}"]
            is_out |= _true(pc.greater(least, value)) | _true(pc.less(greatest, value))
            is_whole &= _true(pc.equal(least, value)) & _true(pc.equal(greatest, value)) & _true(pc.equal(nulls, 0))
        found: Counter[int] = Counter()
        for bin_, n in zip(self.bin_of(first[is_whole]).tolist(), rows[is_whole].tolist(), strict=True):
            found[bin_] += n
        return found, ~is_out & ~is_whole


def _of_row_groups(footer: pq.FileMetaData, columns: list[str]) -> pa.Table:
    """Returns the statistics of a file's row groups from its footer, as `RowCounts._by_statistics` takes them."""
    found: dict[str, list[Any]] = {"rows": [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]}
    for column, chunks in column_statistics(footer, columns).items():
        is_known = [chunk is not None and chunk.has_min_max for chunk in chunks]
        found[f"min.{column}"] = [s.min if known else None for s, known in zip(chunks, is_known, strict=True)]
        found[f"max.{column}"] = [s.max if known else None for s, known in zip(chunks, is_known, strict=True)]
        found[f"null_count.{column}"] = [s.null_count if s is not None and s.has_null_count else None for s in chunks]
    return pa.table(found)


def _or_zero(values: pa.ChunkedArray) -> Int64Array:
    zeroed: Int64Array = values.cast(pa.int64()).fill_null(0).to_numpy()
    return zeroed


def _true(mask: pa.ChunkedArray) -> BoolArray:
    """Returns a mask with nulls as False: bool, (rows,)."""
    true: BoolArray = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
    return true
