"""Tells of large messages that are late because they wait for room in the delayed index."""

from __future__ import annotations

import contextlib

from status.alerts import LARGE_LATE, Alerts
from streaming.checkpoint.offset import Offset
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import large_waiting

LATE_MILLIS = 10_000  # messages that have been due for less are not worth an alert
_LOOK_MILLIS = 5_000


class LateLargeMessages:
    """Has an alert LARGE_LATE for each source topic whose large messages are due and wait for room.

    Args:
        tables: of the warehouse.
        alerts: records them.
    """

    def __init__(self, tables: Tables, alerts: Alerts) -> None:
        self._tables = tables
        self._alerts = alerts
        self._named: set[str] = set()
        self._looked_at = 0  # ms since the epoch

    def look(self, offset: Offset) -> None:
        """Looks at what waits after a batch, once in five seconds, by the time of its offset."""
        large = offset.large_rows
        if large.after is None:
            self._name(set())
            return
        if 0 <= offset.now - self._looked_at < _LOOK_MILLIS:
            return
        self._looked_at = offset.now
        late = offset.now - LATE_MILLIS
        found = large_waiting(self._tables, offset.index_version, large.rule, large.after, offset.now)
        late_topics = [one for one in found if one.since <= late]
        with contextlib.suppress(OSError):  # the alerts are a file, whose disk may be full
            for one in late_topics:
                mib = max(1, one.n_bytes >> 20)
                text = f"{one.messages:,} large messages that are due wait for room, {mib:,} MiB"
                self._alerts.begin(LARGE_LATE, one.topic, text, one.since)
        self._name({one.topic for one in late_topics})

    def _name(self, topics: set[str]) -> None:
        """Ends the alerts of all other topics."""
        with contextlib.suppress(OSError):
            for topic in self._named - topics:
                self._alerts.end(LARGE_LATE, topic)
        self._named = topics
