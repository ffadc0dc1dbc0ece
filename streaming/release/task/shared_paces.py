"""How soon the next message of a rate may be handed over, whatever is late: token buckets that all tasks share.

Places in time are given when messages come due (`tracker/shaping/`). Where some can't be kept, because a job, a broker
or the machine was busy, what is late would go out all at once. So what is handed over takes from a bucket, too. It has
the rate of the places, so that what is on time does not wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SLOTS = 1 << 18  # buckets that are not full, at the same time; the file has holes where there are none
_PROBED = 32  # so many slots may have a bucket; of more that are not full one is forgotten

_SLOT = struct.Struct("<Qd")  # the bucket's number, and when it is full
_SLOTS_TYPE = np.dtype([("bucket", "<u8"), ("full_at", "<f8")])

# The run before has sent nothing any more when this one's file is made; a second later no second has messages of both.
_REST_SECONDS = 1.0

_AT_ONCE_SECONDS = 0.005  # what becomes free within it goes at once

_SCATTER_SECONDS = 0.02  # by which the times from handing over to being published differ, where brokers keep up


@dataclass(frozen=True)
class RateLimit:
    """A subscription's rate, as a release was handed out with it.

    Attributes:
        rate: messages a second.
        burst: how many may go at once after a rest.
        is_per_key: whether each key has them for its own.
    """

    rate: float
    burst: int
    is_per_key: bool = False

    @property
    def most_at_once(self) -> float:
        """The bucket's size in messages, at least 1; a batch of more, up to the burst, goes when the bucket is full.

        With the size burst + 1 - rate % 1 no second would see more than rate + burst messages handed over, rounded
        down. It is below that by half of 1 - rate % 1, and by what the rate yields in `_SCATTER_SECONDS`, a tenth of
        the burst at most: so the scatter of publish times shows no more in a second, either.
        """
        kept = min(self.rate * _SCATTER_SECONDS, self.burst / 10)
        return max(1.0, self.burst + (1 - self.rate % 1) / 2 - kept)


class Paces:
    """The buckets of all rates, in a file that the tasks of a machine share.

    A bucket is one time, as in `tracker/shaping/bucket.py`: when it is full. Times are seconds of the machine's
    monotonic clock.

    Args:
        path: of the file, of one run of the query; it is made where it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        size = _SLOT.size * (_SLOTS + _PROBED)
        with self._locked():
            is_new = os.fstat(self._file).st_size == 0
            if is_new:
                os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, size)
            if is_new:  # the first slot has no bucket, but when the file was made
                _SLOT.pack_into(self._map, 0, 0, time.monotonic())
        self._slots = np.frombuffer(self._map, _SLOTS_TYPE)
        self._begins = float(_SLOT.unpack_from(self._map, 0)[1]) + _REST_SECONDS
        self._found: dict[int, int] = {}  # by bucket where it was last

    def take(self, bucket: int, n: int, limit: RateLimit, now: float) -> tuple[float, float]:
        """Takes places for messages that are handed over now, all or none.

        Args:
            bucket: its number, 1 to 2^64 - 1.
            n: of messages, no more than the limit's burst.
            limit: the bucket's.
            now: seconds, monotonic.

        Returns:
            0: they are taken; else after how many seconds there will be places, if nobody else takes them. And when
            the bucket is full again, seconds, monotonic.
        """
        if now < self._begins:
            return self._begins - now, now
        with self._locked():
            at, full_at = self._slot(bucket, now)
            full_at = max(full_at, now)
            wait = full_at - now - max(limit.most_at_once - n, 0) / limit.rate
            if wait <= 0:
                full_at += n / limit.rate
                _SLOT.pack_into(self._map, at, bucket, full_at)
            return max(wait, 0.0), full_at

    def note_taken(self, bucket: int, n: int, limit: RateLimit, now: float) -> None:
        """Has messages count from when they have been handed over, which may be later than when they took places."""
        with self._locked():
            at, full_at = self._slot(bucket, now)
            _SLOT.pack_into(self._map, at, bucket, max(full_at, now + n / limit.rate))

    def _slot(self, bucket: int, now: float) -> tuple[int, float]:
        """Returns where in the file a bucket is, and when it is full. One that is full may be nowhere: it gets in."""
        at = self._found.get(bucket, 0)
        number, full_at = _SLOT.unpack_from(self._map, at)
        if number == bucket:
            return at, full_at
        begin = 1 + bucket % (_SLOTS - 1)
        probed = self._slots[begin : begin + _PROBED]
        found = np.flatnonzero(probed["bucket"] == bucket)
        if not len(found):
            slot = begin + int(probed["full_at"].argmin())
            self._slots[slot] = (bucket, now)
        else:
            slot = begin + int(found[0])
        if len(self._found) >= _SLOTS:
            self._found.clear()
        self._found[bucket] = slot * _SLOT.size
        return self._found[bucket], float(self._slots["full_at"][slot])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes the file; the buckets stay in it."""
        os.close(self._file)


class Pace:
    """The bucket of messages in a task that share a rate.

    Args:
        paces: has the bucket.
        limit: the rate.
        name: what the messages have in common: source topic, subscription, and the key where the rate is by key.
    """

    def __init__(self, paces: Paces, limit: RateLimit, *name: str) -> None:
        self._paces = paces
        self._limit = limit
        digest = hashlib.blake2b("\0".join(name).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self._bucket = int.from_bytes(digest, "little") or 1
        self._waits_until = 0.0  # s, monotonic: before it is of no use to ask
        self._full_at = 0.0  # the same: not before it the bucket is full

    @property
    def wait_seconds(self) -> float:
        """How long it is of no use to ask for places, seconds; 0: now there may be some."""
        return max(0.0, self._waits_until - time.monotonic())

    def take(self, n: int) -> bool:
        """Takes places for messages that are handed over now, all or none; returns whether there were so many."""
        now = time.monotonic()
        wait, self._full_at = self._paces.take(self._bucket, n, self._limit, now)
        if wait > 0:
            # Several at once, as far as the burst allows: to wait for each by itself would take the CPU.
            self._waits_until = now + max(wait, min(_AT_ONCE_SECONDS, self._limit.burst / self._limit.rate / 2))
        return wait <= 0

    def note_taken(self, n: int) -> None:
        """Is to be called when messages have been handed over that have taken places."""
        now = time.monotonic()
        if now + n / self._limit.rate > self._full_at:
            self._paces.note_taken(self._bucket, n, self._limit, now)
