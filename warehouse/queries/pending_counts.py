"""Counts pending messages while reading little: most rows are counted by the statistics of files.

A row that is not due yet waits for all of the topic's subscriptions, unless it is for one subscription, is an
occurrence of a recurring message, or is of an entry that a CANCEL or MOVE row names. Only these exceptions, and rows
that are due, are examined; all others are counted by their times alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tracker.message_state.moves import HELD_DELIVER_AT
from tracker.messages import Int64Array, int64
from warehouse.delta.row_counts import RowCounts
from warehouse.queries.index_rows import near_entries
from warehouse.queries.listing import ORDER, State
from warehouse.queries.pending_rows import SEQUENCE, PendingRows, version_gone

_COLUMNS = (*ORDER, "subscription", "occurrence")
_NEVER = 2**63 - 1

# SQL condition: a row is for one subscription, or an occurrence of a recurring message.
_IS_OWN = "(subscription IS NOT NULL OR occurrence IS NOT NULL)"

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
        # Rows due by then are examined: they may be delivered, or were handed out before a subscription was added.
        self._split = max(rows.as_of, rows.tenures.handed_out(rows.topic, rows.names))
        self._end = _NEVER if wanted.due_before is None else wanted.due_before
        is_by_time = not wanted.has_texts and wanted.ledger_id is None and wanted.state is State.WAITING
        self._begin = max(rows.start, self._split + 1) if is_by_time else self._end
        self._later = f"deliver_at >= {self._begin} AND deliver_at < {self._end}"
        self._find()

    @property
    def sql(self) -> str:
        """SQL for the rows to be examined, with the columns of ORDER, subscription, occurrence, and WAITS."""
        rows = self._rows
        if self._begin >= self._end:
            return rows.waiting(rows.delayed(_COLUMNS))
        parts = [f"SELECT {', '.join(_COLUMNS)} FROM examined"]  # noqa: S608
        if rows.start < self._begin:
            parts.append(rows.delayed(_COLUMNS, condition=f"deliver_at < {self._begin}"))
        return rows.waiting(" UNION ALL ".join(parts), commands="special")

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
        commands = f"SELECT deliver_at FROM special WHERE operation <> 'DELAY' AND {self._of_partition}"  # noqa: S608
        looked_at = rows.sql(f"{commands} UNION ALL SELECT deliver_at FROM examined")  # noqa: S608
        found.subtract(counts.of_times(int64(looked_at, "deliver_at")))
        return +found

    def first_and_last(self) -> tuple[int | None, int | None]:
        """Returns when the first and the last of the other rows are due, ms since the epoch; None: there are none.

        Rows that are held back don't count.
        """
        if self._begin >= self._end:
            return None, None
        return self._first(), self._last()

    def _first(self) -> int | None:
        wanted = _LEAST_READ
        while True:
            end = self._rows.end_of(wanted, self._begin)
            first = self._of_others("min", "true" if end is None else f"deliver_at < {end}")
            if first is not None or end is None:
                return first
            wanted *= _GROWTH

    def _last(self) -> int | None:
        wanted = _LEAST_READ
        while True:
            start = self._rows.start_of(wanted, self._begin)
            last = self._of_others("max", "true" if start is None else f"deliver_at > {start}")
            if last is not None or start is None:
                return last
            wanted *= _GROWTH

    def _of_others(self, function: str, condition: str) -> int | None:
        columns = ("deliver_at", "ledger_id", "entry_id")
        others = self._rows.delayed(columns, condition=f"{self._later} AND NOT {_IS_OWN} AND {condition}")
        found = self._rows.sql(
            f"SELECT {function}(deliver_at) AS t FROM ({others}) AS o LEFT ANTI JOIN named AS n "  # noqa: S608
            f"ON n.ledger_id = o.ledger_id AND n.entry_id = o.entry_id WHERE deliver_at < {HELD_DELIVER_AT}"
        )
        at: int | None = found["t"][0].as_py()
        return at

    def _find(self) -> None:
        """Creates the tables `special`, `named` and `examined`.

        `special` has rows that are not of type DELAY, are for one subscription, or have an occurrence; `named` the
        entries that commands name; `examined` the DELAY rows due later that are special or of a named entry.
        """
        rows = self._rows
        if self._begin >= self._end:
            return
        rows.sql(
            "CREATE OR REPLACE TABLE special AS SELECT topic, subscription, partition, ledger_id, entry_id, "  # noqa: S608
            f"batch_index, deliver_at, operation, {SEQUENCE} AS sequence, occurrence FROM delayed_index "
            f"WHERE {rows.of_topic} AND deliver_at >= {rows.start} "
            f"AND (operation <> 'DELAY' OR ({_IS_OWN} AND {self._later}))"
        )
        rows.sql(
            "CREATE OR REPLACE TABLE named AS SELECT DISTINCT ledger_id, entry_id FROM special "  # noqa: S608
            f"WHERE operation = 'MOVE' OR (operation = 'CANCEL' AND deliver_at >= {self._begin})"
        )
        named = rows.sql("SELECT ledger_id, entry_id FROM named")
        delays = f"operation = 'DELAY' AND {self._of_partition}"
        examined = f"SELECT {', '.join(_COLUMNS)} FROM special WHERE {delays}"  # noqa: S608
        if named.num_rows:
            condition = f"{self._later} AND NOT {_IS_OWN} AND {near_entries(named)}"
            of_entries = rows.delayed(_COLUMNS, condition=condition)
            examined += (
                f" UNION ALL SELECT r.* FROM ({of_entries}) AS r LEFT SEMI JOIN named AS n "  # noqa: S608
                "ON n.ledger_id = r.ledger_id AND n.entry_id = r.entry_id"
            )
        rows.sql(f"CREATE OR REPLACE TABLE examined AS {examined}")

    @property
    def _of_partition(self) -> str:
        partition = self._rows.partition
        return "true" if partition is None else f"partition = {partition}"
