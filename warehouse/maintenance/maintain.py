"""Keeps the tables compact beside the running job: merges files, deletes rows that nobody needs, vacuums."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
from filelock import FileLock, Timeout

from conf.errors import DelayLakeError
from conf.files import make_folder
from conf.settings import Settings, is_object_storage, local_path
from warehouse.backup.marker import read_marker
from warehouse.delta.checkpoint_hint import newest_commit
from warehouse.delta.engine import LOCAL, Engine
from warehouse.delta.log_cleanup import shorten_log
from warehouse.delta.opening import open_newest
from warehouse.delta.tables import OnProgress, Tables, exists
from warehouse.maintenance.compaction import merge, plan
from warehouse.maintenance.refusals import REFUSALS, maintain_refusals, refusals_need_maintenance
from warehouse.maintenance.retention import Excess, Retention, remove
from warehouse.maintenance.statistics import complete_statistics
from warehouse.maintenance.table_files import DataFile, TableFiles
from warehouse.queries import expired

# A row here is deleted only when a run before has deleted the row of a later table that it accounts for.
ORDER = ["deliveries", "outcomes", "rejects", "delayed_index", "entries"]

# The tables that a run maintains; REFUSALS only where it is there.
MAINTAINED = [*ORDER, REFUSALS]

# The number of rows in the files of about one commit of `_remove`.
_ROWS_A_COMMIT = 5_000_000


class MaintenanceError(DelayLakeError):
    """The tables can't be maintained. The message is one line."""


class UnderWayError(MaintenanceError):
    """Another process maintains or rebuilds the tables now."""


@dataclass
class TableReport:
    """The effect of a run on a table; in a dry run what it would do, with files and bytes as they are."""

    table: str
    files_before: int
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    files_merged: int = 0
    rows_deleted: int = 0
    files_vacuumed: int = 0
    vacuum_put_off: bool = False  # the job has stood still for long, and may still read an old version
    seconds: float = 0.0


def lock(settings: Settings) -> FileLock:
    """Returns the lock that a process holds while it removes rows or files of the tables.

    The system releases it when the process dies.

    Raises:
        FolderError: its folder can't be made or written.
    """
    name = "checkpoint" if is_object_storage(settings.warehouse) else "warehouse"
    folder = Path(local_path(getattr(settings, name)))
    make_folder(folder, name)
    return FileLock(folder / "maintain.lock")


def needs_maintenance(settings: Settings, tables: Tables) -> bool:
    """Whether the job has appended enough files to a table since its last merge to make another one worthwhile."""
    return any(
        sum(not file.is_part for file in TableFiles(tables, name).all()) >= settings.maintain.min_small_files
        for name in ORDER
    ) or refusals_need_maintenance(settings)


def newest_commits(settings: Settings) -> dict[str, int]:
    """Returns the newest version of each table; -1: there is none. As long as they stay, no table needs more merges.

    Raises:
        OSError: the warehouse can't be read.
    """
    tables = Tables(settings.warehouse)
    return {name: newest_commit(tables.path(name)) for name in MAINTAINED}


class Extent(StrEnum):
    """How much of maintenance is done."""

    ALL = "all"
    MERGES = "merges"  # no rows are deleted, and nothing is vacuumed
    NOTHING = "nothing"  # a report says what would be done


def maintain(
    settings: Settings,
    names: Sequence[str] = MAINTAINED,
    extent: Extent = Extent.ALL,
    on_progress: OnProgress = lambda table, step, rows: None,
    now: int | None = None,
    engine: Engine = LOCAL,
) -> list[TableReport]:
    """Maintains tables, one after another: merges files, deletes rows that nobody needs, vacuums.

    The job may run meanwhile. A run that is killed leaves the tables whole, with what it has committed.

    Args:
        names: the tables.
        extent: how much of that is done.
        on_progress: called as files are merged and rows deleted.
        now: ms since the epoch; None: the current time.
        engine: reads, sorts and writes the files; this process plans and commits.

    Returns:
        a report for each table.

    Raises:
        UnderWayError: another process maintains or rebuilds the tables.
        MaintenanceError: a table is missing, or somebody else has removed files at the same time.
        OutdatedError: the run has taken longer than old versions are kept.
        FencedError: somebody else has taken the warehouse over.
    """
    given = now

    def clock() -> int:
        return time.time_ns() // 1_000_000 if given is None else given

    now = clock()
    dry_run = extent is Extent.NOTHING
    try:
        with lock(settings).acquire(timeout=0):
            tables = Tables(settings.warehouse)
            if missing := [name for name in ORDER if not exists(settings.warehouse, name)]:
                raise MaintenanceError(settings.no_tables(missing[0]))
            if read_marker(settings.warehouse) is not None:
                raise MaintenanceError(
                    f"the warehouse {settings.warehouse} is a backup, which the next run looks after"
                )
            tables.join()
            retention = None if extent is Extent.MERGES else Retention(settings, tables, now)
            each = (_Maintenance(settings, tables, name, clock, on_progress, engine) for name in names if name in ORDER)
            reports = [maintenance.run(retention, dry_run) for maintenance in each]
            if REFUSALS in names and not dry_run and exists(settings.warehouse, REFUSALS):
                reports.append(_maintain_refusals(settings, tables, now, extent is Extent.MERGES))
            return reports
    except Timeout:
        raise UnderWayError("maintenance or a rebuild is under way already: wait for its end") from None


def _maintain_refusals(settings: Settings, tables: Tables, now: int, merges_only: bool) -> TableReport:
    started = time.monotonic()
    files, n_bytes = _size(tables)
    report = TableReport(REFUSALS, files, bytes_before=n_bytes)
    report.files_merged, report.rows_deleted, report.files_vacuumed = maintain_refusals(settings, now, merges_only)
    report.files_after, report.bytes_after = _size(tables)
    report.seconds = round(time.monotonic() - started, 3)
    return report


def _size(tables: Tables) -> tuple[int, int]:
    """Returns the numbers of files and bytes of the table `refusals`."""
    files = pa.table(open_newest(tables.path(REFUSALS)).get_add_actions(flatten=True))
    return files.num_rows, sum(files["size_bytes"].to_pylist())


class _Maintenance:
    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        name: str,
        clock: Callable[[], int],
        on_progress: OnProgress,
        engine: Engine,
    ) -> None:
        self._settings = settings
        self._tables = tables
        self._name = name
        self._clock = clock
        self._on_progress = on_progress
        self._engine = engine
        self._files = TableFiles(tables, name, settings.tracker.max_indexes_per_bucket_snapshot_segment)

    def run(self, retention: Retention | None, dry_run: bool) -> TableReport:
        started = time.monotonic()
        before = self._files.all()
        report = TableReport(self._name, len(before), bytes_before=sum(file.n_bytes for file in before))
        known = {file.path for file in before}
        while groups := self._plan(known):
            report.files_merged += sum(len(group) for group in groups)
            if dry_run:
                break
            self._merge(groups)
        if not dry_run:
            self._complete_statistics()
        if retention is not None:
            report.rows_deleted = self._remove(retention, dry_run)
            # Not by the time of the start: the machine may have stood still since, and the job with it.
            report.vacuum_put_off = is_paused(self._settings, self._clock())
            if not report.vacuum_put_off:
                report.files_vacuumed = self._vacuum(dry_run)
        after = self._files.all()
        report.files_after, report.bytes_after = len(after), sum(file.n_bytes for file in after)
        report.seconds = round(time.monotonic() - started, 3)
        return report

    def _plan(self, known: set[str]) -> list[list[DataFile]]:
        """Plans merges of the files that were there at the start (`known`), and of those that this run has written.

        Files that the job has appended since are left to the next run: it may append faster than files are merged.
        """
        files = [file for file in self._files.all() if file.is_part or file.path in known]
        # Only the delayed index is read by time, and only what comes due.
        past = self._clock() if self._name == "delayed_index" else None
        # Half of the allowed overlap, because files will be appended until the next run.
        return plan(files, past, self._settings.tracker.max_num_buckets // 2)

    def _merge(self, groups: list[list[DataFile]]) -> None:
        rows = 0

        def count(n: int) -> None:
            nonlocal rows
            rows += n
            self._on_progress(self._name, "rows merged", rows)

        for group in groups:
            if not merge(self._files, group, count, self._engine.of(sum(file.rows for file in group))):
                raise self._conflict()

    def _complete_statistics(self) -> None:
        done = 0

        def count(n: int) -> None:
            nonlocal done
            done += n
            self._on_progress(self._name, "files that got statistics", done)

        complete_statistics(self._tables, self._files, count)

    def _remove(self, retention: Retention, dry_run: bool) -> int:
        deleted = 0
        excess: list[Excess] = []

        def commit() -> None:
            nonlocal deleted
            if not dry_run:
                if self._name == "entries":
                    expired.record(self._tables, pa.concat_tables(found.expired for found in excess))
                if not remove(self._files, excess):
                    raise self._conflict()
            deleted += sum(found.rows for found in excess)
            self._on_progress(self._name, "rows deleted", deleted)
            excess.clear()

        for found in retention.excess(self._files, writes=not dry_run, engine=self._engine):
            excess.append(found)
            if sum(e.file.rows for e in excess) >= _ROWS_A_COMMIT:
                commit()
        if excess:
            commit()
        return deleted

    def _conflict(self) -> MaintenanceError:
        return MaintenanceError(f"{self._name}: somebody else has removed files at the same time: try again later")

    def _vacuum(self, dry_run: bool) -> int:
        """Deletes data files and log files that only expired versions need; returns the number of data files."""
        table = self._files.table
        # A full vacuum lists the folder: the log forgets removed files at a checkpoint.
        found = len(table.vacuum(dry_run=True, full=True))
        if not dry_run:
            if found:
                table.vacuum(dry_run=False, full=True)
                self._files.update()
            shorten_log(table)
        return found


def is_paused(settings: Settings, now: int) -> bool:
    """Whether the job has stood still for so long that a vacuum might delete the versions named in its last batch.

    The job reads these again when it goes on.

    Args:
        now: the current time, ms since the epoch.
    """
    offsets = Path(local_path(settings.checkpoint)) / "query" / "offsets"
    newest = max((int(file.name) for file in offsets.glob("[0-9]*") if file.name.isdigit()), default=None)
    if newest is None:
        return False
    last_batch = json.loads((offsets / str(newest)).read_text().splitlines()[-1])["now"]
    return bool(now - last_batch > settings.maintain.keep_versions_millis / 2)
