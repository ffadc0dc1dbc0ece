"""The schedules of a topic, read from the Delta tables, a few seconds behind the job.

The first row of a recurring message stays in the delayed index as long as it recurs. Progress is known from the last
delivery, the last skip, and the row of the next occurrence. An occurrence that is due within seconds has no such row:
it is computed by the rule.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deltalake.exceptions import TableNotFoundError

from broker.entries.message_ids import MessageIdError, MessageRef, parse
from conf.settings import Settings
from tracker.message_state.changes import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from tracker.recurrence.columns import counts_from, stored
from tracker.recurrence.recurrence import Recurrence
from warehouse.delta.snapshot import Snapshot
from warehouse.delta.tables import ranges_of
from warehouse.named_queries import TRUE, NamedQueries, Sql, in_ranges
from warehouse.pending import EFFECT, IS_CANCEL, last_occurrences
from warehouse.queries.listing import CursorError, NoTablesError, resolve_route
from warehouse.routes.known_routes import KnownRoutes, as_routes
from warehouse.routes.membership import Memberships
from warehouse.schedules.schedule import Occurrence, Progress, Schedule, ScheduleState

MAX_LIMIT = 1_000  # schedules of a page

_AT_ONCE = 1_000  # messages that are read at once

_MAX_RANGES = 20

_SQL = NamedQueries(__file__, effect=EFFECT, is_cancel=IS_CANCEL)

_TABLES = ("delayed_index", "deliveries", "outcomes")

# (subscription, ledger, entry, number in the entry; -1: the whole entry)
_Key = tuple[str, int, int, int]


@dataclass(frozen=True)
class SchedulePage:
    """A part of a listing of schedules, in the order in which they came.

    Attributes:
        cursor: the argument with which `Schedules.page` reads the next page; None: this is the last one.
    """

    schedules: list[Schedule]
    cursor: str | None

    def to_json(self) -> dict[str, Any]:
        """The page as JSON, as the admin API gives it."""
        return {"schedules": [schedule.to_json() for schedule in self.schedules], "nextCursor": self.cursor}


class Schedules:
    """The schedules of one topic, in the newest versions of the tables.

    Args:
        topic: a source topic or a partition of it, complete or not.
        subscription: the subscription whose progress is read; None: all.
        now: the current time, ms since the epoch; None: by the clock.

    Raises:
        UnknownTopicError: no route has the topic, or the topic has no such subscription.
        NoTablesError: the job has not run yet.
        UnreadableWarehouseError: the tables can't be read.
    """

    def __init__(self, settings: Settings, topic: str, subscription: str | None = None, now: int | None = None) -> None:
        self.topic, self._partition, subscriptions = resolve_route(settings, topic, subscription)
        self.subscriptions = subscriptions
        self._now = time.time_ns() // 1_000_000 if now is None else now
        self._memberships = Memberships.of(settings.warehouse)
        try:
            self._tables = Snapshot(settings.warehouse, dict.fromkeys(_TABLES))
        except TableNotFoundError:
            raise NoTablesError(settings.no_tables()) from None

    def page(self, limit: int, cursor: str | None = None, with_ended: bool = False) -> SchedulePage:
        """Returns the next schedules, at most `limit`.

        Args:
            limit: the maximum number of schedules.
            cursor: the cursor of the page before; None: the listing begins.
            with_ended: whether to list ended schedules, too, as long as the tables have them.

        Raises:
            CursorError: the cursor can't be read.
        """
        after = None if cursor is None else _place(cursor)
        found: list[Schedule] = []
        for schedule in self._from(after):
            if with_ended or schedule.is_active:
                if len(found) == limit:
                    return SchedulePage(found, str(found[-1].ref))
                found.append(schedule)
        return SchedulePage(found, None)

    def find(self, ref: MessageRef) -> Schedule | None:
        """Returns a schedule; None: the tables have no such recurring message.

        Args:
            ref: the message; without a batch index the only message of its entry.
        """
        query = "is_message" if ref.batch_index >= 0 else "is_entry"
        found = self._read(_SQL(query, ledger=ref.ledger_id, entry=ref.entry_id, batch_index=ref.batch_index), 2)
        return found[0] if len(found) == 1 else None

    def _from(self, after: tuple[int, int, int] | None) -> Iterator[Schedule]:
        """Yields the schedules after a message: (ledger, entry, batch index); None: from the beginning."""
        while True:
            condition = TRUE
            if after is not None:
                ledger, entry, index = after
                condition = _SQL("after", ledger=ledger, entry=entry, batch_index=index)
            schedules = self._read(condition, _AT_ONCE)
            yield from schedules
            if len(schedules) < _AT_ONCE:
                return
            last = schedules[-1].ref
            after = last.ledger_id, last.entry_id, last.batch_index

    def _read(self, condition: Sql, limit: int) -> list[Schedule]:
        in_partition = TRUE if self._partition is None else _SQL("in_partition", partition=self._partition)
        sql = _SQL("first_rows", topic=self.topic, in_partition=in_partition, condition=condition, n=limit)
        rows = self._tables.sql(sql).to_pylist()
        if not rows:
            return []
        progress = _Progress(self._tables, self.topic, [row["ledger_id"] for row in rows], self._memberships, self._now)
        return [self._schedule(row, progress) for row in rows]

    def _schedule(self, row: Mapping[str, Any], progress: _Progress) -> Schedule:
        properties = dict(row["properties"] or ())
        rule, start = stored(properties, row["publish_time"])
        return Schedule(
            ref=MessageRef(row["ledger_id"], row["entry_id"], row["partition"], row["batch_index"]),
            rule=rule,
            start=start,
            cancel_at=row["deliver_at"],
            as_of=self._now,
            progress=tuple(
                progress.of(s.name, row, rule, start)
                for s in self.subscriptions
                if progress.has(s.name, row)
                or not self._memberships.was_absent(self.topic, s.name, row, row["deliver_at"])
            ),
            **{name: row[name] for name in ("batch_size", "key", "schedule_key", "publish_time", "producer_name")},
        )


class _Progress:
    """The progress of the recurring messages of some ledgers.

    Args:
        ledgers: the ledger ids, ascending.
        memberships: since when subscriptions are in the settings: an occurrence that was due while a subscription was
            not there has ended the schedule for it.
        now: the current time, ms since the epoch.
    """

    def __init__(self, tables: Snapshot, topic: str, ledgers: list[int], memberships: Memberships, now: int) -> None:
        self._topic, self._memberships, self._now = topic, memberships, now
        in_ledgers = _SQL("in_ledgers", topic=topic, in_ledgers=in_ranges("ledger_id", ranges_of(ledgers, _MAX_RANGES)))
        self._done = _by_message(tables, _SQL("done", last_occurrences=last_occurrences(in_ledgers)))
        self._next = _by_message(tables, _SQL("next", in_ledgers=in_ledgers))
        self._commands = _by_message(tables, _SQL("last_commands", in_ledgers=in_ledgers))

    def has(self, subscription: str, source: Mapping[str, Any]) -> bool:
        """Whether a message has had an occurrence for a subscription, or has a row for it alone."""
        key = subscription, source["ledger_id"], source["entry_id"]
        indexes = {max(source["batch_index"], 0), source["batch_index"]}
        return any((*key, index) in of for of in (self._done, self._next) for index in indexes)

    def of(self, subscription: str, source: Mapping[str, Any], rule: Recurrence, start: int) -> Progress:
        """Returns a message's progress for a subscription; `source` is the message's first row."""
        key = subscription, source["ledger_id"], source["entry_id"], max(source["batch_index"], 0)
        done = self._done.get(key) or self._done.get((*key[:3], source["batch_index"]))
        last = Occurrence(done["number"], done["at"]) if done else None
        by_rule_last = Occurrence(done["number"], done["by_rule"]) if done else None
        following, by_rule = self._following(key, source, rule, start, by_rule_last)
        if self._is_cancelled(key):
            state = ScheduleState.CANCELLED
        elif following is None:
            state = ScheduleState.ENDED
        elif following.at >= PAUSED_DELIVER_AT:
            state = ScheduleState.PAUSED
        else:
            state = ScheduleState.HELD if following.at >= HELD_DELIVER_AT else ScheduleState.WAITING
        return Progress(subscription, state, done["delivered"] if done else 0, last, following, by_rule)

    def _following(
        self, key: _Key, source: Mapping[str, Any], rule: Recurrence, start: int, last: Occurrence | None
    ) -> tuple[Occurrence | None, int | None]:
        """Returns the next occurrence, and when it is due by the rule; None: there is none.

        Args:
            last: the last occurrence that was delivered or skipped, when it was due by the rule.
        """
        row = self._next.get(key) or self._next.get((*key[:3], source["batch_index"]))
        found: tuple[int, int] | None
        if row is not None and row["number"] is not None and row["number"] > (last.number if last else 0):
            by_rule = row["deliver_at"] if row["occurrence_at"] is None else row["occurrence_at"]
            found, sequence = (row["number"], row["deliver_at"]), row["sequence"]
            if found[1] >= PAUSED_DELIVER_AT and by_rule is not None:
                found = row["number"], by_rule  # whether it is still paused is decided below
        else:
            found, by_rule, sequence = (1, source["deliver_at"]), start, 0
            if last is not None:
                since = counts_from(last.at, source["publish_time"], self._now)
                found = rule.next_occurrence(last.number, since, start, since)
                by_rule = found and found[1]
        if found is not None and self._is_paused(key):
            return Occurrence(found[0], PAUSED_DELIVER_AT), by_rule
        if found is None or self._memberships.was_absent(self._topic, key[0], source, found[1], sequence):
            return None, None
        return Occurrence(*found), by_rule

    def _is_cancelled(self, key: _Key) -> bool:
        return self._last(key, "cancelled") > self._last(key, "restored")

    def _is_paused(self, key: _Key) -> bool:
        """Whether a schedule is paused: by its last command, or by its next row if retention deleted the command."""
        row = self._next.get(key) or self._next.get((*key[:3], -1))
        is_at_rest = row is not None and row["deliver_at"] >= PAUSED_DELIVER_AT
        paused = max(self._last(key, "paused"), row["sequence"] if row is not None and is_at_rest else -1)
        later = row["sequence"] if row is not None and not is_at_rest else -1
        return paused > max(self._last(key, "resumed"), later)

    def _last(self, key: _Key, command: str) -> int:
        """Returns the sequence of the last command of a kind for a message or its whole entry; -1: there is none."""
        commands = [self._commands[k] for k in (key, (*key[:3], -1)) if k in self._commands]
        return max((row[command] for row in commands if row[command] is not None), default=-1)


def _by_message(tables: Snapshot, sql: Sql) -> dict[_Key, dict[str, Any]]:
    rows = tables.sql(sql).to_pylist()
    return {(row["subscription"], row["ledger_id"], row["entry_id"], row["batch_index"]): row for row in rows}


def _place(cursor: str) -> tuple[int, int, int]:
    try:
        ref = parse(cursor)
    except MessageIdError:
        raise CursorError("the cursor is none of a listing: begin the listing again without one") from None
    return ref.ledger_id, ref.entry_id, ref.batch_index


def schedules_left_out(settings: Settings, before: KnownRoutes, after: KnownRoutes) -> list[str]:
    """Returns a line of text for each topic with new subscriptions and schedules that go on without them.

    Args:
        after: `before`, updated to the settings.
    """
    lines = []
    for topic, old in before.routes.items():
        known = {s.name for s in old.subscriptions}
        added = [s.name for s in after.routes[topic].left if s.name not in known]
        if added and old.left:
            count = _begun(settings.model_copy(update={"routes": tuple(as_routes({topic: old}))}), topic)
            if count is not None:
                names = " and ".join(added)
                get = "gets" if len(added) == 1 else "get"
                lines.append(f"{topic}: {names} {get} nothing of {count} begun, unless ended and sent anew")
    return lines


def _begun(settings: Settings, topic: str) -> str | None:
    """Returns a text with the number of active schedules that have begun; None: none of the first MAX_LIMIT."""
    try:
        page = Schedules(settings, topic).page(MAX_LIMIT)
    except NoTablesError:
        return None
    n = sum(
        any(one.last is not None or (one.next is not None and one.next.number > 1) for one in schedule.progress)
        for schedule in page.schedules
    )
    if not n:
        return None
    return f"{'at least ' if page.cursor else ''}{n:,} {'schedules that have' if n > 1 else 'schedule that has'}"
