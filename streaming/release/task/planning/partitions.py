"""To which partition of its destination a message goes."""

from __future__ import annotations

import zlib
from typing import Any


def partition_of(columns: dict[str, list[Any]], row: int, partitions: int, keys: list[bytes] | None) -> int:
    """Returns the number of a row's partition: by key as Pulsar's Java client chooses it, without a key by position.

    Args:
        keys: of a release that has to come in order, by row: those that have no partition key, but one of these, stay
            together by it.
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
