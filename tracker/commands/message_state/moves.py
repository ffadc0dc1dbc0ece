"""Moves: messages that got another time, as they were rescheduled, retried, held back, shaped, or recur."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tracker.buckets.index_bits import by_ledger
from tracker.commands.message_state.cancelled import codes, subscriptions_of
from tracker.commands.message_state.moved_table import (
    ATTEMPT_BIT,
    CODE,
    SEQUENCE,
    TIME,
    TIME_MASK,
    UNTIL,
    MovedTable,
    zero_where_held,
)
from tracker.messages import BoolArray, Int64Array, int64, where
from tracker.properties.schedule import MAX_TIME_MILLIS
from tracker.store import Store

# The deliver_at of a message that is held back, ms since the epoch: later than any with which a message can come in.
HELD_DELIVER_AT = MAX_TIME_MILLIS + 1

# The deliver_at of the next occurrence of a recurring message that is paused, ms since the epoch.
PAUSED_DELIVER_AT = HELD_DELIVER_AT + 1

_DIRECTORY = "moved_ledgers"


def held(rows: pa.Table) -> pa.Table:
    """Returns the rows that are held back. Rows of paused schedules are not. Both tables are as MESSAGES."""
    return where(rows, int64(rows, "deliver_at") == HELD_DELIVER_AT) if rows.num_rows else rows


class Moved:
    """The last move of each message, for each subscription: its sequence, and the time of the message's new row.

    A moved message has several rows in the tracker: the one with which it came, and one for each move and subscription.
    For a subscription, only the row of the last move is delivered. The moves of a ledger are dropped when the last of
    these rows is past.

    Args:
        store: where the moves are kept, in a `MovedTable` for each ledger and subscription.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tables: dict[tuple[int, int], MovedTable] = {}
        data = store.get(_DIRECTORY, (0, 0)) or b""
        self._saved = data
        # By ledger: the subscriptions with moves, as bits; when the last of their rows is past, ms since the epoch.
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
            three arrays, int64, (n,): the move's sequence; the time to which the message was moved; the time at which
            its earlier rows are past; times in ms since the epoch. All are 0 where there is no move.
        """
        sequences, times, until = np.zeros((3, len(ledger_ids)), dtype=np.int64)
        if self._ledgers:
            for ledger, rows in by_ledger(ledger_ids):
                entry = self._ledgers.get(ledger)
                if entry is None or not entry[0] >> subscription & 1:
                    continue
                wanted = codes(entry_ids[rows], batch_indexes[rows])
                table = self._table(ledger, subscription).rows_near(wanted)
                at = np.minimum(np.searchsorted(table[:, CODE], wanted), len(table) - 1)
                is_there = table[at, CODE] == wanted
                sequences[rows] = np.where(is_there, table[at, SEQUENCE], 0)
                times[rows] = np.where(is_there, table[at, TIME] & TIME_MASK, 0)
                until[rows] = np.where(is_there, table[at, UNTIL], 0)
        return sequences, times, until

    def attempts(
        self, subscription: int, ledger_ids: Int64Array, entry_ids: Int64Array, batch_indexes: Int64Array
    ) -> Int64Array:
        """Returns the retry number of each message's last move. The arguments are those of `find`.

        Returns:
            int64, (n,), from 1; 0: no move, or it is not that of a retry.
        """
        attempts = np.zeros(len(ledger_ids), np.int64)
        for ledger, rows in by_ledger(ledger_ids) if self._ledgers else ():
            entry = self._ledgers.get(ledger)
            if entry is not None and entry[0] >> subscription & 1:
                wanted = codes(entry_ids[rows], batch_indexes[rows])
                table = self._table(ledger, subscription).rows_near(wanted)
                at = np.minimum(np.searchsorted(table[:, CODE], wanted), len(table) - 1)
                attempts[rows] = np.where(table[at, CODE] == wanted, table[at, TIME] >> ATTEMPT_BIT, 0)
        return attempts

    def are_retries(
        self, subscription: int, ledger_ids: Int64Array, entry_ids: Int64Array, batch_indexes: Int64Array
    ) -> BoolArray:
        """Tells which messages were last moved by a retry. The arguments are those of `find`.

        Returns:
            bool, (n,).
        """
        return self.attempts(subscription, ledger_ids, entry_ids, batch_indexes) > 0

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
            sequences: int64, (n,): of the moves.
            times: int64, (n,), ms since the epoch: the times to which the messages are moved.
            until: int64, (n,), ms since the epoch: when the earlier rows of the messages are past.
            attempts: int64, (n,): the retry number of each new row; 0: no retry.
        """
        for ledger, rows in by_ledger(ledger_ids):
            of = codes(entry_ids[rows], batch_indexes[rows])
            stored_times = times[rows] | attempts[rows] << ATTEMPT_BIT
            new = np.stack([of, sequences[rows], stored_times, zero_where_held(until[rows])], axis=1)
            self._table(ledger, subscription).put(new[np.argsort(of)])
            self._ledgers.setdefault(ledger, [0, 0])[0] |= 1 << subscription

    def drop_expired(self, cutoff: int) -> None:
        """Drops the ledgers whose rows are all past at the cutoff, ms since the epoch."""
        self.save()
        for ledger in [ledger for ledger, entry in self._ledgers.items() if entry[1] <= cutoff]:
            for subscription in subscriptions_of(self._ledgers.pop(ledger)[0]):
                self._table(ledger, subscription).remove()
                del self._tables[ledger, subscription]

    def save(self) -> None:
        """Writes the changes to the store."""
        for ledger in {ledger for (ledger, _), table in self._tables.items() if table.save()}:
            entry = self._ledgers[ledger]
            entry[1] = max(self._table(ledger, s).last for s in subscriptions_of(entry[0]))
        data = np.array([[ledger, *entry] for ledger, entry in self._ledgers.items()], dtype=np.int64).tobytes()
        if data != self._saved:
            self._store.put(_DIRECTORY, (0, 0), data)
            self._saved = data

    def _table(self, ledger: int, subscription: int) -> MovedTable:
        key = ledger, subscription
        if key not in self._tables:
            self._tables[key] = MovedTable(self._store, ledger, subscription)
        return self._tables[key]
