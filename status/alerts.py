"""Alerts: faults with which the job goes on; `delaylake status`, metrics and dashboard show them."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from conf.files import replace_file

# Kinds of alert.
STANDING = "standing"  # a source topic that is not read although it has messages, or may have some
NOT_SEEN = "not_seen"  # entries of a source topic that the broker never handed to the job
NOT_SEEN_REASON = "not seen"  # begins the reason of their rows in `rejects`
UNWRITABLE = "unwritable"  # a destination that takes no messages
SLOW = "slow"  # a destination that takes fewer messages than are due for it
NO_BROKER = "no_broker"  # the broker does not answer at the start
NO_ADMIN = "no_admin"  # the broker's admin API does not answer
FOREIGN_PRODUCER = "foreign_producer"  # a destination to which somebody else publishes under the job's producer name
SUBSCRIPTION_RESET = "subscription_reset"  # the job's subscription of a source topic partition went back
NOT_SENT = "not_sent"  # a source topic with messages that no message to a destination could be made of
FAILED = "failed"  # a source topic with messages, or commands, for which something has failed in the operator
QUERY_FAILED = "query_failed"  # the job's query has failed, and has not run for long since
INTERNAL_ERROR = "internal_error"  # what the job does, of a topic perhaps, and fails with an error that no code expects
DISK = "disk"  # a folder whose disk is full, or nearly so
LARGE_LATE = "large_late"  # a source topic with large messages that are due, and wait for room
NO_ROUTE = "no_route"  # a topic or subscription that has pending messages and is not in the settings

# Alerts of these kinds are counted, and last until the job is started again.
COUNTED = (NOT_SEEN, NOT_SENT, FAILED)

# Alerts of these kinds tell of something that is over: no process reports it again.
_EVENTS = (*COUNTED, SUBSCRIPTION_RESET)


@dataclass(frozen=True)
class Alert:
    """Something that somebody has to look at.

    Attributes:
        kind: one of the constants of this module.
        name: of the topic, topic partition, destination, subscription or folder that it is about.
        since: when it began, ms since the epoch.
        text: the fault, and its cause if that is known; one line that does not repeat the name.
        count: the number of entries or messages, for the kinds COUNTED; of errors in a row, for INTERNAL_ERROR; else 1.
    """

    kind: str
    name: str
    since: int
    text: str
    count: int = 1


class Alerts:
    """The current alerts of one process, and of another one that it follows. Thread-safe.

    Args:
        file: gets the process's own alerts at each change, for another process to `follow`; None: there is no file.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._lock = threading.RLock()
        self._own: dict[tuple[str, str], Alert] = {}
        self._followed: Path | None = None

    def begin(self, kind: str, name: str, text: str, since: int | None = None, count: int = 1) -> None:
        """Begins an alert, or changes the text and the count of a current one, which keeps its `since`.

        Args:
            kind: as of `Alert`.
            name: as of `Alert`.
            text: as of `Alert`; whitespace becomes single spaces.
            since: ms since the epoch; None: now.
            count: as of `Alert`.
        """
        with self._lock:
            known = self._own.get((kind, name))
            if known is not None:
                since = known.since
            elif since is None:
                since = time.time_ns() // 1_000_000
            alert = Alert(kind, name, since, " ".join(text.split()), count)
            if alert != known:
                self._own[kind, name] = alert
                self._write()

    def add(self, kind: str, name: str, text: str, count: int) -> None:
        """Adds to the count of an alert of a kind in COUNTED, and replaces its text; begins it if it is new."""
        with self._lock:
            known = self._own.get((kind, name))
            self.begin(kind, name, text, count=count + (0 if known is None else known.count))

    def end(self, kind: str, name: str) -> None:
        """Ends an alert, if it is current."""
        with self._lock:
            if self._own.pop((kind, name), None) is not None:
                self._write()

    def follow(self, file: Path) -> None:
        """Adds the alerts that another process writes to a file, in place of those of the process followed before."""
        with self._lock:
            self.unfollow()
            self._followed = file

    def unfollow(self) -> None:
        """Reads the alerts of the process followed a last time. Call it when that has ended, before its file is gone.

        Those that tell of events stay, because no process reports them again.
        """
        with self._lock:
            for alert in self._followed_alerts():
                if alert.kind in _EVENTS:
                    self._own[alert.kind, alert.name] = _merged(self._own, alert)
            self._followed = None

    def current(self) -> list[Alert]:
        """Returns the current alerts of both processes, the oldest first."""
        with self._lock:
            current = dict(self._own)
            for alert in self._followed_alerts():
                current[alert.kind, alert.name] = _merged(current, alert)
        return sorted(current.values(), key=lambda alert: (alert.since, alert.kind, alert.name))

    def _followed_alerts(self) -> list[Alert]:
        return [] if self._followed is None else _read(self._followed)

    def _write(self) -> None:
        """Replaces the file: a reader sees the old alerts or the new ones, whole."""
        if self._file is not None:
            replace_file(self._file, json.dumps([asdict(alert) for alert in self._own.values()]).encode())


def _merged(known: dict[tuple[str, str], Alert], alert: Alert) -> Alert:
    earlier = known.get((alert.kind, alert.name))
    if earlier is None:
        return alert
    count = earlier.count + alert.count if alert.kind in COUNTED else alert.count
    return replace(alert, since=min(earlier.since, alert.since), count=count)


def _read(file: Path) -> list[Alert]:
    try:
        return [Alert(**values) for values in json.loads(file.read_text())]
    except FileNotFoundError:
        return []  # the other process has none, or has ended
