"""Simulates the planner of maintenance on a delayed index of many billions of rows, without the rows.

Runs of rows come in, each due evenly within a span of time. The planner of `warehouse/maintenance/compaction.py`
chooses what is merged, at so many rows a second, one merge after another; rows are removed by the rules of
`warehouse/maintenance/retention.py`. What is smaller than the runs that come in is not simulated (the files of single
seals, of which eight become one, and so on): a row is written `small_tiers` times before.

Prints one JSON object: files, runs that overlap, how often a row is written, the largest merge, the time of a plan;
and, of a real Delta table with as many files, the size of the log's checkpoint and the time to open it.

usage: python benchmarks/planner.py [--rows 100e9] [--days 365] [--span-days 30] [--step-minutes 60] [--runs-a-step 6]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from conf.settings import Settings
from warehouse.delta.tables import Tables
from warehouse.maintenance.compaction import FAN_IN, FILE_ROWS, Run, overlap, plan
from warehouse.maintenance.retention import _LEAST_PART, _SMALL_ROWS
from warehouse.maintenance.table_files import DataFile, new_run
from warehouse.schemas import SCHEMAS

MINUTE = 60_000
DAY = 24 * 60 * MINUTE


class Index:
    """The files of a delayed index, and what has been written to it."""

    def __init__(self, row_bytes: float) -> None:
        self._row_bytes = row_bytes
        self.files: list[DataFile] = []
        self.came = self.merged = self.rewritten = 0
        self.largest_merge = 0

    def add_run(self, first: int, last: int, rows: int) -> None:
        self.came += rows
        self.files += self._sorted_files([self._file("", first, last, rows)])

    def merge(self, group: Sequence[DataFile]) -> int:
        """Merges files into a run; returns its rows."""
        gone = {id(file) for file in group}
        self.files = [file for file in self.files if id(file) not in gone]
        self.files += self._sorted_files(group)
        rows = sum(file.rows for file in group)
        self.merged += rows
        self.largest_merge = max(self.largest_merge, rows)
        return rows

    def forget(self, horizon: int) -> None:
        """Removes the rows that were due before a time, as retention does."""
        kept = []
        for file in self.files:
            if file.first >= horizon:
                kept.append(file)
            elif file.last >= horizon:
                part = (horizon - file.first) / (file.last - file.first)
                if part >= _LEAST_PART or file.rows <= _SMALL_ROWS:
                    left = round(file.rows * (1 - part))
                    self.rewritten += left
                    file = self._file(file.run, horizon, file.last, left)
                kept.append(file)
        self.files = kept

    def _sorted_files(self, group: Sequence[DataFile]) -> list[DataFile]:
        """Files of nine tenths of FILE_ROWS each, as `merge` writes them, of rows spread evenly in each file."""
        first, last, rows = (np.array([getattr(f, name) for f in group], float) for name in ("first", "last", "rows"))
        density = rows / (last - first + 1)
        times = np.concatenate([first, last + 1])
        order = np.argsort(times, kind="stable")
        slope = np.cumsum(np.concatenate([density, -density])[order])
        times = times[order]
        before = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(times))])
        n = max(1, math.ceil(before[-1] / (0.9 * FILE_ROWS)))
        edges = np.interp(np.linspace(0, before[-1], n + 1), before, times).astype(np.int64)
        run, each = new_run(), int(rows.sum()) // n
        return [self._file(run, int(a), max(int(a), int(b) - 1), each) for a, b in itertools.pairwise(edges)]

    def _file(self, run: str, first: int, last: int, rows: int) -> DataFile:
        return DataFile(f"run-{run}-{new_run()}.parquet", int(rows * self._row_bytes), rows, first, last)


def simulate(arguments: argparse.Namespace) -> dict[str, object]:
    settings = Settings()
    index, step = Index(arguments.row_bytes), int(arguments.step_minutes * MINUTE)
    steps = int(arguments.days * DAY / step)
    rows = int(arguments.rows / steps / arguments.runs_a_step)
    span, busy_until = int(arguments.span_days * DAY), 0
    files, past, overlaps, plans, backlog = [], [], [], [], 0
    for now in range(step, (steps + 1) * step, step):
        for i in range(arguments.runs_a_step):
            begin = now - step + i * step // arguments.runs_a_step
            index.add_run(begin, begin + span, rows)
        index.forget(now - settings.retention.delayed_index_millis)
        if busy_until <= now:
            started = time.perf_counter()
            groups = plan(index.files, now, settings.tracker.max_num_buckets // 2)
            plans.append(time.perf_counter() - started)
            merging = sum(index.merge(group) for group in groups)
            busy_until = now + int(1000 * merging / arguments.merge_rows_per_second)
            backlog = max(backlog, busy_until - now)
        coming = [file for file in index.files if file.last >= now]
        files.append(len(index.files))
        past.append(len(index.files) - len(coming))
        if len(files) % arguments.every == 0:
            runs: dict[str, list[DataFile]] = {}
            for file in coming:
                runs.setdefault(file.run, []).append(file)
            overlaps.append(overlap(Run(tuple(of_run)) for of_run in runs.values()))
    rows_a_seal = index.came / (arguments.days * DAY) * settings.tracker.max_seal_interval_millis
    small = max(0, math.ceil(math.log(rows / rows_a_seal, FAN_IN)))
    pending = sum(file.rows for file in index.files if file.last >= now)
    last_month = files[-int(30 * DAY / step) :]
    written = (index.merged + index.rewritten) / index.came
    seal_seconds = settings.tracker.max_seal_interval_millis / 1000
    return {
        "rows": index.came,
        "days": arguments.days,
        "due_within_days": arguments.span_days,
        "rows_in_files_of_what_is_coming": pending,
        "files": {"max": max(files), "in_the_last_month": [min(last_month), max(last_month)], "past": past[-1]},
        "overlapping_runs": {"max": max(overlaps), "mean": round(float(np.mean(overlaps)), 1)},
        "write_amplification": {
            "small_tiers": small,
            "merges": round(index.merged / index.came, 2),
            "retention": round(index.rewritten / index.came, 2),
            "all": round(1 + small + written, 2),
        },
        "merge_hours_a_day": round(
            (small * index.came + index.merged) / arguments.merge_rows_per_second / 3600 / arguments.days, 2
        ),
        "largest_merge": {
            "rows": index.largest_merge,
            "hours": round(backlog / 3_600_000, 2),
            "seals_meanwhile": round(backlog / 1000 / seal_seconds),
        },
        "plan_millis": {"p50": _millis(np.median(plans)), "max": _millis(max(plans))},
        "log": {
            # What is older goes every hour; a commit a seal, and one a merge.
            "commits_kept": round(
                (settings.maintain.keep_versions_millis / 1000 + 3600) / seal_seconds * (1 + 1 / FAN_IN)
            ),
            **_checkpoint(index.files),
        },
    }


def _millis(seconds: float) -> float:
    return round(float(seconds) * 1000, 1)


def _checkpoint(files: Sequence[DataFile]) -> dict[str, object]:
    """The log's checkpoint of a real table that has such files, and how long it takes to open it."""
    with tempfile.TemporaryDirectory() as folder:
        tables = Tables(folder)
        tables.create({"delayed_index": SCHEMAS["delayed_index"]})
        table = DeltaTable(tables.path("delayed_index"))
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.n_bytes, {}, 0, True, _statistics(file)) for file in files
        ]
        table.create_write_transaction(actions, "append", table.schema())
        table.update_incremental()
        started = time.perf_counter()
        table.create_checkpoint()
        wrote = time.perf_counter()
        log = Path(table.table_uri.removeprefix("file://"), "_delta_log")
        size = sum(file.stat().st_size for file in log.glob("*.checkpoint.parquet"))
        for file in log.glob("*.json"):
            file.unlink()
        opening = time.perf_counter()
        DeltaTable(tables.path("delayed_index"))
        opened = time.perf_counter()
        return {
            "checkpoint_bytes": size,
            "checkpoint_write_millis": _millis(wrote - started),
            "open_millis": _millis(opened - opening),
        }


def _statistics(file: DataFile) -> str:
    names = {
        "partition": 0,
        "ledger_id": file.rows,
        "entry_id": file.first % 50_000,
        "topic": "persistent://t/n/orders",
    }
    bounds = [{"deliver_at": at, **names} for at in (file.first, file.last)]
    nulls = dict.fromkeys(bounds[0], 0)
    return json.dumps({"numRecords": file.rows, "minValues": bounds[0], "maxValues": bounds[1], "nullCount": nulls})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=100e9, help="in all")
    parser.add_argument("--days", type=float, default=365)
    parser.add_argument("--span-days", type=float, default=30, help="a row is due within so long")
    parser.add_argument("--step-minutes", type=float, default=60, help="from one plan to the next")
    parser.add_argument("--runs-a-step", type=int, default=6, help="that come in")
    parser.add_argument("--row-bytes", type=float, default=60, help="of a row in a file, with its payload")
    parser.add_argument("--merge-rows-per-second", type=float, default=750_000)
    parser.add_argument("--every", type=int, default=24, help="steps from one count of overlapping runs to the next")
    print(json.dumps(simulate(parser.parse_args())))
