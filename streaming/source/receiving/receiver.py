"""Receives one topic partition in the background, and keeps what it received until Spark has committed it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pulsar
import pyarrow as pa

from broker.client import close_quietly
from broker.position import START, Position, SourceTopic
from broker.pulsar_admin.topic_questions import TopicQuestions
from streaming.source.receiving.acknowledgements import Acknowledgements
from streaming.source.receiving.chunk_builder import ChunkBuilder, batch_size_of
from streaming.source.receiving.details import MessageDetails
from streaming.source.receiving.end_check import EndCheck
from streaming.source.receiving.entry_indexes import EntryIndexes
from streaming.source.receiving.received_chunks import ReceivedChunks
from tracker.messages import LEFT_OUT, MESSAGES, concat, has_keys

_log = logging.getLogger(__name__)

_CHUNK_MESSAGES = 4_000  # in a chunk of rows, or a few more: its entries are whole
_CHUNK_SECONDS = 0.05  # how long messages are added to a chunk
_NEXT_MILLIS = 20  # a message that comes so soon after another goes into the same chunk: each table has its cost
_IDLE_MILLIS = 500  # how long a message is waited for until the receiver is idle
_REST_OF_ENTRY_MILLIS = 60_000  # how long the other messages of an entry are waited for
# The client gives up a chunked message, and acknowledges its chunks, when a minute after the first the last has not
# come. So where there is no room for half of that time, the consumer is closed, and gets the chunks again later.
_ROOM_SECONDS = 30.0


@dataclass(frozen=True)
class Limits:
    """Limits of a receiver.

    Attributes:
        max_delay_millis: the longest delay of a message; 0: any.
        max_size: how many bytes payload, keys and properties of a message may have, in all.
        max_messages: how many messages may wait to be taken into a batch.
        max_bytes: how many bytes may wait to be.
    """

    max_delay_millis: int
    max_size: int
    max_messages: int
    max_bytes: int


class Receiver:
    """A durable, exclusive subscription to one topic partition.

    Entries come in the topic's order and are kept whole. After a reconnection the broker sends again what has not
    been acknowledged; what was received already is dropped. It stops receiving while `max_messages` or `max_bytes`
    wait to be taken.

    Args:
        source: the topic partition.
        subscribe: opens the consumer; called in the receiver's own thread, again after an error.
        after: the last entry that an earlier run has taken in: what comes up to it is dropped.
        limits: how much is taken.
        broker: is asked where the client does not tell: indexes, chunks, how far the broker has sent.
        details: looks up schemas and key encodings; None: these do not matter, as on the control topic.
        on_received: called when something has come in.
        on_rows: called with all rows that come in, as MESSAGES, in order, before they can be taken into a batch.
        replicated_from: called with a producer's name and an entry; returns the cluster from which that came; None: it
            is this one's.
        on_passed: called with an entry up to which nothing more comes, although not all has come; before that counts
            as read.
    """

    def __init__(
        self,
        source: SourceTopic,
        subscribe: Callable[[], pulsar.Consumer],
        *,
        after: Position,
        limits: Limits,
        broker: TopicQuestions,
        details: MessageDetails | None,
        on_received: Callable[[], None],
        on_rows: Callable[[pa.Table], None] = lambda rows: None,
        replicated_from: Callable[[str, Position], str | None] = lambda producer, position: None,
        on_passed: Callable[[Position], None] = lambda end: None,
    ) -> None:
        self.source = source
        self._subscribe = subscribe
        self._limits = limits
        self._details = details
        self._on_received = on_received
        self._on_rows = on_rows
        self._replicated_from = replicated_from
        self._on_passed = on_passed
        self._problem: str | None = None
        self.has_keys = False  # whether any message that has come had a schedule key
        self._last_received = after
        self._chunks = ReceivedChunks(source.name, after)
        self._wanted = START  # somebody waits until this has been read
        self._may_be_chunked = True  # an entry is missing that a message in several chunks can have begun with
        self._last_added = START
        self._newest = after  # the last entry of which a message has come
        self._changed = threading.Condition()
        self._acknowledgements = Acknowledgements(source.name, broker, after, self._changed)
        self._indexes = EntryIndexes(source.name, broker)
        self._end_check = EndCheck(source.name, broker)
        self._stopped = threading.Event()
        self._consumer: pulsar.Consumer | None = None
        self._is_idle = False
        self._is_cut_off = False
        self._thread = threading.Thread(target=self._run, name=f"receive {source.name}", daemon=True)

    def start(self) -> None:
        """Starts the thread that receives."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many messages have come in that are in no batch yet."""
        return self._chunks.waiting_messages

    @property
    def last_received(self) -> Position:
        """The last entry that has come in."""
        return self._last_received

    @property
    def read_to(self) -> Position:
        """The last entry that has been read: all has come in that comes up to it."""
        return self._chunks.read_to

    @property
    def last_cut(self) -> Position:
        """The last entry that is in a batch."""
        return self._chunks.last_cut

    @property
    def problem(self) -> str | None:
        """Why nothing comes in now; None: it does, or there is nothing."""
        return self._problem

    @property
    def is_idle(self) -> bool:
        """Whether it waits for the broker to hand over something."""
        return self._is_idle

    def connect_again(self) -> None:
        """Has the receiver's thread open its consumer anew: the broker thinks that it has no room, and it has."""
        self._is_cut_off = True

    def has_due(self, cutoff: int) -> bool:
        """Whether any message that is in no batch yet is due at a time, ms since the epoch, or before."""
        with self._changed:
            return self._chunks.has_due(cutoff)

    def end(self) -> Position:
        """Asks the broker for the topic partition's last entry. From now on the receiver makes sure to read up to it.

        Raises:
            pulsar.PulsarException: the broker does not answer, or the consumer is not connected.
        """
        consumer = self._consumer
        if consumer is None or not consumer.is_connected():  # the client would wait for half a minute
            raise pulsar.NotConnected
        last = consumer.get_last_message_id()
        end = Position(last.ledger_id(), last.entry_id())
        self._want(end)
        return end

    def is_cut_to(self, end: Position) -> bool:
        """Whether all that comes up to an entry is in the batches so far."""
        return self._chunks.last_cut >= end

    def wait_for(self, end: Position, timeout_seconds: float) -> bool:
        """Waits until all that comes up to an entry has come in; returns whether that came true in time."""
        self._want(end)
        with self._changed:
            return self._changed.wait_for(lambda: self._chunks.read_to >= end, timeout_seconds)

    def cut(self, max_messages: int, max_bytes: int, up_to: Position | None = None) -> tuple[Position, int, int]:
        """Takes what waits into a batch, as far as it may hold that, but at least one chunk.

        Args:
            max_messages: how many messages the batch may hold of this topic partition.
            max_bytes: how many bytes.
            up_to: the last entry that may be in it; None: any.

        Returns:
            the batch's last entry, which is the last batch's where nothing was taken, and the numbers of its messages
            and bytes.
        """
        with self._changed:
            taken = self._chunks.cut(max_messages, max_bytes, up_to)
            self._changed.notify_all()
            return taken

    def rows(self, after: Position, last: Position, timeout_seconds: float = 60) -> pa.Table:
        """Waits until entries have come in, and returns their messages as MESSAGES.

        Args:
            after: the entry before the first one.
            last: the last one. What comes up to it counts as taken into a batch.

        Raises:
            TimeoutError: they have not come in time.
        """
        if last <= after:
            return MESSAGES.empty_table()
        if not self.wait_for(last, timeout_seconds):
            raise TimeoutError(f"{self.source.name}: entry {last} has not come within {timeout_seconds:.0f} s")
        with self._changed:
            chunks = self._chunks.between(after, last)
            self._changed.notify_all()
        return concat(chunk.rows_between(after, last) for chunk in chunks)

    def forget(self, last: Position) -> None:
        """Drops the rows of what came up to an entry: Spark has committed its batch."""
        with self._changed:
            self._chunks.forget(last)

    def acknowledge(self, last: Position) -> None:
        """Acknowledges all up to an entry, or up to a chunked message before it that is not whole yet.

        Where that fails it is only logged: a later acknowledgement covers it.
        """
        if (consumer := self._consumer) is not None:
            self._acknowledgements.acknowledge(consumer, last)

    def acknowledge_again(self, end: Position) -> None:
        """Repeats the last acknowledgement, in case it was lost, where no later one follows to cover it.

        Args:
            end: the topic partition's last entry: nothing happens if that is not acknowledged.
        """
        if (consumer := self._consumer) is not None:
            self._acknowledgements.repeat(consumer, end)

    def stop(self) -> None:
        """Tells the thread to end; does not wait for it."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()

    def _want(self, end: Position) -> None:
        with self._changed:
            self._wanted = max(self._wanted, end)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._consumer = self._subscribe()
                self._is_cut_off = False
                while not (self._stopped.is_set() or self._is_cut_off):
                    if self._wait_for_room(_ROOM_SECONDS):
                        self.receive(self._consumer)
                    else:
                        self._close()
                        self._wait_for_room()
                        self._is_cut_off = True
                self._close()
            except Exception as error:
                if not self._stopped.is_set():
                    self._problem = f"{type(error).__name__}: {error}"
                    _log.warning("%s: %s: %s; trying again", self.source.name, type(error).__name__, error)
                    self._close()
                    self._stopped.wait(1)

    def _close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            close_quietly(consumer)

    def _wait_for_room(self, timeout_seconds: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self._stopped.is_set()
                    or (
                        self._chunks.waiting_messages < self._limits.max_messages
                        and self._chunks.waiting_bytes < self._limits.max_bytes
                    )
                ),
                timeout_seconds,
            )

    def receive(self, consumer: pulsar.Consumer) -> None:
        """Receives what comes within a moment, and keeps it as a chunk.

        When this raises, for whatever reason, nothing of it is kept, and it all comes again with the next consumer.
        """
        try:
            message = consumer.receive(_IDLE_MILLIS)
            self._is_idle = False
            self._end_check.begin_anew()
        except pulsar.Timeout:
            self._problem = None
            self._is_idle = True
            message = self._last_of_wanted(consumer)
            if message is None:
                return
        builder = ChunkBuilder(self.source, self._limits.max_delay_millis, self._limits.max_size, self._details)
        deadline = time.monotonic() + _CHUNK_SECONDS
        while True:
            self._take(builder, message)
            if builder.is_whole and (
                len(builder) >= min(_CHUNK_MESSAGES, self._limits.max_messages // 2)
                or builder.n_bytes >= self._limits.max_bytes // 8
                or time.monotonic() > deadline
            ):
                break
            try:
                message = consumer.receive(_NEXT_MILLIS if builder.is_whole else _REST_OF_ENTRY_MILLIS)
            except pulsar.Timeout:
                if builder.is_whole:
                    break
                raise
        if len(builder):
            self._keep(builder)

    def _take(self, builder: ChunkBuilder, message: Any) -> None:
        """Adds a message to a chunk, unless it came before."""
        message_id = message.message_id()
        position = Position(message_id.ledger_id(), message_id.entry_id())
        batch_index = message_id.batch_index()
        if batch_index < 0 or not builder.is_adding(position):
            if position > self._newest:
                self._newest = position
            elif position in builder.entries or self._acknowledgements.has_come(position):
                return
            follows = position.follows(self._last_added)
            if batch_index < 0 and (self._may_be_chunked or not follows):
                self._acknowledgements.note_chunks(message_id, position)
            if self._acknowledgements.is_settled(position):
                return
            self._may_be_chunked |= not follows
            self._last_added = position
            batch_size = batch_size_of(message_id) if batch_index >= 0 else 1
            first_index = self._indexes.first_index(position, batch_size, follows)
            builder.start_entry(position, batch_size, first_index, self._left_out(message, position))
        builder.add(message, batch_index)

    def _left_out(self, message: Any, position: Position) -> str | None:
        """Returns why an entry's messages are not for this job; None: they are."""
        try:
            producer = message.producer_name()
        except UnicodeDecodeError:
            return None  # such a message is rejected
        cluster = self._replicated_from(producer, position)
        return None if cluster is None else LEFT_OUT + cluster

    def _keep(self, builder: ChunkBuilder) -> None:
        """Makes a chunk of what was received; when it comes again it is dropped."""
        rows = builder.build()
        self.has_keys = self.has_keys or has_keys(rows)
        self._on_rows(rows)
        self._problem = None
        with self._changed:
            self._may_be_chunked = self._acknowledgements.add(builder.entries.runs)
            self._last_received = max(self._last_received, builder.entries.last)
            self._chunks.add(rows, builder.n_bytes, builder.entries.last)
            self._changed.notify_all()
        self._on_received()

    def _last_of_wanted(self, consumer: pulsar.Consumer) -> Any:
        """Finds out, where nothing comes and more is wanted, whether all has been read that comes up to that entry.

        Returns the next message if there is one after all, else None; where all has been read, that is noted.
        """
        with self._changed:
            wanted = self._wanted
        message, all_read = self._end_check.check(consumer, wanted, self._chunks.read_to)
        if all_read is not None:
            self._on_passed(min(all_read.up_to, all_read.topic_end))
            with self._changed:
                self._chunks.add(MESSAGES.empty_table(), 0, all_read.up_to)
                self._changed.notify_all()
            self._on_received()
        return message
