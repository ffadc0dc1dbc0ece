"""Topics are found over redirections and proxies, and what a broker does wrong is one clear error."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import cast

import pytest

from broker.client import NoAnswerError, PulsarError
from broker.position import Position
from broker.protocol import consumer
from broker.protocol.brokers import Brokers
from broker.protocol.frames import FrameDecoder, encode
from broker.protocol.session import DisconnectedError, RefusedError
from broker.protocol.wire.pulsar_pb2 import Ack, Command, LookupAnswer, MessageMetadata
from conf.settings import PulsarSettings
from tests.support.service.harness import wait_until

TOPIC = "persistent://public/default/t"


class Server:
    """A broker or proxy that answers lookups as told, and everything else as a broker does."""

    def __init__(self) -> None:
        self.lookup: Callable[[Command], dict[str, object]] = lambda asked: {
            "kind": LookupAnswer.CONNECT,
            "broker_url": self.url,
        }
        self.asked: list[Command] = []
        self.refuses = False
        self.is_silent = False  # does not answer who subscribes
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"pulsar://{self.address}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for opened in self.connections:
            opened.close()

    def of(self, kind: Command.Type) -> list[Command]:
        return [command for command in self.asked if command.type == kind]

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        decoder = FrameDecoder()
        with suppress(OSError):
            while data := connection.recv(65_536):
                for frame in decoder.feed(data):
                    self.asked.append(frame.command)
                    connection.sendall(self._answer(frame.command))

    def _answer(self, command: Command) -> bytes:
        if command.type == Command.CONNECT:
            return encode(Command.CONNECTED, connected={"max_message_size": 5 << 20})
        if command.type == Command.LOOKUP:
            answer = {"request_id": command.lookup.request_id, **self.lookup(command)}
            return encode(Command.LOOKUP_ANSWER, lookup_answer=answer)
        if command.type == Command.SUBSCRIBE:
            request_id = command.subscribe.request_id
            if self.is_silent:
                return b""
            if self.refuses:
                return encode(Command.ERROR, error={"request_id": request_id, "error": 5, "message": b"busy"})
            return encode(Command.SUCCESS, success={"request_id": request_id})
        if command.type == Command.GET_LAST_MESSAGE_ID:
            last = {"ledger_id": 2**64 - 1, "entry_id": 2**64 - 1}
            answer = {"request_id": command.get_last_message_id.request_id, "id": last}
            return encode(Command.LAST_MESSAGE_ID, last_message_id=answer)
        if command.type == Command.ACK:
            ids = {"consumer_id": command.ack.consumer_id, "request_id": command.ack.request_id}
            error = {"error": 1, "message": b"no such cursor"} if self.refuses else {}
            return encode(Command.ACK_ANSWER, ack_answer={**ids, **error})
        if command.type == Command.CLOSE_CONSUMER:
            return encode(Command.SUCCESS, success={"request_id": command.close_consumer.request_id})
        return b""


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    made = Server(), Server()
    yield made
    for server in made:
        server.close()


@pytest.fixture
def brokers(servers: tuple[Server, Server]) -> Iterator[Brokers]:
    made = Brokers(PulsarSettings(service_url=servers[0].url))
    yield made
    made.close()


def test_a_topic_is_looked_up_where_the_broker_sends_the_client(
    servers: tuple[Server, Server], brokers: Brokers
) -> None:
    first, second = servers
    first.lookup = lambda asked: {"kind": LookupAnswer.REDIRECT, "broker_url": second.url, "authoritative": True}
    opened = brokers.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)
    assert [command.lookup.authoritative for command in second.of(Command.LOOKUP)] == [True]
    assert [command.subscribe.topic for command in second.of(Command.SUBSCRIBE)] == [TOPIC]
    assert first.of(Command.SUBSCRIBE) == []
    assert opened.last_entry() == Position(-1, -1)
    opened.close()
    assert second.of(Command.CLOSE_CONSUMER)


def test_through_a_proxy_the_connection_says_which_broker_is_meant(
    servers: tuple[Server, Server], brokers: Brokers
) -> None:
    proxy, _ = servers
    proxy.lookup = lambda asked: {
        "kind": LookupAnswer.CONNECT,
        "broker_url": "pulsar://broker-7:6650",
        "through_service_url": True,
    }
    brokers.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)
    connects = [command.connect.proxy_to_broker_url for command in proxy.of(Command.CONNECT)]
    assert connects == ["", "broker-7:6650"]


def test_redirections_without_end_are_given_up(servers: tuple[Server, Server], brokers: Brokers) -> None:
    first, _ = servers
    first.lookup = lambda asked: {"kind": LookupAnswer.REDIRECT, "broker_url": first.url}
    with pytest.raises(PulsarError, match="does not end: 20 redirections"):
        brokers.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)


def test_a_refusal_is_pulsars_and_the_connection_goes_on(servers: tuple[Server, Server], brokers: Brokers) -> None:
    first, _ = servers
    first.lookup = lambda asked: {"kind": LookupAnswer.FAILED, "error": 4, "message": b"no rights"}
    with pytest.raises(RefusedError, match="AuthorizationError: no rights"):
        brokers.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)
    first.lookup = lambda asked: {"kind": LookupAnswer.CONNECT, "broker_url": first.url}
    first.refuses = True
    with pytest.raises(RefusedError, match="ConsumerBusy: busy"):
        brokers.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)
    first.refuses = False
    brokers.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10).close()
    assert len(first.connections) == 1


def test_a_lost_connection_ends_its_consumers_and_the_next_one_is_new(
    servers: tuple[Server, Server], brokers: Brokers
) -> None:
    first, _ = servers
    lost = brokers.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)
    first.connections[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(DisconnectedError, match="a frame of 1213486160 bytes"):
        lost.receive(20)
    with pytest.raises(DisconnectedError):
        lost.last_entry()
    again = brokers.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)
    assert again.is_connected
    assert len(first.connections) == 2


def test_a_consumer_for_which_the_broker_does_not_answer_in_time_is_closed(
    servers: tuple[Server, Server], brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the broker may subscribe it later, and the next one could not have the subscription."""
    first, _ = servers
    monkeypatch.setattr(brokers, "_request_seconds", 0.05)
    first.is_silent = True
    with pytest.raises(NoAnswerError):
        brokers.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)
    wait_until(lambda: first.of(Command.CLOSE_CONSUMER), 5, "the consumer is closed")


def test_single_entries_and_messages_of_a_batch_are_acknowledged(
    servers: tuple[Server, Server], brokers: Brokers
) -> None:
    first, _ = servers
    opened = brokers.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)
    opened.acknowledge_each([(Position(7, 1), ()), (Position(7, 3), (-(2**63), 5))])
    [asked] = first.of(Command.ACK)
    assert asked.ack.type == Ack.INDIVIDUAL
    found = [(one.ledger_id, one.entry_id, list(one.ack_set)) for one in asked.ack.ids]
    assert found == [(7, 1, []), (7, 3, [-(2**63), 5])]
    first.refuses = True
    with pytest.raises(RefusedError, match="no such cursor"):
        opened.acknowledge_each([(Position(7, 1), ())])


def test_a_consumer_that_gets_far_more_than_it_asked_for_ends(
    servers: tuple[Server, Server], brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = servers
    monkeypatch.setattr(consumer, "_MOST_WAITING_BYTES", 100_000)
    opened = brokers.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)
    metadata = MessageMetadata(n_messages=-(2**31)).SerializeToString()
    entry = struct.pack(">I", len(metadata)) + metadata + b"x" * 30_000
    command = Command(type=Command.MESSAGE, message={"consumer_id": 1, "id": {"ledger_id": 1, "entry_id": 1}})
    body = command.SerializeToString()
    frame = struct.pack(">II", 4 + len(body) + len(entry), len(body)) + body + entry
    first.connections[0].sendall(5 * frame)
    wait_until(lambda: first.of(Command.CLOSE_CONSUMER), 5, "the consumer is closed")
    assert not opened.is_connected


class LockThatIsFollowed:
    """A lock whose first holder, when it has released it, waits until a second one has, too."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting = 0
        self._releases = threading.Barrier(2)

    def __enter__(self) -> None:
        self.waiting += 1
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        self._releases.wait(20)


def test_two_threads_make_one_connection_to_a_broker(servers: tuple[Server, Server], brokers: Brokers) -> None:
    """The second one comes where the first has made its connection, and done nothing else yet."""
    first, _ = servers
    lock = LockThatIsFollowed()
    [address] = brokers._services
    brokers._locks[address] = cast(threading.Lock, lock)

    with lock.lock:  # until both want a connection
        threads = [threading.Thread(target=brokers._service) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: lock.waiting == 2, 5, "both threads")
    for thread in threads:
        thread.join(20)
    assert len(first.connections) == 1


def test_no_connection_is_made_after_the_end(servers: tuple[Server, Server], brokers: Brokers) -> None:
    brokers.close()
    with pytest.raises(DisconnectedError, match="the connections are closed"):
        brokers.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)


def test_the_first_host_that_answers_is_taken(servers: tuple[Server, Server]) -> None:
    host = servers[0].address
    made = Brokers(PulsarSettings(service_url=f"pulsar://127.0.0.1:1,{host}"))
    made.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)
    made.close()
    wait_until(lambda: servers[0].of(Command.SUBSCRIBE), 5, "the consumer")
    nobody = Brokers(PulsarSettings(service_url="pulsar://127.0.0.1:1"))
    with pytest.raises(NoAnswerError, match=r"no broker at 127\.0\.0\.1:1"):
        nobody.subscribe(TOPIC, "s", max_bytes=1_000, max_messages=10)
