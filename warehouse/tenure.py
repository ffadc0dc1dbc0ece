"""Since when a subscription is in the settings: messages handed out before, or while it was out, are not for it.

For each time that a topic's subscriptions changed, the table `subscription_changes` has a row for each of them, which
says up to where messages had been handed out by then. A subscription without a row counts as having been there always.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.position import Position
from tracker.messages import FIRST_IMPORTED_LEDGER, PLACE_LEDGERS, BoolArray, int64
from warehouse.known_routes import KnownRoutes
from warehouse.schemas import SUBSCRIPTION_CHANGES
from warehouse.tables import Tables, exists, literal

TABLE = "subscription_changes"

# By topic a mapping with `handed_out` and `positions`, as in the table, and `subscriptions`: the change by name.
Changes = dict[str, dict[str, Any]]


def changes(before: KnownRoutes, after: KnownRoutes, handed_out: int, positions: Mapping[str, str]) -> Changes:
    """Finds the changes of subscriptions, for each topic whose subscriptions are not the same as before.

    Args:
        after: `before` with the settings' routes taken on.
        handed_out: everything due then or before has been handed out; ms since the epoch.
        positions: by topic partition's name the last entry that was taken in, as `ledger:entry`.
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
        now: ms since the epoch.
        writer: the app id.
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


@dataclass(frozen=True)
class _Moment:
    """Up to where messages of a topic had been handed out."""

    handed_out: int
    positions: dict[int, Position]  # by partition; -1: the topic is not partitioned

    def had(self, rows: pa.Table) -> BoolArray:
        """A mask of the rows whose messages had been handed out."""
        had = np.zeros(rows.num_rows, np.bool_)
        partition, ledger, entry = (int64(rows, name) for name in ("partition", "ledger_id", "entry_id"))
        for number, last in self.positions.items():
            is_before = (ledger < last.ledger_id) | ((ledger == last.ledger_id) & (entry <= last.entry_id))
            is_before &= ledger >= _first_ledger(last)
            had |= (partition == number) & is_before
        return had & (int64(rows, "deliver_at") <= self.handed_out)

    def had_one(self, message: Mapping[str, Any], due: int) -> bool:
        """Tells whether what was due then of a message (partition, ledger_id, entry_id) had been handed out."""
        last = self.positions.get(message["partition"])
        if last is None or due > self.handed_out:
            return False
        position = message["ledger_id"], message["entry_id"]
        return _first_ledger(last) <= position[0] and position <= (last.ledger_id, last.entry_id)

    def sql(self, row: str, due: str) -> str:
        """The same as an SQL condition on a row, given its alias and the SQL for when its message is due."""
        parts = [
            f"({row}.partition = {number} AND {row}.ledger_id >= {_first_ledger(last)} "
            f"AND ({row}.ledger_id < {last.ledger_id} "
            f"OR ({row}.ledger_id = {last.ledger_id} AND {row}.entry_id <= {last.entry_id})))"
            for number, last in self.positions.items()
        ]
        return f"(({' OR '.join(parts) or 'false'}) AND coalesce({due}, 0) <= {self.handed_out})"


_NEVER = _Moment(-1, {})


def _first_ledger(last: Position) -> int:
    """Returns the first ledger id that may be before a position: a warehouse's earlier brokers have the highest."""
    return FIRST_IMPORTED_LEDGER + PLACE_LEDGERS if last.ledger_id >= FIRST_IMPORTED_LEDGER else 0


class Tenures:
    """Tells which messages were handed out while a subscription was not in the settings.

    Args:
        rows: those of the table, oldest first.
    """

    def __init__(self, rows: pa.Table = SUBSCRIPTION_CHANGES.empty_table()) -> None:  # noqa: B008
        # By topic and subscription: from when to when it was not there.
        self._absences: dict[tuple[str, str], list[tuple[_Moment, _Moment]]] = {}
        # By topic the subscriptions after the last change.
        self.last: dict[str, set[str]] = {}
        left: dict[tuple[str, str], _Moment] = {}
        for row in rows.to_pylist():
            key, change = (row["topic"], row["subscription"]), row["change"]
            positions = {int(n): Position.parse(p) for n, p in json.loads(row["positions"]).items()}
            moment = _Moment(row["handed_out"], positions)
            names = self.last.setdefault(row["topic"], set())
            if change == "REMOVED":
                names.discard(row["subscription"])
                left[key] = moment
                continue
            names.add(row["subscription"])
            if change == "ADDED":
                self._absences.setdefault(key, []).append((left.pop(key, _NEVER), moment))

    @staticmethod
    def of(warehouse: str) -> Tenures:
        """Reads the tenures from a warehouse's table; without one every subscription has always been there."""
        if not exists(warehouse, TABLE):
            return Tenures()
        return Tenures(Tables(warehouse).query(TABLE, f"SELECT * FROM {TABLE} ORDER BY batch_id, changed_at"))  # noqa: S608

    def of_topic(self, topic: str) -> list[str]:
        """Returns the topic's subscriptions that were absent for some time, before they were added or added again."""
        return [name for of, name in self._absences if of == topic]

    def were_missed(self, rows: pa.Table, topic: str, subscription: str) -> BoolArray:
        """Tells which rows' messages were handed out while a topic's subscription was not there.

        Args:
            rows: with topic, partition, ledger_id, entry_id and deliver_at, and maybe `subscription`: a row that is for
                one subscription alone was not missed.

        Returns:
            a mask, bool, (rows,).
        """
        missed = np.zeros(rows.num_rows, np.bool_)
        for since, until in self._absences.get((topic, subscription), ()):
            missed |= until.had(rows) & ~since.had(rows)
        is_own = pc.equal(rows["topic"], topic).to_numpy(zero_copy_only=False)
        if "subscription" in rows.column_names:
            is_own &= rows["subscription"].is_null().to_numpy(zero_copy_only=False)
        missed &= is_own
        return missed

    def was_absent(self, topic: str, subscription: str, message: Mapping[str, Any], due: int) -> bool:
        """Tells whether what came due for a topic's subscription alone was handed out while it was not there.

        Args:
            message: its partition, ledger_id and entry_id.
            due: ms since the epoch.
        """
        absences = self._absences.get((topic, subscription), ())
        return any(until.had_one(message, due) and not since.had_one(message, due) for since, until in absences)

    def sql(self, row: str, due: str, topic: str, subscription: str) -> str:
        """The condition of `were_missed` in SQL, but for the column `subscription` of a row.

        Args:
            row: the alias of a table with partition, ledger_id and entry_id.
            due: SQL for when the row's message is due, ms since the epoch.
            topic: SQL for the row's topic.
            subscription: SQL for the subscription's name.
        """
        parts = [
            f"({topic} = {literal(of)} AND {subscription} = {literal(name)} "
            f"AND {until.sql(row, due)} AND NOT {since.sql(row, due)})"
            for (of, name), absences in self._absences.items()
            for since, until in absences
        ]
        return f"({' OR '.join(parts) or 'false'})"


def _partition(topic: str, name: str) -> int | None:
    """Returns the number of a topic's partition by its name, -1 for the topic itself; None: it is of another topic."""
    if name == topic:
        return -1
    number = name.removeprefix(f"{topic}-partition-")
    return int(number) if number.isdigit() else None
