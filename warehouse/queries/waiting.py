"""The pending messages of a topic, listed, counted and summed up by SQL over the Delta tables.

A message is pending for a subscription when it is in the delayed index, it is not cancelled there, and it has not been
delivered. What is due in the future has not been delivered, so `deliveries` is read only for what is overdue. The job
seals what comes in every few seconds, and never what is due at once: see docs/pending.md.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake.exceptions import DeltaError

from broker.message_ids import MessageRef
from conf.settings import Settings, Subscription
from tracker.commands.decode import resolve_topic
from tracker.commands.moves import HELD_DELIVER_AT
from warehouse.pending import is_cancelled, is_moved_on, join_commands, last
from warehouse.queries.listing import (
    ORDER,
    Cursor,
    NoTablesError,
    Page,
    PendingFilter,
    PendingMessage,
    State,
    UnknownTopicError,
    VersionGoneError,
)
from warehouse.tables import Snapshot, any_of, literal, ranges_of
from warehouse.tenure import Tenures

MAX_LIMIT = 1_000  # messages of a page

# What was due this long before the last delivery, or longer ago, is not looked at unless `due_from` asks for it, ms.
OVERDUE_MILLIS = 15 * 60 * 1000

# Ms; by the names that `Pending.stats` gives the counts.
_HORIZONS = {"dueWithinMinute": 60_000, "dueWithinHour": 3_600_000, "dueWithinDay": 86_400_000}

# Those of them that name an entry and a time at which messages of it are due.
_ENTRY = ["deliver_at", "ledger_id", "entry_id", "partition"]
_SHOWN = (
    *ORDER,
    "subscription",
    "batch_size",
    "key",
    "ordering_key",
    "properties",
    "event_time",
    "publish_time",
    "producer_name",
    "attempt",
    "shaped_from",
    "occurrence",
)

# A column of found rows: bit i is set where the message has, for the i-th subscription, the state that was asked for.
WAITS = "waits"

_SEQUENCE = "coalesce(sequence, 0)"

# By this factor more candidates are read each time that too many of the last ones turned out not to be pending.
_GROWTH = 8
_MAX_CANDIDATES = 1_000_000

_MAX_RANGES = 20  # ranges of times that a query is narrowed to


class Pending:
    """The pending messages of one topic that match a filter, in one version of the tables.

    Args:
        topic: a source topic or a partition of it, complete or not.
        wanted: the filter; None: for all messages.
        cursor: that of the page before, whose versions of the tables are read again; None: the listing begins, in the
            newest versions.
        now: the time of the question: messages due later have not been delivered; ms since the epoch; None: the
            current time.

    Raises:
        UnknownTopicError: no route has the topic, or the topic has no such subscription.
        CursorError: the cursor is of another listing, or is none.
        VersionGoneError: the cursor's versions of the tables have been removed; also of the methods, at any time.
        NoTablesError: the job has not run yet.
    """

    def __init__(
        self,
        settings: Settings,
        topic: str,
        wanted: PendingFilter | None = None,
        cursor: str | None = None,
        now: int | None = None,
    ) -> None:
        self._filter = wanted or PendingFilter()
        self.topic, self._partition, subscriptions = of_route(settings, topic, self._filter.subscription)
        self.subscriptions = subscriptions
        self._asked = hashlib.sha256(f"{topic} {self._filter.model_dump_json()}".encode()).hexdigest()[:16]
        self._cursor = Cursor.decode(cursor, self._asked) if cursor else None
        self._warehouse = settings.warehouse
        self._tables = self._open(settings.warehouse)
        self.version = self._tables.versions["delayed_index"]
        self.as_of = self._cursor.as_of if self._cursor else (time.time_ns() // 1_000_000 if now is None else now)
        self._start = self._filter.due_from if self._filter.due_from is not None else self._overdue_from()
        if self._filter.state is State.CANCELLED:
            self._start = max(self._start, self.as_of)

    @property
    def is_of_cancelled(self) -> bool:
        """Whether the listing is of messages that were cancelled or skipped."""
        return self._filter.state is State.CANCELLED

    def page(self, limit: int) -> Page:
        """Returns the next messages of the listing, soonest first: at most `limit`."""
        found = [self._message(row) for row in self.rows(limit + 1, _SHOWN).to_pylist()]
        cursor = None
        if len(found) > limit:
            del found[limit:]
            cursor = Cursor(
                index=self.version,
                deliveries=self._tables.versions["deliveries"],
                as_of=self.as_of,
                asked=self._asked,
                last=found[-1].place,
            ).encode()
        return Page(self.version, self.as_of, found, cursor)

    def rows(self, limit: int, columns: Sequence[str]) -> pa.Table:
        """Returns the next messages of the listing, soonest first.

        Args:
            limit: the most rows that are returned.
            columns: of the delayed index.

        Returns:
            a row for each message, with these columns and WAITS, int64.
        """
        return self._rows(limit, columns, self._cursor.last if self._cursor else None)

    def entries(self, rows_at_once: int) -> Iterator[pa.Table]:
        """Yields the entries of all messages of the listing, soonest first, a table for each part that is read.

        Args:
            rows_at_once: how many messages are read for a table, at most.

        Yields:
            tables of deliver_at (ms since the epoch), ledger_id and entry_id, int64, and partition, int32: a row for
            each entry and time at which messages of it are due.
        """
        after = self._cursor.last if self._cursor else None
        before: tuple[int, ...] | None = None
        rows = self._rows(rows_at_once, ORDER, after)
        while rows.num_rows:
            keys = [rows[name].to_numpy() for name in _ENTRY]
            is_new = np.ones(rows.num_rows, np.bool_)
            is_new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
            is_new[0] = before != tuple(int(key[0]) for key in keys)
            before = tuple(int(key[-1]) for key in keys)
            yield rows.select(_ENTRY).filter(pa.array(is_new))
            if rows.num_rows < rows_at_once:
                return
            last = rows.slice(rows.num_rows - 1).to_pylist()[0]
            rows = self._rows(rows_at_once, ORDER, tuple(last[name] for name in ORDER))

    def _rows(self, limit: int, columns: Sequence[str], after: tuple[int, ...] | None) -> pa.Table:
        """Returns the next messages after one, which is given by its values of ORDER; None: from the beginning."""
        found: list[pa.Table] = []
        read = dict.fromkeys((*ORDER, *columns, "subscription", "occurrence"))
        left = candidates = limit
        order, shown = ", ".join(ORDER), ", ".join(columns)
        while True:
            # The soonest rows are quick to find, and only for these the tables are asked which are still pending.
            source = self._delayed(read, after, self._times(candidates, after) if self._filter.properties else None)
            self._sql(
                f"CREATE OR REPLACE TABLE candidates AS SELECT * FROM ({source}) AS r ORDER BY {order} "  # noqa: S608
                f"LIMIT {candidates}"
            )
            last = self._sql(f"SELECT {order} FROM candidates ORDER BY {_descending()} LIMIT 1")  # noqa: S608
            if not last.num_rows:
                found.append(self._sql(f"SELECT {shown}, CAST(0 AS BIGINT) AS {WAITS} FROM candidates"))  # noqa: S608
                break
            waiting = self._waiting("SELECT * FROM candidates", "candidates")
            found.append(
                self._sql(
                    f"SELECT {shown}, {WAITS} FROM ({waiting}) AS p WHERE {WAITS} <> 0 ORDER BY {order} LIMIT {left}"  # noqa: S608
                )
            )
            left -= found[-1].num_rows
            count = self._sql("SELECT count(*) AS n FROM candidates")["n"][0].as_py()
            if not left or count < candidates:
                break
            after = tuple(last.to_pylist()[0].values())
            candidates = min(candidates * _GROWTH, _MAX_CANDIDATES)
        return pa.concat_tables(found)

    def count(self) -> int:
        """Counts the pending messages that match the filter: one that several subscriptions wait for counts once."""
        rows = self._waiting(self._delayed((*ORDER, "subscription", "occurrence")))
        return int(self._sql(f"SELECT count(*) AS n FROM ({rows}) AS p WHERE {WAITS} <> 0")["n"][0].as_py())  # noqa: S608

    def histogram(self, width_millis: int) -> pa.Table:
        """Counts, by subscription, the messages that are due in each span of time, but for those that are held back.

        Args:
            width_millis: how long a span is.

        Returns:
            a row for each span that has messages, ascending: `at`, its start, ms since the epoch, and a column for each
            of `subscriptions`, called by its place in there. All int64.
        """
        counts = ", ".join(
            f'count(*) FILTER (WHERE {WAITS} & {1 << i} <> 0) AS "{i}"' for i in range(len(self.subscriptions))
        )
        rows = self._waiting(self._delayed((*ORDER, "subscription", "occurrence")))
        found: pa.Table = self._sql(
            f"SELECT deliver_at / {width_millis} * {width_millis} AS at, {counts} FROM ({rows}) AS p "  # noqa: S608
            f"WHERE {WAITS} <> 0 AND deliver_at < {HELD_DELIVER_AT} GROUP BY at ORDER BY at"
        )
        return found

    def stats(self) -> dict[str, Any]:
        """Counts for each subscription the messages that are pending, due soon or held back, as the admin API gives it.

        `messages` is as `count`: a message that several subscriptions wait for counts once.
        `earliest` and `latest` are when the first and the last message are due, ms since the epoch. `takenBack` does
        not go by the filter: it counts the topic's messages, and whole entries, that were cancelled and would be due
        later.
        """
        names = [s.name for s in self.subscriptions]
        columns = [f"count(*) FILTER (WHERE {WAITS} <> 0) AS messages"]
        for i in range(len(names)):
            waits = f"{WAITS} & {1 << i} <> 0"
            columns += [f"count(*) FILTER (WHERE {waits}) AS pending_{i}"]
            columns += [
                f'count(*) FILTER (WHERE {waits} AND deliver_at < {self.as_of + millis}) AS "{name}_{i}"'
                for name, millis in _HORIZONS.items()
            ]
            columns += [f"count(*) FILTER (WHERE {waits} AND deliver_at >= {HELD_DELIVER_AT}) AS held_{i}"]
            columns += [
                f"{f}(deliver_at) FILTER (WHERE {waits} AND deliver_at < {HELD_DELIVER_AT}) AS {f}_{i}"
                for f in ("min", "max")
            ]
        rows = self._waiting(self._delayed((*ORDER, "subscription", "occurrence")))
        counts = self._sql(f"SELECT {', '.join(columns)} FROM ({rows}) AS p").to_pylist()[0]  # noqa: S608
        counts_of_cancelled = self._sql(
            "SELECT subscription, count(*) AS n FROM (SELECT subscription, ledger_id, entry_id, batch_index "  # noqa: S608
            f"FROM delayed_index WHERE operation IN ('CANCEL', 'RESTORE') AND {self._of_topic} "
            f"AND deliver_at > {self.as_of} GROUP BY subscription, ledger_id, entry_id, batch_index "
            f"HAVING max(CASE WHEN operation = 'CANCEL' THEN {_SEQUENCE} END) "
            f"> coalesce(max(CASE WHEN operation = 'RESTORE' THEN {_SEQUENCE} END), -1)) AS c GROUP BY subscription"
        )
        cancelled = dict(
            zip(counts_of_cancelled["subscription"].to_pylist(), counts_of_cancelled["n"].to_pylist(), strict=True)
        )
        written_at = self._tables.written_at("delayed_index")
        paused = self._paused()
        return {
            "topic": self.topic,
            "version": self.version,
            "asOf": self.as_of,
            "lastWriteAgeMillis": max(0, self.as_of - written_at),
            "messages": counts["messages"],
            "subscriptions": [
                {
                    "subscription": name,
                    "pending": counts[f"pending_{i}"],
                    **{horizon: counts[f"{horizon}_{i}"] for horizon in _HORIZONS},
                    "earliest": counts[f"min_{i}"],
                    "latest": counts[f"max_{i}"],
                    "held": counts[f"held_{i}"],
                    "isPaused": name in paused,
                    "takenBack": cancelled.get(name, 0),
                }
                for i, name in enumerate(names)
            ],
        }

    def _paused(self) -> set[str]:
        """Returns the names of the topic's paused subscriptions."""
        try:
            outcomes = Snapshot(self._warehouse, {"outcomes": None})
        except DeltaError:
            return set()
        pause_changes = outcomes.sql(
            f"SELECT subscription, operation FROM outcomes WHERE result = 'APPLIED' AND {self._of_topic} "  # noqa: S608
            "AND operation IN ('PAUSE', 'RESUME') ORDER BY sequence"
        ).to_pylist()
        last = {row["subscription"]: row["operation"] for row in pause_changes}
        return {name for name, operation in last.items() if operation == "PAUSE"}

    def _times(self, n: int, after: tuple[int, ...] | None) -> str:
        """SQL condition on deliver_at that holds for the first n rows, and lets a reader skip most others.

        There are no statistics of properties, so that every row has to be read: here with one column alone.
        """
        rows = self._delayed(("deliver_at",), after)
        times = self._sql(f"SELECT deliver_at FROM ({rows}) AS r ORDER BY deliver_at LIMIT {n}")  # noqa: S608
        return any_of("deliver_at", ranges_of(times["deliver_at"].to_pylist(), _MAX_RANGES)) or "false"

    def _delayed(
        self, columns: Iterable[str], after: tuple[int, ...] | None = None, condition: str | None = None
    ) -> str:
        """SQL for the topic's DELAY rows that match the filter, and come after a row with these values of ORDER."""
        conditions = ["operation = 'DELAY'", self._of_topic, f"deliver_at >= {self._start}", *self._filter.conditions]
        if self._partition is not None:
            conditions.append(f"partition = {self._partition}")
        if after is not None:
            conditions += [f"deliver_at >= {after[0]}", _comes_after(after)]
        if condition is not None:
            conditions.append(f"({condition})")
        chosen = [f"{_SEQUENCE} AS sequence" if column == "sequence" else column for column in columns]
        return f"SELECT {', '.join(chosen)} FROM delayed_index WHERE {' AND '.join(conditions)}"  # noqa: S608

    def _waiting(self, rows: str, of: str | None = None) -> str:
        """SQL for rows of the delayed index with the column WAITS; creates the table `done` for it.

        A CANCEL row cancels a message that is due at the row's time or before: the row of a cancel that waited in vain
        has an earlier time. A row with batch_index -1 is for the whole entry. A RESTORE row undoes those before it. Of
        a message that was moved the last row counts.

        Args:
            rows: SQL for the rows.
            of: a table; deliveries and commands are read for its entries alone. None: for all of the topic.
        """
        names = [s.name for s in self.subscriptions]
        done = (
            f"SELECT subscription, ledger_id, entry_id, batch_index, deliver_at, operation, {_SEQUENCE} AS sequence, "  # noqa: S608
            "CAST(NULL AS BIGINT) AS occurrence "
            f"FROM delayed_index WHERE operation <> 'DELAY' AND {self._of_topic} AND deliver_at >= {self._start}"
        )
        if self._start <= self.as_of:
            done += (
                " UNION ALL SELECT subscription, ledger_id, entry_id, batch_index, deliver_at, 'DELIVERED', 0, "  # noqa: S608
                f"occurrence FROM deliveries WHERE {self._of_topic} AND deliver_at >= {self._start} "
                f"AND deliver_at <= {self.as_of}"
            )
        if of:
            done = (
                f"SELECT d.* FROM ({done}) AS d LEFT SEMI JOIN {of} AS o "  # noqa: S608
                "ON o.ledger_id = d.ledger_id AND o.entry_id = d.entry_id"
            )
        until = [
            f"max(CASE WHEN subscription = {literal(name)} AND operation = '{operation}' THEN {column} END) "
            f"AS {last_column}_{i}"
            for i, name in enumerate(names)
            for operation, column, last_column in (
                ("DELIVERED", "deliver_at", "delivered"),
                ("DELIVERED", "occurrence", "occurrence"),
                ("CANCEL", "deliver_at", "cancelled_until"),
                ("CANCEL", "sequence", "cancelled"),
                ("RESTORE", "sequence", "restored"),
                ("MOVE", "sequence", "moved"),
            )
        ]
        self._sql(
            f"CREATE OR REPLACE TABLE done AS SELECT ledger_id, entry_id, batch_index, {', '.join(until)} "  # noqa: S608
            f"FROM ({done}) AS d GROUP BY ledger_id, entry_id, batch_index"
        )
        of_cancelled = self._filter.state is State.CANCELLED
        tenures = Tenures.of(self._warehouse)

        def missed(name: str) -> str:
            return f"i.subscription IS NULL AND {tenures.sql('i', 'i.deliver_at', literal(self.topic), literal(name))}"

        bits = [
            f"CASE WHEN {_is_left(i, name, of_cancelled)} AND NOT ({missed(name)}) THEN {1 << i} ELSE 0 END"
            for i, name in enumerate(names)
        ]
        return f"""
            SELECT i.*, {" + ".join(bits)} AS {WAITS} FROM ({rows}) AS i {join_commands("done", "i")}
        """  # noqa: S608

    @property
    def _of_topic(self) -> str:
        return f"topic = {literal(self.topic)}"

    def _message(self, row: dict[str, Any]) -> PendingMessage:
        return PendingMessage(
            ref=MessageRef(row["ledger_id"], row["entry_id"], row["partition"], row["batch_index"]),
            subscriptions=tuple(s.name for i, s in enumerate(self.subscriptions) if row[WAITS] >> i & 1),
            properties=dict(row["properties"] or ()),
            **{
                name: row[name]
                for name in (
                    "deliver_at",
                    "sequence",
                    "batch_size",
                    "key",
                    "ordering_key",
                    "event_time",
                    "publish_time",
                    "producer_name",
                    "attempt",
                    "shaped_from",
                    "occurrence",
                )
            },
        )

    def _overdue_from(self) -> int:
        """The time before which due messages count as delivered, also where the job has stood still since, ms."""
        last = self._tables.largest("deliveries", "sent_at")
        return 0 if last is None else max(0, min(last, self.as_of) - OVERDUE_MILLIS)

    def _open(self, warehouse: str) -> Snapshot:
        cursor = self._cursor
        # The index first: a message that is delivered in between may be in both, but not in neither.
        versions = {
            "delayed_index": cursor.index if cursor else None,
            "deliveries": cursor.deliveries if cursor else None,
        }
        try:
            return Snapshot(warehouse, versions)
        except DeltaError:
            raise self._gone() if cursor else NoTablesError(f"no tables in {warehouse}: has the job run?") from None

    def _sql(self, sql: str) -> Any:
        try:
            return self._tables.sql(sql)
        except (DeltaError, OSError) as error:
            if "not found" in str(error).lower():
                raise self._gone() from error
            raise

    def _gone(self) -> VersionGoneError:
        return VersionGoneError("the listed version of the tables is gone: begin the listing again without a cursor")


def of_route(settings: Settings, topic: str, subscription: str | None) -> tuple[str, int | None, list[Subscription]]:
    """Returns the route's topic, the number of the named partition (None: all), and the subscriptions asked for.

    Raises:
        UnknownTopicError: no route has the topic, or the topic has no such subscription.
    """
    source, partition = resolve_topic(topic, {route.source for route in settings.routes})
    route = settings.route(source) if source else None
    if route is None:
        raise UnknownTopicError(f"no route with the source {topic}: see routes in the settings")
    chosen = [s for s in route.subscriptions if subscription in (None, s.name)]
    if not chosen:
        raise UnknownTopicError(f"no subscription {subscription} of {route.source}: see routes in the settings")
    return route.source, None if partition < 0 else partition, chosen


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
    column = _SEQUENCE if column == "sequence" else column
    if len(key) == 1:
        return f"{column} > {value}"
    return f"({column} > {value} OR ({column} = {value} AND {_comes_after(key[1:])}))"


def _descending() -> str:
    return ", ".join(f"{column} DESC" for column in ORDER)
