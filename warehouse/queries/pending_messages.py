"""Lists and counts the pending messages of a topic, by SQL over the Delta tables."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake.exceptions import DeltaError, TableNotFoundError

from broker.entries.message_ids import MessageRef
from conf.errors import UnreadableWarehouseError
from conf.settings import Settings
from tracker.due_time import EXPIRE_AFTER, BadScheduleError, duration
from tracker.message_state.changes import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from tracker.messages import Int64Array
from warehouse.delta.snapshot import Snapshot
from warehouse.named_queries import NamedQueries, Sql, identifier, listed
from warehouse.named_queries import columns as column_list
from warehouse.queries.listing import (
    ORDER,
    Cursor,
    NoTablesError,
    Page,
    PendingFilter,
    PendingMessage,
    State,
    resolve_route,
)
from warehouse.queries.paused import paused_subscriptions
from warehouse.queries.pending_counts import PendingCounts
from warehouse.queries.pending_rows import SEQUENCE, WAITS, PendingRows, version_gone
from warehouse.queries.unsealed_messages import NOTHING_MORE, Unacknowledged, without_known

_SQL = NamedQueries(
    __file__,
    sequence=SEQUENCE,
    held=HELD_DELIVER_AT,
    order=column_list(ORDER),
    descending=Sql(", ".join(f"{column} DESC" for column in ORDER)),
)

MAX_LIMIT = 1_000  # messages of a page

# Horizons in ms, by the names that the counts have in `Pending.stats`.
_HORIZONS = {"dueWithinMinute": 60_000, "dueWithinHour": 3_600_000, "dueWithinDay": 86_400_000}

# The columns of ORDER that name an entry and a time at which messages of it are due.
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
    "was_due",
    "expires_at",
    "occurrence",
)

# The factor by which more candidates are read each time that too few of the last ones are pending.
_GROWTH = 8
_MAX_CANDIDATES = 1_000_000

# The minimum number of the table's rows that a listing reads at once; more with conditions on texts, which few rows may
# meet.
_LEAST_READ = 20_000
_LEAST_READ_BY_TEXT = 1_000_000


class Pending:
    """The pending messages of one topic that match a filter, in one version of the tables.

    Args:
        topic: a source topic or a partition of it, complete or not.
        wanted: the filter; None: all messages.
        cursor: the cursor of the page before, whose versions of the tables are read again; None: the listing begins, in
            the newest versions.
        now: messages due later have not been delivered; ms since the epoch. None: the current time.

    Raises:
        UnknownTopicError: no route has the topic, or the topic has no such subscription.
        CursorError: the cursor is of another listing, or can't be read.
        VersionGoneError: the cursor's versions of the tables have been removed; methods may raise it, too.
        NoTablesError: the job has not run yet.
        UnreadableWarehouseError: the tables can't be read; methods may raise it, too.
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
        self.topic, partition, self.subscriptions = resolve_route(settings, topic, self._filter.subscription)
        self._asked = hashlib.sha256(f"{topic} {self._filter.model_dump_json()}".encode()).hexdigest()[:16]
        self._cursor = Cursor.decode(cursor, self._asked) if cursor else None
        self._warehouse = settings.warehouse
        self._lookahead_millis = settings.release.lookahead_millis
        self._tables = self._open(settings)
        self.version = self._tables.versions["delayed_index"]
        self.as_of = self._cursor.as_of if self._cursor else (time.time_ns() // 1_000_000 if now is None else now)
        names = [s.name for s in self.subscriptions]
        self._pending = PendingRows(self._tables, self.topic, partition, names, self._filter, self.as_of)

    @property
    def lists_cancelled(self) -> bool:
        """Whether the listing has messages that were cancelled or skipped."""
        return self._filter.state is State.CANCELLED

    def page(self, limit: int, come_in: Unacknowledged = NOTHING_MORE) -> Page:
        """Returns the next messages of the listing, at most `limit`, soonest first.

        A message that has a row for each subscription is listed once for each time, with all of them.

        Args:
            limit: the most messages.
            come_in: what was found of the topic at its broker before this listing was begun: messages in it that no
                table has are listed, too.
        """
        found = self._messages(limit + 1)
        unsealed: list[PendingMessage] = []
        if come_in.messages:
            unsealed = without_known(self._warehouse, come_in.messages, self.subscriptions, self._filter, self.version)
            found = self._with_unsealed(found, unsealed, has_more=len(found) > limit)
        cursor = None
        if len(found) > limit:
            del found[limit:]
            cursor = Cursor(
                index=self.version,
                deliveries=self._tables.versions["deliveries"],
                as_of=self.as_of,
                asked=self._asked,
                last=found[-1].place,
                has_unsealed=self._began_with_unsealed or any(one.place > found[-1].place for one in unsealed),
            ).encode()
        return Page(self.version, self.as_of, found, cursor, come_in.note or self._note_of_sealed())

    def note_of_unsealed(self, come_in: Unacknowledged) -> str:
        """Returns how many messages match that are in no table yet, which counts and rows leave out; empty: none.

        Args:
            come_in: as of `page`.
        """
        unsealed = without_known(self._warehouse, come_in.messages, self.subscriptions, self._filter, self.version)
        n = len({one.ref for one in unsealed})
        if not n:
            return come_in.note if come_in.messages else ""
        return f"{n:,} more were sent within the last seconds, which a filter can't match yet: do it again then"

    @property
    def _began_with_unsealed(self) -> bool:
        return self._cursor is not None and self._cursor.has_unsealed

    def _note_of_sealed(self) -> str:
        """Returns why messages may be missing that were in no table when the listing began; empty: none is."""
        if self._began_with_unsealed:
            newest = Snapshot(self._warehouse, {"delayed_index": None}).versions["delayed_index"]
            if newest > self.version:
                return "what had only just come in may be missing: it was written to the table since the listing began"
        return ""

    def _with_unsealed(
        self, found: list[PendingMessage], unsealed: Sequence[PendingMessage], *, has_more: bool
    ) -> list[PendingMessage]:
        """Adds messages that are in no table to those of a page, in order, as far as they belong to it."""
        after, end = self._cursor.last if self._cursor else None, found[-1].place if has_more else None
        own = [one for one in unsealed if (after is None or one.place > after) and (end is None or one.place < end)]
        own = [replace(one, is_going_out=one.deliver_at <= self.as_of + self._lookahead_millis) for one in own]
        return sorted([*found, *own], key=lambda one: one.place)

    def _messages(self, n: int) -> list[PendingMessage]:
        """Returns the next n messages of the listing, or some more; those before the n-th have all their rows."""
        found: list[PendingMessage] = []
        after, n_rows, wanted = self._cursor.last if self._cursor else None, 0, n
        while True:
            messages = [self._message(row) for row in self._rows(wanted, _SHOWN, after).to_pylist()]
            n_rows += len(messages)
            for message in messages:
                if found and found[-1].is_at_the_same_time(message):
                    waits = {*found[-1].subscriptions, *message.subscriptions}
                    names = tuple(s.name for s in self.subscriptions if s.name in waits)
                    found[-1] = replace(message, subscriptions=names)
                else:
                    found.append(message)
            if len(messages) < wanted or len(found) >= n:
                return found
            after = messages[-1].place
            # The estimated number of rows for the rest, if they are as the ones before.
            wanted = (n - len(found)) * n_rows // len(found) + len(self.subscriptions)

    def rows(self, limit: int, columns: Sequence[str]) -> pa.Table:
        """Returns the next rows of the listing, soonest first.

        Args:
            limit: the maximum number of rows.
            columns: columns of the delayed index.

        Returns:
            a row for each message, or for each subscription of a message that was moved, with these columns and WAITS,
            int64.
        """
        return self._rows(limit, columns, self._cursor.last if self._cursor else None)

    def entries(self, rows_at_once: int) -> Iterator[pa.Table]:
        """Yields the entries of all messages of the listing, soonest first, in several tables.

        Args:
            rows_at_once: the maximum number of messages that are read for a table.

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
        """Returns the rows after the one with some values of ORDER; None: from the beginning."""
        found: list[pa.Table] = []
        read = dict.fromkeys((*ORDER, *columns, "subscription", "occurrence"))
        left = candidates = limit
        shown = column_list(columns)
        while True:
            # The soonest rows are quick to find; only for these, deliveries and commands are looked up.
            count = self._find(candidates, read, after)
            last = self._pending.sql(_SQL("last_candidate"))
            if not last.num_rows:
                found.append(self._pending.sql(_SQL("candidates_alone", shown=shown)))
                break
            waiting = self._pending.waiting(_SQL("candidates"), "candidates")
            found.append(self._pending.sql(_SQL("page", shown=shown, waiting=waiting, n=left)))
            left -= found[-1].num_rows
            if not left or count < candidates:
                break
            after = tuple(last.to_pylist()[0].values())
            candidates = min(candidates * _GROWTH, _MAX_CANDIDATES)
        return pa.concat_tables(found)

    def _find(self, n: int, columns: Iterable[str], after: tuple[int, ...] | None) -> int:
        """Puts the first n rows after a row into the table `candidates`, and returns their number.

        It reads in steps of time, by the log's statistics where these suffice, so that few rows later than the last one
        are read, and none twice.
        """
        least = _LEAST_READ_BY_TEXT if self._filter.has_texts else _LEAST_READ
        wanted, read, count = max(2 * n, least), 0, 0
        start = self._pending.start if after is None else after[0]
        while True:
            end = self._pending.end_of(wanted, start)
            condition = _SQL("due_from" if end is None else "due_between", start=start, end=end)
            if self._filter.properties:
                condition = self._pending.time_condition(n - count, after, condition)
            source = self._pending.delayed(columns, after, condition)
            self._pending.sql(_SQL("add_candidates" if read else "begin_candidates", rows=source, n=n - count))
            count = int(self._pending.sql(_SQL("count_candidates"))["n"][0].as_py())
            if count == n or end is None:
                return count
            start, read = end, read + wanted
            # The estimated number of rows for the rest, if they are as the ones before.
            likely = int(1.2 * (n - count) * read / count) if count else read * _GROWTH
            wanted = min(max(likely, least), read * _GROWTH)

    def count(self) -> int:
        """Counts the pending messages that match the filter; a message of several subscriptions counts once."""
        counts = PendingCounts(self._pending)
        n = self._pending.sql(_SQL("count", rows=counts.sql))["n"][0].as_py()
        return int(n) + counts.others(np.zeros_like).total()

    def histogram(self, width_millis: int, begin: int = 0) -> pa.Table:
        """Counts the messages due in each span of time, by subscription, without those that are parked or paused.

        Args:
            width_millis: the length of a span.
            begin: a time at which a span is divided in two, ms since the epoch.

        Returns:
            a row for each span with messages, ascending, all int64: `at`, its start, ms since the epoch, and the count
            for each of `subscriptions`, in a column named by its index.
        """
        counts = PendingCounts(self._pending)
        each = listed(
            _SQL("count_of_subscription", bit=1 << i, name=identifier(f"{i}")) for i in range(len(self.subscriptions))
        )
        found = self._pending.sql(_SQL("histogram", begin=begin, width=width_millis, counts=each, rows=counts.sql))

        def bin_of(times: Int64Array) -> Int64Array:
            start = times // width_millis * width_millis
            start = np.where(times < begin, start, np.maximum(start, begin))
            bins: Int64Array = np.where(times < HELD_DELIVER_AT, start, HELD_DELIVER_AT)
            return bins

        others = counts.others(bin_of)
        others.pop(HELD_DELIVER_AT, None)
        waiting = {"at": list(others), **{str(i): list(others.values()) for i in range(len(self.subscriptions))}}
        schema = pa.schema([(name, pa.int64()) for name in waiting])
        spans = pa.concat_tables([pa.table(found).cast(schema), pa.table(waiting, schema)])
        added = spans.group_by("at").aggregate([(name, "sum") for name in waiting if name != "at"])
        return added.rename_columns(list(waiting)).sort_by("at")

    def stats(self) -> dict[str, Any]:
        """Counts each subscription's messages that are pending, due soon or parked, as the admin API gives them.

        `messages` is as `count`: a message of several subscriptions counts once. `earliest` and `latest` are when the
        first and the last message are due, ms since the epoch. `takenBack` ignores the filter: it counts the topic's
        messages, and whole entries, that were cancelled and would be due later.
        """
        counts = PendingCounts(self._pending)
        names = [s.name for s in self.subscriptions]
        columns = listed(self._stats_of(i) for i in range(len(names)))
        found = self._pending.sql(_SQL("stats", columns=columns, rows=counts.sql)).to_pylist()[0]
        edges = np.array([*(self.as_of + millis for millis in _HORIZONS.values()), HELD_DELIVER_AT, PAUSED_DELIVER_AT])
        others = counts.others(lambda times: np.searchsorted(edges, times, "right"))
        first, last = counts.first_and_last()
        cancelled = self._counts_of_cancelled(counts)
        written_at = self._tables.written_at("delayed_index")
        are_paused = {name for _, name in paused_subscriptions(self._warehouse, self.topic)}
        return {
            "topic": self.topic,
            "version": self.version,
            "asOf": self.as_of,
            "lastWriteAgeMillis": max(0, self.as_of - written_at),
            "messages": found["messages"] + others.total(),
            "subscriptions": [
                {
                    "subscription": name,
                    "pending": found[f"pending_{i}"] + others.total(),
                    **{
                        horizon: found[f"{horizon}_{i}"] + sum(others[n] for n in range(place + 1))
                        for place, horizon in enumerate(_HORIZONS)
                    },
                    "earliest": min((t for t in (found[f"min_{i}"], first) if t is not None), default=None),
                    "latest": max((t for t in (found[f"max_{i}"], last) if t is not None), default=None),
                    "held": found[f"held_{i}"] + others[len(edges) - 1],
                    "isPaused": name in are_paused,
                    "takenBack": cancelled.get(name, 0),
                }
                for i, name in enumerate(names)
            ],
        }

    def _stats_of(self, i: int) -> Sql:
        """Returns the SQL columns of `stats` for the i-th subscription."""
        horizons = listed(
            _SQL("due_within_horizon", bit=1 << i, end=self.as_of + millis, name=identifier(f"{name}_{i}"))
            for name, millis in _HORIZONS.items()
        )
        return _SQL("stats_of_subscription", i=i, bit=1 << i, horizons=horizons)

    def _counts_of_cancelled(self, counts: PendingCounts) -> dict[str, int]:
        """Returns the number of cancelled messages, or whole entries, that would be due later, by subscription."""
        commands = identifier(counts.commands_after(self.as_of))
        found = self._pending.sql(
            _SQL("cancelled", commands=commands, in_topic=self._pending.in_topic, as_of=self.as_of)
        )
        return dict(zip(found["subscription"].to_pylist(), found["n"].to_pylist(), strict=True))

    def _message(self, row: dict[str, Any]) -> PendingMessage:
        waiting = [s for i, s in enumerate(self.subscriptions) if row[WAITS] >> i & 1]
        return PendingMessage(
            ref=MessageRef(row["ledger_id"], row["entry_id"], row["partition"], row["batch_index"]),
            subscriptions=tuple(s.name for s in waiting),
            properties=dict(row["properties"] or ()),
            expires_at=_end(row, [s.expire_after for s in waiting if s.expire_after is not None]),
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

    def _open(self, settings: Settings) -> Snapshot:
        cursor = self._cursor
        # The index is opened first: a message that is delivered in between may be in both tables, but not in neither.
        versions = {
            "delayed_index": cursor.index if cursor else None,
            "deliveries": cursor.deliveries if cursor else None,
        }
        try:
            return Snapshot(settings.warehouse, versions)
        except TableNotFoundError:
            raise version_gone() if cursor else NoTablesError(settings.no_tables()) from None
        except UnreadableWarehouseError:
            raise
        except DeltaError:
            raise version_gone() from None


def _end(row: dict[str, Any], expire_after: Sequence[int]) -> int | None:
    """Returns when a row expires first, ms since the epoch; None: never.

    Args:
        row: of the delayed index.
        expire_after: of the subscriptions that wait for it, ms.
    """
    ends = [] if row["expires_at"] is None else [row["expires_at"]]
    due = next(time for time in (row["shaped_from"], row["was_due"], row["deliver_at"]) if time is not None)
    if due < HELD_DELIVER_AT:
        after = dict(row["properties"] or ()).get(EXPIRE_AFTER) if row["occurrence"] is not None else None
        if after is not None:
            with suppress(BadScheduleError):  # an earlier version did not read it
                ends.append(due + duration(EXPIRE_AFTER, after))
        ends += [due + millis for millis in expire_after]
    return min(ends, default=None)
