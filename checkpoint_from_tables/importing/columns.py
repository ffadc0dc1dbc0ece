"""The columns of files and tables that are imported: their types, and times as ms."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint_from_tables.importing.importer import ImportFailedError
from conf.errors import one_line
from tracker.messages import BoolArray

# The columns of a file. `deliver_at` must exist; a message without a value there is due as its properties say, or at
# once. Other columns may be missing or null.
COLUMNS = {
    "deliver_at": pa.int64(),  # ms since the epoch, or a timestamp
    "payload": pa.binary(),  # or text
    "key": pa.string(),
    "ordering_key": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "event_time": pa.int64(),  # as deliver_at
    "producer_name": pa.string(),
}

IN_SECONDS = "deliver_at {} can only be seconds since the epoch: give milliseconds, or a timestamp"

_TIMES = ("deliver_at", "event_time")
_NO_TIMES = (
    *(pa.types.is_boolean, pa.types.is_duration, pa.types.is_time, pa.types.is_date),
    *(pa.types.is_float32, pa.types.is_float16),  # minutes apart, at ms of today
)
_PER_MILLI = {"us": 1_000, "ns": 1_000_000}
_MOST_SECONDS = 1 << 53  # beyond all times that can be delivered, and as ms still an int64

# Whole numbers from here on are of 1970 to 1973 as ms, and of 1973 to 5138 as seconds.
SECONDS_FROM, SECONDS_BELOW = 100_000_000, 100_000_000_000


def check_columns(schema: pa.Schema) -> None:
    """Checks the names and types of columns.

    Raises:
        ImportFailedError: a column is unknown, there twice or of no usable type, or there is no `deliver_at`.
    """
    for name in schema.names:
        if name not in COLUMNS:
            raise ImportFailedError(f"unknown column {name}; there may be {', '.join(COLUMNS)}")
        if schema.names.count(name) > 1:
            raise ImportFailedError(f"the column {name} is there twice")
        kind = schema.field(name).type
        if name in _TIMES and any(is_one(kind) for is_one in _NO_TIMES):
            raise ImportFailedError(f"{name} is of the type {kind}, no time: give ms since the epoch, or a timestamp")
        if name not in _TIMES and pa.types.is_timestamp(kind):
            raise ImportFailedError(f"{name} is of the type {kind}: give it as {COLUMNS[name]}")
    if "deliver_at" not in schema.names:
        raise ImportFailedError("no column deliver_at")


def own_columns(rows: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Returns those columns of COLUMNS that a table has, cast to their types.

    Text may have bytes that are no UTF-8. Times between two ms are the later ms for `deliver_at`, else the earlier one.

    Raises:
        ImportFailedError: a value can't be cast.
    """
    own = {}
    for name in (name for name in COLUMNS if name in rows.column_names):
        try:
            own[name] = _cast(rows[name], name, COLUMNS[name])
        except pa.ArrowException as error:
            raise ImportFailedError(f"{name}, of the type {rows[name].type}: {one_line(error)}") from error
    return own


def are_seconds(column: pa.ChunkedArray) -> BoolArray:
    """Tells which values of `deliver_at` are no ms, but seconds: bool, (rows,).

    Args:
        column: as a file has it, of a type that `own_columns` can cast.
    """
    if pa.types.is_timestamp(column.type):
        return np.zeros(len(column), np.bool_)
    times = pc.fill_null(column.cast(pa.int64()), 0).to_numpy()
    are: BoolArray = (times >= SECONDS_FROM) & (times < SECONDS_BELOW)
    return are


def _cast(column: pa.ChunkedArray, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_timestamp(column.type):
        return _millis(column, is_rounded_up=name == "deliver_at")
    # Whether bytes are text is checked row by row, with the reasons.
    return pc.cast(column, kind, safe=not (pa.types.is_string(kind) or pa.types.is_map(kind)))


def _millis(column: pa.ChunkedArray, is_rounded_up: bool) -> pa.ChunkedArray:
    """Returns timestamps of any unit as ms since the epoch, int64."""
    unit = column.type.unit
    times = pc.fill_null(column.cast(pa.int64()), 0).to_numpy()
    if unit == "s":
        times = np.clip(times, -_MOST_SECONDS, _MOST_SECONDS) * 1_000
    elif unit != "ms":
        times, rest = np.divmod(times, _PER_MILLI[unit])
        times = times + ((rest > 0) & is_rounded_up)
    return pa.chunked_array([pa.array(times, pa.int64(), mask=pc.is_null(column).to_numpy())])
