"""Positions of entries in topic partitions, and sets of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

ENTRY_BITS = 31  # the bits of an entry id that is packed below a ledger id: a ledger of Pulsar has far fewer entries


class Position(NamedTuple):
    """The position of an entry in a topic partition. Positions compare in the topic's order."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Reads a position from its text, `ledger:entry`."""
        ledger_id, entry_id = text.split(":")
        return cls(int(ledger_id), int(entry_id))

    def follows(self, other: Position) -> bool:
        """Whether this entry is the very next one after the other, in the same ledger."""
        return self.ledger_id == other.ledger_id and self.entry_id == other.entry_id + 1

    @property
    def next(self) -> Position:
        """The next position in the same ledger, whether or not there is an entry."""
        return Position(self.ledger_id, self.entry_id + 1)


START = Position(-1, -1)


@dataclass(frozen=True)
class SourceTopic:
    """A topic partition of a route."""

    name: str  # full name of the partition
    topic: str  # name of the topic, as the route has it
    partition: int  # number of the partition; -1: not partitioned


class EntrySet:
    """A set of entries of a topic partition, stored as runs of consecutive ones. Adding in order is quick."""

    def __init__(self) -> None:
        self._firsts: list[Position] = []
        self._lasts: list[Position] = []

    def __bool__(self) -> bool:
        return bool(self._lasts)

    def __contains__(self, position: Position) -> bool:
        if not self._lasts or position > self._lasts[-1]:
            return False
        run = bisect_right(self._firsts, position) - 1
        return run >= 0 and position <= self._lasts[run]

    @property
    def last(self) -> Position:
        """The last entry, in the topic's order; START: the set is empty."""
        return self._lasts[-1] if self._lasts else START

    @property
    def runs(self) -> Iterator[tuple[Position, Position]]:
        """The first and last entry of each run, ascending."""
        return zip(self._firsts, self._lasts, strict=True)

    def gaps(self, after: Position) -> list[tuple[Position, Position]]:
        """Returns the entries before and after each gap where others may be missing, ascending.

        Args:
            after: only gaps after this entry.
        """
        ends = [max(last, after) for last in (START, *self._lasts)]
        return [
            (last, first)
            for last, first in zip(ends, self._firsts, strict=False)
            if first > last and not first.follows(last)
        ]

    def add(self, position: Position) -> None:
        """Adds an entry, whether or not it is in the set."""
        if position not in self:
            self.add_run(position, position)

    def add_run(self, first: Position, last: Position) -> None:
        """Adds consecutive entries of one ledger, none of which is in the set."""
        if not self._lasts or first > self._lasts[-1]:
            if self._lasts and first.follows(self._lasts[-1]):
                self._lasts[-1] = last
                return
            run = len(self._firsts)
        else:
            run = bisect_right(self._firsts, first)
        self._firsts.insert(run, first)
        self._lasts.insert(run, last)

    def forget(self, last: Position) -> None:
        """Drops the runs that end with this entry or before it."""
        run = bisect_right(self._lasts, last)
        del self._firsts[:run], self._lasts[:run]
