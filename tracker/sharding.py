"""The hashes that assign messages to the tracker's shards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tracker.messages import BoolArray, Int64Array, has_keys, int64
from tracker.properties import key_hash

# So many neighbouring entries share a shard: enough for runs in a shard's index bits, few enough to spread one topic.
ENTRIES_TOGETHER = 64


@dataclass(frozen=True)
class ShardId:
    """The number of a shard, from 0, and how many shards there are."""

    number: int = 0
    shards: int = 1

    def is_home(self, rows: pa.Table) -> BoolArray:
        """Tells which rows are of entries whose home is this shard: bool, (rows,)."""
        if self.shards == 1:
            return np.ones(rows.num_rows, np.bool_)
        is_home: BoolArray = shard_of(int64(rows, "ledger_id"), int64(rows, "entry_id"), self.shards) == self.number
        return is_home

    def has(self, rows: pa.Table) -> BoolArray:
        """Tells which messages are in this shard: bool, (rows,)."""
        if self.shards == 1:
            return np.ones(rows.num_rows, np.bool_)
        has: BoolArray = shards_of(rows, self.shards) == self.number
        return has


def shards_of(rows: pa.Table, shards: int) -> Int64Array:
    """Assigns messages, or commands, to shards: by topic and schedule key, without a key by position.

    Args:
        rows: with ledger_id and entry_id, or also with schedule_key and topic.
        shards: how many shards there are.

    Returns:
        the shard of each row, int64, (rows,), from 0 to shards - 1.
    """
    numbers = shard_of(int64(rows, "ledger_id"), int64(rows, "entry_id"), shards)
    if shards > 1 and has_keys(rows):
        key_shards: dict[tuple[str, str], int] = {}
        pairs = zip(rows["topic"].to_pylist(), rows["schedule_key"].to_pylist(), strict=True)
        for i, (topic, key) in enumerate(pairs):
            if key is not None:
                pair = topic, key
                if pair not in key_shards:
                    key_shards[pair] = key_hash(topic, key)[1] % shards
                numbers[i] = key_shards[pair]
    return numbers


def shard_of(ledger_ids: Int64Array, entry_ids: Int64Array, shards: int) -> Int64Array:
    """Assigns entries to their home shards by position. ENTRIES_TOGETHER neighbouring entries share one.

    Args:
        ledger_ids: int64, (n,).
        entry_ids: int64, (n,).
        shards: how many shards there are.

    Returns:
        the shard of each entry, int64, (n,), from 0 to shards - 1.
    """
    with np.errstate(over="ignore"):
        mixed = ledger_ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + entry_ids.astype(np.uint64) // np.uint64(
            ENTRIES_TOGETHER
        )
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
    return (mixed % np.uint64(shards)).astype(np.int64)
