"""Segments: the slices of all immutable buckets that come due next, read from the delayed index by time."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from streaming.tables import DELAYED_INDEX, Tables
from tracker.commands import RESCHEDULE, RESTORE, command_positions
from tracker.control import KNOWN
from tracker.messages import MESSAGES, of_entries
from tracker.moved import HELD_MILLIS
from tracker.time_slots import SLOT_MILLIS

# The tables in which a command finds what it names.
LOOKED_UP = ["delayed_index", "entries"]

_ENTRY_AS_KNOWN = (
    "topic, partition, ledger_id, entry_id, CAST(-1 AS INT) AS batch_index, batch_size, CAST(0 AS BIGINT) AS deliver_at"
)
_MAX_RANGES = 50


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


def find_entries(tables: Tables, versions: list[int], commands: pa.Table) -> pa.Table:
    """The messages of the entries that commands name, as far as they are booked.

    An entry that is in no bucket was delivered without being sealed: it has one row here, due long ago.

    Args:
        versions: of the tables LOOKED_UP.
        commands: with the columns of `tracker.commands.COMMANDS`.

    Returns:
        with the columns of `tracker.control.KNOWN`.
    """
    wanted = command_positions(commands)
    if not wanted.num_rows:
        return KNOWN.empty_table()
    index, entries = (
        _cast(
            tables.query(name, f"SELECT {columns} FROM {name} WHERE {_near(wanted)}{condition}", version),  # noqa: S608
            KNOWN,
        ).join(wanted, ["ledger_id", "entry_id"], join_type="inner", use_threads=False)
        for name, version, columns, condition in (
            (LOOKED_UP[0], versions[0], ", ".join(KNOWN.names), " AND operation = 'DELAY' AND sequence IS NULL"),
            (LOOKED_UP[1], versions[1], _ENTRY_AS_KNOWN, ""),
        )
    )
    delivered = entries.join(index, ["ledger_id", "entry_id"], join_type="left anti", use_threads=False)
    return pa.concat_tables([index.select(KNOWN.names), delivered.select(KNOWN.names)]).cast(KNOWN)


def find_held(tables: Tables, version: int) -> pa.Table:
    """Sealed rows of messages that were held back, as messages."""
    condition = f"deliver_at = {HELD_MILLIS} AND operation = 'DELAY'"
    return from_index(tables.query("delayed_index", f"SELECT * FROM delayed_index WHERE {condition}", version))  # noqa: S608


def find_rows(tables: Tables, versions: list[int], commands: pa.Table) -> pa.Table:
    """Sealed rows of the messages that commands reschedule or restore, as messages.

    Args:
        versions: of the tables LOOKED_UP.
    """
    wanted = command_positions(commands.filter(pc.is_in(commands["kind"], pa.array([RESCHEDULE, RESTORE]))))
    if not wanted.num_rows:
        return MESSAGES.empty_table()
    rows = from_index(
        tables.query(
            "delayed_index",
            f"SELECT * FROM delayed_index WHERE {_near(wanted)} AND operation = 'DELAY'",  # noqa: S608
            versions[0],
        )
    )
    return of_entries(rows, wanted)


def _near(wanted: pa.Table) -> str:
    """A condition that holds for the wanted positions, and lets a reader skip most files."""
    of_ledger = wanted.group_by("ledger_id").aggregate([("entry_id", "min"), ("entry_id", "max")])
    if of_ledger.num_rows > _MAX_RANGES:
        ledgers = wanted["ledger_id"]
        return f"ledger_id BETWEEN {pc.min(ledgers)} AND {pc.max(ledgers)}"
    ranges = [
        f"(ledger_id = {row['ledger_id']} AND entry_id BETWEEN {row['entry_id_min']} AND {row['entry_id_max']})"
        for row in of_ledger.to_pylist()
    ]
    return f"({' OR '.join(ranges)})"


def _cast(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    return pa.table([rows[field.name].cast(field.type) for field in schema], schema=schema)


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
        "bucket_id": pa.array([bucket_id] * n, pa.int64()),
    }
    columns = [extra[f.name] if f.name in extra else messages[f.name] for f in DELAYED_INDEX]
    return pa.table(columns, schema=DELAYED_INDEX)


def cancels_to_index(cancels: pa.Table, bucket_id: int) -> pa.Table:
    """What was taken back, and given back, as CANCEL and RESTORE rows of the delayed index."""
    n = cancels.num_rows
    values = {
        "bucket_id": pa.array([bucket_id] * n, pa.int64()),
        **{name: cancels[name] for name in cancels.column_names},
    }
    columns = [values[f.name] if f.name in values else pa.nulls(n, f.type) for f in DELAYED_INDEX]
    return pa.table(columns, schema=DELAYED_INDEX)


def positions(messages: pa.Table) -> pa.Array:
    """Each message's position as `ledger:entry:partition:batchIndex`."""
    parts = [messages[name].cast(pa.string()) for name in ("ledger_id", "entry_id", "partition", "batch_index")]
    return pc.binary_join_element_wise(*parts, ":").combine_chunks()
