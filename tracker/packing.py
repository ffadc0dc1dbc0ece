"""Packs tables, and columns of integers, as bytes for state and for a batch's input, in parts of bounded bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.messages import Int64Array
from tracker.payload_refs import has_refs, lengths

# Compression pays only from about this size on; threads do not pay at any size that occurs here.
_COMPRESSED_FROM_BYTES = 32_768

_SMALL = pa.ipc.IpcWriteOptions(use_threads=False)

_LARGE = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)

_READ = pa.ipc.IpcReadOptions(use_threads=False)


def pack(rows: pa.Table) -> bytes:
    """Packs a table as bytes: an Arrow IPC stream of one record batch, LZ4 compressed from 32 KiB on.

    Args:
        rows: of any schema; its metadata is kept. It may have no rows.

    Returns:
        the bytes, which `unpack` reads.
    """
    # A record batch for each chunk would take ten times as long to write and to read.
    rows = rows.combine_chunks()
    options = _LARGE if rows.nbytes >= _COMPRESSED_FROM_BYTES else _SMALL
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_table(rows)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def unpack(data: bytes) -> pa.Table:
    """Unpacks a table.

    Args:
        data: bytes that `pack` returned.

    Returns:
        the table, with its schema and metadata; each column is one chunk.

    Raises:
        pa.ArrowInvalid: `pack` did not make these bytes.
    """
    with pa.ipc.open_stream(data, options=_READ) as reader:
        return reader.read_all()


def pack_columns(values: Int64Array) -> bytes:
    """Packs integers as bytes: each column as its minimum and the differences from it, in as few bytes as they need.

    Args:
        values: int64, (rows, columns), at least one row.

    Returns:
        the bytes, which `unpack_columns` reads.
    """
    least = values.min(axis=0)
    # The difference of two int64 fits into a uint64.
    above = np.ascontiguousarray((values.astype(np.uint64) - least.astype(np.uint64)).T, "<u8")
    widths = [(int(most).bit_length() + 7) // 8 for most in above.max(axis=1)]
    # The lowest bytes of all rows, then the next bytes, and so on: numpy copies this ten times faster than row by row.
    bytes_of = above.view(np.uint8)
    planes = [bytes_of[i, byte::8].tobytes() for i, width in enumerate(widths) for byte in range(width)]
    return b"".join([_header(len(widths)).pack(len(values), *least.tolist(), *widths), *planes])


def unpack_columns(data: bytes, columns: int) -> Int64Array:
    """Unpacks bytes that `pack_columns` returned, for the same number of columns: int64, (rows, columns)."""
    header = _header(columns)
    n, *numbers = header.unpack_from(data)
    values = np.empty((n, columns), np.int64)
    planes = np.frombuffer(data, np.uint8, offset=header.size).reshape(-1, n)
    at = 0
    for i, (least, width) in enumerate(zip(numbers[:columns], numbers[columns:], strict=True)):
        above = np.zeros(n, "<i8")
        for byte in range(width):
            above.view(np.uint8)[byte::8] = planes[at + byte]
        values[:, i] = above + least
        at += width
    return values


def _header(columns: int) -> struct.Struct:
    """Returns the header's format: the number of rows, each column's minimum, each column's bytes a value."""
    return struct.Struct(f"<I{columns}q{columns}B")


# Rows with a payload from this size on are large: of these the bytes are bounded, too, and not their number alone.
LARGE_BYTES = 4096

PART_ROWS = 20_000  # the most rows in a packed value, so that rows of state and shuffle stay of moderate size

PART_BYTES = 8 << 20  # likewise about the most bytes: Spark's JVM holds several copies of a value at a time


def payload_sizes(rows: pa.Table) -> Int64Array:
    """Returns the bytes of each row's payload, in the row or in a file, int64, (rows,); 0: there is none."""
    sizes = _held_payload_sizes(rows)
    return sizes + lengths(rows) if has_refs(rows) else sizes


def row_sizes(rows: pa.Table) -> Int64Array:
    """Returns about how many bytes each row has, int64, (rows,): its payload, an equal share of the other columns.

    A payload in a file counts: whoever sends the row has it in memory.
    """
    sizes = _held_row_sizes(rows)
    return sizes + lengths(rows) if has_refs(rows) else sizes


def _held_payload_sizes(rows: pa.Table) -> Int64Array:
    """Does the same as `payload_sizes` without the payloads that are in files."""
    if not rows.num_rows or "payload" not in rows.column_names:
        return np.zeros(rows.num_rows, np.int64)
    sizes: Int64Array = pc.fill_null(pc.binary_length(rows["payload"]), 0).to_numpy().astype(np.int64)
    return sizes


def _held_row_sizes(rows: pa.Table) -> Int64Array:
    """Does the same as `row_sizes` without the payloads that are in files."""
    sizes = _held_payload_sizes(rows)
    others = max(0, int(rows.nbytes) - int(sizes.sum()))
    all_columns: Int64Array = sizes + others // max(1, rows.num_rows)
    return all_columns


def fitting(sizes: Int64Array, most: int) -> int:
    """Returns how many of the first rows have at most so many bytes together; at least one, if there are rows.

    Args:
        sizes: int64, (rows,): bytes of each row.
        most: bytes.
    """
    return min(len(sizes), max(1, int(np.searchsorted(np.cumsum(sizes), most, "right"))))


def in_parts(rows: pa.Table, most_rows: int = PART_ROWS, most_bytes: int = PART_BYTES) -> Iterator[pa.Table]:
    """Yields a table's rows in parts of at most so many rows, and about so many bytes; a row is in one part.

    Payloads in files do not count: they are not in the parts.
    """
    if rows.num_rows <= most_rows and rows.nbytes <= most_bytes:
        if rows.num_rows:
            yield rows
        return
    yield from parts_of_sizes(rows, _held_row_sizes(rows), most_bytes, most_rows)


def parts_of_sizes(
    rows: pa.Table, sizes: Int64Array, most_bytes: int, most_rows: int | None = None
) -> Iterator[pa.Table]:
    """Yields a table's rows in parts of at most so many bytes, but for a part of one row, and rows.

    Args:
        rows: of any schema.
        sizes: int64, (rows,): bytes of each row.
        most_bytes: of a part.
        most_rows: of a part; None: any number.
    """
    start, most = 0, most_rows or len(sizes)
    while start < len(sizes):
        end = start + fitting(sizes[start : start + most], most_bytes)
        yield rows.slice(start, end - start)
        start = end
