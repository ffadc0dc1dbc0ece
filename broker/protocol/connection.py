"""A connection to a broker: a socket, and one thread that reads and writes it for all consumers on it."""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import threading
import time
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
_REQUEST_SECONDS = 30.0  # as Pulsar's clients wait for an answer
_TICK_SECONDS = 5.0
_RECEIVE_BYTES = 256 << 10
_MESSAGE = Command.MESSAGE


class Address(NamedTuple):
    """Where a connection leads."""

    host: str
    port: int
    tls: bool
    proxied_broker: str | None = None  # the broker's URL, where the host is a proxy

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class OnConnection(Protocol):
    """What hears of a connection: a consumer."""

    def received(self, frame: Frame) -> None:
        """Takes a frame for this consumer, in the connection's thread; it must not block."""

    def disconnected(self, error: PulsarError) -> None:
        """Hears that the connection has ended."""


class Connection:
    """A connection to a broker or a proxy. Its methods may be called in any thread.

    Args:
        address: where it leads.
        token: reads the token at each use; None: the broker wants none.
        tls: the trusted certificates; None: the connection is not encrypted.

    Raises:
        NoAnswerError: the broker does not answer.
        PulsarError: it refuses the connection.
    """

    def __init__(self, address: Address, token: Callable[[], str] | None, tls: ssl.SSLContext | None) -> None:
        self.address = address
        self.error: PulsarError | None = None  # why the connection has ended; None: it has not
        self._ids = count(1)
        self._consumers: dict[int, OnConnection] = {}
        self._answers: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._session = Session(token, address.proxied_broker, time.monotonic())
        self._ready = threading.Event()
        self._closing = False
        self._socket = _connected(address, tls)
        self._wake_up, self._woken = socket.socketpair()
        for end in (self._wake_up, self._woken):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"pulsar {address}", daemon=True)
        self._thread.start()
        if not self._ready.wait(_CONNECT_SECONDS):
            self._end(NoAnswerError(f"the broker at {address} does not answer"))
        if self.error is not None:
            raise self.error

    def attach(self, consumer: OnConnection) -> int:
        """Gives a consumer its id on this connection. From now on it gets its frames."""
        with self._lock:
            consumer_id = next(self._ids)
            self._consumers[consumer_id] = consumer
            return consumer_id

    def detach(self, consumer_id: int) -> None:
        """Lets a consumer get no more frames."""
        with self._lock:
            self._consumers.pop(consumer_id, None)

    def send(self, kind: Command.Type, **fields: Any) -> None:
        """Sends a command that has no answer.

        Raises:
            PulsarError: the connection has ended.
        """
        with self._lock:
            self._check()
            self._session.send(kind, **fields)
        self._wake()

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
        answer: Future[Any] = Future()
        with self._lock:
            self._check()
            request_id = self._session.request(kind, name, **fields)
            self._answers[request_id] = answer
        self._wake()
        try:
            return answer.result(_REQUEST_SECONDS)
        except NotDoneError:
            raise NoAnswerError(f"the broker at {self.address} does not answer a request") from None
        finally:
            with self._lock:
                self._answers.pop(request_id, None)

    def close(self) -> None:
        """Closes the connection, and ends all that is on it."""
        self._closing = True
        self._wake()
        self._thread.join(_CONNECT_SECONDS)

    @property
    def max_message_bytes(self) -> int:
        """The largest message that the broker sends."""
        return self._session.max_message_bytes

    def _check(self) -> None:
        if self.error is not None:
            raise DisconnectedError(f"the connection to {self.address} has ended: {self.error}")

    def _wake(self) -> None:
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
        """Reads and writes until the connection ends. A TLS connection must not be used by two threads at once."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._socket, selectors.EVENT_READ)
            unsent = b""
            tick_at = time.monotonic() + _TICK_SECONDS
            while not self._closing:
                with self._lock:
                    unsent += self._session.outgoing
                    self._session.outgoing.clear()
                unsent, is_full = self._write(unsent)
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_full else 0)
                selector.modify(self._socket, events)
                # Bytes that TLS has read and not handed over do not make the socket readable.
                pending = isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0
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

    def _write(self, data: bytes) -> tuple[bytes, bool]:
        """Writes what the socket takes; returns (what is left, whether the socket has to become writable first)."""
        while data:
            try:
                data = data[self._socket.send(data) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                return data, True
            except ssl.SSLWantReadError:
                return data, False
        return data, False

    def _read(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        if not data:
            raise DisconnectedError(f"the broker at {self.address} has closed the connection")
        with self._lock:
            frames = list(self._session.receive(data, time.monotonic()))
            if self._session.is_connected:
                self._ready.set()
        for frame in frames:
            self._dispatch(frame)

    def _dispatch(self, frame: Frame) -> None:
        command = frame.command
        if command.type == _MESSAGE:
            consumer = self._consumers.get(command.message.consumer_id)
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
        consumer_id = _consumer_of(command)
        with self._lock:
            consumer = self._consumers.get(consumer_id) if consumer_id is not None else None
        if consumer is not None:
            consumer.received(frame)

    def _end(self, error: PulsarError) -> None:
        """Tells everybody that the connection has ended."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            consumers, answers = list(self._consumers.values()), list(self._answers.values())
            self._consumers.clear()
            self._answers.clear()
        self._closing = True
        self._wake()
        for answer in answers:
            answer.set_exception(error)
        for consumer in consumers:
            consumer.disconnected(error)
        self._ready.set()


def _consumer_of(command: Command) -> int | None:
    """Returns the id of the consumer that a command is for; None: it is for none."""
    if command.type == Command.CLOSE_CONSUMER:
        return int(command.close_consumer.consumer_id)
    return None


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
