"""Measures how late a broker's answers are to what a producer was given."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

_STEP_SECONDS = 0.05  # messages given within it share a time

# With so much answered a second a producer is fast: it is given more time, for what is due at one instant.
_FAST_MESSAGES = 1_000
_FAST_BYTES = 5_000_000
_FAST_PATIENCE = 5  # times as much


class Lag:
    """The messages of a producer that the broker has not answered, and since when the oldest waits.

    Args:
        limit_seconds: a producer whose oldest message waits for longer is slow; 0: none is.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._waiting: deque[tuple[int, float]] = deque()  # (last sequence id, monotonic time) of messages of a step
        self._begun_at = 0.0

    def note_given(self, sequence_id: int) -> None:
        """Notes that the producer was given a message."""
        now = time.monotonic()
        self._begun_at = self._begun_at or now
        if self._waiting and now - self._waiting[-1][1] < _STEP_SECONDS:
            self._waiting[-1] = sequence_id, self._waiting[-1][1]
        else:
            self._waiting.append((sequence_id, now))

    def why_slow(self, answered: int, ids: Sequence[int], n_bytes: int) -> str:
        """Returns why the producer is slow; an empty text: it is not.

        Args:
            answered: the last sequence id that the broker has answered.
            ids: the sequence ids of the producer's messages, ascending.
            n_bytes: the size of all of them.
        """
        while self._waiting and self._waiting[0][0] <= answered:
            self._waiting.popleft()
        if not self._waiting or not self._limit_seconds:
            return ""
        now = time.monotonic()
        waits = now - self._waiting[0][1]
        if waits <= self._limit_seconds:
            return ""
        n, seconds = bisect_right(ids, answered), now - self._begun_at
        is_fast = n > _FAST_MESSAGES * seconds or n / len(ids) * n_bytes > _FAST_BYTES * seconds
        if is_fast and waits <= _FAST_PATIENCE * self._limit_seconds:
            return ""
        return f"it took {n:,} messages in {seconds:.1f} s, and {len(ids) - n:,} wait"
