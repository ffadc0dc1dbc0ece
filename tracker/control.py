"""Applies cancels and skips, after PIP-423."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from proto.delaylake_pb2 import Result
from tracker.chunks import Chunks
from tracker.commands import ANSWER, CANCEL, OUTCOMES, SKIP
from tracker.messages import BoolArray, Int64Array, concat, int64, is_rejected, where
from tracker.rebuilt import Rebuilt, take_back
from tracker.request_log import RequestLog
from tracker.store import Store
from tracker.taken_back import Compression, TakenBack
from tracker.waiting import WaitingCommands

_META = "control"

# A message that a command may name, as far as it is known.
KNOWN = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("batch_size", pa.int32()),
        ("deliver_at", pa.int64()),
    ]
)

# The time of delivery of a known message that has been handed out long ago, or rejected.
PAST = 0

# Rows of type CANCEL for the delayed index.
CANCELS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("subscription", pa.string()),
        ("deliver_at", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Moment:
    """When commands are applied.

    Everything due at `released` or before has been handed out, but for messages that came in only in this tick.
    For commands that came in at tick `passed` or before, all messages that were published earlier have come in.
    """

    tick: int
    now: int  # ms since the epoch
    released: int
    passed: int


class Control:
    """What has been taken back, and the commands that wait for their message.

    A command takes back a message that is known and not handed out yet; whether the time that a cancel names is the
    message's does not matter. For a message that is not known it waits, whatever its time, until everything that was
    published before it has come in: then a skip is NOT_FOUND, and a cancel goes on waiting until two ticks after the
    time it names.

    Args:
        subscriptions: for each source topic its subscriptions' names.
        tick_time_millis: Pulsar's tick; what is taken back is remembered for two of them beyond its time.
    """

    def __init__(
        self,
        store: Store,
        subscriptions: Mapping[str, Sequence[str]],
        tick_time_millis: int,
        compression: Compression | None = None,
    ) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._margin = 2 * tick_time_millis
        self._saved = store.get(_META, (0, 0))
        meta = json.loads(self._saved) if self._saved else [0, 0, 0]
        self.taken_back = TakenBack(store, compression)
        self._waiting = WaitingCommands(store)
        self._requests = RequestLog(store)
        self._cancels = Chunks(store, "cancels", CANCELS, meta[0], meta[1])
        # Messages that wait although no subscription wants them any more.
        self.unwanted: int = meta[2]

    @property
    def waiting(self) -> int:
        """Commands that wait for their message."""
        return len(self._waiting)

    def wants(self, rows: pa.Table) -> Int64Array:
        """For each message the subscriptions that still want it, as bits."""
        topics = rows["topic"].combine_chunks().dictionary_encode()
        masks = [(1 << len(self._subscriptions.get(topic, ()))) - 1 for topic in topics.dictionary.to_pylist()]
        wants = np.array(masks, dtype=np.int64)[topics.indices.to_numpy()] if rows.num_rows else np.zeros(0, np.int64)
        if self.taken_back and rows.num_rows:
            position = _position(rows)
            for subscription in range(max(masks, default=0).bit_length()):
                wants[self.taken_back.contains(subscription, *position)] &= ~(1 << subscription)
        return wants

    def arrive(self, messages: pa.Table, moment: Moment) -> pa.Table:
        """Applies the commands that waited for these messages, before they are tracked; returns the outcomes."""
        commands = self._waiting.take(messages)
        if not commands.num_rows:
            return OUTCOMES.empty_table()
        known = messages.select(KNOWN.names)
        # What no subscription wants when it comes is not tracked, and so not counted.
        unwanted = self.unwanted
        outcomes, unmatched = self._apply(commands.drop_columns("tick"), known, is_rejected(messages))
        self.unwanted = unwanted
        return concat([outcomes, self._answer(unmatched, Result.NOT_FOUND, "the topic has no such message")], OUTCOMES)

    def apply(
        self,
        commands: pa.Table,
        request_ids: Sequence[str],
        known: pa.Table,
        is_new: BoolArray,
        moment: Moment,
    ) -> pa.Table:
        """Applies commands; returns their outcomes.

        Args:
            commands: this shard's.
            request_ids: those of all shards' commands.
            known: the messages that they name, as far as they are known: all those of an entry, or none.
            is_new: which of these came in only in this tick.
        """
        if not request_ids and not commands.num_rows:
            return OUTCOMES.empty_table()
        repeated = self._requests.contains(commands["request_id"].to_pylist())
        self._requests.add(request_ids, moment.now)
        outcomes = [self._answer(where(commands, repeated), Result.ALREADY_APPLIED, "the request id has been applied")]
        commands = where(commands, ~repeated)
        is_answer = pc.equal(commands["kind"], ANSWER).to_numpy(zero_copy_only=False)
        outcomes.append(self._answer(where(commands, is_answer)))
        commands = where(commands, ~is_answer)

        is_released = (int64(known, "deliver_at") <= moment.released) & ~is_new
        applied, unmatched = self._apply(commands, known, is_released)
        outcomes.append(applied)
        if unmatched.num_rows:
            outcomes += self._wait(unmatched, moment)
        return concat(outcomes, OUTCOMES)

    def expire(self, moment: Moment) -> pa.Table:
        """Gives up on messages that can no longer come; returns the outcomes."""

        def is_expired(rows: pa.Table) -> BoolArray:
            is_skip = pc.equal(rows["kind"], SKIP).to_numpy(zero_copy_only=False)
            is_past = int64(rows, "deliver_at") + self._margin <= moment.released
            return (int64(rows, "tick") <= moment.passed) & (is_skip | is_past)

        expired = self._waiting.take_where(is_expired)
        return self._answer(expired, Result.NOT_FOUND, "no such message has come")

    def rebuild(self, rebuilt: Rebuilt, now: int) -> None:
        """Begins with what was taken back, or delivered, before."""
        take_back(self.taken_back, rebuilt.taken)
        self.taken_back.save()
        self.unwanted = rebuilt.unwanted
        self._requests.add(rebuilt.request_ids, now)

    def take_cancels(self) -> pa.Table:
        """Removes and returns the rows of type CANCEL that are to be sealed."""
        return self._cancels.take_all()

    def save(self) -> None:
        """Writes what is not in the store yet."""
        self.taken_back.save()
        self._waiting.save()
        data = json.dumps([self._cancels.n_chunks, self._cancels.n_rows, self.unwanted]).encode()
        if data != self._saved:
            self._store.put(_META, (0, 0), data)
            self._saved = data

    def _wait(self, commands: pa.Table, moment: Moment) -> list[pa.Table]:
        """Keeps commands for messages that are not known, or answers those that can't come."""
        is_cancel = pc.equal(commands["kind"], CANCEL).to_numpy(zero_copy_only=False)
        has_all_come = moment.passed >= moment.tick
        is_past = is_cancel & (int64(commands, "deliver_at") <= moment.released) & has_all_come
        is_nowhere = ~is_cancel & has_all_come
        waiting = where(commands, ~is_past & ~is_nowhere)
        self._waiting.add(waiting, moment.tick)
        outcomes = [
            self._answer(where(commands, is_past), Result.TOO_LATE, "no such message is known, and its time is past"),
            self._answer(where(commands, is_nowhere), Result.NOT_FOUND, "the topic has no such message"),
            self._answer(waiting, Result.WAITING, "no such message has come yet"),
        ]
        # As in PIP-423, a cancel in advance is due two ticks before the message that it is for.
        due = np.maximum(int64(waiting, "deliver_at") - self._margin, moment.now)
        times = pa.array(due[_each_subscription(waiting, self._subscriptions)[0]])
        self._cancels.add(_cancel_rows(outcomes[2], times))
        return outcomes

    def _apply(self, commands: pa.Table, known: pa.Table, is_released: BoolArray) -> tuple[pa.Table, pa.Table]:
        """Takes back what commands name; returns the outcomes, and the commands whose entry is not known."""
        command, row = _match(commands, known)
        unmatched = np.ones(commands.num_rows, np.bool_)
        unmatched[command] = False
        batch_index = int64(commands, "batch_index")[command]
        row_index, size = int64(known, "batch_index")[row], int64(known, "batch_size")[row]
        is_named = (batch_index < 0) | (batch_index == row_index) | ((batch_index == 0) & (row_index < 0))
        outcomes = self._out_of_batch(commands, command, batch_index, size, is_named)
        command, row = command[is_named], row[is_named]
        order = np.lexsort((row_index[is_named], command))
        command, row = command[order], row[order]

        rows = known.take(pa.array(row))
        released = is_released[row]
        is_whole = int64(commands, "batch_index")[command] < 0
        masks = int64(commands, "subscriptions")[command]
        until = int64(rows, "deliver_at") + self._margin
        ledgers, entries, indexes = _position(rows)
        sizes = int64(rows, "batch_size")
        changed = np.zeros(len(command), np.bool_)
        for subscription in range(int(masks.max(initial=0)).bit_length()):
            chosen = np.flatnonzero(masks >> subscription & 1)
            taken = self.taken_back.contains(subscription, ledgers[chosen], entries[chosen], indexes[chosen])
            result = np.where(
                taken, Result.ALREADY_APPLIED, np.where(released[chosen], Result.TOO_LATE, Result.APPLIED)
            )
            applied = np.flatnonzero(result == Result.APPLIED)
            _, first = np.unique(row[chosen[applied]], return_index=True)
            repeated = np.ones(len(applied), np.bool_)
            repeated[first] = False
            result[applied[repeated]] = Result.ALREADY_APPLIED
            applied = applied[~repeated]

            collapsed, starts = _entry_results(command[chosen], is_whole[chosen], result)
            as_entry = (collapsed[applied] | (indexes[chosen[applied]] < 0)).astype(np.bool_)
            now = chosen[applied]
            whole, single = now[as_entry], now[~as_entry]
            self.taken_back.add_entries(subscription, ledgers[whole], entries[whole], until[whole])
            self.taken_back.add_messages(
                subscription, ledgers[single], entries[single], indexes[single], sizes[single], until[single]
            )
            changed[now] = True
            outcomes.append(
                self._outcomes(
                    commands, command[chosen], rows.take(pa.array(chosen)), result, collapsed, starts, subscription
                )
            )
        self._count_unwanted(rows, row, changed)
        result_table = concat(outcomes, OUTCOMES)
        applied_outcomes = result_table.filter(pc.equal(result_table["result"], int(Result.APPLIED)))
        self._cancels.add(_cancel_rows(applied_outcomes, _times_of(applied_outcomes, known)))
        return result_table, where(commands, unmatched)

    def _count_unwanted(self, rows: pa.Table, row: Int64Array, changed: BoolArray) -> None:
        """Counts the messages that the last subscription does not want any more."""
        _, first = np.unique(row[changed], return_index=True)
        if len(first):
            touched = rows.take(pa.array(np.flatnonzero(changed)[first]))
            self.unwanted += int((self.wants(touched) == 0).sum())

    def _out_of_batch(
        self, commands: pa.Table, command: Int64Array, batch_index: Int64Array, size: Int64Array, is_named: BoolArray
    ) -> list[pa.Table]:
        """Outcomes for batch indexes that are not among an entry's known messages."""
        named = np.zeros(commands.num_rows, np.bool_)
        named[command[is_named]] = True
        sizes = np.zeros(commands.num_rows, np.int64)
        sizes[command] = size
        left = np.flatnonzero((sizes > 0) & ~named)
        if not len(left):
            return []
        return [self._answer(commands.take(pa.array(left)), Result.INVALID, "the entry has no such batch index")]

    def _outcomes(
        self,
        commands: pa.Table,
        command: Int64Array,
        rows: pa.Table,
        result: Int64Array,
        collapsed: BoolArray,
        starts: BoolArray,
        subscription: int,
    ) -> pa.Table:
        """A row for each command and message, and one for an entry whose messages share a result."""
        kept = np.flatnonzero(starts | ~collapsed)
        of_command = commands.take(pa.array(command[kept]))
        of_row = rows.take(pa.array(kept))
        results = result[kept]
        names = [self._subscriptions[topic][subscription] for topic in of_command["topic"].to_pylist()]
        reasons = pa.array(np.where(results == Result.TOO_LATE, "released", ""), pa.string())
        values = {
            "request_id": of_command["request_id"],
            "topic": of_command["topic"],
            "subscription": pa.array(names, pa.string()),
            "partition": of_row["partition"],
            "ledger_id": of_row["ledger_id"],
            "entry_id": of_row["entry_id"],
            "batch_index": pa.array(np.where(collapsed[kept], -1, int64(of_row, "batch_index")), pa.int32()),
            "result": pa.array(results, pa.int32()),
            "reason": reasons,
            "issued_by": of_command["issued_by"],
            "issued_at": of_command["issued_at"],
        }
        return pa.table([values[f.name] for f in OUTCOMES], schema=OUTCOMES)

    def _answer(self, commands: pa.Table, result: int | None = None, reason: str = "") -> pa.Table:
        """The same outcome for all that each command names; without a result, the one that the row brings."""
        if not commands.num_rows:
            return OUTCOMES.empty_table()
        index, names = _each_subscription(commands, self._subscriptions)
        rows = commands.take(pa.array(index))
        n = rows.num_rows
        values = {name: rows[name] for name in OUTCOMES.names}
        values["subscription"] = pa.array(names, pa.string())
        if result is not None:
            values["result"] = pa.array([int(result)] * n, pa.int32())
            values["reason"] = pa.array([reason] * n, pa.string())
        return pa.table([values[f.name] for f in OUTCOMES], schema=OUTCOMES)


def with_released(found: pa.Table) -> pa.Table:
    """Booked messages, and beside them the rest of their entries: what is in no bucket was released long ago.

    A row with batch_index -1 of an entry of several messages stands for an entry of which nothing is in a bucket.
    """
    if not found.num_rows:
        return found
    entries = found.group_by(["ledger_id", "entry_id"]).aggregate([("batch_size", "max"), ("batch_index", "count")])
    missing = entries.filter(pc.greater(entries["batch_size_max"], entries["batch_index_count"]))
    if not missing.num_rows:
        return found
    parts = found.join(missing.select(["ledger_id", "entry_id"]), ["ledger_id", "entry_id"], join_type="inner")
    there: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in parts.to_pylist():
        there.setdefault((row["ledger_id"], row["entry_id"]), []).append(row)
    rest = [
        {**rows[0], "batch_index": index, "deliver_at": PAST}
        for rows in there.values()
        for index in set(range(rows[0]["batch_size"])) - {row["batch_index"] for row in rows}
    ]
    is_stand_in = (int64(found, "batch_index") < 0) & (int64(found, "batch_size") > 1)
    return pa.concat_tables([where(found, ~is_stand_in), pa.Table.from_pylist(rest, schema=KNOWN)])


def _match(commands: pa.Table, known: pa.Table) -> tuple[Int64Array, Int64Array]:
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


def _entry_results(command: Int64Array, is_whole: BoolArray, result: Int64Array) -> tuple[BoolArray, BoolArray]:
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


def _each_subscription(
    commands: pa.Table, subscriptions: Mapping[str, Sequence[str]]
) -> tuple[Int64Array, list[str | None]]:
    """A row for each command and subscription that it is for: the command's index, and the subscription's name."""
    index: list[int] = []
    names: list[str | None] = []
    for i, (topic, mask, own) in enumerate(
        zip(
            commands["topic"].to_pylist(),
            commands["subscriptions"].to_pylist(),
            commands["subscription"].to_pylist(),
            strict=True,
        )
    ):
        of_command = [s for bit, s in enumerate(subscriptions.get(topic, ())) if mask >> bit & 1] or [own]
        index += [i] * len(of_command)
        names += of_command
    return np.array(index, dtype=np.int64), names


def _cancel_rows(outcomes: pa.Table, deliver_at: pa.Array) -> pa.Table:
    return outcomes.select(CANCELS.names[:-1]).append_column(CANCELS.field("deliver_at"), deliver_at)


def _times_of(outcomes: pa.Table, known: pa.Table) -> pa.Array:
    """When the entries of outcomes are due: the last of an entry's known messages."""
    times: dict[tuple[int, int], int] = {}
    for ledger, entry, due in zip(
        known["ledger_id"].to_pylist(), known["entry_id"].to_pylist(), known["deliver_at"].to_pylist(), strict=True
    ):
        times[ledger, entry] = max(due, times.get((ledger, entry), 0))
    positions = zip(outcomes["ledger_id"].to_pylist(), outcomes["entry_id"].to_pylist(), strict=True)
    return pa.array([times[position] for position in positions], pa.int64())


def _position(rows: pa.Table) -> tuple[Int64Array, Int64Array, Int64Array]:
    return int64(rows, "ledger_id"), int64(rows, "entry_id"), int64(rows, "batch_index")
