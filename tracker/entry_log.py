"""The entry log: messages that came in and are not durable yet, a row each, by the seal epoch in which they came."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from tracker.messages import MESSAGES, BoolArray, concat, int64, where
from tracker.packing import pack, unpack
from tracker.store import Store, get_present

_TABLE = "entries"
_LIST = "entries_list"

ENTRY_COLUMNS = [
    *("topic", "partition", "ledger_id", "entry_id", "first_index", "batch_size", "publish_time"),
    "producer_name",  # identifies an entry on another broker, where it has another id
]
ENTRIES = pa.schema(
    [
        *(MESSAGES.field(name) for name in ENTRY_COLUMNS),
        # When the first and the last message of the entry are due, ms since the epoch; last_due is null if it is equal.
        ("first_due", pa.int64()),
        ("last_due", pa.int64()),
    ]
)
EMPTY_ENTRIES = ENTRIES.empty_table()

_COLUMNS = [*ENTRY_COLUMNS, "batch_index", "deliver_at", "schedule_key"]
ENTRY_LOG_ROWS = MESSAGES.empty_table().select(_COLUMNS).schema


def entries_of(messages: pa.Table) -> pa.Table:
    """Returns the entries of messages, as ENTRIES, in the order of their first messages.

    Args:
        messages: with the columns ENTRY_COLUMNS, batch_index and deliver_at; all messages of each entry.
    """
    entries = where(messages, int64(messages, "batch_index") <= 0).select(ENTRY_COLUMNS)
    if not entries.num_rows:
        return EMPTY_ENTRIES
    ledger, entry, due = (int64(messages, name) for name in ("ledger_id", "entry_id", "deliver_at"))
    order = np.lexsort((entry, ledger))
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (np.diff(ledger[order]) != 0) | (np.diff(entry[order]) != 0)
    starts = np.flatnonzero(is_new)
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(is_new) - 1
    entry_groups = group[int64(messages, "batch_index") <= 0]
    first = np.minimum.reduceat(due[order], starts)[entry_groups]
    last = np.maximum.reduceat(due[order], starts)[entry_groups]
    entries = entries.append_column("first_due", pa.array(first))
    return entries.append_column("last_due", pa.array(last, mask=last == first))


class EntryLog:
    """Keeps the positions and times of messages until their entries are durable (see `tracker.tick.Tick`).

    Commands look durable messages up in the tables, and the other ones here.

    Args:
        store: where the log is kept.
        is_home: tells which rows are of entries that this shard writes to the table `entries`: bool, (rows,). The home
            of an entry logs all of its messages; another shard that has one of them, by its schedule key, logs it too.
    """

    def __init__(self, store: Store, is_home: Callable[[pa.Table], BoolArray]) -> None:
        self._store = store
        self._is_home = is_home
        self._saved = store.get(_LIST, (0, 0))
        self._chunks: dict[int, int] = {int(t): n for t, n in json.loads(self._saved)} if self._saved else {}

    def add_messages(self, messages: pa.Table, seal_epoch: int) -> None:
        """Adds messages.

        Args:
            messages: with the columns ENTRY_LOG_ROWS; all messages of an entry whose home is this shard.
            seal_epoch: number of the seal epoch in which they came.
        """
        if not messages.num_rows:
            return
        chunk = self._chunks.get(seal_epoch, 0)
        self._store.put(_TABLE, (seal_epoch, chunk), pack(messages.select(_COLUMNS)))
        self._chunks[seal_epoch] = chunk + 1

    def all_messages(self) -> pa.Table:
        """Returns the messages that are not durable yet, as ENTRY_LOG_ROWS."""
        rows = [unpack(self._get(seal_epoch, chunk)) for seal_epoch, n in self._chunks.items() for chunk in range(n)]
        return concat(rows, ENTRY_LOG_ROWS)

    def take_durable(self, seal_epoch: int) -> pa.Table:
        """Removes the messages of a seal epoch and of earlier ones.

        Returns:
            as ENTRIES: the entries of these messages, if their home is this shard.
        """
        taken = []
        for past in sorted(t for t in self._chunks if t <= seal_epoch):
            for chunk in range(self._chunks.pop(past)):
                taken.append(unpack(self._get(past, chunk)))
                self._store.remove(_TABLE, (past, chunk))
        if not taken:
            return EMPTY_ENTRIES
        rows = concat(taken, ENTRY_LOG_ROWS)
        return entries_of(where(rows, self._is_home(rows)))

    def save(self) -> None:
        """Writes the changes to the store."""
        data = json.dumps(list(self._chunks.items()), separators=(",", ":")).encode()
        if data != self._saved:
            self._store.put(_LIST, (0, 0), data)
            self._saved = data

    def _get(self, seal_epoch: int, chunk: int) -> bytes:
        return get_present(self._store, _TABLE, (seal_epoch, chunk))
