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


def queue_size(mean_bytes: float, receivers: int, max_bytes: int, most: int) -> int:
    """Returns how many messages the client may fetch ahead for a receiver.

    Args:
        mean_bytes: of a message.
        receivers: the number of them.
        max_bytes: that all clients together may fetch ahead.
        most: messages.
    """
    share = max_bytes / max(1, receivers)
    return int(min(most, max(1.0, share / max(1.0, mean_bytes))))
