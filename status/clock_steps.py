"""Measures steps of the machine's clock: how far it was set ahead or back."""

from __future__ import annotations

import time
from collections.abc import Callable

_STEP_MILLIS = 500  # smaller steps do not count; NTP slews a clock by half a millisecond a second
_READ_SECONDS = 0.05  # the most time between the readings of two clocks that are compared


class ClockSteps:
    """Compares the machine's clock with one that never jumps.

    Args:
        wall: returns ms since the epoch.
        monotonic: returns seconds.
    """

    def __init__(
        self,
        wall: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._last: float | None = None

    def look(self) -> int:
        """Returns the step since the last look, ms: negative where the clock was set back; 0: it was not set.

        After a machine has slept, its clock may count as set ahead.
        """
        before = self._monotonic()
        now = self._wall()
        after = self._monotonic()
        if after - before > _READ_SECONDS:
            return 0
        difference = now - after * 1000
        step = 0 if self._last is None else round(difference - self._last)
        self._last = difference
        return step if abs(step) >= _STEP_MILLIS else 0
