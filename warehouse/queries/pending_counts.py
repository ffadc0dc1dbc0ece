"""Counts pending messages while reading little: most rows are counted by the statistics of files.

A row that is not due yet waits for all of the topic's subscriptions, unless it is for one subscription, is an
occurrence of a recurring message, or is of an entry that a CANCEL or MOVE row names. Only these exceptions, and rows
that are due, are examined; all others are counted by their times alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import Int64Array, int64
from warehouse.delta.row_counts import RowCounts
from warehouse.named_queries import TRUE, NamedQueries, Sql, all_of, columns, none_of
from warehouse.queries.index_rows import near_entries
from warehouse.queries.listing import ORDER, State
from warehouse.queries.pending_rows import SEQUENCE, PendingRows, version_gone

_COLUMNS = (*ORDER, "subscription", "occurrence")
_NEVER = 2**63 - 1

_SQL = NamedQueries(__file__, sequence=SEQUENCE, held=HELD_DELIVER_AT)
_IS_OWN = _SQL("is_own")

# To find the first or last row that waits, about so many rows are read at first, then so many times more each time.
_LEAST_READ = 20_000
_GROWTH = 8


class PendingCounts:
    """Divides the rows that match a filter into those to be examined and the others, and counts the others.

    Args:
        rows: the matching rows. If the filter has conditions on more than times and subscription, all are examined.
    """

    def __init__(self, rows: PendingRows) -> None:
        self._rows = rows
        wanted = rows.wanted
        # Rows due by then are examined: they may be delivered, or were dispatched before a subscription was added.
        self._split = max(rows.as_of, rows.memberships.handed_out(rows.topic, rows.names))
        self._end = _NEVER if wanted.due_before is None else wanted.due_before
        is_by_time = not wanted.has_texts and wanted.ledger_id is None and wanted.state is State.WAITING
        self._begin = max(rows.start, self._split + 1) if is_by_time else self._end
        self._later = _SQL("is_later", begin=self._begin, end=self._end)
        partition = rows.partition
        self._in_partition = TRUE if partition is None else _SQL("in_partition", partition=partition)
        self._find()

    @property
    def sql(self) -> Sql:
        """SQL for the rows to be examined, with the columns of ORDER, subscription, occurrence, and WAITS."""
        rows = self._rows
        if self._begin >= self._end:
            return rows.waiting(rows.delayed(_COLUMNS))
        examined = _SQL("examined", columns=columns(_COLUMNS))
        if rows.start < self._begin:
            due = rows.delayed(_COLUMNS, condition=_SQL("due_before", time=self._begin))
            examined = _SQL("both", first=examined, second=due)
        return rows.waiting(examined, commands="special")

    def commands_after(self, time: int) -> str:
        """Returns the name of a table with all CANCEL, RESTORE and MOVE rows of the topic due after a time (ms)."""
        return "special" if self._begin < self._end and self._rows.start <= time + 1 else "delayed_index"

    def others(self, bin_of: Callable[[Int64Array], Int64Array]) -> Counter[int]:
        """Counts the other rows, each of which waits for all subscriptions.

        Args:
            bin_of: returns the bins of times, both int64, (times,); must be monotonic.

        Returns:
            the number of rows in each bin that has any.

        Raises:
            VersionGoneError: the version of the table has been removed.
        """
        if self._begin >= self._end:
            return Counter()
        rows = self._rows
        equal: dict[str, str | int] = {"topic": rows.topic}
        if rows.partition is not None:
            equal["partition"] = rows.partition
        counts = RowCounts("deliver_at", self._begin, self._end, equal, bin_of)
        try:
            found = counts.count(rows.tables, "delayed_index")
        except FileNotFoundError as error:
            raise version_gone() from error
        looked_at = rows.sql(_SQL("examined_times", in_partition=self._in_partition))
        found.subtract(counts.of_times(int64(looked_at, "deliver_at")))
        return +found

    def first_and_last(self) -> tuple[int | None, int | None]:
        """Returns when the first and the last of the other rows are due, ms since the epoch; None: there are none.

        Rows that are parked don't count.
        """
        if self._begin >= self._end:
            return None, None
        return self._first(), self._last()

    def _first(self) -> int | None:
        wanted = _LEAST_READ
        while True:
            end = self._rows.end_of(wanted, self._begin)
            first = self._of_others(Sql("min"), TRUE if end is None else _SQL("due_before", time=end))
            if first is not None or end is None:
                return first
            wanted *= _GROWTH

    def _last(self) -> int | None:
        wanted = _LEAST_READ
        while True:
            start = self._rows.start_of(wanted, self._begin)
            last = self._of_others(Sql("max"), TRUE if start is None else _SQL("due_after", time=start))
            if last is not None or start is None:
                return last
            wanted *= _GROWTH

    def _of_others(self, function: Sql, condition: Sql) -> int | None:
        named = ("deliver_at", "ledger_id", "entry_id")
        others = self._rows.delayed(named, condition=all_of([self._later, none_of([_IS_OWN]), condition]))
        found = self._rows.sql(_SQL("end_of_others", function=function, others=others))
        at: int | None = found["t"][0].as_py()
        return at

    def _find(self) -> None:
        """Creates the tables `special`, `named` and `examined`, as far as not all rows are examined."""
        rows = self._rows
        if self._begin >= self._end:
            return
        is_later = self._later
        rows.sql(_SQL("create_special", in_topic=rows.in_topic, start=rows.start, is_later=is_later))
        rows.sql(_SQL("create_named", begin=self._begin))
        named = rows.sql(_SQL("named"))
        wanted = {"columns": columns(_COLUMNS), "in_partition": self._in_partition}
        if not named.num_rows:
            rows.sql(_SQL("create_examined", **wanted))
            return
        named_rows = rows.delayed(_COLUMNS, condition=all_of([is_later, none_of([_IS_OWN]), near_entries(named)]))
        rows.sql(_SQL("create_examined_with_named", named_rows=named_rows, **wanted))
