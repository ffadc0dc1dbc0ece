"""The subscription for which the broker keeps dead letters until they are re-driven, and who reads it.

Whoever may produce there can have published anything. What can't be read stays where it is, and stops nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from broker.client import NoAnswerError, PulsarError
from broker.position import START, Position
from broker.protocol.brokers import Brokers
from broker.protocol.chunks import ChunkAssembler, Whole
from broker.protocol.consumer import EntryConsumer, ReceivedEntry
from broker.protocol.entries import EntryError, Message, ack_set_of, is_acknowledged, messages_of
from broker.protocol.sending import is_refusal
from broker.protocol.session import DisconnectedError, RefusedError
from broker.protocol.unpacking import unpack
from broker.protocol.wire.pulsar_pb2 import MessageMetadata, ServerError
from broker.pulsar_admin.admin_rest import AdminClient

_log = logging.getLogger(__name__)

SUBSCRIPTION = "delaylake-redrive"

_BUSY_SECONDS = 0.1  # between two attempts to subscribe
_MAX_BYTES = 16 << 20  # of entries on their way
_MAX_MESSAGES = 5_000
_CHUNK_BYTES = 64 << 20  # of messages whose chunks have not all come
_LOOK_SECONDS = 0.2  # without an entry, until it is asked whether there are more
_SILENT_SECONDS = 5.0  # if a connected broker sends no entry for this long, there are no more
_GIVE_UP_SECONDS = 30.0
_MOST_RECONNECTIONS = 10  # without an entry that has not come before
_MOST_LOGGED = 20  # unreadable entries of a topic partition


def ensure_subscription(brokers: Brokers, topic: str) -> None:
    """Makes the subscription of a topic partition of dead letters, so that the broker keeps these; logs a failure.

    Without any subscription the broker would delete the messages, and later the topic.
    """
    try:
        brokers.subscribe(topic, SUBSCRIPTION, max_bytes=1, max_messages=1).close()
    except PulsarError as error:
        if not is_busy(error):
            _log.warning("%s: dead letters are not kept for a re-drive: %s", topic, error)


def is_busy(error: PulsarError) -> bool:
    """Whether the broker refuses a consumer because another one has the subscription."""
    return isinstance(error, RefusedError) and error.error == ServerError.ConsumerBusy


@dataclass
class UnacknowledgedEntry:
    """An entry, or the chunks of a message, with what of it is not acknowledged.

    Attributes:
        positions: of the entry, or of all chunks.
        metadata: of the entry, or of the last chunk.
        left: the batch indexes of its messages that are not acknowledged; -1: it is one message.
    """

    positions: tuple[Position, ...]
    metadata: MessageMetadata
    left: set[int]

    @property
    def position(self) -> Position:
        """Of the entry, or of the last chunk."""
        return self.positions[-1]


class DeadLetterConsumer:
    """Reads the unacknowledged messages of a topic partition of dead letters, and acknowledges single ones.

    When it has lost its broker, it looks for it again. Not thread-safe.

    Args:
        brokers: connections to the brokers.
        admin: asked how many entries are not acknowledged.
        topic: the topic partition.
        busy_seconds: how long to wait for another consumer to leave the subscription.

    Raises:
        RefusedError: another consumer still has the subscription (see `is_busy`), or the broker refuses otherwise.
        PulsarError: the broker does not answer.
    """

    def __init__(self, brokers: Brokers, admin: AdminClient, topic: str, busy_seconds: float) -> None:
        self.topic = topic
        self._brokers = brokers
        self._admin = admin
        self._reconnections = 0  # since an entry came that had not come before
        self._received = self._read = self._acknowledged = 0  # entries
        self._logged = 0
        self._whole: Whole | None = None
        self._consumer = self._subscribe(busy_seconds)
        self._chunks = ChunkAssembler(_CHUNK_BYTES, _CHUNK_BYTES, max_seconds=math.inf)

    @property
    def max_message_bytes(self) -> int:
        """The largest message that the broker takes."""
        return self._consumer.max_message_bytes

    @property
    def n_unreadable(self) -> int:
        """The number of entries that came and could not be read, when `messages` has ended."""
        return self._received - self._read

    def messages(self) -> Iterator[tuple[UnacknowledgedEntry, Message]]:
        """Yields the unacknowledged messages that are there when it begins, in order, each once.

        Raises:
            PulsarError: the broker does not answer.
        """
        end = self._last_entry()
        last, heard_at = START, time.monotonic()
        while end.entry_id >= 0 and last < end:
            try:
                received = self._consumer.receive(_LOOK_SECONDS)
            except DisconnectedError:
                self._connect_again()
                continue
            if received is None:
                silent = time.monotonic() - heard_at
                if self._is_all_here() or (silent > _SILENT_SECONDS and self._consumer.is_connected):
                    break
                if silent > _GIVE_UP_SECONDS:
                    raise NoAnswerError(f"{self.topic}: no entry comes")
                continue
            if received.position > end:
                break
            if received.position > last:  # after a lost connection the broker begins again
                last = received.position
                self._received += 1
                self._reconnections = 0
                yield from self._messages_of(received)
            heard_at = time.monotonic()
        self._log_end()

    def acknowledge(self, messages: Sequence[tuple[UnacknowledgedEntry, Message]]) -> None:
        """Acknowledges messages that `messages` has yielded, and waits until the broker has done so.

        Single messages of a batch stay acknowledged where the broker has `acknowledgmentAtBatchIndexLevelEnabled`, else
        with the last one of their batch.

        Raises:
            PulsarError: it has not.
        """
        entries = {entry.position: entry for entry, _ in messages}
        for entry, message in messages:
            entry.left.discard(message.batch_index)
        found: list[tuple[Position, list[int]]] = []
        for entry in entries.values():
            if not entry.left:
                found += [(position, []) for position in entry.positions]
            elif len(entry.positions) == 1:
                found.append((entry.position, ack_set_of(entry.left)))
        while found:
            try:
                self._consumer.acknowledge_each(found)
                break
            except DisconnectedError:
                self._connect_again()
        self._acknowledged += sum(len(entry.positions) for entry in entries.values() if not entry.left)

    def close(self) -> None:
        """Ends the consumer; raises nothing."""
        with suppress(PulsarError):
            self._consumer.close()

    def _subscribe(self, seconds: float) -> EntryConsumer:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self._brokers.subscribe(
                    self.topic, SUBSCRIPTION, max_bytes=_MAX_BYTES, max_messages=_MAX_MESSAGES
                )
            except PulsarError as error:
                if is_refusal(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_BUSY_SECONDS)

    def _last_entry(self) -> Position:
        while True:
            try:
                return self._consumer.last_entry()
            except DisconnectedError:
                self._connect_again()

    def _connect_again(self) -> None:
        self.close()
        self._reconnections += 1
        if self._reconnections > _MOST_RECONNECTIONS:
            raise NoAnswerError(f"{self.topic}: the broker sends no more, though it has more")
        self._consumer = self._subscribe(_GIVE_UP_SECONDS)

    def _is_all_here(self) -> bool:
        try:
            backlog = self._admin.backlog(self.topic, SUBSCRIPTION) or 0
        except PulsarError:
            return False
        return backlog <= self._received - self._acknowledged

    def _messages_of(self, received: ReceivedEntry) -> Iterator[tuple[UnacknowledgedEntry, Message]]:
        envelope = received.envelope
        if not isinstance(envelope, EntryError) and envelope.metadata.encryption_keys:
            self._log_unreadable(received.position, "it is encrypted, as no dead letter of the job is")
            return
        found = unpack(received, None, self._add_chunk, self.max_message_bytes)
        if found is None:
            self._log_given_up()
            return
        positions: tuple[Position, ...] = (found.position,)
        if not isinstance(envelope, EntryError) and envelope.is_chunk and self._whole is not None:
            positions, self._whole = self._whole.entries, None
        try:
            if found.metadata is None or found.payload is None:
                raise EntryError(found.failure)
            messages = messages_of(found.metadata, found.payload)
        except EntryError as error:
            self._log_unreadable(found.position, str(error))
            return
        self._read += len(positions)
        left = [one for one in messages if not is_acknowledged(one.batch_index, received.ack_set)]
        entry = UnacknowledgedEntry(positions, found.metadata, {one.batch_index for one in left})
        for message in left:
            yield entry, message

    def _add_chunk(self, position: Position, metadata: MessageMetadata, part: bytes) -> Whole | None:
        self._whole = self._chunks.add(position, START, metadata, part, time.monotonic())
        return self._whole

    def _log_given_up(self) -> None:
        for message in self._chunks.given_up:
            self._log_unreadable(message.first, f"the first chunk of a message: {message.reason}")
        self._chunks.given_up.clear()

    def _log_unreadable(self, position: Position, why: str) -> None:
        self._logged += 1
        if self._logged <= _MOST_LOGGED:
            _log.warning("%s: the entry %s can't be read, and stays: %s", self.topic, position, why)

    def _log_end(self) -> None:
        if self.n_unreadable:
            _log.warning("%s: %d entries can't be read, and stay", self.topic, self.n_unreadable)
