"""A rebuild in a simulation: the real code, on real Delta tables that are made of those in memory.

What it commits the tables in memory have at once. From when it overtakes on, nobody else writes to them: a commit of
somebody who was overtaken meanwhile is refused, as the tables' epoch does it.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa

import checkpoint_from_tables.new_checkpoint
import checkpoint_from_tables.rebuild.destinations
import checkpoint_from_tables.rebuild.rejected
from checkpoint_from_tables.new_checkpoint import rebuild_checkpoint
from checkpoint_from_tables.rebuild.context import Reports
from conf.settings import Settings
from streaming.checkpoint.checkpoint import checkpoint_lock
from tests.simulation import tables as fake_tables
from tests.simulation.broker import Admin
from warehouse.delta.commits import last_transactions
from warehouse.delta.fencing import EPOCH, FencedError
from warehouse.delta.opening import open_table
from warehouse.delta.snapshot import query_builder, run_sql
from warehouse.delta.tables import Tables
from warehouse.schemas import VERSION, VERSION_OF

if TYPE_CHECKING:
    from tests.simulation.world import World

create_tables = Tables.create
check_epoch = Tables.check_epoch
_wait_for_overtaken = checkpoint_from_tables.new_checkpoint._wait_for_overtaken


class Copy:
    """The tables in memory, as Delta tables of which one rebuild makes its checkpoint.

    Args:
        logs: the tables in memory, by name.
        on_replaced: called with a table's name and all its rows.
        point: called with the name of a side effect.
    """

    def __init__(
        self,
        logs: dict[str, fake_tables.Log],
        on_replaced: Callable[[str, pa.Table], None],
        point: Callable[[str], None],
    ) -> None:
        self._on_replaced = on_replaced
        self.folder = Path(tempfile.mkdtemp(prefix="delaylake-rebuild-", dir="/dev/shm"))
        self._logs, self._point = logs, point
        self._epoch: int | None = None  # once it has overtaken
        self._at: dict[str, int] = {}  # the version of each table in memory that the copy has
        shutil.copytree(empty_tables(), self.folder, dirs_exist_ok=True)
        self._bring()

    @property
    def has_overtaken(self) -> bool:
        return self._epoch is not None

    def overtake(self) -> None:
        """Begins the epoch, which the copy has already, in the tables in memory.

        Raises:
            FencedError: somebody else has begun it, or a later one.
        """
        epoch = self._open("entries").transaction_version(EPOCH) or 0
        for log in self._logs.values():
            newest = log.transaction(EPOCH, log.newest) or 0
            if newest >= epoch:
                raise FencedError(str(self.folder), epoch, newest)
        for log in self._logs.values():
            log.commits.append(fake_tables.Commit(None, {EPOCH: epoch, VERSION_OF: VERSION}))
            for version in range(log.forced_to, log.newest + 1):
                log.force(version)
        self._bring()
        self._epoch = epoch

    def committed(self, uri: str) -> None:
        """Brings what was committed to a table of the copy to the one in memory; it is on the disk.

        Raises:
            FencedError: somebody else has overtaken the rebuild. In memory nothing is committed.
        """
        log = self._logs[Path(uri).name]
        if self._epoch is None:
            return
        self.check_epoch(log.name)
        rows, transactions = self.rows(log.name), last_transactions(self._open(log.name))
        log.commits.append(fake_tables.Commit(rows, transactions, replaces=True))
        log.force(log.newest)
        self._on_replaced(log.name, rows)
        self._point(f"rebuild: {log.name} is written")

    def check_epoch(self, name: str) -> None:
        """Checks that nobody else has overtaken the rebuild, by a table in memory.

        Raises:
            FencedError: somebody has.
        """
        newest = self._logs[name].transaction(EPOCH, self._logs[name].newest) or 0
        if self._epoch is not None and newest > self._epoch:
            raise FencedError(str(self.folder), self._epoch, newest)

    def rows(self, name: str) -> pa.Table:
        """The rows that a table of the copy has now."""
        return sorted_rows(self._open(name), name, self._logs[name].schema)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self, name: str) -> deltalake.DeltaTable:
        return open_table(f"file:{self.folder}", name)

    def _bring(self) -> None:
        """Lets the copy have what the tables in memory have."""
        for name, log in self._logs.items():
            if self._at.get(name) == log.newest:
                continue
            self._at[name] = log.newest
            numbers = log.transactions(log.newest)
            properties = deltalake.CommitProperties(
                app_transactions=[deltalake.Transaction(app, number) for app, number in numbers.items()]
            )
            deltalake.write_deltalake(
                self._open(name), log.rows(log.newest), mode="overwrite", commit_properties=properties
            )


@cache
def empty_tables(keep_versions_millis: int = 6 * 3_600_000) -> Path:
    """Makes the tables, once in a process and outside of a simulation: a copy of them is there sooner than new ones."""
    folder = Path(tempfile.mkdtemp(prefix="delaylake-rebuild-", dir="/dev/shm"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    create_tables(Tables(f"file:{folder}"), keep_versions_millis=keep_versions_millis)
    return folder


def sorted_rows(table: deltalake.DeltaTable, name: str, schema: pa.Schema) -> pa.Table:
    """The rows of a table, in an order of their own: files are read in any."""
    rows = run_sql(query_builder({name: table}), f"SELECT * FROM {name}")
    return rows.select(schema.names).cast(schema).sort_by(_order(schema))


def _order(schema: pa.Schema) -> list[tuple[str, str]]:
    """The columns that can be compared, by which rows are sorted."""
    return [(field.name, "ascending") for field in schema if not pa.types.is_nested(field.type)]


class Rebuild:
    """A rebuild, as somebody runs it who reads what the job says."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.copy = Copy(world.logs, world.replaced, world.point)

    def run(self) -> dict[str, int]:
        settings: Settings = self._world.settings.model_copy(update={"warehouse": f"file:{self.copy.folder}"})
        return rebuild_checkpoint(settings, discards_checkpoint=True, reports=Reports(on_warning=self._world.trace))


def rebuild_names(world: World) -> dict[Any, dict[str, Any]]:
    """What stands in for brokers, and for what a rebuild asks of the job."""

    def wait_for_overtaken(*of: Any) -> None:
        world.rebuild_of().copy.overtake()
        _wait_for_overtaken(*of)

    def lock_at_once(folder: Path) -> Any:
        """That of the checkpoint; nobody waits for it, because here only simulated time goes by."""
        return SimpleNamespace(acquire=lambda timeout: checkpoint_lock(folder).acquire(timeout=0))

    of_broker = {"Brokers": lambda *_: world.new_brokers(), "AdminClient": lambda *_: Admin(world.cluster)}
    return {
        checkpoint_from_tables.new_checkpoint: {
            "checkpoint_lock": lock_at_once,
            "known_status": lambda _: world.status(),
            "_wait_for_overtaken": wait_for_overtaken,
        },
        checkpoint_from_tables.rebuild.destinations: of_broker,
        checkpoint_from_tables.rebuild.rejected: of_broker,
    }
