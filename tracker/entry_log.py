"""Entries that came in, kept until they can be booked."""

from __future__ import annotations

import json

import pyarrow as pa

from tracker.messages import MESSAGES, concat, int64, pack, unpack, where
from tracker.store import Store

_TABLE = "entries"
_LIST = "entries_list"

ENTRY_COLUMNS = ["topic", "partition", "ledger_id", "entry_id", "first_index", "batch_size", "publish_time"]
EMPTY_ENTRIES = MESSAGES.empty_table().select(ENTRY_COLUMNS)


class EntryLog:
    """A row an entry, by the turn in which it came in."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._saved = store.get(_LIST, (0, 0))
        self._chunks: dict[int, int] = {int(t): n for t, n in json.loads(self._saved)} if self._saved else {}

    def add(self, messages: pa.Table, turn: int) -> None:
        """Keeps the entries that the messages are from."""
        if not messages.num_rows:
            return
        entries = where(messages, int64(messages, "batch_index") <= 0).select(ENTRY_COLUMNS)
        chunk = self._chunks.get(turn, 0)
        self._store.put(_TABLE, (turn, chunk), pack(entries))
        self._chunks[turn] = chunk + 1

    def take(self, turn: int) -> pa.Table:
        """Removes and returns the entries of this turn and earlier ones."""
        taken = []
        for past in sorted(t for t in self._chunks if t <= turn):
            for chunk in range(self._chunks.pop(past)):
                data = self._store.get(_TABLE, (past, chunk))
                assert data is not None, f"the entries of turn {past} have lost part {chunk}"
                taken.append(unpack(data))
                self._store.remove(_TABLE, (past, chunk))
        return concat(taken, EMPTY_ENTRIES.schema)

    def save(self) -> None:
        """Writes what is not in the store yet."""
        data = json.dumps(list(self._chunks.items()), separators=(",", ":")).encode()
        if data != self._saved:
            self._store.put(_LIST, (0, 0), data)
            self._saved = data
