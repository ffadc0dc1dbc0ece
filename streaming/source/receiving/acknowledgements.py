"""Remembers which entries of a topic partition have come in, and which of them have been acknowledged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from broker.client import PulsarError
from broker.position import START, EntrySet, Position
from broker.protocol.chunks import ChunkAssembler, Whole
from broker.protocol.consumer import EntryConsumer

_log = logging.getLogger(__name__)


class Acknowledgements:
    """Knows the entries that have come in, and acknowledges those that are durable.

    The position of a chunked message is that of its last chunk. If its first chunk were acknowledged before the message
    is durable, a restart would not get the whole message.

    Args:
        topic: the topic partition's name.
        chunks: has the messages that are not whole yet.
        after: the last entry that an earlier run has ingested.
        lock: guards all attributes, and `chunks`.
    """

    def __init__(self, topic: str, chunks: ChunkAssembler, after: Position, lock: threading.Condition) -> None:
        self._topic = topic
        self._lock = lock
        self._chunks = chunks
        # The last chunk of each whole message that is not acknowledged yet, and the entry before its first chunk.
        self._chunked: list[tuple[Position, Position]] = []
        self._entries = EntrySet()  # the entries after `_acknowledged` that have come
        self._acknowledged = START
        self._durable = START  # all up to it are durable
        self._seen = START
        self._taken_in_to = after  # entries up to this one were ingested before, and are dropped when they come again

    def saw(self, position: Position) -> Position:
        """Notes that the broker has sent this run all entries up to one that it sends at all.

        Nothing beyond it is acknowledged: the first chunk of a message that is not whole may still be to come.

        Returns:
            the last entry that it had sent before; START: it sends this one again.
        """
        before, self._seen = self._seen, max(self._seen, position)
        return before if before < position else START

    def has_come(self, position: Position) -> bool:
        """Whether an entry after the last acknowledged one has come before."""
        return position in self._entries

    def was_taken_in(self, position: Position) -> bool:
        """Whether an entry that comes now was ingested before and is to be dropped; notes that it has come."""
        if position > self._taken_in_to:
            return False
        if position > self._acknowledged:
            with self._lock:
                self._entries.add(position)
        return True

    def add(self, runs: Iterable[tuple[Position, Position]]) -> None:
        """Adds entries that have come. The caller holds the lock.

        Args:
            runs: (first entry, last entry) of entries without a gap.
        """
        for first, last in runs:
            self._entries.add_run(first, last)
        self._entries.forget(self._acknowledged)

    def add_chunked(self, last: Position, message: Whole) -> None:
        """Notes a chunked message that is whole now. The caller holds the lock.

        Args:
            last: the entry of its last chunk.
            message: the message.
        """
        self._chunked.append((last, message.before))

    def acknowledge(self, consumer: EntryConsumer, last: Position) -> None:
        """Acknowledges all entries up to a given one, but none from the first incomplete chunked message on.

        A failure is only logged: a later acknowledgement covers these entries, too.
        """
        with self._lock:
            self._durable = max(self._durable, last)
            last = self._allowed(last)
        if last <= self._acknowledged:
            return
        try:
            consumer.acknowledge(last)
        except PulsarError as error:
            _log.warning("%s: acknowledging %s failed, a later one will do: %s", self._topic, last, error)
            return
        with self._lock:
            # The acknowledgement may be lost with the connection: then its entries come again, and are dropped.
            self._acknowledged = max(self._acknowledged, last)
            self._taken_in_to = max(self._taken_in_to, last)
            self._chunked = [message for message in self._chunked if message[0] > last]

    def acknowledge_rest(self, consumer: EntryConsumer) -> None:
        """Acknowledges what an incomplete chunked message has held up, once that is given up."""
        self.acknowledge(consumer, self._durable)

    def repeat(self, consumer: EntryConsumer, end: Position) -> None:
        """Repeats the acknowledgement of a topic's last entry, in case it was lost: no later one would cover it.

        Args:
            consumer: of the subscription.
            end: the topic partition's last entry. Nothing happens if it has not been acknowledged.
        """
        last = self._acknowledged
        if not START < end <= last:
            return
        try:
            consumer.acknowledge(last)
        except PulsarError as error:
            _log.warning("%s: acknowledging %s again failed: %s", self._topic, last, error)

    def _allowed(self, last: Position) -> Position:
        """Returns the last entry that may be acknowledged when all up to `last` are durable."""
        limits = [self._seen, *(before for end, before in self._chunked if end > last)]
        if (incomplete := self._chunks.may_be_acknowledged) is not None:
            limits.append(incomplete)
        return min([last, *limits])
