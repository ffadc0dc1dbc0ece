"""Reads the changes that commands have made to messages from `delayed_index` and `outcomes`, as rows of the tracker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.position import Position
from checkpoint_from_tables.rebuild.delivered import Delivered, is_not_durable
from checkpoint_from_tables.rebuild.message_set import MessageSet
from tracker.commands.kinds import RESCHEDULE, RESTORE, RETRY
from tracker.ends import moved_ends
from tracker.message_state.changes import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from tracker.messages import (
    BoolArray,
    Int64Array,
    concat,
    in_order,
    int64,
    is_among,
    message_ids,
    subscription_numbers,
    typed,
    where,
    with_columns,
)
from tracker.rebuilt import MOVED, NOT_TO_DELIVER, REBUILT_KEPT_MILLIS
from tracker.schemas import COMMAND_ROWS, REBUILD_ID, SEQUENCE_BITS
from warehouse.delta.tables import OnProgress, Tables
from warehouse.named_queries import TRUE, NamedQueries, Sql
from warehouse.pending import EFFECT, IS_CANCEL, IS_RESTORE, are_cancelled
from warehouse.queries.waiting_commands import WAITING
from warehouse.schemas import DELAYED_INDEX

_SQL = NamedQueries(
    __file__,
    waiting=WAITING,
    effect=EFFECT,
    is_cancel=IS_CANCEL,
    is_restore=IS_RESTORE,
    sequence_bits=SEQUENCE_BITS,
)

_ENTRY = ["ledger_id", "entry_id"]
_MESSAGE = [*_ENTRY, "message"]
_KEY = ["subscription", *_MESSAGE]
_OF_LAST_ROW = ["sequence", "was_due", "expires_at"]

_WRITTEN_ROWS = 50_000  # rows that are written at once


@dataclass(frozen=True)
class Changes:
    """The effects of commands, as rows for the state of shards.

    Attributes:
        cancelled: cancelled messages, as NOT_TO_DELIVER.
        moved: moved messages, as MOVED.
        waiting: commands for messages that come in again, as COMMAND_ROWS; those that restore come first.
        unsealed: moves of messages in the delayed index that lack a DELAY row for the move. `was_due` is that of the
            move's row, ms since the epoch; `expired_at` is the end of the row before it.
        retried: moves to retries that are to be delivered, of messages that have been delivered before.
    """

    cancelled: pa.Table
    moved: pa.Table
    waiting: pa.Table
    unsealed: pa.Table
    retried: pa.Table


@dataclass(frozen=True)
class Commands:
    """The changes by commands in the tables. Subscriptions are numbers.

    Attributes:
        moves: the last move of each message and subscription.
        done: messages, and whole entries, that were cancelled or skipped and not restored.
        restored: messages that were restored, of whole entries in `done` whose sizes no table has.
        delays: the DELAY rows of all entries that commands have changed.
        now: ms since the epoch.
    """

    moves: pa.Table
    done: pa.Table
    restored: pa.Table
    delays: pa.Table
    now: int

    def changes(self, delivered: Delivered) -> Changes:
        """Returns the rows of these commands for the state of shards, given the delivered messages."""
        done, delays = self.done, self.delays
        moves = where(self.moves, ~is_among(self.moves, where(delays, int64(delays, "recurs") > 0), _MESSAGE))
        # A rebuild removes the rows of messages that come again, but not their moved rows.
        remaining = where(delays, (int64(delays, "is_not_durable") == 0) | (int64(delays, "sequence") > 0))
        is_sealed = is_among(moves, remaining, [*_KEY, "sequence"])
        is_done = _are_done(moves, delivered)
        is_open = ~is_sealed & ~is_done & (int64(moves, "is_time_known") > 0)
        is_there = is_among(moves, remaining, _MESSAGE)
        unsealed = _with_last_rows(where(moves, is_open & is_there), delays)
        restores = _restores(where(self.restored, ~_are_delivered(self.restored, delivered)))
        waiting = pa.concat_tables([restores, _reschedules(where(moves, is_open & ~is_there))])
        # A move whose time no row has, of a message that comes again, is forgotten: the state would drop the message as
        # moved away. Such is one of a schedule whose rows an earlier rebuild has removed.
        stays = is_done | is_there
        retried = where(moves, stays & (int64(moves, "attempt") > 0) & ~is_done)
        moves = where(moves, stays)

        # The state has to remember a cancel until the message's last row is loaded. A row that was parked is never
        # loaded. A paused schedule may be resumed, so its cancel stays.
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
        names: the names of each source topic's subscriptions, in the order of their numbers.
        durable: the last entry of each topic partition that does not come again from the source topics.
        now: ms since the epoch.
        on_progress: called with (table, step, number of rows).
    """
    cancelled, answered, restored, moves = (
        pa.concat_tables(_read(tables, _SQL(query), names)) for query in ("cancelled", "answered", "restored", "moves")
    )
    moves = _resumed(_last_moves(moves), now)
    delays = _delays_of(tables, names, durable, (cancelled, answered, restored, moves), on_progress)
    done = pa.concat_tables([where(cancelled, _is_in_time(cancelled, delays, now)), answered])
    done, restored = _without_restored(done, restored, delays)
    return Commands(moves, done, restored, delays, now)


def not_to_deliver(rows: pa.Table, now: int) -> pa.Table:
    """Returns messages as NOT_TO_DELIVER, each once.

    Their `until` is the last `deliver_at` of the message in these rows, but at least REBUILT_KEPT_MILLIS from now.

    Args:
        rows: with the columns of NOT_TO_DELIVER, and `deliver_at` in place of `until`.
        now: ms since the epoch.
    """
    until = np.maximum(int64(rows, "deliver_at"), now + REBUILT_KEPT_MILLIS)
    keys = [name for name in NOT_TO_DELIVER.names if name != "until"]
    unique = rows.select(keys).append_column("until", pa.array(until)).group_by(keys).aggregate([("until", "max")])
    return typed(unique.rename_columns([*keys, "until"]), NOT_TO_DELIVER)


def _read(tables: Tables, sql: str, names: Mapping[str, Sequence[str]]) -> Iterator[pa.Table]:
    """Yields the rows of a query for known subscriptions, with the subscriptions as numbers."""
    for rows in tables.stream(sql):
        numbers = subscription_numbers(rows, names)
        yield _in_numbers(rows, numbers).filter(pa.array(numbers >= 0))


def _in_numbers(rows: pa.Table, numbers: Int64Array) -> pa.Table:
    """Returns rows with the subscription's number, the message's number in its entry, and all integers as int64."""
    columns = {
        field.name: rows[field.name].cast(pa.int64()) if pa.types.is_integer(field.type) else rows[field.name]
        for field in rows.schema
        if field.name != "topic"
    }
    message = pa.array(np.maximum(int64(rows, "batch_index"), 0))
    return pa.table(columns | {"subscription": pa.array(numbers), "message": message})


def _last_moves(moves: pa.Table) -> pa.Table:
    """Returns the last move of each message and subscription; if it has several rows, one with the time of the move.

    `attempt` is the highest of all moves of the message, because some rows do not have it.
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
    """Sets the time of moves that a resume has made to now: those of messages that were parked before.

    No command names these messages, and no row has their new time: the MOVE row has the time of the row before it.
    """
    is_resumed = (int64(moves, "is_time_known") == 0) & (int64(moves, "deliver_at") >= HELD_DELIVER_AT)
    due = np.where(is_resumed, now, int64(moves, "deliver_at"))
    is_known = int64(moves, "is_time_known") | is_resumed
    moves = with_columns(moves, deliver_at=pa.array(due), is_time_known=pa.array(is_known))
    return moves.append_column("is_resumed", pa.array(is_resumed))


def _delays_of(
    tables: Tables,
    names: Mapping[str, Sequence[str]],
    durable: Mapping[str, Position],
    changed: Sequence[pa.Table],
    on_progress: OnProgress,
) -> pa.Table:
    """Reads the DELAY rows of entries that commands have changed. A row for all subscriptions has the number -1."""
    wanted = MessageSet()
    for rows in changed:
        wanted.add(0, *_entries(rows))
    found = []
    n = 0
    for rows in tables.stream(_SQL("delays", are_wanted=bool(wanted.subscriptions))):
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
    """Pairs each row with the rows of `others` that have the same entry.

    Returns:
        (index of the row, int64, shape (pairs,); `columns` of the other row) of each pair.
    """
    numbered = rows.select(_ENTRY).append_column("row", _numbers_of(rows))
    pairs = numbered.join(others.select([*_ENTRY, *columns]), _ENTRY, join_type="inner", use_threads=False)
    return int64(pairs, "row"), pairs


def _is_in_time(cancelled: pa.Table, delays: pa.Table, now: int) -> BoolArray:
    """Returns a mask of the CANCEL rows that have met their message, or still wait for it.

    A CANCEL row cancels a message that is due by the row's time, and not one that is due later.
    """
    originals = where(delays, int64(delays, "sequence") == 0)
    row, pairs = _pairs(cancelled, originals, ["batch_index", "deliver_at"])
    index, due = int64(cancelled, "batch_index")[row], int64(cancelled, "deliver_at")[row]
    is_met = (int64(pairs, "deliver_at") <= due) & ((index < 0) | (index == int64(pairs, "batch_index")))
    in_time = ~is_among(cancelled, delays, _ENTRY) & (int64(cancelled, "deliver_at") >= now)
    in_time[row[is_met]] = True
    return in_time


def _without_restored(done: pa.Table, restored: pa.Table, delays: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Returns `done` without messages that were restored later.

    If only some messages of a cancelled entry were restored, each of the others gets a row of its own. Where no table
    has the entry's size, its row stays.

    Returns:
        these rows; the restored messages of entries whose rows stay, once for each subscription.
    """
    entry = ["subscription", *_ENTRY]
    is_concerned = is_among(done, restored, entry)
    concerned = where(done, is_concerned)
    sizes = np.zeros(concerned.num_rows, np.int64)
    row, pairs = _pairs(concerned, delays, ["batch_size"])
    np.maximum.at(sizes, row, int64(pairs, "batch_size"))
    are_single, are_restored_single = (int64(rows, "batch_index") >= 0 for rows in (concerned, restored))
    has_size = are_single | (sizes > 0)
    sizes[are_single] = 1

    whole, wholly_restored = where(concerned, ~has_size), where(restored, ~are_restored_single)
    whole = where(whole, are_cancelled(whole, where(concerned, ~are_single), wholly_restored, ["subscription"]))
    again = where(restored, are_restored_single & is_among(restored, whole, entry) & (int64(restored, "attempt") == 0))
    again = where(again, ~are_cancelled(again, concerned, restored, ["subscription"]))
    last = again.group_by([*entry, "batch_index", "message", "source", "attempt"], use_threads=False)
    again = last.aggregate([("sequence", "max")]).rename_columns({"sequence_max": "sequence"})

    of_known, sizes = where(concerned, has_size), sizes[has_size]
    row = np.repeat(np.arange(of_known.num_rows), sizes)
    single = of_known.take(pa.array(row))
    place = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    index = int64(single, "batch_index")
    message = np.maximum(index, place)
    single = with_columns(
        single, message=pa.array(message), batch_index=pa.array(np.where(sizes[row] > 1, message, index))
    )
    left = where(single, are_cancelled(single, concerned, restored, ["subscription"]))
    return pa.concat_tables([where(done, ~is_concerned), whole, left]), again


def _with_last_rows(moves: pa.Table, delays: pa.Table) -> pa.Table:
    """Returns moves with what they take over from the row before: `was_due` of what was parked, and `expired_at`."""
    moves = moves.append_column("move", _numbers_of(moves))
    last = delays.rename_columns({"subscription": "number"}).select([*_MESSAGE, "number", *_OF_LAST_ROW])
    pairs = moves.select([*_KEY, "move"]).join(last, _MESSAGE, join_type="inner", use_threads=False)
    numbers = int64(pairs, "number")
    pairs = where(pairs, (numbers < 0) | (numbers == int64(pairs, "subscription")))
    pairs = pairs.sort_by([("move", "ascending"), ("sequence", "ascending")])
    is_last = np.diff(int64(pairs, "move"), append=-1) != 0
    place = np.full(moves.num_rows, -1, np.int64)
    place[int64(pairs, "move")[is_last]] = np.flatnonzero(is_last)
    found = pairs.take(pa.array(place, mask=place < 0))
    was_due = pc.if_else(moves["is_resumed"], found["was_due"], pa.scalar(None, pa.int64()))
    moves = moves.drop_columns("move").append_column("was_due", was_due)
    return moves.append_column("expired_at", found["expires_at"])


def _last_times(rows: pa.Table, others: pa.Table) -> Int64Array:
    """Returns the last `deliver_at` of each row's entry in `others`, int64, shape (rows,); 0: they lack the entry."""
    row, pairs = _pairs(rows, others, ["deliver_at"])
    last = np.zeros(rows.num_rows, np.int64)
    np.maximum.at(last, row, int64(pairs, "deliver_at"))
    return last


def _are_done(moves: pa.Table, delivered: Delivered) -> BoolArray:
    """Returns a mask of the moves whose messages have been delivered, or missed because the subscription was absent."""
    numbers = int64(moves, "subscription")
    # The partition does not matter: rows for one subscription are compared by their tick.
    rows = moves.drop_columns("subscription").rename_columns({"source": "topic"})
    rows = rows.append_column("partition", pa.repeat(-1, rows.num_rows))
    are_done = np.zeros(moves.num_rows, np.bool_)
    for number, found in chain(delivered.find(moves), delivered.missed(rows)):
        are_done |= found & (numbers == number)
    return are_done


def _are_delivered(restored: pa.Table, delivered: Delivered) -> BoolArray:
    """Returns a mask of the restored messages that have been delivered."""
    numbers = int64(restored, "subscription")
    are_delivered = np.zeros(restored.num_rows, np.bool_)
    for number, found in delivered.find(restored):
        are_delivered |= found & (numbers == number)
    return are_delivered


def write_moves(
    tables: Tables, moves: pa.Table, names: Mapping[str, Sequence[str]], tick: int, condition: Sql = TRUE
) -> None:
    """Appends DELAY rows for moves to the delayed index: copies of the messages' rows there, with the new time.

    Args:
        moves: as `unsealed` of Changes; moves of recurring messages have columns of occurrences, too.
        names: the names of each source topic's subscriptions, in the order of their numbers.
        tick: the bucket_id of the new rows.
        condition: SQL, for the rows of the delayed index that may be copied.
    """
    if not moves.num_rows:
        return
    wanted, written = MessageSet(), MessageSet()
    wanted.add(0, *message_ids(moves))
    ledgers = pc.min_max(moves["ledger_id"])
    first, last = ledgers.as_py().values()
    found = []
    for rows in tables.stream(_SQL("rows_to_copy", condition=condition, first=first, last=last), _WRITTEN_ROWS):
        rows = where(rows, wanted.contains(0, *message_ids(rows)) & ~written.contains(0, *message_ids(rows)))
        written.add(0, *message_ids(rows))
        found.append(_moved_rows(rows, moves, names, tick))
    new = in_order(pa.concat_tables(found))
    for start in range(0, new.num_rows, _WRITTEN_ROWS):
        tables.append("delayed_index", new.slice(start, _WRITTEN_ROWS), {f"rebuild-{time.time_ns()}": 1})


def _moved_rows(rows: pa.Table, moves: pa.Table, names: Mapping[str, Sequence[str]], tick: int) -> pa.Table:
    """Returns for each move a copy of one of the message's rows, with the time of the move; none without such a row."""
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
    if "is_resumed" in moves.column_names:  # a retry, and what was parked, keep their ends
        ends = moved_ends(concat([rows], DELAYED_INDEX), int64(moves, "deliver_at"))["expires_at"]
        keeps = pc.or_(moves["is_resumed"], pc.greater(moves["attempt"], 0))
        new["expires_at"] = pc.if_else(keeps, moves["expired_at"], ends)
    return typed(new, DELAYED_INDEX)


def _reschedules(moves: pa.Table) -> pa.Table:
    """Returns moves as COMMAND_ROWS: commands that reschedule or retry the messages again."""
    is_retry = pc.greater(moves["attempt"], 0)
    values = {
        "deliver_at": moves["deliver_at"],
        "kind": pc.if_else(is_retry, RETRY, RESCHEDULE),
        "operation": pc.if_else(is_retry, RETRY.upper(), RESCHEDULE.upper()),
        "attempt": pc.if_else(is_retry, moves["attempt"], None),
        "reason": moves["reason"],
    }
    return _commands_again(moves, values)


def _restores(restored: pa.Table) -> pa.Table:
    """Returns restored messages as COMMAND_ROWS: commands that restore them when their entries come again."""
    n = restored.num_rows
    values = {"deliver_at": pa.repeat(0, n), "kind": pa.repeat(RESTORE, n), "operation": pa.repeat(RESTORE.upper(), n)}
    return _commands_again(restored, values)


def _commands_again(changed: pa.Table, values: Mapping[str, pa.Array]) -> pa.Table:
    """Returns COMMAND_ROWS for messages that were changed and come again, each for its subscription.

    Args:
        changed: the messages, with `source` and the sequences of the changes.
        values: the columns that say what the commands do.
    """
    n = changed.num_rows
    own = {
        **{name: changed[name] for name in ("ledger_id", "entry_id", "batch_index")},
        "topic": changed["source"],
        "request_id": pc.binary_join_element_wise(REBUILD_ID, changed["sequence"].cast(pa.string()), ""),
        "partition": pa.repeat(-1, n),
        "subscriptions": pa.array(1 << int64(changed, "subscription")),
        "issued_by": pa.repeat("rebuild", n),
        "issued_at": pa.repeat(0, n),
    }
    return typed({**own, **values}, COMMAND_ROWS)


def _numbers_of(rows: pa.Table) -> pa.Array:
    return pa.array(np.arange(rows.num_rows))


def _names_of(moves: pa.Table, names: Mapping[str, Sequence[str]]) -> list[str]:
    pairs = zip(moves["source"].to_pylist(), moves["subscription"].to_pylist(), strict=True)
    return [names[topic][number] for topic, number in pairs]
