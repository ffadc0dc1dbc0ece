"""Measures the last batches and Spark jobs, and derives the lookahead of the next batch from them."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from conf.settings import ReleaseSettings
from tracker.buckets.time_slots import SLOT_MILLIS

_FIRST_LEAD_MILLIS = 800  # the lead until one has been measured: how long before its first row is due a job starts
_MEASURED = 30  # the lookahead follows from so many last Spark jobs


class Lookahead:
    """Measures how long batches take until their releases are at hand, and Spark jobs until they are ready to send.

    Args:
        limits: the `release` section of the settings.
        batch_interval_millis: how long after a batch the next one begins when nothing is urgent, ms.
    """

    def __init__(self, limits: ReleaseSettings, batch_interval_millis: int) -> None:
        self._limits = limits
        self._batch_interval_millis = batch_interval_millis
        self._lags: deque[int] = deque(maxlen=_MEASURED)
        self._leads: deque[int] = deque([_FIRST_LEAD_MILLIS], maxlen=_MEASURED)
        self._last_batch: tuple[int, int] | None = None  # (time from which it looked ahead, cutoff)

    @property
    def lead_millis(self) -> int:
        """The lead: how long before its first row is due a Spark job has to start, ms."""
        return int(np.percentile(list(self._leads), 95) * 1.3) + 50

    @property
    def millis(self) -> int:
        """The lookahead, ms: the measured time from a batch to the first message of its job, and some spare time."""
        limits = self._limits
        if len(self._lags) < 5:
            return limits.lookahead_millis
        # The slowest batch counts, not the usual one: a batch that seals takes longer than the others.
        needed = max(self._lags) + self.lead_millis + SLOT_MILLIS
        return int(min(max(needed, limits.min_lookahead_millis), limits.lookahead_ceiling_millis))

    def farthest(self) -> int:
        """Returns the furthest time that a lookahead can reach from now, ms since the epoch.

        Messages in flight that are due later were dispatched before the clock was set back; their lanes wait for long.
        """
        return time.time_ns() // 1_000_000 + self._limits.lookahead_ceiling_millis

    def note_spark_job(self, millis: int) -> None:
        """Notes how long a Spark job took until it was ready to send, ms."""
        self._leads.append(millis)

    def note_batch(self, now: int, cutoff: int, first_due: int | None) -> None:
        """Measures the lag when a batch's releases are at hand: how far ahead the last batch should have looked.

        A message that is due just after the last batch's cutoff is in this batch's releases, which are at hand now.

        Args:
            now: the time from which this batch looked ahead, ms since the epoch.
            cutoff: of this batch, ms since the epoch.
            first_due: when the first planned row of this batch is due, ms since the epoch; None: it has none.
        """
        if first_due is not None:
            submitted = time.time_ns() // 1_000_000
            # Batches may have come more often than they will.
            lag = submitted - now + self._batch_interval_millis
            if self._last_batch is not None:  # else the time without a job would count
                last_now, last_cutoff = self._last_batch
                lag = max(lag, submitted - first_due + last_cutoff - last_now)
            self._lags.append(lag)
        self._last_batch = now, cutoff
