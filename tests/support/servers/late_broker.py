"""A broker that answers late what is sent to one topic: proxies before a real one, which others do not notice."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from broker.protocol.frames import encode
from broker.protocol.wire.pulsar_pb2 import Command

_SIZES = struct.Struct(">II")


class LateBroker:
    """Two proxies: clients look topics up at one, which sends those who ask for the late topic to the other.

    Args:
        service_url: of the broker.
        topic: whose receipts come late.

    Attributes:
        seconds: how late receipts are.
    """

    def __init__(self, service_url: str, topic: str) -> None:
        address = urlsplit(service_url)
        self._broker = address.hostname or "", address.port or 0
        self._topic = topic
        self.seconds = 0.0
        self._sockets: list[socket.socket] = []
        self.n_late = 0  # receipts
        self._late_url = self._serve(self._of_late_client)
        self.service_url = self._serve(self._of_client)

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _serve(self, handle: Callable[[socket.socket, socket.socket], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        self._sockets.append(listener)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    broker = socket.create_connection(self._broker)
                    self._sockets += [client, broker]
                    handle(client, broker)

        _start(accept)
        return f"pulsar://127.0.0.1:{listener.getsockname()[1]}"

    def _of_client(self, client: socket.socket, broker: socket.socket) -> None:
        asked: set[int] = set()

        def ask() -> None:
            for frame, command in _frames(client):
                if command.type == Command.LOOKUP and command.lookup.topic == self._topic:
                    asked.add(command.lookup.request_id)
                broker.sendall(frame)

        def answer() -> None:
            for frame, command in _frames(broker):
                found = command.lookup_answer
                if command.type == Command.LOOKUP_ANSWER and found.request_id in asked:
                    found.broker_url, found.through_service_url = self._late_url, False
                    client.sendall(encode(Command.LOOKUP_ANSWER, lookup_answer=found))
                else:
                    client.sendall(frame)

        _start(ask, client, broker)
        _start(answer, client, broker)

    def _of_late_client(self, client: socket.socket, broker: socket.socket) -> None:
        waiting: deque[tuple[float, bytes]] = deque()
        came = threading.Condition()

        def ask() -> None:
            while data := client.recv(1 << 16):
                broker.sendall(data)

        def take() -> None:
            for frame, command in _frames(broker):
                is_late = command.type == Command.SEND_RECEIPT
                self.n_late += is_late
                with came:
                    waiting.append((time.monotonic() + self.seconds * is_late, frame))
                    came.notify()

        def answer() -> None:
            while True:
                with came:
                    came.wait_for(lambda: waiting)
                    at, frame = waiting.popleft()
                time.sleep(max(0.0, at - time.monotonic()) if self.seconds else 0)
                client.sendall(frame)

        for work in (ask, take, answer):
            _start(work, client, broker)


def _start(work: Callable[[], None], *sockets: socket.socket) -> None:
    """Runs work in a thread; sockets are closed when it ends."""

    def run() -> None:
        with suppress(OSError):
            work()
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=run, daemon=True).start()


def _frames(source: socket.socket) -> Iterator[tuple[bytes, Command]]:
    """Yields the frames that come, with their commands."""
    with source.makefile("rb") as reader:
        while len(sizes := reader.read(_SIZES.size)) == _SIZES.size:
            size, command_size = _SIZES.unpack(sizes)
            rest = reader.read(size - 4)
            if len(rest) < size - 4:
                return
            yield sizes + rest, Command.FromString(rest[:command_size])
