"""References to large payloads, which are in files: state, releases and buckets have the reference in their rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tracker.messages import Int64Array

COLUMN = "payload_at"  # of MESSAGES


class PayloadRef(NamedTuple):
    """Where a payload is.

    Attributes:
        file: the name of the file.
        offset: of the payload in it, bytes.
        length: of the payload, bytes.
        checksum: CRC-32 of the payload.
    """

    file: str
    offset: int
    length: int
    checksum: int

    def __str__(self) -> str:
        """Returns it as the column has it."""
        return ":".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> PayloadRef:
        """Reads what `str` returned."""
        file, *numbers = text.split(":")
        offset, length, checksum = map(int, numbers)
        return cls(file, offset, length, checksum)


def has_refs(rows: pa.Table) -> bool:
    """Whether the payload of any row is in a file. Rows of earlier versions lack the column."""
    return COLUMN in rows.column_names and rows[COLUMN].null_count < rows.num_rows


def refs_of(rows: pa.Table) -> dict[int, PayloadRef]:
    """Returns the references of rows, by the row's index."""
    if not has_refs(rows):
        return {}
    return {i: PayloadRef.parse(text) for i, text in enumerate(rows[COLUMN].to_pylist()) if text is not None}


def files_of(rows: pa.Table) -> dict[str, int]:
    """Returns the names of the files with payloads of rows, and where the last of these payloads ends in each."""
    ends: dict[str, int] = {}
    for ref in refs_of(rows).values():
        ends[ref.file] = max(ends.get(ref.file, 0), ref.offset + ref.length)
    return ends


def lengths(rows: pa.Table) -> Int64Array:
    """Returns the bytes of each payload that is in a file, int64, (rows,); 0: it is in none."""
    found = np.zeros(rows.num_rows, np.int64)
    for i, ref in refs_of(rows).items():
        found[i] = ref.length
    return found
