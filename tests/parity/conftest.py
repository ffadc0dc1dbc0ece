"""The tracker with its immutable buckets kept in a list."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tests.support.tracker.messages import messages, positions
from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.buckets.index_bits import IndexBits
from tracker.messages import concat, int64
from tracker.store import MemoryStore


class Buckets:
    """A tracker, its store, and what it sealed.

    `fails` makes the next reads of a segment fail, as a storage would.
    """

    def __init__(self, near_until: int = 0) -> None:
        self.store = MemoryStore()
        self.tracker = DelayedDeliveryTracker(self.store)
        self.sealed: list[pa.Table] = []
        self.fails = 0
        self.near_until = near_until

    def add(self, *rows: tuple[int, int, int], cutoff: int = 0) -> list[tuple[int, int]]:
        """Adds messages of (ledger, entry, deliver_at); returns the positions that are due and not tracked."""
        return positions(self.tracker.add_messages(messages(rows), cutoff))

    def seal(self, load_horizon: int = 0) -> pa.Table:
        """Seals; what the load horizon has passed in earlier buckets is loaded."""
        before = self.tracker.load_horizon
        bucket = self.tracker.seal_bucket(load_horizon, self.near_until)
        self.load(before, self.tracker.load_horizon)
        if bucket.num_rows:
            self.sealed.append(bucket)
        return bucket

    def load(self, start: int, end: int) -> None:
        segment = self.segment(start, end)
        self.tracker.load_segment(segment)

    def segment(self, start: int, end: int) -> pa.Table:
        if self.fails:
            self.fails -= 1
            raise OSError("injected")
        rows = concat(self.sealed)
        due = int64(rows, "deliver_at")
        return rows.filter(pa.array((due >= start) & (due < end)))

    def due(self, cutoff: int) -> list[tuple[int, int]]:
        return positions(self.tracker.get_scheduled_messages(cutoff))

    def contains(self, ledger: int, entry: int) -> bool:
        """Whether a position is known, so that it is not taken in once more."""
        return bool(IndexBits(self.store).contains(np.array([ledger]), np.array([entry]))[0])

    def restart(self) -> None:
        """Another tracker on the same store."""
        self.tracker.save()
        self.tracker = DelayedDeliveryTracker(self.store)


@pytest.fixture
def buckets() -> Buckets:
    return Buckets()
