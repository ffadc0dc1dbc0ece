"""SQL for the rows of the delayed index whose messages are pending, over fixed versions of the tables.

See `warehouse.pending` for the rule. A message that is due in the future has not been delivered, so `deliveries` is
read only for overdue messages. Messages are in the index some seconds after they came in, and those that are due at
once never: see docs/pending.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from deltalake.exceptions import DeltaError

from conf.errors import UnreadableWarehouseError
from tracker.message_state.moves import HELD_DELIVER_AT
from tracker.messages import Int64Array, int64
from warehouse.delta.snapshot import Snapshot
from warehouse.delta.tables import any_of, literal, ranges_of
from warehouse.pending import is_cancelled, is_moved_on, join_commands, last
from warehouse.queries.listing import ORDER, PendingFilter, State, VersionGoneError
from warehouse.routes.tenure import Tenures
from warehouse.spans import times_of

# Messages due longer than this before the last delivery are ignored, unless `due_from` asks for them, ms.
OVERDUE_MILLIS = 15 * 60 * 1000

# A column of found rows: bit i is set if the message has the wanted state for the i-th subscription.
WAITS = "waits"

SEQUENCE = "coalesce(sequence, 0)"

_MAX_RANGES = 20  # the maximum number of ranges of times, or ledgers, in a query's condition


class _Spread(NamedTuple):
    """The distribution of rows over time: spans with both ends inclusive, ms since the epoch, (spans,)."""

    first: Int64Array
    last: Int64Array
    size: np.ndarray  # the estimated number of rows in each span, float64, (spans,)


class PendingRows:
    """The pending messages of one topic that match a filter, in one version of the tables.

    Args:
        warehouse: a folder or URI.
        tables: the versions of `delayed_index` and `deliveries`.
        topic: a route's source topic.
        partition: number of a partition; None: all.
        names: names of the chosen subscriptions.
        wanted: the filter.
        as_of: messages due later have not been delivered; ms since the epoch.

    Attributes:
        start: messages due before are ignored; ms since the epoch.
        tenures: since when the subscriptions are in the settings.
    """

    def __init__(
        self,
        warehouse: str,
        tables: Snapshot,
        topic: str,
        partition: int | None,
        names: Sequence[str],
        wanted: PendingFilter,
        as_of: int,
    ) -> None:
        self.tables = tables
        self.topic = topic
        self.partition = partition
        self.names = names
        self.wanted = wanted
        self.as_of = as_of
        self.tenures = Tenures.of(warehouse)
        self.of_topic = f"topic = {literal(topic)}"  # SQL condition
        self.start = wanted.due_from if wanted.due_from is not None else self._overdue_from()
        if wanted.state is State.CANCELLED:
            self.start = max(self.start, as_of)

    def delayed(
        self, columns: Iterable[str], after: tuple[int, ...] | None = None, condition: str | None = None
    ) -> str:
        """Returns SQL for the topic's DELAY rows that match the filter.

        Args:
            columns: the columns to select.
            after: only rows after the one with these values of ORDER; None: all.
            condition: a further SQL condition.
        """
        conditions = ["operation = 'DELAY'", self.of_topic, f"deliver_at >= {self.start}", *self.wanted.conditions]
        if self.partition is not None:
            conditions.append(f"partition = {self.partition}")
        if after is not None:
            conditions += [f"deliver_at >= {after[0]}", _comes_after(after)]
        if condition is not None:
            conditions.append(f"({condition})")
        chosen = [f"{SEQUENCE} AS sequence" if column == "sequence" else column for column in columns]
        return f"SELECT {', '.join(chosen)} FROM delayed_index WHERE {' AND '.join(conditions)}"  # noqa: S608

    def end_of(self, n: int, start: int) -> int | None:
        """Returns the end of a span of time that begins at `start` and has about n rows.

        It is estimated by the log's statistics, which is quick.

        Args:
            n: the wanted number of rows.
            start: the span's begin, ms since the epoch.

        Returns:
            the exclusive end, ms since the epoch; None: n is half of all rows or more, or statistics are missing.
        """
        if self.wanted.ledger_id is not None or self.wanted.state is State.HELD:
            return None
        spread = self._spread(start)
        if spread is None or 2 * n >= spread.size.sum():
            return None
        return int(times_of(spread.first, spread.last, spread.size, np.array([float(n)]))[0])

    def start_of(self, n: int, start: int) -> int | None:
        """Returns the exclusive begin of a span of time that has the last n rows, about, of those due from `start` on.

        Rows that are held back don't count. See `end_of` for None.
        """
        spread = self._spread(start)
        if spread is None or 2 * n >= spread.size.sum():
            return None
        return -int(times_of(-spread.last, -spread.first, spread.size, np.array([float(n)]))[0])

    def _spread(self, start: int) -> _Spread | None:
        """Returns the distribution of the rows due from a time on, by the log's statistics; None: some are missing."""
        end = min(self.wanted.due_before or HELD_DELIVER_AT, HELD_DELIVER_AT)
        files = self.tables.spans("delayed_index", "deliver_at")
        if any(column.null_count for column in files.columns):
            return None
        first, last, rows = (int64(files, name) for name in files.column_names)
        from_, to = first.clip(start), last.clip(None, end - 1)
        size = rows * ((to + 1 - from_) / (last + 1 - first)).clip(0)
        is_in = size > 0
        return _Spread(from_[is_in], to[is_in], size[is_in])

    def waiting(self, rows: str, of: str | None = None, commands: str = "delayed_index") -> str:
        """Returns SQL for rows of the delayed index with the column WAITS; creates the table `done` for it.

        A CANCEL row cancels a message that is due at the row's time or before: the row of a cancel that waited in vain
        has an earlier time. A row with batch_index -1 is for the whole entry. A RESTORE row undoes cancels before it.
        Only the last row of a moved message counts.

        Args:
            rows: SQL for the rows.
            of: a table; only deliveries and commands of its entries are read. None: those of the whole topic.
            commands: a table with the delayed index's rows that are not of type DELAY.
        """
        wanted = f"{self.of_topic} AND deliver_at >= {self.start}"
        if of:  # lets a reader skip most files
            ledgers = self.sql(f"SELECT DISTINCT ledger_id FROM {of} ORDER BY 1")["ledger_id"].to_pylist()  # noqa: S608
            wanted += f" AND ({any_of('ledger_id', ranges_of(ledgers, _MAX_RANGES)) or 'false'})"
        done = (
            f"SELECT subscription, ledger_id, entry_id, batch_index, deliver_at, operation, {SEQUENCE} AS sequence, "  # noqa: S608
            f"CAST(NULL AS BIGINT) AS occurrence FROM {commands} WHERE operation <> 'DELAY' AND {wanted}"
        )
        if self.start <= self.as_of:
            done += (
                " UNION ALL SELECT subscription, ledger_id, entry_id, batch_index, deliver_at, 'DELIVERED', 0, "  # noqa: S608
                f"occurrence FROM deliveries WHERE {wanted} AND deliver_at <= {self.as_of}"
            )
        if of:
            done = (
                f"SELECT d.* FROM ({done}) AS d LEFT SEMI JOIN {of} AS o "  # noqa: S608
                "ON o.ledger_id = d.ledger_id AND o.entry_id = d.entry_id"
            )
        until = [
            f"max(CASE WHEN subscription = {literal(name)} AND operation = '{operation}' THEN {column} END) "
            f"AS {last_column}_{i}"
            for i, name in enumerate(self.names)
            for operation, column, last_column in (
                ("DELIVERED", "deliver_at", "delivered"),
                ("DELIVERED", "occurrence", "occurrence"),
                ("CANCEL", "deliver_at", "cancelled_until"),
                ("CANCEL", "sequence", "cancelled"),
                ("RESTORE", "sequence", "restored"),
                ("MOVE", "sequence", "moved"),
            )
        ]
        self.sql(
            f"CREATE OR REPLACE TABLE done AS SELECT ledger_id, entry_id, batch_index, {', '.join(until)} "  # noqa: S608
            f"FROM ({done}) AS d GROUP BY ledger_id, entry_id, batch_index"
        )
        counts = self.sql("SELECT count(*) AS n, count(*) FILTER (WHERE batch_index = -1) AS whole FROM done")
        n_whole = counts["whole"][0].as_py()
        joined = join_commands("done", "i", has_one=counts["n"][0].as_py() > n_whole, has_whole=n_whole > 0)
        of_cancelled = self.wanted.state is State.CANCELLED

        def missed(name: str) -> str:
            return self.tenures.sql("i", "i.deliver_at", literal(self.topic), literal(name), "i.sequence")

        bits = [
            f"CASE WHEN {_is_left(i, name, of_cancelled)} AND NOT {missed(name)} THEN {1 << i} ELSE 0 END"
            for i, name in enumerate(self.names)
        ]
        return f"""
            SELECT i.*, {" + ".join(bits)} AS {WAITS} FROM ({rows}) AS i {joined}
        """  # noqa: S608

    def time_condition(self, n: int, after: tuple[int, ...] | None, condition: str | None) -> str:
        """Returns an SQL condition on deliver_at that holds for the first n rows, and lets a reader skip most others.

        Without statistics of properties every row has to be read; this reads one column only.
        """
        rows = self.delayed(("deliver_at",), after, condition)
        times = self.sql(f"SELECT deliver_at FROM ({rows}) AS r ORDER BY deliver_at LIMIT {n}")  # noqa: S608
        return any_of("deliver_at", ranges_of(times["deliver_at"].to_pylist(), _MAX_RANGES)) or "false"

    def sql(self, sql: str) -> Any:
        """Runs a query over the tables, and over those that `waiting` and earlier queries created.

        Raises:
            VersionGoneError: the versions of the tables have been removed.
            UnreadableWarehouseError: the tables can't be read.
        """
        try:
            return self.tables.sql(sql)
        except (DeltaError, OSError, UnreadableWarehouseError) as error:
            if "not found" in str(error).lower():
                raise version_gone() from error
            raise

    def _overdue_from(self) -> int:
        """Returns the time (ms since the epoch) before which due messages count as delivered.

        It goes by the last delivery, so that messages of a job that has stood still are pending.
        """
        last = self.tables.largest("deliveries", "sent_at")
        return 0 if last is None else max(0, min(last, self.as_of) - OVERDUE_MILLIS)


def _is_left(i: int, name: str, of_cancelled: bool) -> str:
    """Returns the SQL condition that a row (`i`) is for the i-th subscription, and was not delivered there.

    Args:
        i: the subscription's index.
        name: its name.
        of_cancelled: whether the row has to be cancelled there; else it must not be.
    """
    cancelled = f"{last(f'cancelled_until_{i}')} >= i.deliver_at AND {is_cancelled(f'_{i}')}"
    return (
        f"coalesce(i.subscription, {literal(name)}) = {literal(name)} AND NOT ({is_moved_on('i.sequence', f'_{i}')}) "
        f"AND CASE WHEN i.occurrence IS NULL THEN {last(f'delivered_{i}')} < i.deliver_at "
        f"ELSE {last(f'occurrence_{i}')} < i.occurrence END AND {'' if of_cancelled else 'NOT '}({cancelled})"
    )


def _comes_after(key: Sequence[int]) -> str:
    """Returns the SQL condition that a row comes after the one with these values of the last columns of ORDER."""
    column, value = ORDER[-len(key)], key[0]
    column = SEQUENCE if column == "sequence" else column
    if len(key) == 1:
        return f"{column} > {value}"
    return f"({column} > {value} OR ({column} = {value} AND {_comes_after(key[1:])}))"


def version_gone() -> VersionGoneError:
    """Returns the error of a listing whose versions of the tables have been removed."""
    return VersionGoneError("the listed version of the tables is gone: begin the listing again without a cursor")
