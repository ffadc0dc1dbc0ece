"""Backups in a simulation, and what is restored of one: the real code, on real Delta tables in two places.

The warehouse that is backed up is that which is maintained meanwhile (`live_tables.py`): files are merged, and deleted
when they are old. In half of the seeds the place of the backup stands for object storage, which two machines write
without a lock between them: a commit there is put if absent ("Delta Log Entries" in Delta's PROTOCOL.md), as it is in a
folder. In some seeds it is slow: the warehouse may have deleted a file when it is to be copied.

A folder loses power in some seeds: what was not forced to its disk may be lost, and who writes there ends.
"""

from __future__ import annotations

import contextlib
import random
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock._api
import pyarrow as pa

import checkpoint_from_tables.restore.rewind
import warehouse.backup.copying
import warehouse.backup.marker
from checkpoint_from_tables.new_checkpoint import rebuild_checkpoint
from checkpoint_from_tables.rebuild.context import Reports
from tests.simulation import tables as fake_tables
from tests.simulation.accounts import require
from tests.simulation.broker import Admin
from tests.simulation.disk import Disk
from tests.simulation.live_tables import LiveTables, Place
from tests.simulation.rebuilding import sorted_rows
from tests.simulation.scheduler import STAND_INS, Process
from warehouse.backup.copying import BackupError, back_up
from warehouse.backup.marker import read_marker
from warehouse.delta.commits import last_transactions
from warehouse.delta.opening import open_table
from warehouse.storage import Storage

if TYPE_CHECKING:
    from tests.simulation.world import World

_ATTEMPTS = 5  # of a backup, at least, before it gives up for files that are deleted
_MOST_SECONDS_A_FILE = 6.0  # where it is slow

_lock_of_folder = warehouse.backup.copying._alone


class Backups:
    """What a timer and an operator do: backups to one place, and after a disaster the last one becomes the warehouse.

    Attributes:
        are_made: whether there are any in this seed.
        has_lock: whether the place of a backup is locked while somebody writes it.
        is_slow: whether it takes seconds to copy a file there.
        is_lost: the warehouse is gone, and was not restored yet.
        n_restored: so often a backup has become the warehouse.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        chance = random.Random(f"backup of seed {world.plan.seed}")
        self.are_made: bool = (
            chance.random() < world.plan.rates.get("seeds with backups", 0.0) or world.another_place.is_made
        )
        self.has_lock = chance.random() < 0.5
        self.is_slow = chance.random() < world.plan.rates.get("seeds with slow backups", 0.0)
        self._chance, self._lost = chance, random.Random(f"lost backup of seed {world.plan.seed}")
        self.is_lost = False
        self.n_restored = self._n = 0
        self._places: list[Place] = []
        self.source: LiveTables | None = None
        self.target: Place | None = None
        self._restored: set[Path] = set()
        self._made_at = 0  # of the newest backup that is done, ms since the epoch
        self._is_refused = False  # a backup to the newest place, which was restored: there is to be another one

    def begin(self) -> None:
        """The timer starts a backup, whether an earlier one still runs or not."""
        world = self._world
        if self.source is None or self._is_refused:
            self._is_refused = False
            self.source, self.target, self._made_at = world.live_tables(), Place(world, "backup"), 0
            self._places.append(self.target)
        self._n += 1
        process = Process(f"backup {self._n}")
        world.trace(f"{process.name} starts")
        world.scheduler.start(process, "main", partial(self._back_up, process))

    def _back_up(self, process: Process) -> None:
        world, source, target = self._world, self.source, self.target
        assert source is not None
        assert target is not None
        world.rebuilds[process] = Backup(target)
        why = "it is done"
        n_vacuums, n_backups = source.n_vacuums, self._n
        was_alone = sum(isinstance(one, Backup) for one in world.rebuilds.values()) == 1
        is_restored = target.folder in self._restored
        try:
            settings = world.settings.model_copy(update={"warehouse": source.uri})
            self._made_at = max(self._made_at, back_up(settings, target.uri).made_at)
            if is_restored:
                world.break_off(f"{process.name} has written to a warehouse that was restored")
        except BackupError as error:
            why = str(error)
            self._is_refused = is_restored and target is self.target
            self._check_given_up(why, source.n_vacuums - n_vacuums, was_alone and self._n == n_backups)
        finally:
            del world.rebuilds[process]
        world.trace(f"{process.name} ends: {self._short(why)}")
        world.end(process)

    def _check_given_up(self, why: str, n_vacuums: int, is_alone: bool) -> None:
        """A backup may give up for a deleted file only when it has begun again, and each time one was deleted.

        Args:
            is_alone: no other one has run meanwhile, which may delete files of the backup.
        """
        if "more quickly than they are copied" in why and n_vacuums < _ATTEMPTS:
            self._world.break_off(f"a backup gives up after {n_vacuums} vacuums: {self._short(why)}")
        if "can't be read" in why:
            self._world.break_off(f"a backup ends at what is torn: {self._short(why)}")
        if is_alone and "are gone from" in why:
            self._world.break_off(f"a backup goes on without files: {self._short(why)}")

    def copy_takes(self) -> float:
        """Returns how long a file takes, seconds."""
        return self._chance.uniform(0.0, _MOST_SECONDS_A_FILE) if self.is_slow else 0.0

    def has_one(self) -> bool:
        """Whether there is a backup that can be restored."""
        if self.target is None or self.target.folder in self._restored:
            return False
        marker = read_marker(self.target.uri)
        return marker is not None and marker.made_at > 0

    def lose_power(self) -> None:
        """The folder of the backup loses power, and all who write there end."""
        world, target = self._world, self.target
        if target is None or not self.has_lock:
            return
        for process in [process for process, one in world.rebuilds.items() if one.copy is target]:
            world.end(process)
        world.trace("the place of the backup loses power")
        for file in target.disk.lose_power(self._lost):
            world.trace(f"  lost or torn: {file}")

    def disk_of(self, path: Path) -> Disk | None:
        """The disk of a place that has a file; None: it is in none."""
        return next((place.disk for place in self._places if path.is_relative_to(place.folder)), None)

    def restore(self) -> None:
        """Makes the last backup the warehouse, as somebody does who has lost it, and has no job running."""
        world, target = self._world, self.target
        assert target is not None
        marker = read_marker(target.uri)
        is_newest = marker is None or marker.made_at >= self._made_at  # None: it was restored, but for the checkpoint
        require(is_newest, f"the backup of {self._made_at} is done, and the place has an older one")
        settings = world.settings.model_copy(update={"warehouse": target.uri})
        found = rebuild_checkpoint(
            settings,
            discards_checkpoint=True,
            reports=Reports(on_warning=world.trace),
            is_another_broker=world.another_place.is_there,
        )
        world.another_place.added = found.get("added_to_ledger_ids", 0)
        self._restored.add(target.folder)
        self.is_lost = False
        self.n_restored += 1
        world.trace(f"the backup is restored: {found}")
        for name, log in world.logs.items():
            table = open_table(target.uri, name)
            rows = sorted_rows(table, name, log.schema)
            world.logs[name] = new = fake_tables.Log(name, log.schema)
            new.commits.append(fake_tables.Commit(rows, last_transactions(table)))
            new.force(1)
            new.on_forced = log.on_forced
            log.on_forced = _nobody_hears

    def is_object_storage(self, uri: str) -> bool:
        """Whether tables are at a place without a lock: there nobody takes for torn what somebody else writes."""
        return not self.has_lock and any(str(place.folder) in uri for place in self._places)

    def remove(self) -> None:
        for place in self._places:
            place.remove()

    def _short(self, text: str) -> str:
        for place in (*self._places, *self._world.warehouses()):
            text = text.replace(str(place.folder), f"the {place.what}")
        return text


def _nobody_hears(name: str, rows: pa.Table) -> None:
    """The rows of a warehouse that is lost."""


class Backup:
    """A run of a backup."""

    def __init__(self, target: Place) -> None:
        self.copy = target


class Restore:
    """A run of a restore."""

    def __init__(self, world: World) -> None:
        assert world.backups.target is not None
        self.copy = world.backups.target
        self._world = world

    def run(self) -> None:
        self._world.backups.restore()


class _Storage(Storage):
    """The real one; what it changes is a side effect."""

    def __init__(self, world: World, uri: str) -> None:
        super().__init__(uri)
        self._world = world

    def copy_from(self, other: Storage, path: str) -> None:
        if seconds := self._world.backups.copy_takes():
            self._world.scheduler.wait(seconds)
        try:
            super().copy_from(other, path)
        except FileNotFoundError:
            self._world.trace(f"a backup finds no file any more of {path.partition('/')[0]}")
            raise
        self._world.point("backup: a file is copied")

    def delete(self, path: str) -> None:
        super().delete(path)
        self._world.point("backup: a file is deleted")

    def write(self, path: str, content: bytes) -> None:
        self._world.point(f"backup: {path}, before")
        super().write(path, content)
        self._world.point(f"backup: {path} is written")


def backup_names(world: World) -> dict[Any, dict[str, Any]]:
    """What stands in for what a backup, and a restore, have around them."""

    def open_source(where: str, name: str) -> Any:
        source = world.backups.source
        if source is not None and name in world.logs and where.endswith(str(source.folder)):
            world.point(f"backup: {name} is chosen")
            if not world.backups.is_lost and source is world.live_tables():
                source.bring(name)
        return open_table(where, name)

    def alone(target: str) -> Any:
        return _lock_of_folder(target) if world.backups.has_lock else contextlib.nullcontext()

    storage = partial(_Storage, world)
    return {
        warehouse.backup.copying: {"Storage": storage, "open_table": open_source, "_alone": alone},
        warehouse.backup.marker: {"Storage": storage},
        checkpoint_from_tables.restore.rewind: {"AdminClient": lambda *_: Admin(world.cluster, world.point)},
        filelock._api: {"time": STAND_INS[time]},
    }
