"""The log of request ids, by which repeated commands are recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import numpy as np

from tracker.messages import Int64Array
from tracker.store import Store

KEPT_MILLIS = 24 * 3600 * 1000  # how long an id is remembered, unless there are more than KEPT_REQUESTS
KEPT_REQUESTS = 1_000_000  # at least this many ids, the newest, are remembered for KEPT_MILLIS

# The log is written, and forgotten, in chunks: of this many ids, or of the ids of this time, ms.
_CHUNK_REQUESTS = 8_192
_CHUNK_MILLIS = 3600 * 1000

# How long the table `outcomes` has to keep the answers to a request id, ms.
ANSWERS_KEPT_MILLIS = KEPT_MILLIS + 2 * _CHUNK_MILLIS

_TABLE = "requests"
_BODIES = "request_bodies"
_LIST = "requests_list"


class RequestLog:
    """Remembers the newest million request ids for a day, each with a hash of its command's body.

    The log has ids as 64-bit hashes, too, so a hit may be another id with the same hash: the table `outcomes` has the
    ids themselves. A body of 0 is not known.

    Args:
        store: where the log is kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        saved = store.get(_LIST, (0, 0))
        # [number, count of ids, when the last id was added, when the first was]; earlier versions lack the last value.
        self._chunks: list[list[int]] = json.loads(saved) if saved else []

    def find(self, request_ids: Iterable[str], now: int) -> dict[str, set[int]]:
        """Finds ids that are remembered.

        Args:
            request_ids: the ids to look for.
            now: ms since the epoch.

        Returns:
            by id that is remembered: the body hashes of the commands that had it.
        """
        ids = list(dict.fromkeys(request_ids))
        if not self._chunks or not ids:
            return {}
        hashes = _hashes(ids)
        wanted = np.sort(hashes)
        bodies: dict[int, set[int]] = {}
        for number, n, last, *_ in self._chunks:
            if last < now - KEPT_MILLIS:
                continue
            known = np.frombuffer(self._store.get(_TABLE, (number, 0)) or b"", np.int64)
            is_found = wanted[np.minimum(np.searchsorted(wanted, known), len(wanted) - 1)] == known
            if is_found.any():
                of_chunk = np.frombuffer(self._bodies(number, n), np.int64)
                for found, body in zip(known[is_found].tolist(), of_chunk[is_found].tolist(), strict=True):
                    bodies.setdefault(found, set()).add(body)
        return {i: bodies[h] for i, h in zip(ids, hashes.tolist(), strict=True) if h in bodies}

    def add(self, bodies: Mapping[str, int], now: int) -> None:
        """Remembers ids, and forgets the oldest beyond the limits.

        Args:
            bodies: by id: the hash of its command's body, 64 bits.
            now: ms since the epoch.
        """
        if not bodies:
            return
        number, before, first = -1, _CHUNK_REQUESTS, now
        if self._chunks:
            number, before, last, *begun = self._chunks[-1]
            first = begun[0] if begun else last
        data = of_before = b""
        if before < _CHUNK_REQUESTS and now - first < _CHUNK_MILLIS:
            data, of_before = self._store.get(_TABLE, (number, 0)) or b"", self._bodies(number, before)
            self._chunks.pop()
        else:
            number, before, first = number + 1, 0, now
        self._store.put(_TABLE, (number, 0), data + _hashes(bodies).tobytes())
        self._store.put(_BODIES, (number, 0), of_before + np.array(list(bodies.values()), np.int64).tobytes())
        self._chunks.append([number, before + len(bodies), now, first])
        total = sum(chunk[1] for chunk in self._chunks)
        while total - self._chunks[0][1] >= KEPT_REQUESTS or self._chunks[0][2] < now - KEPT_MILLIS:
            oldest, n, *_ = self._chunks.pop(0)
            self._store.remove(_TABLE, (oldest, 0))
            self._store.remove(_BODIES, (oldest, 0))
            total -= n
        self._store.put(_LIST, (0, 0), json.dumps(self._chunks, separators=(",", ":")).encode())

    def _bodies(self, number: int, n: int) -> bytes:
        """Returns the body hashes of a chunk of n ids; 0 for ids of earlier versions, which kept no bodies."""
        return (self._store.get(_BODIES, (number, 0)) or b"").rjust(8 * n, b"\0")


def _hashes(request_ids: Iterable[str]) -> Int64Array:
    digests = b"".join(hashlib.blake2b(r.encode(), digest_size=8).digest() for r in request_ids)
    return np.frombuffer(digests, dtype=np.int64)
