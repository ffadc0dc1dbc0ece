"""Real Delta tables that are made of those in memory, and go on as these do."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa

from tests.simulation import tables as fake_tables
from tests.simulation.accounts import require
from tests.simulation.disk import Disk
from tests.simulation.file_times import STRETCH, FileTimes
from tests.simulation.rebuilding import empty_tables, sorted_rows
from warehouse.delta.opening import open_table

if TYPE_CHECKING:
    from tests.simulation.retaining import Listing
    from tests.simulation.world import World

KEPT_MILLIS = 8_000  # of an old version of a table


class Place:
    """A folder of Delta tables, as `Copy` has them: what is committed there is a side effect.

    Args:
        what: the name of the place.
    """

    def __init__(self, world: World, what: str) -> None:
        self._world, self.what = world, what
        self.folder = Path(tempfile.mkdtemp(prefix="delaylake-backup-", dir="/dev/shm"))
        self.disk = Disk(self.folder, has_holes=True)

    @property
    def uri(self) -> str:
        return f"file:{self.folder}"

    def committed(self, uri: str) -> None:
        self._world.point(f"{self.what}: {Path(uri).name} is written")

    def overtake(self) -> None:
        pass  # nobody else is here

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class LiveTables(Place):
    """The warehouse, as Delta tables that have what those in memory had when they were last brought up to date.

    Before a table is opened it gets what has been committed meanwhile: so the job goes on between two tables.

    Attributes:
        listings: that somebody reads, page after page.
        n_vacuums: those that have deleted files.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world, "warehouse")
        self.listings: list[Listing] = []
        self.n_vacuums = 0
        shutil.copytree(empty_tables(KEPT_MILLIS * STRETCH), self.folder, dirs_exist_ok=True)
        self._brought: dict[str, list[fake_tables.Commit]] = {name: [] for name in world.logs}
        self._times = {name: FileTimes(self.folder / name) for name in world.logs}
        self.note_files()

    def bring(self, name: str, at_once: bool = False) -> None:
        """Commits to a table what those in memory have got: a commit each, or all rows in one commit."""
        log, before = self._world.logs[name], self._brought[name]
        n = len(before)
        if len(log.commits) == n and all(map(_is_same, log.commits, before)):
            return
        new, table = log.commits[n:], open_table(self.uri, name)
        if not at_once and all(map(_is_same, log.commits, before)) and not any(commit.replaces for commit in new):
            for commit in new:
                rows = log.schema.empty_table() if commit.rows is None else commit.rows
                _write(table, rows, "append", commit.transactions)
        else:  # a power loss has taken some of them, or rows were deleted
            _write(table, log.rows(log.newest), "overwrite", log.transactions(log.newest))
        self.has_brought(name)
        self.note_files()

    def has_brought(self, name: str) -> None:
        """The table has what the one in memory has."""
        self._brought[name] = [*self._world.logs[name].commits]

    def has_other_rows(self, name: str) -> None:
        """The table has other rows than the one in memory: it is written anew before it is opened next."""
        self._brought[name] = []

    def rows(self, name: str) -> pa.Table:
        """The rows that a table has now."""
        return sorted_rows(open_table(self.uri, name), name, self._world.logs[name].schema)

    def note_files(self) -> None:
        """Notes which files have come by now."""
        for times in self._times.values():
            times.note(self._world.scheduler.now)

    def vacuum(self, name: str, work: Callable[[], int]) -> int:
        """Vacuums a table by the simulated clock: what was needed within the time to keep is there after it."""
        times, now = self._times[name], self._world.scheduler.now
        times.set(now)
        before = times.files()
        current = {file.rpartition("/")[2] for file in open_table(self.uri, name).file_uris()}
        done = work()
        self.n_vacuums += done > 0
        kept_from = now - KEPT_MILLIS / 1000
        for file in sorted(before - times.files()):
            since = times.removed_at.get(file, times.written_at[file])
            require(file not in current, f"{file} of {name} is vacuumed, and the table has it")
            require(since <= kept_from, f"{file} of {name} is vacuumed {now - since:.1f} s after it was needed")
        times.note(now)
        return done


def open_live(world: World, where: str, name: str, version: int | None = None) -> Any:
    """Stands in for `open_table` where a process reads live tables: it is a side effect, and brings the table first."""
    running = world.rebuilds.get(world.scheduler.process)  # type: ignore[arg-type]
    if running is not None and isinstance(running.copy, LiveTables) and name in world.logs:
        world.point(f"{running.copy.what}: {name} is opened")
        running.copy.bring(name)
    return open_table(where, name, version)


def require_old(what: str, seconds: float, error: Exception) -> None:
    """A reader may be told that the version that it reads is gone, but only when it is older than versions are kept."""
    require(seconds > KEPT_MILLIS / 1000, f"{what}, begun {seconds:.1f} s before: {error}")


def _write(table: deltalake.DeltaTable, rows: pa.Table, mode: str, numbers: Mapping[str, int]) -> None:
    properties = deltalake.CommitProperties(
        app_transactions=[deltalake.Transaction(app, number) for app, number in numbers.items()]
    )
    deltalake.write_deltalake(table, rows, mode=mode, commit_properties=properties)  # type: ignore[call-overload]


def _is_same(one: fake_tables.Commit, other: fake_tables.Commit) -> bool:
    return one is other
