"""A producer that sends ready-made entries under a name of its own, and connects again by itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from broker.client import NoAnswerError, PulsarError
from broker.protocol.building import LargeMessage
from broker.protocol.connection import Connection
from broker.protocol.frames import Frame
from broker.protocol.sending import Outgoing, RefusedEntry, Sending, is_refusal
from broker.protocol.session import ClosedError, DisconnectedError
from broker.protocol.wire.pulsar_pb2 import Command, ProducerAnswer, Schema

_log = logging.getLogger(__name__)

_FIRST_WAIT_SECONDS = 0.1  # between two attempts to connect again; it doubles
_LONGEST_WAIT_SECONDS = 2.0


class EntryTooLargeError(PulsarError):
    """An entry is larger than the broker takes."""


class Begin(NamedTuple):
    """Where a producer is opened without waiting.

    Attributes:
        connection: to the broker that had the topic lately. If it has it no more, it refuses the producer.
        on_opened: called once, with the producer and None, or the error; in the connection's thread: it must not block.
    """

    connection: Connection
    on_opened: Callable[[EntryProducer, PulsarError | None], None]


class EntryProducer:
    """A producer of one topic partition. When it has lost its broker, it looks for it again, and sends again.

    All methods may be called in any thread.

    Args:
        find: returns a connection to the broker that has the topic; may wait.
        topic: the topic partition.
        name: the producer's name, by which the broker recognizes what is sent again; empty: the broker gives it one.
        schema: of its messages; None: they have none.
        on_progress: called in another thread when an entry was answered, or the producer was lost; must not block.
        begin: where to open it, without waiting; None: it waits until the broker that has the topic has opened it.

    Raises:
        PulsarError: the broker refuses, or does not answer; with `begin` only where the connection has ended.
    """

    def __init__(
        self,
        find: Callable[[], Connection],
        topic: str,
        name: str,
        schema: Schema | None = None,
        on_progress: Callable[[], None] = lambda: None,
        begin: Begin | None = None,
    ) -> None:
        self.topic = topic
        self.name = name.encode()
        self._is_named = bool(name)
        self.schema_version = b""  # of the topic's registry, to be given to the messages; empty: they have no schema
        self._find = find
        self._schema = schema
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._sending = Sending(self.name)
        self._link: _Link | None = None
        self._epoch = 0  # how often it has been opened
        self._is_closed = threading.Event()
        if begin is None:
            self._open()
        else:
            self._begin(begin)

    @property
    def is_open(self) -> bool:
        """Whether it has its broker now."""
        return self._sending.is_open

    @property
    def error(self) -> PulsarError | None:
        """Why the broker takes nothing more of it; None: it does, or will when it is there again."""
        return self._sending.error

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence id that has arrived, as far as the broker has said; -1: none."""
        return self._sending.last_sequence_id

    @property
    def repeated_to(self) -> int:
        """The highest sequence id of the last entry that the broker took for a repetition; -1: of none."""
        return self._sending.repeated_to

    @property
    def max_message_bytes(self) -> int:
        """The most bytes of an entry, as the broker has said."""
        return self._sending.max_bytes

    @property
    def is_in_chunks(self) -> bool:
        """Whether a message is being sent in chunks, of which some are not answered."""
        return self._sending.is_in_chunks

    @property
    def n_answers(self) -> int:
        """How many entries, and chunks of large messages, the broker has answered."""
        return self._sending.n_answers

    @property
    def n_pending(self) -> int:
        """The number of entries that are not answered."""
        return self._sending.n_pending

    @property
    def has_arrived(self) -> bool:
        """Whether all entries have arrived, or `take_refused` has returned them."""
        return self._sending.has_arrived

    def send(self, entry: Outgoing, is_more: bool = False) -> None:
        """Sends an entry, without waiting until it arrives. Its sequence ids are above those of the entries before.

        Args:
            entry: the entry, or a message that is sent in chunks where the broker does not take it as one entry.
            is_more: others follow, or `flush`: it may wait for them.

        Raises:
            EntryTooLargeError: the broker does not take an entry of this size.
        """
        link = self._link
        if link is not None:
            check_size(entry, link.connection.max_message_bytes)
        with self._lock:
            self._sending.send(entry)
            link = self._link
            is_written = link is None or self._write_ready(link, is_more)
        if not is_written and link is not None:
            self.lost(link)

    def _write_ready(self, link: _Link, is_more: bool = False) -> bool:
        """Writes the frames that may be sent now; returns whether the connection takes them. The caller locks."""
        try:
            while frame := self._sending.next_frame():
                link.connection.write(frame, is_more)
        except PulsarError:
            return False
        return True

    def flush(self) -> None:
        """Sends what waits for more."""
        if (link := self._link) is not None:
            link.connection.flush()

    def take_refused(self) -> list[RefusedEntry]:
        """Returns the entries that the broker did not take alone, and forgets them."""
        if not self._sending.refused:
            return []
        with self._lock:
            refused, self._sending.refused = self._sending.refused, []
        return refused

    def close(self) -> Callable[[float], None]:
        """Ends the producer, and forgets what was not answered; does not wait for the broker.

        Returns:
            a function that waits until the broker has ended it, so many seconds at most; it raises nothing.
        """
        with self._lock:
            self._is_closed.set()
            self._sending.lose()
            link, self._link = self._link, None
        return link.close() if link is not None else lambda seconds: None

    def received(self, link: _Link, frame: Frame) -> None:
        """Takes a frame from a connection."""
        command = frame.command
        is_to_open = False
        with self._lock:
            if link is not self._link:
                return
            if command.type == Command.SEND_RECEIPT:
                self._sending.receipt(command.send_receipt)
            elif command.type == Command.SEND_ERROR:
                is_to_open = self._sending.fail(command.send_error)
            if not is_to_open:
                self._write_ready(link)  # a chunk, or what had to wait for them; a lost connection says so itself
        if command.type == Command.CLOSE_PRODUCER:
            link.connection.detach(link.producer_id)
            self.lost(link)
        elif is_to_open:
            link.close()
            self.lost(link)
        self._on_progress()

    def lost(self, link: _Link) -> None:
        """Hears that the producer is not open any more on a connection; opens it again, unless it is closed."""
        with self._lock:
            if link is not self._link:
                return
            self._link = None
            self._sending.lose()
            is_over = self._is_closed.is_set() or self._sending.error is not None or not link.is_open
        if not is_over:
            threading.Thread(target=self._open_again, name=f"producer {self.topic}", daemon=True).start()
        self._on_progress()

    def _open_again(self) -> None:
        wait = _FIRST_WAIT_SECONDS
        while not self._is_closed.is_set():
            try:
                self._open()
                break
            except PulsarError as error:
                if is_refusal(error) or isinstance(error, ClosedError):
                    with self._lock:
                        self._sending.refuse(error)
                    break
                _log.debug("%s: %s", self.topic, error)
            except Exception:  # as if it were lost for good: whoever waits gives up in time
                _log.exception("%s", self.topic)
                break
            self._is_closed.wait(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
        self._on_progress()

    def _open(self) -> None:
        link = self._new_link(self._find())
        try:
            answer = link.connection.request(Command.PRODUCER, "producer", **self._fields(link))
        except PulsarError as error:
            if isinstance(error, NoAnswerError):
                link.close()  # the broker may still make it, and then nobody else could have the name
            self._forget(link)
            raise
        self._take_answer(link, answer)

    def _begin(self, begin: Begin) -> None:
        link = self._new_link(begin.connection)

        def take(answer: Future[ProducerAnswer]) -> None:
            try:
                self._take_answer(link, answer.result())
            except PulsarError as error:
                self._forget(link)
                begin.on_opened(self, error)
            else:
                begin.on_opened(self, None)

        try:
            link.connection.ask(Command.PRODUCER, "producer", **self._fields(link)).when_done(take)
        except PulsarError:
            self._forget(link)
            raise

    def _new_link(self, connection: Connection) -> _Link:
        """Makes the producer's link to a connection.

        Raises:
            ClosedError: the producer was closed while it looked for its broker.
        """
        link = _Link(self, connection)
        with self._lock:
            is_closed = self._is_closed.is_set()
            if not is_closed:
                self._link = link
        if is_closed:
            connection.detach(link.producer_id)
            raise ClosedError(f"the producer of {self.topic} is closed")
        return link

    def _forget(self, link: _Link) -> None:
        link.connection.detach(link.producer_id)
        with self._lock:
            if self._link is link:
                self._link = None

    def _take_answer(self, link: _Link, answer: ProducerAnswer) -> None:
        """Takes the broker's word that it has opened the producer on a connection.

        Raises:
            DisconnectedError: the broker has closed it meanwhile.
        """
        with self._lock:
            if self._link is link:
                link.is_open = True
                self._epoch += 1
                self.name = self.name or bytes(answer.producer_name)
                self.schema_version = bytes(answer.schema_version) if self._schema is not None else b""
                self._sending.producer = self.name
                self._sending.open(link.producer_id, answer.last_sequence_id, link.connection.max_message_bytes)
                self._write_ready(link)  # a lost connection says so itself
        if not link.is_open:
            link.close()
            if not self._is_closed.is_set():
                raise DisconnectedError(f"the broker has closed the producer of {self.topic}")

    def _fields(self, link: _Link) -> dict[str, Any]:
        fields: dict[str, Any] = {} if self._schema is None else {"schema": self._schema}
        if self.name:
            fields["producer_name"] = self.name.decode()
        return fields | {
            "topic": self.topic,
            "producer_id": link.producer_id,
            "epoch": self._epoch,
            "is_named_by_client": self._is_named,
        }


def check_size(entry: Outgoing, most: int) -> None:
    """Raises EntryTooLargeError if a broker that takes so many bytes does not take an entry, not even in chunks."""
    if isinstance(entry, LargeMessage):
        if not entry.can_be_sent(most):
            n_bytes = len(entry.metadata)
            raise EntryTooLargeError(f"keys and properties have {n_bytes} bytes; the broker takes entries of {most}")
    elif len(entry.data) > most:
        raise EntryTooLargeError(f"an entry of {len(entry.data)} bytes; the broker takes {most}")


class _Link:
    """A producer on one connection."""

    def __init__(self, producer: EntryProducer, connection: Connection) -> None:
        self._producer = producer
        self.connection = connection
        self.is_open = False  # the broker has made it
        self.producer_id = connection.attach(self)

    def received(self, frame: Frame) -> None:
        """Takes a frame from the connection."""
        self._producer.received(self, frame)

    def disconnected(self, error: PulsarError) -> None:
        """Hears that the connection has ended."""
        self._producer.lost(self)

    def close(self) -> Callable[[float], None]:
        """Ends the producer at the broker; returns a function that waits until it has, for some seconds at most."""
        self.connection.detach(self.producer_id)
        try:
            answer = self.connection.ask(Command.CLOSE_PRODUCER, "close_producer", producer_id=self.producer_id)
        except PulsarError:
            return lambda seconds: None

        def wait(seconds: float) -> None:
            with suppress(PulsarError):
                answer.wait(seconds)

        return wait
