"""Sends control commands from an event loop: many callers wait for outcomes, which one thread reads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from delaylake.control import ControlRequest, Window
from delaylake.message_ids import Outcome
from delaylake.wire.delaylake_pb2 import ControlOutcome

from admin.control.outcome_source import OutcomeSource
from admin.control.requests import ControlError
from conf.settings import Settings

if TYPE_CHECKING:
    import pulsar

_log = logging.getLogger(__name__)

_OPERATION_SECONDS = 3
_RETRY_SECONDS = 0.5
_POLL_MILLIS = 300

_MAX_PENDING = 100_000  # commands that the broker has not taken yet; beyond that they are refused
_MESSAGES_AHEAD = 20_000  # of one caller: several have room, also with commands of one message each

# How long a call waits for the first connection to be tried: who starts the API, and calls it, is no sooner than that.
_FIRST_CONNECTION_SECONDS = 3.0
_LOOK_SECONDS = 0.02

# How long a lost connection may last before a new client is made: the client's own reconnecting may wait a minute.
_GIVE_UP_SECONDS = 5.0


# The outcomes of a caller's requests, or why there are none.
_Coming = asyncio.Queue["ControlOutcome | ControlUnavailableError"]


class ControlUnavailableError(ControlError):
    """The broker can't be reached now. Commands sent before may be done."""


class NoOutcomeError(ControlError):
    """The job has not answered in time. The command may still be done."""


class AsyncControlClient:
    """Publishes commands to the control topic and hands their outcomes to callers. An asynchronous context manager.

    A thread has one Pulsar client, reconnects it if necessary, and reads the outcome topic. The start never waits for
    the broker.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # The callers by request id: a repeated request waits beside the first.
        self._waiting: defaultdict[str, list[_Coming | asyncio.Queue[ControlOutcome]]] = defaultdict(list)
        self._client: pulsar.Client | None = None
        self._reader: pulsar.Reader | None = None
        self._producer: pulsar.Producer | None = None
        self._source = OutcomeSource(settings.warehouse)
        self._trouble = "not connected yet"
        self._has_tried = False  # to connect, with success or without
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped.set()
        if self._client is not None and not self.is_connected:
            # This ends the thread's waiting for a broker that does not answer.
            with contextlib.suppress(Exception):
                await asyncio.to_thread(self._client.close)
        await asyncio.to_thread(self._thread.join, 2 * _OPERATION_SECONDS)

    @property
    def is_connected(self) -> bool:
        """Whether commands can be sent and outcomes read."""
        reader, producer = self._reader, self._producer
        return reader is not None and producer is not None and reader.is_connected() and producer.is_connected()

    def partitions(self, topic: str) -> list[str] | None:
        """Asks the broker for the full names of a topic's partitions; blocks for some ms.

        Returns:
            the topic's own name, if it is not partitioned; None: the broker does not answer.
        """
        import pulsar

        client = self._client
        try:
            return list(client.get_topic_partitions(topic)) if client is not None and self.is_connected else None
        except pulsar.PulsarException:
            return None

    async def send(self, requests: Iterable[ControlRequest], timeout_seconds: float) -> list[Outcome]:
        """Publishes requests and returns their outcomes once all have come.

        Args:
            timeout_seconds: time for all of them together.

        Raises:
            ControlUnavailableError: the broker can't be reached.
            NoOutcomeError: not all requests were answered in time.
        """
        deadline = self._loop.time() + timeout_seconds
        return [outcome async for outcome in self._exchange(requests, timeout_seconds, deadline)]

    def send_ahead(self, requests: Iterable[ControlRequest], timeout_seconds: float) -> AsyncIterator[Outcome]:
        """Publishes many requests, several ahead of their outcomes, and yields the outcomes as they come.

        Args:
            timeout_seconds: maximum time from one outcome to the next.

        Raises:
            ControlUnavailableError: the broker can't be reached.
            NoOutcomeError: no outcome came in time.
        """
        return self._exchange(requests, timeout_seconds)

    async def connected(self) -> None:
        """Waits for the first connection, if that is still tried.

        Raises:
            ControlUnavailableError: there is no connection.
        """
        await self._first_connection()
        if not self.is_connected:
            raise ControlUnavailableError(f"no connection to the broker: {self._trouble}")

    @property
    def client(self) -> pulsar.Client | None:
        """Pulsar's client; after a lost connection another one. None: there is none now."""
        return self._client

    def make_producer(self, topic: str, options: dict[str, Any]) -> pulsar.Producer:
        """Makes a producer; blocks. It is closed with the client.

        Raises:
            ControlUnavailableError: there is no connection.
            pulsar.PulsarException: the broker gives none.
        """
        client = self._client
        if client is None:
            raise ControlUnavailableError(f"no connection to the broker: {self._trouble}")
        return client.create_producer(topic, **options)

    @contextlib.contextmanager
    def hearing(self, request_id: str) -> Iterator[asyncio.Queue[ControlOutcome]]:
        """Gives a queue to which the outcomes under a request id come as long as the context lasts."""
        heard: asyncio.Queue[ControlOutcome] = asyncio.Queue()
        self._waiting[request_id].append(heard)
        try:
            yield heard
        finally:
            self._forget(request_id, heard)

    async def _exchange(
        self, requests: Iterable[ControlRequest], timeout_seconds: float, deadline: float | None = None
    ) -> AsyncIterator[Outcome]:
        import pulsar

        await self._first_connection()
        window = Window(requests, _MESSAGES_AHEAD, timeout_seconds, deadline)
        coming: _Coming = asyncio.Queue()
        try:
            while True:
                for request in window.to_send(self._loop.time):
                    self._publish(request, coming)
                    await asyncio.sleep(0)  # lets others run: to make a command of a thousand messages takes some ms
                if not window.waiting:
                    return
                try:
                    async with asyncio.timeout_at(window.wait_until()):
                        published = await coming.get()
                except TimeoutError:
                    if window.is_late(self._loop.time()):
                        raise NoOutcomeError(window.no_answer()) from None
                    continue
                if isinstance(published, ControlUnavailableError):
                    raise published
                outcomes = window.take(published)
                if published.request_id not in window.waiting:
                    self._forget(published.request_id, coming)
                for outcome in outcomes:
                    yield outcome
        except pulsar.PulsarException as error:
            raise ControlUnavailableError(f"the broker did not take the command: {error}") from error
        finally:
            for request_id in window.waiting:
                self._forget(request_id, coming)

    def _publish(self, request: ControlRequest, coming: _Coming) -> None:
        """Publishes a request, and has its outcomes go to `coming`.

        Raises:
            ControlUnavailableError: the broker can't be reached; a repeated request is left out then.
        """
        producer = self._producer
        is_repeated = coming in self._waiting.get(request.request_id, ())
        if producer is None or not (is_repeated or self.is_connected):
            if is_repeated:
                return
            raise ControlUnavailableError(f"no connection to the broker: {self._trouble}")
        if not is_repeated:
            self._waiting[request.request_id].append(coming)
        producer.send_async(request.command.SerializeToString(), partial(self._sent, coming))

    async def _first_connection(self) -> None:
        """Waits until the client has connected, or has failed to for the first time."""
        until = self._started_at + _FIRST_CONNECTION_SECONDS
        while not self._has_tried and self._loop.time() < until:
            await asyncio.sleep(_LOOK_SECONDS)

    def _sent(self, coming: _Coming, result: Any, _: object) -> None:
        """Takes the result of a send; called in the Pulsar client's thread, where an exception hangs the process."""
        with contextlib.suppress(Exception):
            if result.name != "Ok":
                failure = ControlUnavailableError(f"the broker did not take the command: {result.name}")
                self._loop.call_soon_threadsafe(coming.put_nowait, failure)

    def _take(self, data: bytes) -> None:
        published = ControlOutcome.FromString(data)
        for coming in self._waiting.get(published.request_id, ()):
            coming.put_nowait(published)

    def _forget(self, request_id: str, coming: _Coming | asyncio.Queue[ControlOutcome]) -> None:
        others = self._waiting.get(request_id, [])
        if coming in others:
            others.remove(coming)
        if not others:
            self._waiting.pop(request_id, None)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._read_outcomes()
            except Exception as error:
                if self._stopped.is_set():
                    return
                trouble = str(error) or type(error).__name__
                if trouble != self._trouble:
                    _log.warning("no connection to Pulsar at %s: %s", self._settings.pulsar.service_url, trouble)
                self._trouble = trouble
                self._has_tried = True
                self._stopped.wait(_RETRY_SECONDS)

    def _read_outcomes(self) -> None:
        import pulsar

        from broker.client import FIRST_SEQUENCE_ID, connect

        self._client = client = connect(self._settings.pulsar, operation_timeout_seconds=_OPERATION_SECONDS)
        try:
            if self._stopped.is_set():
                return
            # The reader before the producer, so that no outcome is missed.
            reader = client.create_reader(self._settings.control.outcome_topic, pulsar.MessageId.latest)
            self._producer = client.create_producer(
                self._settings.control.topic, max_pending_messages=_MAX_PENDING, initial_sequence_id=FIRST_SEQUENCE_ID
            )
            self._reader = reader
            self._has_tried = True
            connected_at = time.monotonic()
            while not self._stopped.is_set():
                with contextlib.suppress(pulsar.Timeout):
                    message = reader.read_next(_POLL_MILLIS)
                    if message.partition_key() in self._waiting and self._source.is_of_job(message):
                        self._loop.call_soon_threadsafe(self._take, message.data())
                if self.is_connected:
                    connected_at = time.monotonic()
                elif time.monotonic() - connected_at > _GIVE_UP_SECONDS:
                    raise ControlUnavailableError("the broker is away")
        finally:
            self._client = self._reader = self._producer = None
            client.close()
