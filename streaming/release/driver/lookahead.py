"""How far ahead the next batch has to look, as measured by the last ones."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from conf.settings import ReleaseSettings
from tracker.buckets.time_slots import SLOT_MILLIS

_FIRST_LEAD_MILLIS = 800  # how long before its first row is due a job starts, until that has been measured
_MEASURED = 30  # how many of the last jobs decide how far to look ahead


class Lookahead:
    """Measures how long batches take until their releases are at hand, and jobs until they are ready to send.

    Args:
        limits: the `release` section of the settings.
    """

    def __init__(self, limits: ReleaseSettings) -> None:
        self._limits = limits
        self._lags: deque[int] = deque(maxlen=_MEASURED)
        self._leads: deque[int] = deque([_FIRST_LEAD_MILLIS], maxlen=_MEASURED)
        self._last_batch: tuple[int, int] | None = None  # the time it looked ahead from, and its cutoff

    @property
    def lead_millis(self) -> int:
        """How long before its first row is due a job has to start, ms."""
        return int(np.percentile(list(self._leads), 95) * 1.3) + 50

    @property
    def millis(self) -> int:
        """How long it takes from a batch to the first send of its job, as measured, with some to spare, ms."""
        limits = self._limits
        if len(self._lags) < 5:
            return limits.lookahead_millis
        # The slowest batch counts, not the usual one: one that seals takes longer than the ticks between.
        needed = max(self._lags) + self.lead_millis + SLOT_MILLIS
        return int(min(max(needed, limits.min_lookahead_millis), limits.lookahead_ceiling_millis))

    def farthest(self) -> int:
        """Returns how far any lookahead reaches from now, ms since the epoch.

        What is in flight and due later was handed out before the clock was set back: its lane waits for long.
        """
        return time.time_ns() // 1_000_000 + self._limits.lookahead_ceiling_millis

    def note_job(self, millis: int) -> None:
        """Notes how long a job took to be ready to send, ms."""
        self._leads.append(millis)

    def note_batch(self, now: int, cutoff: int, first_due: int | None) -> None:
        """Notes how far ahead the last batch should have looked for this one's releases to be at hand on time.

        A message that is due just beyond the last batch's cutoff was released by this one, whose releases are at hand
        now.

        Args:
            now: the time from which this batch looked ahead, ms since the epoch.
            cutoff: this batch's, ms since the epoch.
            first_due: when the first of its planned rows is due, ms since the epoch; None: it has none.
        """
        if first_due is not None:
            submitted = time.time_ns() // 1_000_000
            lag = submitted - now
            if self._last_batch is not None:  # else the time without a job would count
                last_now, last_cutoff = self._last_batch
                lag = max(lag, submitted - first_due + last_cutoff - last_now)
            self._lags.append(lag)
        self._last_batch = now, cutoff
