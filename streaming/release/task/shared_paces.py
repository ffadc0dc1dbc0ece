"""Token buckets that all tasks of a machine share, so that late messages are sent no faster than their rate.

The shaper gives places in time when messages come due (`tracker/shaping/`). When a busy job, broker or machine misses
some of these places, all late messages would be sent at once. So each message takes a token when it is handed to its
producer. The bucket has the same rate as the places, so messages on time do not wait for it.
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

_SLOTS = 1 << 18  # the most buckets that are not full at the same time; the file is sparse
_PROBED = 32  # a bucket can be in one of so many slots; if all are in use, the one that is full first is overwritten

_SLOT = struct.Struct("<Qd")  # (number of the bucket, time when it is full)
_SLOTS_TYPE = np.dtype([("bucket", "<u8"), ("full_at", "<f8")])

# The run before sends no more when this run's file is made. After a rest of a second, no second has messages of both.
_REST_SECONDS = 1.0

_AT_ONCE_SECONDS = 0.005  # places that become free within this time are taken together

_SCATTER_SECONDS = 0.02  # how much the time from hand-over to publication varies, while brokers keep up


@dataclass(frozen=True)
class RateLimit:
    """A subscription's rate when a release was dispatched.

    Attributes:
        rate: messages a second.
        burst: the most messages at once after a rest.
        is_per_key: whether each key has a rate and a burst of its own.
    """

    rate: float
    burst: int
    is_per_key: bool = False

    @property
    def most_at_once(self) -> float:
        """The bucket's size in messages, at least 1. A larger batch, up to the burst, is sent when the bucket is full.

        With the size burst + 1 - rate % 1, no more than floor(rate + burst) messages would be handed over in any
        second. The size is smaller by half of 1 - rate % 1, and by the messages of `_SCATTER_SECONDS`, at most a tenth
        of the burst. So no more are published in any second, either, although publish times scatter.
        """
        spare = min(self.rate * _SCATTER_SECONDS, self.burst / 10)
        return max(1.0, self.burst + (1 - self.rate % 1) / 2 - spare)


class Paces:
    """The buckets of all rates, in a file that the tasks of a machine share.

    The state of a bucket is the time when it is full, as in `tracker/shaping/token_bucket.py`, in seconds of the
    machine's monotonic clock.

    Args:
        path: of the file, which belongs to one run of the query; created if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        size = _SLOT.size * (_SLOTS + _PROBED)
        with self._locked():
            is_new = os.fstat(self._file).st_size == 0
            if is_new:
                os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, size)
            if is_new:  # the first slot holds no bucket, but the time when the file was made
                _SLOT.pack_into(self._map, 0, 0, time.monotonic())
        self._slots = np.frombuffer(self._map, _SLOTS_TYPE)
        self._begins = float(_SLOT.unpack_from(self._map, 0)[1]) + _REST_SECONDS
        self._offsets: dict[int, int] = {}  # where each bucket was last in the file

    def take(self, bucket: int, n: int, limit: RateLimit, now: float) -> tuple[float, float]:
        """Takes places for messages that are handed over now, all or none.

        Args:
            bucket: the number of the bucket, 1 to 2^64 - 1.
            n: the number of messages, no more than the burst of `limit`.
            limit: the rate of the bucket.
            now: seconds, monotonic.

        Returns:
            (wait, full_at): a wait of 0 means that the places are taken, else there are places after so many seconds,
            if no other task takes them. `full_at` is when the bucket is full, seconds, monotonic.
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
        """Notes when messages were handed over, which may be later than when they took places; that time counts."""
        with self._locked():
            at, full_at = self._slot(bucket, now)
            _SLOT.pack_into(self._map, at, bucket, max(full_at, now + n / limit.rate))

    def _slot(self, bucket: int, now: float) -> tuple[int, float]:
        """Returns (position in the file, time when the bucket is full). A bucket that is not in the file is added."""
        at = self._offsets.get(bucket, 0)
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
        if len(self._offsets) >= _SLOTS:
            self._offsets.clear()
        self._offsets[bucket] = slot * _SLOT.size
        return self._offsets[bucket], float(self._slots["full_at"][slot])

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
    """A bucket of `Paces`, for the messages of a task that share a rate.

    Args:
        paces: the file with the bucket.
        limit: the rate.
        name: (source topic, subscription, key) of the messages; the key is empty where the rate is not by key.
    """

    def __init__(self, paces: Paces, limit: RateLimit, *name: str) -> None:
        self._paces = paces
        self._limit = limit
        digest = hashlib.blake2b("\0".join(name).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self._bucket = int.from_bytes(digest, "little") or 1
        self._waits_until = 0.0  # seconds, monotonic: there are no places before
        self._full_at = 0.0  # seconds, monotonic: the bucket is not full before

    @property
    def wait_seconds(self) -> float:
        """How long there are no places for sure, seconds; 0: there may be some now."""
        return max(0.0, self._waits_until - time.monotonic())

    def take(self, n: int) -> bool:
        """Takes places for messages that are handed over now, all or none; returns whether it got them."""
        now = time.monotonic()
        wait, self._full_at = self._paces.take(self._bucket, n, self._limit, now)
        if wait > 0:
            # Waits for several places at once, as far as the burst allows: to wait for each would take much CPU.
            self._waits_until = now + max(wait, min(_AT_ONCE_SECONDS, self._limit.burst / self._limit.rate / 2))
        return wait <= 0

    def note_taken(self, n: int) -> None:
        """Notes that messages which have taken places have been handed over now."""
        now = time.monotonic()
        if now + n / self._limit.rate > self._full_at:
            self._paces.note_taken(self._bucket, n, self._limit, now)
