"""The last message of each schedule key, packed in the store by linear hashing.

Linear hashing: https://en.wikipedia.org/wiki/Linear_hashing
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pyarrow as pa

from tracker.keys.cold_keys import PRINT_BITS, ColdKeys, group_of
from tracker.keys.packed_bucket import KeyHash, Live, PackedBucket
from tracker.messages import BoolArray, int64
from tracker.store import Store

__all__ = ["KeyHash", "Live", "LiveKeys", "lives", "positions"]

# Rows of a bucket, about: a value of the store is a call and so many rows to read and write. A cold key is an eighth.
_BUCKET_ROWS = 256
_COLD_A_ROW = 8

# The whole map is swept in so many calls, or more.
_SWEEPS = 120

# Begins a value that has more than a PackedBucket: the number of its rows that are old, and its bytes.
_MAGIC = b"\0keys 3\0"
_HEADER = struct.Struct("<8sII")

_PRINT = (1 << PRINT_BITS) - 1


class _Bucket:
    """A part of the map: its keys whose last message is here, and those where the delayed index alone has it."""

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
    """A map of keys' hashes to `Live`. It reads and writes only the buckets of the keys that it is asked for.

    A key that is not put for a while is cold, where the delayed index has its message. The map knows of it no more than
    about when its message is due.

    Args:
        store: where the buckets are kept.
        table: the store's table that has them; beside it there is one with `_meta` after its name.
    """

    def __init__(self, store: Store, table: str = "schedule_keys") -> None:
        self._store = store
        self._table, self._meta = table, f"{table}_meta"
        self._saved = store.get(self._meta, (0, 0))
        saved: list[int] = np.frombuffer(self._saved, "<i8").tolist() if self._saved else [0, 1, 0]
        # What an earlier version has written has no cold keys, and not when the sweep was begun.
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

    def find(self, hashes: Iterable[KeyHash]) -> dict[KeyHash, Live]:
        """Returns the last messages of those of the keys that have one, and are not cold."""
        found: dict[KeyHash, Live] = {}
        if self._n_rows:
            for key in hashes:
                if (live := self._load(self._bucket_of(key)).hot.get(key)) is not None:
                    found[key] = live
        return found

    def find_cold(self, hashes: Iterable[KeyHash]) -> dict[KeyHash, list[int]]:
        """Returns in which groups, see `GROUP_MILLIS`, the messages of keys are due that may be cold; few are not."""
        found: dict[KeyHash, list[int]] = {}
        if self._n_cold:
            for key in hashes:
                if groups := self._load(self._bucket_of(key)).cold.groups_of(key[0] & _PRINT):
                    found[key] = groups
        return found

    def warm(self, key: KeyHash, live: Live) -> None:
        """Makes a cold key hot again.

        Args:
            key: its hash; `find_cold` has returned it with the group of `live`.
            live: its last message, which has been found in the delayed index.
        """
        number = self._bucket_of(key)
        self._load(number).cold.remove(key[0] & _PRINT, group_of(live.deliver_at))
        self._n_cold -= 1
        self.update({key: live})

    def update(self, changes: Mapping[KeyHash, Live | None]) -> None:
        """Sets the last messages of keys that are not cold.

        Args:
            changes: by the hash of a key its last message; None removes the key, if it is there.
        """
        for key, live in changes.items():
            number = self._bucket_of(key)
            bucket = self._load(number).hot
            before = len(bucket)
            if live is not None:
                bucket.put(key, live)
            elif not bucket.remove(key):
                continue
            self._n_rows += len(bucket) - before
            self._changed.add(number)
        while self._n_rows + self._n_cold // _COLD_A_ROW > self._n_buckets * _BUCKET_ROWS:
            self._split()

    def sweep(
        self, judge: Callable[[pa.Table], tuple[BoolArray, BoolArray]], load_horizon: int, now: int, idle_millis: int
    ) -> None:
        """Removes the keys whose message's time has come, in a part of the map; the next call goes on with another.

        Those that were not put since they were swept before may become cold.

        Args:
            judge: tells of messages, with the columns of positions and deliver_at, of which the time has come, and
                which the delayed index has, beyond the load horizon: bool, (rows,), each.
            load_horizon: ms since the epoch: a cold key whose message was due before it is not cold any more.
            now: ms since the epoch.
            idle_millis: the whole map is swept in this time, or a longer one.
        """
        chosen: list[tuple[int, _Bucket]] = []
        for number in self._next_swept(now, idle_millis) if len(self) else ():
            bucket = self._load(number)
            if len(bucket.cold) and (dropped := bucket.cold.drop_before(group_of(load_horizon))):
                self._n_cold -= dropped
                self._changed.add(number)
            if len(bucket.hot):
                chosen.append((number, bucket))
        if chosen:
            past, rests = judge(pa.concat_tables([bucket.hot.positions() for _, bucket in chosen]))
            ends = np.cumsum([len(bucket.hot) for _, bucket in chosen])[:-1]
            for (number, bucket), *of_bucket in zip(chosen, np.split(past, ends), np.split(rests, ends), strict=True):
                self._sweep_bucket(number, bucket, *of_bucket)
        if not len(self):
            self._reset()

    def _next_swept(self, now: int, idle_millis: int) -> range:
        """Returns the buckets whose turn it is, and counts them as swept."""
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
            bucket.cold.add((hot.hashes() & _PRINT)[becomes_cold], groups[becomes_cold])
            self._n_cold += int(becomes_cold.sum())
        if (goes := past | becomes_cold).any():
            hot.remove_where(goes)
            self._n_rows -= int(goes.sum())
            self._changed.add(number)
        if hot.n_old != len(hot):
            hot.n_old = len(hot)
            self._changed.add(number)

    def save(self) -> None:
        """Writes what is not in the store yet."""
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
        # The buckets below n_buckets - 2^level are split already, by one more bit.
        bits = (self._n_buckets - 1).bit_length()
        number = key[0] & ((1 << bits) - 1)
        return number if number < self._n_buckets else number & ((1 << bits - 1) - 1)

    def _level(self, number: int) -> int:
        """Returns how many low bits of its keys' hashes a bucket's number says."""
        bits = (self._n_buckets - 1).bit_length()
        half = 1 << bits >> 1
        return bits if number >= half or number + half < self._n_buckets else bits - 1

    def _split(self) -> None:
        """Adds a bucket, and gives it its part of the one that had its keys."""
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


def lives(rows: pa.Table) -> list[Live]:
    """Returns messages, a row each with the columns of `Live`, as `Live`."""
    columns = [rows[name].to_pylist() for name in Live._fields]
    return [Live(*values) for values in zip(*columns, strict=True)]


def positions(live: list[Live]) -> pa.Table:
    """Returns messages with the columns of `Live`."""
    columns = zip(*live, strict=True) if live else [()] * len(Live._fields)
    return pa.table(dict(zip(Live._fields, (pa.array(c, pa.int64()) for c in columns), strict=True)))
