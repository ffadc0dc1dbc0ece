"""How much all receivers together may keep: the room that they share."""

from __future__ import annotations

import threading

# Each receiver may keep so much in any case, so that none waits for the others.
_OWN_BYTES = 1 << 20


class Room:
    """The bytes of messages that have come in and that Spark has not committed, of all receivers. Thread-safe.

    Args:
        max_bytes: of all receivers together, about.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: dict[str, int] = {}
        self._total = 0

    def note(self, name: str, n_bytes: int) -> None:
        """Notes how many bytes a receiver keeps now."""
        with self._lock:
            self._total += n_bytes - self._kept.get(name, 0)
            self._kept[name] = n_bytes

    def has_room(self, name: str) -> bool:
        """Whether a receiver may take more in: it keeps little, or all together keep less than they may."""
        with self._lock:
            return self._kept.get(name, 0) < _OWN_BYTES or self._total < self._max_bytes
