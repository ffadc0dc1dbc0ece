"""What is cancelled is kept in bitmaps, compressed as the settings say."""

from __future__ import annotations

import numpy as np
import pytest

from tracker.message_state.changes import CancelledMessages, Compression
from tracker.messages import MessageIds
from tracker.store import MemoryStore


@pytest.mark.parametrize("codec", ["NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY"])
def test_what_is_cancelled_survives_any_compression(codec: str) -> None:
    chance = np.random.default_rng(1)
    entries = chance.choice(200_000, 20_000, replace=False)
    ledgers = np.full(len(entries), 3)
    store = MemoryStore()
    cancelled = CancelledMessages(store, Compression(codec, 100))
    cancelled.add_entries(1, ledgers, entries, entries * 0 + 1_000)
    cancelled.add_messages(
        1,
        MessageIds(ledgers[:2], np.array([300_000, 300_000]), np.array([0, 2])),
        np.array([3, 3]),
        entries[:2],
    )
    cancelled.save()
    again = CancelledMessages(store, Compression("NONE"))
    assert again.count == 20_002
    assert again.n_bytes > 0
    every = np.arange(200_000)
    found = again.contains(1, MessageIds(np.full(200_000, 3), every, every * 0 - 1))
    assert set(np.flatnonzero(found).tolist()) == set(entries.tolist())
    of_batch = again.contains(1, MessageIds(np.full(3, 3), np.full(3, 300_000), np.arange(3)))
    assert of_batch.tolist() == [True, False, True]
    again.drop_expired(10**9)
    assert not again
