"""Producers of whose entries the broker tells nothing: as each question takes seconds, it is not asked for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

_MOST_IN_A_ROW = 3
_SILENT_SECONDS = 600.0


class SilentProducers:
    """Producers of one topic partition that the broker is not asked about for a while. Not safe in several threads.

    The broker mostly tells nothing of an entry because of how its producer publishes: encrypted and compressed. After
    three entries in a row of which it told nothing, it is not asked about the producer's next ones for ten minutes;
    then it is asked about one of them.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_a_row: dict[str, int] = {}
        self._silent_until: dict[str, float] = {}

    def is_silent(self, producer: str) -> bool:
        """Whether the broker need not be asked about a producer's entries now."""
        return self._silent_until.get(producer, -float("inf")) > self._clock()

    def add(self, producer: str) -> None:
        """Notes that the broker told nothing of an entry of a producer."""
        self._in_a_row[producer] = self._in_a_row.get(producer, 0) + 1
        if self._in_a_row[producer] >= _MOST_IN_A_ROW:
            self._silent_until[producer] = self._clock() + _SILENT_SECONDS

    def remove(self, producer: str) -> None:
        """Notes that the broker told something of an entry of a producer."""
        self._in_a_row.pop(producer, None)
