"""Which entries of a topic partition have come, and up to which of them the broker has been told so."""

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
    """Knows which entries have come before, and acknowledges what is durable.

    Args:
        topic: the topic partition's name.
        broker: is asked about messages in several chunks that are not whole yet.
        after: the last entry that an earlier run has taken in.
        lock: guards everything.
    """

    def __init__(self, topic: str, broker: TopicQuestions, after: Position, lock: threading.Condition) -> None:
        self._topic = topic
        self._lock = lock
        self._chunked = ChunkedMessages(topic, broker)
        self._entries = EntrySet()  # that have come, beyond the last acknowledged one
        self._acknowledged = START
        self._settled = after  # what comes up to here was taken in before, and is dropped

    def has_come(self, position: Position) -> bool:
        """Whether an entry beyond the last acknowledged one has come before."""
        return position in self._entries

    def is_settled(self, position: Position) -> bool:
        """Whether an entry was taken in before, so that it is dropped when it comes; it is noted as one that has."""
        if position > self._settled:
            return False
        if position > self._acknowledged:
            with self._lock:
                self._entries.add(position)
        return True

    def add(self, runs: Iterable[tuple[Position, Position]]) -> bool:
        """Adds entries that have come, as first and last ones of runs; returns whether any before others are missing.

        To be called with the lock.
        """
        for first, last in runs:
            self._entries.add_run(first, last)
        self._entries.forget(self._acknowledged)
        return bool(self._entries.gaps(self._acknowledged))

    def note_chunks(self, message_id: pulsar.MessageId, position: Position) -> None:
        """Notes where a message begins that has come whole, if it came in several chunks.

        Args:
            message_id: the message's.
            position: of its last chunk.
        """
        data = MessageIdData.FromString(message_id.serialize())
        if data.HasField("first_chunk_message_id"):
            first = data.first_chunk_message_id
            self._chunked.add(Position(first.ledgerId, first.entryId), position)

    def acknowledge(self, consumer: pulsar.Consumer, last: Position) -> None:
        """Acknowledges all up to an entry, or up to a chunked message before it that is not whole yet.

        Where that fails it is only logged: a later acknowledgement covers it.
        """
        with self._lock:
            gaps = self._entries.gaps(self._acknowledged)
            if self._entries.last < last:  # no entry that a consumer gets is behind that one
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
            # An acknowledgement may be lost with the connection: then what it covers comes again, and is dropped.
            self._acknowledged = last
            self._settled = max(self._settled, last)

    def repeat(self, consumer: pulsar.Consumer, end: Position) -> None:
        """Repeats the last acknowledgement, in case it was lost, where no later one follows to cover it.

        Args:
            consumer: of the subscription.
            end: the topic partition's last entry: nothing happens if that is not acknowledged.
        """
        last = self._acknowledged
        if not START < end <= last:
            return
        try:
            consumer.acknowledge_cumulative(pulsar.MessageId(-1, last.ledger_id, last.entry_id, -1))
        except Exception as error:
            _log.warning("%s: acknowledging %s again failed: %s", self._topic, last, error)
