"""Columns of integers as bytes: of each column its least value, and what the others have above it, in few bytes."""

from __future__ import annotations

import struct

import numpy as np

from tracker.messages import Int64Array


def pack_columns(values: Int64Array) -> bytes:
    """Packs int64, (rows, columns), with at least one row: `unpack_columns` reads it."""
    least = values.min(axis=0)
    # Whatever the numbers are, what they have above the least one is below 2^64.
    above = np.ascontiguousarray((values.astype(np.uint64) - least.astype(np.uint64)).T, "<u8")
    widths = [(int(most).bit_length() + 7) // 8 for most in above.max(axis=1)]
    # The lowest bytes of all rows, then the next ones: numpy copies these ten times faster than few bytes of each row.
    bytes_of = above.view(np.uint8)
    planes = [bytes_of[i, byte::8].tobytes() for i, width in enumerate(widths) for byte in range(width)]
    return b"".join([_header(len(widths)).pack(len(values), *least.tolist(), *widths), *planes])


def unpack_columns(data: bytes, columns: int) -> Int64Array:
    """Unpacks what `pack_columns` has packed: int64, (rows, columns)."""
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
    """Returns the struct of a number of rows, then of each column its least value, and its bytes a value."""
    return struct.Struct(f"<I{columns}q{columns}B")
