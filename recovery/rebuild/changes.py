"""The changes that commands have made to messages, read from `delayed_index` and `outcomes` as the tracker's rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.position import Position
from recovery.rebuild.delivered import Delivered, is_not_durable
from recovery.rebuild.message_set import MessageSet
from recovery.rebuild.waiting_commands import WAITING
from tracker.commands.message_state.moves import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from tracker.commands.message_state.rebuilt import MOVED, NOT_TO_DELIVER, REBUILT_KEPT_MILLIS
from tracker.commands.schema import COMMAND_ROWS, RESCHEDULE, RETRY
from tracker.messages import (
    BoolArray,
    Int64Array,
    in_order,
    int64,
    is_among,
    message_ids,
    subscription_numbers,
    typed,
    where,
    with_columns,
)
from warehouse.delivery_key import attempt_sql
from warehouse.delta.tables import OnProgress, Tables
from warehouse.pending import IS_CANCEL, IS_RESTORE, are_cancelled
from warehouse.schemas import DELAYED_INDEX

_CHANGED = "SELECT topic, subscription, ledger_id, entry_id, batch_index, coalesce(sequence, 0) AS sequence"

# The cancelled messages by `delayed_index`; a command that goes on waiting has not cancelled any.
_CANCELLED = f"""
{_CHANGED}, deliver_at FROM (SELECT * FROM delayed_index WHERE operation = 'CANCEL') AS c
LEFT ANTI JOIN ({WAITING}) AS w ON w.topic = c.topic AND w.subscription = c.subscription
    AND w.ledger_id = c.ledger_id AND w.entry_id = c.entry_id AND w.batch_index = c.batch_index
"""  # noqa: S608

# The cancelled messages by `outcomes`; not ALREADY_APPLIED, for ALREADY_APPLIED says that another row does.
_ANSWERED = f"""
{_CHANGED}, CAST(0 AS BIGINT) AS deliver_at FROM outcomes
WHERE {IS_CANCEL} AND ledger_id >= 0
"""

_RESTORED = f"""
{_CHANGED} FROM delayed_index WHERE operation = 'RESTORE'
UNION ALL {_CHANGED} FROM outcomes WHERE {IS_RESTORE}
"""

# A MOVE row has no time to which the message was moved; the other rows have one. Recurring messages are not here.
_MOVES = f"""
{_CHANGED}, deliver_at, CAST(operation = 'DELAY' AS INT) AS is_time_known, topic AS source,
       {attempt_sql()} AS attempt, CAST(NULL AS VARCHAR) AS reason
FROM delayed_index
WHERE (operation = 'MOVE' OR (operation = 'DELAY' AND sequence IS NOT NULL)) AND occurrence IS NULL
UNION ALL {_CHANGED}, coalesce(deliver_at, 0), 1, topic AS source, {attempt_sql()}, reason
FROM outcomes WHERE result = 'APPLIED' AND operation IN ('RESCHEDULE', 'RETRY') AND occurrence IS NULL
"""

_DELAYS = """
SELECT topic, partition, subscription, ledger_id, entry_id, batch_index, batch_size, deliver_at,
       coalesce(sequence, 0) AS sequence
FROM delayed_index WHERE operation = 'DELAY'
"""

_ENTRY = ["ledger_id", "entry_id"]
_MESSAGE = [*_ENTRY, "message"]
_KEY = ["subscription", *_MESSAGE]

_WRITTEN_ROWS = 50_000  # at once


@dataclass(frozen=True)
class Changes:
    """The rows of commands that shards keep in state."""

    cancelled: pa.Table  # NOT_TO_DELIVER
    moved: pa.Table  # MOVED
    waiting: pa.Table  # COMMAND_ROWS for messages that come in again
    unsealed: pa.Table  # moves of messages in the delayed index that have no DELAY row there yet
    retried: pa.Table  # moves to retries that are to be delivered: the messages have been, before


@dataclass(frozen=True)
class Commands:
    """The changes by commands that the tables have; subscriptions are numbers.

    Attributes:
        moves: the last move of each message and subscription.
        done: messages, and whole entries, that were cancelled or skipped and not restored.
        delays: the DELAY rows of all entries that commands have changed.
        now: ms since the epoch.
    """

    moves: pa.Table
    done: pa.Table
    delays: pa.Table
    now: int

    def changes(self, delivered: Delivered) -> Changes:
        """Returns the rows that shards keep of these commands, given the messages that have been delivered."""
        moves, done, delays = self.moves, self.done, self.delays
        # A rebuild removes the rows of messages that come again, but for moved ones.
        kept = where(delays, (int64(delays, "is_not_durable") == 0) | (int64(delays, "sequence") > 0))
        is_sealed = is_among(moves, kept, [*_KEY, "sequence"])
        is_done = _are_done(moves, delivered)
        is_open = ~is_sealed & ~is_done & (int64(moves, "is_time_known") > 0)
        is_there = is_among(moves, kept, _MESSAGE)
        unsealed, waiting = where(moves, is_open & is_there), _reschedules(where(moves, is_open & ~is_there))
        stays = ~is_open | is_there
        retried = where(moves, stays & (int64(moves, "attempt") > 0) & ~is_done)
        moves = where(moves, stays)

        # A cancel has to be remembered until its message's last row is loaded; a row that was held back never is. What
        # is paused could be resumed, so its cancel stays.
        due = int64(delays, "deliver_at")
        loaded, resumable = where(delays, due < HELD_DELIVER_AT), where(delays, due == PAUSED_DELIVER_AT)
        last = np.maximum(_last_times(done, loaded), _last_times(done, moves))
        last = np.maximum(last, _last_times(done, resumable))
        cancelled = with_columns(done, deliver_at=pa.array(np.maximum(last, int64(done, "deliver_at"))))
        until = np.maximum(_last_times(moves, loaded), self.now + REBUILT_KEPT_MILLIS)
        moved = typed(moves.append_column("until", pa.array(until)), MOVED)
        return Changes(not_to_deliver(cancelled, self.now), moved, waiting, unsealed, retried)


def find_commands(
    tables: Tables,
    names: Mapping[str, Sequence[str]],
    durable: Mapping[str, Position],
    now: int,
    on_progress: OnProgress = lambda table, step, rows: None,
) -> Commands:
    """Finds the messages that commands have moved, cancelled or skipped, for the subscriptions of the routes.

    Args:
        names: for each source topic the names of its subscriptions, by number.
        durable: by topic partition the last entry that does not come again from the source topics.
        now: ms since the epoch.
    """
    cancelled, answered, restored, moves = (
        pa.concat_tables(_read(tables, sql, names)) for sql in (_CANCELLED, _ANSWERED, _RESTORED, _MOVES)
    )
    moves = _resumed(_last_moves(moves), now)
    delays = _delays_of(tables, names, durable, (cancelled, answered, restored, moves), on_progress)
    done = pa.concat_tables([where(cancelled, _is_in_time(cancelled, delays, now)), answered])
    done = _without_restored(done, restored, delays)
    return Commands(moves, done, delays, now)


def not_to_deliver(rows: pa.Table, now: int) -> pa.Table:
    """Returns messages as NOT_TO_DELIVER, each once.

    They are kept until their last time of delivery in these rows, but at least REBUILT_KEPT_MILLIS from now.

    Args:
        rows: with the columns of NOT_TO_DELIVER, but `deliver_at` for `until`.
        now: ms since the epoch.
    """
    until = np.maximum(int64(rows, "deliver_at"), now + REBUILT_KEPT_MILLIS)
    keys = [name for name in NOT_TO_DELIVER.names if name != "until"]
    unique = rows.select(keys).append_column("until", pa.array(until)).group_by(keys).aggregate([("until", "max")])
    return typed(unique.rename_columns([*keys, "until"]), NOT_TO_DELIVER)


def _read(tables: Tables, sql: str, names: Mapping[str, Sequence[str]]) -> Iterator[pa.Table]:
    """Yields the rows of a query that are of the routes' subscriptions, with these as numbers."""
    for rows in tables.stream(sql):
        numbers = subscription_numbers(rows, names)
        yield _in_numbers(rows, numbers).filter(pa.array(numbers >= 0))


def _in_numbers(rows: pa.Table, numbers: Int64Array) -> pa.Table:
    """Returns rows with their subscription as a number, their message's number in its entry, and integers as int64."""
    columns = {
        field.name: rows[field.name].cast(pa.int64()) if pa.types.is_integer(field.type) else rows[field.name]
        for field in rows.schema
        if field.name != "topic"
    }
    message = pa.array(np.maximum(int64(rows, "batch_index"), 0))
    return pa.table(columns | {"subscription": pa.array(numbers), "message": message})


def _last_moves(moves: pa.Table) -> pa.Table:
    """Returns the last move of each message and subscription; of several rows of it one with its time, if any.

    Its attempt is the highest of the message's moves: not each row tells it.
    """
    keys = [int64(moves, name) for name in (*_KEY, "sequence", "is_time_known")]
    order = np.lexsort(keys[::-1])
    if not len(order):
        return moves
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = np.any([key[order][1:] != key[order][:-1] for key in keys[: len(_KEY)]], axis=0)
    starts = np.append(0, np.flatnonzero(is_last)[:-1] + 1)
    attempts = np.maximum.reduceat(int64(moves, "attempt")[order], starts)
    return with_columns(moves.take(pa.array(order[is_last])), attempt=pa.array(attempts))


def _resumed(moves: pa.Table, now: int) -> pa.Table:
    """Gives the moves of messages that were held back, until their subscription was resumed, their new time: now.

    No command names these messages, and no other row has their time: their MOVE row has that of the row that it
    supersedes.
    """
    is_resumed = (int64(moves, "is_time_known") == 0) & (int64(moves, "deliver_at") >= HELD_DELIVER_AT)
    due = np.where(is_resumed, now, int64(moves, "deliver_at"))
    is_known = int64(moves, "is_time_known") | is_resumed
    return with_columns(moves, deliver_at=pa.array(due), is_time_known=pa.array(is_known))


def _delays_of(
    tables: Tables,
    names: Mapping[str, Sequence[str]],
    durable: Mapping[str, Position],
    changed: Sequence[pa.Table],
    on_progress: OnProgress,
) -> pa.Table:
    """Reads the DELAY rows of entries that commands have changed; the subscription is -1 where a row is for all."""
    wanted = MessageSet()
    for rows in changed:
        wanted.add(0, *_entries(rows))
    found = []
    n = 0
    for rows in tables.stream(_DELAYS if wanted.subscriptions else f"{_DELAYS} AND false"):
        of_entries = rows.filter(pa.array(wanted.contains(0, *_entries(rows))))
        comes_again = pa.array(is_not_durable(of_entries, durable).astype(np.int64))
        numbered = _in_numbers(of_entries, subscription_numbers(of_entries, names))
        found.append(numbered.append_column("is_not_durable", comes_again))
        n += rows.num_rows
        on_progress("delayed_index", "rows compared with commands", n)
    return pa.concat_tables(found)


def _entries(rows: pa.Table) -> tuple[Int64Array, Int64Array, Int64Array]:
    return int64(rows, "ledger_id"), int64(rows, "entry_id"), np.zeros(rows.num_rows, np.int64)


def _pairs(rows: pa.Table, others: pa.Table, columns: Sequence[str]) -> tuple[Int64Array, pa.Table]:
    """Pairs each row with the others of the same entry: the rows' indexes, and for each pair columns of the other."""
    numbered = rows.select(_ENTRY).append_column("row", _numbers_of(rows))
    pairs = numbered.join(others.select([*_ENTRY, *columns]), _ENTRY, join_type="inner", use_threads=False)
    return int64(pairs, "row"), pairs


def _is_in_time(cancelled: pa.Table, delays: pa.Table, now: int) -> BoolArray:
    """A mask of the CANCEL rows that have met their message, or still wait for it.

    A row cancels a message that is due at the row's time or before. Where the message is due later, it waited in vain.
    """
    originals = where(delays, int64(delays, "sequence") == 0)
    row, pairs = _pairs(cancelled, originals, ["batch_index", "deliver_at"])
    index, due = int64(cancelled, "batch_index")[row], int64(cancelled, "deliver_at")[row]
    is_met = (int64(pairs, "deliver_at") <= due) & ((index < 0) | (index == int64(pairs, "batch_index")))
    in_time = ~is_among(cancelled, delays, _ENTRY) & (int64(cancelled, "deliver_at") >= now)
    in_time[row[is_met]] = True
    return in_time


def _without_restored(done: pa.Table, restored: pa.Table, delays: pa.Table) -> pa.Table:
    """Returns `done` without messages that were restored later; the others of a whole entry get rows of their own."""
    entry = ["subscription", *_ENTRY]
    is_concerned = is_among(done, restored, entry)
    concerned = where(done, is_concerned)
    if not concerned.num_rows:
        return done
    sizes = np.ones(concerned.num_rows, np.int64)
    row, pairs = _pairs(concerned, delays, ["batch_size"])
    np.maximum.at(sizes, row, int64(pairs, "batch_size"))
    sizes[int64(concerned, "batch_index") >= 0] = 1
    row = np.repeat(np.arange(concerned.num_rows), sizes)
    single = concerned.take(pa.array(row))
    place = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    index = int64(single, "batch_index")
    message = np.maximum(index, place)
    single = with_columns(
        single, message=pa.array(message), batch_index=pa.array(np.where(sizes[row] > 1, message, index))
    )
    left = where(single, are_cancelled(single, concerned, restored, ["subscription"]))
    return pa.concat_tables([where(done, ~is_concerned), left])


def _last_times(rows: pa.Table, others: pa.Table) -> Int64Array:
    """Returns for each row the last deliver_at that others have of its entry, int64, (rows,); 0: they have none."""
    row, pairs = _pairs(rows, others, ["deliver_at"])
    last = np.zeros(rows.num_rows, np.int64)
    np.maximum.at(last, row, int64(pairs, "deliver_at"))
    return last


def _are_done(moves: pa.Table, delivered: Delivered) -> BoolArray:
    """A mask of the moves whose messages have been delivered, or were handed out while the subscription was absent."""
    numbers = int64(moves, "subscription")
    # Rows for one subscription are told by their tick, not by their partition.
    rows = moves.drop_columns("subscription").rename_columns({"source": "topic"})
    rows = rows.append_column("partition", pa.repeat(-1, rows.num_rows))
    are_done = np.zeros(moves.num_rows, np.bool_)
    for number, found in chain(delivered.find(moves), delivered.missed(rows)):
        are_done |= found & (numbers == number)
    return are_done


def write_moves(
    tables: Tables, moves: pa.Table, names: Mapping[str, Sequence[str]], tick: int, of: str = "true"
) -> None:
    """Appends DELAY rows for moves to the delayed index, for messages that have a row there.

    Args:
        moves: as `unsealed` of Changes; those of recurring messages have columns of occurrences, too.
        names: for each source topic the names of its subscriptions, by number.
        tick: the bucket_id of the new rows.
        of: SQL condition: a row of the delayed index may be copied.
    """
    if not moves.num_rows:
        return
    wanted, written = MessageSet(), MessageSet()
    wanted.add(0, *message_ids(moves))
    ledgers = pc.min_max(moves["ledger_id"])
    condition = f"operation = 'DELAY' AND {of} AND ledger_id BETWEEN {ledgers['min']} AND {ledgers['max']}"
    found = []
    for rows in tables.stream(f"SELECT * FROM delayed_index WHERE {condition}", _WRITTEN_ROWS):  # noqa: S608
        rows = where(rows, wanted.contains(0, *message_ids(rows)) & ~written.contains(0, *message_ids(rows)))
        written.add(0, *message_ids(rows))
        found.append(_moved_rows(rows, moves, names, tick))
    new = in_order(pa.concat_tables(found))
    for start in range(0, new.num_rows, _WRITTEN_ROWS):
        tables.append("delayed_index", new.slice(start, _WRITTEN_ROWS), {f"rebuild-{time.time_ns()}": 1})


def _moved_rows(rows: pa.Table, moves: pa.Table, names: Mapping[str, Sequence[str]], tick: int) -> pa.Table:
    """Returns for each move of a message that has rows here a copy of one of them, with the time of the move."""
    message = pa.array(np.maximum(int64(rows, "batch_index"), 0))
    numbered = rows.select(_ENTRY).append_column("message", message).append_column("row", _numbers_of(rows))
    first = numbered.group_by(_MESSAGE).aggregate([("row", "min")])
    moves = moves.append_column("move", _numbers_of(moves))
    pairs = moves.select([*_MESSAGE, "move"]).join(first, _MESSAGE, join_type="inner", use_threads=False)
    moves, rows = moves.take(pairs["move"]), rows.take(pairs["row_min"])
    new = {
        **{name: rows[name] for name in rows.column_names},
        "deliver_at": moves["deliver_at"],
        "subscription": pa.array(_names_of(moves, names), pa.string()),
        "sequence": moves["sequence"],
        "bucket_id": pa.array(np.full(moves.num_rows, tick)),
        "attempt": pc.if_else(pc.greater(moves["attempt"], 0), moves["attempt"], None),
        "shaped_from": pa.nulls(moves.num_rows, pa.int64()),
        **{name: moves[name] for name in ("occurrence", "occurrence_at", "was_due") if name in moves.column_names},
    }
    return typed(new, DELAYED_INDEX)


def _reschedules(moves: pa.Table) -> pa.Table:
    """Returns moves as COMMAND_ROWS that reschedule their messages, or retry them as before."""
    n = moves.num_rows
    is_retry = pc.greater(moves["attempt"], 0)
    values = {
        **{name: moves[name] for name in ("ledger_id", "entry_id", "batch_index", "deliver_at")},
        "topic": moves["source"],
        "request_id": pc.binary_join_element_wise("rebuild", moves["sequence"].cast(pa.string()), "-"),
        "kind": pc.if_else(is_retry, RETRY, RESCHEDULE),
        "operation": pc.if_else(is_retry, RETRY.upper(), RESCHEDULE.upper()),
        "attempt": pc.if_else(is_retry, moves["attempt"], None),
        "reason": moves["reason"],
        "partition": pa.repeat(-1, n),
        "subscriptions": pa.array(1 << int64(moves, "subscription")),
        "issued_by": pa.repeat("rebuild", n),
        "issued_at": pa.repeat(0, n),
    }
    return typed(values, COMMAND_ROWS)


def _numbers_of(rows: pa.Table) -> pa.Array:
    return pa.array(np.arange(rows.num_rows))


def _names_of(moves: pa.Table, names: Mapping[str, Sequence[str]]) -> list[str]:
    pairs = zip(moves["source"].to_pylist(), moves["subscription"].to_pylist(), strict=True)
    return [names[topic][number] for topic, number in pairs]
