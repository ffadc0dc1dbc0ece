"""The last message of each schedule key, packed in the store by linear hashing.

Linear hashing: https://en.wikipedia.org/wiki/Linear_hashing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pyarrow as pa

from tracker.keys.packed_bucket import KeyHash, Live, PackedBucket
from tracker.messages import BoolArray
from tracker.store import Store

__all__ = ["KeyHash", "Live", "LiveKeys", "positions"]

_TABLE = "schedule_keys"
_META = "schedule_keys_meta"

# Rows of a bucket, about: a value of the store is a call and so many rows to read and write.
_BUCKET_ROWS = 256

# The whole map is swept in so many calls.
_SWEEPS = 120


class LiveKeys:
    """A map of keys' hashes to `Live`. It reads and writes only the buckets of the keys that it is asked for.

    Args:
        store: where the buckets are kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._saved = store.get(_META, (0, 0))
        n_rows, n_buckets, swept = np.frombuffer(self._saved, "<i8").tolist() if self._saved else (0, 1, 0)
        self._n_rows, self._n_buckets, self._swept = n_rows, n_buckets, swept
        self._buckets: dict[int, PackedBucket] = {}
        self._changed: set[int] = set()

    def __len__(self) -> int:
        """The number of keys."""
        return self._n_rows

    def find(self, hashes: Iterable[KeyHash]) -> dict[KeyHash, Live]:
        """Returns the last messages of those of the keys that have one."""
        found: dict[KeyHash, Live] = {}
        if self._n_rows:
            for key in hashes:
                if (live := self._load(self._bucket_of(key)).get(key)) is not None:
                    found[key] = live
        return found

    def update(self, changes: Mapping[KeyHash, Live | None]) -> None:
        """Sets the last messages of keys; None removes a key."""
        for key, live in changes.items():
            number = self._bucket_of(key)
            bucket = self._load(number)
            before = len(bucket)
            if live is not None:
                bucket.put(key, live)
            elif not bucket.remove(key):
                continue
            self._n_rows += len(bucket) - before
            self._changed.add(number)
        while self._n_rows > self._n_buckets * _BUCKET_ROWS:
            self._split()

    def sweep(self, is_past: Callable[[pa.Table], BoolArray]) -> None:
        """Removes the keys whose message's time has come, in a part of the map; the next call goes on with another.

        Args:
            is_past: tells of messages, with the columns of positions and deliver_at, which these are: bool, (rows,).
        """
        for _ in range(-(-self._n_buckets // _SWEEPS) if self._n_rows else 0):
            number = self._swept % self._n_buckets
            self._swept = (number + 1) % self._n_buckets
            bucket = self._load(number)
            past = is_past(bucket.positions()) if len(bucket) else np.zeros(0, np.bool_)
            if past.any():
                bucket.remove_where(past)
                self._n_rows -= int(past.sum())
                self._changed.add(number)
        if not self._n_rows:
            self._reset()

    def save(self) -> None:
        """Writes what is not in the store yet."""
        for number in sorted(self._changed):
            if len(self._buckets[number]):
                self._store.put(_TABLE, (number, 0), self._buckets[number].pack())
            else:
                self._store.remove(_TABLE, (number, 0))
        self._changed.clear()
        data = np.array([self._n_rows, self._n_buckets, self._swept], "<i8").tobytes()
        if data != self._saved and (self._saved or self._n_rows):
            self._store.put(_META, (0, 0), data)
            self._saved = data

    def _bucket_of(self, key: KeyHash) -> int:
        # The buckets below n_buckets - 2^level are split already, by one more bit.
        bits = (self._n_buckets - 1).bit_length()
        number = key[0] & ((1 << bits) - 1)
        return number if number < self._n_buckets else number & ((1 << bits - 1) - 1)

    def _split(self) -> None:
        """Adds a bucket, and gives it its part of the one that had its keys."""
        new = self._n_buckets
        old = new & ((1 << new.bit_length() - 1) - 1)
        self._buckets[new] = self._load(old).split(new.bit_length() - 1)
        self._n_buckets += 1
        self._changed |= {old, new}

    def _reset(self) -> None:
        for number in range(self._n_buckets):
            if self._buckets.pop(number, None) is not None or self._n_buckets > 1:
                self._store.remove(_TABLE, (number, 0))
        self._changed.clear()
        self._n_buckets, self._swept = 1, 0

    def _load(self, number: int) -> PackedBucket:
        if number not in self._buckets:
            self._buckets[number] = PackedBucket(self._store.get(_TABLE, (number, 0)) or b"")
        return self._buckets[number]


def positions(live: list[Live]) -> pa.Table:
    """Returns messages with the columns of `Live`."""
    columns = zip(*live, strict=True) if live else [()] * len(Live._fields)
    return pa.table(dict(zip(Live._fields, (pa.array(c, pa.int64()) for c in columns), strict=True)))
