"""Replaces text that is not UTF-8, which Arrow's arrays can have and nothing can read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tracker.messages import with_columns


def readable(rows: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Replaces values that can't be read by nulls.

    Args:
        rows: of any schema.

    Returns:
        the rows; and by index of those with a replaced value which column it is in, one line.
    """
    try:
        rows.validate(full=True)
    except pa.ArrowInvalid:
        return _replaced(rows)
    return rows, {}


def _replaced(rows: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    found: dict[int, str] = {}
    for field in rows.schema:
        values = []
        for row, value in enumerate(rows[field.name]):
            read = _read(value)
            if read is None and value.is_valid:
                found.setdefault(row, f"what is not UTF-8 can't be read: {field.name}")
            values.append(read)
        rows = with_columns(rows, **{field.name: pa.array(values, field.type)})
    return rows, found


def _read(value: pa.Scalar) -> Any:
    """Returns a value; None: it can't be read, or is null."""
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return None
