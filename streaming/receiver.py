"""Receives one topic partition in the background, and keeps what it received until Spark has committed it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pulsar
import pyarrow as pa

from proto.message_id_pb2 import MessageIdData
from tracker.messages import LEFT_OUT, MESSAGES, concat, int64
from tracker.schedule import BadSchedule, deliver_at

_log = logging.getLogger(__name__)

_CHUNK_MESSAGES = 4_000
_CHUNK_SECONDS = 0.05
_IDLE_MILLIS = 500
_MESSAGE_OVERHEAD_BYTES = 200  # of a message's columns beside its payload


class Position(NamedTuple):
    """An entry of a topic partition."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"

    @classmethod
    def parse(cls, text: str) -> Position:
        ledger_id, entry_id = text.split(":")
        return cls(int(ledger_id), int(entry_id))


START = Position(-1, -1)


@dataclass(frozen=True)
class SourceTopic:
    """A topic partition of a route."""

    name: str  # of the partition, as a client subscribes to it
    topic: str  # of the route
    partition: int  # -1: not partitioned


@dataclass(frozen=True)
class _Chunk:
    rows: pa.Table
    n_bytes: int
    earliest: int  # when the first of its messages is due
    last: Position


class Receiver:
    """A durable, exclusive subscription to one topic partition.

    Entries come in the topic's order and are kept whole. After a reconnection the broker sends again what has not
    been acknowledged; what was received already is dropped. It stops receiving while `max_messages` or `max_bytes`
    wait to be taken.

    Args:
        subscribe: opens the consumer; called in the receiver's own thread, again after an error.
        after: the last entry that is not wanted any more.
        max_size: how many bytes of payload and properties can be delivered.
        last_index_of: the broker entry index of an entry's last message, or None where it is not known.
        on_received: called when something has come in.
        on_rows: is given all that comes in, in order, before it is handed on.
        replicated_from: the cluster from which an entry came, by its producer's name; None: it is this one's.
    """

    def __init__(
        self,
        source: SourceTopic,
        subscribe: Callable[[], pulsar.Consumer],
        after: Position,
        max_delay_millis: int,
        max_size: int,
        max_messages: int,
        max_bytes: int,
        last_index_of: Callable[[str, Position], int | None],
        on_received: Callable[[], None],
        on_rows: Callable[[pa.Table], None] = lambda rows: None,
        replicated_from: Callable[[str, Position], str | None] = lambda producer, position: None,
    ) -> None:
        self.source = source
        self._subscribe = subscribe
        self._last_received = after
        self._max_delay_millis = max_delay_millis
        self._max_size = max_size
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._last_index_of = last_index_of
        self._on_received = on_received
        self._on_rows = on_rows
        self._replicated_from = replicated_from
        self._problem: str | None = None
        self._next_index: int | None = None
        self._chunks: deque[_Chunk] = deque()
        self._waiting = [0, 0]  # messages and bytes that are not cut yet
        self._cut = after
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._consumer: pulsar.Consumer | None = None
        self._is_idle = False
        self._thread = threading.Thread(target=self._run, name=f"receive {source.name}", daemon=True)
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
    def last_cut(self) -> Position:
        """The last entry that is in a batch."""
        return self._cut

    @property
    def problem(self) -> str | None:
        """Why nothing comes in now; None: it does, or there is nothing."""
        return self._problem

    def has_due(self, cutoff: int) -> bool:
        """Whether any of these is due at the cutoff or before."""
        with self._changed:
            return any(chunk.last > self._cut and chunk.earliest <= cutoff for chunk in self._chunks)

    def end(self) -> Position:
        """The topic partition's last entry now.

        Raises:
            pulsar.PulsarException: the broker does not answer.
        """
        consumer = self._consumer
        if consumer is None:
            raise pulsar.NotConnected
        last = consumer.get_last_message_id()
        return Position(last.ledger_id(), last.entry_id())

    def is_cut_to(self, end: Position) -> bool:
        """Whether an entry is in the batches so far, or was acknowledged before this start."""
        with self._changed:
            return self._cut >= end or (self._cut == START and self._has(end))

    def wait_for(self, end: Position, timeout_seconds: float) -> bool:
        """Waits until an entry has come in."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has(end), timeout_seconds)

    def _has(self, end: Position) -> bool:
        # With nothing received and nothing coming, all up to the end was acknowledged before this start.
        return self._last_received >= end or (self._last_received == START and self._is_idle)

    def cut(self, max_messages: int, max_bytes: int) -> tuple[Position, int, int]:
        """Sets the end of a batch, after the last one.

        Returns:
            the batch's last entry, which is the last batch's where nothing came in, its messages, and its bytes.
        """
        with self._changed:
            messages = n_bytes = 0
            for chunk in self._chunks:
                if chunk.last <= self._cut:
                    continue
                if messages and (messages + chunk.rows.num_rows > max_messages or n_bytes + chunk.n_bytes > max_bytes):
                    break
                messages += chunk.rows.num_rows
                n_bytes += chunk.n_bytes
                end = chunk.last
            if messages:
                self._cut = end
                self._waiting = [self._waiting[0] - messages, self._waiting[1] - n_bytes]
                self._changed.notify_all()
            return self._cut, messages, n_bytes

    def rows(self, after: Position, last: Position, timeout_seconds: float = 60) -> pa.Table:
        """The messages of the entries after one and up to another, waiting until they have come in.

        Raises:
            TimeoutError: they did not come: the broker does not answer, or no longer has them.
        """
        if last <= after:
            return MESSAGES.empty_table()
        with self._changed:
            if not self._changed.wait_for(lambda: self._last_received >= last, timeout_seconds):
                raise TimeoutError(f"{self.source.name}: entry {last} has not come within {timeout_seconds:.0f} s")
            if last > self._cut:
                self._cut = last
                self._waiting = [
                    sum(c.rows.num_rows for c in self._chunks if c.last > last),
                    sum(c.n_bytes for c in self._chunks if c.last > last),
                ]
                self._changed.notify_all()
            tables = [chunk.rows for chunk in self._chunks if chunk.last > after]
        rows = concat(tables)
        if not rows.num_rows:
            return rows
        ledgers, entries = int64(rows, "ledger_id"), int64(rows, "entry_id")
        wanted = ((ledgers > after.ledger_id) | ((ledgers == after.ledger_id) & (entries > after.entry_id))) & (
            (ledgers < last.ledger_id) | ((ledgers == last.ledger_id) & (entries <= last.entry_id))
        )
        return rows if wanted.all() else rows.filter(pa.array(wanted))

    def forget(self, last: Position) -> None:
        """Drops what came up to an entry: Spark has committed it."""
        with self._changed:
            while self._chunks and self._chunks[0].last <= last:
                self._chunks.popleft()

    def acknowledge(self, last: Position) -> None:
        """Tells the broker that it need not keep what came up to an entry."""
        consumer = self._consumer
        if consumer is None:
            return
        try:
            consumer.acknowledge_cumulative(pulsar.MessageId(-1, last.ledger_id, last.entry_id, -1))
        except Exception as error:
            _log.warning("%s: acknowledging %s failed, a later one will do: %s", self.source.name, last, error)

    def stop(self) -> None:
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._consumer = self._subscribe()
                while not self._stopped.is_set():
                    self._receive_chunk(self._consumer)
            except Exception as error:
                if not self._stopped.is_set():
                    self._problem = f"{type(error).__name__}: {error}"
                    _log.warning("%s: %s: %s; trying again", self.source.name, type(error).__name__, error)
                    self._close()
                    self._stopped.wait(1)
        self._close()

    def _close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            try:
                consumer.close()
            except Exception as error:
                _log.debug("%s: closing: %s", self.source.name, error)

    def _receive_chunk(self, consumer: pulsar.Consumer) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stopped.is_set()
                    or (self._waiting[0] < self._max_messages and self._waiting[1] < self._max_bytes)
                )
            )
        try:
            message = consumer.receive(_IDLE_MILLIS)
        except pulsar.Timeout:
            self._is_idle = True
            self._problem = None
            return
        self._is_idle = False
        builder = ChunkBuilder(self.source, self._max_delay_millis, self._max_size)
        deadline = time.monotonic() + _CHUNK_SECONDS
        while True:
            entry_is_complete = self._take(builder, message)
            if entry_is_complete and (
                len(builder) >= min(_CHUNK_MESSAGES, self._max_messages // 2)
                or builder.n_bytes >= self._max_bytes // 8
                or time.monotonic() > deadline
            ):
                break
            try:
                message = consumer.receive(1 if entry_is_complete else 60_000)
            except pulsar.Timeout:
                if entry_is_complete:
                    break
                raise
        if not len(builder):
            return
        rows = builder.build()
        self._on_rows(rows)
        self._problem = None
        chunk = _Chunk(rows, builder.n_bytes, int(int64(rows, "deliver_at").min()), self._last_received)
        with self._changed:
            self._chunks.append(chunk)
            self._waiting = [self._waiting[0] + chunk.rows.num_rows, self._waiting[1] + chunk.n_bytes]
            self._changed.notify_all()
        self._on_received()

    def _take(self, builder: ChunkBuilder, message: Any) -> bool:
        """Adds a message, if it is new; returns whether its entry is complete with it."""
        message_id = message.message_id()
        position = Position(message_id.ledger_id(), message_id.entry_id())
        batch_index = message_id.batch_index()
        batch_size = batch_size_of(message_id)
        if position <= self._last_received:
            return True
        if builder.position != position:
            first_index = self._first_index(position, batch_size)
            cluster = self._replicated_from(message.producer_name(), position)
            builder.start_entry(position, batch_size, first_index, None if cluster is None else LEFT_OUT + cluster)
        builder.add(message, batch_index)
        if batch_index + 1 < batch_size and batch_index >= 0:
            return False
        self._last_received = position
        return True

    def _first_index(self, position: Position, batch_size: int) -> int | None:
        """The index of an entry's first message: counted on from the entry before, asked for after a gap."""
        follows = position == (self._last_received.ledger_id, self._last_received.entry_id + 1)
        if not follows or self._next_index is None:
            if follows and position.entry_id % 1_000:
                return None  # the broker did not tell: do not ask for each entry
            last_index = self._last_index_of(self.source.name, position)
            self._next_index = None if last_index is None else last_index - batch_size + 1
        first = self._next_index
        if first is not None:
            self._next_index = first + batch_size
        return first


def batch_size_of(message_id: pulsar.MessageId) -> int:
    """How many messages the entry of a message has."""
    return MessageIdData.FromString(message_id.serialize()).batch_size or 1 if message_id.batch_index() >= 0 else 1


class ChunkBuilder:
    """Messages as columns."""

    def __init__(self, source: SourceTopic, max_delay_millis: int, max_size: int) -> None:
        self._source = source
        self._max_delay_millis = max_delay_millis
        self._max_size = max_size
        self._entry: tuple[int, int, int, int | None] = (-1, -1, 1, None)
        self._left_out: str | None = None
        self.position: Position | None = None
        self._rows: list[tuple[Any, ...]] = []
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def start_entry(
        self, position: Position, batch_size: int, first_index: int | None, left_out: str | None = None
    ) -> None:
        """Begins an entry, whose messages are added next.

        Args:
            left_out: why its messages are not for this job: of them only the positions are kept.
        """
        self.position = position
        self._left_out = left_out
        self._entry = (position.ledger_id, position.entry_id, batch_size, first_index)

    def add(self, message: Any, batch_index: int) -> None:
        ledger_id, entry_id, batch_size, first_index = self._entry
        properties = message.properties()
        published = message.publish_timestamp()
        try:
            due, reason = deliver_at(properties, published, self._max_delay_millis), None
        except BadSchedule as error:
            due, reason = published, str(error)
        payload = None if message.has_null_value() else message.data()
        if self._left_out is not None:
            properties, payload, reason = {}, None, self._left_out
        size = len(payload or b"") + sum(len(name) + len(value) for name, value in properties.items())
        if reason is None and size > self._max_size:
            reason = f"{size} bytes are too many to be delivered with their delaylake properties"
        self.n_bytes += _MESSAGE_OVERHEAD_BYTES + size
        self._rows.append(
            (
                ledger_id,
                entry_id,
                batch_index,
                batch_size,
                first_index,
                due,
                published,
                message.event_timestamp(),
                message.producer_name(),
                message.partition_key() or None,
                message.ordering_key() or None,
                list(properties.items()),
                payload,
                reason,
                None,
                None,
                None,
                None,
                None,
            )
        )

    def build(self) -> pa.Table:
        columns = list(zip(*self._rows, strict=True))
        n = len(self._rows)
        topic = pa.array([self._source.topic] * n, pa.string())
        partition = pa.array([self._source.partition] * n, pa.int32())
        rest = [pa.array(c, f.type) for c, f in zip(columns, list(MESSAGES)[2:], strict=True)]
        return pa.Table.from_arrays([topic, partition, *rest], schema=MESSAGES)
