"""The hash that assigns messages to the tracker's shards."""

from __future__ import annotations

import numpy as np

from tracker.messages import Int64Array

# Neighbours share a shard, so that a shard's index bits are runs; few enough that one busy topic spreads at once.
ENTRIES_TOGETHER = 64


def shard_of(ledger_ids: Int64Array, entry_ids: Int64Array, shards: int) -> Int64Array:
    """Hashes positions to shards. All messages of an entry share one, and so do neighbouring entries.

    Args:
        ledger_ids: int64, (n,).
        entry_ids: int64, (n,).
        shards: how many shards there are.

    Returns:
        the shard of each position, int64, (n,), from 0 to shards - 1.
    """
    with np.errstate(over="ignore"):
        mixed = ledger_ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + entry_ids.astype(np.uint64) // np.uint64(
            ENTRIES_TOGETHER
        )
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
    return (mixed % np.uint64(shards)).astype(np.int64)
