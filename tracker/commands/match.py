"""Which messages a command names, and what becomes of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from tracker.commands.schema import (
    CANCEL,
    RESCHEDULE,
    RESTORE,
    SKIP,
)
from tracker.messages import (
    BoolArray,
    Int64Array,
    int64,
    message_ids,
    where,
)
from tracker.subscriptions import ALSO_LATER
from tracker.wire.delaylake_pb2 import Result


def runs(commands: pa.Table) -> list[tuple[int, int]]:
    """Where runs of commands of one kind start and end. In none is a message moved to two times."""
    names = ("kind", "ledger_id", "entry_id", "batch_index", "deliver_at")
    starts: list[int] = []
    run = ""
    # By entry of a run the times of its messages, by batch index, and all of them.
    moved: dict[tuple[int, int], tuple[dict[int, int], set[int]]] = {}
    for i, (kind, ledger, entry, index, time) in enumerate(
        zip(*(commands[name].to_pylist() for name in names), strict=True)
    ):
        kind = "take back" if kind in (CANCEL, SKIP) else kind
        of_entry, times = moved.get((ledger, entry), ({}, set()))
        # An index of -1 is all messages of the entry.
        is_moved_elsewhere = any(of_entry.get(named, time) != time for named in (index, -1)) or (
            index < 0 and bool(times - {time})
        )
        if kind != run or (kind == RESCHEDULE and is_moved_elsewhere):
            starts.append(i)
            run, moved, of_entry, times = kind, {}, {}, set()
        if kind == RESCHEDULE:
            of_entry[index] = time
            times.add(time)
            moved[ledger, entry] = of_entry, times
    return list(itertools.pairwise([*starts, commands.num_rows]))


def results_of(kind: str, taken: BoolArray, is_late: BoolArray, is_kept: BoolArray) -> tuple[Int64Array, list[str]]:
    """What a command of a kind does to messages of one subscription, and why it does not."""
    if kind == RESTORE:
        cases = [
            (~taken, Result.ALREADY_APPLIED, ""),
            (is_late, Result.TOO_LATE, "its time is past"),
            (~is_kept, Result.TOO_LATE, "not kept any more"),
        ]
    elif kind == RESCHEDULE:
        cases = [
            (taken, Result.INVALID, "taken back: restore it first"),
            (is_late, Result.TOO_LATE, "released"),
            (~is_kept, Result.TOO_LATE, "not kept any more"),
        ]
    else:
        cases = [(taken, Result.ALREADY_APPLIED, ""), (is_late, Result.TOO_LATE, "released")]
    conditions = [condition for condition, _, _ in cases]
    result = np.select(conditions, [int(r) for _, r, _ in cases], int(Result.APPLIED))
    reason = np.select(conditions, [text for _, _, text in cases], "")
    return result.astype(np.int64), reason.tolist()


def rows_of(known: pa.Table, kept: pa.Table) -> Int64Array:
    """For each known message the first of the kept rows that is of it, -1 where there is none."""
    if not kept.num_rows:
        return np.full(known.num_rows, -1, dtype=np.int64)
    there: dict[tuple[int, int, int], int] = {}
    for i, position in enumerate(_keys(kept)):
        there.setdefault(position, i)
    return np.array([there.get(position, -1) for position in _keys(known)], dtype=np.int64)


def _keys(rows: pa.Table) -> list[tuple[int, int, int]]:
    """Positions; a message alone in its entry counts as the first of a batch."""
    ledgers, entries, indexes = message_ids(rows)
    return list(zip(ledgers.tolist(), entries.tolist(), np.maximum(indexes, 0).tolist(), strict=True))


def match(commands: pa.Table, known: pa.Table) -> tuple[Int64Array, Int64Array]:
    """Pairs of a command and a message of the entry that it names, in its topic and partition."""
    left = pa.table(
        {
            "command": np.arange(commands.num_rows),
            "ledger_id": commands["ledger_id"],
            "entry_id": commands["entry_id"],
            "topic": commands["topic"],
            "wanted": commands["partition"],
        }
    )
    right = known.select(["ledger_id", "entry_id", "topic", "partition"]).append_column(
        "row", pa.array(np.arange(known.num_rows))
    )
    pairs = left.join(right, ["ledger_id", "entry_id", "topic"], join_type="inner", use_threads=False)
    wanted, partition = int64(pairs, "wanted"), int64(pairs, "partition")
    pairs = where(pairs, (wanted < 0) | (partition < 0) | (wanted == partition))
    return int64(pairs, "command"), int64(pairs, "row")


def entry_results(command: Int64Array, is_whole: BoolArray, result: Int64Array) -> tuple[BoolArray, BoolArray]:
    """Makes one result of an entry's, where a command names it whole and none of its messages is too late, or all are.

    Returns:
        which rows have the entry's result, and which rows are the first of their command. `result` is changed.
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
    """A row for each command and subscription that it is for: the command's index, and the subscription's name."""
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
        of_command: list[str | None] = [s for bit, s in enumerate(subscriptions.get(topic, ())) if mask >> bit & 1]
        of_command = of_command + [ALSO_LATER] * bool(also_later) or [own]
        index += [i] * len(of_command)
        names += of_command
    return np.array(index, dtype=np.int64), names


def times_of(outcomes: pa.Table, rows: pa.Table, due: Int64Array) -> Int64Array:
    """When the entries of outcomes are due: the last of the times of their messages."""
    times: dict[tuple[int, int], int] = {}
    for ledger, entry, time in zip(rows["ledger_id"].to_pylist(), rows["entry_id"].to_pylist(), due, strict=True):
        times[ledger, entry] = max(int(time), times.get((ledger, entry), 0))
    positions = zip(outcomes["ledger_id"].to_pylist(), outcomes["entry_id"].to_pylist(), strict=True)
    return np.array([times[position] for position in positions], dtype=np.int64)
