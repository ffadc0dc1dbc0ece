"""Memberships: since when a subscription is in the settings. Messages dispatched before, or in between, are not for it.

Each time that a topic's subscriptions change, the table `subscription_changes` gets a row for each of them, which says
up to where messages had been dispatched by then. A subscription without a row counts as having always been there.

Whether a message was there by then is known from its position; for a row that a message got later for one subscription,
from the row's sequence, which has the tick.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.position import Position
from conf.partitions import split_partition
from tracker.messages import FIRST_IMPORTED_LEDGER, PLACE_LEDGERS, BoolArray, Int64Array, int64
from tracker.schemas import SEQUENCE_BITS
from warehouse.delta.tables import Tables, exists
from warehouse.named_queries import NamedQueries, Sql, identifier, some_of
from warehouse.routes.known_routes import KnownRoutes
from warehouse.schemas import SUBSCRIPTION_CHANGES

TABLE = "subscription_changes"
_SQL = NamedQueries(__file__)

# By topic: `handed_out` and `positions`, as in the table, and `subscriptions`, the changes by subscription name.
Changes = dict[str, dict[str, Any]]


def changes(before: KnownRoutes, after: KnownRoutes, handed_out: int, positions: Mapping[str, str]) -> Changes:
    """Finds the changes for each topic whose subscriptions are not the same as before.

    Args:
        after: `before`, updated to the settings.
        handed_out: the time by which everything due has been dispatched, ms since the epoch.
        positions: the last entry that was ingested, as `ledger:entry`, by the topic partition's name.
    """
    found: Changes = {}
    for topic, route in after.routes.items():
        old = before.routes.get(topic)
        were = set() if old is None else {s.name for s in old.left}
        now = {s.name for s in route.left}
        if now != were:
            known = {name: position for name, position in positions.items() if old is not None}
            found[topic] = {
                "handed_out": -1 if old is None else handed_out,
                "positions": {str(n): p for name, p in known.items() if (n := _partition(topic, name)) is not None},
                "subscriptions": {
                    name: "REMOVED" if name not in now else "KEPT" if name in were else "ADDED"
                    for name in sorted(now | were)
                },
            }
    return found


def write_changes(tables: Tables, found: Changes, tick: int, now: int, writer: str) -> None:
    """Appends changes to the table, once for a writer and tick.

    Args:
        now: the current time, ms since the epoch.
        writer: the writer's app id.
    """
    if not found:
        return
    rows = [
        {
            "topic": topic,
            "subscription": name,
            "change": change,
            "changed_at": now,
            "handed_out": of_topic["handed_out"],
            "positions": json.dumps(of_topic["positions"], sort_keys=True),
            "batch_id": tick,
        }
        for topic, of_topic in found.items()
        for name, change in of_topic["subscriptions"].items()
    ]
    tables.append(TABLE, pa.Table.from_pylist(rows, SUBSCRIPTION_CHANGES), {writer: tick})


class _Rows(NamedTuple):
    """Columns of rows of messages, each int64, (rows,)."""

    partition: Int64Array
    ledger_id: Int64Array
    entry_id: Int64Array
    due: Int64Array  # ms since the epoch
    sequence: Int64Array  # 0: the first row of a message

    @staticmethod
    def of(rows: pa.Table) -> _Rows:
        if "sequence" in rows.column_names:
            sequence = pc.fill_null(rows["sequence"], 0).to_numpy()
        else:
            sequence = np.zeros(rows.num_rows, np.int64)
        partition, ledger, entry, due = (int64(rows, n) for n in ("partition", "ledger_id", "entry_id", "deliver_at"))
        return _Rows(partition, ledger, entry, due, sequence)


@dataclass(frozen=True)
class _Moment:
    """A moment at which a topic's subscriptions changed, by what had been dispatched before it."""

    handed_out: int  # everything due by then had been dispatched, ms since the epoch
    positions: dict[int, Position]  # the last entry ingested, by partition; -1: the topic is not partitioned
    sequence: int  # rows of moved messages with a lower sequence were there

    def handed_out_before(self, rows: _Rows) -> BoolArray:
        """Returns a mask, bool, (rows,), of the rows whose messages had been dispatched before this moment."""
        was_there = (rows.sequence > 0) & (rows.sequence < self.sequence)
        for number, last in self.positions.items():
            is_before = rows.ledger_id < last.ledger_id
            is_before |= (rows.ledger_id == last.ledger_id) & (rows.entry_id <= last.entry_id)
            is_before &= rows.ledger_id >= _first_ledger(last)
            was_there |= (rows.sequence == 0) & (rows.partition == number) & is_before
        handed_out: BoolArray = was_there & (rows.due <= self.handed_out)
        return handed_out

    def sql(self, row: str, due: Sql, sequence: Sql | None) -> Sql:
        """Returns `handed_out_before` as an SQL condition on a row: see `Memberships.sql`."""
        was_there = some_of(
            _SQL(
                "came_by",
                row=identifier(row),
                partition=number,
                first_ledger=_first_ledger(last),
                ledger=last.ledger_id,
                entry=last.entry_id,
            )
            for number, last in self.positions.items()
        )
        if sequence is not None:
            was_there = _SQL("was_there_by", sequence=sequence, came_by=was_there, moment=self.sequence)
        return _SQL("handed_out_by", was_there=was_there, due=due, handed_out=self.handed_out)


_NEVER = _Moment(-1, {}, 0)


def _first_ledger(last: Position) -> int:
    """Returns the first ledger id that may be before a position: entries of earlier brokers have the highest ids."""
    return FIRST_IMPORTED_LEDGER + PLACE_LEDGERS if last.ledger_id >= FIRST_IMPORTED_LEDGER else 0


class Memberships:
    """Finds messages that were dispatched while a subscription was not in the settings.

    Args:
        rows: rows of the table `subscription_changes`, oldest first.
    """

    def __init__(self, rows: pa.Table = SUBSCRIPTION_CHANGES.empty_table()) -> None:  # noqa: B008
        # The begins and ends of a subscription's absences, by topic and subscription.
        self._absences: dict[tuple[str, str], list[tuple[_Moment, _Moment]]] = {}
        # The subscriptions after the last change, by topic.
        self.last: dict[str, set[str]] = {}
        left: dict[tuple[str, str], _Moment] = {}
        for row in rows.to_pylist():
            key, change = (row["topic"], row["subscription"]), row["change"]
            positions = {int(n): Position.parse(p) for n, p in json.loads(row["positions"]).items()}
            moment = _Moment(row["handed_out"], positions, row["batch_id"] << SEQUENCE_BITS)
            names = self.last.setdefault(row["topic"], set())
            if change == "REMOVED":
                names.discard(row["subscription"])
                left[key] = moment
                continue
            # A rebuild notes an added subscription, and the job's first batch does once more.
            is_added = change == "ADDED" and row["subscription"] not in names
            names.add(row["subscription"])
            if is_added:
                self._absences.setdefault(key, []).append((left.pop(key, _NEVER), moment))

    @staticmethod
    def of(warehouse: str) -> Memberships:
        """Reads the memberships from a warehouse's table; without one every subscription has always been there."""
        if not exists(warehouse, TABLE):
            return Memberships()
        return Memberships(Tables(warehouse).query(TABLE, _SQL("all_changes")))

    def has(self, topic: str, subscription: str) -> bool:
        """Whether the job has begun with a topic's subscription; True also if the table has nothing of the topic."""
        return topic not in self.last or subscription in self.last[topic]

    def changed_names(self, topic: str) -> list[str]:
        """Returns the topic's subscriptions that were added later, or were absent for some time."""
        return [name for of, name in self._absences if of == topic]

    def were_missed(self, rows: pa.Table, topic: str, subscription: str) -> BoolArray:
        """Returns a mask of the rows whose messages were dispatched while a topic's subscription was not there.

        Args:
            rows: columns topic, partition, ledger_id, entry_id and deliver_at; optionally `subscription` (rows for
                another one were not missed) and `sequence` (without it, all are first rows of messages).

        Returns:
            bool, (rows,).
        """
        if (topic, subscription) not in self._absences:
            return np.zeros(rows.num_rows, np.bool_)
        missed = self._missed(_Rows.of(rows), topic, subscription)
        missed &= pc.equal(rows["topic"], topic).to_numpy(zero_copy_only=False)
        if "subscription" in rows.column_names:
            is_for_it = pc.fill_null(pc.equal(rows["subscription"], subscription), True)
            missed &= is_for_it.to_numpy(zero_copy_only=False)
        return missed

    def was_absent(
        self, topic: str, subscription: str, message: Mapping[str, Any], due: int, sequence: int = 0
    ) -> bool:
        """Whether a message that was due for one subscription alone was dispatched while that was not there.

        Args:
            message: the message's partition, ledger_id and entry_id.
            due: when it was due, ms since the epoch.
            sequence: the sequence of its row for the subscription; 0: it has none.
        """
        if (topic, subscription) not in self._absences:
            return False
        values = message["partition"], message["ledger_id"], message["entry_id"], due, sequence
        return bool(self._missed(_Rows(*(np.array([value]) for value in values)), topic, subscription)[0])

    def _missed(self, rows: _Rows, topic: str, subscription: str) -> BoolArray:
        """Returns a mask of the rows, all for a topic's subscription, that were dispatched while it was not there."""
        missed = np.zeros(len(rows.due), np.bool_)
        for since, until in self._absences[topic, subscription]:
            missed |= until.handed_out_before(rows) & ~since.handed_out_before(rows)
        return missed

    def handed_out(self, topic: str, subscriptions: Iterable[str]) -> int:
        """Returns a time, ms since the epoch, after which none of a topic's subscriptions missed a message."""
        absences = (self._absences.get((topic, name), []) for name in subscriptions)
        return max((until.handed_out for of_name in absences for _, until in of_name), default=-1)

    def sql(self, row: str, due: Sql, topic: Sql, subscription: Sql, sequence: Sql | None = None) -> Sql:
        """Returns `were_missed` as an SQL condition, for rows that are for the subscription, or for all.

        Args:
            row: the alias of a table with partition, ledger_id and entry_id.
            due: when the row's message is due, ms since the epoch.
            topic: the row's topic.
            subscription: the subscription's name.
            sequence: the row's sequence; None: all are first rows of messages.
        """
        return some_of(
            _SQL(
                "handed_out_between",
                topic=topic,
                of_topic=of,
                subscription=subscription,
                of_subscription=name,
                until=until.sql(row, due, sequence),
                since=since.sql(row, due, sequence),
            )
            for (of, name), absences in self._absences.items()
            for since, until in absences
        )

    def sql_before(self, row: str, due: Sql, topic: Sql, subscription: Sql) -> Sql:
        """Returns the SQL condition that a row's message was dispatched before its subscription was last added.

        Args:
            row: the alias of a table with partition, ledger_id and entry_id.
            due: when the row's message was due, ms since the epoch.
            topic: the row's topic.
            subscription: the subscription's name.
        """
        return some_of(
            _SQL(
                "handed_out_before",
                topic=topic,
                of_topic=of,
                subscription=subscription,
                of_subscription=name,
                until=absences[-1][1].sql(row, due, None),
            )
            for (of, name), absences in self._absences.items()
        )


def _partition(topic: str, name: str) -> int | None:
    """Returns the number of a topic's partition from its name; -1: the topic itself; None: it is not the topic's."""
    if name == topic:
        return -1
    of, number = split_partition(name)
    return number if of == topic and number >= 0 else None
