"""Remembers which entries of a topic partition have come in, and which of them have been acknowledged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import pulsar

from broker.position import START, EntrySet, Position
from broker.pulsar_admin.topic_questions import TopicQuestions
from streaming.source.receiving.chunked_messages import ChunkedMessages
from tracker.wire.message_id_pb2 import MessageIdData

_log = logging.getLogger(__name__)


class Acknowledgements:
    """Knows the entries that have come in, and acknowledges those that are durable.

    Args:
        topic: the topic partition's name.
        broker: says whether a missing entry is the first chunk of a message.
        after: the last entry that an earlier run has taken in.
        lock: guards all attributes.
    """

    def __init__(self, topic: str, broker: TopicQuestions, after: Position, lock: threading.Condition) -> None:
        self._topic = topic
        self._lock = lock
        self._chunked = ChunkedMessages(topic, broker)
        self._entries = EntrySet()  # the entries after `_acknowledged` that have come
        self._acknowledged = START
        self._taken_in_to = after  # entries up to this one were taken in before, and are dropped when they come again

    def has_come(self, position: Position) -> bool:
        """Whether an entry after the last acknowledged one has come before."""
        return position in self._entries

    def was_taken_in(self, position: Position) -> bool:
        """Whether an entry that comes now was taken in before and is to be dropped; notes that it has come."""
        if position > self._taken_in_to:
            return False
        if position > self._acknowledged:
            with self._lock:
                self._entries.add(position)
        return True

    def add(self, runs: Iterable[tuple[Position, Position]]) -> bool:
        """Adds entries that have come. The caller holds the lock.

        Args:
            runs: (first entry, last entry) of entries without a gap.

        Returns:
            whether entries are missing between those that have come.
        """
        for first, last in runs:
            self._entries.add_run(first, last)
        self._entries.forget(self._acknowledged)
        return bool(self._entries.gaps(self._acknowledged))

    def note_chunks(self, message_id: pulsar.MessageId, position: Position) -> None:
        """Notes the first and the last chunk of a message that has come, if it is chunked.

        Args:
            message_id: of the message.
            position: of its last chunk.
        """
        data = MessageIdData.FromString(message_id.serialize())
        if data.HasField("first_chunk_message_id"):
            first = data.first_chunk_message_id
            self._chunked.add(Position(first.ledgerId, first.entryId), position)

    def acknowledge(self, consumer: pulsar.Consumer, last: Position) -> None:
        """Acknowledges all entries up to a given one, but none from the first incomplete chunked message on.

        A failure is only logged: a later acknowledgement covers these entries, too.
        """
        with self._lock:
            gaps = self._entries.gaps(self._acknowledged)
            if self._entries.last < last:  # a consumer gets no entry between these two
                gaps.append((max(self._entries.last, self._acknowledged), last.next))
        try:
            last = self._chunked.limit(last, gaps)
            if last <= self._acknowledged:
                return
            consumer.acknowledge_cumulative(pulsar.MessageId(-1, last.ledger_id, last.entry_id, -1))
        except Exception as error:
            _log.warning("%s: acknowledging %s failed, a later one will do: %s", self._topic, last, error)
            return
        with self._lock:
            # The acknowledgement may be lost with the connection: then its entries come again, and are dropped.
            self._acknowledged = last
            self._taken_in_to = max(self._taken_in_to, last)

    def repeat(self, consumer: pulsar.Consumer, end: Position) -> None:
        """Repeats the acknowledgement of a topic's last entry, in case it was lost: no later one would cover it.

        Args:
            consumer: of the subscription.
            end: the topic partition's last entry. Nothing happens if it has not been acknowledged.
        """
        last = self._acknowledged
        if not START < end <= last:
            return
        try:
            consumer.acknowledge_cumulative(pulsar.MessageId(-1, last.ledger_id, last.entry_id, -1))
        except Exception as error:
            _log.warning("%s: acknowledging %s again failed: %s", self._topic, last, error)
