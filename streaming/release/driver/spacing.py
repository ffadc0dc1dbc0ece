"""Spaces late shaped messages: they are sent one after another, as far apart as they were due."""

from __future__ import annotations

import threading
from collections.abc import Mapping

# A release that is later than this is put off, ms. It always takes some time from a tick to its senders.
_LATE_MILLIS = 500

# The time from `put_off` until the senders have their first message ready, ms.
_AHEAD_MILLIS = 200

ShapedRecipient = tuple[str, int]  # source topic, subscription's number


class Spacing:
    """Puts off messages for shaped subscriptions whose releases are late. Thread-safe.

    After a start, or when the job or the broker stood still, several releases are late at once. Their lanes would send
    them side by side, faster than the subscription's rate. Tasks on one machine avoid that with a shared file
    (`streaming/release/task/shared_paces.py`); tasks on several machines need this class.

    Args:
        pace_file: the shared file of the tasks: with it nothing is put off; empty: there is none.
    """

    def __init__(self, pace_file: str = "") -> None:
        self.pace_file = pace_file
        self._lock = threading.Lock()
        self._until: dict[ShapedRecipient, int] = {}  # the last time of what was put off, ms since the epoch

    def put_off(self, shaped: Mapping[ShapedRecipient, tuple[int, int]], now: int) -> dict[ShapedRecipient, int]:
        """Returns how much later than due a release's messages are to be sent, ms; recipients on time are left out.

        Args:
            shaped: by recipient when its (first, last) message is due, ms since the epoch.
            now: ms since the epoch.
        """
        if self.pace_file:
            return {}
        found: dict[ShapedRecipient, int] = {}
        with self._lock:
            for recipient, (first, last) in shaped.items():
                begin = max(now + _AHEAD_MILLIS if first < now - _LATE_MILLIS else first, self._until.get(recipient, 0))
                if begin > first:
                    found[recipient] = begin - first
                    self._until[recipient] = last + begin - first
        return found

    def forget(self, shaped: Mapping[ShapedRecipient, tuple[int, int]], put_off: Mapping[ShapedRecipient, int]) -> None:
        """Notes that a release's messages have been sent, or were not: no other one has to come after their times.

        Args:
            shaped: as of `put_off`.
            put_off: what `put_off` has returned for it.
        """
        with self._lock:
            for recipient, millis in put_off.items():
                if self._until.get(recipient) == shaped[recipient][1] + millis:  # else another release comes after them
                    del self._until[recipient]
