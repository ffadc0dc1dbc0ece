"""A consumer that gets whole entries, in the topic's order, as they are in the ledger."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from broker.client import NoAnswerError, PulsarError
from broker.position import START, Position
from broker.protocol.byte_budget import Share
from broker.protocol.connection import Connection
from broker.protocol.entries import EntryError, Envelope, open_envelope
from broker.protocol.flow import FlowControl
from broker.protocol.frames import Frame
from broker.protocol.session import DisconnectedError
from broker.protocol.wire.pulsar_pb2 import Ack, Command, Subscribe

_SIGN = 1 << 63
_MOST_WAITING_BYTES = 256 << 20  # far more than a budget and what the broker reads at once
_PARTS = 8  # the flow control hears of what was handed over for each such part of its budget, or when all is
_SILENT_SECONDS = 0.4  # after which a consumer for which room is reserved asks whether anything comes at all
_MOST_SILENT_SECONDS = 5.0  # after which it reserves it no more in any case
_UNSIGNED = _WORD = (1 << 64) - 1


class ReceivedEntry(NamedTuple):
    """An entry that the broker has sent."""

    position: Position
    envelope: Envelope | EntryError  # the error: the entry is damaged
    ack_set: tuple[int, ...]  # of a partly acknowledged batch; empty: none of it is
    n_messages: int
    n_bytes: int


class EntryConsumer:
    """An exclusive consumer of one topic partition: durable, from the beginning where the subscription is new.

    It does not connect again: when the connection ends, or the broker unloads the topic, `receive` hands over what has
    come, and then raises DisconnectedError. All methods may be called in any thread, `receive` in one at a time. The
    thread that receives is also the one that asks the broker for more.

    Args:
        connection: to the broker that has the topic.
        topic: the topic partition.
        subscription: its name.
        max_bytes: about so many bytes may wait for `receive`, or be on their way.
        max_messages: so many messages may.
        share: of a budget that others share: its bytes are `Share.ahead` until they are handed over; None: it has
            `max_bytes` for itself.
        start: the subscription is not durable, and ends with the consumer: it begins with this entry, or after it.

    Raises:
        PulsarError: the broker refuses, or does not answer.
    """

    def __init__(
        self,
        connection: Connection,
        topic: str,
        subscription: str,
        *,
        max_bytes: int,
        max_messages: int,
        share: Share | None = None,
        start: Position | None = None,
    ) -> None:
        self.topic = topic
        self._connection = connection
        self._entries: deque[ReceivedEntry] = deque()
        self._changed = threading.Condition()
        self._share = share
        self._flow = FlowControl(max_bytes, max_messages, share, connection.max_message_bytes)
        self._came_to = START  # the last entry that has come
        self._granted_at = 0.0  # monotonic clock, seconds
        self._may_ask = False  # its turn has come
        if share is not None:
            share.on_turn = self._on_turn
        # What `receive` hands over next, without the lock, and what it has handed over since it told the flow control.
        self._at_hand: deque[ReceivedEntry] = deque()
        self._handed_messages = self._handed_bytes = 0
        self._told_messages, self._told_bytes = max_messages // _PARTS, max_bytes // _PARTS
        self._most_waiting_bytes = max(_MOST_WAITING_BYTES, 4 * max_bytes)
        self._error: PulsarError | None = None
        self._id = connection.attach(self)
        begin: dict[str, Any] = {"durable": True, "initial_position": Subscribe.EARLIEST}
        if start is not None:
            first = {"ledger_id": start.ledger_id & _UNSIGNED, "entry_id": start.entry_id & _UNSIGNED}
            begin = {"durable": False, "start_message_id": first}
        try:
            self._request(
                Command.SUBSCRIBE,
                "subscribe",
                topic=topic,
                subscription=subscription,
                type=Subscribe.EXCLUSIVE,
                **begin,
            )
            self._grant()
        except NoAnswerError:
            # The broker may still subscribe it, and then the next one could not have the subscription.
            with suppress(PulsarError):
                self._request(Command.CLOSE_CONSUMER, "close_consumer")
            self._leave()
            raise
        except PulsarError:
            self._leave()
            raise

    @property
    def is_connected(self) -> bool:
        """Whether the broker still sends entries."""
        return self._error is None

    @property
    def waits_for_turn(self) -> bool:
        """Whether nothing can come, because others hold all that they may together."""
        return self._share is not None and (self._share.is_waiting or self._share.turn > 0)

    @property
    def max_message_bytes(self) -> int:
        """The largest message that the broker sends."""
        return self._connection.max_message_bytes

    def receive(self, timeout_seconds: float) -> ReceivedEntry | None:
        """Waits for the next entry; None: none has come in time.

        Raises:
            DisconnectedError: no more comes from this consumer.
        """
        if not self._at_hand and not self._wait(timeout_seconds):
            return None
        entry = self._at_hand.popleft()
        self._handed_messages += entry.n_messages
        self._handed_bytes += entry.n_bytes
        if not self._at_hand or self._handed_messages > self._told_messages or self._handed_bytes > self._told_bytes:
            self._tell_handed()
        return entry

    def _wait(self, timeout_seconds: float) -> bool:
        """Waits until there is an entry to hand over; returns whether there is.

        Raises:
            DisconnectedError: no more comes from this consumer.
        """
        ends_at = time.monotonic() + timeout_seconds
        if self._share is not None and not (self._flow.has_permits or self._share.is_waiting):
            self._grant()
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news, max(ends_at - time.monotonic(), 0))
                may_ask, self._may_ask = self._may_ask, False
                if not self._entries and self._error is not None:
                    raise DisconnectedError(str(self._error)) from self._error
                self._at_hand, self._entries = self._entries, deque()
            if self._at_hand:
                return True
            if may_ask:
                self._grant()
                continue
            if self._flow.has_reserved:
                self._look_after_silence()
            return False

    def _has_news(self) -> bool:
        return bool(self._entries) or self._error is not None or self._may_ask

    def _look_after_silence(self) -> None:
        """Ends a reservation for what does not come."""
        silent_seconds = time.monotonic() - self._granted_at
        if silent_seconds < _SILENT_SECONDS:
            return
        is_silent = silent_seconds > _MOST_SILENT_SECONDS or self._is_at_end()
        if is_silent or time.monotonic() - self._granted_at > _MOST_SILENT_SECONDS:  # the answer may have taken long
            with self._changed:
                self._flow.unreserve()
            self._wake_others()

    def _is_at_end(self) -> bool:
        """Asks whether all that the topic has is acknowledged, or has come."""
        try:
            last, read_to = self._last_entry_and_read_to()
        except PulsarError:
            return False
        return last.entry_id < 0 or last <= max(read_to, self._came_to)

    def pause(self) -> None:
        """Gives up its turn, because `receive` is not called for a while."""
        if self._share is not None:
            self._share.give_up_turn()
            self._wake_others()

    def _on_turn(self) -> None:
        with self._changed:
            self._may_ask = True
            self._changed.notify_all()

    def _wake_others(self) -> None:
        if self._share is not None:
            self._share.budget.wake()

    def _tell_handed(self) -> None:
        """Tells the flow control what has been handed over, so that the broker sends more."""
        with self._changed:
            self._flow.taken(self._handed_messages, self._handed_bytes)
            self._told_bytes = self._flow.window // _PARTS
        self._handed_messages = self._handed_bytes = 0
        self._wake_others()
        if not self._flow.wants_turn:  # the broker is asked first, but when this one has been looked at
            self._grant()

    def acknowledge(self, last: Position) -> None:
        """Acknowledges all entries up to one, and waits until the broker has done so.

        Raises:
            PulsarError: it has not.
        """
        ids = [{"ledger_id": last.ledger_id, "entry_id": last.entry_id}]
        self._request(Command.ACK, "ack", type=Ack.CUMULATIVE, ids=ids)

    def acknowledge_each(self, entries: Sequence[tuple[Position, Sequence[int]]]) -> None:
        """Acknowledges single entries, or messages of a batch, and waits until the broker has done so.

        Args:
            entries: positions, each with an ack set as `entries.ack_set_of` makes it; empty: the whole entry.
                A broker without `acknowledgmentAtBatchIndexLevelEnabled` passes over those with an ack set.

        Raises:
            PulsarError: it has not.
        """
        ids = [{"ledger_id": at.ledger_id, "entry_id": at.entry_id, "ack_set": ack_set} for at, ack_set in entries]
        self._request(Command.ACK, "ack", type=Ack.INDIVIDUAL, ids=ids)

    def last_entry(self) -> Position:
        """Asks for the topic partition's last entry; entry -1: it has none.

        Raises:
            PulsarError: the broker does not answer.
        """
        return self._last_entry_and_read_to()[0]

    def has_more(self) -> Position | None:
        """Asks for the topic partition's last entry; None: the subscription has had it, or the topic has none.

        Raises:
            PulsarError: the broker does not answer.
        """
        last, read_to = self._last_entry_and_read_to()
        return None if last.entry_id < 0 or last <= read_to else last

    def _last_entry_and_read_to(self) -> tuple[Position, Position]:
        answer = self._request(Command.GET_LAST_MESSAGE_ID, "get_last_message_id")
        last = Position(_signed(answer.id.ledger_id), _signed(answer.id.entry_id))
        if not answer.HasField("read_to"):
            return last, START
        return last, Position(_signed(answer.read_to.ledger_id), _signed(answer.read_to.entry_id))

    def close(self) -> None:
        """Ends the consumer. Entries that were not acknowledged come to the next one.

        Raises:
            PulsarError: the broker does not answer; the consumer is closed all the same.
        """
        is_connected = self._error is None
        self.disconnected(DisconnectedError("the consumer is closed"))
        try:
            if is_connected:
                self._request(Command.CLOSE_CONSUMER, "close_consumer")
        finally:
            self._leave()

    def received(self, frame: Frame) -> None:
        """Takes a frame from the connection."""
        command = frame.command
        if command.type == Command.CLOSE_CONSUMER:
            self._connection.detach(self._id)
            self.disconnected(DisconnectedError(f"the broker has closed the consumer of {self.topic}"))
        elif command.type == Command.MESSAGE:
            self._keep(command.message, frame.entry)

    def disconnected(self, error: PulsarError) -> None:
        """Hears that nothing more comes."""
        with self._changed:
            self._error = self._error or error
            self._flow.stop_asking()
            self._changed.notify_all()
        self._wake_others()

    def _leave(self) -> None:
        self._connection.detach(self._id)
        with self._changed:
            self._flow.end()
        self._wake_others()

    def _keep(self, message: Any, data: bytes) -> None:
        envelope: Envelope | EntryError
        try:
            envelope = open_envelope(data)
            n_messages = _charged(envelope.metadata.n_messages, message.ack_set)
        except EntryError as error:
            error.raw = data
            envelope, n_messages = error, 1
        position = Position(message.id.ledger_id, message.id.entry_id)
        entry = ReceivedEntry(position, envelope, tuple(message.ack_set), n_messages, len(data))
        with self._changed:
            if self._error is not None:
                return
            self._flow.came(n_messages, len(data))
            self._entries.append(entry)
            self._came_to = max(self._came_to, position)
            self._changed.notify_all()
            is_too_much = self._flow.waiting_bytes > self._most_waiting_bytes
        self._wake_others()
        if is_too_much:  # an entry may lie about its messages, of which the broker makes permits
            self.disconnected(DisconnectedError(f"the broker sends more of {self.topic} than it may"))
            with suppress(PulsarError):
                self._connection.send(Command.CLOSE_CONSUMER, close_consumer={"consumer_id": self._id, "request_id": 0})
            self._connection.detach(self._id)

    def _grant(self) -> None:
        """Asks the broker for as much as there is room for; what it does not need of its turn is the others'."""
        self._send_permits()
        self._wake_others()

    def _send_permits(self) -> None:
        is_at_end = self._flow.wants_turn and self._is_at_end()
        while True:  # what the broker is owed may be more than one command can grant
            with self._changed:
                permits = self._flow.grant(is_at_end)
            if not permits:
                return
            self._granted_at = time.monotonic()
            try:
                self._connection.send(Command.FLOW, flow={"consumer_id": self._id, "permits": permits})
            except PulsarError as error:
                self.disconnected(error)
                return

    def _request(self, kind: Command.Type, name: str, **fields: Any) -> Any:
        if self._error is not None and kind != Command.CLOSE_CONSUMER:
            raise DisconnectedError(str(self._error)) from self._error
        return self._connection.request(kind, name, consumer_id=self._id, **fields)


def _charged(n_messages: int, ack_set: Sequence[int]) -> int:
    """Returns how many permits an entry costs the broker: one for each of its messages that is not acknowledged yet."""
    if ack_set:
        return sum((word & _WORD).bit_count() for word in ack_set)
    return n_messages  # as the producer has it, which may be anything


def _signed(number: int) -> int:
    """Returns what a 64-bit number is with its sign: Pulsar sends -1 as one without."""
    return number - 2 * _SIGN if number >= _SIGN else number
