"""The map of schedule keys to their last messages, packed in the store by linear hashing.

Linear hashing: https://en.wikipedia.org/wiki/Linear_hashing
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pyarrow as pa

from tracker.keys.cold_keys import FINGERPRINT_BITS, ColdKeys, group_of
from tracker.keys.packed_bucket import KeyHash, LastMessage, PackedBucket
from tracker.messages import BoolArray, int64
from tracker.store import Store

__all__ = ["KeyHash", "LastMessage", "LiveKeys", "last_messages", "positions"]

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

    def find(self, hashes: Iterable[KeyHash]) -> dict[KeyHash, LastMessage]:
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
            for (number, bucket), *of_bucket in zip(chosen, np.split(past, ends), np.split(rests, ends), strict=True):
                self._sweep_bucket(number, bucket, *of_bucket)
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
            bucket.cold.add((hot.hashes() & _FINGERPRINT_MASK)[becomes_cold], groups[becomes_cold])
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
