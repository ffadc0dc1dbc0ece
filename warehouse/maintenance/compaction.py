"""Merges a table's files into few, sorted by time: a log-structured merge with size tiers.

A sorted run is a set of files that do not overlap in time; each file that the job appends is a run by itself. Runs of
about the same size (a tier) are merged as soon as there are FAN_IN of them. So a row is written once per tier, whatever
the number of pending messages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from tracker.messages import BoolArray, Int64Array, int64, where
from warehouse.delta.engine import LOCAL, Engine
from warehouse.maintenance.table_files import DataFile, TableFiles, TableFolder, new_run
from warehouse.spans import times_of

# This many runs of a tier are merged into one. So up to seven runs of each tier overlap: with 5,000 rows in each seal,
# 42 runs for 1.3 billion rows.
FAN_IN = 8

# The size of a full file: small enough to sort it in memory and to read its footer in some ms.
FILE_ROWS = 500_000
FILE_BYTES = 64 << 20

# The maximum number of runs in one merge. Each file that a merge writes takes a row group or two of every run: with
# full files 1.7 times the rows that are written, with a thousand runs 12 times.
MERGED_AT_ONCE = 64

# The columns by which rows of the same time are sorted, the last one first.
_ORDER = ("batch_index", "entry_id", "ledger_id")


@dataclass(frozen=True)
class Run:
    """A sorted run, existing or planned.

    Attributes:
        files: the run's files, which do not overlap in time; of a planned run the files to be merged.
        merges: whether the run is planned.
        parts: the number of existing runs that it is made of.
    """

    files: tuple[DataFile, ...]
    merges: bool = False
    parts: int = 1

    @property
    def size(self) -> float:
        """The run's size in full files, by rows (FILE_ROWS) or by bytes (FILE_BYTES), whichever is more."""
        return max(sum(f.rows for f in self.files) / FILE_ROWS, sum(f.n_bytes for f in self.files) / FILE_BYTES)

    @property
    def tier(self) -> int:
        """The logarithm of the size to the base FAN_IN, rounded down; 0 or more: the run has at least a full file."""
        return math.floor(math.log(max(self.size, 1e-9), FAN_IN))


def plan(files: Iterable[DataFile], now: int | None, max_overlap: int) -> list[list[DataFile]]:
    """Chooses the files that are to be merged with each other.

    Args:
        now: time, ms since the epoch; files whose rows were all due before it are not read by time any more, and are
            merged only while they are small. None: there are no such files.
        max_overlap: the maximum number of other runs that may have a file over the same time.

    Returns:
        groups of files, from at most MERGED_AT_ONCE runs each, to be merged into one run each. When all are merged,
        another plan may find more.
    """
    runs: dict[tuple[bool, str], list[DataFile]] = {}
    for file in files:
        runs.setdefault((now is not None and file.last < now, file.run), []).append(file)
    past = [Run(tuple(run_files)) for (is_past, _), run_files in runs.items() if is_past]
    coming = _merge_tiers([Run(tuple(run_files)) for (is_past, _), run_files in runs.items() if not is_past])
    while overlap(coming) > max(max_overlap, 1):
        coming.sort(key=lambda run: run.size)
        n = int(np.searchsorted(np.cumsum([run.parts for run in coming[:FAN_IN]]), MERGED_AT_ONCE, "right"))
        if n < 2:
            break
        coming = [_merged(coming[:n]), *coming[n:]]
    done = _merge_tiers([run for run in past if run.tier < 0])
    return [list(run.files) for run in (*coming, *done) if run.merges]


def _merge_tiers(runs: list[Run]) -> list[Run]:
    tiers: dict[int, list[Run]] = {}
    for run in runs:
        tiers.setdefault(run.tier, []).append(run)
    settled: list[Run] = []
    while tiers:
        tier = min(tiers)
        tier_runs = tiers.pop(tier)
        # Full files are merged only if they overlap, smaller ones already because there are many.
        if (len(tier_runs) if tier < 0 else overlap(tier_runs)) >= FAN_IN:
            for merged in map(_merged, _divided(tier_runs)):
                if merged.tier > tier:
                    tiers.setdefault(merged.tier, []).append(merged)
                else:
                    settled.append(merged)
        else:
            settled += tier_runs
    return settled


def _divided(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Divides runs, by their first times, into few groups of about the same size, at most MERGED_AT_ONCE parts each."""
    left = sum(run.parts for run in runs)
    at_once = left / math.ceil(left / MERGED_AT_ONCE)
    group: list[Run] = []
    n = 0
    for run in sorted(runs, key=lambda run: min(file.first for file in run.files)):
        if group and n + run.parts > at_once + 0.5:
            yield group
            group, n = [], 0
        group.append(run)
        n += run.parts
    yield group


def _merged(runs: Sequence[Run]) -> Run:
    if len(runs) == 1:
        return runs[0]
    return Run(tuple(file for run in runs for file in run.files), True, sum(run.parts for run in runs))


def overlap(runs: Iterable[Run]) -> int:
    """Returns the greatest number of runs that have a file over the same time."""
    events: list[tuple[int, int]] = []
    for run in runs:
        spans = [(f.first, f.last) for f in run.files]
        if run.merges:
            spans = [(min(first for first, _ in spans), max(last for _, last in spans))]
        for first, last in spans:
            events += [(first, 0), (last, 1)]
    depth = deepest = 0
    for _, is_end in sorted(events):
        depth += -1 if is_end else 1
        deepest = max(deepest, depth)
    return deepest


def merge(
    table: TableFiles,
    files: Sequence[DataFile],
    on_rows: Callable[[int], None] = lambda rows: None,
    engine: Engine = LOCAL,
) -> bool:
    """Merges files into one sorted run, in one commit.

    Args:
        on_rows: called with the number of rows of each written file.
        engine: sorts and writes the files.

    Returns:
        whether it was done; False if some of the files were removed in the meantime.
    """
    folder = table.folder
    footers = {file.path: _footer(folder, file.path) for file in files}
    groups = RowGroups.of(files, footers, folder.time)
    added = []
    for written in engine.each(_SliceWriter(folder, new_run(), footers), slices(groups)):
        for action, rows in written:
            added.append(action)
            on_rows(rows)
    return table.replace(files, added)


@dataclass(frozen=True)
class RowGroups:
    """The row groups of some files.

    Attributes:
        paths: paths of the files.
        file: index in `paths` of each group's file, int64, (groups,).
        number: the group's number in its file, int64, (groups,).
        first, last: the group's least and greatest time, ms since the epoch, int64, (groups,).
        size: the group's size in full files, float64, (groups,).
    """

    paths: list[str]
    file: Int64Array
    number: Int64Array
    first: Int64Array
    last: Int64Array
    size: np.ndarray

    @staticmethod
    def of(files: Sequence[DataFile], footers: Mapping[str, pq.FileMetaData], time: str) -> RowGroups:
        """Returns the row groups of some files from their footers; `time` is the name of the time column."""
        rows: list[tuple[int, int, int, int]] = []
        sizes: list[float] = []
        for place, file in enumerate(files):
            metadata = footers[file.path]
            column = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(time)
            for number in range(metadata.num_row_groups):
                group = metadata.row_group(number)
                bounds = group.column(column).statistics
                first, last = (bounds.min, bounds.max) if bounds and bounds.has_min_max else (file.first, file.last)
                rows.append((place, number, first, last))
                sizes.append(max(group.num_rows / FILE_ROWS, group.total_byte_size / FILE_BYTES))
        file_numbers, numbers, firsts, lasts = np.array(rows, np.int64).reshape(-1, 4).T
        return RowGroups([file.path for file in files], file_numbers, numbers, firsts, lasts, np.array(sizes))


@dataclass(frozen=True)
class Slice:
    """The rows with a time in [start, end) of some row groups: about a full file.

    Attributes:
        groups: the numbers of the row groups, by path of their file.
    """

    start: int
    end: int
    groups: dict[str, list[int]]


def slices(groups: RowGroups) -> list[Slice]:
    """Divides the rows of row groups by time into slices of about a full file each."""
    edges = _edges(groups)
    from_, to = (np.searchsorted(edges, times, "right") - 1 for times in (groups.first, groups.last))
    n = to - from_ + 1  # the number of slices that have rows of a row group
    group = np.repeat(np.arange(len(n)), n)
    place = np.arange(len(group)) - np.repeat(np.cumsum(n) - n, n) + from_[group]
    group = group[np.argsort(place, kind="stable")]
    ends = np.cumsum(np.bincount(place, minlength=len(edges) - 1))
    found = []
    for (start, end), slice_groups in zip(itertools.pairwise(edges.tolist()), np.split(group, ends[:-1]), strict=True):
        wanted: dict[str, list[int]] = {}
        for file, number in zip(groups.file[slice_groups].tolist(), groups.number[slice_groups].tolist(), strict=True):
            wanted.setdefault(groups.paths[file], []).append(number)
        found.append(Slice(start, end, wanted))
    return found


def _edges(groups: RowGroups) -> Int64Array:
    """Returns the times at which slices begin and end, int64, (slices + 1,), as if row groups were evenly filled."""
    begin, end = int(groups.first.min()), int(groups.last.max()) + 1
    # A slice is a little less than a full file, so that an uneven one seldom becomes two files.
    wanted = np.arange(1, math.ceil(groups.size.sum() / 0.9)) * 0.9
    cuts = times_of(groups.first, groups.last, groups.size, wanted)
    return np.unique(np.concatenate([[begin], cuts[(cuts > begin) & (cuts < end)], [end]]))


class _SliceWriter:
    """Writes the rows of slices, sorted, as files of a run. Rows of the same time may be in two files.

    Args:
        footers: the footers of the merged files, by path. They are not pickled: a task reads those that it needs.
    """

    def __init__(self, folder: TableFolder, run: str, footers: Mapping[str, pq.FileMetaData]) -> None:
        self._folder = folder
        self._run = run
        self._footers = footers

    def __reduce__(self) -> tuple[Any, ...]:
        return _SliceWriter, (self._folder, self._run, {})

    def __call__(self, part: Slice) -> list[tuple[AddAction, int]]:
        """Returns for each written file the action that adds it, and the number of its rows."""
        places, pieces = self._pieces(part)
        n = int(pieces.max(initial=-1)) + 1
        return [self._written(self._piece(part, places, pieces == number)) for number in range(n)]

    def _piece(self, part: Slice, places: Mapping[tuple[str, int], int], is_chosen: BoolArray) -> pa.Table:
        """Reads and sorts a piece of a slice: the chosen ones of its rows, by row group, bool, (rows,)."""
        parts, start = [], 0
        for path, numbers in part.groups.items():
            with self._folder.open(path, self._footers.get(path)) as file:
                for number in numbers:
                    chosen = is_chosen[start : start + places[path, number]]
                    start += len(chosen)
                    if chosen.any():
                        rows = self._folder.complete(file.read_row_group(number, use_threads=False))
                        parts.append(where(rows, chosen))
        return _in_order(pa.concat_tables(parts), self._folder.time)

    def _written(self, rows: pa.Table) -> tuple[AddAction, int]:
        return self._folder.write(rows, self._run), rows.num_rows

    def _pieces(self, part: Slice) -> tuple[dict[tuple[str, int], int], Int64Array]:
        """Divides a slice into pieces of a full file each, in order: very many bytes may have the same time.

        Returns:
            by path and number of the slice's row groups how many rows they have; and the number of each row's piece,
            int64, (rows,), by row group; -1: its time is not in the slice.
        """
        names = [name for name in (*_ORDER, self._folder.time) if name in self._folder.columns]
        places: dict[tuple[str, int], int] = {}
        keys, sizes = [], []
        for path, numbers in part.groups.items():
            with self._folder.open(path, self._footers.get(path)) as file:
                for number in numbers:
                    rows = file.read_row_group(number, columns=[*names, "payload_bytes"], use_threads=False)
                    keys.append(self._folder.cast(rows.select(names)))
                    places[path, number] = rows.num_rows
                    sizes.append(_sizes(rows, file.metadata.row_group(number).total_byte_size))
        rows, n_bytes = pa.concat_tables(keys), np.concatenate(sizes)
        times = int64(rows, self._folder.time)
        order = np.lexsort([int64(rows, name) for name in names])
        order = order[(times[order] >= part.start) & (times[order] < part.end)]
        pieces = np.full(rows.num_rows, -1, np.int64)
        n = max(math.ceil(len(order) / FILE_ROWS), math.ceil(n_bytes[order].sum() / FILE_BYTES))
        step = n_bytes[order].sum() / max(1, n) + 1
        by_bytes = ((np.cumsum(n_bytes[order]) - n_bytes[order]) // step).astype(np.int64)
        pieces[order] = np.unique(by_bytes, return_inverse=True)[1]
        return places, pieces


def _footer(folder: TableFolder, path: str) -> pq.FileMetaData:
    with folder.open(path) as parquet:
        return parquet.metadata


def _sizes(rows: pa.Table, n_bytes: int) -> Int64Array:
    """Returns about the bytes of each row of a row group that has so many bytes together, int64, (rows,)."""
    even = n_bytes // max(1, rows.num_rows)
    if "payload_bytes" not in rows.column_names:
        return np.full(rows.num_rows, even, np.int64)
    payloads: Int64Array = pc.fill_null(rows["payload_bytes"], even).to_numpy().astype(np.int64)
    payloads += max(0, n_bytes - int(payloads.sum())) // max(1, rows.num_rows)
    return payloads


def _in_order(rows: pa.Table, time: str) -> pa.Table:
    keys = [int64(rows, name) for name in (*_ORDER, time) if name in rows.column_names]
    return rows.take(pa.array(np.lexsort(keys))).combine_chunks()
