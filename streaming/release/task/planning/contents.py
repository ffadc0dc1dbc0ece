"""What a plan has to know of the contents of a release's rows."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.message_size import OWN_BYTES
from streaming.release.outgoing import cause_of
from streaming.release.task.planning.partitions import java_string_hashes
from tracker.messages import BoolArray, Int64Array
from tracker.packing import payload_sizes

# The columns of a message's content.
CONTENT = ("key", "ordering_key", "ordering_key_bytes", "properties", "payload", "schema_version")

_KEYS = ("key", "ordering_key", "ordering_key_bytes")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of rows, each array of shape (rows,)."""

    sizes: Int64Array  # about the bytes of the messages
    payload_bytes: Int64Array
    have_keys: BoolArray
    key_hashes: Int64Array  # as `java_string_hashes` returns them; -1: there is no partition key


def contents_of(rows: pa.Table) -> tuple[Contents, dict[int, str]]:
    """Reads the contents of rows.

    Args:
        rows: as MESSAGES, readable; columns may be missing.

    Returns:
        the contents; and by index of the rows that can't be read why, one line: these count as without content.
    """
    try:
        return _read(rows), {}
    except MemoryError:
        raise
    except Exception:
        return _each_alone(rows)


def _each_alone(rows: pa.Table) -> tuple[Contents, dict[int, str]]:
    found, wrong = [], {}
    for row in range(rows.num_rows):
        one = rows.slice(row, 1)
        try:
            found.append(_read(one))
        except MemoryError:
            raise
        except Exception as error:
            wrong[row] = cause_of(error)
            found.append(_read(one.drop_columns([name for name in CONTENT if name in one.column_names])))
    columns = {field.name: np.concatenate([getattr(one, field.name) for one in found]) for field in fields(Contents)}
    return Contents(**columns), wrong


def _read(rows: pa.Table) -> Contents:
    payload_bytes = payload_sizes(rows)
    have_keys = np.zeros(rows.num_rows, np.bool_)
    for name in _KEYS:
        if has_values(rows, name):
            have_keys |= pc.is_valid(rows[name]).to_numpy()
    hashes = np.full(rows.num_rows, -1, np.int64)
    if has_values(rows, "key"):
        hashes = java_string_hashes(rows["key"].combine_chunks())
    return Contents(
        sizes=OWN_BYTES // 8 + payload_bytes + _property_sizes(rows),
        payload_bytes=payload_bytes,
        have_keys=have_keys,
        key_hashes=hashes,
    )


def has_values(rows: pa.Table, name: str) -> bool:
    """Whether rows have a column with values in it."""
    return name in rows.column_names and rows[name].null_count < rows.num_rows


def _property_sizes(rows: pa.Table) -> Int64Array:
    """Returns the characters of each row's properties, names and values, int64, (rows,)."""
    if not has_values(rows, "properties"):
        return np.zeros(rows.num_rows, np.int64)
    maps = rows["properties"].combine_chunks()
    of_pairs = pc.utf8_length(maps.keys).to_numpy().astype(np.int64)
    of_pairs += pc.fill_null(pc.utf8_length(maps.items), 0).to_numpy()
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_pairs)])
    offsets = maps.offsets.to_numpy()
    sizes: Int64Array = ends[offsets[1:]] - ends[offsets[:-1]]
    return np.where(maps.is_valid().to_numpy(zero_copy_only=False), sizes, 0)
