"""Receives the messages of one topic partition in a thread, and keeps them until Spark has committed their batch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import pyarrow as pa

from broker.client import PulsarError
from broker.entries.continuity import CameEntry
from broker.position import START, Position, SourceTopic
from broker.protocol.byte_budget import Share
from broker.protocol.chunks import ChunkAssembler, Whole
from broker.protocol.consumer import EntryConsumer, ReceivedEntry
from broker.protocol.entries import EntryError
from broker.protocol.incomplete_log import IncompleteLog
from broker.protocol.session import DisconnectedError
from broker.protocol.unpacking import UnpackedEntry, unpack, unreadable
from broker.protocol.wire.pulsar_pb2 import MessageMetadata
from broker.pulsar_admin.topic_questions import TopicQuestions
from streaming.source.receiving.acknowledgements import Acknowledgements
from streaming.source.receiving.end_check import EndCheck
from streaming.source.receiving.entry_indexes import EntryIndexes
from streaming.source.receiving.few_rows import FewRows, table_of
from streaming.source.receiving.received_rows import ReceivedRows
from streaming.source.receiving.row_builder import RowBuilder
from streaming.source.receiving.unreadable_messages import MOST_KEPT, Acceptance
from tracker.messages import LEFT_OUT, MESSAGES, empty_table, has_keys

_log = logging.getLogger(__name__)

_MESSAGES_AT_ONCE = 4_000  # so many messages become rows together, or a few more: entries are whole
_BYTES_AT_ONCE = 1 << 20  # likewise: so that a batch can be filled from many topic partitions in turn
_SECONDS_AT_ONCE = 0.05  # for so long messages are collected
_BUSY_SECONDS = 0.45  # and for so long then those that have come already: a busy job is helped by many rows at once
_RULE_SECONDS = 0.01  # CPU time for costly rules of recurring messages, after which no more are collected
_RULE_PAUSE = 4  # the receiver then pauses for so many times what they took
_IDLE_SECONDS = 0.5  # the receiver is idle when it has waited so long for an entry
_LONGEST_STEP_SECONDS = 10.0  # a receiver that takes longer for one step has stood still, as in a paused process
_RETRY_SECONDS = (0.05, 5.0)  # the first and the longest wait before a consumer is opened again
# One receiver at a time makes many rows; few do not wait. Arrow lets go of Python's interpreter lock in each of many
# calls, and where other threads wait for that lock, each of these calls costs two changes of threads.
_BUILDING = threading.Lock()
_MAX_CLUSTER_BYTES = 256  # of a cluster's name, which may be anything, and is in each row that is left out


@dataclass(frozen=True)
class TopicAccess:
    """How a topic partition's broker is reached.

    Attributes:
        subscribe: opens the consumer; called in the receiver's own thread, again after an error.
        questions: answers what the client does not: indexes, how far the broker has sent.
    """

    subscribe: Callable[[], EntryConsumer]
    questions: TopicQuestions


@dataclass(frozen=True)
class Limits:
    """How much may wait for a batch.

    Attributes:
        max_messages: the most messages of this receiver.
        max_bytes: the most bytes of them.
        share: of the bytes that all receivers together may hold; None: this one has its own.
        next_seconds: an entry that comes so soon after another joins it, because each table has a fixed cost.
    """

    max_messages: int
    max_bytes: int
    share: Share | None = None
    next_seconds: float = 0.02


@dataclass(frozen=True)
class ReceiverEvents:
    """Who is told what a receiver has received.

    Attributes:
        on_received: called when messages have come in, with the time at which the first of them is due, ms since the
            epoch; 0: the receiver has read on, perhaps without any message.
        on_entries: called with all entries that come in, in order, before their messages can be taken into a batch: the
            those with messages, and those that are parts of one.
        on_passed: called with an entry up to which the broker sends no more, although entries are missing; called
            before that entry counts as read.
        on_error: called with each error after which the receiver opens a new consumer.
        on_success: called often, when nothing waits to be received that an error came up for.
    """

    on_received: Callable[[int], None] = lambda earliest: None
    on_entries: Callable[[Sequence[CameEntry]], None] = lambda entries: None
    on_passed: Callable[[Position], None] = lambda end: None
    on_error: Callable[[Exception], None] = lambda error: None
    on_success: Callable[[], None] = lambda: None


class Receiver:
    """A durable, exclusive subscription to one topic partition.

    Entries come in the topic's order and stay whole. After a reconnection the broker sends unacknowledged entries
    again; the receiver drops those that it has. It pauses while `max_messages` or `max_bytes` wait for a batch.

    Args:
        source: the topic partition.
        access: to its broker.
        after: the last entry that an earlier run has ingested; the receiver drops entries up to it.
        limits: of how much waits.
        acceptance: which messages are accepted.
        events: who is told what has come in.
    """

    def __init__(
        self,
        source: SourceTopic,
        access: TopicAccess,
        after: Position,
        limits: Limits,
        acceptance: Acceptance,
        events: ReceiverEvents = ReceiverEvents(),
    ) -> None:
        self.source = source
        self._subscribe = access.subscribe
        self._limits = limits
        self._acceptance = acceptance
        self._events = events
        self._problem: str | None = None
        self.has_keys = False  # whether any message so far had a schedule key
        self._last_received = after
        self._received = ReceivedRows(source.name, after)
        self._awaited = START  # the last entry that a caller of `wait_for` or `topic_end` waits for
        self._last_added = START
        self._newest = after  # the last entry with a message that has come
        self._changed = threading.Condition()
        self._chunked = ChunkAssembler(limits.max_bytes, MOST_KEPT * acceptance.max_size)
        self._incomplete = IncompleteLog(source.name)
        self._waited = 0.0  # seconds for room or for a turn, or stood still, in which chunks could not come
        self._chunk_clock_was = time.monotonic()  # as `_chunk_clock` said last
        self._acknowledgements = Acknowledgements(source.name, self._chunked, after, self._changed)
        self._indexes = EntryIndexes(source.name, access.questions)
        self._end_check = EndCheck(source.name, access.questions)
        self._stopped = threading.Event()
        self._consumer: EntryConsumer | None = None
        self._is_idle = False
        self._is_cut_off = False
        self._thread = threading.Thread(target=self._run, name=f"receive {source.name}", daemon=True)

    def start(self) -> None:
        """Starts the thread that receives."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of messages that have come in and are in no batch yet."""
        return self._received.waiting_messages

    @property
    def waiting_bytes(self) -> int:
        """About the bytes of the messages that have come in and are in no batch yet."""
        return self._received.waiting_bytes

    @property
    def last_received(self) -> Position:
        """The last entry that has come in."""
        return self._last_received

    @property
    def read_to(self) -> Position:
        """The last entry that has been read: all entries up to it have come in."""
        return self._received.read_to

    @property
    def last_in_batch(self) -> Position:
        """The last entry that is in a batch."""
        return self._received.last_in_batch

    @property
    def problem(self) -> str | None:
        """The error because of which no messages come in; None: there is no error."""
        return self._problem

    @property
    def is_idle(self) -> bool:
        """Whether the receiver waits for the broker to send a message, and has asked it to."""
        return self._is_idle and not self.waits_for_turn

    @property
    def waits_for_turn(self) -> bool:
        """Whether the broker may send nothing, because other receivers hold all that they may together."""
        return (consumer := self._consumer) is not None and consumer.waits_for_turn

    @property
    def n_turns(self) -> int:
        """How many turns all receivers together have had that had to wait."""
        return 0 if self._limits.share is None else self._limits.share.budget.n_turns

    def connect_again(self) -> None:
        """Lets the receiver's thread open a new consumer, where the broker wrongly takes the present one for full."""
        self._is_cut_off = True

    def has_due(self, cutoff: int) -> bool:
        """Whether a message that is in no batch yet is due by a cutoff, ms since the epoch."""
        with self._changed:
            return self._received.has_due(cutoff)

    def topic_end(self) -> Position:
        """Asks the broker for the topic partition's last entry; the receiver makes sure to read up to it.

        Raises:
            PulsarError: the broker does not answer, or the consumer is not connected.
        """
        consumer = self._consumer
        if consumer is None:
            raise DisconnectedError(f"{self.source.name} is not connected")
        end = consumer.last_entry()
        self._await_entry(end)
        return end

    def are_in_batches(self, end: Position) -> bool:
        """Whether all entries up to a given one are in batches."""
        return self._received.last_in_batch >= end

    def wait_for(self, end: Position, timeout_seconds: float) -> bool:
        """Waits until all entries up to a given one have come in; returns whether they have in time."""
        self._await_entry(end)
        if self._received.read_to < end:
            self._hurry(True)
        try:
            with self._changed:
                return self._changed.wait_for(lambda: self._received.read_to >= end, timeout_seconds)
        finally:
            self._hurry(False)

    def take_into_batch(
        self, max_messages: int, max_bytes: int, up_to: Position | None = None
    ) -> tuple[Position, int, int]:
        """Takes waiting entries into a batch, as many as fit, but at least some if there is room at all.

        Args:
            max_messages: the most messages of this topic partition in the batch; 0: there is no room.
            max_bytes: the most bytes of it in the batch; 0: there is no room.
            up_to: the last entry that the batch may have; None: any.

        Returns:
            (last entry in a batch now, number of messages taken, number of bytes taken).
        """
        with self._changed:
            taken = self._received.take_into_batch(max_messages, max_bytes, up_to)
            self._changed.notify_all()
            return taken

    def rows(self, after: Position, last: Position, timeout_seconds: float = 60) -> pa.Table:
        """Waits until entries have come in, and returns their messages as MESSAGES.

        Args:
            after: the entry before the first one.
            last: the last entry. From now on entries up to it count as taken into a batch.
            timeout_seconds: how long to wait.

        Raises:
            TimeoutError: the entries have not come in time.
        """
        return table_of(self.kept_rows(after, last, timeout_seconds))

    def kept_rows(self, after: Position, last: Position, timeout_seconds: float = 60) -> list[pa.Table | FewRows]:
        """As `rows`, but returns the messages as they are kept, for `table_of` with those of other topics."""
        if last <= after:
            return []
        if not self.wait_for(last, timeout_seconds):
            raise TimeoutError(f"{self.source.name}: entry {last} has not come within {timeout_seconds:.0f} s")
        with self._changed:
            received = self._received.between(after, last)
            self._changed.notify_all()
        return [entries.rows_between(after, last) for entries in received]

    def forget(self, last: Position) -> None:
        """Drops the rows of entries up to a given one, because Spark has committed their batch."""
        with self._changed:
            self._received.forget(last)
            self._note_kept()
        self._wake_others()

    def acknowledge(self, last: Position) -> None:
        """Acknowledges all entries up to a given one, but none from the first incomplete chunked message on.

        A failure is only logged: a later acknowledgement covers these entries, too.
        """
        if (consumer := self._consumer) is not None:
            self._acknowledgements.acknowledge(consumer, last)

    def acknowledge_again(self, end: Position) -> None:
        """Repeats the acknowledgement of a topic's last entry, in case it was lost: no later one would cover it.

        Args:
            end: the topic partition's last entry. Nothing happens if it has not been acknowledged.
        """
        if (consumer := self._consumer) is not None:
            self._acknowledgements.repeat(consumer, end)

    def stop(self) -> None:
        """Lets the thread end; does not wait for it."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        if (share := self._limits.share) is not None:
            share.leave()
            self._wake_others()

    def _await_entry(self, end: Position) -> None:
        with self._changed:
            self._awaited = max(self._awaited, end)

    def _run(self) -> None:
        wait, longest = _RETRY_SECONDS
        failed_after = self._last_received  # the entry after which the last error came up
        while not self._stopped.is_set():
            try:
                self._consumer = self._subscribe()
                with self._changed:
                    self._chunked.begin_anew(self._chunk_clock())
                self._is_cut_off = False
                while not (self._stopped.is_set() or self._is_cut_off):
                    self._wait_for_room(self._consumer)
                    self.receive(self._consumer)
                    wait = _RETRY_SECONDS[0]
                    if self._is_idle or self._last_received > failed_after:
                        self._events.on_success()
                self._close()
            except Exception as error:
                if not self._stopped.is_set():
                    is_usual = isinstance(error, DisconnectedError) and wait == _RETRY_SECONDS[0]
                    text = str(error) if isinstance(error, PulsarError) else f"{type(error).__name__}: {error}"
                    self._problem = text
                    _log.log(
                        logging.INFO if is_usual else logging.WARNING, "%s: %s; trying again", self.source.name, text
                    )
                    self._events.on_error(error)
                    failed_after = self._last_received
                    self._close()
                    self._stopped.wait(wait)
                    wait = min(2 * wait, longest)

    def _close(self) -> None:
        consumer, self._consumer = self._consumer, None
        self._is_idle = False
        if consumer is not None:
            with suppress(PulsarError):
                consumer.close()
        self._note_all_kept()

    def _wait_for_room(self, consumer: EntryConsumer) -> None:
        if self._has_room():
            return
        consumer.pause()
        begin = time.monotonic()
        with self._changed:
            self._changed.wait_for(self._has_room)
        self._waited += time.monotonic() - begin

    def _has_room(self) -> bool:
        return self._stopped.is_set() or (
            self._received.waiting_messages < self._limits.max_messages
            and self._received.waiting_bytes < self._limits.max_bytes
        )

    def receive(self, consumer: EntryConsumer) -> None:
        """Receives the entries of the next moment, and keeps their messages.

        When this raises, no message is kept, and the next consumer receives all of them again.
        """
        begin, was_waiting = time.monotonic(), consumer.waits_for_turn
        entry = consumer.receive(_IDLE_SECONDS)
        if was_waiting or consumer.waits_for_turn:
            self._waited += time.monotonic() - begin
        if entry is not None:
            self._is_idle = False
            self._end_check.begin_anew()
        elif consumer.waits_for_turn:
            self._problem = None
            self._is_idle = False
        else:
            self._problem = None
            self._is_idle = True
            entry = self._check_end(consumer)
        self._give_up_chunks()
        builder = RowBuilder(self.source, self._acceptance)
        deadline = time.monotonic() + _SECONDS_AT_ONCE
        while entry is not None:
            self._take(builder, entry, consumer.max_message_bytes)
            if (
                len(builder) >= min(_MESSAGES_AT_ONCE, self._limits.max_messages // 2)
                or builder.n_bytes >= min(_BYTES_AT_ONCE, self._limits.max_bytes // 8)
                or builder.rule_cost.seconds > _RULE_SECONDS
                or time.monotonic() > deadline + _BUSY_SECONDS
                or self._received.read_to < self._awaited <= self._last_added
            ):
                break
            entry = consumer.receive(0)
            if entry is None and time.monotonic() < deadline:
                entry = consumer.receive(self._limits.next_seconds)
        if len(builder):
            self._keep(builder)
        elif builder.came:
            self._events.on_entries(builder.came)
        self._note_all_kept()
        if builder.rule_cost.seconds > _RULE_SECONDS:  # other topics' threads come first
            consumer.pause()
            self._stopped.wait(_RULE_PAUSE * builder.rule_cost.seconds)

    def _take(self, builder: RowBuilder, received: ReceivedEntry, max_message_bytes: int) -> None:
        """Adds an entry's messages to the rows to be built, unless they came before."""
        if (failure := self._acceptance.why_not_decompressed(received)) is not None:
            entry: UnpackedEntry | None = unreadable(received, failure)
        else:
            entry = unpack(received, self._acceptance.decryptor, self._add_chunk, max_message_bytes)
        if entry is None:
            if (part := _part(received)) is not None:
                builder.came.append(part)
        elif self._is_new(builder, entry.position):
            builder.add(entry, self._first_index(entry), self._left_out(entry))

    def _is_new(self, builder: RowBuilder, position: Position) -> bool:
        """Whether an entry that comes now is to be taken, because it has not come before."""
        self._acknowledgements.saw(position)
        if position > self._newest:
            self._newest = position
        elif position in builder.entries or self._acknowledgements.has_come(position):
            return False
        return not self._acknowledgements.was_taken_in(position)

    def _add_chunk(self, position: Position, metadata: MessageMetadata, part: bytes) -> Whole | None:
        """Adds a chunk of a message; returns the message when it is whole."""
        with self._changed:
            before = self._acknowledgements.saw(position)
            whole = self._chunked.add(position, before, metadata, part, self._chunk_clock())
            if whole is not None:
                self._acknowledgements.add_chunked(position, whole)
        return whole

    def _give_up_chunks(self) -> None:
        with self._changed:
            self._chunked.expire(self._chunk_clock())
            given_up, self._chunked.given_up = self._chunked.given_up, []
        self._incomplete.note(given_up, time.monotonic())
        if given_up and (consumer := self._consumer) is not None:
            self._acknowledgements.acknowledge_rest(consumer)  # perhaps nothing more comes, and no batch does

    def _chunk_clock(self) -> float:
        """Returns the time by a clock that stands still while chunks can't come, s."""
        now = time.monotonic() - self._waited
        stood_still = max(0.0, now - self._chunk_clock_was - _LONGEST_STEP_SECONDS)
        self._waited += stood_still
        self._chunk_clock_was = now - stood_still
        return self._chunk_clock_was

    def _first_index(self, entry: UnpackedEntry) -> int | None:
        """Returns the broker entry index of an entry's first message; None: not known."""
        follows, self._last_added = entry.position.follows(self._last_added), entry.position
        if entry.last_index is not None:
            return entry.last_index - entry.n_messages + 1
        return self._indexes.first_index(entry.position, entry.n_messages, follows)

    def _left_out(self, entry: UnpackedEntry) -> str | None:
        """Returns why this job leaves an entry's messages out; None: it does not."""
        if self._acceptance.takes_replicated or entry.metadata is None or not entry.metadata.replicated_from:
            return None
        return LEFT_OUT + entry.metadata.replicated_from[:_MAX_CLUSTER_BYTES].decode(errors="replace")

    def _keep(self, builder: RowBuilder) -> None:
        """Keeps the rows of received messages, and remembers their entries, to drop them when they come again."""
        with nullcontext() if builder.has_few else _BUILDING:
            rows = builder.rows()
        self.has_keys = self.has_keys or (rows.has_keys if isinstance(rows, FewRows) else has_keys(rows))
        self._events.on_entries(builder.came)
        self._problem = None
        with self._changed:
            self._acknowledgements.add(builder.entries.runs)
            self._last_received = max(self._last_received, builder.entries.last)
            earliest = self._received.add(rows, builder.n_bytes, builder.entries.last)
            self._changed.notify_all()
        self._events.on_received(earliest)

    def _note_all_kept(self) -> None:
        """Notes that everything which the consumer has handed over is among what is kept now, or was dropped."""
        if self._limits.share is not None:
            with self._changed:
                self._note_kept(handed=0)
            self._wake_others()

    def _note_kept(self, handed: int | None = None) -> None:
        if self._limits.share is not None:
            self._limits.share.note(handed=handed, kept=self._received.kept_bytes)

    def _hurry(self, is_hurried: bool) -> None:
        if (share := self._limits.share) is not None and share.is_hurried != is_hurried:
            share.hurry(is_hurried)
            self._wake_others()

    def _wake_others(self) -> None:
        if self._limits.share is not None:
            self._limits.share.budget.wake()

    def _check_end(self, consumer: EntryConsumer) -> ReceivedEntry | None:
        """Checks, while no entry comes, whether all entries up to `_awaited` have been read, and notes it if so.

        Returns:
            an entry that has come during the check; None: none has.
        """
        with self._changed:
            awaited = self._awaited
        entry, all_read = self._end_check.check(consumer, awaited, self._received.read_to)
        if all_read is not None:
            self._events.on_passed(min(all_read.up_to, all_read.topic_end))
            with self._changed:
                self._acknowledgements.saw(all_read.up_to)
                self._received.add(empty_table(MESSAGES), 0, all_read.up_to)
                self._changed.notify_all()
            self._events.on_received(0)
        return entry


def _part(received: ReceivedEntry) -> CameEntry | None:
    """Returns an entry as a part of a message; None: it should have been a message, as the last chunk of one."""
    envelope = received.envelope
    if isinstance(envelope, EntryError) or envelope.metadata.chunk_id >= envelope.metadata.n_chunks - 1:
        return None
    return CameEntry(received.position, 1, envelope.last_index)
