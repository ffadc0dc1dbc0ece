"""Due rows that wait because shaping had no place for them, in a queue for each subscription."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from tracker.buckets.time_slots import SLOT_MILLIS
from tracker.messages import concat, int64
from tracker.packing import pack, unpack
from tracker.row_sizes import in_parts
from tracker.store import Store, get_present

# The most rows of a packed value: a tick that takes the first rows of a long queue does not rewrite the others.
PIECE_ROWS = 10_000

_TABLE = "waiting"

# A source topic and the name of a subscription.
Queue = tuple[str, str]


class WaitingRows:
    """Queues of rows, each as packed values in the order in which they were added.

    Args:
        store: where the rows are kept.
        saved: the property `meta`, which the caller saves; None: there are no rows.
    """

    def __init__(self, store: Store, saved: dict[str, Any] | None = None) -> None:
        self._store = store
        saved = saved or {}
        self._next: int = saved.get("next", 0)
        # By queue its pieces in order: [number, rows, earliest `deliver_at`, latest `deliver_at`], ms since the epoch.
        self._pieces: dict[Queue, list[list[int]]] = {
            (topic, name): pieces for topic, name, pieces in saved.get("queues", ())
        }

    def __len__(self) -> int:
        """The number of rows."""
        return sum(self.counts.values())

    @property
    def meta(self) -> dict[str, Any]:
        """The metadata of the queues, as JSON has it, which the caller saves."""
        return {"next": self._next, "queues": [[*queue, pieces] for queue, pieces in self._pieces.items()]}

    @property
    def counts(self) -> dict[Queue, int]:
        """How many rows wait, by queue; queues without rows are left out."""
        return {queue: sum(n for _, n, _, _ in pieces) for queue, pieces in self._pieces.items()}

    @property
    def earliest(self) -> int | None:
        """The earliest `deliver_at`, ms since the epoch; None: there are no rows."""
        return min((first for pieces in self._pieces.values() for _, _, first, _ in pieces), default=None)

    def add(self, queue: Queue, rows: pa.Table) -> None:
        """Adds rows of MESSAGES to the end of a queue."""
        for piece in in_parts(rows, PIECE_ROWS):
            self._pieces.setdefault(queue, []).append(self._put(piece))

    def take(self, limit: Callable[[Queue], int | None]) -> pa.Table:
        """Removes and returns the first rows of each queue, queue by queue.

        Args:
            limit: returns how many rows to take from a queue at most; None: all.
        """
        taken = []
        for queue in list(self._pieces):
            n_left = limit(queue)
            pieces = self._pieces.pop(queue)
            while pieces and (n_left is None or n_left > 0):
                number, *_ = pieces.pop(0)
                rows = self._get(number)
                self._store.remove(_TABLE, (number, 0))
                if n_left is not None:
                    if rows.num_rows > n_left:
                        pieces.insert(0, self._put(rows.slice(n_left)))
                        rows = rows.slice(0, n_left)
                    n_left -= rows.num_rows
                taken.append(rows)
            if pieces:
                self._pieces[queue] = pieces
        if not self._pieces:
            self._next = 0
        return concat(taken)

    def find(self, times: Iterable[int]) -> list[pa.Table]:
        """Returns the rows of the pieces that overlap the time slots of some times, ms since the epoch; keeps them."""
        slots = sorted({time // SLOT_MILLIS for time in times}) if self._pieces else []
        return self._where(
            lambda first, last: bisect_left(slots, first // SLOT_MILLIS) < bisect_right(slots, last // SLOT_MILLIS)
        )

    def within(self, start: int, end: int) -> list[pa.Table]:
        """Returns the rows of the pieces that overlap `start` to `end`, ms since the epoch, and keeps them."""
        return self._where(lambda first, last: first <= end and start <= last)

    def _where(self, is_wanted: Callable[[int, int], bool]) -> list[pa.Table]:
        """Returns the rows of the pieces that `is_wanted` chooses by their earliest and latest `deliver_at`, ms."""
        return [
            self._get(number)
            for pieces in self._pieces.values()
            for number, _, first, last in pieces
            if is_wanted(first, last)
        ]

    def _put(self, rows: pa.Table) -> list[int]:
        """Stores a piece; returns its item of `_pieces`."""
        due, number = int64(rows, "deliver_at"), self._next
        self._store.put(_TABLE, (number, 0), pack(rows))
        self._next += 1
        return [number, rows.num_rows, int(due.min()), int(due.max())]

    def _get(self, number: int) -> pa.Table:
        return unpack(get_present(self._store, _TABLE, (number, 0)))
