"""Finds out whether all has been read up to an entry, where nothing comes any more."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pulsar

from broker.client import PulsarError
from broker.position import Position
from broker.pulsar_admin.topic_questions import TopicQuestions

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AllRead:
    """All has been read that comes up to an entry."""

    up_to: Position
    topic_end: Position  # the topic's last entry


class EndCheck:
    """Checks whether all has been read that comes up to a wanted entry, each time that nothing has come for a while.

    The last entries of a topic may be none that a consumer gets: expired, skipped, of an aborted transaction. All
    up to an entry has come when the broker has sent what is before, the consumer answers on the same connection,
    and has nothing left; all that twice in a row, half a second apart.

    Args:
        topic: the topic partition's name.
        broker: is asked for the connection, and for how far it has sent.
    """

    def __init__(self, topic: str, broker: TopicQuestions) -> None:
        self._topic = topic
        self._broker = broker
        self._before: tuple[str, Position] | None = None  # of the check before: the connection, and what was wanted

    def begin_anew(self) -> None:
        """Has the next check be a first one: something has come."""
        self._before = None

    def check(self, consumer: pulsar.Consumer, wanted: Position, read_to: Position) -> tuple[Any, AllRead | None]:
        """Checks once.

        Args:
            consumer: of the topic partition; nothing has come from it for half a second.
            wanted: somebody waits until this entry has been read.
            read_to: all has been read that comes up to this entry.

        Returns:
            the next message if there is one after all, else None; and what has been read; None: that is not known yet.
        """
        before, self._before = self._before, None
        if wanted <= read_to:
            return None, None
        try:
            connection = self._broker.connection(self._topic)
            if connection is None:
                return None, None
            cursor = self._broker.cursor(self._topic)
            if not cursor.has_sent(wanted):
                return None, None
            consumer.get_last_message_id()
            try:
                return consumer.receive(1), None
            except pulsar.Timeout:
                if self._broker.connection(self._topic) != connection:
                    return None, None
        except PulsarError as error:
            _log.warning("%s: whether all up to %s was read is not known: %s", self._topic, wanted, error)
            return None, None
        self._before = connection, wanted
        if before is None or before[0] != connection or before[1] <= read_to:
            return None, None
        return None, AllRead(before[1], cursor.end)  # by now more may be wanted
