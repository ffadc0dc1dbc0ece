"""Imports in a simulation: what waits in another system, the real code that imports it, and its account.

The other system stands in for Redis and the like. It promises what an import asks of each, and no more: it gives what
waits, each item with an id that stays; it may give one twice, in another order each time, and end before it has given
all (`other_systems.item.Source`, docs/coming-from.md).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import checkpoint_from_tables.other_systems.importing
from checkpoint_from_tables.importing.importer import Imported, Importer
from checkpoint_from_tables.new_checkpoint import import_and_rebuild
from checkpoint_from_tables.other_systems.importing import import_items
from checkpoint_from_tables.other_systems.item import Item, SourceError, rejected_item
from checkpoint_from_tables.rebuild.context import Reports
from tests.simulation.accounts import require
from tests.simulation.added import ADDED
from tests.simulation.expected import Arrival
from tests.simulation.rebuilding import Copy

if TYPE_CHECKING:
    from tests.simulation.world import World

_ITEMS_AT_ONCE = 3
_TWICE = 0.05  # of the items
_BAD = 0.1
_MOST_IMPORTS = 2
_DUE_MILLIS = (-2_000, 0, 2_500, 8_000, 20_000, 45_000)  # from when an item is there on
_FIRST_IMPORTED_LEDGER = 1 << 52  # docs/importing.md


def is_imported(position: str) -> bool:
    """Whether a message is of an import, by its id."""
    return int(position.partition(":")[0]) >= _FIRST_IMPORTED_LEDGER


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
            require(item is not None and item.reason == row["reason"], f"the item {row['payload']} is rejected")
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
    """What waits in another system, where users go on to add to it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = random.Random(f"imports {world.plan.seed}")
        self.are_made = self._random.random() < world.plan.rates.get("seeds with imports", 0.0)
        self._items: list[Item] = []
        self.left: Counter[str] = Counter()
        self.is_wanted = False  # somebody has begun an import, which is not done
        self.n_imports = 0

    def each_second(self, now: int) -> None:
        """Users add items."""
        for _ in range(self._random.choice([0, 0, 1, 2])):
            id = f"item:{len(self._items)}"
            if self._random.random() < _BAD:
                self._items.append(rejected_item(id, f"{id} can't be taken", id.encode()))
            else:
                self._items.append(Item(id, now + self._random.choice(_DUE_MILLIS), id.encode()))

    def may_begin(self) -> bool:
        """Whether somebody may begin another import."""
        return not self.is_wanted and self.n_imports < _MOST_IMPORTS

    def items(self) -> Iterator[Item]:
        world = self._world
        found = sorted(self._items, key=lambda one: (one.due or 0, one.id))
        if self._random.random() < 0.5:
            self._random.shuffle(found)
        world.oracle.imports.asked |= {one.payload: one for one in found if one.payload is not None}
        for one in found:
            world.point("import: an item is read")
            if world.faults.is_now("other system ends"):
                raise SourceError("the other system has ended")
            yield one
            if self._random.random() < _TWICE:
                yield one
        world.oracle.imports.imported |= {one.payload for one in found if one.payload is not None}


class Import:
    """An import, as somebody runs it who has stopped the job; it is run again until it is done."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.copy = Copy(world.logs, world.oracle.replaced, world.point)

    def run(self) -> Imported:
        world = self._world
        settings = world.settings.model_copy(update={"warehouse": f"file:{self.copy.folder}"})
        importer = Importer(settings, settings.routes[1].source)

        def bring_in(tables: Any) -> None:
            importer.tables = tables
            import_items(importer, world.other_system)

        import_and_rebuild(settings, True, bring_in, Reports(on_warning=world.trace))
        return importer.done


def import_names() -> dict[Any, dict[str, Any]]:
    """What is other in an import here: its parts are small."""
    return {checkpoint_from_tables.other_systems.importing: {"_ITEMS_AT_ONCE": _ITEMS_AT_ONCE}}
