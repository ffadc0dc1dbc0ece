"""A lost checkpoint while a destination can't be written: what it has not got is handed out again, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.tracker.messages import TOPIC, handed_out, messages, tick_at
from tests.support.warehouse.rebuilt import of_all_shards, of_one_shard, prepared
from tracker.messages import in_order, typed
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.tick import TickInput
from warehouse.delta.tables import Tables
from warehouse.queries.drained_rows import first_rounds
from warehouse.queries.index_rows import cancels_to_index, read_segment, to_index
from warehouse.schemas import DELIVERIES, SCHEMAS

NOW = 1_790_000_000_000
NAMES = ["a", "b"]


class Service:
    """One shard, and the tables that its job writes; a folder for the checkpoint that a rebuild makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = of_one_shard(folder, TOPIC, NAMES)
        self.tables = Tables(self.settings.warehouse)
        self.tables.create()
        self.store = MemoryStore()
        self.tick = 0
        self.near = NOW + 500

    def step(self, at: int, rows: pa.Table | None = None, **changes: Any) -> list[tuple[int, int]]:
        """A tick at a time; returns entries and subscription masks of what is handed out."""
        of_tick = {name: changes.pop(name) for name in ("confirmed", "unwritable", "load_horizon") if name in changes}
        return self.apply(at, TickInput(messages=messages([]) if rows is None else rows, **changes), **of_tick)

    def apply(self, at: int, tick_input: TickInput, load_horizon: int = 1_000, **of_tick: Any) -> list[tuple[int, int]]:
        self.tick += 1
        cutoff = NOW + at
        tick = tick_at(self.tick, cutoff, load_horizon=cutoff + load_horizon, **of_tick)
        effects = Shard(self.store, {TOPIC: NAMES}, 1_000_000).apply(tick, tick_input)
        for rows in (to_index(in_order(effects.bucket), self.tick), cancels_to_index(effects.cancels, self.tick)):
            if rows.num_rows:
                self.tables.append("delayed_index", rows, {})
        return handed_out(effects)

    def deliver(self, name: str, *entries: int) -> None:
        rows = messages([(1, entry, NOW) for entry in entries])
        values = {column: rows[column] for column in rows.column_names if column in DELIVERIES.names}
        n = len(entries)
        values |= {
            "subscription": pa.array([name] * n),
            "sent_at": rows["deliver_at"],
            "batch_id": pa.repeat(self.tick, n),
        }
        self.tables.append("deliveries", typed(values, DELIVERIES), {})

    def book(self, *entries: int) -> None:
        self.tables.append("entries", typed(messages([(1, entry, 0) for entry in entries]), SCHEMAS["entries"]), {})

    def lose_checkpoint(self, at: int) -> list[tuple[int, int]]:
        """What the first tick after a rebuild hands out."""
        found = prepared(self.settings, self.folder / f"checkpoint {at}", NOW + at)
        assert found.offset is not None
        self.store, self.tick = MemoryStore(), found.offset.tick
        version = self.tables.version("delayed_index")
        segment = read_segment(self.tables, version, found.offset.load_horizon, NOW + at + 1_000)
        drained, rounds = first_rounds(self.tables, version, [(TOPIC, name) for name in NAMES])
        return self.step(at, rebuilt=of_all_shards(found), segment=segment, drained=drained, rounds=rounds)


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


@pytest.mark.slow
def test_what_was_handed_out_and_what_was_held_back_goes_out_once_after_a_rebuild(service: Service) -> None:
    assert service.step(10, messages([(1, e, NOW + due) for e, due in enumerate((5, 6, 30, 40, 900))])) == [
        (0, 3),
        (1, 3),
    ]
    service.deliver("a", 0, 1)
    stuck = {TOPIC: {"b": {"open": [[1, 0]]}}}
    assert service.step(30, confirmed=1, unwritable=stuck) == [(2, 1)]
    service.deliver("a", 2)
    assert service.step(40, confirmed=2, unwritable=stuck) == [(3, 1)]
    service.deliver("a", 3)
    assert service.step(50, confirmed=3, unwritable=stuck) == []
    service.book(0, 1, 2, 3, 4)

    assert sorted(service.lose_checkpoint(100)) == [(0, 2), (1, 2), (2, 2), (3, 2)]
    service.deliver("b", 0, 1, 2)
    # Lost once more: of it all only what did not arrive.
    assert service.lose_checkpoint(200) == [(3, 2)]
    service.deliver("b", 3)
    assert service.lose_checkpoint(300) == []
    assert service.step(900, confirmed=service.tick) == [(4, 3)]
