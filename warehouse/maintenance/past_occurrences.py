"""Finds the rows of recurring messages in the delayed index that nobody needs any more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.messages import BoolArray, is_among
from tracker.recurrence.columns import counts_from, stored
from tracker.recurrence.recurrence import Recurrence
from warehouse.named_queries import NamedQueries, Sql
from warehouse.pending import IS_SKIPPED_OCCURRENCE

_SQL = NamedQueries(__file__, is_skipped_occurrence=IS_SKIPPED_OCCURRENCE)

_Message = tuple[int, int, int]  # ledger, entry, batch index


class OccurrenceRetention:
    """The recurring messages of some ledgers, and the last occurrence of each that was delivered or skipped.

    Args:
        query: runs SQL over the tables.
        in_ledgers: SQL condition: a row is of one of the ledgers.
        now: the current time, ms since the epoch.
        horizon: rows that are due at this time or later stay, ms since the epoch.
    """

    def __init__(self, query: Callable[[Sql], pa.Table], in_ledgers: Sql, now: int, horizon: int) -> None:
        self._now = now
        done = query(_SQL("done_occurrences", in_ledgers=in_ledgers))
        self._last: dict[tuple[str, _Message], tuple[int, int]] = {}
        for name, *message, number, at in zip(*(column.to_pylist() for column in done.columns), strict=True):
            key = name, _message(*message)
            self._last[key] = max((number, at or 0), self._last.get(key, (0, 0)))
        rows = query(_SQL("first_rows", in_ledgers=in_ledgers))
        self._rules: dict[_Message, tuple[Recurrence, int, int]] = {}
        for *message, published, properties in zip(*(column.to_pylist() for column in rows.columns), strict=True):
            self._rules[_message(*message)] = *stored(dict(properties or ()), published), published
        self._with_next = query(_SQL("with_later_row", horizon=horizon, in_ledgers=in_ledgers))

    def may_go_on(self, rows: pa.Table) -> BoolArray:
        """Returns a mask, bool, (rows,), of the first rows of recurring messages that still have a later row.

        If the later row is cancelled, a restore needs the first one again.
        """
        is_first = pc.and_(pc.is_valid(rows["occurrence"]), pc.is_null(rows["sequence"]))
        has_next = is_among(rows, self._with_next, ["ledger_id", "entry_id", "batch_index"])
        may_go_on: BoolArray = has_next & is_first.to_numpy(zero_copy_only=False)
        return may_go_on

    def are_done(self, rows: pa.Table, subscription: str) -> BoolArray:
        """Returns a mask of the rows of recurring messages that a subscription does not need any more.

        The first row of a recurring message is needed until its last occurrence.

        Args:
            rows: rows of the delayed index.

        Returns:
            bool, (rows,); False for messages that do not recur.
        """
        columns = (
            rows[name].to_pylist() for name in ("ledger_id", "entry_id", "batch_index", "occurrence", "sequence")
        )
        done = np.zeros(rows.num_rows, np.bool_)
        for i, (*at, number, sequence) in enumerate(zip(*columns, strict=True)):
            if number is not None:
                message = _message(*at)
                last = self._last.get((subscription, message), (0, 0))
                done[i] = last[0] >= number and (sequence is not None or self._has_ended(message, last))
        return done

    def _has_ended(self, message: _Message, last: tuple[int, int]) -> bool:
        if message not in self._rules:
            return True
        rule, start, published = self._rules[message]
        number, since = last[0], counts_from(last[1], published, self._now)
        return rule.next_occurrence(number, since, start, since) is None


def _message(ledger_id: int, entry_id: int, batch_index: int) -> _Message:
    return ledger_id, entry_id, max(batch_index, 0)
