"""Rebuilds the state of a lost checkpoint from the Delta tables alone."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.position import Position
from checkpoint_from_tables.rebuild.changes import Changes, find_commands, not_to_deliver, write_moves
from checkpoint_from_tables.rebuild.context import ALL_DESTINATIONS, SILENT, DestinationReading, RebuildContext, Reports
from checkpoint_from_tables.rebuild.delivered import DONE, Delivered, may_come_again, read_delivered
from checkpoint_from_tables.rebuild.destinations import write_missing_deliveries
from checkpoint_from_tables.rebuild.last_answers import find_last_answers
from checkpoint_from_tables.rebuild.overdue import by_ledger, delays_due, first_overdue, subscription_mask_of
from checkpoint_from_tables.rebuild.recurring.schedules import Schedules
from checkpoint_from_tables.rebuild.rejected import find_rejected
from checkpoint_from_tables.rebuild.schedule_keys import KEYED_ROWS, keyed_topics, live_keys
from conf.partitions import partition_name
from conf.settings import Settings
from streaming.batch_schema import InputKind
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.offset import Offset
from streaming.checkpoint.prepared import PreparedState
from tracker.commands.kinds import Effect
from tracker.context import Context
from tracker.ends import ends_of, parked_ends
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.message_state.state import MessageState
from tracker.messages import (
    FIRST_IMPORTED_LEDGER,
    MESSAGES,
    Int64Array,
    concat,
    int64,
    is_among,
    subscription_numbers,
    typed,
    where,
)
from tracker.rebuilt import PARKED_ENDS, REBUILT_TICK, Rebuilt
from tracker.sharding import shards_of
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries, identifier
from warehouse.pending import EFFECT, IS_PAUSE_CHANGE
from warehouse.queries.first_answers import find_bodies, find_message_bodies
from warehouse.queries.waiting_commands import find_waiting
from warehouse.routes.known_routes import KnownRoute, KnownRoutes, KnownSubscription, known_routes, subscription_names
from warehouse.routes.membership import TABLE as SUBSCRIPTION_CHANGES
from warehouse.routes.membership import Changes as SubscriptionChanges
from warehouse.routes.membership import Memberships, changes, write_changes
from warehouse.routes.missing_routes import with_missing_routes

_SQL = NamedQueries(
    __file__,
    first_imported_ledger=FIRST_IMPORTED_LEDGER,
    held=HELD_DELIVER_AT,
    effect=EFFECT,
    is_pause_change=IS_PAUSE_CHANGE,
)

_ADDRESSED = ["subscription", "ledger_id", "entry_id", "batch_index"]


def rebuild(
    settings: Settings,
    tables: Tables,
    checkpoint: Path,
    now: int | None = None,
    reports: Reports = SILENT,
    destinations: DestinationReading = ALL_DESTINATIONS,
) -> dict[str, int]:
    """Prepares the state of a checkpoint without a query, so that the job continues from tables and source topics.

    Entries that are not durable come again from the source topics, which have not acknowledged them. So the rebuild
    removes their rows from the delayed index, and the state remembers those of their messages that were delivered, or
    rejected. Of durable messages, it remembers those delivered ones whose rows will be loaded again.

    The memory needed is proportional to the number of messages that commands have changed, and about a bit for each
    delivered message.

    Args:
        tables: of the warehouse, taken over.
        checkpoint: the checkpoint's folder.
        now: ms since the epoch; None: the current time.
        reports: a warning is of a destination that is not read, or from which the broker has trimmed messages that the
            rebuild needs.
        destinations: how they are read.

    Returns:
        counts: `pending`, `taken_back_or_delivered`, `deliveries_found_at_destinations` and `topic_partitions`.

    Raises:
        UnreadableDestinationError: a destination can't be read.
        PulsarError, pulsar.PulsarException: the source topics can't be read.
        FencedError: another job has taken the warehouse over.
    """
    # Messages of a missing route continue to wait.
    known = with_missing_routes(settings)
    of_ledgers = _last_of_ledgers(tables, "entries")
    durable = _last_of_partitions(of_ledgers)
    now = time.time_ns() // 1_000_000 if now is None else now
    context = RebuildContext(settings, known, tables, durable, now, reports)
    names, on_progress = context.names, reports.on_progress
    changed = _write_changes(known, tables, now)
    memberships = Memberships.of(settings.warehouse)
    delivered = read_delivered(tables, names, durable, memberships, on_progress)
    commands = find_commands(tables, names, durable, now, on_progress)
    changes = commands.changes(delivered)
    message_state = _message_state(known, changes)
    tick = _last_tick(tables) + 1  # of the rows that the rebuild writes
    schedules = Schedules(tables, names, durable, tick, now, memberships)
    overdue = first_overdue(context, message_state, changes.unsealed, delivered)
    for at, due in schedules.states(delivered, message_state).overdue.items():
        overdue[at] = min(due, overdue.get(at, due))
    unwritten = write_missing_deliveries(context, delivered, overdue, destinations)
    if unwritten:  # `delivered` contains these now
        changes = commands.changes(delivered)
        message_state = _message_state(known, changes)
    write_moves(tables, changes.unsealed, names, tick)
    schedule_states = schedules.states(delivered, message_state)
    schedule_states.write(tables, names, tick)
    schedule_states.add_ended(delivered)
    moved = pa.concat_tables([changes.moved, schedule_states.moved_rows])
    message_state = _message_state(known, replace(changes, moved=moved))
    _remove_not_durable(tables, durable)
    rejected = find_rejected(context, destinations)
    since = min(overdue.values(), default=now)
    found = count_sealed(context, message_state, delivered, since)
    done = _delivered_rows(delivered, found, changes, now)
    ended = pa.concat_tables(rows.select(_ADDRESSED) for rows in (delivered.not_durable, changes.cancelled))
    waiting = [changes.waiting, schedule_states.waiting_rows, find_waiting(tables, names)]
    prepared = PreparedState(checkpoint)
    prepared.write_rows(
        {
            InputKind.REBUILT_CANCELLED: changes.cancelled,
            InputKind.REBUILT_DELIVERED: done,
            InputKind.REBUILT_REJECTED: rejected,
            InputKind.REBUILT_MOVED: moved,
            InputKind.REBUILT_OCCURRENCES: schedule_states.done_rows,
            InputKind.REBUILT_KEYS: live_keys(tables, found.keyed, durable, now, ended, names),
            InputKind.REBUILT_WAITING: pa.concat_tables(waiting),
            InputKind.REBUILT_ENDS: find_parked_ends(context),
            InputKind.REBUILT_OUTCOMES: find_last_answers(tables),
        },
        partial(may_come_again, last={row["ledger_id"]: row["entry_id"] for row in of_ledgers}),
    )
    offset = _first_offset(context, found, changed, tick)
    metadata = _metadata(tables, names, found, now)
    own = Checkpoint(checkpoint)
    own.write_version()
    prepared.complete(offset, metadata)
    tables.check_epoch()  # no start takes this checkpoint if another job or rebuild has begun meanwhile
    # Last: a start refuses a checkpoint of an earlier epoch. One of this epoch, without its state, would be a new one.
    own.epoch = tables.epoch or 0
    return {
        "pending": found.pending,
        "taken_back_or_delivered": changes.cancelled.num_rows + done.num_rows,
        "deliveries_found_at_destinations": unwritten,
        "topic_partitions": len(durable),
    }


def find_parked_ends(context: RebuildContext) -> pa.Table:
    """Returns when messages expire that are, or were, parked, as PARKED_ENDS; the state knows which rows count."""
    subscriptions = known_routes(context.known).subscriptions
    topics = sorted(subscriptions.expire_after)
    may_expire = _SQL("in_topics", topics=topics) if topics else _SQL("has_end")
    found = []
    for rows in context.tables.stream(_SQL("parked", may_expire=may_expire)):
        numbers = subscription_numbers(rows, context.names)
        for number in np.unique(numbers[numbers >= 0]).tolist():
            own = typed(where(rows, numbers == number), MESSAGES)
            found.append(parked_ends(own, ends_of(own, number, subscriptions)))
    return concat(found, PARKED_ENDS)


def _delivered_rows(delivered: Delivered, found: Sealed, changes: Changes, now: int) -> pa.Table:
    """Returns the delivered messages that the state has to remember: a row of them comes or is loaded again."""
    done = concat([delivered.not_durable, found.delivered], DONE)
    # A message that is to be retried is remembered by its move, which says which row is to be delivered.
    done = where(done, ~is_among(done, changes.retried, _ADDRESSED))
    return not_to_deliver(done, now)


def _first_offset(context: RebuildContext, found: Sealed, changed: SubscriptionChanges, tick: int) -> Offset:
    """Makes the offset with which the query begins.

    Args:
        context: of the rebuild.
        found: the rows that are still to be loaded.
        changed: the subscriptions that were added or removed.
        tick: the last tick.
    """
    return Offset(
        tick=tick,
        load_horizon=found.first,
        positions={name: str(p) for name, p in context.durable.items()},
        routes=known_routes(context.known).updated_to(context.settings).to_json(),
        changed=changed,
        # No waiting command is answered NOT_FOUND before all messages published by the start have come in.
        barriers=[[REBUILT_TICK, {route.source: None for route in context.settings.routes}]],
        ingested_through=REBUILT_TICK - 1,
        keyed=keyed_topics(context.tables),
    )


def _metadata(tables: Tables, names: dict[str, list[str]], found: Sealed, now: int) -> dict[str, Any]:
    """Returns the metadata for `PreparedState.complete`."""
    return {
        "sealed": found.sealed.tolist(),
        "unwanted": found.unwanted.tolist(),
        "request_ids": find_bodies(tables, now),
        "message_requests": find_message_bodies(tables, now),
        "paused": _paused(tables.sql(_SQL("pause_changes")), names),
        "released": found.first - 1,
        "shaped_until": _shaped_until(tables, now),
        "now": now,
    }


def _shaped_until(tables: Tables, now: int) -> dict[str, dict[str, int]]:
    """Returns the latest time of a shaped message, ms since the epoch, by source topic and subscription."""
    rows = tables.sql(_SQL("shaped_until", now=now))
    found: dict[str, dict[str, int]] = {}
    for row in rows.to_pylist():
        found.setdefault(row["topic"], {})[row["subscription"]] = row["last"]
    return found


def _message_state(settings: Settings, changes: Changes) -> MessageState:
    """Makes the state that commands leave, with their effects in all shards together."""
    state = MessageState(Context(MemoryStore(), Subscriptions(subscription_names(settings))))
    state.rebuild(Rebuilt(cancelled=changes.cancelled, moved=changes.moved))
    return state


def _write_changes(settings: Settings, tables: Tables, now: int) -> SubscriptionChanges:
    """Writes the subscriptions that were added to or removed from the settings to the tables, and returns them.

    Added subscriptions do not get messages that have been ingested and are due by now.

    Args:
        settings: with the missing routes.
        now: ms since the epoch.
    """
    known = {
        topic: KnownRoute(tuple(KnownSubscription(name, "", "") for name in sorted(names)))
        for topic, names in Memberships.of(settings.warehouse).last.items()
    }
    before, after = KnownRoutes(known), known_routes(settings)
    found = changes(before, after, now, {})
    if found:
        taken_in = [last_entries(tables, "entries"), last_entries(tables, "deliveries")]
        positions = {name: str(max(t[name] for t in taken_in if name in t)) for name in {**taken_in[0], **taken_in[1]}}
        found = changes(before, after, now, positions)
        write_changes(tables, found, _last_tick(tables) + 1, now, f"rebuild-{time.time_ns()}")
    return found


def last_entries(tables: Tables, table: str) -> dict[str, Position]:
    """Returns the last entry in a table of each topic partition, by its name; imported entries do not count."""
    return _last_of_partitions(_last_of_ledgers(tables, table))


def _last_of_ledgers(tables: Tables, table: str) -> list[dict[str, Any]]:
    """Returns topic, partition, ledger_id and the last entry_id of each ledger in a table."""
    rows: list[dict[str, Any]] = tables.sql(_SQL("last_entries", table=identifier(table))).to_pylist()
    return rows


def _last_of_partitions(of_ledgers: Iterable[dict[str, Any]]) -> dict[str, Position]:
    last: dict[str, Position] = {}
    for row in of_ledgers:
        name = partition_name(row["topic"], row["partition"])
        position = Position(row["ledger_id"], row["entry_id"])
        last[name] = max(position, last.get(name, position))
    return last


def _remove_not_durable(tables: Tables, durable: dict[str, Position]) -> None:
    """Removes messages that come again from the source topics from the delayed index."""
    index = tables.sql(_SQL("ledgers")).to_pylist()
    conditions = []
    for row in index:
        name = partition_name(row["topic"], row["partition"])
        last = durable.get(name, Position(-1, -1))
        if row["ledger_id"] > last.ledger_id:
            conditions.append(f"ledger_id = {row['ledger_id']}")
        elif row["ledger_id"] == last.ledger_id:
            conditions.append(f"(ledger_id = {row['ledger_id']} AND entry_id > {last.entry_id})")
    if conditions:
        # Moved rows stay, because they do not come again. A recurring message makes its rows again.
        is_made = "(sequence IS NULL OR occurrence IS NOT NULL)"
        tables.delete("delayed_index", f"operation = 'DELAY' AND {is_made} AND ({' OR '.join(conditions)})")


def _last_tick(tables: Tables) -> int:
    """Returns the last tick with rows in any table."""
    columns = dict.fromkeys(("deliveries", "outcomes", SUBSCRIPTION_CHANGES), "batch_id")
    columns["delayed_index"] = "bucket_id"
    last = (
        tables.query(name, _SQL("last_tick", table=identifier(name), column=identifier(column)))
        for name, column in columns.items()
    )
    return max(int(found["t"][0].as_py()) for found in last)


def _paused(pause_changes: pa.Table, names: dict[str, list[str]]) -> dict[str, int]:
    """Returns a mask of the paused subscriptions by source topic; topics without any are left out."""
    paused: dict[str, int] = {}
    for row in pause_changes.to_pylist():
        if row["subscription"] in names.get(row["topic"], ()):
            bit = 1 << names[row["topic"]].index(row["subscription"])
            before = paused.get(row["topic"], 0)
            paused[row["topic"]] = before | bit if row["effect"] == Effect.HOLD else before & ~bit
    return {topic: bits for topic, bits in paused.items() if bits}


@dataclass(frozen=True)
class Sealed:
    """The DELAY rows of the delayed index that are still to be loaded: those due at `first` or later.

    Attributes:
        first: the least `deliver_at` of a row that is pending for a subscription, at most now; ms since the epoch.
        pending: the number of rows that are pending for a subscription.
        sealed: the number of rows of each shard, int64, shape (shards,).
        unwanted: the number of those that are pending for no subscription, int64, shape (shards,).
        delivered: the rows that have been delivered, as DONE.
        keyed: the pending rows with a schedule key, as KEYED_ROWS.
    """

    first: int
    pending: int
    sealed: Int64Array
    unwanted: Int64Array
    delivered: pa.Table
    keyed: pa.Table


def count_sealed(context: RebuildContext, message_state: MessageState, delivered: Delivered, since: int) -> Sealed:
    """Counts the rows of the delayed index that are still to be loaded.

    Args:
        context: of the rebuild.
        message_state: has the cancelled and moved messages.
        delivered: the delivered messages.
        since: no pending row is due before this time, ms since the epoch.
    """
    tables, shards, now = context.tables, context.settings.tracker.shard_count, context.now
    on_progress = context.reports.on_progress
    first = now
    n = 0
    for rows in tables.stream(delays_due(since, now)):
        n += rows.num_rows
        on_progress("delayed_index", "past rows read", n)
        rows = by_ledger(where(rows, int64(rows, "deliver_at") < first))
        masks, _ = subscription_mask_of(rows, message_state, delivered)
        first = int(int64(rows, "deliver_at")[masks != 0].min(initial=first))

    sealed, unwanted = np.zeros((2, shards), np.int64)
    found: list[pa.Table] = []
    keyed: list[pa.Table] = []
    n = 0
    for rows in tables.stream(delays_due(first, None)):
        n += rows.num_rows
        on_progress("delayed_index", "rows counted", n)
        rows = by_ledger(rows)
        masks, done = subscription_mask_of(rows, message_state, delivered)
        shard = shards_of(rows, shards)
        sealed += np.bincount(shard, minlength=shards)
        unwanted += np.bincount(shard[masks == 0], minlength=shards)
        found += done
        keyed.append(where(rows, (masks != 0) & pc.is_valid(rows["schedule_key"]).to_numpy(zero_copy_only=False)))
    done = concat(found, DONE)
    return Sealed(first, int(sealed.sum() - unwanted.sum()), sealed, unwanted, done, concat(keyed, KEYED_ROWS))
