"""What commands have changed of messages, by subscription: which are cancelled, and the last move of each.

Roaring bitmaps: https://roaringbitmap.org
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyroaring import BitMap, BitMap64

from tracker.buckets.index_bits import among, by_ledger
from tracker.due_time import MAX_TIME_MILLIS
from tracker.messages import BoolArray, Int64Array, MessageIds, int64, where
from tracker.packing import pack_columns, unpack_columns
from tracker.store import Store, get_present

# Number of the codec; bytes before compression; bytes of the bitmap of entries; number of entries and messages.
_HEADER = struct.Struct("<BIII")

_BATCH_BITS = 20

_STORED = "taken_back"  # the table's name in the store

_CODECS = ["NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY"]


@dataclass(frozen=True)
class Compression:
    """How bitmaps are compressed: the codec (NONE, LZ4, ZLIB, ZSTD, SNAPPY), and the size from which on it is used."""

    codec: str = "NONE"
    threshold_bytes: int = 16_384


class _Ledgers:
    """By ledger: for which subscriptions something is known of its messages, when the last of it is past, and counts.

    Args:
        store: where this is kept.
        table: name of the store's table.
        n_counts: how many numbers are kept beside these two.
    """

    def __init__(self, store: Store, table: str, n_counts: int = 0) -> None:
        self._store, self._table, self._n_counts = store, table, n_counts
        self._saved = store.get(table, (0, 0)) or b""
        rows = np.frombuffer(self._saved, dtype=np.int64).reshape(-1, 3 + n_counts).tolist()
        # By ledger: the subscriptions as bits; when the last is past, ms since the epoch; the counts.
        self.entries: dict[int, list[int]] = {row[0]: row[1:] for row in rows}

    def add(self, ledger: int, subscription: int, until: int = 0) -> None:
        """Notes that something is known of a ledger's messages for a subscription, until a time, ms since the epoch."""
        entry = self.entries.setdefault(ledger, [0] * (2 + self._n_counts))
        entry[0] |= 1 << subscription
        entry[1] = max(entry[1], until)

    def of_messages(self, subscription: int, ids: MessageIds) -> Iterator[tuple[int, Int64Array]]:
        """Yields the ledgers of messages of which something is known for a subscription, and the messages' indexes."""
        for ledger, rows in by_ledger(ids.ledger_ids) if self.entries else ():
            if ledger in self.entries and self.entries[ledger][0] >> subscription & 1:
                yield ledger, rows

    def take_expired(self, cutoff: int) -> Iterator[tuple[int, int]]:
        """Removes the ledgers of which all is past at the cutoff, ms since the epoch; yields (ledger, subscription)."""
        for ledger in [ledger for ledger, entry in self.entries.items() if entry[1] <= cutoff]:
            for subscription in subscriptions_of(self.entries.pop(ledger)[0]):
                yield ledger, subscription

    def save(self) -> None:
        """Writes the changes to the store."""
        data = np.array([[ledger, *entry] for ledger, entry in self.entries.items()], dtype=np.int64).tobytes()
        if data != self._saved:
            self._store.put(self._table, (0, 0), data)
            self._saved = data


@dataclass
class _Bits:
    whole: BitMap  # entry ids of entries cancelled as a whole
    part: BitMap64  # single messages of other entries: entry id << 20 | batch index


class CancelledMessages:
    """A set of cancelled messages: Roaring bitmaps of entries and of messages, for each ledger and subscription.

    The bitmaps of a ledger are dropped when the last of its cancelled messages is past. Their number has no limit. A
    call reads and writes only the bitmaps of the ledgers that it names.

    Args:
        store: where the bitmaps are kept.
        compression: how the bitmaps are compressed.
        table: name of the store's table.
    """

    def __init__(self, store: Store, compression: Compression | None = None, table: str = _STORED) -> None:
        self._store = store
        self._table = table
        self._compression = compression or Compression()
        self._bits: dict[tuple[int, int], _Bits] = {}
        self._changed: set[tuple[int, int]] = set()
        self._ledgers = _Ledgers(store, f"{table}_ledgers", n_counts=2)  # `count` and `n_bytes`

    def __bool__(self) -> bool:
        """Whether anything has been cancelled."""
        return bool(self._ledgers.entries)

    @property
    def count(self) -> int:
        """The number of cancelled messages and whole entries, summed over subscriptions, as of the last save."""
        return sum(entry[2] for entry in self._ledgers.entries.values())

    @property
    def n_bytes(self) -> int:
        """The size of the bitmaps in the store, bytes, as of the last save."""
        return sum(entry[3] for entry in self._ledgers.entries.values())

    def contains(self, subscription: int, ids: MessageIds) -> BoolArray:
        """Tells which of the messages are cancelled for a subscription: bool, (n,).

        Args:
            subscription: its number.
            ids: of n messages.
        """
        cancelled = np.zeros(len(ids.ledger_ids), dtype=np.bool_)
        for ledger, rows in self._ledgers.of_messages(subscription, ids):
            bits = self._load(ledger, subscription)
            cancelled[rows] = among(ids.entry_ids[rows].astype(np.uint32), bits.whole)
            if bits.part:
                cancelled[rows] |= among(
                    codes(ids.entry_ids[rows], ids.batch_indexes[rows]).astype(np.uint64), bits.part
                )
        return cancelled

    def add_entries(self, subscription: int, ledger_ids: Int64Array, entry_ids: Int64Array, until: Int64Array) -> None:
        """Cancels whole entries for a subscription.

        Args:
            subscription: its number.
            ledger_ids: int64, (n,).
            entry_ids: int64, (n,).
            until: int64, (n,), ms since the epoch: when the last row of the entry is past.
        """
        for ledger, rows in by_ledger(ledger_ids):
            bits = self._load(ledger, subscription)
            bits.whole.update(entry_ids[rows].astype(np.uint32))
            if bits.part:
                for entry in entry_ids[rows].tolist():
                    bits.part.remove_range(entry << _BATCH_BITS, (entry + 1) << _BATCH_BITS)
            self._touch(ledger, subscription, int(until[rows].max()))

    def add_messages(
        self,
        subscription: int,
        ids: MessageIds,
        batch_sizes: Int64Array,
        until: Int64Array,
    ) -> None:
        """Cancels messages of batches for a subscription; an entry is cancelled as a whole once all its messages are.

        Args:
            subscription: its number.
            ids: of n messages.
            batch_sizes: int64, (n,): the number of messages in the entry.
            until: int64, (n,), ms since the epoch: when the last row of the message is past.
        """
        for ledger, rows in by_ledger(ids.ledger_ids):
            bits = self._load(ledger, subscription)
            bits.part.update(codes(ids.entry_ids[rows], ids.batch_indexes[rows]))
            for entry, size in set(zip(ids.entry_ids[rows].tolist(), batch_sizes[rows].tolist(), strict=True)):
                first = entry << _BATCH_BITS
                if bits.part.range_cardinality(first, first + size) == size:
                    bits.part.remove_range(first, first + size)
                    bits.whole.add(entry)
            self._touch(ledger, subscription, int(until[rows].max()))

    def remove(
        self,
        subscription: int,
        ids: MessageIds,
        batch_sizes: Int64Array,
    ) -> None:
        """Restores messages for a subscription; the other messages of an entry cancelled as a whole stay cancelled.

        Args:
            subscription: its number.
            ids: of n messages.
            batch_sizes: int64, (n,): the number of messages in the entry.
        """
        for ledger, rows in by_ledger(ids.ledger_ids):
            bits = self._load(ledger, subscription)
            sizes = dict(zip(ids.entry_ids[rows].tolist(), batch_sizes[rows].tolist(), strict=True))
            for entry in sizes.keys() & set(bits.whole & BitMap(sizes)):
                bits.whole.discard(entry)
                bits.part.add_range(entry << _BATCH_BITS, (entry << _BATCH_BITS) + sizes[entry])
            bits.part.difference_update(BitMap64(codes(ids.entry_ids[rows], ids.batch_indexes[rows])))
            self._changed.add((ledger, subscription))

    def drop_expired(self, cutoff: int) -> None:
        """Drops the ledgers whose cancelled messages are all past at the cutoff, ms since the epoch."""
        for key in self._ledgers.take_expired(cutoff):
            self._bits.pop(key, None)
            self._changed.discard(key)
            self._store.remove(self._table, key)

    def save(self) -> None:
        """Writes the changes to the store."""
        for ledger in {ledger for ledger, _ in self._changed}:
            entry = self._ledgers.entries[ledger]
            entry[2] = entry[3] = 0
            for subscription in subscriptions_of(entry[0]):
                if (ledger, subscription) in self._changed:
                    data = self._pack(self._load(ledger, subscription))
                    self._store.put(self._table, (ledger, subscription), data)
                else:
                    data = self._store.get(self._table, (ledger, subscription)) or b""
                entry[2] += _HEADER.unpack_from(data)[3]
                entry[3] += len(data)
        self._changed.clear()
        self._ledgers.save()

    def _touch(self, ledger: int, subscription: int, until: int) -> None:
        self._ledgers.add(ledger, subscription, until)
        self._changed.add((ledger, subscription))

    def _load(self, ledger: int, subscription: int) -> _Bits:
        key = (ledger, subscription)
        if key not in self._bits:
            data = self._store.get(self._table, key)
            self._bits[key] = _unpack(data) if data else _Bits(BitMap(), BitMap64())
        return self._bits[key]

    def _pack(self, bits: _Bits) -> bytes:
        bits.whole.run_optimize()
        bits.part.run_optimize()
        whole, part = bits.whole.serialize(), bits.part.serialize() if bits.part else b""
        body = whole + part
        codec = self._compression.codec if len(body) > self._compression.threshold_bytes else "NONE"
        header = _HEADER.pack(_CODECS.index(codec), len(body), len(whole), len(bits.whole) + len(bits.part))
        return header + _compress(codec, body)


def _unpack(data: bytes) -> _Bits:
    codec, size, whole, _ = _HEADER.unpack_from(data)
    body = _decompress(_CODECS[codec], data[_HEADER.size :], size)
    part = body[whole:]
    return _Bits(BitMap.deserialize(body[:whole]), BitMap64.deserialize(part) if part else BitMap64())


def _compress(codec: str, body: bytes) -> bytes:
    if codec == "NONE":
        return body
    if codec == "ZLIB":
        return zlib.compress(body)
    return bytes(pa.Codec(_arrow_codec(codec)).compress(body))


def _decompress(codec: str, body: bytes, size: int) -> bytes:
    if codec == "NONE":
        return body
    if codec == "ZLIB":
        return zlib.decompress(body)
    return bytes(pa.Codec(_arrow_codec(codec)).decompress(body, size))


def _arrow_codec(codec: str) -> str:
    return {"LZ4": "lz4_raw", "ZSTD": "zstd", "SNAPPY": "snappy"}[codec]


def codes(entry_ids: Int64Array, batch_indexes: Int64Array) -> Int64Array:
    """Numbers the messages of a ledger: entry id << 20 | batch index. A batch index of -1 counts as 0.

    Args:
        entry_ids: int64, (n,).
        batch_indexes: int64, (n,); -1: the entry is one message.

    Returns:
        int64, (n,).
    """
    return (entry_ids << _BATCH_BITS) | np.maximum(batch_indexes, 0)


def subscriptions_of(mask: int) -> list[int]:
    """Returns the numbers of the bits that are set in a mask, in ascending order."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


# Columns. CODE: entry and batch index (see `codes`), by which rows are sorted. SEQUENCE: of the move. TIME: the
# deliver_at of the new row; its bits from ATTEMPT_BIT on are the row's attempt. UNTIL: when the last of the earlier
# rows is past. Times are ms since the epoch.
CODE, SEQUENCE, TIME, UNTIL = range(4)

ATTEMPT_BIT = 48  # a time is below 2^48

TIME_MASK = (1 << ATTEMPT_BIT) - 1

_COLUMNS = 4

_PARTS = "moved_parts"

_ROWS = "moved_rows"

_WHOLE = "moved"  # of earlier versions: all rows in one value

# A part with more rows is split into parts of _SPLIT_ROWS. Smaller parts cost more store calls, larger ones more bytes
# a call.
_MOST_ROWS = 2_048

_SPLIT_ROWS = 1_536

_SUBSCRIPTION_BITS = 6  # a mask of subscriptions has 64 bits

# Columns of the list of parts. _FIRST: a part has the codes from this on, up to the next part's. _NUMBER: in the store.
# _LAST: when the last of its rows is past, ms since the epoch.
_FIRST, _NUMBER, _LAST = range(3)


class MovedTable:
    """A sorted table of moves, in parts of one to two thousand rows. A call reads and writes only the parts it needs.

    Args:
        store: where the parts are kept.
        ledger: the messages' ledger.
        subscription: its number.
    """

    def __init__(self, store: Store, ledger: int, subscription: int) -> None:
        self._store, self._ledger, self._subscription = store, ledger, subscription
        data = store.get(_PARTS, (ledger, subscription)) or b""
        self._parts = np.frombuffer(data, np.int64).reshape(-1, 3)
        self._rows: dict[int, Int64Array] = {}
        self._changed: set[int] = set()
        self._has_whole = False
        if not data and (whole := store.get(_WHOLE, (ledger, subscription))):
            self._has_whole = True
            self.put(np.frombuffer(whole, np.int64).reshape(-1, _COLUMNS))

    @property
    def last(self) -> int:
        """When the last row is past, ms since the epoch."""
        return int(self._parts[:, _LAST].max(initial=0))

    def rows_near(self, codes: Int64Array) -> Int64Array:
        """Returns all rows of the parts that may have some codes: int64, (n, 4), sorted by code."""
        if not len(self._parts) or not len(codes):
            return np.zeros((0, _COLUMNS), np.int64)
        tables = [self._load(int(self._parts[part, _NUMBER])) for part in np.unique(self._parts_of(codes)).tolist()]
        return tables[0] if len(tables) == 1 else np.concatenate(tables)

    def put(self, rows: Int64Array) -> None:
        """Adds moves of distinct messages. They replace earlier moves, whose rows are taken into account in UNTIL.

        Args:
            rows: int64, (n, 4), sorted by code.
        """
        if not len(self._parts):
            self._parts = np.zeros((1, 3), np.int64)
            self._rows[0] = rows[:0]
        part_of = self._parts_of(rows[:, CODE])
        # From the last part to the first, because splitting a part shifts the following ones.
        for part in np.unique(part_of)[::-1].tolist():
            number = int(self._parts[part, _NUMBER])
            merged = _merged(self._load(number), rows[part_of == part])
            step = len(merged) if len(merged) <= _MOST_ROWS else _SPLIT_ROWS
            pieces = [merged[start : start + step] for start in range(0, len(merged), step)]
            new = int(self._parts[:, _NUMBER].max()) + 1
            numbers = [number, *range(new, new + len(pieces) - 1)]
            firsts = [int(self._parts[part, _FIRST]), *(int(piece[0, CODE]) for piece in pieces[1:])]
            new_parts = np.array([*zip(firsts, numbers, map(_last, pieces), strict=True)], np.int64)
            self._parts = np.concatenate([self._parts[:part], new_parts, self._parts[part + 1 :]])
            self._rows |= zip(numbers, pieces, strict=True)
            self._changed |= set(numbers)

    def save(self) -> bool:
        """Writes the changes to the store; returns whether there were any."""
        if not self._changed:
            return False
        for number in sorted(self._changed):
            self._store.put(_ROWS, self._key(number), pack_columns(self._rows[number]))
        self._changed.clear()
        self._store.put(_PARTS, (self._ledger, self._subscription), self._parts.tobytes())
        if self._has_whole:
            self._store.remove(_WHOLE, (self._ledger, self._subscription))
            self._has_whole = False
        return True

    def remove(self) -> None:
        """Removes all rows from the store."""
        for number in self._parts[:, _NUMBER].tolist():
            self._store.remove(_ROWS, self._key(number))
        for table in (_PARTS, _WHOLE) if self._has_whole else (_PARTS,):
            self._store.remove(table, (self._ledger, self._subscription))

    def _parts_of(self, codes: Int64Array) -> Int64Array:
        """Returns the index of each code's part: int64, (n,)."""
        return np.searchsorted(self._parts[:, _FIRST], codes, side="right") - 1

    def _key(self, number: int) -> tuple[int, int]:
        return self._ledger, number << _SUBSCRIPTION_BITS | self._subscription

    def _load(self, number: int) -> Int64Array:
        if number not in self._rows:
            self._rows[number] = unpack_columns(get_present(self._store, _ROWS, self._key(number)), _COLUMNS)
        return self._rows[number]


def zero_where_parked(times: Int64Array) -> Int64Array:
    """Returns times, int64, (n,), with 0 instead of `HELD_DELIVER_AT` and `PAUSED_DELIVER_AT`.

    A row that was parked or paused is never loaded again. So no move has to be remembered for it once a later row
    counts.
    """
    return np.where(times > MAX_TIME_MILLIS, 0, times)


def _merged(before: Int64Array, rows: Int64Array) -> Int64Array:
    """Returns rows, int64, (n, 4), sorted by code, with new rows added; these replace rows with the same code."""
    place = np.searchsorted(before[:, CODE], rows[:, CODE])
    is_again = place < len(before)
    is_again[is_again] = before[place[is_again], CODE] == rows[is_again, CODE]
    merged, earlier = before.copy(), before[place[is_again]]
    merged[place[is_again]] = rows[is_again]
    past = np.maximum(earlier[:, UNTIL], zero_where_parked(earlier[:, TIME] & TIME_MASK))
    merged[place[is_again], UNTIL] = np.maximum(rows[is_again, UNTIL], past)
    return merged if is_again.all() else np.insert(merged, place[~is_again], rows[~is_again], axis=0)


def _last(rows: Int64Array) -> int:
    """Returns the time at which the last of some rows is past, ms since the epoch; 0: there are no rows."""
    return max(int((rows[:, TIME] & TIME_MASK).max(initial=0)), int(rows[:, UNTIL].max(initial=0)))


# The deliver_at of a message that is parked, ms since the epoch: later than any with which a message can come in.
HELD_DELIVER_AT = MAX_TIME_MILLIS + 1

# The deliver_at of the next occurrence of a recurring message that is paused, ms since the epoch.
PAUSED_DELIVER_AT = HELD_DELIVER_AT + 1


def select_parked(rows: pa.Table) -> pa.Table:
    """Returns the rows that are parked. Rows of paused schedules are not. Both tables are as MESSAGES."""
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
        self._ledgers = _Ledgers(store, "moved_ledgers")

    def __bool__(self) -> bool:
        """Whether anything has been moved."""
        return bool(self._ledgers.entries)

    def find_moves(self, subscription: int, ids: MessageIds) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Returns the last moves of messages for a subscription.

        Args:
            subscription: its number.
            ids: of n messages.

        Returns:
            three arrays, int64, (n,): the move's sequence; the time to which the message was moved; the time at which
            its earlier rows are past; times in ms since the epoch. All are 0 where there is no move.
        """
        sequences, times, until = np.zeros((3, len(ids.ledger_ids)), dtype=np.int64)
        for rows, moves in self._last_moves(subscription, ids):
            sequences[rows], times[rows] = moves[:, SEQUENCE], moves[:, TIME] & TIME_MASK
            until[rows] = moves[:, UNTIL]
        return sequences, times, until

    def attempts(self, subscription: int, ids: MessageIds) -> Int64Array:
        """Returns the retry number of each message's last move. The arguments are those of `find_moves`.

        Returns:
            int64, (n,), from 1; 0: no move, or it is not that of a retry.
        """
        attempts = np.zeros(len(ids.ledger_ids), np.int64)
        for rows, moves in self._last_moves(subscription, ids):
            attempts[rows] = moves[:, TIME] >> ATTEMPT_BIT
        return attempts

    def are_retries(self, subscription: int, ids: MessageIds) -> BoolArray:
        """Tells which messages were last moved by a retry. The arguments are those of `find_moves`.

        Returns:
            bool, (n,).
        """
        return self.attempts(subscription, ids) > 0

    def put(
        self,
        subscription: int,
        ids: MessageIds,
        sequences: Int64Array,
        times: Int64Array,
        until: Int64Array,
        attempts: Int64Array,
    ) -> None:
        """Adds moves of distinct messages for a subscription.

        Args:
            subscription: its number.
            ids: of n messages.
            sequences: int64, (n,): of the moves.
            times: int64, (n,), ms since the epoch: the times to which the messages are moved.
            until: int64, (n,), ms since the epoch: when the earlier rows of the messages are past.
            attempts: int64, (n,): the retry number of each new row; 0: no retry.
        """
        for ledger, rows in by_ledger(ids.ledger_ids):
            of = codes(ids.entry_ids[rows], ids.batch_indexes[rows])
            stored_times = times[rows] | attempts[rows] << ATTEMPT_BIT
            new = np.stack([of, sequences[rows], stored_times, zero_where_parked(until[rows])], axis=1)
            self._table(ledger, subscription).put(new[np.argsort(of)])
            self._ledgers.add(ledger, subscription)

    def drop_expired(self, cutoff: int) -> None:
        """Drops the ledgers whose rows are all past at the cutoff, ms since the epoch."""
        self.save()
        for ledger, subscription in self._ledgers.take_expired(cutoff):
            self._table(ledger, subscription).remove()
            del self._tables[ledger, subscription]

    def save(self) -> None:
        """Writes the changes to the store."""
        for ledger in {ledger for (ledger, _), table in self._tables.items() if table.save()}:
            entry = self._ledgers.entries[ledger]
            entry[1] = max(self._table(ledger, s).last for s in subscriptions_of(entry[0]))
        self._ledgers.save()

    def _last_moves(self, subscription: int, ids: MessageIds) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yields the indexes of messages with moves for a subscription, and the last move of each, int64, (m, 4)."""
        for ledger, rows in self._ledgers.of_messages(subscription, ids):
            wanted = codes(ids.entry_ids[rows], ids.batch_indexes[rows])
            table = self._table(ledger, subscription).rows_near(wanted)
            at = np.minimum(np.searchsorted(table[:, CODE], wanted), len(table) - 1)
            is_moved = table[at, CODE] == wanted
            yield rows[is_moved], table[at[is_moved]]

    def _table(self, ledger: int, subscription: int) -> MovedTable:
        key = ledger, subscription
        if key not in self._tables:
            self._tables[key] = MovedTable(self._store, ledger, subscription)
        return self._tables[key]
