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
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import Int64Array, int64
from warehouse.delta.opening import is_gone
from warehouse.delta.snapshot import Snapshot
from warehouse.delta.tables import ranges_of
from warehouse.named_queries import NamedQueries, Sql, all_of, identifier, in_ranges, listed, literal
from warehouse.pending import is_cancelled, is_moved_on, join_commands, last
from warehouse.queries.listing import ORDER, PendingFilter, State, VersionGoneError
from warehouse.routes.membership import Memberships
from warehouse.spans import times_of

# Messages due longer than this before the last delivery are ignored, unless `due_from` asks for them, ms.
OVERDUE_MILLIS = 15 * 60 * 1000

# A column of found rows: bit i is set if the message has the wanted state for the i-th subscription.
WAITS = "waits"

_SQL = NamedQueries(__file__)

SEQUENCE = _SQL("sequence")

_MAX_RANGES = 20  # the maximum number of ranges of times, or ledgers, in a query's condition


class _Spread(NamedTuple):
    """The distribution of rows over time: spans with both ends inclusive, ms since the epoch, (spans,)."""

    first: Int64Array
    last: Int64Array
    size: np.ndarray  # the estimated number of rows in each span, float64, (spans,)


class PendingRows:
    """The pending messages of one topic that match a filter, in one version of the tables.

    Args:
        tables: the versions of `delayed_index` and `deliveries`.
        topic: a route's source topic.
        partition: number of a partition; None: all.
        names: names of the chosen subscriptions.
        as_of: messages due later have not been delivered; ms since the epoch.

    Attributes:
        start: messages due before are ignored; ms since the epoch.
        memberships: since when the subscriptions are in the settings.
    """

    def __init__(
        self,
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
        self.memberships = Memberships.of(tables.warehouse)
        self.in_topic = _SQL("in_topic", topic=topic)
        self.start = wanted.due_from if wanted.due_from is not None else self._overdue_from()
        if wanted.state is State.CANCELLED:
            self.start = max(self.start, as_of)

    def delayed(
        self, columns: Iterable[str], after: tuple[int, ...] | None = None, condition: Sql | None = None
    ) -> Sql:
        """Returns SQL for the topic's DELAY rows that match the filter.

        Args:
            columns: the columns to select.
            after: only rows after the one with these values of ORDER; None: all.
            condition: a further SQL condition.
        """
        conditions = [self.in_topic, _SQL("due_from", start=self.start), *self.wanted.conditions]
        if self.partition is not None:
            conditions.append(_SQL("in_partition", partition=self.partition))
        if after is not None:
            conditions += [_SQL("due_from", start=after[0]), _comes_after(after)]
        if condition is not None:
            conditions.append(condition)
        chosen = listed(_SQL("known_sequence") if name == "sequence" else identifier(name) for name in columns)
        return _SQL("delayed", columns=chosen, conditions=all_of(conditions))

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

        Rows that are parked don't count. See `end_of` for None.
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

    def waiting(self, rows: Sql, entries: str | None = None, commands: str = "delayed_index") -> Sql:
        """Returns SQL for rows of the delayed index with the column WAITS; creates the table `done` for it.

        A CANCEL row cancels a message that is due at the row's time or before: the row of a cancel that waited in vain
        has an earlier time. A row with batch_index -1 is for the whole entry. A RESTORE row undoes cancels before it.
        Only the last row of a moved message counts.

        Args:
            entries: a table; only deliveries and commands of its entries are read. None: those of the whole topic.
            commands: a table with the delayed index's rows that are not of type DELAY.
        """
        wanted = [self.in_topic, _SQL("due_from", start=self.start)]
        if entries:  # lets a reader skip most files
            ledgers = self.sql(_SQL("ledgers", entries=identifier(entries)))["ledger_id"].to_pylist()
            wanted.append(in_ranges("ledger_id", ranges_of(ledgers, _MAX_RANGES)))
        done = _SQL(
            "all_done" if self.start <= self.as_of else "commands_done",
            commands=identifier(commands),
            wanted=all_of(wanted),
            as_of=self.as_of,
        )
        if entries:
            done = _SQL("done_of_entries", done=done, entries=identifier(entries))
        last_done = listed(_SQL("last_done", name=name, i=i) for i, name in enumerate(self.names))
        self.sql(_SQL("create_done", last_done_of_each=last_done, done=done))
        counts = self.sql(_SQL("count_done"))
        n_whole = counts["whole"][0].as_py()
        joined = join_commands("done", "i", has_one=counts["n"][0].as_py() > n_whole, has_whole=n_whole > 0)
        waits = Sql(" + ".join(self._waits_for(i, name) for i, name in enumerate(self.names)))
        return _SQL("waiting", waits=waits, rows=rows, join_commands=joined)

    def _waits_for(self, i: int, name: str) -> Sql:
        """Returns SQL for the bit of the i-th subscription in the column WAITS of a row (`i`)."""
        due, sequence = Sql("i.deliver_at"), Sql("i.sequence")
        return _SQL(
            "waits_for",
            name=name,
            bit=1 << i,
            delivered=last(f"delivered_{i}"),
            occurrence=last(f"occurrence_{i}"),
            cancelled_until=last(f"cancelled_until_{i}"),
            is_cancelled=is_cancelled(f"_{i}"),
            is_moved_on=is_moved_on(sequence, f"_{i}"),
            is_cancelled_wanted=self.wanted.state is State.CANCELLED,
            missed=self.memberships.sql("i", due, literal(self.topic), literal(name), sequence),
        )

    def time_condition(self, n: int, after: tuple[int, ...] | None, condition: Sql | None) -> Sql:
        """Returns an SQL condition on deliver_at that holds for the first n rows, and lets a reader skip most others.

        Without statistics of properties every row has to be read; this reads one column only.
        """
        rows = self.delayed(("deliver_at",), after, condition)
        times = self.sql(_SQL("first_times", rows=rows, n=n))["deliver_at"].to_pylist()
        return in_ranges("deliver_at", ranges_of(times, _MAX_RANGES))

    def sql(self, sql: Sql) -> Any:
        """Runs a query over the tables, and over those that `waiting` and earlier queries created.

        Raises:
            VersionGoneError: the versions of the tables have been removed.
            UnreadableWarehouseError: the tables can't be read.
        """
        try:
            return self.tables.sql(sql)
        except (DeltaError, OSError, UnreadableWarehouseError) as error:
            if is_gone(error):
                raise version_gone() from error
            raise

    def _overdue_from(self) -> int:
        """Returns the time (ms since the epoch) before which due messages count as delivered.

        It goes by the last delivery, so that messages of a job that has stood still are pending.
        """
        last = self.tables.largest("deliveries", "sent_at")
        return 0 if last is None else max(0, min(last, self.as_of) - OVERDUE_MILLIS)


def _comes_after(key: Sequence[int]) -> Sql:
    """Returns the SQL condition that a row comes after the one with these values of the last columns of ORDER."""
    column, value = ORDER[-len(key)], key[0]
    column = SEQUENCE if column == "sequence" else identifier(column)
    if len(key) == 1:
        return _SQL("comes_after", column=column, value=value)
    return _SQL("comes_after_in_order", column=column, value=value, rest=_comes_after(key[1:]))


def version_gone() -> VersionGoneError:
    """Returns the error of a listing whose versions of the tables have been removed."""
    return VersionGoneError("the listed version of the tables is gone: begin the listing again without a cursor")
