"""Finds the broker that has a topic, and keeps a connection to each broker."""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable

from broker.client import (
    NoAnswerError,
    PulsarError,
    host_and_port,
    is_encrypted,
    token_reader,
    trusted_certificates,
    urls_of_hosts,
)
from broker.position import Position
from broker.protocol.byte_budget import Share
from broker.protocol.connection import REQUEST_SECONDS, Address, Connection
from broker.protocol.consumer import EntryConsumer
from broker.protocol.producer import Begin, EntryProducer
from broker.protocol.session import ClosedError, DisconnectedError, RefusedError
from broker.protocol.wire.pulsar_pb2 import Command, LookupAnswer, Schema
from conf.partitions import partition_name
from conf.settings import PulsarSettings

_MAX_REDIRECTS = 20


class Brokers:
    """Connections to the brokers of one cluster, made when they are needed. May be used in any thread.

    Args:
        settings: the `pulsar` section.
        request_seconds: how long a request waits for its answer.

    Raises:
        PulsarError: the token file or the certificates can't be read.
    """

    def __init__(self, settings: PulsarSettings, request_seconds: float = REQUEST_SECONDS) -> None:
        self._request_seconds = request_seconds
        self._scheme = settings.service_url.partition("://")[0]
        self._services = [_address(url) for url in urls_of_hosts(settings.service_url)]
        self._token: Callable[[], str] | None = None
        if settings.token_file is not None:
            self._token = token_reader(settings.token_file)
        self._tls = trusted_certificates(settings) if is_encrypted(settings.service_url) else None
        self._connections: dict[Address, Connection] = {}
        self._locks: defaultdict[Address, threading.Lock] = defaultdict(threading.Lock)
        self._failures: dict[Address, tuple[float, PulsarError]] = {}  # when and why the last connection failed
        self._found: dict[str, Connection] = {}  # by topic partition the connection that was found last
        self._is_closed = False
        self._lock = threading.Lock()

    def subscribe(
        self, topic: str, subscription: str, *, max_bytes: int, max_messages: int, share: Share | None = None
    ) -> EntryConsumer:
        """Opens a consumer; see `EntryConsumer`.

        Raises:
            PulsarError: no broker answers, or it refuses.
        """
        connection = self._connection_for(topic)
        return EntryConsumer(
            connection, topic, subscription, max_bytes=max_bytes, max_messages=max_messages, share=share
        )

    def read(self, topic: str, start: Position, *, max_bytes: int, max_messages: int) -> EntryConsumer:
        """Opens a consumer whose subscription is not durable; see `EntryConsumer`.

        Args:
            topic: the topic partition.
            start: it begins with this entry, or after it.
            max_bytes, max_messages: as of `EntryConsumer`.

        Raises:
            PulsarError: no broker answers, or it refuses.
        """
        name = f"delaylake-reader-{uuid.uuid4().hex}"
        connection = self._connection_for(topic)
        return EntryConsumer(connection, topic, name, max_bytes=max_bytes, max_messages=max_messages, start=start)

    def produce(
        self,
        topic: str,
        name: str = "",
        schema: Schema | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> EntryProducer:
        """Opens a producer; see `EntryProducer`.

        Raises:
            PulsarError: no broker answers, or it refuses.
        """
        return EntryProducer(lambda: self._connection_for(topic), topic, name, schema, on_progress)

    def begin_producing(
        self,
        topic: str,
        name: str,
        on_progress: Callable[[], None],
        on_opened: Callable[[EntryProducer, PulsarError | None], None],
    ) -> EntryProducer | None:
        """Begins to open a producer without waiting, where the broker of the topic has been asked for before.

        Args:
            topic, name, on_progress: as of `EntryProducer`.
            on_opened: as of `Begin`.

        Returns:
            the producer; None: the broker is not known, and `on_opened` is not called.
        """
        connection = self._known_connection(topic)
        if connection is None:
            return None
        try:
            return EntryProducer(
                lambda: self._connection_for(topic), topic, name, None, on_progress, Begin(connection, on_opened)
            )
        except PulsarError:
            return None

    def partitions(self, topic: str) -> int:
        """Returns the number of a topic's partitions; 0: it is not partitioned.

        Raises:
            PulsarError: no broker answers, or it refuses.
        """
        return int(self._service().request(Command.PARTITIONS, "partitions", topic=topic).n)

    def partition_names(self, topic: str) -> list[str]:
        """Returns the names of a topic's partitions, or its own: it is not partitioned.

        Raises:
            PulsarError: no broker answers, or it refuses.
        """
        n = self.partitions(topic)
        return [partition_name(topic, i) for i in range(n)] if n else [topic]

    def close(self) -> None:
        """Closes all connections."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            connection.close()

    def _connection_for(self, topic: str) -> Connection:
        """Asks which broker has a topic; returns a connection to it."""
        connection, authoritative = self._service(), False
        for _ in range(_MAX_REDIRECTS):
            answer = connection.request(Command.LOOKUP, "lookup", topic=topic, authoritative=authoritative)
            if answer.kind == LookupAnswer.FAILED:
                raise RefusedError(answer.error, answer.message)
            url = answer.broker_url_tls if self._tls is not None else answer.broker_url
            if not url:
                raise PulsarError(f"the broker of {topic} has no address for {self._scheme}://")
            if answer.through_service_url:
                connection = self._to(self._service().address._replace(proxied_broker=url.partition("://")[2]))
            else:
                connection = self._to(_address(url))
            if answer.kind == LookupAnswer.CONNECT:
                self._found[topic] = connection
                return connection
            authoritative = answer.authoritative
        raise PulsarError(f"looking for the broker of {topic} does not end: {_MAX_REDIRECTS} redirections")

    def _known_connection(self, topic: str) -> Connection | None:
        connection = self._found.get(topic)
        return connection if connection is not None and connection.error is None else None

    def _service(self) -> Connection:
        """Returns a connection to the first host of the service URL that answers."""
        failure: PulsarError = NoAnswerError("the service URL names no host")
        for address in list(self._services):
            try:
                return self._to(address)
            except (NoAnswerError, DisconnectedError) as error:
                failure = error
                with self._lock:  # the others are asked first from now on
                    self._services = [*(a for a in self._services if a != address), address]
        raise failure

    def _to(self, address: Address) -> Connection:
        asked_at = time.monotonic()
        with self._lock:
            if self._is_closed:
                raise ClosedError("the connections are closed")
            lock = self._locks[address]
        with lock:  # a broker that does not answer keeps nobody from the others
            connection = self._connections.get(address)
            if connection is not None and connection.error is None:
                return connection
            failed_at, failure = self._failures.get(address, (0.0, None))
            if failure is not None and failed_at > asked_at:
                raise failure  # somebody else has tried meanwhile
            try:
                connection = Connection(address, self._token, self._tls, self._request_seconds)
            except PulsarError as error:
                self._failures[address] = time.monotonic(), error
                raise
            with self._lock:  # the next one who has the lock above finds this connection
                if not self._is_closed:
                    self._connections[address] = connection
                    return connection
        connection.close()
        raise ClosedError("the connections are closed")


def _address(url: str) -> Address:
    return Address(*host_and_port(url), tls=is_encrypted(url))
