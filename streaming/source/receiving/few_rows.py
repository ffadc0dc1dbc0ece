"""Rows of few messages, of which no table is made before there are many: a table of few costs more than its rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

from broker.position import Position, SourceTopic
from streaming.source.receiving.unreadable_messages import Row, rejected_row, why_unreadable
from tracker.messages import MESSAGES, concat, empty_table

_FIRST = 2  # a row has the values of the columns from here on
_DELIVER_AT, _PAYLOAD, _SCHEDULE_KEY = (
    MESSAGES.names.index(name) - _FIRST for name in ("deliver_at", "payload", "schedule_key")
)


class FewRows(NamedTuple):
    """Messages of a topic partition.

    Attributes:
        source: the topic partition.
        now: when they came, ms since the epoch.
        rows: the values of MESSAGES from `ledger_id` on.
    """

    source: SourceTopic
    now: int
    rows: list[Row]

    @property
    def num_rows(self) -> int:
        """The number of messages, as a table has it."""
        return len(self.rows)

    @property
    def earliest(self) -> int:
        """The least `deliver_at`, ms since the epoch."""
        return min(int(row[_DELIVER_AT]) for row in self.rows)

    @property
    def has_keys(self) -> bool:
        """Whether any of them has a schedule key."""
        return any(row[_SCHEDULE_KEY] is not None for row in self.rows)

    def between(self, after: Position, last: Position) -> FewRows:
        """Returns those of entries after `after`, up to `last`."""
        return self._replace(rows=[row for row in self.rows if after < row[:2] <= last])


def table_of(parts: Iterable[pa.Table | FewRows]) -> pa.Table:
    """Returns all messages as MESSAGES, in their order; those of few that come one after another as one chunk."""
    tables: list[pa.Table] = []
    few: list[FewRows] = []
    for part in parts:
        if isinstance(part, FewRows):
            few.append(part)
        elif part.num_rows:
            tables += [_table_of_few(few), part]
            few = []
    return concat([*tables, _table_of_few(few)])


def _table_of_few(parts: list[FewRows]) -> pa.Table:
    try:
        return _table(parts)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return _table([part._replace(rows=[_storable(part, row) for row in part.rows]) for part in parts])


def _table(parts: list[FewRows]) -> pa.Table:
    rows = [row for part in parts for row in part.rows]
    n = len(rows)
    if not n:
        return empty_table(MESSAGES)
    topic = pa.array([part.source.topic for part in parts for _ in part.rows], pa.string())
    partition = pa.array([part.source.partition for part in parts for _ in part.rows], pa.int32())
    # Most columns of most messages have no value, and without Python objects they take half the time.
    rest = [
        pa.nulls(n, f.type) if values.count(None) == n else pa.array(values, f.type)
        for values, f in zip(zip(*rows, strict=True), list(MESSAGES)[_FIRST:], strict=True)
    ]
    return pa.Table.from_arrays([topic, partition, *rest], schema=MESSAGES)


def _storable(part: FewRows, row: Row) -> Row:
    """Returns the row, or a rejected one with the reason where its values do not fit the columns."""
    try:
        _table([part._replace(rows=[row])])
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        return rejected_row(row[:5], part.now, row[_PAYLOAD], f"it can't be stored: {why_unreadable(error)}")
    return row
