"""Real Delta tables that are made of those in memory, and go on as these do."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa

from tests.simulation import tables as fake_tables
from tests.simulation.rebuilding import empty_tables
from warehouse.delta.opening import open_table

if TYPE_CHECKING:
    from tests.simulation.world import World


class Place:
    """A folder of Delta tables, as `Copy` has them: what is committed there is a side effect.

    Args:
        what: the name of the place.
    """

    def __init__(self, world: World, what: str) -> None:
        self._world, self.what = world, what
        self.folder = Path(tempfile.mkdtemp(prefix="delaylake-backup-", dir="/dev/shm"))

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
    """

    def __init__(self, world: World) -> None:
        super().__init__(world, "warehouse")
        shutil.copytree(empty_tables(), self.folder, dirs_exist_ok=True)
        self._brought: dict[str, list[fake_tables.Commit]] = {name: [] for name in world.logs}

    def bring(self, name: str) -> None:
        log, before = self._world.logs[name], self._brought[name]
        n = len(before)
        if len(log.commits) == n and all(map(_is_same, log.commits, before)):
            return
        new = log.commits[n:]
        is_longer = all(map(_is_same, log.commits, before)) and not any(commit.replaces for commit in new)
        if is_longer:
            parts = [commit.rows for commit in new if commit.rows is not None]
            rows = pa.concat_tables(parts) if parts else log.schema.empty_table()
        else:  # a power loss has taken some of them, or rows were deleted
            rows = log.rows(log.newest)
        numbers = log.transactions(log.newest)
        properties = deltalake.CommitProperties(
            app_transactions=[deltalake.Transaction(app, number) for app, number in numbers.items()]
        )
        mode = "append" if is_longer else "overwrite"
        deltalake.write_deltalake(open_table(self.uri, name), rows, mode=mode, commit_properties=properties)  # type: ignore[call-overload]
        self._brought[name] = [*log.commits]


def open_live(world: World, where: str, name: str, version: int | None = None) -> Any:
    """Stands in for `open_table` where a process reads live tables: it is a side effect, and brings the table first."""
    running = world.rebuilds.get(world.scheduler.process)  # type: ignore[arg-type]
    if running is not None and isinstance(running.copy, LiveTables) and name in world.logs:
        world.point(f"{running.copy.what}: {name} is opened")
        running.copy.bring(name)
    return open_table(where, name, version)


def _is_same(one: fake_tables.Commit, other: fake_tables.Commit) -> bool:
    return one is other
