"""Rebuilds the state from the Delta tables alone, where the checkpoint is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.position import Position
from conf.settings import Settings
from recovery.rebuild.changes import Changes, find_commands, not_to_deliver, write_moves
from recovery.rebuild.delivered import DONE, Delivered, partition_name, read_delivered
from recovery.rebuild.destinations import write_missing_deliveries
from recovery.rebuild.last_answers import find_last_answers
from recovery.rebuild.overdue import DELAYS, by_ledger, first_overdue, subscription_mask_of
from recovery.rebuild.recurring.schedules import Schedules
from recovery.rebuild.schedule_keys import KEYED_ROWS, keyed_topics, live_keys
from recovery.rebuild.waiting_commands import find_waiting
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.offset import Offset
from streaming.checkpoint.prepared import PreparedState
from streaming.operator_input import InputKind
from tracker import MemoryStore
from tracker.commands.control import Control
from tracker.commands.message_state.moves import HELD_DELIVER_AT
from tracker.commands.message_state.rebuilt import REBUILT_TICK, Rebuilt
from tracker.messages import FIRST_IMPORTED_LEDGER, Int64Array, concat, int64, is_among, where
from tracker.sharding import shards_of
from warehouse.delta.tables import OnProgress, Tables
from warehouse.queries.first_answers import find_bodies
from warehouse.renumbering import Renumbering
from warehouse.routes.known_routes import KnownRoute, KnownRoutes, KnownSubscription, known_routes, subscription_names
from warehouse.routes.missing_routes import with_missing_routes
from warehouse.routes.tenure import TABLE as SUBSCRIPTION_CHANGES
from warehouse.routes.tenure import Changes as SubscriptionChanges
from warehouse.routes.tenure import Tenures, changes, write_changes

# The last entry of each ledger in a table.
_LAST = f"""
SELECT topic, partition, ledger_id, max(entry_id) AS entry_id FROM {{table}} WHERE ledger_id < {FIRST_IMPORTED_LEDGER}
GROUP BY topic, partition, ledger_id
"""  # noqa: S608

_ADDRESSED = ["subscription", "ledger_id", "entry_id", "batch_index"]

_PAUSE_CHANGES = """
SELECT topic, subscription, operation FROM outcomes WHERE result = 'APPLIED' AND operation IN ('PAUSE', 'RESUME')
ORDER BY sequence
"""


def rebuild(
    settings: Settings,
    tables: Tables,
    checkpoint: Path,
    on_progress: OnProgress = lambda table, step, rows: None,
    now: int | None = None,
    on_warning: Callable[[str], None] = lambda text: None,
    without: Collection[str] = (),
    renumbering: Renumbering | None = None,
) -> dict[str, int]:
    """Prepares a checkpoint that has no query yet, so that the job goes on from the tables and the source topics.

    Entries that are not durable come again from the source topics, where they have not been acknowledged. So their rows
    in the delayed index are removed, and those of their messages that were delivered are remembered. Of other delivered
    messages only those are remembered of which a row will be loaded again.

    Memory is in proportion to the messages that commands have changed, and to the delivered ones: a bit or so each.

    Args:
        tables: of the warehouse, taken over.
        checkpoint: its folder.
        now: ms since the epoch; None: the current time.
        on_warning: called with one line for each destination of which the broker has trimmed messages that were to be
            read, or that is not read.
        without: destinations that are not read.
        renumbering: what the tables' ids have got just now, so that the destinations have the former ones; None: none.

    Returns:
        counts: `pending`, `taken_back_or_delivered`, `deliveries_found_at_destinations` and `topic_partitions`.

    Raises:
        UnreadableDestinationError: a destination can't be read.
        PulsarError, pulsar.PulsarException: the source topics can't be read.
        FencedError: somebody else has taken the warehouse over.
    """
    # The messages of a missing route go on waiting.
    known = with_missing_routes(settings)
    names = subscription_names(known)
    durable = last_entries(tables, "entries")
    now = time.time_ns() // 1_000_000 if now is None else now
    changed = _write_changes(known, tables, now)
    tenures = Tenures.of(settings.warehouse)
    delivered = read_delivered(tables, names, durable, tenures, on_progress)
    commands = find_commands(tables, names, durable, now, on_progress)
    changes = commands.changes(delivered)
    control = _control(known, changes, now)
    tick = _last_tick(tables) + 1  # that of what is written here
    schedules = Schedules(tables, names, durable, tick, now, tenures)
    overdue = first_overdue(tables, names, control, changes.unsealed, delivered, now, on_progress)
    for at, due in schedules.states(delivered, control).overdue.items():
        overdue[at] = min(due, overdue.get(at, due))
    unwritten = write_missing_deliveries(
        known, tables, delivered, durable, overdue, on_progress, on_warning, without, renumbering
    )
    if unwritten:  # `delivered` has these, too, now
        changes = commands.changes(delivered)
        control = _control(known, changes, now)
    write_moves(tables, changes.unsealed, names, tick)
    schedule_states = schedules.states(delivered, control)
    schedule_states.write(tables, names, tick)
    schedule_states.add_ended(delivered)
    moved = pa.concat_tables([changes.moved, schedule_states.moved_rows])
    control = _control(known, replace(changes, moved=moved), now)
    _remove_not_durable(tables, durable)
    since = min(overdue.values(), default=now)
    found = count_sealed(tables, control, delivered, settings.tracker.shards, since, now, on_progress)
    done = _delivered_rows(delivered, found, changes, now)
    ended = pa.concat_tables(rows.select(_ADDRESSED) for rows in (delivered.not_durable, changes.cancelled))
    waiting = [changes.waiting, schedule_states.waiting_rows, find_waiting(tables, names)]
    prepared = PreparedState(checkpoint)
    prepared.write_rows(
        {
            InputKind.REBUILT_CANCELLED: changes.cancelled,
            InputKind.REBUILT_DELIVERED: done,
            InputKind.REBUILT_MOVED: moved,
            InputKind.REBUILT_OCCURRENCES: schedule_states.done_rows,
            InputKind.REBUILT_KEYS: live_keys(tables, found.keyed, durable, now, ended, names),
            InputKind.REBUILT_WAITING: pa.concat_tables(waiting),
            InputKind.REBUILT_OUTCOMES: find_last_answers(tables),
        }
    )
    offset = _first_offset(settings, known, tables, found, durable, changed, tick)
    facts = _facts(tables, names, found, now)
    own = Checkpoint(checkpoint)
    own.write_version()
    own.epoch = tables.epoch or 0
    prepared.complete(offset, facts)
    return {
        "pending": found.pending,
        "taken_back_or_delivered": changes.cancelled.num_rows + done.num_rows,
        "deliveries_found_at_destinations": unwritten,
        "topic_partitions": len(durable),
    }


def _delivered_rows(delivered: Delivered, found: Sealed, changes: Changes, now: int) -> pa.Table:
    """Returns the delivered messages that are remembered: those of which a row comes or is loaded again."""
    done = concat([delivered.not_durable, found.delivered], DONE)
    # Of a message that is to be retried a move says which row is delivered.
    done = where(done, ~is_among(done, changes.retried, _ADDRESSED))
    return not_to_deliver(done, now)


def _first_offset(
    settings: Settings,
    known: Settings,
    tables: Tables,
    found: Sealed,
    durable: dict[str, Position],
    changed: SubscriptionChanges,
    tick: int,
) -> Offset:
    """Makes the offset with which the query begins.

    Args:
        settings: without the missing routes.
        known: with them.
        tables: of the warehouse.
        found: the rows that are still to be loaded.
        durable: by topic partition the last durable entry.
        changed: which subscriptions were added or removed.
        tick: the last one.
    """
    return Offset(
        tick=tick,
        load_horizon=found.first,
        positions={name: str(p) for name, p in durable.items()},
        routes=known_routes(known).updated_to(settings).to_json(),
        changed=changed,
        # Everything that is published by the start comes in before a waiting command is answered NOT_FOUND.
        barriers=[[REBUILT_TICK, {route.source: None for route in settings.routes}]],
        ingested_through=REBUILT_TICK - 1,
        keyed=keyed_topics(tables),
    )


def _facts(tables: Tables, names: dict[str, list[str]], found: Sealed, now: int) -> dict[str, Any]:
    """Returns what the first batch gets beside rows, as of `PreparedState.complete`."""
    return {
        "sealed": found.sealed.tolist(),
        "unwanted": found.unwanted.tolist(),
        "request_ids": find_bodies(tables, now),
        "paused": _paused(tables.sql(_PAUSE_CHANGES), names),
        "released": found.first - 1,
        "shaped_until": _shaped_until(tables, now),
        "now": now,
    }


def _shaped_until(tables: Tables, now: int) -> dict[str, dict[str, int]]:
    """Returns by source topic and subscription the last time, ms since the epoch, that shaping has given a message."""
    rows = tables.sql(
        "SELECT topic, subscription, max(deliver_at) AS last FROM delayed_index "  # noqa: S608
        f"WHERE operation = 'DELAY' AND shaped_from IS NOT NULL AND deliver_at >= {now} "
        f"AND deliver_at < {HELD_DELIVER_AT} GROUP BY topic, subscription"
    )
    found: dict[str, dict[str, int]] = {}
    for row in rows.to_pylist():
        found.setdefault(row["topic"], {})[row["subscription"]] = row["last"]
    return found


def _control(settings: Settings, changes: Changes, now: int) -> Control:
    """Makes a Control that knows what all shards together know of commands."""
    control = Control(MemoryStore(), subscription_names(settings), settings.tracker.tick_time_millis)
    control.rebuild(Rebuilt(cancelled=changes.cancelled, moved=changes.moved), now)
    return control


def _write_changes(settings: Settings, tables: Tables, now: int) -> SubscriptionChanges:
    """Writes down, and returns, which subscriptions were added to or removed from the settings since the last change.

    Messages that are due by now, and have been taken in, are not for those that were added.

    Args:
        settings: with the missing routes.
        now: ms since the epoch.
    """
    known = {
        topic: KnownRoute(tuple(KnownSubscription(name, "", "") for name in sorted(names)))
        for topic, names in Tenures.of(settings.warehouse).last.items()
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
    """Returns the last entry that a table has of each topic partition, by its name; imported ones do not count."""
    last: dict[str, Position] = {}
    for row in tables.sql(_LAST.format(table=table)).to_pylist():
        name = partition_name(row["topic"], row["partition"])
        position = Position(row["ledger_id"], row["entry_id"])
        last[name] = max(position, last.get(name, position))
    return last


def _remove_not_durable(tables: Tables, durable: dict[str, Position]) -> None:
    """Removes the messages that come again from the source topics from the delayed index."""
    index = tables.sql(
        "SELECT DISTINCT topic, partition, ledger_id FROM delayed_index WHERE operation = 'DELAY' "  # noqa: S608
        f"AND ledger_id < {FIRST_IMPORTED_LEDGER}"
    ).to_pylist()
    conditions = []
    for row in index:
        name = partition_name(row["topic"], row["partition"])
        last = durable.get(name, Position(-1, -1))
        if row["ledger_id"] > last.ledger_id:
            conditions.append(f"ledger_id = {row['ledger_id']}")
        elif row["ledger_id"] == last.ledger_id:
            conditions.append(f"(ledger_id = {row['ledger_id']} AND entry_id > {last.entry_id})")
    if conditions:
        # A moved row does not come again; its message waits for it. A recurring message makes its rows anew.
        is_made = "(sequence IS NULL OR occurrence IS NOT NULL)"
        tables.delete("delayed_index", f"operation = 'DELAY' AND {is_made} AND ({' OR '.join(conditions)})")


def _last_tick(tables: Tables) -> int:
    """Returns the last tick of which any table has rows."""
    columns = dict.fromkeys(("deliveries", "outcomes", SUBSCRIPTION_CHANGES), "batch_id")
    columns["delayed_index"] = "bucket_id"
    last = (tables.query(n, f"SELECT coalesce(max({c}), 0) AS t FROM {n}") for n, c in columns.items())  # noqa: S608
    return max(int(found["t"][0].as_py()) for found in last)


def _paused(pause_changes: pa.Table, names: dict[str, list[str]]) -> dict[str, int]:
    """Returns for each topic the subscriptions that are paused, as bits; topics without one are left out."""
    paused: dict[str, int] = {}
    for row in pause_changes.to_pylist():
        if row["subscription"] in names.get(row["topic"], ()):
            bit = 1 << names[row["topic"]].index(row["subscription"])
            before = paused.get(row["topic"], 0)
            paused[row["topic"]] = before | bit if row["operation"] == "PAUSE" else before & ~bit
    return {topic: bits for topic, bits in paused.items() if bits}


@dataclass(frozen=True)
class Sealed:
    """The DELAY rows of the delayed index that are still to be loaded: those due at `first` or later."""

    first: int  # the least time of delivery of a row that a subscription wants, or the time now: ms since the epoch
    pending: int  # how many of the rows a subscription wants
    sealed: Int64Array  # how many rows each shard has, (shards,)
    unwanted: Int64Array  # how many of them no subscription wants, (shards,)
    delivered: pa.Table  # DONE: those of them that have been delivered
    keyed: pa.Table  # KEYED_ROWS: those with a schedule key that a subscription wants


def count_sealed(
    tables: Tables,
    control: Control,
    delivered: Delivered,
    shards: int,
    since: int,
    now: int,
    on_progress: OnProgress = lambda table, step, rows: None,
) -> Sealed:
    """Counts the rows that wait in buckets.

    Args:
        control: knows the messages that have been cancelled and moved.
        delivered: the messages that have been delivered.
        shards: how many there are.
        since: before this time, ms since the epoch, no pending row is due.
        now: ms since the epoch.
    """
    first = now
    n = 0
    for rows in tables.stream(f"{DELAYS} AND deliver_at < {now} AND deliver_at >= {since}"):
        n += rows.num_rows
        on_progress("delayed_index", "past rows read", n)
        rows = by_ledger(where(rows, int64(rows, "deliver_at") < first))
        masks, _ = subscription_mask_of(rows, control, delivered)
        first = int(int64(rows, "deliver_at")[masks != 0].min(initial=first))

    sealed, unwanted = np.zeros((2, shards), np.int64)
    found: list[pa.Table] = []
    keyed: list[pa.Table] = []
    n = 0
    for rows in tables.stream(f"{DELAYS} AND deliver_at >= {first}"):
        n += rows.num_rows
        on_progress("delayed_index", "rows counted", n)
        rows = by_ledger(rows)
        masks, done = subscription_mask_of(rows, control, delivered)
        shard = shards_of(rows, shards)
        sealed += np.bincount(shard, minlength=shards)
        unwanted += np.bincount(shard[masks == 0], minlength=shards)
        found += done
        keyed.append(where(rows, (masks != 0) & pc.is_valid(rows["schedule_key"]).to_numpy(zero_copy_only=False)))
    done = concat(found, DONE)
    return Sealed(first, int(sealed.sum() - unwanted.sum()), sealed, unwanted, done, concat(keyed, KEYED_ROWS))
