"""Matches commands with the messages that they name, and decides their results."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import ANSWER, CANCELLING_KINDS, OPERATIONS, REPEAT, Effect
from tracker.messages import MESSAGES, BoolArray, Int64Array, has_occurrences, int64, message_ids, where
from tracker.schemas import KNOWN, PAST
from tracker.subscriptions import ALSO_LATER
from tracker.wire.delaylake_pb2 import Result


class Named(NamedTuple):
    """The known messages of the entries that commands name.

    Attributes:
        known: as KNOWN.
        are_dispatched: bool, (known,): the message has been dispatched, assuming that it was not moved.
        payload_rows: as MESSAGES: rows of the messages that commands move or restore.
        in_state: as MESSAGES: those of the payload rows that have not been dispatched.
        n_by_key: so many of the last known messages are known by their schedule keys alone: after a rebuild, until
            their entries come in again. Commands by id wait until then.
    """

    known: pa.Table
    are_dispatched: BoolArray
    payload_rows: pa.Table = MESSAGES.empty_table()
    in_state: pa.Table = MESSAGES.empty_table()
    n_by_key: int = 0


class Pairs(NamedTuple):
    """Pairs of a command and a known message that it names.

    Attributes:
        commands: as COMMAND_ROWS.
        command: int64, (pairs,): the index of the command.
        named: the known messages.
        row: int64, (pairs,): the index of the known message.
    """

    commands: pa.Table
    command: Int64Array
    named: Named
    row: Int64Array

    @property
    def known(self) -> pa.Table:
        """The known messages, as KNOWN."""
        return self.named.known


_ADD_UP = {kind for kind, operation in OPERATIONS.items() if operation.adds_up}
_SET_TIME = {kind for kind, operation in OPERATIONS.items() if operation.effect is Effect.MOVE} - _ADD_UP


def split_groups(commands: pa.Table) -> list[tuple[int, int]]:
    """Splits commands into groups of consecutive ones that can be applied together.

    A group has one kind (those that cancel messages count as one). It moves no message to two different times, and has
    of a kind that adds up no two commands for the same message.

    Args:
        commands: as COMMAND_ROWS.

    Returns:
        for each group the index of its first row, and the one after its last.
    """
    names = ("kind", "ledger_id", "entry_id", "batch_index", "deliver_at")
    starts: list[int] = []
    group = ""
    # By entry of the group: by batch index the times to which messages are rescheduled, and the set of these times.
    moved: dict[tuple[int, int], tuple[dict[int, int], set[int]]] = {}
    for i, (kind, ledger, entry, index, time) in enumerate(
        zip(*(commands[name].to_pylist() for name in names), strict=True)
    ):
        kind = CANCELLING_KINDS[0] if kind in CANCELLING_KINDS else kind
        entry_times, times = moved.get((ledger, entry), ({}, set()))
        # An index of -1 means all messages of the entry.
        is_moved_elsewhere = any(entry_times.get(named, time) != time for named in (index, -1)) or (
            index < 0 and bool(times - {time})
        )
        is_again = kind in _ADD_UP and (index in entry_times or -1 in entry_times or (index < 0 and entry_times != {}))
        if kind != group or (kind in _SET_TIME and is_moved_elsewhere) or is_again:
            starts.append(i)
            group, moved, entry_times, times = kind, {}, {}, set()
        if kind in _SET_TIME or kind in _ADD_UP:
            entry_times[index] = time
            times.add(time)
            moved[ledger, entry] = entry_times, times
    return list(itertools.pairwise([*starts, commands.num_rows]))


def payload_rows_of(known: pa.Table, payload_rows: pa.Table, moves: Int64Array, names: pa.Array) -> Int64Array:
    """Finds the payload row of each known message for a subscription.

    Args:
        known: as KNOWN, n rows.
        payload_rows: as MESSAGES.
        moves: int64, (n,): the sequence of each message's last move for the subscription; 0: none.
        names: strings, (n,): names of the subscription.

    Returns:
        int64, (n,): the index of each message's first payload row; for a recurring one, that of its next occurrence;
        -1: it has none.
    """
    if not payload_rows.num_rows:
        return np.full(known.num_rows, -1, dtype=np.int64)
    rows_by_position: dict[tuple[int, int, int], int] = {}
    if not has_occurrences(payload_rows):
        for i, position in enumerate(_keys(payload_rows)):
            rows_by_position.setdefault(position, i)
        return np.array([rows_by_position.get(position, -1) for position in _keys(known)], dtype=np.int64)
    # A recurring message has rows of several occurrences: that of the last move is the next one. After a rebuild, rows
    # of several subscriptions may share a sequence.
    move_rows: dict[tuple[tuple[int, int, int], int, str | None], int] = {}
    columns = (payload_rows[name].to_pylist() for name in ("sequence", "subscription", "occurrence"))
    for i, (position, sequence, name, number) in enumerate(zip(_keys(payload_rows), *columns, strict=True)):
        if number is None:
            rows_by_position.setdefault(position, i)
        else:
            move_rows.setdefault((position, sequence or 0, name if sequence else None), i)
    found = [
        move_rows.get((position, sequence, name if sequence else None), rows_by_position.get(position, -1))
        for position, sequence, name in zip(_keys(known), moves.tolist(), names.to_pylist(), strict=True)
    ]
    return np.array(found, dtype=np.int64)


def last_payload_rows_of(rows: pa.Table, payload_rows: pa.Table, names: pa.Array) -> Int64Array:
    """Finds the payload row of each message's last attempt for a subscription; of several rows, that of the last move.

    Args:
        rows: as KNOWN, n rows.
        payload_rows: as MESSAGES. Rejected ones are ignored.
        names: strings, (n,): names of the subscription.

    Returns:
        int64, (n,): the index of a payload row; -1: there is none.
    """
    last_rows: dict[tuple[tuple[int, int, int], str | None], tuple[int, int, int]] = {}
    columns = zip(
        *(payload_rows[c].to_pylist() for c in ("subscription", "attempt", "sequence", "reason")), strict=True
    )
    for i, (position, (name, attempt, sequence, reason)) in enumerate(zip(_keys(payload_rows), columns, strict=True)):
        if reason is None:
            place = (attempt or 0, sequence or 0, i)
            last_rows[position, name] = max(place, last_rows.get((position, name), place))
    nowhere = (0, 0, -1)
    row_keys = zip(_keys(rows), names.to_pylist(), strict=True)
    found = [max(last_rows.get((at, None), nowhere), last_rows.get((at, name), nowhere))[2] for at, name in row_keys]
    return np.array(found, dtype=np.int64)


def _keys(rows: pa.Table) -> list[tuple[int, int, int]]:
    """Returns positions, (ledger, entry, batch index); a message alone in its entry has the batch index 0."""
    ledgers, entries, indexes = message_ids(rows)
    return list(zip(ledgers.tolist(), entries.tolist(), np.maximum(indexes, 0).tolist(), strict=True))


def match_messages(commands: pa.Table, named: Named) -> tuple[Int64Array, Int64Array]:
    """Pairs each command with all known messages of the entry that it names, in its topic and partition.

    Args:
        commands: as COMMAND_ROWS.
        named: the known messages.

    Returns:
        the index of the command, and that of the known message, of each pair: int64, (pairs,) each.
    """
    left = pa.table(
        {
            "command": np.arange(commands.num_rows),
            "ledger_id": commands["ledger_id"],
            "entry_id": commands["entry_id"],
            "topic": commands["topic"],
            "wanted": commands["partition"],
        }
    )
    right = named.known.select(["ledger_id", "entry_id", "topic", "partition"]).append_column(
        "row", pa.array(np.arange(named.known.num_rows))
    )
    pairs = left.join(right, ["ledger_id", "entry_id", "topic"], join_type="inner", use_threads=False)
    wanted, partition = int64(pairs, "wanted"), int64(pairs, "partition")
    pairs = where(pairs, (wanted < 0) | (partition < 0) | (wanted == partition))
    command, row = int64(pairs, "command"), int64(pairs, "row")
    by_key = pc.is_valid(commands["schedule_key"]).to_numpy(zero_copy_only=False)
    is_known = by_key[command] | (row < named.known.num_rows - named.n_by_key)
    return command[is_known], row[is_known]


def entry_results(command: Int64Array, is_whole: BoolArray, result: Int64Array) -> tuple[BoolArray, BoolArray]:
    """Decides which entries get one result, and not one for each message.

    These are the entries that a command named whole, of which either no message is TOO_LATE, or all of them are.

    Args:
        command: int64, (n,): the index of each message's command; equal ones are adjacent.
        is_whole: bool, (n,): the command names the whole entry.
        result: int64, (n,): numbers of the enum Result. Changed in place: if any message of an entry that gets one
            result is APPLIED, its first one becomes APPLIED.

    Returns:
        two masks, bool, (n,): the message shares one result with its entry; the message is the first of its command.
    """
    starts = np.ones(len(command), np.bool_)
    starts[1:] = command[1:] != command[:-1]
    if not len(command):
        return is_whole, starts
    group = np.cumsum(starts) - 1
    begin = np.flatnonzero(starts)
    late = np.add.reduceat((result == Result.TOO_LATE).astype(np.int64), begin)
    applied = np.add.reduceat((result == Result.APPLIED).astype(np.int64), begin)
    sizes = np.diff([*begin.tolist(), len(command)])
    shared = ((late == 0) | (late == sizes))[group] & is_whole
    any_applied = (applied > 0)[group] & shared
    first_of_shared = shared & starts
    result[first_of_shared & any_applied] = Result.APPLIED
    return shared, starts


def each_subscription(
    commands: pa.Table, subscriptions: Mapping[str, Sequence[str]]
) -> tuple[Int64Array, list[str | None]]:
    """Repeats each command for each subscription that it is for.

    Args:
        commands: as COMMAND_ROWS.
        subscriptions: by topic: the names of its subscriptions, by number.

    Returns:
        for each repetition the command's index, int64, (rows,), and the subscription's name, which is ALSO_LATER for
        those added later. A command for no subscription comes once, with the value of its column `subscription`.
    """
    index: list[int] = []
    names: list[str | None] = []
    for i, (topic, mask, own, also_later) in enumerate(
        zip(
            commands["topic"].to_pylist(),
            commands["subscriptions"].to_pylist(),
            commands["subscription"].to_pylist(),
            commands["also_later"].to_pylist(),
            strict=True,
        )
    ):
        command_names: list[str | None] = [s for bit, s in enumerate(subscriptions.get(topic, ())) if mask >> bit & 1]
        command_names = command_names + [ALSO_LATER] * bool(also_later) or [own]
        index += [i] * len(command_names)
        names += command_names
    return np.array(index, dtype=np.int64), names


def times_of(outcomes: pa.Table, rows: pa.Table, due: Int64Array) -> Int64Array:
    """Returns when the entry of each outcome is due: the latest of its messages' times.

    Args:
        outcomes: as OUTCOME_ROWS, n rows, of entries that are among the rows.
        rows: as KNOWN.
        due: int64, (rows,), ms since the epoch: when each of the rows is due.

    Returns:
        int64, (n,), ms since the epoch.
    """
    times: dict[tuple[int, int], int] = {}
    for ledger, entry, time in zip(rows["ledger_id"].to_pylist(), rows["entry_id"].to_pylist(), due, strict=True):
        times[ledger, entry] = max(int(time), times.get((ledger, entry), 0))
    positions = zip(outcomes["ledger_id"].to_pylist(), outcomes["entry_id"].to_pylist(), strict=True)
    return np.array([times[position] for position in positions], dtype=np.int64)


def with_released(known: pa.Table) -> pa.Table:
    """Adds the missing messages of known entries: those that are in no bucket, because they were dispatched.

    Args:
        known: as KNOWN: durable messages. A row with batch_index -1 and a batch_size above 1 stands for an entry that
            has no message in a bucket.

    Returns:
        as KNOWN: all messages of these entries. Those added are due at PAST.
    """
    if not known.num_rows:
        return known
    entries = known.group_by(["ledger_id", "entry_id"]).aggregate([("batch_size", "max"), ("batch_index", "count")])
    missing = entries.filter(pc.greater(entries["batch_size_max"], entries["batch_index_count"]))
    if not missing.num_rows:
        return known
    parts = known.join(missing.select(["ledger_id", "entry_id"]), ["ledger_id", "entry_id"], join_type="inner")
    rows_by_position: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in parts.to_pylist():
        rows_by_position.setdefault((row["ledger_id"], row["entry_id"]), []).append(row)
    rest = [
        {**rows[0], "batch_index": index, "deliver_at": PAST, "schedule_key": None}
        for rows in rows_by_position.values()
        for index in set(range(rows[0]["batch_size"])) - {row["batch_index"] for row in rows}
    ]
    is_stand_in = (int64(known, "batch_index") < 0) & (int64(known, "batch_size") > 1)
    return pa.concat_tables([where(known, ~is_stand_in), pa.Table.from_pylist(rest, schema=KNOWN)])


def command_positions(commands: pa.Table) -> pa.Table:
    """Returns the distinct entries that commands name by id; those of answers and repeats are left out.

    Args:
        commands: as COMMAND_ROWS.

    Returns:
        a table with the columns ledger_id and entry_id, int64.
    """
    is_applied = pc.invert(pc.is_in(commands["kind"], pa.array([ANSWER, REPEAT])))
    applied = commands.filter(pc.and_(is_applied, pc.greater_equal(commands["ledger_id"], 0)))
    return applied.select(["ledger_id", "entry_id"]).group_by(["ledger_id", "entry_id"]).aggregate([])
