"""Remembers producers whose entries the broker can't describe, so that it is not asked about them for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

from broker.remembered import Remembered

MOST_PRODUCERS = 1_000  # of a topic partition that are remembered: whoever publishes chooses their names

_MOST_IN_A_ROW = 3
_SILENT_SECONDS = 600.0


class SilentProducers:
    """Producers of one topic partition that the broker is not asked about for a while. Not safe in several threads.

    The broker can't describe entries of producers that publish encrypted and compressed, and each request takes
    seconds. After three such entries in a row, it is not asked about the producer's entries for ten minutes; then about
    one of them.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_a_row: Remembered[str, int] = Remembered(MOST_PRODUCERS)
        self._silent_until: Remembered[str, float] = Remembered(MOST_PRODUCERS)

    def is_silent(self, producer: str) -> bool:
        """Whether the broker should not be asked about a producer's entries now."""
        return self._silent_until.get(producer, -float("inf")) > self._clock()

    def add(self, producer: str) -> None:
        """Notes that the broker could not describe an entry of a producer."""
        self._in_a_row[producer] = self._in_a_row.get(producer, 0) + 1
        if self._in_a_row[producer] >= _MOST_IN_A_ROW:
            self._silent_until[producer] = self._clock() + _SILENT_SECONDS

    def remove(self, producer: str) -> None:
        """Notes that the broker has described an entry of a producer."""
        self._in_a_row.pop(producer, None)
