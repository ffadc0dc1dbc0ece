"""The commands that wait for their message, because it has not come in yet."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.index_bits import by_ledger
from tracker.commands.schema import COMMAND_ROWS
from tracker.messages import BoolArray, Int64Array, concat, empty_table, int64, typed, where, with_columns
from tracker.packing import pack, unpack
from tracker.store import Store, get_present

_TABLE = "waiting"
_LEDGERS = "waiting_ledgers"

# `tick`: the tick since which the command waits.
WAITING = COMMAND_ROWS.append(pa.field("tick", pa.int64()))


class WaitingCommands:
    """Keeps commands, by ledger, until their message comes in or can no longer come in.

    Args:
        store: where they are kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._saved = store.get(_LEDGERS, (0, 0)) or b""
        pairs = np.frombuffer(self._saved, np.int64).reshape(-1, 2)
        self._ledgers: dict[int, int] = {ledger: n for ledger, n in pairs.tolist()}  # noqa: C416

    def __len__(self) -> int:
        """The number of rows; a command has one for each message or entry that it names."""
        return sum(self._ledgers.values())

    def add(self, commands: pa.Table, tick: int) -> None:
        """Adds commands of a tick, as COMMAND_ROWS."""
        if not commands.num_rows:
            return
        rows = commands.append_column("tick", pa.array([tick] * commands.num_rows, pa.int64()))
        for ledger, of_ledger in by_ledger(int64(rows, "ledger_id")):
            self._put(ledger, concat([self._get(ledger), rows.take(pa.array(of_ledger))], WAITING))

    def take(self, messages: pa.Table) -> pa.Table:
        """Removes and returns the commands that wait for the entries of some messages.

        Args:
            messages: with ledger_id and entry_id, int64 without nulls, (n,), in any order.

        Returns:
            as WAITING, by ledger, in the order in which they were added.
        """
        if not self._ledgers or not messages.num_rows:
            return empty_table(WAITING)
        taken = []
        for ledger, of_ledger in by_ledger(int64(messages, "ledger_id")):
            if ledger in self._ledgers:
                has_come = partial(_is_of, entry_ids=int64(messages, "entry_id")[of_ledger])
                taken.append(self._take_where(ledger, has_come))
        return concat(taken, WAITING)

    def take_where(self, is_taken: Callable[[pa.Table], BoolArray]) -> pa.Table:
        """Removes and returns, as WAITING, the commands that a function chooses.

        Args:
            is_taken: gets some commands, as WAITING, and returns which of them are taken: bool, (rows,).
        """
        return concat([self._take_where(ledger, is_taken) for ledger in list(self._ledgers)], WAITING)

    def wait_anew(self, topics: Collection[str], tick: int) -> None:
        """Sets the tick since which commands for some topics wait: their messages may have been published until now."""
        for ledger in list(self._ledgers):
            rows = self._get(ledger)
            is_of = pc.is_in(rows["topic"], pa.array(sorted(topics), pa.string()))
            if pc.any(is_of).as_py():
                self._put(ledger, with_columns(rows, tick=pc.if_else(is_of, tick, rows["tick"])))

    def save(self) -> None:
        """Writes the changes to the store."""
        data = np.array(list(self._ledgers.items()), dtype=np.int64).tobytes()
        if data != self._saved:
            self._store.put(_LEDGERS, (0, 0), data)
            self._saved = data

    def _take_where(self, ledger: int, is_taken: Callable[[pa.Table], BoolArray]) -> pa.Table:
        rows = self._get(ledger)
        taken = is_taken(rows)
        if taken.any():
            self._put(ledger, where(rows, ~taken))
        return where(rows, taken)

    def _get(self, ledger: int) -> pa.Table:
        if ledger not in self._ledgers:
            return empty_table(WAITING)
        return typed(unpack(get_present(self._store, _TABLE, (ledger, 0))), WAITING)

    def _put(self, ledger: int, rows: pa.Table) -> None:
        if rows.num_rows:
            self._store.put(_TABLE, (ledger, 0), pack(rows))
            self._ledgers[ledger] = rows.num_rows
        else:
            self._store.remove(_TABLE, (ledger, 0))
            self._ledgers.pop(ledger, None)


def _is_of(rows: pa.Table, entry_ids: Int64Array) -> BoolArray:
    """Tells which rows name one of the entries: bool, (rows,)."""
    return np.isin(int64(rows, "entry_id"), entry_ids)
