"""Keeps the spacing of shaped messages whose releases are late: one after another, as far apart as they were due."""

from __future__ import annotations

import threading
from collections.abc import Mapping

# Releases are this late at most without being put off, ms: it always takes some time from a tick to its senders.
_LATE_MILLIS = 500

# From the answer until the senders have their first message ready, ms.
_AHEAD_MILLIS = 200

Target = tuple[str, int]  # source topic, subscription's number


class Spacing:
    """Puts off what releases have for shaped subscriptions, where it can't be sent when it is due.

    It is for tasks on several machines, which don't share a file: see `streaming/release/task/shared_paces.py`.

    After a start, or when the job or the broker stood still, several releases are late at once, and their lanes would
    send them side by side, faster than the subscription's rate. Used by several threads.

    Args:
        pace_file: by which all tasks keep to the rates themselves, so that nothing is put off; empty: there is none.
    """

    def __init__(self, pace_file: str = "") -> None:
        self.pace_file = pace_file
        self._lock = threading.Lock()
        self._until: dict[Target, int] = {}  # when the last message is sent of what was put off, ms since the epoch

    def put_off(self, shaped: Mapping[Target, tuple[int, int]], now: int) -> dict[Target, int]:
        """Returns by how much a release's messages are to be sent later than they are due, ms; on time: not at all.

        Args:
            shaped: by subscription when its first and its last message is due, ms since the epoch.
            now: ms since the epoch.
        """
        if self.pace_file:
            return {}
        found: dict[Target, int] = {}
        with self._lock:
            for target, (first, last) in shaped.items():
                begin = max(now + _AHEAD_MILLIS if first < now - _LATE_MILLIS else first, self._until.get(target, 0))
                if begin > first:
                    found[target] = begin - first
                    self._until[target] = last + begin - first
        return found
