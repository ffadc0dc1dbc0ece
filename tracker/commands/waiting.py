"""Commands that wait for their message, which has not come in yet, and when that is over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.index_bits import by_ledger
from tracker.commands.kinds import CANCELLING_KINDS, OPERATIONS
from tracker.commands.match import each_subscription
from tracker.commands.outcomes import answers_of, command_steps
from tracker.context import Context
from tracker.due_time import MAX_TIME_MILLIS
from tracker.message_state.state import MessageState
from tracker.messages import (
    BoolArray,
    are_equal_to_any,
    concat,
    empty_table,
    int64,
    is_among,
    typed,
    where,
    with_columns,
)
from tracker.packing import pack, unpack
from tracker.schemas import COMMAND_ROWS, MAX_MESSAGES
from tracker.store import Store, get_present
from tracker.subscriptions import by_topic
from tracker.wire.delaylake_pb2 import Result

_TABLE = "waiting"

_LEDGERS = "waiting_ledgers"  # of an earlier program

_INDEX = "waiting_index"

# The commands for so many ledgers are stored together: a table of few rows takes 3 KB.
_LEDGERS_TOGETHER = 1_024

# The most waiting cancels that a subscription of a topic may have in a shard: one for each message. They may wait for
# years, the other kinds only until all has come that was published before them.
MOST_CANCELS = MAX_MESSAGES

MOST_OTHERS = 1_000_000  # the most waiting commands of the other kinds in a shard

_TOGETHER = 1  # the second part of the key of tables in the store; those of an earlier program have 0

_ENTRY = ["ledger_id", "entry_id"]

# `tick`: the tick since which the command waits.
WAITING = COMMAND_ROWS.append(pa.field("tick", pa.int64()))


class _Stored(NamedTuple):
    """What is known of the commands that are stored together."""

    n: int  # rows
    first: int  # the least time after which one of them no longer waits, ms since the epoch; 0: at any time


class WaitingCommands:
    """Keeps commands, by ledger, until their message comes in or can no longer come in."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._saved = store.get(_INDEX, (0, 0)) or b""
        stored, counts = json.loads(self._saved) if self._saved else ([], [])
        self._stored: dict[int, _Stored] = {place: _Stored(n, first) for place, n, first in stored}
        # The number of cancels by topic and subscription's number.
        self._counts: Counter[tuple[str, int]] = Counter({(topic, number): n for topic, number, n in counts})
        if not self._saved and (earlier := store.get(_LEDGERS, (0, 0))):
            self._take_over(np.frombuffer(earlier, np.int64).reshape(-1, 2)[:, 0].tolist())

    def __len__(self) -> int:
        """The number of rows; a command has one for each message or entry that it names."""
        return sum(stored.n for stored in self._stored.values())

    def have_room(self, commands: pa.Table) -> BoolArray:
        """Tells which commands may be added within MOST_CANCELS and MOST_OTHERS: bool, (rows,).

        Args:
            commands: as COMMAND_ROWS; each counts for those after it.
        """
        is_cancel = _are_ahead(commands)
        has_room: BoolArray = len(self) + np.cumsum(~is_cancel) <= MOST_OTHERS
        counts = Counter(self._counts)
        for i, keys in zip(np.flatnonzero(is_cancel).tolist(), _keys_of(commands), strict=True):
            has_room[i] = all(counts[key] < MOST_CANCELS for key in keys)
            if has_room[i]:
                counts.update(keys)
        return has_room

    def add_commands(self, commands: pa.Table, tick: int) -> None:
        """Adds commands of a tick, as COMMAND_ROWS."""
        if not commands.num_rows:
            return
        self._counts.update(key for keys in _keys_of(commands) for key in keys)
        self._add(commands.append_column("tick", pa.array([tick] * commands.num_rows, pa.int64())))

    def add_missing(self, commands: pa.Table, tick: int) -> None:
        """Adds those of some commands, as COMMAND_ROWS, that do not wait: after a rebuild all wait in each shard."""
        waits = np.zeros(commands.num_rows, np.bool_)
        for place, place_rows in by_ledger(int64(commands, "ledger_id") // _LEDGERS_TOGETHER):
            if place in self._stored:
                waits[place_rows] = _are_of(commands.take(pa.array(place_rows)), self._get(place))
        self.add_commands(where(commands, ~waits), tick)

    def take_commands(self, messages: pa.Table) -> pa.Table:
        """Removes and returns the commands that wait for the entries of some messages.

        Args:
            messages: with ledger_id and entry_id, int64 without nulls, (n,), in any order.

        Returns:
            as WAITING, by ledger, in the order in which they were added.
        """
        if not self._stored or not messages.num_rows:
            return empty_table(WAITING)
        ledgers = int64(messages, "ledger_id")
        taken = []
        for place, place_rows in by_ledger(ledgers // _LEDGERS_TOGETHER):
            if place in self._stored:
                entries = messages.select(_ENTRY).take(pa.array(place_rows))
                taken.append(self._take_where(place, partial(is_among, others=entries, keys=_ENTRY)))
        found = concat(taken, WAITING)
        return found.take(pa.array(np.argsort(int64(found, "ledger_id"), kind="stable")))

    def take_commands_where(self, is_taken: Callable[[pa.Table], BoolArray], time: int) -> pa.Table:
        """Removes and returns, as WAITING, the commands that a function chooses.

        Args:
            is_taken: gets some commands, as WAITING, and returns which of them are taken: bool, (rows,). It takes no
                cancel whose time is later than `time`.
            time: ms since the epoch.
        """
        places = [place for place, stored in self._stored.items() if stored.first <= time]
        return concat([self._take_where(place, is_taken) for place in places], WAITING)

    def wait_again(self, topics: Collection[str], tick: int) -> None:
        """Sets the tick since which commands for some topics wait: their messages may have been published until now."""
        for place in list(self._stored):
            rows = self._get(place)
            is_of = pc.is_in(rows["topic"], pa.array(sorted(topics), pa.string()))
            if pc.any(is_of).as_py():
                self._put(place, with_columns(rows, tick=pc.if_else(is_of, tick, rows["tick"])))

    def save(self) -> None:
        """Writes the changes to the store."""
        stored = [[place, *stored] for place, stored in self._stored.items()]
        counts = [[topic, number, n] for (topic, number), n in self._counts.items() if n > 0]
        data = json.dumps([stored, counts], separators=(",", ":")).encode()
        if data != self._saved:
            self._store.put(_INDEX, (0, 0), data)
            self._saved = data

    def _take_over(self, ledgers: list[int]) -> None:
        """Stores in this program's way the commands that an earlier program has stored for each ledger."""
        rows = concat([typed(unpack(get_present(self._store, _TABLE, (n, 0))), WAITING) for n in ledgers], WAITING)
        for ledger in ledgers:
            self._store.remove(_TABLE, (ledger, 0))
        self._store.remove(_LEDGERS, (0, 0))
        self._counts.update(key for keys in _keys_of(rows) for key in keys)
        self._add(rows)

    def _add(self, rows: pa.Table) -> None:
        for place, place_rows in by_ledger(int64(rows, "ledger_id") // _LEDGERS_TOGETHER):
            self._put(place, concat([self._get(place), rows.take(pa.array(place_rows))], WAITING))

    def _take_where(self, place: int, is_taken: Callable[[pa.Table], BoolArray]) -> pa.Table:
        rows = self._get(place)
        taken = is_taken(rows)
        if taken.any():
            self._counts.subtract(key for keys in _keys_of(where(rows, taken)) for key in keys)
            self._put(place, where(rows, ~taken))
        return where(rows, taken)

    def _get(self, place: int) -> pa.Table:
        if place not in self._stored:
            return empty_table(WAITING)
        return typed(unpack(get_present(self._store, _TABLE, (place, _TOGETHER))), WAITING)

    def _put(self, place: int, rows: pa.Table) -> None:
        if rows.num_rows:
            self._store.put(_TABLE, (place, _TOGETHER), pack(rows))
            is_cancel = _are_ahead(rows)
            self._stored[place] = _Stored(
                rows.num_rows, int(np.where(is_cancel, int64(rows, "deliver_at"), 0).min(initial=MAX_TIME_MILLIS))
            )
        else:
            self._store.remove(_TABLE, (place, _TOGETHER))
            self._stored.pop(place, None)


def _are_of(rows: pa.Table, others: pa.Table) -> BoolArray:
    """Tells which rows are of the same command, and for the same message, as one of the other rows: bool, (rows,)."""
    keys = ["request_id", "kind", *_ENTRY, "batch_index"]
    rows, others = (with_columns(t, request_id=pc.fill_null(t["request_id"], "")).select(keys) for t in (rows, others))
    return are_equal_to_any(rows, others)


def _keys_of(commands: pa.Table) -> Iterator[list[tuple[str, int]]]:
    """Yields for each cancel the (topic, subscription's number) that it is for; -1: those added later."""
    cancels = where(commands, _are_ahead(commands))
    columns = (cancels[name].to_pylist() for name in ("topic", "subscriptions", "also_later"))
    for topic, mask, also_later in zip(*columns, strict=True):
        yield [(topic, n) for n in range(mask.bit_length()) if mask >> n & 1] + [(topic, -1)] * bool(also_later)


_AHEAD = pa.array([kind for kind, operation in OPERATIONS.items() if operation.may_wait])
_KINDS_WITH_TIME = [kind for kind, operation in OPERATIONS.items() if operation.names_time]


def _are_ahead(commands: pa.Table) -> BoolArray:
    """Tells which commands may come long before their messages, bool, (rows,): the cancels."""
    are_ahead: BoolArray = pc.is_in(commands["kind"], _AHEAD).to_numpy(zero_copy_only=False)
    return are_ahead


_NO_ROOM = "no such message is known, and too many commands wait already for others that have not come"


class EarlyCommands:
    """Decides which commands wait for their message, for how long, and how they are answered.

    Args:
        state: records the cancels that wait, for the delayed index.
        waiting: keeps the commands that wait.
    """

    def __init__(self, context: Context, state: MessageState, waiting: WaitingCommands) -> None:
        self._context = context
        self._subscriptions = context.subscriptions
        self._state = state
        self._waiting = waiting

    def answer_unmatched(self, commands: pa.Table) -> list[pa.Table]:
        """Answers commands whose message is not known, and keeps those whose message may still come in.

        Args:
            commands: as COMMAND_ROWS, at least one.

        Returns:
            tables as OUTCOME_ROWS.
        """
        is_cancel = _are_ahead(commands)
        has_all_come = (self._context.ingested_through >= self._context.tick) & ~self._is_without_route(commands)
        is_past = is_cancel & (int64(commands, "deliver_at") <= self._context.released) & has_all_come
        is_nowhere = ~is_cancel & has_all_come
        waits = ~is_past & ~is_nowhere
        has_room = np.ones(commands.num_rows, np.bool_)
        has_room[waits] = self._waiting.have_room(where(commands, waits))
        waiting = where(commands, waits & has_room)
        self._waiting.add_commands(waiting, self._context.tick)
        # Several shards may get a command, because of schedule keys. The home of its entry answers it.
        is_home = self._context.are_answered_here(commands)
        commands, has_room = where(commands, is_home), has_room[is_home]
        is_past, is_nowhere = is_past[is_home], is_nowhere[is_home]
        waiting = where(waiting, self._context.are_answered_here(waiting))
        outcomes = [
            answers_of(
                self._subscriptions,
                where(commands, is_past),
                Result.TOO_LATE,
                "no such message is known, and its time is past",
            ),
            answers_of(
                self._subscriptions, where(commands, is_nowhere), Result.NOT_FOUND, "the topic has no such message"
            ),
            answers_of(self._subscriptions, where(commands, ~has_room), Result.INVALID, _NO_ROOM),
            self._answer_waiting(waiting),
        ]
        # As in PIP-423, a cancel in advance is due two ticks before the message that it is for.
        taking = waiting.filter(pc.is_in(waiting["kind"], pa.array(CANCELLING_KINDS)))
        index, names = each_subscription(taking, self._subscriptions.names)
        due = np.maximum(int64(taking, "deliver_at") - self._context.remembered_millis, self._context.now)[index]
        rows = with_columns(taking.take(pa.array(index)), subscription=pa.array(names, pa.string()))
        self._state.record_operation("CANCEL", rows, self._context.next_sequence(), due)
        return outcomes

    def expire_waiting(self) -> pa.Table:
        """Removes waiting commands whose message can no longer come in; returns their outcomes, as OUTCOME_ROWS."""

        def is_expired(rows: pa.Table) -> BoolArray:
            is_cancel = _are_ahead(rows)
            is_past = int64(rows, "deliver_at") + self._context.remembered_millis <= self._context.released
            return (
                (int64(rows, "tick") <= self._context.ingested_through)
                & (~is_cancel | is_past)
                & ~self._is_without_route(rows)
            )

        expired = self._waiting.take_commands_where(
            is_expired, self._context.released - self._context.remembered_millis
        )
        expired = where(expired, self._context.are_answered_here(expired))
        return answers_of(self._subscriptions, expired, Result.NOT_FOUND, "no such message has come")

    def _answer_waiting(self, commands: pa.Table) -> pa.Table:
        """Builds the WAITING outcomes of commands, with the sequences and times that a rebuild needs.

        The rows of one command have the same sequence.
        """
        answers = answers_of(self._subscriptions, commands, Result.WAITING, "no such message has come yet")
        if not answers.num_rows:
            return answers
        sequences = self._context.next_sequences(command_steps(answers))
        index, _ = each_subscription(commands, self._subscriptions.names)
        has_time = pc.is_in(commands["kind"], pa.array(_KINDS_WITH_TIME))
        times = pc.if_else(has_time, commands["deliver_at"], None)
        # A retry has a time only after a rebuild. Until then its wait counts from now on.
        after = pc.greater(pc.fill_null(commands["after_millis"], 0), 0)
        times = pc.if_else(after, pc.add(self._context.now, commands["after_millis"]), times).take(pa.array(index))
        return with_columns(answers, sequence=pa.array(sequences), deliver_at=times)

    def _is_without_route(self, rows: pa.Table) -> BoolArray:
        """Tells which commands are for topics without a route: these are not read, so a message may still come in."""
        return by_topic(rows, lambda topic: topic in self._subscriptions.without_route) > 0
