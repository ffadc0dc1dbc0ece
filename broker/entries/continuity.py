"""Finds the gaps in a topic partition's entries: places where entries are missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.position import START, Position
from tracker.messages import int64

_NOT_KNOWN = -2  # -1 is the index before a topic's first message


class CameEntry(NamedTuple):
    """An entry that came: with messages, or as a part of one, as a chunk before the last one.

    Attributes:
        position: of the entry.
        n_messages: as the broker's indexes count them; 1 for a part.
        first_index: broker entry index of its first message; None: unknown.
    """

    position: Position
    n_messages: int
    first_index: int | None


@dataclass(frozen=True)
class Gap:
    """A gap between two entries that came one after the other: others are, or may be, between them.

    Attributes:
        after: the last entry before the gap.
        before: the first entry after the gap.
        after_index: broker entry index of the last message of `after`; None: unknown.
        before_index: broker entry index of the first message of `before`; None: unknown.
    """

    after: Position
    before: Position
    after_index: int | None = None
    before_index: int | None = None


class Continuity:
    """Follows the entries of a topic partition, and finds the gaps between them.

    Within a ledger, gaps are found by entry ids; indexes could hide one there, since the broker counts a batch of a
    transaction as one message. From one ledger to the next, gaps are found by indexes. If the broker keeps none, every
    change of ledgers counts as a gap, and the broker can be asked how the first ledger ended.

    Args:
        after: the entry before the first one that comes; START: unknown.
    """

    def __init__(self, after: Position) -> None:
        self._last = after
        self._last_index = _NOT_KNOWN

    @property
    def last(self) -> Position:
        """The last entry that came, or the one before the first; START: unknown."""
        return self._last

    @property
    def last_index(self) -> int | None:
        """The broker entry index of the last message of `last`, -1 before a topic's first one; None: unknown."""
        return _known(self._last_index)

    def begin_after(self, position: Position, index: int | None = None) -> None:
        """Sets the entry before the next one.

        Args:
            position: of the entry; with entry_id -1 the beginning of a ledger.
            index: the broker entry index of the last message up to there, -1 before a topic's first one; None: unknown.
        """
        self._last = position
        self._last_index = _NOT_KNOWN if index is None else index

    def gaps_of(self, entries: Iterable[CameEntry]) -> list[Gap]:
        """As `gaps`, of entries one by one: of few it takes far less time."""
        found = []
        for position, n_messages, first in entries:
            last, last_index = self._last, self._last_index
            if position <= last:
                continue
            if position.ledger_id == last.ledger_id:
                follows = position.entry_id == last.entry_id + 1
            else:
                follows = last == START or (last_index != _NOT_KNOWN and first == last_index + 1)
            if not follows:
                found.append(Gap(last, position, _known(last_index), first))
            self._last, self._last_index = position, _NOT_KNOWN if first is None else first + n_messages - 1
        return found

    def gaps(self, rows: pa.Table) -> list[Gap]:
        """Returns the gaps before and between the next entries. Those that are not after the last one are ignored.

        Args:
            rows: columns `ledger_id`, `entry_id`, `batch_size` and `first_index` of messages, in order.
        """
        ledgers, entries = int64(rows, "ledger_id"), int64(rows, "entry_id")
        is_new = (ledgers > self._last.ledger_id) | (
            (ledgers == self._last.ledger_id) & (entries > self._last.entry_id)
        )
        is_new[1:] &= (ledgers[1:] != ledgers[:-1]) | (entries[1:] != entries[:-1])  # the first row of each entry
        places = np.flatnonzero(is_new)
        if not len(places):
            return []
        ledgers, entries = ledgers[places], entries[places]
        firsts = pc.fill_null(rows["first_index"], _NOT_KNOWN).to_numpy()[places].astype(np.int64)
        lasts = np.where(firsts == _NOT_KNOWN, _NOT_KNOWN, firsts + int64(rows, "batch_size")[places] - 1)
        before_ledgers = np.concatenate(([self._last.ledger_id], ledgers[:-1]))
        before_entries = np.concatenate(([self._last.entry_id], entries[:-1]))
        before_lasts = np.concatenate(([self._last_index], lasts[:-1]))
        follows = np.where(
            ledgers == before_ledgers,
            entries == before_entries + 1,
            (before_lasts != _NOT_KNOWN) & (firsts == before_lasts + 1),
        )
        follows[0] |= self._last == START
        found = [
            Gap(
                Position(int(before_ledgers[i]), int(before_entries[i])),
                Position(int(ledgers[i]), int(entries[i])),
                _known(before_lasts[i]),
                _known(firsts[i]),
            )
            for i in np.flatnonzero(~follows).tolist()
        ]
        self._last = Position(int(ledgers[-1]), int(entries[-1]))
        self._last_index = int(lasts[-1])
        return found


def missing_ranges(gap: Gap, ledgers: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Returns the ranges of entries that are missing in a gap, as far as the broker still has their ledgers.

    Args:
        ledgers: the number of entries in each ledger that the broker still has.

    Returns:
        (ledger, first entry, last entry), both inclusive, ascending.
    """
    if gap.after.ledger_id == gap.before.ledger_id:
        ranges = [(gap.after.ledger_id, gap.after.entry_id + 1, gap.before.entry_id - 1)]
    else:
        between = [n for n in sorted(ledgers) if gap.after.ledger_id < n < gap.before.ledger_id]
        ranges = [
            (gap.after.ledger_id, gap.after.entry_id + 1, ledgers.get(gap.after.ledger_id, 0) - 1),
            *((n, 0, ledgers[n] - 1) for n in between),
            (gap.before.ledger_id, 0, gap.before.entry_id - 1),
        ]
    return [(ledger, first, last) for ledger, first, last in ranges if first <= last]


def positions_in(ranges: Iterable[tuple[int, int, int]]) -> Iterator[Position]:
    """Yields the entries of ranges, (ledger, first entry, last entry), one by one."""
    return (Position(ledger, entry) for ledger, first, last in ranges for entry in range(first, last + 1))


def _known(index: int | np.int64) -> int | None:
    return None if index == _NOT_KNOWN else int(index)
