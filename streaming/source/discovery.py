"""Looks up which partitions topics have. A topic that can't be looked up, say for lack of rights, holds up no other."""

from __future__ import annotations

import logging

import pulsar

from conf.settings import Settings, rejects_topic
from status.troubles import STANDING, Troubles
from streaming.checkpoint.offset import UNKNOWN, Offset
from warehouse.routes.known_routes import KnownRoutes, known_routes

_log = logging.getLogger(__name__)


class Discovery:
    """Looks topics up at the broker whenever it is asked to; not safe in several threads at once.

    Args:
        client: of the job's source process.
        settings: their routes have the topics.
        troubles: is told of source topics that are not read at all.
    """

    def __init__(self, client: pulsar.Client, settings: Settings, troubles: Troubles) -> None:
        self._client = client
        self._topics = _destinations(known_routes(settings))
        self._troubles = troubles
        self._partitions: dict[str, int] = {}
        self._why_not: dict[str, str] = {}  # topics that can't be looked up
        self._unread: set[str] = set()

    @property
    def destinations(self) -> dict[str, int]:
        """How many partitions each partitioned destination has; UNKNOWN for one that could never be looked up."""
        return {topic: n for topic, n in self._partitions.items() if n}

    def begin(self, at: Offset) -> None:
        """Begins with the numbers of partitions that an offset has of its routes' destinations."""
        self._partitions = dict.fromkeys(_destinations(at.known_routes), 0) | at.destinations

    def look_at_destinations(self) -> None:
        """Looks all destinations up; one that can't be looked up keeps its number of partitions."""
        found = {}
        for topic in self._topics:
            partitions = self._look_up(topic)
            if partitions is None:
                found[topic] = self._partitions.get(topic, UNKNOWN)
            else:
                found[topic] = 0 if partitions == [topic] else len(partitions)
        self._partitions = found

    def source(self, topic: str, is_read: bool) -> list[str]:
        """Returns the names of a source topic's partitions, or its own without any; none where it can't be looked up.

        Args:
            is_read: there is a receiver for it: then `SourceWatch` reports that it stands still, and this does not.
        """
        partitions = self._look_up(topic)
        if partitions is None and not is_read:
            self._unread.add(topic)
            self._troubles.begin(STANDING, topic, f"it is not read, for it can't be looked up: {self._why_not[topic]}")
        elif topic in self._unread:
            self._unread.remove(topic)
            self._troubles.end(STANDING, topic)
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
