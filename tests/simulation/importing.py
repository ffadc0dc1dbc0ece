"""Imports in a simulation: what waits elsewhere, the real code that imports it, and its account.

In some seeds it waits in another system, in others in another topic, or in files that users write.

The other system stands in for Redis and the like. It promises what an import asks of each, and no more: it gives what
waits, each item with an id that stays; it may give one twice, in another order each time, and end before it has given
all (`other_systems.item.Source`, docs/coming-from.md).
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import checkpoint_from_tables.importing.files
import checkpoint_from_tables.importing.topics
import checkpoint_from_tables.other_systems.importing
from broker.position import Position
from broker.protocol.building import OutgoingMessage, batch_entry, encoded_property, single_entry
from checkpoint_from_tables.importing.files import check_files, import_file
from checkpoint_from_tables.importing.importer import Imported, Importer
from checkpoint_from_tables.importing.topics import import_topic
from checkpoint_from_tables.new_checkpoint import import_and_rebuild
from checkpoint_from_tables.other_systems.importing import import_items
from checkpoint_from_tables.other_systems.item import Item, SourceError, rejected_item
from checkpoint_from_tables.rebuild.context import Reports
from tests.simulation.accounts import require
from tests.simulation.added import ADDED
from tests.simulation.broker import Admin, Client
from tests.simulation.expected import Arrival
from tests.simulation.rebuilding import Copy

if TYPE_CHECKING:
    from tests.simulation.world import World

_KINDS = {"system": 0.5, "topic": 0.3, "files": 0.2}  # of where it waits
TOPIC = "persistent://public/elsewhere/reminders"  # which is imported

_ITEMS_AT_ONCE = 3
_ROWS_AT_ONCE = 3
_TWICE = 0.05  # of the items
_BAD = 0.1
_MOST_IMPORTS = 2
_DUE_MILLIS = (-2_000, 0, 2_500, 8_000, 20_000, 45_000)  # from when an item is there on
_FIRST_IMPORTED_LEDGER = 1 << 52  # docs/importing.md


def is_imported(position: str) -> bool:
    """Whether a message is of an import, by its id."""
    return int(position.partition(":")[0]) >= _FIRST_IMPORTED_LEDGER


def as_imported(position: Position) -> Position:
    """Returns the position that an entry of TOPIC has when it is imported."""
    return Position(_FIRST_IMPORTED_LEDGER + position.ledger_id, position.entry_id)


@dataclass
class ImportedItems:
    """The account of items: each that an import has read comes once, or is in `rejects` once.

    Args:
        ahead_millis: returns by how much any machine's clock was ahead.
    """

    subscriptions: frozenset[str]
    ahead_millis: Callable[[], int]
    asked: dict[bytes, Item] = field(default_factory=dict)  # by payload: items that an import may have read
    imported: set[bytes] = field(default_factory=set)  # payloads of those that one has read whole
    came: Counter[tuple[bytes, str]] = field(default_factory=Counter)
    rejected: Counter[bytes] = field(default_factory=Counter)
    # Deliveries of items that a restored backup lacked: imported again they may come again.
    n_forgotten: Counter[tuple[bytes, str]] = field(default_factory=Counter)

    def restored(self, known: set[str]) -> None:
        """A backup is the warehouse now, which knows that these items, by id, were imported."""
        for (payload, name), n in self.came.items():
            if self.asked[payload].id not in known:
                self.n_forgotten[payload, name] = n

    def arrived(self, arrival: Arrival, now: int) -> None:
        """An item has come to a destination: never early, and once."""
        item, name = self.asked.get(arrival.payload), arrival.subscription
        what = f"{name} has got the item {arrival.payload!r}, {arrival.position}"
        require(item is not None and item.reason is None, f"{what}, which was not imported")
        assert item is not None
        early = (item.due or 0) - now - self.ahead_millis()
        require(early <= 0, f"{what}, {early} ms early")
        self.came[arrival.payload, name] += 1
        n, most = self.came[arrival.payload, name], 1 + self.n_forgotten[arrival.payload, name]
        require(n <= most or name == ADDED, f"{what}, {n} times")

    def stored(self, rows: list[dict[str, Any]]) -> None:
        """Rows of `rejects` are in the table for good."""
        for row in rows:
            item = self.asked.get(row["payload"])
            is_bad = item is not None and item.reason is not None and row["reason"].startswith(item.reason)
            require(is_bad, f"the item {row['payload']} is rejected: {row['reason']}")
            self.rejected[row["payload"]] += 1
            require(self.rejected[row["payload"]] == 1, f"the item {row['payload']} is in `rejects` twice")

    def replaced(self, rows: list[dict[str, Any]]) -> None:
        """`rejects` was written anew, with these rows of items."""
        self.rejected = Counter(row["payload"] for row in rows)

    def check_end(self) -> None:
        """Nothing waits any more."""
        for payload in sorted(self.imported):
            if self.asked[payload].reason is not None:
                require(self.rejected[payload] == 1, f"the item {payload!r} is not in `rejects`")
                continue
            for name in sorted(self.subscriptions):
                require(self.came[payload, name] >= 1, f"{name} has not got the item {payload!r}")


class OtherSystem:
    """What waits in another system, in a topic, or in files, where users go on to add to it.

    Attributes:
        kind: of _KINDS; with backups a system, as what was acknowledged in a topic is gone where a backup lacks it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = random.Random(f"imports {world.plan.seed}")
        is_seed = self._random.random() < world.plan.rates.get("seeds with imports", 0.0)
        self.are_made: bool = is_seed and not world.another_place.is_made
        [kind] = random.Random(f"imports from {world.plan.seed}").choices([*_KINDS], [*_KINDS.values()])
        self.kind = "system" if world.backups.are_made else kind
        self._items: list[Item] = []
        self._files: list[Path] = []
        self._n_in_files = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the files
        self.left: Counter[str] = Counter()
        self.is_wanted = False  # somebody has begun an import, which is not done
        self.n_imports = 0

    def each_second(self, now: int) -> None:
        """Users add items."""
        added: list[Item] = []
        for _ in range(self._random.choice([0, 0, 1, 2])):
            id = f"item:{len(self._items) + len(added)}"
            due = now + self._random.choice(_DUE_MILLIS)
            if self._random.random() >= _BAD:
                added.append(Item(id, due, id.encode()))
            elif self.kind == "system":
                added.append(rejected_item(id, f"{id} can't be taken", id.encode()))
            else:
                added.append(Item(id, -1, id.encode(), reason="deliver"))
        self._items += added
        if added and self.kind == "topic":
            messages = [
                OutgoingMessage(i, one.payload, [encoded_property("deliverAt", str(one.due))], None)
                for i, one in enumerate(added)
            ]
            entry = batch_entry(messages, b"user", now) if len(added) > 1 else single_entry(messages[0], b"user", now)
            self._world.cluster.publish(TOPIC, entry.data, len(added))
            self._note_asked(added)  # an import that runs reads it, too

    def remove(self) -> None:
        """Removes the files."""
        if self._folder is not None:
            self._folder.cleanup()

    def may_begin(self) -> bool:
        """Whether somebody may begin another import."""
        return not self.is_wanted and self.n_imports < _MOST_IMPORTS

    def bring_in(self, importer: Importer) -> None:
        """Imports what there is."""
        if self.kind == "system":
            import_items(importer, self)
            return
        found = [*self._items]
        if self.kind == "topic":
            import_topic(importer, TOPIC)
        else:
            self._note_asked(found)
            self._write_file()
            check_files(self._files)
            for file in self._files:
                import_file(importer, file)
        self._note_imported(found)

    def items(self) -> Iterator[Item]:
        world = self._world
        found = sorted(self._items, key=lambda one: (one.due or 0, one.id))
        if self._random.random() < 0.5:
            self._random.shuffle(found)
        self._note_asked(found)
        for one in found:
            world.point("import: an item is read")
            if world.faults.is_now("other system ends"):
                raise SourceError("the other system has ended")
            yield one
            if self._random.random() < _TWICE:
                yield one
        self._note_imported(found)

    def _note_asked(self, found: list[Item]) -> None:
        self._world.oracle.imports.asked |= {one.payload: one for one in found if one.payload is not None}

    def _note_imported(self, found: list[Item]) -> None:
        self._world.oracle.imports.imported |= {one.payload for one in found if one.payload is not None}

    def _write_file(self) -> None:
        """Writes what is in no file yet to another one."""
        added = self._items[self._n_in_files :]
        if added:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="delaylake-files-", dir="/dev/shm")
            columns = {"deliver_at": [one.due for one in added], "payload": [one.payload for one in added]}
            self._files.append(Path(self._folder.name) / f"{len(self._files)}.parquet")
            pq.write_table(pa.table(columns), self._files[-1])
            self._n_in_files += len(added)


class Import:
    """An import, as somebody runs it who has stopped the job; it is run again until it is done."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.copy = Copy(world.logs, world.replaced, world.point)

    def run(self) -> Imported:
        world = self._world
        settings = world.settings.model_copy(update={"warehouse": f"file:{self.copy.folder}"})
        importer = Importer(settings, settings.routes[1].source)

        def bring_in(tables: Any) -> None:
            importer.tables = tables
            world.other_system.bring_in(importer)

        import_and_rebuild(settings, True, bring_in, Reports(on_warning=world.trace))
        return importer.done


def import_names(world: World) -> dict[Any, dict[str, Any]]:
    """What is other in an import here: its parts are small, and it asks the simulated broker."""
    return {
        checkpoint_from_tables.other_systems.importing: {"_ITEMS_AT_ONCE": _ITEMS_AT_ONCE},
        checkpoint_from_tables.importing.files: {"_ROWS_AT_ONCE": _ROWS_AT_ONCE},
        checkpoint_from_tables.importing.topics: {
            "_MESSAGES_AT_ONCE": _ROWS_AT_ONCE,
            "connect": lambda _: Client(world.new_brokers()),
            "Brokers": lambda _: world.new_brokers(),
            "AdminClient": lambda _: Admin(world.cluster),
        },
    }
