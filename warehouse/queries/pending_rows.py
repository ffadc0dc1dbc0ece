"""The rows of the delayed index whose messages are pending, as SQL over versions of the tables.

A message is pending for a subscription when it is in the delayed index, it is not cancelled there, and it has not been
delivered. What is due in the future has not been delivered, so `deliveries` is read only for what is overdue. The job
seals what comes in every few seconds, and never what is due at once: see docs/pending.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deltalake.exceptions import DeltaError

from warehouse.pending import is_cancelled, is_moved_on, join_commands, last
from warehouse.queries.listing import ORDER, PendingFilter, State, VersionGoneError
from warehouse.snapshot import Snapshot
from warehouse.tables import any_of, literal, ranges_of
from warehouse.tenure import Tenures

# What was due this long before the last delivery, or longer ago, is not looked at unless `due_from` asks for it, ms.
OVERDUE_MILLIS = 15 * 60 * 1000

# A column of found rows: bit i is set where the message has, for the i-th subscription, the state that was asked for.
WAITS = "waits"

SEQUENCE = "coalesce(sequence, 0)"

_MAX_RANGES = 20  # ranges of times that a query is narrowed to


class PendingRows:
    """The pending messages of one topic that match a filter, in one version of the tables.

    Args:
        warehouse: a folder or URI.
        tables: the versions of `delayed_index` and `deliveries`.
        topic: of a route.
        partition: the number of one; None: all.
        names: of the subscriptions that are asked for.
        wanted: the filter.
        as_of: messages due later have not been delivered; ms since the epoch.
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
        self._warehouse = warehouse
        self._tables = tables
        self._topic = topic
        self._partition = partition
        self._names = names
        self._filter = wanted
        self._as_of = as_of
        self.of_topic = f"topic = {literal(topic)}"  # SQL condition
        self._start = wanted.due_from if wanted.due_from is not None else self._overdue_from()
        if wanted.state is State.CANCELLED:
            self._start = max(self._start, as_of)

    def delayed(
        self, columns: Iterable[str], after: tuple[int, ...] | None = None, condition: str | None = None
    ) -> str:
        """SQL for the topic's DELAY rows that match the filter, and come after a row with these values of ORDER."""
        conditions = ["operation = 'DELAY'", self.of_topic, f"deliver_at >= {self._start}", *self._filter.conditions]
        if self._partition is not None:
            conditions.append(f"partition = {self._partition}")
        if after is not None:
            conditions += [f"deliver_at >= {after[0]}", _comes_after(after)]
        if condition is not None:
            conditions.append(f"({condition})")
        chosen = [f"{SEQUENCE} AS sequence" if column == "sequence" else column for column in columns]
        return f"SELECT {', '.join(chosen)} FROM delayed_index WHERE {' AND '.join(conditions)}"  # noqa: S608

    def waiting(self, rows: str, of: str | None = None) -> str:
        """SQL for rows of the delayed index with the column WAITS; creates the table `done` for it.

        A CANCEL row cancels a message that is due at the row's time or before: the row of a cancel that waited in vain
        has an earlier time. A row with batch_index -1 is for the whole entry. A RESTORE row undoes those before it. Of
        a message that was moved the last row counts.

        Args:
            rows: SQL for the rows.
            of: a table; deliveries and commands are read for its entries alone. None: for all of the topic.
        """
        done = (
            f"SELECT subscription, ledger_id, entry_id, batch_index, deliver_at, operation, {SEQUENCE} AS sequence, "  # noqa: S608
            "CAST(NULL AS BIGINT) AS occurrence "
            f"FROM delayed_index WHERE operation <> 'DELAY' AND {self.of_topic} AND deliver_at >= {self._start}"
        )
        if self._start <= self._as_of:
            done += (
                " UNION ALL SELECT subscription, ledger_id, entry_id, batch_index, deliver_at, 'DELIVERED', 0, "  # noqa: S608
                f"occurrence FROM deliveries WHERE {self.of_topic} AND deliver_at >= {self._start} "
                f"AND deliver_at <= {self._as_of}"
            )
        if of:
            done = (
                f"SELECT d.* FROM ({done}) AS d LEFT SEMI JOIN {of} AS o "  # noqa: S608
                "ON o.ledger_id = d.ledger_id AND o.entry_id = d.entry_id"
            )
        until = [
            f"max(CASE WHEN subscription = {literal(name)} AND operation = '{operation}' THEN {column} END) "
            f"AS {last_column}_{i}"
            for i, name in enumerate(self._names)
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
        of_cancelled = self._filter.state is State.CANCELLED
        tenures = Tenures.of(self._warehouse)

        def missed(name: str) -> str:
            return tenures.sql("i", "i.deliver_at", literal(self._topic), literal(name), "i.sequence")

        bits = [
            f"CASE WHEN {_is_left(i, name, of_cancelled)} AND NOT {missed(name)} THEN {1 << i} ELSE 0 END"
            for i, name in enumerate(self._names)
        ]
        return f"""
            SELECT i.*, {" + ".join(bits)} AS {WAITS} FROM ({rows}) AS i {join_commands("done", "i")}
        """  # noqa: S608

    def times(self, n: int, after: tuple[int, ...] | None) -> str:
        """SQL condition on deliver_at that holds for the first n rows, and lets a reader skip most others.

        There are no statistics of properties, so that every row has to be read: here with one column alone.
        """
        rows = self.delayed(("deliver_at",), after)
        times = self.sql(f"SELECT deliver_at FROM ({rows}) AS r ORDER BY deliver_at LIMIT {n}")  # noqa: S608
        return any_of("deliver_at", ranges_of(times["deliver_at"].to_pylist(), _MAX_RANGES)) or "false"

    def sql(self, sql: str) -> Any:
        """Runs a query over the tables, and over those that `waiting` and earlier queries created.

        Raises:
            VersionGoneError: the versions of the tables have been removed.
        """
        try:
            return self._tables.sql(sql)
        except (DeltaError, OSError) as error:
            if "not found" in str(error).lower():
                raise version_gone() from error
            raise

    def _overdue_from(self) -> int:
        """The time before which due messages count as delivered, also where the job has stood still since, ms."""
        last = self._tables.largest("deliveries", "sent_at")
        return 0 if last is None else max(0, min(last, self._as_of) - OVERDUE_MILLIS)


def _is_left(i: int, name: str, of_cancelled: bool) -> str:
    """SQL condition: a row (`i`) is for the i-th subscription, was not delivered there, and is cancelled there or not.

    Args:
        of_cancelled: holds for rows that are cancelled; False: for rows that are not.
    """
    cancelled = f"{last(f'cancelled_until_{i}')} >= i.deliver_at AND {is_cancelled(f'_{i}')}"
    return (
        f"coalesce(i.subscription, {literal(name)}) = {literal(name)} AND NOT ({is_moved_on('i.sequence', f'_{i}')}) "
        f"AND CASE WHEN i.occurrence IS NULL THEN {last(f'delivered_{i}')} < i.deliver_at "
        f"ELSE {last(f'occurrence_{i}')} < i.occurrence END AND {'' if of_cancelled else 'NOT '}({cancelled})"
    )


def _comes_after(key: Sequence[int]) -> str:
    """SQL condition: a row comes after the one with these values of the last columns of ORDER."""
    column, value = ORDER[-len(key)], key[0]
    column = SEQUENCE if column == "sequence" else column
    if len(key) == 1:
        return f"{column} > {value}"
    return f"({column} > {value} OR ({column} = {value} AND {_comes_after(key[1:])}))"


def version_gone() -> VersionGoneError:
    """Returns the error of a listing whose versions of the tables have been removed."""
    return VersionGoneError("the listed version of the tables is gone: begin the listing again without a cursor")
