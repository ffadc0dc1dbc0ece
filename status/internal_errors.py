"""Tells of errors that no code expects, where a process tries again or goes on: else nobody would hear of them."""

from __future__ import annotations

import logging
import threading

import pulsar
from deltalake.exceptions import DeltaError

from conf.errors import DelayLakeError, one_line
from status.alerts import INTERNAL_ERROR, Alerts

_log = logging.getLogger(__name__)

# What a broker, a network, a disk or a table may do at any time. What lasts of it has alerts of its own.
_EXPECTED = (DelayLakeError, OSError, pulsar.PulsarException, DeltaError)

_MOST_CHARACTERS = 300  # of an error's text, in which there may be parts of a message


class InternalErrors:
    """What fails again and again for a reason that nobody expected: an alert for each, until it succeeds. Thread-safe.

    Args:
        alerts: of the process.
    """

    def __init__(self, alerts: Alerts) -> None:
        self._alerts = alerts
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}  # how often it has failed since it succeeded last, by what was done

    def note(self, doing: str, error: Exception | str) -> None:
        """Begins an alert, or counts on, if an error is none of those that a broker, disk or table brings about.

        The first error in a row is logged with its stack.

        Args:
            doing: what was done; the same in `succeeded`.
            error: after which the caller tries again, or goes on; a text: the error of another process.
        """
        if isinstance(error, _EXPECTED):
            return
        text = one_line(error) if isinstance(error, str) else f"{type(error).__name__}: {one_line(error)}"
        with self._lock:
            self._counts[doing] = count = self._counts.get(doing, 0) + 1
            often = f" ({count:,} times)" if count > 1 else ""
            told = f"{text[:_MOST_CHARACTERS]}{often}; it is tried again"
            self._alerts.begin(INTERNAL_ERROR, doing, told, count=count)
        if count == 1:
            _log.error("%s: %s", doing, text, exc_info=None if isinstance(error, str) else error)

    def succeeded(self, doing: str) -> None:
        """Ends the alert of what was done, if there is one."""
        if doing in self._counts:  # nearly never, so that successes cost nothing
            with self._lock:
                self._counts.pop(doing, None)
                self._alerts.end(INTERNAL_ERROR, doing)

    def close(self) -> None:
        """Ends all alerts that were begun here: what was done is not done any more."""
        for doing in list(self._counts):
            self.succeeded(doing)
