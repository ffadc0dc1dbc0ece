"""Rows in state by when they are due: the time slots, and the queues of rows that wait for a place."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tracker.buckets.large_rows import NONE_LARGE, Budget, LargeRule
from tracker.ends import MOST_ENDED
from tracker.messages import Int64Array, concat, in_order, int64, where
from tracker.packing import LARGE_BYTES, in_parts, payload_sizes
from tracker.store import Store, get_rows, put_rows

# About the duration of a quick batch: narrower slots cost more store calls; of wider ones more rows are written again.
SLOT_MILLIS = 200

# About the bytes of a value of a pile: of a pile a tick reads what it takes, and at most so much more.
_PILE_BYTES = 2 << 20

_TABLE = "slots"
_PILES = "slot_piles"


class Pile(NamedTuple):
    """The large rows of a slot, as values that are taken one after another.

    Attributes:
        first, end: the values have the numbers from `first` to before `end`.
        rows: their number of rows.
        n_bytes: of the payloads.
    """

    first: int
    end: int
    rows: int
    n_bytes: int


class TimeSlots:
    """Rows by `deliver_at`. A slot is a few packed values; a cutoff within a slot has its later rows written again.

    Large rows of a slot are a pile beside it, because a tick may take few of many.

    Args:
        meta: the attribute of that name, which the caller saves: by slot (ms since the epoch, divided by SLOT_MILLIS)
            its number of values and of rows. None: there are no rows.
        large: the attribute of that name, which the caller saves: the bytes of large payloads that are in no pile, by
            slot that has some.
        piles: the attribute of that name, which the caller saves: by slot.
        pile_rule: the attribute of that name, which the caller saves: the rule by which the rows of all piles are
            large; None: they are by several rules.
    """

    def __init__(
        self,
        store: Store,
        meta: dict[int, tuple[int, int]] | None = None,
        large: dict[int, int] | None = None,
        piles: dict[int, Pile] | None = None,
        pile_rule: LargeRule | None = None,
    ) -> None:
        self._store = store
        self.meta = meta or {}
        self.large = large or {}
        self.piles = piles or {}
        self.pile_rule = pile_rule
        self._rule = NONE_LARGE

    def __len__(self) -> int:
        """The number of rows."""
        return sum(rows for _, rows in self.meta.values()) + sum(pile.rows for pile in self.piles.values())

    @property
    def earliest(self) -> int | None:
        """The start of the first slot that has rows, ms since the epoch; None: there are no rows."""
        slots = self.meta.keys() | self.piles.keys()
        return min(slots) * SLOT_MILLIS if slots else None

    @property
    def large_bytes(self) -> int:
        """The bytes of large payloads."""
        return sum(self.large.values()) + sum(pile.n_bytes for pile in self.piles.values())

    def begin_tick(self, rule: LargeRule) -> None:
        """Begins a tick, in which rows are large by a rule."""
        self._rule = rule
        if not self.piles:
            self.pile_rule = rule
        elif self.pile_rule != rule:
            self.pile_rule = None

    def add_rows(self, rows: pa.Table) -> None:
        """Adds rows of MESSAGES, each to the slot of its `deliver_at`."""
        if not rows.num_rows:
            return
        rows = in_order(rows)
        slots = int64(rows, "deliver_at") // SLOT_MILLIS
        starts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 1))
        ends = [*starts[1:].tolist(), rows.num_rows]
        are_large = self._rule.are_large(rows)
        for slot, start, end in zip(slots[starts].tolist(), starts.tolist(), ends, strict=True):
            of_slot, in_pile = rows.slice(start, end - start), are_large[start:end]
            if in_pile.any():
                self._pile_up(slot, where(of_slot, in_pile))
                of_slot = where(of_slot, ~in_pile)
            if not of_slot.num_rows:
                continue
            chunks, count = self.meta.get(slot, (0, 0))
            put_rows(self._store, _TABLE, (slot, chunks), of_slot)
            self.meta[slot] = (chunks + 1, count + of_slot.num_rows)
            sizes = payload_sizes(of_slot)
            if n_bytes := int(sizes[sizes >= LARGE_BYTES].sum()):
                self.large[slot] = self.large.get(slot, 0) + n_bytes

    def take_due(self, cutoff: int, most: Budget | None = None) -> pa.Table:
        """Removes and returns the rows that are due at the cutoff or before, in the order of delivery.

        Args:
            cutoff: ms since the epoch; it may be within a slot, whose later rows stay.
            most: what the rows may have together; large ones beyond it stay. None: all come.
        """
        due = []
        for slot in sorted(slot for slot in self.meta.keys() | self.piles.keys() if slot * SLOT_MILLIS <= cutoff):
            is_whole = (slot + 1) * SLOT_MILLIS - 1 <= cutoff
            rows = self._take(slot)
            if not is_whole:
                is_due = int64(rows, "deliver_at") <= cutoff
                self.add_rows(where(rows, ~is_due))
                rows = where(rows, is_due)
            if most is not None:
                rows = in_order(rows)
                fits = most.fitting(rows)
                self.add_rows(where(rows, ~fits))
                rows = where(rows, fits)
            due += [rows, *self._take_from_pile(slot, cutoff, most)]
        return in_order(concat(due))

    def find_rows(self, times: Iterable[int]) -> list[pa.Table]:
        """Returns the rows of the slots that contain any of some times, and keeps them.

        Args:
            times: ms since the epoch.
        """
        return self._of({time // SLOT_MILLIS for time in times} & (self.meta.keys() | self.piles.keys()))

    def within(self, start: int, end: int) -> list[pa.Table]:
        """Returns the rows of the slots that overlap `start` to `end`, ms since the epoch, and keeps them."""
        slots = self.meta.keys() | self.piles.keys()
        return self._of(slot for slot in slots if start // SLOT_MILLIS <= slot <= end // SLOT_MILLIS)

    def _of(self, slots: Iterable[int]) -> list[pa.Table]:
        found = []
        for slot in sorted(slots):
            found += [self._get(_TABLE, slot, chunk) for chunk in range(self.meta.get(slot, (0, 0))[0])]
            pile = self.piles.get(slot, _NO_PILE)
            found += [self._get(_PILES, slot, number) for number in range(pile.first, pile.end)]
        return found

    def _take(self, slot: int) -> pa.Table:
        chunks = []
        self.large.pop(slot, None)
        for chunk in range(self.meta.pop(slot, (0, 0))[0]):
            chunks.append(self._get(_TABLE, slot, chunk))
            self._store.remove(_TABLE, (slot, chunk))
        return concat(chunks)

    def _pile_up(self, slot: int, rows: pa.Table) -> None:
        """Adds large rows to the end of a slot's pile."""
        pile = self.piles.get(slot, _NO_PILE)
        parts = list(in_parts(rows, most_bytes=_PILE_BYTES))
        for number, part in enumerate(parts, pile.end):
            put_rows(self._store, _PILES, (slot, number), part)
        self.piles[slot] = Pile(
            pile.first,
            pile.end + len(parts),
            pile.rows + rows.num_rows,
            pile.n_bytes + int(payload_sizes(rows).sum()),
        )

    def _take_from_pile(self, slot: int, cutoff: int, most: Budget | None) -> list[pa.Table]:
        """Removes and returns those rows of a slot's pile that are due, and for which there is room."""
        pile = self.piles.pop(slot, None)
        if pile is None:
            return []
        due, kept, number = [], [], pile.first
        is_known = self.pile_rule is not None  # else rows may not be large any more, and wait for no room
        is_full = most is not None and most.is_spent
        while number < pile.end and not (is_known and is_full):
            rows = self._get(_PILES, slot, number)
            self._store.remove(_PILES, (slot, number))
            number += 1
            is_due = int64(rows, "deliver_at") <= cutoff
            goes = is_due.copy()
            if most is not None:
                goes[is_due] = most.fitting(where(rows, is_due))
                is_full = most.is_spent or bool((goes != is_due).any())
            due.append(where(rows, goes))
            kept.append(where(rows, ~goes))
        gone, n_bytes = sum(rows.num_rows for rows in due), sum(int(payload_sizes(rows).sum()) for rows in due)
        # What stays of the values that were read comes first again.
        parts = list(in_parts(concat(kept), most_bytes=_PILE_BYTES))
        for part in reversed(parts):
            number -= 1
            put_rows(self._store, _PILES, (slot, number), part)
        if number < pile.end:
            self.piles[slot] = Pile(number, pile.end, pile.rows - gone, pile.n_bytes - n_bytes)
        return due

    def _get(self, table: str, slot: int, number: int) -> pa.Table:
        return get_rows(self._store, table, (slot, number))


_NO_PILE = Pile(0, 0, 0, 0)

# The most rows of a packed value: a tick that takes the first rows of a long queue does not rewrite the others.
PIECE_ROWS = 10_000

_QUEUES = "waiting"

_END = "ends_at"  # a column of a piece
_PLACE_OF_END = 4  # of the earliest in a piece's item

# A source topic and the name of a subscription.
Queue = tuple[str, str]


def _without_ends(rows: pa.Table) -> pa.Table:
    return rows.drop_columns([_END]) if _END in rows.column_names else rows


class WaitingRows:
    """Queues of rows, each as packed values in the order in which they were added.

    Args:
        saved: the property `meta`, which the caller saves; None: there are no rows.
    """

    def __init__(self, store: Store, saved: dict[str, Any] | None = None) -> None:
        self._store = store
        saved = saved or {}
        self._next: int = saved.get("next", 0)
        # By queue its pieces in order: [number, rows, earliest `deliver_at`, latest `deliver_at`], ms since the epoch,
        # and where rows have an end, the earliest.
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
        return {queue: sum(n for _, n, *_ in pieces) for queue, pieces in self._pieces.items()}

    @property
    def earliest(self) -> int | None:
        """The earliest `deliver_at`, ms since the epoch; None: there are no rows."""
        return min((first for pieces in self._pieces.values() for _, _, first, *_ in pieces), default=None)

    @property
    def with_ends(self) -> set[Queue]:
        """The queues of which rows have an end."""
        return {queue for queue, pieces in self._pieces.items() if any(len(p) > _PLACE_OF_END for p in pieces)}

    def add_rows(self, queue: Queue, rows: pa.Table, ends: Int64Array | None = None) -> None:
        """Adds rows to the end of a queue.

        Args:
            rows: as MESSAGES.
            ends: int64, (rows,), ms since the epoch: `take_ended` takes each row from then on; None: none has an end.
        """
        if ends is not None:
            rows = rows.append_column(_END, pa.array(ends))
        for piece in in_parts(rows, PIECE_ROWS):
            self._pieces.setdefault(queue, []).append(self._put(piece))

    def take_ended(self, now: int) -> pa.Table:
        """Removes and returns rows whose end has come by now, ms since the epoch; the others keep their order.

        These are about MOST_ENDED; the others follow with the next calls, unless `take_rows` takes them before.
        """
        taken: list[pa.Table] = []
        for queue, pieces in list(self._pieces.items()):
            kept = []
            for piece in pieces:
                is_full = sum(rows.num_rows for rows in taken) >= MOST_ENDED
                if is_full or len(piece) <= _PLACE_OF_END or piece[_PLACE_OF_END] > now:
                    kept.append(piece)
                    continue
                rows = self._get(piece[0])
                self._store.remove(_QUEUES, (piece[0], 0))
                has_ended = int64(rows, _END) <= now
                taken.append(_without_ends(where(rows, has_ended)))
                if not has_ended.all():
                    kept.append(self._put(where(rows, ~has_ended)))
            self._pieces[queue] = kept
            if not kept:
                del self._pieces[queue]
        return concat(taken)

    def take_rows(self, limit: Callable[[Queue], int | None]) -> pa.Table:
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
                self._store.remove(_QUEUES, (number, 0))
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
        return concat(_without_ends(rows) for rows in taken)

    def find_rows(self, times: Iterable[int]) -> list[pa.Table]:
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
            _without_ends(self._get(number))
            for pieces in self._pieces.values()
            for number, _, first, last, *_ in pieces
            if is_wanted(first, last)
        ]

    def _put(self, rows: pa.Table) -> list[int]:
        """Stores a piece; returns its item of `_pieces`."""
        due, number = int64(rows, "deliver_at"), self._next
        put_rows(self._store, _QUEUES, (number, 0), rows)
        self._next += 1
        piece = [number, rows.num_rows, int(due.min()), int(due.max())]
        return [*piece, int(int64(rows, _END).min())] if _END in rows.column_names else piece

    def _get(self, number: int) -> pa.Table:
        return get_rows(self._store, _QUEUES, (number, 0))
