"""Packs tables, and columns of integers, as bytes for the tracker's state and for the input of a batch."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa

from tracker.messages import Int64Array

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
