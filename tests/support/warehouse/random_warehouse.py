"""Warehouses in which anything may have happened, and what became of their files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from conf.settings import Route, Settings
from tests.support.warehouse.tables import DAY, NOW, TOPIC, make
from tracker.commands.outcomes import NOT_DELIVERED
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.schemas import SEQUENCE_BITS
from warehouse.delta.engine import Engine
from warehouse.delta.tables import Tables
from warehouse.maintenance.maintain import maintain
from warehouse.maintenance.table_files import TableFiles
from warehouse.schemas import SCHEMAS, SUBSCRIPTION_CHANGES

ODD = "persistent://public/default/o'dd\\n"
OTHER = "persistent://public/default/other"  # without a route
RETENTION = {f"{name}_millis": DAY for name in SCHEMAS}

# What a column of a random row may have.
VALUES: dict[str, list[Any]] = {
    "topic": [TOPIC, TOPIC, ODD, OTHER],
    "subscription": ["a", "b", "c"],
    "partition": [-1],
    "ledger_id": [1, 2, 3, 1 << 62],
    "entry_id": [*range(30)],
    "batch_index": [-1, 0, 1],
    "batch_size": [1, 2],
    "deliver_at": [*range(NOW - 9 * DAY, NOW + DAY, DAY // 3), HELD_DELIVER_AT],
    "sent_at": [*range(NOW - 9 * DAY, NOW + DAY, DAY // 3)],
    "publish_time": [*range(NOW - 9 * DAY, NOW, DAY // 3)],
    "applied_at": [*range(NOW - 9 * DAY, NOW, DAY // 3)],
    "batch_id": [*range(9)],
    "sequence": [None, *(n << SEQUENCE_BITS for n in range(9))],
    "first_index": [None, *range(60)],
    "attempt": [None, None, 1, 2],
    "occurrence": [None, None, None, 1, 2],
    "result": ["APPLIED", "APPLIED", "SUPERSEDED", "TOO_LATE", "WAITING"],
    "reason": [None, "deliverAt is negative: -5", "not seen: it is gone", f"{NOT_DELIVERED} a: no"],
    "properties": [None, [("deliverAt", "5")], [("repeat", "@every 1d"), ("repeatTimes", "2")]],
}
OPERATIONS = {
    "delayed_index": ["DELAY", "DELAY", "DELAY", "MOVE", "CANCEL", "RESTORE"],
    "outcomes": ["CANCEL", "SKIP", "RESTORE", "RETRY", "RESCHEDULE", "SKIP_NEXT", "PAUSE"],
}


def random_rows(name: str, n: int, chance: np.random.Generator) -> pa.Table:
    values = VALUES | {"operation": OPERATIONS.get(name, [])}
    if name == "delayed_index":
        values |= {"subscription": [None, None, "a", "b"], "occurrence": [None] * 9 + [1]}
    columns = []
    for field in SCHEMAS[name]:
        of_field = values.get(field.name) or ([0] if pa.types.is_integer(field.type) else [None])
        columns.append(pa.array([of_field[i] for i in chance.integers(0, len(of_field), n)], field.type))
    rows = pa.table(columns, schema=SCHEMAS[name])
    if "position" in rows.column_names:
        parts = zip(*(rows[c].to_pylist() for c in ("ledger_id", "entry_id", "partition", "batch_index")), strict=True)
        at = rows.column_names.index("position")
        rows = rows.set_column(at, "position", pa.array([":".join(map(str, part)) for part in parts]))
    return rows


def random_warehouse(folder: Path, seed: int) -> Settings:
    """Tables in which anything may have happened, also what never does, in many small files."""
    chance = np.random.default_rng(seed)
    made, tables = make(folder, **RETENTION)
    for name in SCHEMAS:
        for number in range(9):
            tables.append(name, random_rows(name, int(chance.integers(150, 200)), chance), {"test": number})
    change = dict.fromkeys(SUBSCRIPTION_CHANGES.names) | {"topic": TOPIC, "subscription": "b", "change": "ADDED"}
    change |= {"changed_at": NOW, "handed_out": NOW - 5 * DAY, "positions": '{"-1": "2:5"}', "batch_id": 0}
    odd = Route(source=ODD, subscriptions=(made.routes[0].subscriptions[0],))
    made = made.model_copy(update={"routes": (*made.routes, odd)})
    tables.append("subscription_changes", pa.Table.from_pylist([change], SUBSCRIPTION_CHANGES), {"test": 1})
    return made


def copied(made: Settings, folder: Path) -> Settings:
    shutil.copytree(made.warehouse.removeprefix("file:"), folder / "warehouse")
    return made.model_copy(update={"warehouse": f"file:{folder}/warehouse", "checkpoint": f"file:{folder}/checkpoint"})


def files(made: Settings) -> dict[str, list[Any]]:
    """Of each table the files' rows, in their order, and what the log says of them."""
    found: dict[str, list[Any]] = {}
    for name in SCHEMAS:
        table = TableFiles(Tables(made.warehouse), name)
        own = [(f.first, f.last, f.rows, f.n_bytes, f.is_part, table.folder.read(f.path)) for f in table.all()]
        found[name] = sorted(own, key=lambda file: (file[:4], repr(file[5].slice(0, 1).to_pylist())))
    return found


def done_by(engine: Engine, made: Settings) -> tuple[Any, ...]:
    """Maintains the tables, and returns what was done and what is left."""
    reports = maintain(made, now=NOW, engine=engine)
    counts = [(r.table, r.files_merged, r.rows_deleted, r.files_after, r.bytes_after) for r in reports]
    return counts, files(made), Tables(made.warehouse).sql("SELECT count(*) FROM entries")
