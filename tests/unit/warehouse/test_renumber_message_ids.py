"""A warehouse gets another broker: its messages keep apart from those that come, and stay what they were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.position import Position
from conf.settings import Settings
from tests.support.fuzzing.examples import examples
from tests.support.warehouse.tables import HOUR, NOW, TOPIC, rows
from tracker.messages import FIRST_IMPORTED_LEDGER, PLACE_LEDGERS
from warehouse.audit.accounts import run_audit
from warehouse.backup.copying import back_up
from warehouse.delta.tables import Tables
from warehouse.message_schemas import COLUMNS, version_bytes
from warehouse.named_queries import Sql, literal
from warehouse.renumber_message_ids import PAIRS, Renumbering, next_place, renumber
from warehouse.routes.known_routes import KnownRoutes
from warehouse.routes.membership import Memberships, changes, write_changes
from warehouse.schemas import EXPIRED, MOVED_AT

FIRST = FIRST_IMPORTED_LEDGER + PLACE_LEDGERS
IMPORTED = FIRST_IMPORTED_LEDGER + 9


def pairs(*of: tuple[int, int, int, int]) -> pa.Table:
    return pa.table([pa.array(column, pa.int64()) for column in zip(*of, strict=True)], schema=PAIRS)


@given(
    st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 5)), max_size=20),
    st.dictionaries(
        st.tuples(st.integers(0, 5), st.integers(0, 5)), st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1
    ),
)
@settings(max_examples=examples(100), deadline=None)
def test_ids_are_those_of_the_pairs_or_moved_up(
    entries: list[tuple[int, int]], others: dict[tuple[int, int], tuple[int, int]]
) -> None:
    renumbering = Renumbering(1, pairs(*((*old, *new) for old, new in others.items())))
    ledgers, numbers = (np.array([entry[i] for entry in entries], np.int64) for i in (0, 1))
    new = renumbering.ids(ledgers, numbers)
    expected = [
        (*others[old], True) if old in others else (old[0] + (FIRST if old[0] >= 0 else 0), old[1], False)
        for old in entries
    ]
    assert list(zip(*(column.tolist() for column in new), strict=True)) == expected


def of(folder: Path, *names: str) -> Settings:
    route = {"source": TOPIC, "subscriptions": [{"name": name} for name in names]}
    return Settings(warehouse=f"file:{folder}/w", routes=(route,))  # type: ignore[arg-type]


def make(folder: Path) -> tuple[Settings, Tables]:
    """A warehouse with ten entries in ledger 7, of which those from 8 on are not durable, and an imported one."""
    made = of(folder, "a", "b")
    tables = Tables(made.warehouse)
    tables.create()
    tables.take_over(1)
    at = [{"ledger_id": 7, "entry_id": i, "deliver_at": NOW + HOUR, "publish_time": NOW} for i in range(10)]
    imported = {"ledger_id": IMPORTED, "entry_id": 0, "deliver_at": NOW + HOUR, "publish_time": NOW}
    index = [{**row, "operation": "DELAY", "schema_version": version_bytes(0), "properties": []} for row in at[1:]]
    tables.append("delayed_index", rows("delayed_index", [*index, {**imported, "operation": "DELAY"}]), {})
    tables.append("entries", rows("entries", [*at[:8], imported]), {})
    done = {**at[0], "subscription": "a", "position": "7:0:-1:-1", "deliver_at": NOW, "sent_at": NOW}
    tables.append("deliveries", rows("deliveries", [done, {**done, "subscription": "b"}]), {})
    outcomes = [
        {"entry_id": 2, "position": "7:2:-1:-1", "result": "SUPERSEDED", "superseded_by": "7:9:-1:-1"},
        {"entry_id": 9, "position": "7:9:-1:-1", "result": "APPLIED"},
    ]
    command = {"ledger_id": 7, "operation": "CANCEL", "subscription": "a", "sequence": 1, "applied_at": NOW}
    paused = {**command, "ledger_id": -1, "entry_id": -1, "position": "", "result": "APPLIED", "operation": "PAUSE"}
    tables.append("outcomes", rows("outcomes", [*({**command, **one} for one in outcomes), paused]), {})
    return made, tables


def ids(tables: Tables, table: str) -> list[tuple[int, int]]:
    found = tables.sql(f"SELECT ledger_id, entry_id FROM {table} ORDER BY ledger_id, entry_id")
    return list(zip(*(column.to_pylist() for column in found.columns), strict=True))


@pytest.mark.slow
def test_every_table_has_the_new_ids(tmp_path: Path) -> None:
    made, tables = make(tmp_path)
    before = run_audit(made, now=NOW)
    tables.create({"expired": EXPIRED, "schemas": COLUMNS})
    tables.append("expired", pa.Table.from_pylist([{"topic": TOPIC}], EXPIRED), {})
    tables.append("schemas", pa.Table.from_pylist([{"topic": TOPIC, "schema_version": version_bytes(0)}], COLUMNS), {})
    # The other broker's ids are as low as these: what comes again from 5 on is 7:0, 7:1 ...
    renumbering = Renumbering(1, pairs(*((7, i, 7, i - 5) for i in range(5, 10))), {TOPIC: Position(7, 0)})
    renumber(tables, renumbering, NOW)
    here, there = [(FIRST + 7, i) for i in range(5)], [(7, i) for i in range(5)]
    assert ids(tables, "delayed_index") == [*there, (IMPORTED, 0), *here[1:]]
    assert ids(tables, "entries") == [(7, 0), (IMPORTED, 0), *here], "what comes again is not durable"
    assert ids(tables, "deliveries") == [here[0], here[0]]
    assert ids(tables, "outcomes") == [(-1, -1), (7, 4), here[2]]
    texts = tables.sql("SELECT position, superseded_by FROM outcomes ORDER BY ledger_id").to_pylist()
    assert [(row["position"], row["superseded_by"]) for row in texts] == [
        ("", None),
        ("7:4:-1:-1", None),
        (f"{FIRST + 7}:2:-1:-1", "7:4:-1:-1"),
    ]
    of_delivery = tables.sql("SELECT DISTINCT position FROM deliveries")["position"].to_pylist()
    assert of_delivery == [f"{FIRST + 7}:0:-1:-1"]
    versions = tables.sql("SELECT DISTINCT schema_version FROM delayed_index WHERE schema_version IS NOT NULL")
    kept = tables.query("schemas", "SELECT schema_version FROM schemas")
    assert versions["schema_version"].to_pylist() == kept["schema_version"].to_pylist() == [version_bytes(1 << 44)]
    assert tables.query("expired", "SELECT * FROM expired").num_rows == 0
    assert tables.sql("SELECT count(first_index) AS n FROM entries")["n"].to_pylist() == [0]
    after = run_audit(made, now=NOW)
    assert (after.findings, after.counts) == (before.findings, before.counts)
    assert (next_place(tables), tables.written("entries", MOVED_AT)) == (2, NOW)


@pytest.mark.slow
def test_the_next_place_has_ids_of_its_own_also_after_a_backup(tmp_path: Path) -> None:
    made, tables = make(tmp_path)
    renumber(tables, Renumbering(1), NOW)
    tables.append("entries", rows("entries", [{"ledger_id": 7, "entry_id": 0}]), {})
    back_up(made, f"{tmp_path}/copy")
    copy = Tables(f"{tmp_path}/copy")
    assert (next_place(copy), copy.written("entries", MOVED_AT)) == (2, NOW)
    renumber(copy, Renumbering(2), NOW)
    second = FIRST_IMPORTED_LEDGER + 2 * PLACE_LEDGERS
    assert ids(copy, "entries") == [(IMPORTED, 0), *((FIRST + 7, i) for i in range(8)), (second + 7, 0)]


@pytest.mark.slow
def test_who_was_not_there_at_the_earlier_broker_gets_what_comes_from_the_other(tmp_path: Path) -> None:
    made, tables = make(tmp_path)
    first = KnownRoutes({}).updated_to(of(tmp_path, "a"))
    found = changes(first, first.updated_to(made), NOW, {TOPIC: "7:3"})
    write_changes(tables, found, 1, NOW, "test")
    late = {"topic": TOPIC, "partition": -1, "batch_index": -1, "deliver_at": NOW}
    those = pa.Table.from_pylist(
        [{**late, "ledger_id": ledger, "entry_id": 1} for ledger in (7, FIRST + 7, IMPORTED, FIRST + 8)]
    )
    assert Memberships.of(made.warehouse).were_missed(those, TOPIC, "b").tolist() == [True, False, False, False]
    renumber(tables, Renumbering(1), NOW)
    memberships = Memberships.of(made.warehouse)
    assert memberships.were_missed(those, TOPIC, "b").tolist() == [False, True, False, False]
    condition = memberships.sql("r", Sql("r.deliver_at"), Sql("r.topic"), literal("b"))
    by_sql = tables.sql(f"SELECT count(*) AS n FROM delayed_index AS r WHERE {condition.replace(str(NOW), str(2**60))}")
    assert by_sql["n"].to_pylist() == [3]
    [positions] = set(
        tables.query("subscription_changes", "SELECT * FROM subscription_changes")["positions"].to_pylist()
    )
    assert json.loads(positions) == {"-1": f"{FIRST + 7}:3"}
