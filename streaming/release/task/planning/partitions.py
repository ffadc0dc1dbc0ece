"""Chooses the partition of a destination for a message."""

from __future__ import annotations

import zlib
from typing import Any


def partition_of(columns: dict[str, list[Any]], row: int, partitions: int, keys: list[bytes] | None) -> int:
    """Returns the number of a row's partition: by its key, as Pulsar's Java client does, else by its position.

    Args:
        columns: of the release's rows, by name.
        row: the index of the row.
        partitions: the number of partitions.
        keys: the order key of each row, of a release that has to come in order: rows without a partition key that have
            the same order key go to the same partition. None: of another release.
    """
    key = columns["key"][row]
    if key is None and keys is not None:
        return zlib.crc32(keys[row]) % partitions
    if key is None:
        return (
            int(columns["ledger_id"][row] + columns["entry_id"][row] + max(columns["batch_index"][row], 0)) % partitions
        )
    return java_string_hash(key) % partitions


def java_string_hash(text: str) -> int:
    """Returns Java's String.hashCode without its sign, 0 to 2^31 - 1: Pulsar's JavaStringHash."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for i in range(0, len(units), 2):
        value = (31 * value + (units[i] << 8 | units[i + 1])) & 0xFFFFFFFF
    return value & 0x7FFFFFFF
