"""Checks whether all entries up to a given one have been read, when no more messages come."""

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
    """The result of a check: all entries up to `up_to` have been read."""

    up_to: Position
    topic_end: Position  # the topic's last entry


class EndCheck:
    """Checks, each time that no message has come for a while, whether all entries up to an awaited one have been read.

    A consumer may never get the last entries of a topic: expired or skipped ones, or those of an aborted transaction.
    All entries up to a given one have been read when two checks in a row, half a second apart, find that the broker has
    sent these entries, and that the consumer answers on the same connection and has no message left.

    Args:
        topic: the topic partition's name.
        broker: says which connection the consumer has, and how far the broker has sent.
    """

    def __init__(self, topic: str, broker: TopicQuestions) -> None:
        self._topic = topic
        self._broker = broker
        self._before: tuple[str, Position] | None = None  # (connection, awaited entry) of the last check, if it passed

    def begin_anew(self) -> None:
        """Forgets the last check, because a message has come."""
        self._before = None

    def check(self, consumer: pulsar.Consumer, awaited: Position, read_to: Position) -> tuple[Any, AllRead | None]:
        """Checks once.

        Args:
            consumer: of the topic partition; it has had no message for half a second.
            awaited: the entry up to which somebody waits.
            read_to: the entry up to which all are known to have been read.

        Returns:
            (message, result): a message that has come during the check, or None; the result is None where it is not
            known yet.
        """
        before, self._before = self._before, None
        if awaited <= read_to:
            return None, None
        try:
            connection = self._broker.connection(self._topic)
            if connection is None:
                return None, None
            cursor = self._broker.cursor(self._topic)
            if not cursor.has_sent(awaited):
                return None, None
            consumer.get_last_message_id()
            try:
                return consumer.receive(1), None
            except pulsar.Timeout:
                if self._broker.connection(self._topic) != connection:
                    return None, None
        except PulsarError as error:
            _log.warning("%s: whether all up to %s was read is not known: %s", self._topic, awaited, error)
            return None, None
        self._before = connection, awaited
        if before is None or before[0] != connection or before[1] <= read_to:
            return None, None
        return None, AllRead(before[1], cursor.end)  # `awaited` may be later than in the last check
