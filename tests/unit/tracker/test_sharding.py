"""Which shard a message belongs to."""

from __future__ import annotations

import numpy as np
import pytest

from streaming.batch_schema import _spark_hash, shard_keys
from tracker.sharding import ENTRIES_TOGETHER, shard_of


def test_a_position_keeps_its_shard_from_release_to_release() -> None:
    """State is kept by shard: other values would lose what waits."""
    ledgers = np.array([0, 1, 1, 1, 7, 123_456, 2**40, 2**62])
    entries = np.array([0, 0, 63, 64, 4_711, 99_999, 2**32 - 1, 5])
    assert shard_of(ledgers, entries, 1).tolist() == [0] * 8
    assert shard_of(ledgers, entries, 2).tolist() == [0, 0, 0, 0, 0, 0, 0, 0]
    assert shard_of(ledgers, entries, 7).tolist() == [0, 2, 2, 1, 6, 1, 2, 1]


def test_messages_of_an_entry_and_its_neighbours_share_a_shard() -> None:
    entries = np.arange(10 * ENTRIES_TOGETHER)
    shards = shard_of(np.full(len(entries), 5), entries, 16).reshape(10, ENTRIES_TOGETHER)
    assert (shards == shards[:, :1]).all()
    assert len(np.unique(shards[:, 0])) > 1


@pytest.mark.parametrize("shards", [2, 3, 8, 12])
@pytest.mark.parametrize("ledgers", ["one", "many", "few entries each"])
def test_every_shard_gets_its_part(shards: int, ledgers: str) -> None:
    n = 200_000
    ledger_ids, entry_ids = {
        "one": (np.full(n, 9), np.arange(n)),
        "many": (np.arange(n) // 1_000 * 3, np.arange(n) % 1_000),
        "few entries each": (np.arange(n), np.zeros(n, np.int64)),
    }[ledgers]
    counts = np.bincount(shard_of(ledger_ids, entry_ids, shards), minlength=shards)
    assert len(counts) == shards
    assert counts.min() > 0.8 * n / shards
    assert counts.max() < 1.2 * n / shards


def test_no_positions_have_no_shards() -> None:
    assert shard_of(np.zeros(0, np.int64), np.zeros(0, np.int64), 4).tolist() == []


def test_each_shard_has_a_partition_of_its_own_by_sparks_hash() -> None:
    # SELECT hash(0), hash(1), hash(2), hash(3)
    assert [_spark_hash(i) for i in (0, 1, 2, 3)] == [933211791, -559580957, 1765031574, -1823081949]
    for shards in (1, 2, 7, 64):
        assert [_spark_hash(key) % shards for key in shard_keys(shards)] == list(range(shards))
    # State is kept by these.
    assert (shard_keys(2), shard_keys(7)) == ([2, 0], [12, 0, 1, 9, 3, 2, 11])


def test_shards_are_stable_and_even() -> None:
    entries = np.arange(100_000)
    shards = shard_of(np.full(100_000, 7), entries, 4)
    assert shard_of(np.array([7]), np.array([4711]), 4)[0] == shards[4711]
    assert np.bincount(shards).min() > 20_000
    assert (shards == shard_of(np.full(100_000, 7), entries, 4)).all()
