"""The commands that wait for their message, because it has not come in yet."""

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
from tracker.commands.kinds import CANCEL
from tracker.commands.schema import COMMAND_ROWS, MAX_MESSAGES
from tracker.messages import BoolArray, concat, empty_table, int64, is_among, typed, where, with_columns
from tracker.packing import pack, unpack
from tracker.properties.schedule import MAX_TIME_MILLIS
from tracker.store import Store, get_present

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
    """Keeps commands, by ledger, until their message comes in or can no longer come in.

    Args:
        store: where they are kept.
    """

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
        is_cancel = pc.equal(commands["kind"], CANCEL).to_numpy(zero_copy_only=False)
        has_room: BoolArray = len(self) + np.cumsum(~is_cancel) <= MOST_OTHERS
        counts = Counter(self._counts)
        for i, keys in zip(np.flatnonzero(is_cancel).tolist(), _keys_of(commands), strict=True):
            has_room[i] = all(counts[key] < MOST_CANCELS for key in keys)
            if has_room[i]:
                counts.update(keys)
        return has_room

    def add(self, commands: pa.Table, tick: int) -> None:
        """Adds commands of a tick, as COMMAND_ROWS."""
        if not commands.num_rows:
            return
        self._counts.update(key for keys in _keys_of(commands) for key in keys)
        self._add(commands.append_column("tick", pa.array([tick] * commands.num_rows, pa.int64())))

    def take(self, messages: pa.Table) -> pa.Table:
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
        for place, of_place in by_ledger(ledgers // _LEDGERS_TOGETHER):
            if place in self._stored:
                entries = messages.select(_ENTRY).take(pa.array(of_place))
                taken.append(self._take_where(place, partial(is_among, others=entries, keys=_ENTRY)))
        found = concat(taken, WAITING)
        return found.take(pa.array(np.argsort(int64(found, "ledger_id"), kind="stable")))

    def take_where(self, is_taken: Callable[[pa.Table], BoolArray], time: int) -> pa.Table:
        """Removes and returns, as WAITING, the commands that a function chooses.

        Args:
            is_taken: gets some commands, as WAITING, and returns which of them are taken: bool, (rows,). It takes no
                cancel whose time is later than `time`.
            time: ms since the epoch.
        """
        places = [place for place, stored in self._stored.items() if stored.first <= time]
        return concat([self._take_where(place, is_taken) for place in places], WAITING)

    def wait_anew(self, topics: Collection[str], tick: int) -> None:
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
        for place, of_place in by_ledger(int64(rows, "ledger_id") // _LEDGERS_TOGETHER):
            self._put(place, concat([self._get(place), rows.take(pa.array(of_place))], WAITING))

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
            is_cancel = pc.equal(rows["kind"], CANCEL).to_numpy(zero_copy_only=False)
            self._stored[place] = _Stored(
                rows.num_rows, int(np.where(is_cancel, int64(rows, "deliver_at"), 0).min(initial=MAX_TIME_MILLIS))
            )
        else:
            self._store.remove(_TABLE, (place, _TOGETHER))
            self._stored.pop(place, None)


def _keys_of(commands: pa.Table) -> Iterator[list[tuple[str, int]]]:
    """Yields for each cancel the (topic, subscription's number) that it is for; -1: those added later."""
    cancels = commands.filter(pc.equal(commands["kind"], CANCEL))
    columns = (cancels[name].to_pylist() for name in ("topic", "subscriptions", "also_later"))
    for topic, mask, also_later in zip(*columns, strict=True):
        yield [(topic, n) for n in range(mask.bit_length()) if mask >> n & 1] + [(topic, -1)] * bool(also_later)
