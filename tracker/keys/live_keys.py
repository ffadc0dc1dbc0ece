"""A bucket of schedule keys: the hash and the last message of each key, in as few bytes as the numbers need."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tracker.keys.cold_keys import FINGERPRINT_BITS, ColdKeys, group_of
from tracker.messages import FIRST_IMPORTED_LEDGER, MESSAGES, BoolArray, Int64Array, empty_table, int64
from tracker.properties import MessagePosition
from tracker.schemas import KNOWN
from tracker.store import Store

KeyHash = tuple[int, int]

# Header of a packed bucket: _PACKED_MAGIC, then the minimum and the width in bytes of each column of LastMessage.
# Earlier versions wrote rows of _OLD_ROW without a header.
_PACKED_MAGIC = b"\0keys 2\0"

_PACKED_HEADER = struct.Struct("<8s7q7B")

_HASH = struct.Struct("<qq")

_OLD_ROW = np.dtype(
    [
        *(("hash", "<i8"), ("check", "<i8"), ("ledger_id", "<i8"), ("entry_id", "<i8"), ("partition", "<i4")),
        *(("batch_index", "<i4"), ("batch_size", "<i4"), ("deliver_at", "<i8"), ("since", "<i8")),
    ]
)

# Rows of a bucket that are searched for a key. Larger buckets, whose keys somebody has chosen to be in one, have an
# index, and spare room below their least numbers.
_SEARCHED_ROWS = 2_048

_LEAST_SPARE, _MOST_SPARE, _LOWEST = 1 << 20, 1 << 48, -(1 << 63)


class LastMessage(NamedTuple):
    """The last message of a schedule key: the one that waits, or has just come due. Times are ms since the epoch."""

    ledger_id: int
    entry_id: int
    partition: int
    batch_index: int
    batch_size: int
    deliver_at: int  # the time with which it came, also if it was moved since
    since: int  # publish time of the first message since the key began again

    @property
    def position(self) -> MessagePosition:
        """The message's position."""
        return MessagePosition(self.ledger_id, self.entry_id, self.partition, self.batch_index)


class PackedBucket:
    """A map from the hashes of keys to `LastMessage`.

    Its rows are bytes: the hash, and the difference of each number from its column's minimum.

    Args:
        data: as `pack` returns it, or as an earlier version wrote it; empty: no keys.
        n_old: initial value of the attribute.

    Attributes:
        n_old: the first `n_old` rows have not been put since the caller set this. `put` moves a row to the end.
    """

    def __init__(self, data: bytes = b"", n_old: int = 0) -> None:
        self.n_old = n_old
        # Of a large bucket: the number of each key's row, those of removed rows, and how many rows were old at first.
        self._places: dict[bytes, int] | None = None
        self._removed: set[int] = set()
        self._n_old_rows = 0
        self._least = [0] * len(LastMessage._fields)
        self._widths = [0] * len(LastMessage._fields)
        self._rows = bytearray()
        if data.startswith(_PACKED_MAGIC):
            _, *numbers = _PACKED_HEADER.unpack_from(data)
            self._least, self._widths = numbers[:7], numbers[7:]
            self._rows = bytearray(data[_PACKED_HEADER.size :])
        elif data:
            old = np.frombuffer(data, _OLD_ROW)
            hashes = np.stack([old["hash"], old["check"]], axis=1)
            self._fill(hashes, np.stack([old[name].astype(np.int64) for name in LastMessage._fields], axis=1))

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._rows) // self._row_bytes - len(self._removed)

    @property
    def _row_bytes(self) -> int:
        return _HASH.size + sum(self._widths)

    def get(self, key: KeyHash) -> LastMessage | None:
        """Returns the last message of a key; None: it has none."""
        at = self._find(key)
        if at < 0:
            return None
        values, at = [], at + _HASH.size
        for least, width in zip(self._least, self._widths, strict=True):
            values.append(least + int.from_bytes(self._rows[at : at + width], "little"))
            at += width
        return LastMessage._make(values)

    def put(self, key: KeyHash, message: LastMessage) -> None:
        """Sets the last message of a key."""
        try:
            row = _HASH.pack(*key) + b"".join(
                (value - least).to_bytes(width, "little")
                for value, least, width in zip(message, self._least, self._widths, strict=True)
            )
        except OverflowError:
            self.remove(key)
            hashes, values = self._columns()
            self._fill(np.append(hashes, [key], axis=0), np.append(values, [message], axis=0))
            return
        self.remove(key)
        if self._places is not None:
            self._places[_HASH.pack(*key)] = len(self._rows) // len(row)
        self._rows += row

    def remove(self, key: KeyHash) -> bool:
        """Removes a key; returns whether it was there."""
        at = self._find(key)
        if at < 0:
            return False
        if self._places is not None:
            place = self._places.pop(_HASH.pack(*key))
            self._removed.add(place)
            self.n_old -= place < self._n_old_rows
        else:
            self.n_old -= at < self.n_old * self._row_bytes
            del self._rows[at : at + self._row_bytes]
        return True

    def positions(self) -> pa.Table:
        """Returns the messages with the columns of `LastMessage`, a row for each key."""
        return pa.table(dict(zip(LastMessage._fields, self._columns()[1].T.copy(), strict=True)))

    def hashes(self) -> Int64Array:
        """Returns the first half of each key's hash, int64, (keys,), in the order of `positions`."""
        return self._columns()[0][:, 0].copy()

    def remove_where(self, mask: BoolArray) -> None:
        """Removes the keys for which a mask is true: bool, (keys,), in the order of `positions`."""
        self.n_old -= int(mask[: self.n_old].sum())
        rows = self._as_rows()
        self._rows = bytearray(rows[~mask].tobytes())

    def split(self, bit: int) -> PackedBucket:
        """Removes the keys whose hash has a bit set, and returns them."""
        hashes, values = self._columns()
        goes = hashes[:, 0] >> bit & 1 > 0
        n_old = int(goes[: self.n_old].sum())
        other = PackedBucket(n_old=n_old)
        self.n_old -= n_old
        other._fill(hashes[goes], values[goes])
        self._fill(hashes[~goes], values[~goes])
        return other

    def pack(self) -> bytes:
        """Returns the bucket as bytes."""
        self._tidy()
        return _PACKED_HEADER.pack(_PACKED_MAGIC, *self._least, *self._widths) + self._rows

    def _find(self, key: KeyHash) -> int:
        """Returns the offset of a key's row in `_rows`; -1: there is none."""
        wanted, n = _HASH.pack(*key), self._row_bytes
        if self._places is None and len(self._rows) > _SEARCHED_ROWS * n:
            rows, self._n_old_rows = self._rows, self.n_old
            self._places = {bytes(rows[at : at + _HASH.size]): at // n for at in range(0, len(rows), n)}
        if self._places is not None:
            place = self._places.get(wanted)
            return -1 if place is None else place * n
        at = self._rows.find(wanted)
        while at > 0 and at % n:
            at = self._rows.find(wanted, at + 1)
        return at

    def _tidy(self) -> None:
        """Leaves removed rows out of `_rows`."""
        if self._removed:
            rows = np.frombuffer(bytes(self._rows), np.uint8).reshape(-1, self._row_bytes)
            self._rows = bytearray(np.delete(rows, sorted(self._removed), axis=0).tobytes())
        self._places, self._removed = None, set()

    def _as_rows(self) -> npt.NDArray[np.uint8]:
        self._tidy()
        return np.frombuffer(bytes(self._rows), np.uint8).reshape(-1, self._row_bytes)

    def _columns(self) -> tuple[Int64Array, Int64Array]:
        """Returns the hashes, int64, (keys, 2), and the numbers of `LastMessage`, int64, (keys, 7)."""
        rows = self._as_rows()
        hashes = np.ascontiguousarray(rows[:, : _HASH.size]).view("<i8")
        values = np.empty((len(rows), len(LastMessage._fields)), np.int64)
        at = _HASH.size
        for i, (least, width) in enumerate(zip(self._least, self._widths, strict=True)):
            wide = np.zeros((len(rows), 8), np.uint8)
            wide[:, :width] = rows[:, at : at + width]
            values[:, i] = wide.view("<i8")[:, 0] + least
            at += width
        return hashes, values

    def _fill(self, hashes: Int64Array, values: Int64Array) -> None:
        """Replaces all keys; the arguments are as `_columns` returns them."""
        self._places, self._removed = None, set()
        if not len(hashes):
            self._rows = bytearray()
            return
        least, most = values.min(axis=0), values.max(axis=0)
        if len(hashes) > _SEARCHED_ROWS:  # room below, or each number that is lower than all before would come here
            spread = np.minimum(most.astype(np.uint64) - least.astype(np.uint64), np.uint64(_MOST_SPARE))
            spare = np.maximum(spread.astype(np.int64), _LEAST_SPARE)
            least = np.minimum(least, np.maximum(least, _LOWEST + _MOST_SPARE) - spare)
        self._least = least.tolist()
        # The difference of two int64 fits into a uint64.
        above = values.astype(np.uint64) - least.astype(np.uint64)
        self._widths = [(int(most).bit_length() + 7) // 8 for most in above.max(axis=0)]
        parts = [np.ascontiguousarray(hashes, "<i8").view(np.uint8)]
        for i, width in enumerate(self._widths):
            parts.append(np.ascontiguousarray(above[:, i], "<u8").view(np.uint8).reshape(-1, 8)[:, :width])
        self._rows = bytearray(np.concatenate(parts, axis=1).tobytes())


KEYED = pa.schema([*KNOWN, MESSAGES.field("key_since"), MESSAGES.field("publish_time")])

# Reads from the delayed index the rows with which messages came, as KEYED: those with some keys, as pairs of topic and
# key, that are due in some groups (see `tracker.keys.cold_keys.GROUP_MILLIS`), ascending. It may return more rows.
FindKeyed = Callable[[Collection[tuple[str, str]], Sequence[int]], pa.Table]


def none_sealed(names: Collection[tuple[str, str]], groups: Sequence[int]) -> pa.Table:
    """Returns no rows: the FindKeyed of an empty delayed index."""
    return empty_table(KEYED)


def last_of_keys(rows: pa.Table) -> dict[tuple[str, str], LastMessage]:
    """Returns the last message of each topic and key.

    A key has several rows only if messages were imported, or restored by a command. Then the message that was published
    last counts; an imported one counts only if all are imported.

    Args:
        rows: as KEYED.
    """
    found: dict[tuple[str, str], LastMessage] = {}
    for row in sorted(
        rows.to_pylist(),
        key=lambda row: (
            row["ledger_id"] < FIRST_IMPORTED_LEDGER,
            row["publish_time"] or 0,
            *(row[name] for name in ("ledger_id", "entry_id", "batch_index")),
        ),
    ):
        since = row["deliver_at"] if row["key_since"] is None else row["key_since"]  # not known of imported messages
        values = [*(row[name] for name in LastMessage._fields[:6]), since]
        found[row["topic"], row["schedule_key"]] = LastMessage._make(values)
    return found


# About how many rows a bucket has. More would mean more bytes for each key that is read or written, fewer more store
# calls. _COLD_A_ROW cold keys count as one row.
_BUCKET_ROWS = 256

_COLD_A_ROW = 8

# A sweep of the whole map takes at least this many calls.
_SWEEPS = 120

# Header of a bucket with cold or old keys: _MAGIC, `PackedBucket.n_old`, bytes of the PackedBucket that follows. A
# bucket without them is stored as the PackedBucket alone.
_MAGIC = b"\0keys 3\0"

_HEADER = struct.Struct("<8sII")

_FINGERPRINT_MASK = (1 << FINGERPRINT_BITS) - 1


class _Bucket:
    """A part of the map: its hot keys, with their last messages, and its cold keys."""

    def __init__(self, data: bytes, number: int) -> None:
        if data.startswith(_MAGIC):
            _, n_old, n_bytes = _HEADER.unpack_from(data)
            end = _HEADER.size + n_bytes
            self.hot, self.cold = PackedBucket(data[_HEADER.size : end], n_old), ColdKeys(data[end:], number)
        else:
            self.hot, self.cold = PackedBucket(data), ColdKeys()

    def pack(self, level: int) -> bytes:
        """Returns the bucket as bytes; empty: it has no keys."""
        hot = self.hot.pack() if len(self.hot) else b""
        if not self.hot.n_old and not len(self.cold):
            return hot
        return _HEADER.pack(_MAGIC, self.hot.n_old, len(hot)) + hot + self.cold.pack(level)


class LiveKeys:
    """A map from the hashes of keys to `LastMessage`. A call reads and writes only the buckets of its keys.

    A key that is not put for a while becomes cold, if the delayed index has its message. The map then has only a
    fingerprint of the key, and about when its message is due.

    Args:
        store: where the buckets are kept.
        table: the store's table of the buckets; the map's metadata is in the table with `_meta` after this name.
    """

    def __init__(self, store: Store, table: str = "schedule_keys") -> None:
        self._store = store
        self._table, self._meta = table, f"{table}_meta"
        self._saved = store.get(self._meta, (0, 0))
        saved: list[int] = np.frombuffer(self._saved, "<i8").tolist() if self._saved else [0, 1, 0]
        # Earlier versions did not write the last two: the number of cold keys, and when the sweep began.
        self._n_rows, self._n_buckets, self._swept, self._n_cold, self._begun = [*saved, 0, 0][:5]
        self._buckets: dict[int, _Bucket] = {}
        self._changed: set[int] = set()

    def __len__(self) -> int:
        """The number of keys."""
        return self._n_rows + self._n_cold

    @property
    def n_cold(self) -> int:
        """The number of keys that are cold."""
        return self._n_cold

    def find_hot(self, hashes: Iterable[KeyHash]) -> dict[KeyHash, LastMessage]:
        """Returns the last messages of those keys that are hot."""
        found: dict[KeyHash, LastMessage] = {}
        if self._n_rows:
            for key in hashes:
                if (message := self._load(self._bucket_of(key)).hot.get(key)) is not None:
                    found[key] = message
        return found

    def find_cold(self, hashes: Iterable[KeyHash]) -> dict[KeyHash, list[int]]:
        """Returns by key the groups in which its message may be due (see `GROUP_MILLIS`), if it is probably cold."""
        found: dict[KeyHash, list[int]] = {}
        if self._n_cold:
            for key in hashes:
                if groups := self._load(self._bucket_of(key)).cold.groups_of(key[0] & _FINGERPRINT_MASK):
                    found[key] = groups
        return found

    def warm(self, key: KeyHash, message: LastMessage) -> None:
        """Makes a cold key hot again.

        Args:
            key: the hash of the key; `find_cold` returned it with the group of `message`.
            message: its last message, found in the delayed index.
        """
        number = self._bucket_of(key)
        self._load(number).cold.remove(key[0] & _FINGERPRINT_MASK, group_of(message.deliver_at))
        self._n_cold -= 1
        self.update({key: message})

    def update(self, changes: Mapping[KeyHash, LastMessage | None]) -> None:
        """Sets the last messages of keys that are not cold.

        Args:
            changes: by the hash of a key: its last message; None removes the key, if the map has it.
        """
        for key, message in changes.items():
            number = self._bucket_of(key)
            bucket = self._load(number).hot
            before = len(bucket)
            if message is not None:
                bucket.put(key, message)
            elif not bucket.remove(key):
                continue
            self._n_rows += len(bucket) - before
            self._changed.add(number)
        while self._n_rows + self._n_cold // _COLD_A_ROW > self._n_buckets * _BUCKET_ROWS:
            self._split()

    def sweep(
        self, judge: Callable[[pa.Table], tuple[BoolArray, BoolArray]], complete_until: int, now: int, idle_millis: int
    ) -> None:
        """Removes keys whose message is past, in a part of the map; the next call continues with the next part.

        A key that was not put since the previous sweep may become cold.

        Args:
            judge: gets messages with the columns of `LastMessage`. Returns which are past, and which ones only the
                delayed index need keep, since it has them and they are due beyond the load horizon: bool, (rows,) each.
            complete_until: ms since the epoch: the messages of cold keys due before it have been loaded, so that these
                keys are removed from the cold ones.
            now: ms since the epoch.
            idle_millis: a sweep of the whole map takes at least this time, ms.
        """
        chosen: list[tuple[int, _Bucket]] = []
        for number in self._next_swept(now, idle_millis) if len(self) else ():
            bucket = self._load(number)
            if len(bucket.cold) and (dropped := bucket.cold.drop_before(group_of(complete_until))):
                self._n_cold -= dropped
                self._changed.add(number)
            if len(bucket.hot):
                chosen.append((number, bucket))
        if chosen:
            past, rests = judge(pa.concat_tables([bucket.hot.positions() for _, bucket in chosen]))
            ends = np.cumsum([len(bucket.hot) for _, bucket in chosen])[:-1]
            for (number, bucket), *masks in zip(chosen, np.split(past, ends), np.split(rests, ends), strict=True):
                self._sweep_bucket(number, bucket, *masks)
        if not len(self):
            self._reset()

    def _next_swept(self, now: int, idle_millis: int) -> range:
        """Returns the numbers of the buckets to sweep in this call, and counts them as swept."""
        if self._swept >= self._n_buckets or now < self._begun:
            self._swept, self._begun = 0, now
        past = min(now - self._begun, idle_millis) / idle_millis if idle_millis else 1
        first, most = self._swept, -(-self._n_buckets // _SWEEPS)
        self._swept = max(first, min(first + most, int(past * self._n_buckets)))
        return range(first, self._swept)

    def _sweep_bucket(self, number: int, bucket: _Bucket, past: BoolArray, rests: BoolArray) -> None:
        hot = bucket.hot
        becomes_cold = rests & ~past & (np.arange(len(hot)) < hot.n_old)
        if becomes_cold.any():
            groups = group_of(int64(hot.positions(), "deliver_at"))
            bucket.cold.add_keys((hot.hashes() & _FINGERPRINT_MASK)[becomes_cold], groups[becomes_cold])
            self._n_cold += int(becomes_cold.sum())
        if (goes := past | becomes_cold).any():
            hot.remove_where(goes)
            self._n_rows -= int(goes.sum())
            self._changed.add(number)
        if hot.n_old != len(hot):
            hot.n_old = len(hot)
            self._changed.add(number)

    def save(self) -> None:
        """Writes the changes to the store."""
        for number in sorted(self._changed):
            if data := self._buckets[number].pack(self._level(number)):
                self._store.put(self._table, (number, 0), data)
            else:
                self._store.remove(self._table, (number, 0))
        self._changed.clear()
        data = np.array([self._n_rows, self._n_buckets, self._swept, self._n_cold, self._begun], "<i8").tobytes()
        if data != self._saved and (self._saved or len(self)):
            self._store.put(self._meta, (0, 0), data)
            self._saved = data

    def _bucket_of(self, key: KeyHash) -> int:
        # A number beyond the last bucket means that its bucket is not split yet: the key is in the bucket to be split.
        bits = (self._n_buckets - 1).bit_length()
        number = key[0] & ((1 << bits) - 1)
        return number if number < self._n_buckets else number & ((1 << bits - 1) - 1)

    def _level(self, number: int) -> int:
        """Returns how many low bits of its keys' hashes are the bucket's number."""
        bits = (self._n_buckets - 1).bit_length()
        half = 1 << bits >> 1
        return bits if number >= half or number + half < self._n_buckets else bits - 1

    def _split(self) -> None:
        """Adds a bucket, and moves its keys there from the bucket that had them."""
        new = self._n_buckets
        old = new & ((1 << new.bit_length() - 1) - 1)
        bit, bucket = new.bit_length() - 1, self._load(old)
        self._buckets[new] = _Bucket(b"", new)
        self._buckets[new].hot, self._buckets[new].cold = bucket.hot.split(bit), bucket.cold.split(bit)
        self._n_buckets += 1
        self._changed |= {old, new}

    def _reset(self) -> None:
        for number in range(self._n_buckets):
            if self._buckets.pop(number, None) is not None or self._n_buckets > 1:
                self._store.remove(self._table, (number, 0))
        self._changed.clear()
        self._n_buckets, self._swept = 1, 0

    def _load(self, number: int) -> _Bucket:
        if number not in self._buckets:
            self._buckets[number] = _Bucket(self._store.get(self._table, (number, 0)) or b"", number)
        return self._buckets[number]


def last_messages(rows: pa.Table) -> list[LastMessage]:
    """Returns the rows of a table with the columns of `LastMessage` as `LastMessage`."""
    columns = [rows[name].to_pylist() for name in LastMessage._fields]
    return [LastMessage(*values) for values in zip(*columns, strict=True)]


def positions(messages: list[LastMessage]) -> pa.Table:
    """Returns messages as a table with the columns of `LastMessage`, int64."""
    columns = zip(*messages, strict=True) if messages else [()] * len(LastMessage._fields)
    return pa.table(dict(zip(LastMessage._fields, (pa.array(c, pa.int64()) for c in columns), strict=True)))
