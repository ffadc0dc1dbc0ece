"""Keeps the messages of a topic partition, until Spark has committed their batches."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace

import pyarrow as pa

from broker.position import Position
from streaming.source.receiving.few_rows import FewRows, table_of
from tracker.due_time import MAX_TIME_MILLIS
from tracker.messages import int64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EntryRows:
    """Successive entries of a topic partition, with all of their messages.

    Attributes:
        rows: the messages, as MESSAGES, or few of them.
        n_bytes: of the messages, about.
        earliest: the least `deliver_at` of the messages, ms since the epoch.
        start: the last entry that was read before these.
        last: the last entry that was read with them.
    """

    rows: pa.Table | FewRows
    n_bytes: int
    earliest: int
    start: Position
    last: Position

    @property
    def n_messages(self) -> int:
        """The number of messages; 1 for entries without any, so that they get into a batch."""
        return max(1, int(self.rows.num_rows))

    def rows_between(self, after: Position, last: Position) -> pa.Table | FewRows:
        """Returns the rows of entries after `after`, up to `last`."""
        rows = self.rows
        if not rows.num_rows or (after <= self.start and self.last <= last):
            return rows
        if isinstance(rows, FewRows):
            return rows.between(after, last)
        ledgers, entries = int64(rows, "ledger_id"), int64(rows, "entry_id")
        wanted = ((ledgers > after.ledger_id) | ((ledgers == after.ledger_id) & (entries > after.entry_id))) & (
            (ledgers < last.ledger_id) | ((ledgers == last.ledger_id) & (entries <= last.entry_id))
        )
        return rows if wanted.all() else rows.filter(pa.array(wanted))


class ReceivedRows:
    """Entries of a topic partition as they came together, and which are in batches. One thread at a time may use it.

    Args:
        topic: the topic partition's name.
        after: the last entry that an earlier run has ingested.

    Attributes:
        read_to: all entries up to this one have come in.
        last_in_batch: the last entry that is in a batch.
        waiting_messages: the number of messages that are in no batch yet.
        waiting_bytes: their bytes, about.
        kept_bytes: about the bytes of all messages, in batches or not.
    """

    def __init__(self, topic: str, after: Position) -> None:
        self._topic = topic
        self._kept: deque[EntryRows] = deque()
        # Rows that came after a batch had passed their entries, for the next ones.
        self._late: list[pa.Table | FewRows] = []
        self.read_to = after
        self.last_in_batch = after
        self.waiting_messages = 0
        self.waiting_bytes = 0
        self.kept_bytes = 0

    def has_due(self, cutoff: int) -> bool:
        """Whether a message that is in no batch yet is due by a cutoff, ms since the epoch."""
        return any(entries.last > self.last_in_batch and entries.earliest <= cutoff for entries in self._kept)

    def add(self, rows: pa.Table | FewRows, n_bytes: int, last: Position) -> int:
        """Adds rows as new ones, or to the last ones where their entries are before its end.

        Args:
            rows: as MESSAGES, or few of them.
            n_bytes: of the rows, about.
            last: all entries up to this one have come in.

        Returns:
            the least `deliver_at` of the rows, ms since the epoch.
        """
        earliest = MAX_TIME_MILLIS
        if rows.num_rows:
            earliest = rows.earliest if isinstance(rows, FewRows) else int(int64(rows, "deliver_at").min())
        if last > self.read_to:
            if self._late:
                rows, self._late = table_of([*self._late, rows]), []
            self._kept.append(EntryRows(rows, n_bytes, earliest, self.read_to, last))
            self.read_to = last
        elif self._kept and self.read_to > self.last_in_batch:
            entries = self._kept[-1]
            self._kept[-1] = replace(
                entries,
                rows=table_of([entries.rows, rows]),
                n_bytes=entries.n_bytes + n_bytes,
                earliest=min(entries.earliest, earliest),
            )
        else:
            _log.error(
                "%s: entry %s came after the batches had passed it: the next has it, a stop before that loses it",
                self._topic,
                last,
            )
            self._late.append(rows)
        self._note_in_batch(self.last_in_batch)
        return earliest

    def take_into_batch(self, max_messages: int, max_bytes: int, up_to: Position | None) -> tuple[Position, int, int]:
        """Takes waiting entries into a batch: see `Receiver.take_into_batch`."""
        messages = n_bytes = 0
        if max_messages <= 0 or max_bytes <= 0:
            return self.last_in_batch, 0, 0
        for entries in self._kept:
            if entries.last <= self.last_in_batch:
                continue
            if up_to is not None and entries.last > up_to:
                break
            if messages and (messages + entries.n_messages > max_messages or n_bytes + entries.n_bytes > max_bytes):
                break
            messages += entries.n_messages
            n_bytes += entries.n_bytes
            end = entries.last
        if messages:
            self._note_in_batch(end)
        return self.last_in_batch, messages, n_bytes

    def between(self, after: Position, last: Position) -> list[EntryRows]:
        """Returns those with entries after `after`, up to `last`, and counts these as taken into a batch."""
        if last > self.last_in_batch:
            self._note_in_batch(last)
        return [entries for entries in self._kept if entries.last > after and entries.start < last]

    def forget(self, last: Position) -> None:
        """Drops entries up to a given one, as far as all that came with them are."""
        while self._kept and self._kept[0].last <= last:
            self._kept.popleft()
        self.kept_bytes = sum(entries.n_bytes for entries in self._kept)

    def _note_in_batch(self, end: Position) -> None:
        self.last_in_batch = end
        left = [entries for entries in self._kept if entries.last > end]
        self.waiting_messages = sum(entries.n_messages for entries in left)
        self.waiting_bytes = sum(entries.n_bytes for entries in left)
        self.kept_bytes = sum(entries.n_bytes for entries in self._kept)
