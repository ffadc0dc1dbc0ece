"""Copies the warehouse's tables to another place while the job runs, so that they can be rebuilt from there.

A run chooses a version of each table, copies the data files that the backup lacks, brings each table of the backup to
the chosen version in one commit, and writes the marker last. So the versions in the marker go together and have all
their files, even if a run is broken off.

Versions are chosen in the reverse of the order in which the tables are written: `imported` first, which has a job as
imported after `entries` has its message, then `entries`, which gets messages after the other tables. So the versions
are as after a crash between two commits, except that some tables may have rows that are too new. A rebuild can deal
with these, and a repeated import does not write them again: the transactions of imports are copied, too.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from filelock import FileLock, Timeout

from broker.jvm.jars import cache_folder
from conf.errors import DelayLakeError, one_line
from conf.settings import Settings, is_object_storage, local_path
from status.job_status import FILE as STATUS_FILE
from warehouse.backup.marker import Marker, read_marker, write_marker
from warehouse.delta.commits import commit_next, force_commits, last_transactions, mend_log
from warehouse.delta.fencing import EPOCH
from warehouse.delta.log_cleanup import shorten_log
from warehouse.delta.opening import open_newest, open_table
from warehouse.delta.tables import OnProgress, Tables
from warehouse.schemas import IMPORT, MOVED_AT, PLACES, STATISTICS, VERSION_OF
from warehouse.storage import Storage

# The data files of a version by their paths, as `files_of` returns them.
Files = Mapping[str, AddAction]


def files_of(table: DeltaTable) -> dict[str, AddAction]:
    """Returns the data files of a table's version, by path, as actions that add them with their statistics."""
    found = pa.table(table.get_add_actions(flatten=False)).to_pylist()
    return {
        row["path"]: AddAction(
            row["path"], row["size_bytes"], {}, row["modification_time"], True, json.dumps(_statistics(row))
        )
        for row in found
    }


def change_to(table: DeltaTable, files: Files, transactions: Mapping[str, int]) -> bool:
    """Makes a table consist of these data files, in one commit: the very next version after the one that is open.

    Args:
        files: files that are in the table's folder already.
        transactions: the numbers of the transactions that the commit carries, by app id.

    Returns:
        whether there was anything to change; False: nothing was committed.

    Raises:
        CommitFailedError: somebody else has committed in the meantime.
    """
    version = table.version()
    present = files_of(table)
    new = [action for path, action in files.items() if path not in present]
    now = time.time_ns() // 1_000_000
    gone = [RemoveAction(path, True, now, action.size, {}) for path, action in present.items() if path not in files]
    done = last_transactions(table)
    transactions = {app: number for app, number in transactions.items() if done.get(app) != number}
    if not new and not gone and not transactions:
        force_commits(table)  # a run that was killed may have made the last one
        return False

    def is_next(table: DeltaTable) -> bool:
        if table.version() != version:
            raise CommitFailedError(f"{table.table_uri} has a version after {version}")
        return True

    return commit_next(
        table,
        transactions,
        is_next,
        lambda properties: table.create_write_transaction(
            [*new, *gone], "append", table.schema(), commit_properties=properties
        ),
    )


def imports_of(table: DeltaTable) -> dict[str, int]:
    """Returns the numbers of the last writes of imports to a table's version, by app id."""
    return {app: number for app, number in last_transactions(table).items() if app.startswith(IMPORT)}


def _statistics(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"numRecords": row["num_records"]}
    for name, column in (("minValues", "min"), ("maxValues", "max"), ("nullCount", "null_count")):
        found[name] = {key: value for key, value in (row.get(column) or {}).items() if value is not None}
    return found


# The tables that each warehouse has.
_ALWAYS = ("entries", "delayed_index", "outcomes", "deliveries", "rejects")

# The order in which versions are chosen. That of the tables after the first four does not matter.
_FIRST = ("imported", *_ALWAYS)
CHOSEN = (*_FIRST, *sorted(STATISTICS.keys() - set(_FIRST)))

# App id of a transaction in each table of a backup that became a warehouse: further backups refuse to write there.
RESTORED = "delaylake-restored"

# How often versions are chosen, if the warehouse deletes their files more quickly than they are copied.
_ATTEMPTS = 5


class BackupError(DelayLakeError):
    """The warehouse can't be copied. The message is one line."""


@dataclass
class CopiedTable:
    """A table in a run of a backup: the version's files, and those that were copied (or would be, in a dry run)."""

    table: str
    version: int  # in the warehouse
    files: int
    bytes: int
    files_copied: int = 0
    bytes_copied: int = 0


@dataclass
class BackupReport:
    """The effect of a run, or what a dry run would do. Times are ms since the epoch.

    Attributes:
        made_at: when the versions to be copied were chosen.
        newest_entry_at: publish time of the copy's newest entry; None: it has no entries.
        files_deleted: the number of files of earlier runs that were deleted because no version needs them any more.
    """

    target: str
    dry_run: bool
    made_at: int
    newest_entry_at: int | None
    tables: list[CopiedTable]
    files_deleted: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Version:
    """The newest version of a table of the warehouse."""

    table: DeltaTable
    files: Files
    imports: Mapping[str, int]  # as `imports_of`

    @staticmethod
    def of(warehouse: str, name: str) -> _Version | None:
        try:
            table = open_table(warehouse, name)
        except TableNotFoundError:
            return None
        return _Version(table, files_of(table), imports_of(table))


def back_up(
    settings: Settings, target: str, dry_run: bool = False, on_progress: OnProgress = lambda table, step, rows: None
) -> BackupReport:
    """Makes a place a copy of the warehouse, or brings an earlier copy there up to date. The job may run meanwhile.

    Args:
        target: a folder or URI, empty or with a backup of the warehouse.
        dry_run: changes nothing, and reports what would be copied.
        on_progress: called as files are copied.

    Raises:
        BackupError: the warehouse has no tables or is a backup itself; or the target is in use otherwise, or can't be
            read or written.
        NotABackupError: the target's marker can't be read.
    """
    try:
        return _Backup(settings, target, on_progress).run(dry_run)
    except CommitFailedError:
        raise BackupError(f"somebody else writes the tables in {target}: is another backup, or a job, there?") from None
    except (OSError, DeltaError) as error:
        raise BackupError(f"the warehouse can't be copied to {target}: {one_line(error)}") from error


class _Backup:
    def __init__(self, settings: Settings, target: str, on_progress: OnProgress) -> None:
        self._settings = settings
        self._source, self._target = local_path(settings.warehouse), local_path(target)
        self._on_progress = on_progress
        self._from, self._to = Storage(settings.warehouse), Storage(target)
        self._tables = Tables(target)
        self._copied: dict[str, list[int]] = {}  # by table the sizes of the files that were copied, bytes
        self._made_at = 0

    def run(self, dry_run: bool) -> BackupReport:
        started = time.monotonic()
        self._check()
        versions, deleted = self._choose(), 0
        if dry_run:
            self._check_tables()
            self._copied = {name: list(self._missing(name, one).values()) for name, one in versions.items()}
        else:
            with _alone(self._target):
                marker = self._check()  # again: a rebuild there may have ended just now
                for name in CHOSEN:  # a loss of power may have torn them
                    mend_log(self._tables.path(name))
                self._check_tables()
                if not marker.made_at:  # first: an incomplete copy must not look like a warehouse
                    write_marker(self._target, marker)
                deleted, versions = self._copy(marker, versions)
        return BackupReport(
            self._target,
            dry_run,
            self._made_at,
            _newest(versions["entries"].table),
            [self._of_table(name, one) for name, one in versions.items()],
            deleted,
            round(time.monotonic() - started, 3),
        )

    def _check(self) -> Marker:
        """Makes sure that the source is a warehouse, and the target a backup of it, or empty."""
        target = f"{self._target.rstrip('/')}/"
        for what, place in (("warehouse", self._source), ("checkpoint", local_path(self._settings.checkpoint))):
            used = f"{place.rstrip('/')}/"
            if used.startswith(target) or target.startswith(used):
                raise BackupError(f"{self._target} and the {what} {place} lie in each other: choose another place")
        if read_marker(self._settings.warehouse) is not None:
            raise BackupError(f"the warehouse {self._source} is a backup: `delaylake rebuild` makes it a warehouse")
        marker = read_marker(self._target)
        if marker is None:
            if any(self._to.sizes(f"{name}/_delta_log") for name in CHOSEN):
                raise BackupError(f"{self._target} is a warehouse, and no backup: choose an empty place")
            return Marker(self._source)
        if marker.source != self._source:
            raise BackupError(f"{self._target} is a backup of {marker.source}: choose an empty place")
        return marker

    def _check_tables(self) -> None:
        """Makes sure that the target was not restored."""
        for name in CHOSEN:
            if self._to.sizes(f"{name}/_delta_log"):
                self._check_not_restored(self._tables.written(name, RESTORED))

    def _choose(self) -> dict[str, _Version]:
        """Chooses the newest version of each table, while no import begins or ends a part.

        An import writes a part to `imported` first. A restored warehouse whose `imported` lacks a part that its other
        tables have would import these items again.
        """
        for _ in range(_ATTEMPTS):
            self._made_at = time.time_ns() // 1_000_000
            versions = {name: _Version.of(self._source, name) for name in CHOSEN}
            found = {name: one for name, one in versions.items() if one is not None}
            if missing := [name for name in _ALWAYS if name not in found]:
                raise BackupError(self._settings.no_tables(missing[0]))
            if _number(found.get("imported")) == _number(_Version.of(self._source, "imported")):
                return found
        raise BackupError("an import writes to the warehouse all the time: run the backup when it has ended")

    def _copy(self, marker: Marker, versions: dict[str, _Version]) -> tuple[int, dict[str, _Version]]:
        deleted = self._delete_unneeded(marker, versions)
        for attempt in range(_ATTEMPTS):
            try:
                for name, one in versions.items():
                    self._copy_files(name, one)
                break
            except FileNotFoundError:  # the chosen version is too old by now
                if attempt == _ATTEMPTS - 1:
                    raise BackupError(
                        "the warehouse deletes old files more quickly than they are copied: set "
                        "maintain.keep_versions_millis to more than a backup takes"
                    ) from None
                versions = self._choose()
        opened = {name: self._commit(name, versions[name]) for name in reversed(versions)}
        if (status := self._from.read(STATUS_FILE)) is not None:
            self._to.write(STATUS_FILE, status)  # only this file tells a rebuild of missing routes
        for name in opened:
            self._check_not_restored(self._tables.written(name, RESTORED))
        # Another machine's lock for the same object storage is not this one's.
        if gone := [name for name, one in versions.items() if self._missing(name, one)]:
            raise BackupError(f"files of {gone[0]} are gone from {self._target}: is another backup there? Run it again")
        tables = {name: int(table.version()) for name, table in opened.items()}
        write_marker(self._target, Marker(self._source, self._made_at, tables))
        for table in opened.values():
            shorten_log(table)
        return deleted, versions

    def _delete_unneeded(self, marker: Marker, versions: dict[str, _Version]) -> int:
        """Deletes files of older versions, and files left by a run that was killed.

        Files of the newest version of each table of the backup, of the marker's, and of the chosen one stay.

        Returns:
            the number of deleted files.
        """
        deleted = 0
        for name, one in versions.items():
            present = self._to.sizes(name)
            if not present:
                continue
            needed = set(one.files)
            if self._to.sizes(f"{name}/_delta_log"):
                # Looked at after the folder was: what a rebuild, or a job, writes there since is not in `present`.
                self._check_not_restored(self._tables.written(name, RESTORED))
                needed |= files_of(DeltaTable(self._tables.path(name))).keys()
                with suppress(DeltaError):  # a loss of power may have taken the version
                    needed |= files_of(DeltaTable(self._tables.path(name), version=marker.tables.get(name))).keys()
            for file in present.keys() - needed:
                self._to.delete(f"{name}/{file}")
                deleted += 1
        return deleted

    def _missing(self, name: str, version: _Version) -> dict[str, int]:
        """Returns the files of a version that the backup lacks, and their sizes, bytes."""
        present = self._to.sizes(name)
        return {path: file.size for path, file in version.files.items() if present.get(path) != file.size}

    def _copy_files(self, name: str, version: _Version) -> None:
        copied = self._copied.setdefault(name, [])
        missing = self._missing(name, version)
        for path, size in missing.items():
            self._to.copy_from(self._from, f"{name}/{path}")
            copied.append(size)
            self._on_progress(name, "bytes copied", sum(copied))
        if missing:
            self._to.sync(name)

    def _commit(self, name: str, version: _Version) -> DeltaTable:
        """Brings a table of the backup to a version whose files have been copied."""
        schema = pa.schema(version.table.schema().to_arrow())
        self._tables.create({name: schema}, self._settings.maintain.keep_versions_millis)
        table = open_newest(self._tables.path(name))
        self._check_not_restored(table.transaction_version(RESTORED))
        numbers = {app: version.table.transaction_version(app) for app in (EPOCH, VERSION_OF, PLACES, MOVED_AT)}
        carried = {app: n for app, n in numbers.items() if n is not None}
        change_to(table, version.files, {**carried, **version.imports})
        return table

    def _check_not_restored(self, number: int | None) -> None:
        if (number or 0) > 0:
            raise BackupError(f"{self._target} was restored, and is a warehouse of its own: choose an empty place")

    def _of_table(self, name: str, version: _Version) -> CopiedTable:
        sizes = [file.size for file in version.files.values()]
        copied = self._copied.get(name, [])
        return CopiedTable(name, int(version.table.version()), len(sizes), sum(sizes), len(copied), sum(copied))


@contextmanager
def _alone(target: str) -> Iterator[None]:
    """Locks out other backups while the block runs; if the target is a folder, maintenance and rebuilds there, too."""
    if is_object_storage(target):
        file = cache_folder() / f"backup-{hashlib.sha256(target.encode()).hexdigest()[:16]}.lock"
    else:
        file = Path(local_path(target), "maintain.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(file).acquire(timeout=0):
            yield
    except Timeout:
        raise BackupError(f"another backup to {target}, or a rebuild there, is under way: wait for its end") from None


def _number(version: _Version | None) -> int:
    return -1 if version is None else int(version.table.version())


def _newest(entries: DeltaTable) -> int | None:
    files = pa.table(entries.get_add_actions(flatten=True))
    times = files["max.publish_time"] if "max.publish_time" in files.column_names else pa.nulls(0)
    return None if times.null_count == len(times) else int(pc.max(times).as_py())
