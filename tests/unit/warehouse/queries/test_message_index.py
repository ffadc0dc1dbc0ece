"""Which message id an index has, after any number of retentions: the entry itself, or the earliest (PIP-415)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from deltalake import DeltaTable

from broker.entries.message_ids import MessageRef
from conf.settings import Settings
from tests.support.fuzzing.examples import examples
from tests.support.warehouse.tables import DAY, NOW, make, rows
from tests.unit.warehouse.maintenance.test_retention import KEPT
from warehouse.delta.tables import Tables
from warehouse.maintenance.maintain import maintain
from warehouse.queries.message_index import EXPIRED, MessageIndex, NoSuchIndexError

pytestmark = pytest.mark.slow

TOPIC = "persistent://public/default/t"


def write(tables: Tables, entries: dict[int, tuple[int, int]], pending: set[int], partition: int = -1) -> None:
    """Entries by id, two hours apart: first index and batch size; what is not pending was delivered long ago."""
    at = {"ledger_id": 10 + partition, "partition": partition}
    published = {e: NOW - 9 * DAY + e * DAY // 12 for e in entries}
    durable = [
        {**at, "publish_time": published[e], "entry_id": e, "first_index": f, "batch_size": n}
        for e, (f, n) in entries.items()
    ]
    tables.append("entries", rows("entries", durable), {})
    waiting = [{**at, "entry_id": e, "operation": "DELAY", "deliver_at": NOW + DAY} for e in pending]
    if waiting:
        tables.append("delayed_index", rows("delayed_index", waiting), {})


def settle(tables: Tables, entry_id: int, partition: int = -1) -> None:
    """Has a message removed from the delayed index, as when all have got it."""
    DeltaTable(tables.path("delayed_index")).delete(f"entry_id = {entry_id} AND partition = {partition}")


@pytest.fixture
def warehouse(tmp_path: Path) -> tuple[Settings, Tables]:
    return make(tmp_path, **KEPT)


def test_a_hole_that_retention_made_is_told_from_markers_of_the_broker(warehouse: tuple[Settings, Tables]) -> None:
    made, tables = warehouse
    # Index 20 is a marker; 14 to 16 are markers, too, after an entry that goes.
    entries = {e: (2 * e, 2) for e in range(7)} | {10: (17, 1), 11: (18, 2), 13: (21, 1), 14: (22, 1)}
    write(tables, entries, pending={0, 10, 13})
    index = MessageIndex(tables)

    def found(i: int) -> int | None:
        ref = index.find(TOPIC, -1, i)
        return None if ref == EXPIRED else ref.entry_id

    before = [found(i) for i in range(23)]
    assert before == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 10, 10, 10, 10, 11, 11, 13, 13, 14]
    maintain(made, now=NOW)
    left = tables.sql("SELECT entry_id FROM entries ORDER BY entry_id")["entry_id"].to_pylist()
    assert left == [0, 10, 13, 14]
    assert [found(i) for i in range(23)] == [0, 0, *[None] * 12, 10, 10, 10, 10, None, None, 13, 13, 14]
    settle(tables, 10)
    maintain(made, now=NOW)
    # What follows on the markers 14 to 16 has gone as well.
    assert [found(i) for i in range(23)] == [0, 0, *[None] * 18, 13, 13, 14]
    ranges = tables.query("expired", "SELECT first_index, end_index FROM expired").to_pylist()
    assert ranges == [{"first_index": 2, "end_index": 20}]
    settle(tables, 0)
    maintain(made, now=NOW)
    assert [found(i) for i in range(23)] == [*[None] * 20, 13, 13, 14]
    with pytest.raises(NoSuchIndexError):
        found(23)


@pytest.mark.parametrize("seed", range(examples(8)))
def test_an_index_is_found_as_a_naive_reading_has_it(warehouse: tuple[Settings, Tables], seed: int) -> None:
    made, tables = warehouse
    chance = random.Random(seed)
    topics: dict[int, dict[int, tuple[int, int]]] = {}
    pending = {}
    for partition in (0, 1):
        index = 0
        topics[partition] = {}
        for entry in range(16):
            size = chance.choice([1, 1, 2, 5])
            if chance.random() < 0.8:  # else a marker
                topics[partition][entry] = index, size
            index += size if entry in topics[partition] else 1
        pending[partition] = {e for e in topics[partition] if chance.random() < 0.4}
        write(tables, topics[partition], pending[partition], partition)
    index_ = MessageIndex(tables)
    while True:
        maintain(made, now=NOW)
        for partition, entries in topics.items():
            kept = pending[partition] | {max(entries)}
            end = sum(entries[max(entries)])
            for i in range(end):
                following = min(e for e, (first, size) in entries.items() if first + size > i)
                # What is before the first entry that was ever in the table may have been removed elsewhere.
                is_known = following in kept and i >= entries[min(entries)][0]
                expected = MessageRef(10 + partition, following, partition) if is_known else EXPIRED
                assert index_.find(TOPIC, partition, i) == expected, (partition, i)
        if not any(pending.values()):
            break
        for partition in (0, 1):
            for entry in sorted(pending[partition])[:: chance.choice([1, 2])]:
                settle(tables, entry, partition)
                pending[partition].discard(entry)
