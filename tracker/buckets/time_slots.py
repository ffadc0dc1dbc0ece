"""Time slots: the messages that are due soon; a slot has those due within the same SLOT_MILLIS."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from tracker.messages import concat, in_order, int64, where
from tracker.packing import pack, unpack
from tracker.row_sizes import LARGE_BYTES, Budget, payload_sizes
from tracker.store import Store, get_present

# About the duration of a quick batch: narrower slots cost more store calls; of wider ones more rows are written again.
SLOT_MILLIS = 200

_TABLE = "slots"


class TimeSlots:
    """Rows by `deliver_at`. A slot is a few packed values; a cutoff within a slot has its later rows written again.

    Args:
        store: where the rows are kept.
        meta: the attribute of that name, which the caller saves: by slot (ms since the epoch, divided by SLOT_MILLIS)
            its number of values and of rows. None: there are no rows.
        large: the attribute of that name, which the caller saves: the bytes of large payloads, by slot that has some.
    """

    def __init__(
        self, store: Store, meta: dict[int, tuple[int, int]] | None = None, large: dict[int, int] | None = None
    ) -> None:
        self._store = store
        self.meta = meta or {}
        self.large = large or {}

    def __len__(self) -> int:
        """The number of rows."""
        return sum(rows for _, rows in self.meta.values())

    @property
    def earliest(self) -> int | None:
        """The start of the first slot that has rows, ms since the epoch; None: there are no rows."""
        return min(self.meta) * SLOT_MILLIS if self.meta else None

    def add(self, rows: pa.Table) -> None:
        """Adds rows of MESSAGES, each to the slot of its `deliver_at`."""
        if not rows.num_rows:
            return
        rows = in_order(rows)
        slots = int64(rows, "deliver_at") // SLOT_MILLIS
        starts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 1))
        ends = [*starts[1:].tolist(), rows.num_rows]
        for slot, start, end in zip(slots[starts].tolist(), starts.tolist(), ends, strict=True):
            chunks, count = self.meta.get(slot, (0, 0))
            self._store.put(_TABLE, (slot, chunks), pack(rows.slice(start, end - start)))
            self.meta[slot] = (chunks + 1, count + end - start)
            sizes = payload_sizes(rows.slice(start, end - start))
            if n_bytes := int(sizes[sizes >= LARGE_BYTES].sum()):
                self.large[slot] = self.large.get(slot, 0) + n_bytes

    def take_due(self, cutoff: int, most: Budget | None = None) -> pa.Table:
        """Removes and returns the rows that are due at the cutoff or before, in the order of delivery.

        Args:
            cutoff: ms since the epoch; it may be within a slot, whose later rows stay.
            most: what the rows may have together; large ones beyond it stay. None: all come.
        """
        due = []
        for slot in sorted(slot for slot in self.meta if slot * SLOT_MILLIS <= cutoff):
            rows = self._take(slot)
            if (slot + 1) * SLOT_MILLIS - 1 > cutoff:
                is_due = int64(rows, "deliver_at") <= cutoff
                self.add(where(rows, ~is_due))
                rows = where(rows, is_due)
            if most is not None:
                rows = in_order(rows)
                fits = most.fitting(rows)
                self.add(where(rows, ~fits))
                rows = where(rows, fits)
            due.append(rows)
        return in_order(concat(due))

    def find(self, times: Iterable[int]) -> list[pa.Table]:
        """Returns the rows of the slots that contain any of some times, and keeps them.

        Args:
            times: ms since the epoch.
        """
        return self._of({time // SLOT_MILLIS for time in times} & self.meta.keys())

    def within(self, start: int, end: int) -> list[pa.Table]:
        """Returns the rows of the slots that overlap `start` to `end`, ms since the epoch, and keeps them."""
        return self._of(slot for slot in self.meta if start // SLOT_MILLIS <= slot <= end // SLOT_MILLIS)

    def _of(self, slots: Iterable[int]) -> list[pa.Table]:
        return [self._get(slot, chunk) for slot in sorted(slots) for chunk in range(self.meta[slot][0])]

    def _take(self, slot: int) -> pa.Table:
        chunks = []
        self.large.pop(slot, None)
        for chunk in range(self.meta.pop(slot)[0]):
            chunks.append(self._get(slot, chunk))
            self._store.remove(_TABLE, (slot, chunk))
        return concat(chunks)

    def _get(self, slot: int, chunk: int) -> pa.Table:
        return unpack(get_present(self._store, _TABLE, (slot, chunk)))
