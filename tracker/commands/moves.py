"""Moves: messages that got another time, because a command rescheduled them or because they are held back."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tracker.buckets.index_bits import by_ledger
from tracker.commands.cancelled import codes, subscriptions_of
from tracker.messages import BoolArray, Int64Array, int64, where
from tracker.schedule import MAX_TIME_MILLIS
from tracker.store import Store

# The time of a message that is held back, ms since the epoch: beyond any that a message can come with.
HELD_DELIVER_AT = MAX_TIME_MILLIS + 1

_TABLE = "moved"
_DIRECTORY = "moved_ledgers"

# Columns: TIME is that of the row that counts, with its attempt in the bits from _ATTEMPT_BIT on; UNTIL when the last
# of the earlier rows is past; ms since the epoch.
_CODE, _SEQUENCE, _TIME, _UNTIL = range(4)

_ATTEMPT_BIT = 48  # a time is below 2^48
_TIME_MASK = (1 << _ATTEMPT_BIT) - 1


def held(rows: pa.Table) -> pa.Table:
    """Filters MESSAGES: the rows that are held back."""
    return where(rows, int64(rows, "deliver_at") >= HELD_DELIVER_AT) if rows.num_rows else rows


class Moved:
    """The last move of each message, for each subscription: its sequence, and the time of the message's new row.

    A message that was moved has several rows in the tracker: the one it came with, and one for each move and
    subscription. Only that of its last move is delivered. A ledger's moves are dropped when the last of these rows is
    past.

    Args:
        store: where the moves are kept, a table for each ledger and subscription.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tables: dict[tuple[int, int], Int64Array] = {}
        self._changed: set[tuple[int, int]] = set()
        data = store.get(_DIRECTORY, (0, 0)) or b""
        self._saved = data
        # By ledger: the subscriptions as bits, and when the last of its rows is past, ms since the epoch.
        self._ledgers: dict[int, list[int]] = {
            row[0]: row[1:] for row in np.frombuffer(data, dtype=np.int64).reshape(-1, 3).tolist()
        }

    def __bool__(self) -> bool:
        """Whether anything has been moved."""
        return bool(self._ledgers)

    def find(
        self, subscription: int, ledger_ids: Int64Array, entry_ids: Int64Array, batch_indexes: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Returns the last moves of messages for a subscription.

        Args:
            subscription: its number.
            ledger_ids: int64, (n,).
            entry_ids: int64, (n,).
            batch_indexes: int64, (n,); -1 and 0 are the same: the first message of the entry.

        Returns:
            three arrays, int64, (n,): the move's sequence, the time to which the message was moved, and the time at
            which its earlier rows are past, both ms since the epoch; 0 where there is no move.
        """
        sequences, times, until = np.zeros((3, len(ledger_ids)), dtype=np.int64)
        if self._ledgers:
            for ledger, rows in by_ledger(ledger_ids):
                entry = self._ledgers.get(ledger)
                if entry is None or not entry[0] >> subscription & 1:
                    continue
                table = self._load(ledger, subscription)
                wanted = codes(entry_ids[rows], batch_indexes[rows])
                at = np.minimum(np.searchsorted(table[:, _CODE], wanted), len(table) - 1)
                is_there = table[at, _CODE] == wanted
                sequences[rows] = np.where(is_there, table[at, _SEQUENCE], 0)
                times[rows] = np.where(is_there, table[at, _TIME] & _TIME_MASK, 0)
                until[rows] = np.where(is_there, table[at, _UNTIL], 0)
        return sequences, times, until

    def are_retries(
        self, subscription: int, ledger_ids: Int64Array, entry_ids: Int64Array, batch_indexes: Int64Array
    ) -> BoolArray:
        """Tells which messages have a last move for a subscription that is of a retry; arguments as of `find`.

        Returns:
            bool, (n,).
        """
        are_retries = np.zeros(len(ledger_ids), np.bool_)
        for ledger, rows in by_ledger(ledger_ids) if self._ledgers else ():
            entry = self._ledgers.get(ledger)
            if entry is not None and entry[0] >> subscription & 1:
                table = self._load(ledger, subscription)
                retried = table[table[:, _TIME] > _TIME_MASK, _CODE]
                are_retries[rows] = np.isin(codes(entry_ids[rows], batch_indexes[rows]), retried)
        return are_retries

    def put(
        self,
        subscription: int,
        ledger_ids: Int64Array,
        entry_ids: Int64Array,
        batch_indexes: Int64Array,
        sequences: Int64Array,
        times: Int64Array,
        until: Int64Array,
        attempts: Int64Array,
    ) -> None:
        """Adds moves of distinct messages for a subscription.

        Args:
            subscription: its number.
            ledger_ids: int64, (n,).
            entry_ids: int64, (n,).
            batch_indexes: int64, (n,); -1 and 0 are the same: the first message of the entry.
            sequences: int64, (n,), of the moves.
            times: int64, (n,), ms since the epoch: to which the messages are moved.
            until: int64, (n,), ms since the epoch: when the rows that the messages had before are past.
            attempts: int64, (n,): the number of each new row's retry; 0: it is none.
        """
        for ledger, rows in by_ledger(ledger_ids):
            before = self._load(ledger, subscription)
            of = codes(entry_ids[rows], batch_indexes[rows])
            stored_times = times[rows] | attempts[rows] << _ATTEMPT_BIT
            new = np.stack([of, sequences[rows], stored_times, _unless_held(until[rows])], axis=1)
            new = new[np.argsort(new[:, _CODE])]
            place = np.searchsorted(before[:, _CODE], new[:, _CODE])
            is_again = place < len(before)
            is_again[is_again] = before[place[is_again], _CODE] == new[is_again, _CODE]
            earlier = before[place[is_again]]
            past = np.maximum(earlier[:, _UNTIL], _unless_held(earlier[:, _TIME] & _TIME_MASK))
            new[is_again, _UNTIL] = np.maximum(new[is_again, _UNTIL], past)
            table = before.copy()
            table[place[is_again]] = new[is_again]
            if not is_again.all():
                table = np.insert(table, place[~is_again], new[~is_again], axis=0)
            self._tables[ledger, subscription] = table
            self._ledgers.setdefault(ledger, [0, 0])[0] |= 1 << subscription
            self._changed.add((ledger, subscription))

    def drop_expired(self, cutoff: int) -> None:
        """Drops the ledgers whose rows are all past at the cutoff, ms since the epoch."""
        self.save()
        for ledger in [ledger for ledger, entry in self._ledgers.items() if entry[1] <= cutoff]:
            for subscription in subscriptions_of(self._ledgers.pop(ledger)[0]):
                self._tables.pop((ledger, subscription), None)
                self._store.remove(_TABLE, (ledger, subscription))

    def save(self) -> None:
        """Writes what is not in the store yet."""
        for key in self._changed:
            self._store.put(_TABLE, key, self._tables[key].tobytes())
        for ledger in {ledger for ledger, _ in self._changed}:
            entry = self._ledgers[ledger]
            tables = [self._load(ledger, s) for s in subscriptions_of(entry[0])]
            entry[1] = max(int(max((t[:, _TIME] & _TIME_MASK).max(), t[:, _UNTIL].max())) for t in tables)
        self._changed.clear()
        data = np.array([[ledger, *entry] for ledger, entry in self._ledgers.items()], dtype=np.int64).tobytes()
        if data != self._saved:
            self._store.put(_DIRECTORY, (0, 0), data)
            self._saved = data

    def _load(self, ledger: int, subscription: int) -> Int64Array:
        """Returns the table, int64, (n, 4): code of entry and batch index, sequence, time, until; sorted by code."""
        key = (ledger, subscription)
        if key not in self._tables:
            data = self._store.get(_TABLE, key) or b""
            self._tables[key] = np.frombuffer(data, dtype=np.int64).reshape(-1, 4)
        return self._tables[key]


def _unless_held(times: Int64Array) -> Int64Array:
    """Returns times with 0 for HELD_DELIVER_AT.

    A row that was held back is not loaded again, so no move needs to be remembered for it once another row counts.
    """
    return np.where(times >= HELD_DELIVER_AT, 0, times)
