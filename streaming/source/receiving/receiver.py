"""Receives one topic partition in the background, and keeps what it received until Spark has committed it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pulsar
import pyarrow as pa

from broker.client import PulsarError
from broker.position import START, EntrySet, Position, SourceTopic
from broker.topic_questions import BrokerSide
from streaming.source.receiving.chunk_builder import ChunkBuilder, batch_size_of
from streaming.source.receiving.chunked_messages import ChunkedMessages
from streaming.source.receiving.details import MessageDetails
from tracker.messages import LEFT_OUT, MESSAGES, concat, int64
from tracker.schedule import MAX_TIME_MILLIS
from tracker.wire.message_id_pb2 import MessageIdData

_log = logging.getLogger(__name__)

_CHUNK_MESSAGES = 4_000
_CHUNK_SECONDS = 0.05
_NEXT_MILLIS = 20  # what comes within it after another message is built with that: each table has its cost
_IDLE_MILLIS = 500
_REST_OF_ENTRY_MILLIS = 60_000
# The client gives up a chunked message, and acknowledges its chunks, when a minute after the first the last has not
# come: so it is closed, and gets the chunks again, when nothing is received for half of that.
_ROOM_SECONDS = 30.0


@dataclass(frozen=True)
class Limits:
    """What a receiver takes.

    Attributes:
        max_delay_millis: the longest delay of a message; 0: any.
        max_size: how many bytes payload, keys and properties of a message may have, in all.
        max_messages: how many may wait to be taken.
        max_bytes: how many bytes may.
    """

    max_delay_millis: int
    max_size: int
    max_messages: int
    max_bytes: int


@dataclass(frozen=True)
class _Chunk:
    rows: pa.Table
    n_bytes: int
    earliest: int  # when the first of its messages is due
    start: Position  # up to here it had been read before
    last: Position

    @property
    def n_messages(self) -> int:
        """At least one, so that it gets into a batch."""
        return max(1, int(self.rows.num_rows))


class Receiver:
    """A durable, exclusive subscription to one topic partition.

    Entries come in the topic's order and are kept whole. After a reconnection the broker sends again what has not
    been acknowledged; what was received already is dropped. It stops receiving while `max_messages` or `max_bytes`
    wait to be taken.

    Args:
        subscribe: opens the consumer; called in the receiver's own thread, again after an error.
        after: the last entry that is not wanted any more.
        broker: knows what the consumer does not see,
        details: and of messages what it does not tell; None: that does not matter.
        on_received: called when something has come in.
        on_rows: is given all that comes in, in order, before it is handed on.
        on_passed: is told up to which entry nothing comes any more though not all has come, before that counts as read.
        replicated_from: the cluster from which an entry came, by its producer's name; None: it is this one's.
    """

    def __init__(
        self,
        source: SourceTopic,
        subscribe: Callable[[], pulsar.Consumer],
        after: Position,
        limits: Limits,
        broker: BrokerSide,
        details: MessageDetails | None,
        on_received: Callable[[], None],
        on_rows: Callable[[pa.Table], None] = lambda rows: None,
        replicated_from: Callable[[str, Position], str | None] = lambda producer, position: None,
        on_passed: Callable[[Position], None] = lambda end: None,
    ) -> None:
        self.source = source
        self._subscribe = subscribe
        self._limits = limits
        self._broker = broker
        self._details = details
        self._on_received = on_received
        self._on_rows = on_rows
        self._replicated_from = replicated_from
        self._on_passed = on_passed
        self._problem: str | None = None
        self._settled = after  # what comes up to here has come before, and is not wanted
        self._entries = EntrySet()  # that have come
        self._last_received = after
        self._read_to = after  # all that comes up to here has come
        self._wanted = START  # somebody waits until this has been read
        self._acknowledged = START
        self._chunked = ChunkedMessages(source.name, broker)
        self._may_be_chunked = True  # an entry is missing that a message in several chunks can have begun with
        self._last_added = START
        self._newest = after  # what is beyond has not come yet
        self._next_index: int | None = None
        self._chunks: deque[_Chunk] = deque()
        self._late: list[pa.Table] = []  # of entries before others that are in a batch: they go with the next chunk
        self._waiting = [0, 0]  # messages and bytes that are not cut yet
        self._cut = after
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._consumer: pulsar.Consumer | None = None
        self._is_idle = False
        self._idle_with: tuple[str, Position] | None = None  # of the round before: its connection, and what was wanted
        self._is_cut_off = False
        self._thread = threading.Thread(target=self._run, name=f"receive {source.name}", daemon=True)

    def start(self) -> None:
        """Starts the thread that receives."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many messages have come in that are in no batch yet."""
        return self._waiting[0]

    @property
    def last_received(self) -> Position:
        """The last entry that has come in."""
        return self._last_received

    @property
    def read_to(self) -> Position:
        """All that comes up to here has come."""
        return self._read_to

    @property
    def last_cut(self) -> Position:
        """The last entry that is in a batch."""
        return self._cut

    @property
    def problem(self) -> str | None:
        """Why nothing comes in now; None: it does, or there is nothing."""
        return self._problem

    @property
    def is_idle(self) -> bool:
        """Whether it waits for the broker to hand over something."""
        return self._is_idle

    def connect_again(self) -> None:
        """Opens the consumer anew: the broker thinks that it has no room, and it has."""
        self._is_cut_off = True

    def has_due(self, cutoff: int) -> bool:
        """Whether any of these is due at the cutoff or before."""
        with self._changed:
            return any(chunk.last > self._cut and chunk.earliest <= cutoff for chunk in self._chunks)

    def end(self) -> Position:
        """The topic partition's last entry now, which is wanted from now on.

        Raises:
            pulsar.PulsarException: the broker does not answer.
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
        return self._cut >= end

    def wait_for(self, end: Position, timeout_seconds: float) -> bool:
        """Waits until all that comes up to an entry has come in."""
        self._want(end)
        with self._changed:
            return self._changed.wait_for(lambda: self._read_to >= end, timeout_seconds)

    def cut(self, max_messages: int, max_bytes: int, up_to: Position | None = None) -> tuple[Position, int, int]:
        """Sets the end of a batch, after the last one.

        Args:
            up_to: the last entry that may be in it; None: any.

        Returns:
            the batch's last entry, which is the last batch's where nothing came in, its messages, and its bytes.
        """
        with self._changed:
            messages = n_bytes = 0
            for chunk in self._chunks:
                if chunk.last <= self._cut:
                    continue
                if up_to is not None and chunk.last > up_to:
                    break
                if messages and (messages + chunk.n_messages > max_messages or n_bytes + chunk.n_bytes > max_bytes):
                    break
                messages += chunk.n_messages
                n_bytes += chunk.n_bytes
                end = chunk.last
            if messages:
                self._cut_at(end)
            return self._cut, messages, n_bytes

    def rows(self, after: Position, last: Position, timeout_seconds: float = 60) -> pa.Table:
        """The messages of the entries after one and up to another, waiting until they have come in.

        Raises:
            TimeoutError: the broker does not answer.
        """
        if last <= after:
            return MESSAGES.empty_table()
        if not self.wait_for(last, timeout_seconds):
            raise TimeoutError(f"{self.source.name}: entry {last} has not come within {timeout_seconds:.0f} s")
        with self._changed:
            if last > self._cut:
                self._cut_at(last)
            chunks = [chunk for chunk in self._chunks if chunk.last > after and chunk.start < last]
        return concat(
            chunk.rows if after <= chunk.start and chunk.last <= last else _between(chunk.rows, after, last)
            for chunk in chunks
        )

    def forget(self, last: Position) -> None:
        """Drops what came up to an entry: Spark has committed it."""
        with self._changed:
            while self._chunks and self._chunks[0].last <= last:
                self._chunks.popleft()

    def acknowledge(self, last: Position) -> None:
        """Tells the broker that it need not keep what came up to an entry, but for what is not whole yet."""
        consumer = self._consumer
        if consumer is None:
            return
        with self._changed:
            gaps = self._entries.gaps(self._acknowledged)
            if self._entries.last < last:  # nothing that can be read was behind it
                gaps.append((max(self._entries.last, self._acknowledged), last.next))
        try:
            last = self._chunked.limit(last, gaps)
            if last <= self._acknowledged:
                return
            consumer.acknowledge_cumulative(pulsar.MessageId(-1, last.ledger_id, last.entry_id, -1))
        except Exception as error:
            _log.warning("%s: acknowledging %s failed, a later one will do: %s", self.source.name, last, error)
            return
        with self._changed:
            # An acknowledgement may be lost with the connection. So what it covers is not taken again.
            self._acknowledged = last
            self._settled = max(self._settled, last)

    def acknowledge_again(self, end: Position) -> None:
        """Repeats the last acknowledgement if it was of the topic partition's last entry: no later one would do."""
        consumer, last = self._consumer, self._acknowledged
        if consumer is None or not START < end <= last:
            return
        try:
            consumer.acknowledge_cumulative(pulsar.MessageId(-1, last.ledger_id, last.entry_id, -1))
        except Exception as error:
            _log.warning("%s: acknowledging %s again failed: %s", self.source.name, last, error)

    def stop(self) -> None:
        """Tells the thread to end; does not wait for it."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()

    def _want(self, end: Position) -> None:
        with self._changed:
            self._wanted = max(self._wanted, end)

    def _cut_at(self, end: Position) -> None:
        self._cut = end
        left = [chunk for chunk in self._chunks if chunk.last > end]
        self._waiting = [sum(c.n_messages for c in left), sum(c.n_bytes for c in left)]
        self._changed.notify_all()

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
            try:
                consumer.close()
            except Exception as error:
                _log.debug("%s: closing: %s", self.source.name, error)

    def _wait_for_room(self, timeout_seconds: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self._stopped.is_set()
                    or (self._waiting[0] < self._limits.max_messages and self._waiting[1] < self._limits.max_bytes)
                ),
                timeout_seconds,
            )

    def receive(self, consumer: pulsar.Consumer) -> None:
        """Receives what comes within a moment, as a chunk. When this raises nothing is kept, and all comes again."""
        try:
            message = consumer.receive(_IDLE_MILLIS)
            self._is_idle, self._idle_with = False, None
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
        """Adds a message, if it is new."""
        message_id = message.message_id()
        position = Position(message_id.ledger_id(), message_id.entry_id())
        batch_index = message_id.batch_index()
        if batch_index < 0 or not builder.is_adding(position):
            if position > self._newest:
                self._newest = position
            elif position in builder.entries or position in self._entries:
                return
            follows = position.follows(self._last_added)
            if batch_index < 0 and (self._may_be_chunked or not follows):
                self._note_chunks(message_id, position)
            if position <= self._settled:
                if position > self._acknowledged:
                    with self._changed:
                        self._entries.add(position)
                return
            self._may_be_chunked |= not follows
            self._last_added = position
            batch_size = batch_size_of(message_id) if batch_index >= 0 else 1
            first_index = self._first_index(position, batch_size, follows)
            builder.start_entry(position, batch_size, first_index, self._left_out(message, position))
        builder.add(message, batch_index)

    def _left_out(self, message: Any, position: Position) -> str | None:
        """Why an entry's messages are not for this job; None: they are."""
        try:
            producer = message.producer_name()
        except UnicodeDecodeError:
            return None  # such a message is rejected
        cluster = self._replicated_from(producer, position)
        return None if cluster is None else LEFT_OUT + cluster

    def _note_chunks(self, message_id: pulsar.MessageId, position: Position) -> None:
        data = MessageIdData.FromString(message_id.serialize())
        if data.HasField("first_chunk_message_id"):
            first = data.first_chunk_message_id
            self._chunked.add(Position(first.ledgerId, first.entryId), position)

    def _keep(self, builder: ChunkBuilder) -> None:
        """Makes what was received a chunk; from now on it does not count when it comes again."""
        rows = builder.build()
        self._on_rows(rows)
        self._problem = None
        with self._changed:
            for first, last in builder.entries.runs:
                self._entries.add_run(first, last)
            self._entries.forget(self._acknowledged)
            self._last_received = max(self._last_received, builder.entries.last)
            self._may_be_chunked = bool(self._entries.gaps(self._acknowledged))
            self._add_chunk(rows, builder.n_bytes, builder.entries.last)
        self._on_received()

    def _add_chunk(self, rows: pa.Table, n_bytes: int, last: Position) -> None:
        """Adds rows behind what was read before; among it, where they come late."""
        earliest = int(int64(rows, "deliver_at").min()) if rows.num_rows else MAX_TIME_MILLIS
        if last > self._read_to:
            self._chunks.append(_Chunk(concat([*self._late, rows]), n_bytes, earliest, self._read_to, last))
            self._late = []
            self._read_to = last
        elif self._chunks and self._read_to > self._cut:
            chunk = self._chunks[-1]
            self._chunks[-1] = replace(
                chunk,
                rows=concat([chunk.rows, rows]),
                n_bytes=chunk.n_bytes + n_bytes,
                earliest=min(chunk.earliest, earliest),
            )
        else:
            _log.error(
                "%s: entry %s came after the batches had passed it: the next has it, a stop before that loses it",
                self.source.name,
                last,
            )
            self._late.append(rows)
        self._cut_at(self._cut)

    def _last_of_wanted(self, consumer: pulsar.Consumer) -> Any:
        """The next message, where nothing comes and more is wanted; None: there is none, and what is wanted was read.

        The last entries of a topic may be none that a consumer gets: expired, skipped, of an aborted transaction. All
        up to an entry has come when the broker has sent what is before, the consumer answers on the same connection,
        and has nothing left; all that twice in a row, half a second apart.
        """
        before, self._idle_with = self._idle_with, None
        with self._changed:
            wanted = self._wanted
            if wanted <= self._read_to:
                return None
        try:
            connection = self._broker.connection(self.source.name)
            if connection is None:
                return None
            cursor = self._broker.cursor(self.source.name)
            if not cursor.has_sent(wanted):
                return None
            consumer.get_last_message_id()
            try:
                return consumer.receive(1)
            except pulsar.Timeout:
                if self._broker.connection(self.source.name) != connection:
                    return None
        except PulsarError as error:
            _log.warning("%s: whether all up to %s was read is not known: %s", self.source.name, wanted, error)
            return None
        self._idle_with = connection, wanted
        if before is None or before[0] != connection or before[1] <= self._read_to:
            return None
        wanted = before[1]  # more may be now
        self._on_passed(min(wanted, cursor.end))
        with self._changed:
            self._add_chunk(MESSAGES.empty_table(), 0, wanted)
        self._on_received()
        return None

    def _first_index(self, position: Position, batch_size: int, follows: bool) -> int | None:
        """The index of an entry's first message: counted on from the entry before, asked for after a gap."""
        if not follows or self._next_index is None:
            if follows and position.entry_id % 1_000:
                return None  # the broker did not tell: do not ask for each entry
            last_index = self._last_index(position)
            self._next_index = None if last_index is None else last_index - batch_size + 1
        first = self._next_index
        if first is not None:
            self._next_index = first + batch_size
        return first

    def _last_index(self, position: Position) -> int | None:
        try:
            return self._broker.last_index(self.source.name, position)
        except (PulsarError, ValueError) as error:
            _log.warning("%s: the index of entry %s stays unknown: %s", self.source.name, position, error)
            return None


def _between(rows: pa.Table, after: Position, last: Position) -> pa.Table:
    """The rows of the entries after one and up to another."""
    if not rows.num_rows:
        return rows
    ledgers, entries = int64(rows, "ledger_id"), int64(rows, "entry_id")
    wanted = ((ledgers > after.ledger_id) | ((ledgers == after.ledger_id) & (entries > after.entry_id))) & (
        (ledgers < last.ledger_id) | ((ledgers == last.ledger_id) & (entries <= last.entry_id))
    )
    return rows if wanted.all() else rows.filter(pa.array(wanted))
