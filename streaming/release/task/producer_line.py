"""A line: the messages of one producer in a task. Either all of them arrive, or the line has failed."""

from __future__ import annotations

import functools
import logging
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pulsar

from broker.client import close_quietly
from conf.errors import DelayLakeError
from streaming.release.sequence_ids import last_sequence_id, tick_of
from streaming.release.task.lag import Lag
from streaming.release.task.refusing_producer import RefusingProducer
from streaming.release.task.shared_paces import Pace
from warehouse.delivery_key import Key

_log = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.02  # between two checks whether a producer is connected again
_BUSY_SECONDS = 0.1  # between two attempts to get a producer

# Errors with which a broker refuses messages, so that it is no use to wait.
REFUSALS = (
    pulsar.TopicTerminated,
    pulsar.ProducerBlockedQuotaExceededError,
    pulsar.ProducerBlockedQuotaExceededException,
    pulsar.AuthenticationError,
    pulsar.AuthorizationError,
    pulsar.IncompatibleSchema,
    pulsar.TopicNotFound,
    pulsar.InvalidTopicName,
    pulsar.NotAllowedError,
    pulsar.ProducerFenced,
    pulsar.UnsupportedVersionError,
)


class Send(Protocol):
    """A message to be sent; the fields are as of `PlannedSend`."""

    at: int  # when it is handed to the producer, ms since the epoch
    sequence_id: int
    first_id: int  # the sequence id of the first message of its batch
    is_batched: bool
    is_last: bool  # it is the last message of its batch
    is_large: bool  # the client may refuse it
    pace: Pace | None  # the bucket from which it takes the places of its batch; None: it needs no place
    n_places: int
    line: Line


class NotOpenError(DelayLakeError):
    """A message was handed to a line that has no producer yet."""


@dataclass(eq=False)
class Line:
    """The messages of one producer in a task, in order: all of them arrive, or the line has failed.

    No message is handed to the producer after a failure. So messages arrive up to some message, and none after it.

    Attributes:
        topic: the destination, or its partition.
        key: the producer's name in the plan.
        create: makes the producer; may wait for the broker.
        patience_seconds: how long the line waits for a broker that does not answer.
        last_id: the sequence id of the last batch's first message.
        max_id: the highest sequence id that the job can have used under this name.
        ids: the sequence ids of the line's messages, ascending. The job has used no others of their ticks.
        n_bytes: the size of the line's payloads.
        lag: says whether the broker's answers are too late: then the line has failed, and is slow.
        is_first_attempt: whether no message can have been sent before.
        producer: None: it is not made yet.
        resume_after: the last sequence id that had arrived before, -1: none. Messages up to it are not sent again. The
            broker's answer counts, too, when the producer is made.
        remembered: the last sequence id that the broker told when the producer was made; -1: none.
        target: (source topic, subscription) of the messages.
    """

    topic: str
    key: str
    create: Callable[[], pulsar.Producer]
    patience_seconds: float
    last_id: int = 0
    max_id: int = 0
    ids: list[int] = field(default_factory=list)
    n_bytes: int = 0
    lag: Lag = field(default_factory=lambda: Lag(0))
    is_first_attempt: bool = False
    producer: pulsar.Producer | None = None
    resume_after: int = -1
    remembered: int = -1
    opened_at: int = 0  # when the producer was made, ms since the epoch
    error: str = ""  # why the line has failed; empty: it has not
    is_refused: bool = False  # the broker has refused, rather than not answered
    is_slow: bool = False  # the broker answers, but too late
    is_behind: bool = False  # a message had to wait for one of another line, which has failed
    foreign_id: int | None = None  # a sequence id that somebody else has published under this name
    target: tuple[str, str] = ("", "")
    read_arrived_keys: Callable[[], frozenset[Key]] | None = None  # reads which messages have arrived under other names
    # Reads which messages have arrived, where the destination now refuses their schema: the broker can't be asked.
    read_arrived_if_refused: Callable[[], frozenset[Key]] | None = None
    arrived_keys: frozenset[Key] = frozenset()  # the delivery keys of these messages
    waiting: deque[int] = field(default_factory=deque)  # indexes of due messages that the producer has not got yet
    wake: threading.Event = field(default_factory=threading.Event)  # set when the line has made progress or has failed
    # The lines of the same topic: no message is sent before all of them have a producer, so that messages go in order.
    of_topic: Sequence[Line] = ()
    _handed: int = -1  # `first_id` of the last message that was handed to the producer
    _arrived: int = -1  # `first_id` of the last message that has arrived
    _flushed_at: float = 0.0  # seconds, monotonic
    _needs_flush: bool = False
    _is_interrupted: bool = False  # the connection is lost
    _progress_at: float = field(default_factory=time.monotonic)  # when the broker last showed progress, monotonic
    _last_seen: int = -2  # the producer's last sequence id then
    ends_at: float = 0.0  # then the line is ended as a slow one, seconds, monotonic; 0: never
    _is_closed: bool = False
    _is_repeated: bool = False  # the broker took the last message for a repetition, but it was new
    _is_in_batch: bool = False  # a batch has been begun and not ended
    _making_since: float | None = None  # since when the client is asked for the producer; None: it is not
    _why_not_made: str = ""  # the last error of that
    _thread: threading.Thread | None = None  # makes the producer

    @property
    def has_failed(self) -> bool:
        """Whether the line has failed: it takes no more messages."""
        return bool(self.error)

    @property
    def arrived_to(self) -> int:
        """The last sequence id that has arrived, as far as the broker has said; -1: none."""
        if self.foreign_id is not None:
            return -1
        return self.resume_after if self.producer is None else max(self.resume_after, self.producer.last_sequence_id())

    @property
    def takes_messages(self) -> bool:
        """Whether messages may be handed over now: the line has a producer, and so has each of its topic, or failed."""
        if self.producer is None or self.error or (self._is_interrupted and not self._is_in_batch):
            return False
        if self.of_topic and all(line.producer is not None or line.error for line in self.of_topic):
            self.of_topic = ()
        return not self.of_topic

    def open(self) -> None:
        """Begins to make the producer, in a thread of its own."""
        self._thread = threading.Thread(target=self._open, name=f"producer {self.key}", daemon=True)
        self._thread.start()

    @property
    def is_opening(self) -> bool:
        """Whether the client is asked for the producer, and has not answered."""
        return self._thread is not None and self._thread.is_alive()

    def wait_opened(self) -> None:
        """Waits until the producer is made, or the client gives up, perhaps later than the line."""
        if self._thread is not None:
            self._thread.join()

    def _open(self) -> None:
        self._making_since = time.monotonic()
        while not self._is_closed:
            producer: pulsar.Producer | None = None
            try:
                producer = self.create()
                self._making_since = None
                before = producer.last_sequence_id()
                is_refusing = isinstance(producer, RefusingProducer)
                read_arrived = self.read_arrived_keys or (self.read_arrived_if_refused if is_refusing else None)
                if read_arrived is not None:
                    self.arrived_keys = read_arrived()  # may take long
            except Exception as error:
                if producer is not None:
                    close_quietly(producer)
                self._making_since = self._making_since or time.monotonic()
                self._why_not_made = f"{type(error).__name__}: {error}"
                if isinstance(error, REFUSALS) or self._is_too_long():
                    self.fail(self._why_not_made, isinstance(error, REFUSALS))
                    return
                time.sleep(_BUSY_SECONDS)
                continue
            if self._is_foreign(before) or (self.is_first_attempt and bool(self.ids) and before >= self.ids[0]):
                close_quietly(producer)
                self._found_foreign(before)
                return
            self.remembered = before
            self.resume_after = max(self.resume_after, before)
            self.opened_at = time.time_ns() // 1_000_000
            self._progress_at = time.monotonic()
            self.producer = producer
            if self._is_closed:
                close_quietly(producer)
            self.wake.set()
            return

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
        """Ends the line, unless it has failed already: the broker's answers are too late.

        Its producer is not closed, which would take until the broker has answered all: its client has to be shut down.
        """
        if not self.error:
            self.is_slow = self._is_closed = True
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

    def hand_over(self, message: Any, send: Send) -> None:
        """Gives a message to the producer, without waiting until it arrives. `takes_messages` must be true.

        Args:
            message: a `_pulsar.Message`.
            send: its plan.

        Raises:
            pulsar.PulsarException: the client does not take this message.
            NotOpenError: the line has no producer yet.
        """
        producer = self._opened()
        # Without a callback, which would cost more than all the rest; a failure shows in the next flush. Only the last
        # message has one, to find out whether the broker took it for a repetition.
        is_end = send.first_id == self.last_id and send.is_last
        refused: list[str] = []
        callback = self._acknowledged if is_end else None
        if send.is_large:
            callback = functools.partial(self._large_acknowledged, refused, is_end)
        try:
            producer._producer.send_async(message, callback)
            if refused:
                raise pulsar.MessageTooBig("the broker takes none of this size")
            self._handed = send.first_id
            self._needs_flush = True
            self.lag.note_given(send.first_id)
        finally:
            self._is_in_batch = send.is_batched and not send.is_last
            if send.is_batched and send.is_last:
                self._flush()  # ends the batch, and sends it

    def leave_out(self, send: Send) -> None:
        """Leaves a message out that can't be sent. `takes_messages` must be true."""
        if send.first_id == self.last_id and send.is_last:
            self._is_repeated = self._handed >= 0  # no answer to a last message says that it is not
        if send.is_batched and send.is_last and self._is_in_batch:
            self._is_in_batch = False
            self._flush()

    def _large_acknowledged(self, refused: list[str], is_end: bool, result: Any, message_id: Any) -> None:
        """The callback of a large message: called at once if it is too large, else when it has arrived."""
        if getattr(result, "name", str(result)) == "MessageTooBig":
            refused.append("MessageTooBig")
        elif is_end:
            self._acknowledged(result, message_id)

    def _acknowledged(self, result: Any, message_id: Any) -> None:
        try:
            is_dropped = message_id is not None and message_id.ledger_id() < 0
            self._is_repeated = is_dropped and self.resume_after < self.last_id
        except Exception:  # in a thread of the client, which it would end
            _log.exception("%s", self.topic)

    def _opened(self) -> pulsar.Producer:
        """Returns the producer; raises NotOpenError where it is not made yet."""
        if self.producer is None:
            raise NotOpenError(f"{self.topic}: the producer {self.key} is not open yet")
        return self.producer

    def _flush(self) -> None:
        producer = self._opened()
        self._needs_flush = False
        self._flushed_at = time.monotonic()
        try:
            producer._producer.flush_async(functools.partial(self._flushed, self._handed))
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")

    def _flushed(self, handed: int, result: Any) -> None:
        """The callback of a flush, in the client's thread.

        Args:
            handed: `_handed` when the flush began.
            result: of all messages that had been handed over by then.
        """
        try:
            name = getattr(result, "name", str(result))
            if name == "Ok":
                self._is_interrupted = False
                if (last := self._opened().last_sequence_id()) >= handed:
                    self._arrived = max(self._arrived, handed)
                else:
                    # The client has dropped messages; the sequence ids of later messages would hide that.
                    self.fail(f"the broker has {last} of {handed}")
            elif name == "AlreadyClosed":
                self._is_interrupted = True  # closed for good, or about to connect again
            else:
                self.fail(name, name in {refusal.__name__ for refusal in REFUSALS})
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
        self.wake.set()

    def look_after(self) -> None:
        """Asks whether messages have arrived, and fails the line if the broker does not answer for too long."""
        now = time.monotonic()
        if self.producer is None and self._is_too_long():
            self.fail(self._why_not_made or f"the broker has given no producer for {self.patience_seconds:.0f} s")
        if self.error or self.producer is None:
            return
        if self._is_in_batch:
            return  # a flush would end the batch here, and elsewhere when it is sent again
        if self._needs_flush or (self._is_interrupted and now - self._flushed_at > _FLUSH_SECONDS):
            self._flush()
        seen = self.producer.last_sequence_id()
        if not self._is_interrupted and (why := self.lag.why_slow(seen, self.ids, self.n_bytes)):
            self.fail_slow(why)
            return
        if self.ends_at and now > self.ends_at and not self.has_arrived():
            self.fail_slow(f"{len(self.ids) - bisect_right(self.ids, seen):,} messages of its turn are left")
            return
        if seen != self._last_seen or (self._arrived >= self._handed and not self._is_interrupted):
            self._last_seen, self._progress_at = seen, now
        elif now - self._progress_at > self.patience_seconds:
            self.fail(f"the broker has not answered for {self.patience_seconds:.0f} s")

    def has_arrived(self) -> bool:
        """Whether everything that was handed over is at the broker."""
        return self._arrived >= self._handed and not self._needs_flush and not self._is_interrupted

    def close(self) -> None:
        """Closes the producer; that of a failed line in the background, because it may take long."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.producer is None:
            return  # the thread that makes the producer closes it
        if self.error:
            threading.Thread(target=close_quietly, args=(self.producer,), daemon=True).start()
        else:
            close_quietly(self.producer)

    def check_repeated(self) -> None:
        """Finds out why the broker has dropped a new last message as a repetition; may fail the line.

        Either the connection was lost before the broker's answer came, and the client has sent the message again; or
        somebody else has published under this name in the meantime. Then the line fails.
        """
        if not self._is_repeated or self.error:
            return
        try:
            producer = self.create()
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}", isinstance(error, REFUSALS))
            return
        last = producer.last_sequence_id()
        close_quietly(producer)
        if self._is_foreign(last):
            self._found_foreign(last)
