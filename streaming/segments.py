"""Segments: the slices of all immutable buckets that come due next, read from the delayed index by time."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from streaming.tables import DELAYED_INDEX, Tables
from tracker.messages import MESSAGES
from tracker.time_slots import SLOT_MILLIS


def rows_due(tables: Tables, version: int, start: int, end: int) -> list[tuple[int, int]]:
    """How many rows of a version of the delayed index are due from one time to before another.

    Returns:
        (slot, rows), ascending, where there are any.
    """
    counts = tables.query(
        "delayed_index",
        f"SELECT deliver_at / {SLOT_MILLIS} AS slot, count(*) AS n FROM delayed_index "  # noqa: S608
        f"WHERE deliver_at >= {start} AND deliver_at < {end} AND operation = 'DELAY' GROUP BY 1 ORDER BY 1",
        version,
    )
    return list(zip(counts["slot"].to_pylist(), counts["n"].to_pylist(), strict=True))


def read_segment(tables: Tables, version: int, start: int, end: int) -> pa.Table:
    """The messages of a version of the delayed index that are due from one time to before another."""
    rows = tables.query(
        "delayed_index",
        f"SELECT * FROM delayed_index WHERE deliver_at >= {start} AND deliver_at < {end} "  # noqa: S608
        "AND operation = 'DELAY'",
        version,
    )
    return from_index(rows)


def from_index(rows: pa.Table) -> pa.Table:
    """Rows of the delayed index as messages."""
    n = rows.num_rows
    columns = [
        rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(n, field.type)
        for field in MESSAGES
    ]
    return pa.table(columns, schema=MESSAGES)


def to_index(messages: pa.Table, bucket_id: int) -> pa.Table:
    """Messages as DELAY rows of the delayed index."""
    n = messages.num_rows
    extra = {
        "operation": pa.array(["DELAY"] * n, pa.string()),
        "subscription": pa.nulls(n, pa.string()),
        "bucket_id": pa.array([bucket_id] * n, pa.int64()),
    }
    columns = [extra[f.name] if f.name in extra else messages[f.name] for f in DELAYED_INDEX]
    return pa.table(columns, schema=DELAYED_INDEX)


def positions(messages: pa.Table) -> pa.Array:
    """Each message's position as `ledger:entry:partition:batchIndex`."""
    parts = [messages[name].cast(pa.string()) for name in ("ledger_id", "entry_id", "partition", "batch_index")]
    return pc.binary_join_element_wise(*parts, ":").combine_chunks()
