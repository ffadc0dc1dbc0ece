"""Finds where recurring messages stand: by their rows, what has been delivered, and what commands have done.

Which occurrences a subscription has had is known by their numbers, also of those that were in flight when the
checkpoint was lost. The first one that it has not had is next; those after it that it has had are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from broker.position import Position
from recovery.changes import write_moves
from recovery.delivered import CLOCKS_MILLIS, Delivered, Times, is_not_durable
from recovery.done_occurrences import Done, Message
from tracker.commands.control import Control
from tracker.commands.moves import HELD_DELIVER_AT
from tracker.commands.rebuilt import MOVED, OCCURRENCES_DONE, REBUILT_KEPT_MILLIS
from tracker.commands.schema import CANCEL_ROWS, COMMAND_ROWS, RESCHEDULE, SEQUENCE_BITS
from tracker.messages import subscription_numbers
from tracker.recurrence.recurrence import Misfire, Recurrence
from tracker.recurrence.start import first_of
from warehouse.maintenance.retention import LAST_OCCURRENCES_MILLIS
from warehouse.pending import IS_SKIPPED_OCCURRENCE
from warehouse.queries.index_rows import cancels_to_index
from warehouse.tables import Tables
from warehouse.tenure import Tenures

_POSITION = "topic, partition, ledger_id, entry_id, batch_index"

_SOURCES = f"""
SELECT {_POSITION}, publish_time, properties, deliver_at FROM delayed_index
WHERE operation = 'DELAY' AND occurrence IS NOT NULL AND sequence IS NULL
"""  # noqa: S608


def _last_of(table: str, columns: str, condition: str) -> str:
    """SQL for the row of the highest sequence of each message and subscription."""
    return f"""
SELECT * FROM (
    SELECT {_POSITION}, subscription, sequence, occurrence, {columns}, row_number() OVER (
        PARTITION BY subscription, ledger_id, entry_id, batch_index ORDER BY sequence DESC
    ) AS place FROM {table} WHERE occurrence IS NOT NULL AND sequence IS NOT NULL AND {condition}
) AS r WHERE place = 1
"""  # noqa: S608


_ROWS = _last_of("delayed_index", "deliver_at, occurrence_at", "operation = 'DELAY'")
_MOVES = _last_of("delayed_index", "deliver_at", "operation = 'MOVE'")
_RESCHEDULED = _last_of("outcomes", "deliver_at", "result = 'APPLIED' AND operation = 'RESCHEDULE'")

_SKIPPED = f"""
SELECT {_POSITION}, subscription, occurrence, deliver_at, deliver_at AS occurrence_at, applied_at AS sent_at
FROM outcomes WHERE occurrence IS NOT NULL AND {IS_SKIPPED_OCCURRENCE}
"""  # noqa: S608

# Rows that are to be written to the delayed index, with the columns that `write_moves` needs.
_FRESH = pa.schema(
    [
        *((name, pa.int64()) for name in ("subscription", "ledger_id", "entry_id", "batch_index", "message")),
        *((name, pa.int64()) for name in ("sequence", "deliver_at", "attempt", "occurrence", "occurrence_at")),
        ("source", pa.string()),
    ]
)


@dataclass
class Standing:
    """Where the recurring messages stand.

    Attributes:
        overdue: for each subscription that is to get an occurrence now the least time at which it is due.
        moved: as MOVED, for messages that are durable.
        done: as OCCURRENCES_DONE.
        fresh: rows that the delayed index needs, so that it has one for each next occurrence.
        waiting: as COMMAND_ROWS, reschedules of messages that come in again.
        ended: by number of a subscription positions (ledger, entry, batch index) that have ended.
    """

    overdue: Times = field(default_factory=dict)
    moved: list[dict[str, int]] = field(default_factory=list)
    done: list[tuple[int | None, ...]] = field(default_factory=list)
    fresh: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)
    ended: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    @property
    def moved_rows(self) -> pa.Table:
        """`moved` as a table."""
        return pa.Table.from_pylist(self.moved, schema=MOVED)

    @property
    def done_rows(self) -> pa.Table:
        """`done` as a table."""
        columns = zip(*self.done, strict=True) if self.done else [()] * len(OCCURRENCES_DONE)
        return pa.table([pa.array(c, pa.int64()) for c in columns], schema=OCCURRENCES_DONE)

    @property
    def waiting_rows(self) -> pa.Table:
        """`waiting` as a table."""
        return pa.Table.from_pylist(self.waiting, schema=COMMAND_ROWS)

    def write(self, tables: Tables, names: Mapping[str, Sequence[str]], tick: int) -> None:
        """Appends the fresh rows to the delayed index, each with a MOVE for the rows before it; `tick`: bucket_id."""
        if not self.fresh:
            return
        rows = pa.Table.from_pylist(self.fresh, schema=_FRESH)
        write_moves(tables, rows, names, tick, "sequence IS NULL")
        moves = [
            {
                **{name: row[name] for name in ("ledger_id", "entry_id", "batch_index", "sequence", "deliver_at")},
                "operation": "MOVE",
                "topic": row["source"],
                "partition": row["partition"],
                "subscription": names[row["source"]][row["subscription"]],
                "occurrence": row["occurrence"],
            }
            for row in self.fresh
        ]
        tables.append(
            "delayed_index",
            cancels_to_index(pa.Table.from_pylist(moves, schema=CANCEL_ROWS), tick),
            {f"rebuild-moves-{tick}": tick},
        )

    def add_ended(self, delivered: Delivered) -> None:
        """Adds to the delivered messages those that have ended."""
        for number, positions in self.ended.items():
            columns = zip(*positions, strict=True)
            names = ("ledger_id", "entry_id", "batch_index")
            rows = pa.table({n: pa.array(c, pa.int64()) for n, c in zip(names, columns, strict=True)})
            delivered.add_ended(number, rows)


class Schedules:
    """The recurring messages of a warehouse.

    Args:
        names: for each source topic the names of its subscriptions, by number.
        durable: by topic partition the last entry that does not come again from the source topics.
        tick: the new rows have sequences of this tick, which is later than any that the tables have.
        now: ms since the epoch.
        tenures: since when the subscriptions are in the settings.
    """

    def __init__(
        self,
        tables: Tables,
        names: Mapping[str, Sequence[str]],
        durable: Mapping[str, Position],
        tick: int,
        now: int,
        tenures: Tenures,
    ) -> None:
        self._names = names
        self._tenures = tenures
        self._durable = durable
        self._sequence = tick << SEQUENCE_BITS
        self._now = now
        sources = tables.sql(_SOURCES)
        self._sources = sources.to_pylist()
        self._comes_again = is_not_durable(sources, durable).tolist()
        self._rows, self._moves, self._rescheduled = (
            self._by_message(tables.sql(sql)) for sql in (_ROWS, _MOVES, _RESCHEDULED)
        )
        self._skipped = tables.sql(_SKIPPED)

    def standing(self, delivered: Delivered, control: Control) -> Standing:
        """Returns where the messages stand.

        Args:
            delivered: the messages, and occurrences, that have been delivered; the skipped ones are added.
            control: knows the messages that have been cancelled.
        """
        numbers = subscription_numbers(self._skipped, self._names)
        delivered.occurrences.add(self._skipped.filter(pa.array(numbers >= 0)), numbers[numbers >= 0])
        found = Standing()
        for row, comes_again in zip(self._sources, self._comes_again, strict=True):
            if not comes_again:
                for number in range(len(self._names.get(row["topic"], ()))):
                    at = row["ledger_id"], row["entry_id"], max(row["batch_index"], 0)
                    is_cancelled = control.cancelled.contains(number, *(np.array([n]) for n in at))[0]
                    self._find((number, *at), row, bool(is_cancelled), delivered, found)
        self._find_again(delivered, found)
        return found

    def _find_again(self, delivered: Delivered, found: Standing) -> None:
        """Of messages that come in again, what has been done is passed over then."""
        for message in delivered.occurrences:
            topic, partition = delivered.occurrences.topics[message]
            if self._is_again(topic, partition, message):
                found.done += [(*message, n, done.at, None) for n, done in delivered.occurrences.of(message).items()]
        for message, move in self._rescheduled.items():
            done, number = delivered.occurrences.of(message), move["occurrence"]
            if number in done or not self._is_again(move["topic"], move["partition"], message):
                continue
            if number == 1 and not done:
                found.waiting.append(_reschedule(message, move))
            elif number > 1:
                found.done.append((*message, number, 0, move["deliver_at"]))

    def _is_again(self, topic: str, partition: int, message: Message) -> bool:
        _, ledger, entry, _ = message
        row = {"topic": topic, "partition": partition, "ledger_id": ledger, "entry_id": entry}
        return bool(is_not_durable(pa.Table.from_pylist([row]), self._durable)[0])

    def _find(
        self, message: Message, source: dict[str, Any], is_cancelled: bool, delivered: Delivered, found: Standing
    ) -> None:
        """Finds where a durable message stands for a subscription."""
        done = delivered.occurrences.of(message)
        row, moved, rescheduled = (of.get(message) for of in (self._rows, self._moves, self._rescheduled))
        if not done and row is None and rescheduled is None:
            if not is_cancelled:
                self._note(found, source["topic"], message[0], source["deliver_at"])
            return  # it waits as it came
        if is_cancelled:
            if row is not None and row["deliver_at"] > self._now:
                self._keep(found, message, row)  # it may be restored
            return
        properties = dict(source["properties"] or ())
        rule, start = _rule(properties), first_of(properties, source["publish_time"])
        number = next_number(done, source["deliver_at"])
        before = done[number - 1].at if number > 1 else start - 1
        if number > 1 and rule.next_occurrence(number - 1, before, start, before) is None:
            found.ended.setdefault(message[0], []).append(message[1:])
            return
        subscription = self._names[source["topic"]][message[0]]
        next_at, sequence = self._next_at(number, before, rule, start, row, rescheduled)
        if self._tenures.was_absent(source["topic"], subscription, source, next_at, sequence):
            # It was due while the subscription was not there, for which the later ones are not, either.
            found.ended.setdefault(message[0], []).append(message[1:])
            return
        due = self._pending(message, source, number, before, rule, start, row, moved, rescheduled, found)
        found.done += [(*message, n, one.at, None) for n, one in done.items() if n >= number - 1]
        self._note(found, source["topic"], message[0], due)

    def _next_at(
        self,
        number: int,
        before: int,
        rule: Recurrence,
        start: int,
        row: dict[str, Any] | None,
        rescheduled: dict[str, Any] | None,
    ) -> tuple[int, int]:
        """Returns when the next occurrence is, or was, due, ms since the epoch, and the sequence that gave it the time.

        The sequence is 0 where the rule says when it is due. Arguments as of `_pending`.
        """
        rows = [one for one in (row, rescheduled) if one is not None and one["occurrence"] == number]
        if rows:
            last = max(rows, key=lambda one: one["sequence"])
            return last["deliver_at"], last["sequence"]
        return rule.following(before, start) or self._now, 0

    def _pending(
        self,
        message: Message,
        source: dict[str, Any],
        number: int,
        before: int,
        rule: Recurrence,
        start: int,
        row: dict[str, Any] | None,
        moved: dict[str, Any] | None,
        rescheduled: dict[str, Any] | None,
        found: Standing,
    ) -> int:
        """Finds, or makes, the row of the next occurrence; returns when that is due, or was due at the earliest."""
        by_rule = rule.following(before, start) or self._now
        sequence = 0
        if row is not None and row["occurrence"] == number:
            sequence = row["sequence"]
            by_rule = row["deliver_at"] if row["occurrence_at"] is None else row["occurrence_at"]
        if rescheduled is not None and rescheduled["occurrence"] == number and rescheduled["sequence"] > sequence:
            self._add(found, message, source, number, rescheduled["deliver_at"], by_rule)
            return int(rescheduled["deliver_at"])
        if row is not None and sequence:
            if moved is None or moved["sequence"] <= sequence or moved["occurrence"] != number:
                self._keep(found, message, row)
                return int(row["deliver_at"])
            if rule.misfire is not Misfire.ALL or number == 1:  # it was held back until shortly before
                self._add(found, message, source, number, self._now, by_rule)
                return by_rule
        if number == 1:
            return int(source["deliver_at"])
        # The last one that is done, which is passed over: with it the tracker goes on.
        self._add(found, message, source, number - 1, self._now, before)
        return by_rule

    def _keep(self, found: Standing, message: Message, row: dict[str, Any]) -> None:
        self._move(found, message, row["batch_index"], row["sequence"], row["deliver_at"])

    def _add(
        self, found: Standing, message: Message, source: dict[str, Any], occurrence: int, due: int, by_rule: int
    ) -> None:
        found.fresh.append(
            {
                "subscription": message[0],
                "message": message[3],
                "source": source["topic"],
                **{name: source[name] for name in ("ledger_id", "entry_id", "batch_index", "partition")},
                "sequence": self._sequence,
                "deliver_at": due,
                "attempt": 0,
                "occurrence": occurrence,
                "occurrence_at": by_rule,
            }
        )
        self._move(found, message, source["batch_index"], self._sequence, due)

    def _move(self, found: Standing, message: Message, batch_index: int, sequence: int, due: int) -> None:
        number, ledger, entry, _ = message
        until = self._now + REBUILT_KEPT_MILLIS
        found.moved.append(
            {
                **{"subscription": number, "ledger_id": ledger, "entry_id": entry, "batch_index": batch_index},
                **{"sequence": sequence, "deliver_at": due, "until": until},
            }
        )

    def _note(self, found: Standing, topic: str, number: int, due: int) -> None:
        if due < min(self._now + CLOCKS_MILLIS, HELD_DELIVER_AT):
            found.overdue[topic, number] = min(due, found.overdue.get((topic, number), due))

    def _by_message(self, rows: pa.Table) -> dict[Message, dict[str, Any]]:
        numbers = subscription_numbers(rows, self._names).tolist()
        return {
            (number, row["ledger_id"], row["entry_id"], max(row["batch_index"], 0)): row
            for number, row in zip(numbers, rows.to_pylist(), strict=True)
            if number >= 0
        }


def next_number(done: Mapping[int, Done], first_due: int) -> int:
    """Returns the number of the first occurrence that is not done.

    What is older than a day before the last one counts as done: retention may have removed it.

    Args:
        done: by number.
        first_due: when the first occurrence was due, ms since the epoch.
    """
    if not done:
        return 1
    recent = max(one.sent_at for one in done.values()) - LAST_OCCURRENCES_MILLIS
    old = [number for number, one in done.items() if one.sent_at < recent]
    number = max(old) if old else min(done) - 1 if first_due < recent else 0
    while number + 1 in done:
        number += 1
    return number + 1


def _rule(properties: Mapping[str, str]) -> Recurrence:
    rule = Recurrence.of_properties(properties)
    assert rule is not None
    return rule


def _reschedule(message: Message, move: dict[str, Any]) -> dict[str, Any]:
    """Returns as a row of COMMAND_ROWS the reschedule of a message that comes in again."""
    return {
        **{name: move[name] for name in ("topic", "ledger_id", "entry_id", "batch_index", "deliver_at")},
        "request_id": f"rebuild-{move['sequence']}",
        "kind": RESCHEDULE,
        "operation": RESCHEDULE.upper(),
        "partition": -1,
        "subscriptions": 1 << message[0],
        "issued_by": "rebuild",
        "issued_at": 0,
    }
