"""Checks whether all entries up to a given one have been read, when no more come."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from broker.client import PulsarError
from broker.position import Position
from broker.protocol.consumer import EntryConsumer, ReceivedEntry
from broker.pulsar_admin.topic_questions import TopicQuestions

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AllRead:
    """The result of a check: all entries up to `up_to` have been read."""

    up_to: Position
    topic_end: Position  # the topic's last entry


class EndCheck:
    """Checks, each time that no entry has come for a while, whether all entries up to an awaited one have been read.

    A consumer may never get the last entries of a topic: expired or skipped ones, or those of an aborted transaction.
    All entries up to a given one have been read when two checks in a row, half a second apart, find that the broker has
    sent these entries, and that the same consumer has answers and no entry left: the broker sends both in order.

    Args:
        topic: the topic partition's name.
        broker: says how far the broker has sent.
    """

    def __init__(self, topic: str, broker: TopicQuestions) -> None:
        self._topic = topic
        self._broker = broker
        # (consumer, awaited entry) of the last check, if it passed
        self._before: tuple[EntryConsumer, Position] | None = None

    def begin_anew(self) -> None:
        """Forgets the last check, because an entry has come."""
        self._before = None

    def check(
        self, consumer: EntryConsumer, awaited: Position, read_to: Position
    ) -> tuple[ReceivedEntry | None, AllRead | None]:
        """Checks once.

        Args:
            consumer: of the topic partition; it has had no entry for half a second.
            awaited: the entry up to which somebody waits.
            read_to: the entry up to which all are known to have been read.

        Returns:
            (entry, result): an entry that has come during the check, or None; the result is None where it is not
            known yet.
        """
        before, self._before = self._before, None
        if awaited <= read_to:
            return None, None
        try:
            cursor = self._broker.cursor(self._topic)
            if not cursor.has_sent(awaited):
                return None, None
            consumer.last_entry()
        except PulsarError as error:
            _log.warning("%s: whether all up to %s was read is not known: %s", self._topic, awaited, error)
            return None, None
        if (entry := consumer.receive(0)) is not None:
            return entry, None
        self._before = consumer, awaited
        if before is None or before[0] is not consumer or before[1] <= read_to:
            return None, None
        return None, AllRead(before[1], cursor.end)  # `awaited` may be later than in the last check
