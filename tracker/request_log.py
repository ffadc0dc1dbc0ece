"""The request ids of commands that have been applied."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from tracker.messages import BoolArray, Int64Array
from tracker.store import Store

KEPT_MILLIS = 24 * 3600 * 1000
KEPT_REQUESTS = 1_000_000

_CHUNK_REQUESTS = 8_192

_TABLE = "requests"
_LIST = "requests_list"


class RequestLog:
    """Remembers request ids, as hashes of 64 bits, for a day, and of the newest million.

    A command that comes again later than that changes nothing either, for what it would do is done.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        saved = store.get(_LIST, (0, 0))
        self._chunks: list[list[int]] = json.loads(saved) if saved else []  # [number, ids, when]

    def contains(self, request_ids: Sequence[str]) -> BoolArray:
        """Which of the ids are remembered."""
        if not self._chunks or not request_ids:
            return np.zeros(len(request_ids), dtype=np.bool_)
        known = np.concatenate(
            [np.frombuffer(self._store.get(_TABLE, (number, 0)) or b"", np.int64) for number, _, _ in self._chunks]
        )
        return np.isin(_hashes(request_ids), known)

    def add(self, request_ids: Sequence[str], now: int) -> None:
        """Remembers ids from now on, a time in ms since the epoch."""
        if not request_ids:
            return
        number, before = (self._chunks[-1][0], self._chunks[-1][1]) if self._chunks else (-1, _CHUNK_REQUESTS)
        data = b""
        if before < _CHUNK_REQUESTS:
            data = self._store.get(_TABLE, (number, 0)) or b""
            self._chunks.pop()
        else:
            number, before = number + 1, 0
        self._store.put(_TABLE, (number, 0), data + _hashes(request_ids).tobytes())
        self._chunks.append([number, before + len(request_ids), now])
        total = sum(n for _, n, _ in self._chunks)
        while total - self._chunks[0][1] >= KEPT_REQUESTS or self._chunks[0][2] < now - KEPT_MILLIS:
            oldest, n, _ = self._chunks.pop(0)
            self._store.remove(_TABLE, (oldest, 0))
            total -= n
        self._store.put(_LIST, (0, 0), json.dumps(self._chunks, separators=(",", ":")).encode())


def _hashes(request_ids: Sequence[str]) -> Int64Array:
    digests = b"".join(hashlib.blake2b(r.encode(), digest_size=8).digest() for r in request_ids)
    return np.frombuffer(digests, dtype=np.int64)
