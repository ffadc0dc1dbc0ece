"""A connection to a broker: a socket, and one thread that reads and writes it for all that is on it."""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDoneError
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple, Protocol

from broker.client import NoAnswerError, PulsarError
from broker.protocol.frames import Frame, ProtocolError
from broker.protocol.session import DisconnectedError, Session, answered
from broker.protocol.wire.pulsar_pb2 import Command

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 30.0  # as Pulsar's clients wait for an answer
_TICK_SECONDS = 5.0
_RECEIVE_BYTES = 256 << 10
_MESSAGE = Command.MESSAGE
_WRITE_BYTES = 1 << 20  # at once


class Address(NamedTuple):
    """Where a connection leads."""

    host: str
    port: int
    tls: bool
    proxied_broker: str | None = None  # the broker's URL, where the host is a proxy

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class OnConnection(Protocol):
    """What hears of a connection: a consumer or a producer."""

    def received(self, frame: Frame) -> None:
        """Takes a frame for it, in the connection's thread; it must not block."""

    def disconnected(self, error: PulsarError) -> None:
        """Hears that the connection has ended."""


class Connection:
    """A connection to a broker or a proxy. Its methods may be called in any thread.

    Args:
        address: where it leads.
        token: reads the token at each use; None: the broker wants none.
        tls: the trusted certificates; None: the connection is not encrypted.
        request_seconds: how long a request waits for its answer.

    Raises:
        NoAnswerError: the broker does not answer.
        PulsarError: it refuses the connection.
    """

    def __init__(
        self,
        address: Address,
        token: Callable[[], str] | None,
        tls: ssl.SSLContext | None,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        self.address = address
        self._request_seconds = request_seconds
        self.error: PulsarError | None = None  # why the connection has ended; None: it has not
        self._ids = count(1)
        self._attached: dict[int, OnConnection] = {}
        self._answers: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._session = Session(token, address.proxied_broker, time.monotonic())
        self._ready = threading.Event()
        self._closing = False
        self._unsent: deque[memoryview] = deque()
        self._is_full = False  # the socket takes nothing more now
        self._broken: OSError | None = None  # why nothing more can be written; the thread ends the connection
        self._thread: threading.Thread | None = None
        self._socket = _connected(address, tls)
        self._wake_up, self._woken = socket.socketpair()
        for end in (self._wake_up, self._woken):
            end.setblocking(False)
        self._thread = thread = threading.Thread(target=self._run, name=f"pulsar {address}", daemon=True)
        thread.start()
        if not self._ready.wait(_CONNECT_SECONDS):
            self._end(NoAnswerError(f"the broker at {address} does not answer"))
        if self.error is not None:
            raise self.error

    def attach(self, one: OnConnection) -> int:
        """Gives a consumer or a producer its id on this connection. From now on it gets its frames."""
        with self._lock:
            own_id = next(self._ids)
            self._attached[own_id] = one
            return own_id

    def detach(self, own_id: int) -> None:
        """Lets a consumer or a producer get no more frames."""
        with self._lock:
            self._attached.pop(own_id, None)

    def send(self, kind: Command.Type, **fields: Any) -> None:
        """Sends a command that has no answer.

        Raises:
            PulsarError: the connection has ended.
        """
        with self._lock:
            self._check()
            self._session.send(kind, **fields)
            self._flush()

    def write(self, frame: bytes, is_more: bool = False) -> None:
        """Sends a frame that is ready-made.

        Args:
            frame: the frame's bytes.
            is_more: others follow, or `flush`: it may wait for them.

        Raises:
            PulsarError: the connection has ended.
        """
        with self._lock:
            self._check()
            self._session.outgoing += frame
            if not is_more or len(self._session.outgoing) > _WRITE_BYTES:
                self._flush()

    def flush(self) -> None:
        """Sends what waits for more."""
        with self._lock:
            self._flush()

    def request(self, kind: Command.Type, name: str, **fields: Any) -> Any:
        """Sends a request, and waits for its answer.

        Args:
            kind: the command's type.
            name: of the command's field.
            fields: of the message in that field.

        Raises:
            NoAnswerError: the broker does not answer.
            RefusedError: it refuses the request.
            PulsarError: the connection has ended.
        """
        return self.ask(kind, name, **fields).wait(self._request_seconds)

    def ask(self, kind: Command.Type, name: str, **fields: Any) -> Answer:
        """Sends a request, and does not wait for its answer. Arguments are as of `request`.

        Raises:
            PulsarError: the connection has ended.
        """
        answer: Future[Any] = Future()
        with self._lock:
            self._check()
            request_id = self._session.request(kind, name, **fields)
            self._answers[request_id] = answer
            self._flush()
        return Answer(self, request_id, answer)

    def forget(self, request_id: int) -> None:
        """Waits for the answer to a request no more."""
        with self._lock:
            self._answers.pop(request_id, None)

    def close(self) -> None:
        """Closes the connection, and ends all that is on it."""
        self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join(_CONNECT_SECONDS)

    @property
    def max_message_bytes(self) -> int:
        """The largest message that the broker sends."""
        return self._session.max_message_bytes

    def _check(self) -> None:
        if self.error is not None:
            raise DisconnectedError(f"the connection to {self.address} has ended: {self.error}")

    def _wake(self) -> None:
        if threading.current_thread() is self._thread:
            return
        with suppress(OSError):  # the pipe is full: the thread wakes up anyway; or closed: it has ended
            self._wake_up.send(b"\0")

    def _run(self) -> None:
        try:
            self._serve()
        except PulsarError as error:
            self._end(error)
        except (OSError, ssl.SSLError) as error:
            self._end(DisconnectedError(f"the connection to {self.address} has ended: {error}"))
        except Exception as error:
            _log.exception("the connection to %s fails", self.address)
            self._end(ProtocolError(f"the connection to {self.address} fails: {error}"))
        finally:
            for end in (self._socket, self._wake_up, self._woken):
                with suppress(OSError):
                    end.close()

    def _serve(self) -> None:
        """Reads until the connection ends, and writes when the socket takes something again."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._socket, selectors.EVENT_READ)
            watched = selectors.EVENT_READ
            tick_at = time.monotonic() + _TICK_SECONDS
            while not self._closing:
                with self._lock:
                    self._is_full = False
                    self._flush()
                    if self._broken is not None:
                        raise self._broken
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._is_full else 0)
                    # Bytes that TLS has read and not handed over do not make the socket readable.
                    pending = isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0
                if events != watched:
                    selector.modify(self._socket, events)
                    watched = events
                ready = selector.select(0 if pending else max(tick_at - time.monotonic(), 0))
                for key, _ in ready:
                    if key.fileobj is self._woken:
                        with suppress(BlockingIOError):
                            self._woken.recv(4096)
                if pending or any(key.fileobj is self._socket for key, _ in ready):
                    self._read()
                if time.monotonic() >= tick_at:
                    tick_at = time.monotonic() + _TICK_SECONDS
                    with self._lock:
                        self._session.tick(time.monotonic())
        self._end(DisconnectedError(f"the connection to {self.address} is closed"))

    def _flush(self) -> None:
        """Writes what the socket takes; the thread writes the rest. The caller has the lock, also because of TLS."""
        if self._session.outgoing:
            self._unsent.append(memoryview(self._session.outgoing))
            self._session.outgoing = bytearray()
        while self._unsent and not self._is_full and self._broken is None:
            first = self._unsent[0]
            try:
                n = self._socket.send(first[:_WRITE_BYTES])
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._is_full = True
                self._wake()
            except ssl.SSLWantReadError:
                break  # the thread writes it when it has read
            except (OSError, ssl.SSLError) as error:
                self._broken = error
                self._wake()
            else:
                if n == len(first):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = first[n:]

    def _read(self) -> None:
        with self._lock:  # a TLS connection must not be used by two threads at once
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if not data:
                raise DisconnectedError(f"the broker at {self.address} has closed the connection")
            frames = list(self._session.receive(data, time.monotonic()))
            if self._session.is_connected:
                self._ready.set()
        for frame in frames:
            self._dispatch(frame)

    def _dispatch(self, frame: Frame) -> None:
        command = frame.command
        if command.type == _MESSAGE:
            consumer = self._attached.get(command.message.consumer_id)
            if consumer is not None:
                consumer.received(frame)
            return
        if (answer := answered(command)) is not None:
            request_id, value = answer
            with self._lock:
                waiting = self._answers.pop(request_id, None)
            if waiting is not None:
                waiting.set_exception(value) if isinstance(value, PulsarError) else waiting.set_result(value)
            return
        own_id = _addressee_of(command)
        with self._lock:
            one = self._attached.get(own_id) if own_id is not None else None
        if one is not None:
            one.received(frame)

    def _end(self, error: PulsarError) -> None:
        """Tells everybody that the connection has ended."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            attached, answers = list(self._attached.values()), list(self._answers.values())
            self._attached.clear()
            self._answers.clear()
        self._closing = True
        self._wake()
        for answer in answers:
            answer.set_exception(error)
        for one in attached:
            one.disconnected(error)
        self._ready.set()


class Answer:
    """The answer to a request, which may not be there yet."""

    def __init__(self, connection: Connection, request_id: int, answer: Future[Any]) -> None:
        self._connection = connection
        self._request_id = request_id
        self._answer = answer

    def when_done(self, take: Callable[[Future[Any]], None]) -> None:
        """Calls a function when the answer is there, or an error; in the connection's thread: it must not block."""
        self._answer.add_done_callback(take)

    def wait(self, seconds: float) -> Any:
        """Waits for the answer; raises as `Connection.request`."""
        try:
            return self._answer.result(seconds)
        except NotDoneError:
            raise NoAnswerError(f"the broker at {self._connection.address} does not answer a request") from None
        finally:
            self._connection.forget(self._request_id)


# The fields of commands that are for a consumer or a producer, and the field of its id.
_ADDRESSED = {
    Command.SEND_RECEIPT: ("send_receipt", "producer_id"),
    Command.SEND_ERROR: ("send_error", "producer_id"),
    Command.CLOSE_PRODUCER: ("close_producer", "producer_id"),
    Command.CLOSE_CONSUMER: ("close_consumer", "consumer_id"),
}


def _addressee_of(command: Command) -> int | None:
    """Returns the id of the consumer or producer that a command is for; None: it is for none."""
    names = _ADDRESSED.get(command.type)
    return None if names is None else int(getattr(getattr(command, names[0]), names[1]))


def _connected(address: Address, tls: ssl.SSLContext | None) -> socket.socket:
    """Opens a socket that does not block.

    Raises:
        NoAnswerError: the host does not answer.
        PulsarError: its certificate is not trusted.
    """
    try:
        opened = socket.create_connection((address.host, address.port), timeout=_CONNECT_SECONDS)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is not None:
            opened = tls.wrap_socket(opened, server_hostname=address.host)
    except ssl.SSLCertVerificationError as error:
        raise PulsarError(f"the certificate of {address} is not trusted: {error.verify_message}") from error
    except (OSError, ssl.SSLError) as error:
        raise NoAnswerError(f"no broker at {address}: {error}") from error
    opened.setblocking(False)
    return opened
