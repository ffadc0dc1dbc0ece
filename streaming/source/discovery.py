"""Looks up the partitions of topics. A topic that can't be looked up, say for lack of rights, holds up no other."""

from __future__ import annotations

import logging

import pulsar

from conf.settings import Settings, rejects_topic
from status.alerts import STANDING, Alerts
from streaming.checkpoint.offset import UNKNOWN, Offset
from warehouse.routes.known_routes import KnownRoutes, known_routes

_log = logging.getLogger(__name__)


class Discovery:
    """Asks the broker for the partitions of source topics and destinations. Not thread-safe.

    Args:
        client: of the source process.
        settings: of the job; its routes name the topics.
        alerts: records source topics that are not read at all.
    """

    def __init__(self, client: pulsar.Client, settings: Settings, alerts: Alerts) -> None:
        self._client = client
        self._topics = _destinations(known_routes(settings))
        self._alerts = alerts
        self._partitions: dict[str, int] = {}
        self._why_not: dict[str, str] = {}  # the error for each topic that can't be looked up
        self._unread: set[str] = set()

    @property
    def destinations(self) -> dict[str, int]:
        """The number of partitions of each partitioned destination; UNKNOWN for one that was never looked up."""
        return {topic: n for topic, n in self._partitions.items() if n}

    def begin(self, at: Offset) -> None:
        """Begins with the numbers of partitions that an offset has for its destinations."""
        self._partitions = dict.fromkeys(_destinations(at.known_routes), 0) | at.destinations

    def look_at_destinations(self) -> None:
        """Looks up all destinations. One that can't be looked up keeps its number of partitions."""
        found = {}
        for topic in self._topics:
            partitions = self._look_up(topic)
            if partitions is None:
                found[topic] = self._partitions.get(topic, UNKNOWN)
            else:
                found[topic] = 0 if partitions == [topic] else len(partitions)
        self._partitions = found

    def source(self, topic: str, is_read: bool) -> list[str]:
        """Returns the names of a source topic's partitions: its own name if it has none; [] if it can't be looked up.

        Args:
            topic: the source topic.
            is_read: whether it has a receiver. Then `SourceWatch` reports that it stands still, else this does.
        """
        partitions = self._look_up(topic)
        if partitions is None and not is_read:
            self._unread.add(topic)
            self._alerts.begin(STANDING, topic, f"it is not read, for it can't be looked up: {self._why_not[topic]}")
        elif topic in self._unread:
            self._unread.remove(topic)
            self._alerts.end(STANDING, topic)
        return partitions or []

    def _look_up(self, topic: str) -> list[str] | None:
        try:
            partitions: list[str] = self._client.get_topic_partitions(topic)
        except pulsar.PulsarException as error:
            reason = f"{type(error).__name__}: {error}"
            if self._why_not.get(topic) != reason:
                _log.warning("%s can't be looked up, and is tried again: %s", topic, reason)
            self._why_not[topic] = reason
            return None
        if self._why_not.pop(topic, None) is not None:
            _log.warning("%s can be looked up again", topic)
        return partitions


def _destinations(routes: KnownRoutes) -> set[str]:
    """Returns the destinations and rejects topics of the routes that the settings have."""
    read = {topic: route for topic, route in routes.routes.items() if not route.is_missing}
    return {s.destination for route in read.values() for s in route.left} | {rejects_topic(topic) for topic in read}
