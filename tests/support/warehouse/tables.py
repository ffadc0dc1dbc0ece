"""The tables of a job with one route and two subscriptions, and rows for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from conf.settings import RetentionSettings, Route, Settings
from warehouse.delta.tables import Tables
from warehouse.schemas import SCHEMAS

TOPIC = "persistent://public/default/t"
NOW = 1_795_000_000_000
HOUR = 3_600_000
DAY = 24 * HOUR


def rows(table: str, values: list[dict[str, Any]]) -> pa.Table:
    """Rows of a table; what is not given is 0, empty or null. Nothing has been moved."""
    columns = []
    for field in SCHEMAS[table]:
        constant: dict[str, Any] = {
            "topic": TOPIC,
            "partition": -1,
            "batch_index": -1,
            "batch_size": 1,
            "sequence": None,
            "shaped_from": None,
            "occurrence": None,
            "occurrence_at": None,
        }
        default = constant.get(field.name, 0 if pa.types.is_integer(field.type) else None)
        columns.append(pa.array([value.get(field.name, default) for value in values], field.type))
    return pa.table(columns, schema=SCHEMAS[table])


def bucket(number: int, n: int, start: int, span: int) -> pa.Table:
    """A sealed bucket: rows due at random in a span of time, sorted, and a CANCEL after them."""
    due = np.sort(start + np.random.default_rng(number).integers(0, span, n))
    delays = [
        {"deliver_at": int(t), "ledger_id": number, "entry_id": i, "operation": "DELAY", "payload": b"%d" % i}
        for i, t in enumerate(due)
    ]
    cancel = {"deliver_at": int(due[0]), "ledger_id": number, "entry_id": 0, "operation": "CANCEL", "subscription": "a"}
    return rows("delayed_index", [{"bucket_id": number, **row} for row in [*delays, cancel]])


def make(folder: Path, **retention: int) -> tuple[Settings, Tables]:
    route = Route(source=TOPIC, subscriptions=({"name": "a"}, {"name": "b"}))  # type: ignore[arg-type]
    made = Settings(
        warehouse=f"file:{folder}/warehouse",
        checkpoint=f"file:{folder}/checkpoint",
        routes=(route,),
        retention=RetentionSettings(**retention),
    )
    tables = Tables(made.warehouse)
    tables.create()
    return made, tables


def content(tables: Tables, name: str, version: int | None = None) -> list[str]:
    """All rows, as sorted text."""
    return sorted(map(repr, tables.query(name, f"SELECT * FROM {name}", version).to_pylist()))
