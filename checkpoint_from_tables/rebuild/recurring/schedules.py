"""Finds the next occurrence of each recurring message from its rows, its deliveries, and its commands.

The numbers of occurrences say which of them a subscription has got, also of those that were in flight when the
checkpoint was lost. The first one that it has not got is next; later ones that it has got are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa

from broker.position import Position
from checkpoint_from_tables.rebuild.delivered import CLOCKS_MILLIS, Delivered, is_not_durable
from checkpoint_from_tables.rebuild.done_occurrences import Done, Message
from checkpoint_from_tables.rebuild.recurring.states import ScheduleStates
from tracker.commands.kinds import PAUSE_SCHEDULE, RESCHEDULE, Effect
from tracker.message_state.changes import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from tracker.message_state.state import MessageState
from tracker.messages import MessageIds, subscription_numbers
from tracker.rebuilt import REBUILT_KEPT_MILLIS
from tracker.recurrence.columns import counts_from, stored
from tracker.recurrence.recurrence import Misfire, Recurrence
from tracker.schemas import REBUILD_ID, SEQUENCE_BITS
from warehouse.delta.tables import Tables
from warehouse.maintenance.retention import LAST_OCCURRENCES_MILLIS
from warehouse.named_queries import NamedQueries
from warehouse.pending import EFFECT, IS_SKIPPED_OCCURRENCE
from warehouse.routes.membership import Memberships

_SQL = NamedQueries(__file__, effect=EFFECT, is_skipped_occurrence=IS_SKIPPED_OCCURRENCE)


@dataclass(frozen=True)
class _Recurring:
    """A durable recurring message, for one subscription.

    Attributes:
        message: with its subscription.
        source: its original row.
        rule: by which it recurs.
        start: when the first occurrence was due, ms since the epoch.
    """

    message: Message
    source: dict[str, Any]
    rule: Recurrence
    start: int


@dataclass(frozen=True)
class _Next:
    """The occurrence that comes next by the numbers of those that are done.

    Attributes:
        number: of the occurrence.
        before: when the one before it was due, ms since the epoch.
        by_rule: when it is due by the rule, ms since the epoch.
    """

    number: int
    before: int
    by_rule: int


class Schedules:
    """The recurring messages of a warehouse.

    Args:
        names: the names of each source topic's subscriptions, in the order of their numbers.
        durable: the last entry of each topic partition that does not come again from the source topics.
        tick: of the sequences of new rows; later than any tick in the tables.
        now: ms since the epoch.
        memberships: since when the subscriptions are in the settings.
    """

    def __init__(
        self,
        tables: Tables,
        names: Mapping[str, Sequence[str]],
        durable: Mapping[str, Position],
        tick: int,
        now: int,
        memberships: Memberships,
    ) -> None:
        self._names = names
        self._memberships = memberships
        self._durable = durable
        self._sequence = tick << SEQUENCE_BITS
        self._now = now
        sources = tables.sql(_SQL("sources"))
        self._sources = sources.to_pylist()
        self._comes_again = is_not_durable(sources, durable).tolist()
        self._rows, self._moves, self._commands = (
            self._by_message(tables.sql(_SQL(query))) for query in ("last_rows", "last_moves", "last_commands")
        )
        self._skipped = tables.sql(_SQL("skipped"))

    def states(self, delivered: Delivered, message_state: MessageState) -> ScheduleStates:
        """Returns the next occurrences of the messages, and the rows that the rebuild needs for them.

        Args:
            delivered: the delivered messages and occurrences; skipped occurrences are added.
            message_state: has the cancelled messages.
        """
        numbers = subscription_numbers(self._skipped, self._names)
        delivered.occurrences.add(self._skipped.filter(pa.array(numbers >= 0)), numbers[numbers >= 0])
        found = ScheduleStates()
        for row, comes_again in zip(self._sources, self._comes_again, strict=True):
            if not comes_again:
                for number in range(len(self._names.get(row["topic"], ()))):
                    at = row["ledger_id"], row["entry_id"], max(row["batch_index"], 0)
                    is_cancelled = message_state.cancelled.contains(number, MessageIds(*(np.array([n]) for n in at)))[0]
                    self._find((number, *at), row, bool(is_cancelled), delivered, found)
        self._find_again(delivered, found)
        return found

    def _find_again(self, delivered: Delivered, found: ScheduleStates) -> None:
        """Adds the occurrences and commands of messages that come in again, so that these are not repeated."""
        for message in delivered.occurrences:
            topic, partition = delivered.occurrences.topics[message]
            if self._is_again(topic, partition, message):
                found.done += [_done_row(message, n, done) for n, done in delivered.occurrences.of(message).items()]
        for message, command in self._commands.items():
            # A resumed message comes in as it came the first time, so only pauses and reschedules count.
            is_pause = command["effect"] == Effect.HOLD
            if command["effect"] != Effect.MOVE and not is_pause:
                continue
            done, number = delivered.occurrences.of(message), command["occurrence"]
            if is_pause:
                number = next_number(done, self._now)
            if (number in done and not is_pause) or not self._is_again(command["topic"], command["partition"], message):
                continue
            if number == 1 and (is_pause or not done):
                found.waiting.append(_again(message, command))
            elif number > 1:
                due = PAUSED_DELIVER_AT if is_pause else command["deliver_at"]
                found.done.append((*message, number, 0, due, None))

    def _is_again(self, topic: str, partition: int, message: Message) -> bool:
        _, ledger, entry, _ = message
        row = {"topic": topic, "partition": partition, "ledger_id": ledger, "entry_id": entry}
        return bool(is_not_durable(pa.Table.from_pylist([row]), self._durable)[0])

    def _find(
        self, message: Message, source: dict[str, Any], is_cancelled: bool, delivered: Delivered, found: ScheduleStates
    ) -> None:
        """Finds the next occurrence of a durable message for a subscription, and adds its rows to `found`."""
        done = delivered.occurrences.of(message)
        row, moved, command = (of.get(message) for of in (self._rows, self._moves, self._commands))
        rescheduled = command if command is not None and command["effect"] == Effect.MOVE else None
        is_paused = _is_paused(row, moved, command)
        if not done and row is None and command is None:
            if not is_cancelled:
                self._note(found, source["topic"], message[0], source["deliver_at"])
            return  # it waits for its first occurrence, as it came
        is_ended = is_cancelled and not is_paused
        properties = dict(source["properties"] or ())
        rule, start = stored(properties, source["publish_time"])
        recurring = _Recurring(message, source, rule, start)
        number = next_number(done, source["deliver_at"])
        before = self._after(done[number - 1], source, rule) if number > 1 else start - 1
        rows = [one for one in (row, rescheduled) if one is not None and one["occurrence"] == number]
        # Where an occurrence waits, there is one, though the rule may fail by now.
        if number > 1 and not rows and rule.next_occurrence(number - 1, before, start, before) is None:
            found.ended.setdefault(message[0], []).append(message[1:])
            return
        passed_over = [_done_row(message, n, one) for n, one in done.items() if n >= number - 1]
        if is_paused:
            self._pause(found, recurring, number, done)
            found.done += passed_over
            return
        subscription = self._names[source["topic"]][message[0]]
        last = max(rows, key=lambda one: int(one["sequence"]), default=None)
        by_rule = rule.following(before, start) or self._now
        next_at, sequence = (by_rule, 0) if last is None else (last["deliver_at"], last["sequence"])
        if is_ended:  # a command may restore it until its cancelled occurrence is due
            if row is not None and row["deliver_at"] > self._now and (last is None or last is row):
                self._keep(found, message, row)
            elif next_at > self._now:
                self._add(found, recurring, number, next_at, by_rule)
            return
        if self._memberships.was_absent(source["topic"], subscription, source, next_at, sequence):
            # The occurrence was due while the subscription was absent; later ones are not for it, either.
            found.ended.setdefault(message[0], []).append(message[1:])
            return
        if row in rows:
            by_rule = row["deliver_at"] if row["occurrence_at"] is None else row["occurrence_at"]
        if last is not None and last is rescheduled:
            self._add(found, recurring, number, next_at, by_rule)
            due = next_at
        elif _is_resumed(command, row) and command["occurrence"] == number:
            # As the command has done: an occurrence that is late by then counts as parked.
            was_due = by_rule if by_rule < self._now else None
            self._add(found, recurring, number, max(by_rule, self._now), by_rule, was_due)
            due = command["deliver_at"]
        else:
            due = self._pending(found, recurring, _Next(number, before, by_rule), last, moved)
        found.done += passed_over
        self._note(found, source["topic"], message[0], due)

    def _pending(
        self,
        found: ScheduleStates,
        recurring: _Recurring,
        following: _Next,
        row: dict[str, Any] | None,
        moved: dict[str, Any] | None,
    ) -> int:
        """Finds or makes the row of the next occurrence, and adds it to `found`.

        Args:
            found: gets the row.
            recurring: the message.
            following: its next occurrence.
            row: the last row of that, if no command has moved it; None: there is none.
            moved: the last move of the message.

        Returns:
            when the occurrence is due, or was due at the earliest, ms since the epoch.
        """
        message, number, by_rule = recurring.message, following.number, following.by_rule
        if row is not None:
            if moved is None or moved["sequence"] <= row["sequence"] or moved["occurrence"] != number:
                self._keep(found, message, row)
                return int(row["deliver_at"])
            # The occurrence was parked until shortly before.
            if recurring.rule.misfire is not Misfire.ALL or number == 1:
                self._add(found, recurring, number, self._now, by_rule)
                return by_rule
        if number == 1:
            return int(recurring.source["deliver_at"])
        # A row of the last occurrence that is done: the tracker skips it, and goes on with the next one.
        self._add(found, recurring, number - 1, self._now, following.before)
        return by_rule

    def _after(self, last: Done, source: dict[str, Any], rule: Recurrence) -> int:
        """Returns the time after which the occurrence that follows a done one is due, ms since the epoch."""
        sent_at = last.sent_at or self._now
        since = counts_from(last.at, source["publish_time"], sent_at)
        return since if rule.misfire is Misfire.ALL else max(since, sent_at)

    def _pause(self, found: ScheduleStates, recurring: _Recurring, number: int, done: Mapping[int, Done]) -> None:
        """Finds or makes the row of a paused message's next occurrence, and adds it to `found`.

        Args:
            found: gets the row.
            recurring: the message.
            number: of the next occurrence.
            done: the message's occurrences that are done.
        """
        message, start = recurring.message, recurring.start
        row = self._rows.get(message)
        if row is not None and row["deliver_at"] == PAUSED_DELIVER_AT and row["occurrence"] == number:
            self._keep(found, message, row)
            return
        by_rule = start
        if row is not None and row["occurrence"] == number:
            by_rule = row["deliver_at"] if row["occurrence_at"] is None else row["occurrence_at"]
        elif number > 1:
            after = self._after(done[number - 1], recurring.source, recurring.rule)
            by_rule = recurring.rule.following(after, start) or self._now
        self._add(found, recurring, number, PAUSED_DELIVER_AT, by_rule)

    def _keep(self, found: ScheduleStates, message: Message, row: dict[str, Any]) -> None:
        self._move(found, message, row["batch_index"], row["sequence"], row["deliver_at"])

    def _add(
        self,
        found: ScheduleStates,
        recurring: _Recurring,
        occurrence: int,
        due: int,
        by_rule: int,
        was_due: int | None = None,
    ) -> None:
        message, source = recurring.message, recurring.source
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
                "was_due": was_due,
            }
        )
        self._move(found, message, source["batch_index"], self._sequence, due)

    def _move(self, found: ScheduleStates, message: Message, batch_index: int, sequence: int, due: int) -> None:
        number, ledger, entry, _ = message
        until = self._now + REBUILT_KEPT_MILLIS
        found.moved.append(
            {
                **{"subscription": number, "ledger_id": ledger, "entry_id": entry, "batch_index": batch_index},
                **{"sequence": sequence, "deliver_at": due, "until": until},
            }
        )

    def _note(self, found: ScheduleStates, topic: str, number: int, due: int) -> None:
        if due < min(self._now + CLOCKS_MILLIS, HELD_DELIVER_AT):
            found.overdue[topic, number] = min(due, found.overdue.get((topic, number), due))

    def _by_message(self, rows: pa.Table) -> dict[Message, dict[str, Any]]:
        numbers = subscription_numbers(rows, self._names).tolist()
        return {
            (number, row["ledger_id"], row["entry_id"], max(row["batch_index"], 0)): row
            for number, row in zip(numbers, rows.to_pylist(), strict=True)
            if number >= 0
        }


def _done_row(message: Message, number: int, done: Done) -> tuple[int | None, ...]:
    """Returns a row of OCCURRENCES_DONE."""
    return (*message, number, done.at, None, done.sent_at or None)


def next_number(done: Mapping[int, Done], first_due: int) -> int:
    """Returns the number of the first occurrence that is not done.

    Occurrences that are more than LAST_OCCURRENCES_MILLIS older than the last one count as done, because retention may
    have removed their rows.

    Args:
        done: the occurrences that are done, by number.
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


def _is_paused(
    row: Mapping[str, Any] | None, moved: Mapping[str, Any] | None, command: Mapping[str, Any] | None
) -> bool:
    """Whether a message is paused.

    Args:
        row: the last row of an occurrence.
        moved: the last move of the message.
        command: the last pause, resume or reschedule of the message, unless retention has removed it.
    """
    last = max((int(one["sequence"]) for one in (row, moved) if one is not None), default=-1)
    if command is not None and command["sequence"] >= last:
        return bool(command["effect"] == Effect.HOLD)
    return row is not None and row["deliver_at"] == PAUSED_DELIVER_AT and row["sequence"] >= last


def _is_resumed(command: Mapping[str, Any] | None, row: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Whether a command has resumed a message, and the delayed index lacks the row of its occurrence."""
    return (
        command is not None
        and command["effect"] == Effect.RESUME
        and (row is None or row["sequence"] < command["sequence"])
    )


def _again(message: Message, command: dict[str, Any]) -> dict[str, Any]:
    """Returns a reschedule or pause of a message that comes in again, as a row of COMMAND_ROWS."""
    kind = PAUSE_SCHEDULE if command["effect"] == Effect.HOLD else RESCHEDULE
    return {
        **{name: command[name] for name in ("topic", "ledger_id", "entry_id", "batch_index")},
        "deliver_at": command["deliver_at"] or 0,
        "request_id": f"{REBUILD_ID}{command['sequence']}",
        "kind": kind,
        "operation": kind.upper(),
        "partition": -1,
        "subscriptions": 1 << message[0],
        "issued_by": "rebuild",
        "issued_at": 0,
    }
