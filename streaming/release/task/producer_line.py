"""A line: the messages of one producer in a task. Either all of them arrive, or the line has failed."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from broker.client import PulsarError
from broker.protocol.building import OutgoingMessage, batch_entry, large_message, single_entry
from broker.protocol.producer import EntryProducer, EntryTooLargeError
from broker.protocol.sending import Outgoing, RefusedEntry, is_refusal
from conf.errors import DelayLakeError
from streaming.release.sequence_ids import last_sequence_id, tick_of
from streaming.release.task.lag import Lag
from streaming.release.task.refusing_producer import NotTakenError, RefusingProducer
from streaming.release.task.shared_paces import Pace
from warehouse.delivery_key import Key

_BUSY_SECONDS = 0.1  # between two attempts to get a producer
_CLOSE_SECONDS = 5.0  # how long the broker is waited for to end a producer

# A line hands over so many bytes of large messages ahead of the broker's answers: what is handed over is in memory.
_UNANSWERED_BYTES = 8 << 20

_SURE_BYTES = 1 << 20  # of an entry, which each broker takes: the chunks may have been sent under a smaller limit

LARGE_BYTES = 32_768  # of a payload; the producer may cut a larger one into chunks
TOO_LARGE = "MessageTooBig"  # how the reason begins why a message is rejected that the broker takes none of its size


class Send(Protocol):
    """A message to be sent; the fields are as of `PlannedSend`."""

    at: int  # when it is handed to the producer, ms since the epoch
    sequence_id: int
    first_id: int  # the sequence id of the first message of its batch
    is_batched: bool
    pace: Pace | None  # the bucket from which it takes the places of its batch; None: it needs no place
    n_places: int
    line: Line


class Large(NamedTuple):
    """A message that may have been sent in chunks.

    Attributes:
        n_bytes: the most bytes that it has as one entry.
        key: of its delivery.
    """

    n_bytes: int
    key: Key


class NotOpenError(DelayLakeError):
    """A message was handed to a line that has no producer yet."""


def reason_of(error: Exception) -> str:
    """Returns why something has failed, one line: the error's name, and what it says."""
    return str(error) if isinstance(error, PulsarError) else f"{type(error).__name__}: {error}"


@dataclass(eq=False)
class Line:
    """The messages of one producer in a task, in order: all of them arrive, or the line has failed.

    No message is handed to the producer after a failure. So messages arrive up to some message, and none after it.

    Attributes:
        topic: the destination, or its partition.
        key: the producer's name in the plan.
        create: makes the producer, which sets `wake` when there is progress; may wait for the broker.
        begin: begins to make it without waiting, and calls its argument as `Begin.on_opened`; returns None where it has
            not begun. Without it `create` does it, in a thread.
        patience_seconds: how long the line waits for a broker that does not answer.
        max_id: the highest sequence id that the job can have used under this name.
        ids: the sequence ids of the line's messages, ascending. The job has used no others of their ticks.
        n_bytes: the size of the line's payloads.
        lag: says whether the broker's answers are too late: then the line has failed, and is slow.
        is_first_attempt: whether no message can have been sent before.
        producer: None: it is not made yet.
        resume_after: the last sequence id that had arrived before, -1: none. Messages up to it are not sent again. The
            broker's answer counts, too, when the producer is made.
        remembered: the last sequence id that the broker told when the producer was made; -1: none.
        recipient: (source topic, subscription) of the messages.
    """

    topic: str
    key: str
    create: Callable[[], Producer]
    patience_seconds: float
    begin: Callable[[Callable[[EntryProducer, PulsarError | None], None]], EntryProducer | None] | None = None
    max_id: int = 0
    ids: list[int] = field(default_factory=list)
    n_bytes: int = 0
    lag: Lag = field(default_factory=lambda: Lag(0))
    is_first_attempt: bool = False
    producer: Producer | None = None
    resume_after: int = -1
    remembered: int = -1
    opened_at: int = 0  # when the producer was made, ms since the epoch
    error: str = ""  # why the line has failed; empty: it has not
    is_refused: bool = False  # the broker has refused, rather than not answered
    is_slow: bool = False  # the broker answers, but too late
    is_behind: bool = False  # a message had to wait for one of another line, which has failed
    foreign_id: int | None = None  # a sequence id that somebody else has published under this name
    is_partly_sent: bool = False  # the broker counts the last message as published, and does not have all its chunks
    recipient: tuple[str, str] = ("", "")
    read_arrived_keys: Callable[[], frozenset[Key]] | None = None  # reads which messages have arrived under other names
    # The same, where the broker does not tell: the destination now refuses their schema, so that it can't be asked, or
    # the broker may have some chunks only of the last message.
    read_arrived_if_unclear: Callable[[], frozenset[Key]] | None = None
    large: Mapping[int, Large] = field(default_factory=dict)  # messages that may have been sent before, by sequence id
    max_entry_bytes: int = 0  # by the settings: a message that is larger may have been sent in chunks
    arrived_keys: frozenset[Key] = frozenset()  # the delivery keys of these messages
    waiting: deque[int] = field(default_factory=deque)  # indexes of due entries that the producer has not got yet
    # Set when the line has made progress or has failed.
    wake: threading.Event = field(default_factory=lambda: threading.Event())
    # The lines of the same topic: no message is sent before all of them have a producer, so that messages go in order.
    of_topic: Sequence[Line] = ()
    ends_at: float = 0.0  # then the line is ended as a slow one, seconds, monotonic; 0: never
    _handed: int = -1  # the highest sequence id that was handed to the producer last
    # Of large messages that were handed over, and may not have arrived: the sequence id, and the bytes.
    _unanswered: deque[tuple[int, int]] = field(default_factory=deque)
    # When the broker last showed progress, monotonic.
    _progress_at: float = field(default_factory=lambda: time.monotonic())
    _last_seen: tuple[int, int] = (-2, 0)  # the producer's last sequence id then, and number of answers
    _is_closed: bool = False
    _begun: EntryProducer | None = None  # the producer that `begin` has begun to make
    _wait_closed: Callable[[float], None] | None = None
    _making_since: float | None = None  # since when the broker is asked for the producer; None: it is not
    _why_not_made: str = ""  # the last error of that

    @property
    def has_failed(self) -> bool:
        """Whether the line has failed: it takes no more messages."""
        return bool(self.error)

    @property
    def arrived_to(self) -> int:
        """The last sequence id that has arrived, as far as the broker has said; -1: none."""
        if self.foreign_id is not None or self.is_partly_sent:
            return -1
        return self.resume_after if self.producer is None else max(self.resume_after, self.producer.last_sequence_id)

    @property
    def takes_messages(self) -> bool:
        """Whether messages may be handed over now: the line has a producer, and so has each of its topic, or failed."""
        if self.producer is None or self.error or not self.producer.is_open:
            return False
        if self.of_topic and all(line.producer is not None or line.error for line in self.of_topic):
            self.of_topic = ()
        return not self.of_topic and (not self._unanswered or self._unanswered_bytes(self.producer) < _UNANSWERED_BYTES)

    def _unanswered_bytes(self, producer: Producer) -> int:
        """Returns the bytes of large messages that were handed over and have not been answered."""
        if not producer.n_pending:
            self._unanswered.clear()
        while self._unanswered and self._unanswered[0][0] <= producer.last_sequence_id:
            self._unanswered.popleft()
        return sum(n_bytes for _, n_bytes in self._unanswered)

    def open(self) -> None:
        """Begins to make the producer; where that may wait, in a thread of its own."""
        self._making_since = time.monotonic()
        if self.begin is not None:
            self._begun = self.begin(self._opened)
        if self._begun is None:
            self._open_in_thread()

    def _opened(self, producer: EntryProducer, error: PulsarError | None) -> None:
        """Takes a producer that was begun; after an error it is made as if it had not been."""
        if error is None:
            self._making_since = None
            self._take(producer)
        elif not self._is_closed:
            self._open_in_thread()

    def _open_in_thread(self) -> None:
        threading.Thread(target=self._open, name=f"producer {self.key}", daemon=True).start()

    def _open(self) -> None:
        while not self._is_closed:
            producer: Producer | None = None
            try:
                producer = self.create()
                self._making_since = None
                before = producer.last_sequence_id
                is_unclear = isinstance(producer, RefusingProducer) or self._may_be_in_part(producer, before)
                read_arrived = self.read_arrived_keys or (self.read_arrived_if_unclear if is_unclear else None)
                if read_arrived is not None:
                    self.arrived_keys = read_arrived()  # may take long
            except Exception as error:
                if producer is not None:
                    producer.close()
                self._making_since = self._making_since or time.monotonic()
                self._why_not_made = reason_of(error)
                if is_refusal(error) or self._is_too_long():
                    self.fail(self._why_not_made, is_refusal(error))
                    return
                time.sleep(_BUSY_SECONDS)
                continue
            self._take(producer)
            return

    def _take(self, producer: Producer) -> None:
        """Takes a producer that the broker has opened, or fails the line; does not block."""
        before = producer.last_sequence_id
        if self._is_foreign(before) or (self.is_first_attempt and bool(self.ids) and before >= self.ids[0]):
            producer.close()
            self._found_foreign(before)
            return
        if self._may_be_in_part(producer, before) and self.large[before].key not in self.arrived_keys:
            producer.close()
            self.is_partly_sent = True
            self.fail(f"{self.topic} has some chunks only of message {before} of {self.key}")
            return
        self.remembered = before
        self.resume_after = max(self.resume_after, before)
        self.opened_at = time.time_ns() // 1_000_000
        self._progress_at = time.monotonic()
        self.producer = producer
        if self._is_closed:
            producer.close()
        self.wake.set()

    def _may_be_in_part(self, producer: Producer, last: int) -> bool:
        """Whether the broker may have some chunks only of the message with its last sequence id.

        A broker that loads a topic counts each chunk as the whole message. A later message is sent after all chunks.
        """
        most = min(self.max_entry_bytes, producer.max_message_bytes, _SURE_BYTES)
        return last in self.large and self.large[last].n_bytes > most

    def _is_too_long(self) -> bool:
        """Whether the broker has not given a producer for `patience_seconds`."""
        since = self._making_since
        return since is not None and time.monotonic() - since > self.patience_seconds

    def fail(self, error: str, is_refused: bool = False) -> None:
        """Ends the line with an error, unless it has failed already.

        Args:
            error: the reason, not empty.
            is_refused: whether the broker has refused, rather than not answered.
        """
        if not self.error:
            self.is_refused = is_refused
            self.error = error
            self.wake.set()

    def fail_slow(self, why: str) -> None:
        """Ends the line, unless it has failed already: the broker's answers are too late."""
        if not self.error:
            self.is_slow = True
            self.fail(f"slow: {why}")

    @property
    def is_untouched(self) -> bool:
        """Whether no message of the line can be at the broker."""
        return self.is_first_attempt and self._handed < 0

    def _is_foreign(self, sequence_id: int) -> bool:
        """Whether a producer's last sequence id can't be one that the job has used."""
        if sequence_id > self.max_id:
            return True
        is_of_these_ticks = bool(self.ids) and self.ids[0] <= sequence_id <= last_sequence_id(tick_of(self.ids[-1]))
        return is_of_these_ticks and sequence_id not in self.ids

    def _found_foreign(self, sequence_id: int) -> None:
        self.foreign_id = sequence_id
        self.fail(f"somebody else has published as {self.key}, up to the sequence id {sequence_id}", is_refused=True)

    def hand_over(self, messages: Sequence[OutgoingMessage], is_batched: bool) -> None:
        """Gives messages to the producer, without waiting until they arrive. `takes_messages` must be true.

        Args:
            messages: of one entry, at least one.
            is_batched: whether the entry is a batch; else it has one message.

        Raises:
            NotTakenError: the broker does not take them.
            NotOpenError: the line has no producer yet.
        """
        producer = self.producer
        if producer is None:
            raise NotOpenError(f"{self.topic}: the producer {self.key} is not open yet")
        now = time.time_ns() // 1_000_000
        entry: Outgoing
        if is_batched:
            entry = batch_entry(messages, producer.name, now, producer.schema_version)
        else:
            encoded = large_message if len(messages[0].payload or b"") > LARGE_BYTES else single_entry
            entry = encoded(messages[0], producer.name, now, producer.schema_version)
        try:
            producer.send(entry, is_more=True)
        except EntryTooLargeError as error:
            raise NotTakenError(f"{TOO_LARGE}: {error}") from None
        self._handed = entry.highest_sequence_id
        if (n_bytes := sum(len(message.payload or b"") for message in messages)) >= LARGE_BYTES:
            self._unanswered.append((self._handed, n_bytes))
        self.lag.note_given(self._handed)

    def flush(self) -> None:
        """Sends what was handed over; until then it may wait for more."""
        if self.producer is not None:
            self.producer.flush()

    def look_after(self) -> list[RefusedEntry]:
        """Fails the line if the broker refuses it, or does not answer for too long; returns what is refused alone."""
        now = time.monotonic()
        if self.producer is None and self._is_too_long():
            self.fail(self._why_not_made or f"the broker has given no producer for {self.patience_seconds:.0f} s")
        producer = self.producer
        if self.error or producer is None or self._is_done():
            return []
        if producer.error is not None:
            self.fail(reason_of(producer.error), is_refusal(producer.error))
            return []
        seen = producer.last_sequence_id
        if producer.is_open and producer.n_pending and (why := self.lag.why_slow(seen, self.ids, self.n_bytes)):
            self.fail_slow(why)
        elif self._is_turn_over(producer, now):
            self.fail_slow(f"{len(self.ids) - bisect_right(self.ids, seen):,} messages of its turn are left")
        elif (seen, producer.n_answers) != self._last_seen or (producer.is_open and not producer.n_pending):
            self._last_seen, self._progress_at = (seen, producer.n_answers), now
        elif now - self._progress_at > self.patience_seconds:
            self.fail(f"the broker has not answered for {self.patience_seconds:.0f} s")
        return producer.take_refused()

    def _is_turn_over(self, producer: Producer, now: float) -> bool:
        """Whether the line has had its time. The chunks of its first message come, however long they take."""
        is_first = producer.is_in_chunks and producer.last_sequence_id <= self.resume_after
        return bool(self.ends_at) and now > self.ends_at and not self.has_arrived() and not is_first

    def has_arrived(self) -> bool:
        """Whether everything that was handed over is at the broker."""
        return self.producer is not None and self.producer.has_arrived

    def _is_done(self) -> bool:
        """Whether nothing is left to be sent or answered: then it does not matter what becomes of the producer."""
        is_last = bool(self.ids) and max(self._handed, self.resume_after) >= self.ids[-1]
        return is_last and not self.waiting and self.has_arrived()

    def close(self) -> None:
        """Ends the producer; what was not answered is not sent again. Does not wait for the broker."""
        if self._is_closed:
            return
        self._is_closed = True
        producer = self.producer or self._begun  # else the thread that makes the producer closes it
        if producer is not None:
            self._wait_closed = producer.close()

    def wait_closed(self) -> None:
        """Waits until the broker has ended the producer of a line that has not failed."""
        if self._wait_closed is not None and not self.error:
            self._wait_closed(_CLOSE_SECONDS)

    def check_repeated(self) -> None:
        """Finds out why the broker has dropped a new last message as a repetition; may fail the line.

        Either the connection was lost before the broker's answer came, and the producer has sent the message again; or
        somebody else has published under this name in the meantime. Then the line fails.
        """
        is_repeated = self.producer is not None and self.producer.repeated_to == self._handed > self.resume_after
        if not is_repeated or self.error:
            return
        try:
            producer = self.create()
        except Exception as error:
            self.fail(reason_of(error), is_refusal(error))
            return
        last = producer.last_sequence_id
        producer.close()(_CLOSE_SECONDS)
        if self._is_foreign(last):
            self._found_foreign(last)


Producer = EntryProducer | RefusingProducer
