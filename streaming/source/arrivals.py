"""Wakes the loop that ends batches, when what has come in may be a reason to end one."""

from __future__ import annotations

import threading

from tracker.due_time import MAX_TIME_MILLIS

ANY = MAX_TIME_MILLIS  # for `Arrivals.wake_until`: whatever comes in


class Arrivals:
    """What receivers tell the loop. Thread-safe.

    The loop looks at all receivers. To do so for each message of hundreds of topics would cost more than the messages.

    Attributes:
        wake_until: messages wake the loop that are due by this time, ms since the epoch.
    """

    def __init__(self) -> None:
        self.wake_until = ANY
        self._has_come = threading.Event()

    def note(self, earliest: int) -> None:
        """Notes that something has come in.

        Args:
            earliest: when the first of it is due, ms since the epoch; 0: it can't wait.
        """
        if earliest <= self.wake_until:
            self._has_come.set()

    def note_command(self, earliest: int) -> None:
        """Notes that commands have come in, which can't wait."""
        self.note(0)

    def wait(self, seconds: float) -> None:
        """Waits until something has come in for which to wake up, but no longer."""
        self._has_come.wait(seconds)
        self._has_come.clear()
