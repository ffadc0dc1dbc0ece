"""The pending messages of benchmarks/scale.py: due over a year, in files as an export sorted by time has them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FILE_ROWS = 1_000_000
DAY_MILLIS = 86_400_000
YEAR_MILLIS = 365 * DAY_MILLIS

CUSTOMERS, CAMPAIGNS = 1_000_000, 1_000
MOST_WITH_PROPERTY = 100_000_000

_WORDS = b"remind the customer that an order is due and has not been paid for yet ".split()


@dataclass(frozen=True)
class Load:
    """The messages of a folder: how many, their bytes of payload, and when the first is due, ms since the epoch."""

    pending: int
    payload: int
    due_from: int

    @property
    def files(self) -> int:
        return -(-self.pending // FILE_ROWS)

    def write(self, folder: Path, number: int) -> Path:
        """Writes the Parquet file of a number, from 0, with the messages of that part of the year in any order."""
        chance = np.random.default_rng([1, number])
        n = min(FILE_ROWS, self.pending - number * FILE_ROWS)
        part = YEAR_MILLIS // self.files
        columns = {
            "deliver_at": pa.array(self.due_from + number * part + chance.integers(0, part, n)),
            "payload": _payloads(chance, n, self.payload),
            "key": _names("customer-", CUSTOMERS).take(pa.array(chance.integers(0, CUSTOMERS, n))),
        }
        if self.pending <= MOST_WITH_PROPERTY:
            campaigns = _names("", CAMPAIGNS).take(pa.array(chance.integers(0, CAMPAIGNS, n)))
            names = pa.repeat("campaign", n)
            columns["properties"] = pa.MapArray.from_arrays(pa.array(np.arange(n + 1), pa.int32()), names, campaigns)
        path = folder / f"pending-{number}.parquet"
        pq.write_table(pa.table(columns), path, use_dictionary=False, compression="none")
        return path


@functools.cache
def _names(prefix: str, n: int) -> pa.Array:
    return pa.array([f"{prefix}{i}" for i in range(n)])


def _payloads(chance: np.random.Generator, n: int, size: int) -> pa.Array:
    """Returns n payloads of a size, bytes: the first half random, the other one text."""
    random = np.frombuffer(chance.bytes(n * (size // 2)), np.uint8).reshape(n, size // 2)
    length = size - size // 2
    texts = [b" ".join(chance.permutation(_WORDS)).ljust(length)[:length] for _ in range(1_000)]
    text = np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), length)
    whole = np.concatenate([random, text[chance.integers(0, len(texts), n)]], axis=1)
    offsets = pa.py_buffer(np.arange(0, n * size + 1, size, dtype=np.int32)[: n + 1])
    return pa.Array.from_buffers(pa.binary(), n, [None, offsets, pa.py_buffer(whole.tobytes())])
