"""Sends control commands from an event loop: many wait for their outcomes, one thread reads them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from admin.control_requests import ControlError, ControlRequest, Outcome
from conf.settings import Settings
from proto.delaylake_pb2 import ControlOutcome

if TYPE_CHECKING:
    import pulsar

_log = logging.getLogger(__name__)

_OPERATION_SECONDS = 3
_RETRY_SECONDS = 0.5
_POLL_MILLIS = 300

# The client's own reconnecting may wait a minute before it tries again.
_GIVE_UP_SECONDS = 5.0


class ControlUnavailable(ControlError):
    """The broker can't be reached now, so that nothing was sent."""


class NoAnswer(ControlError):
    """The job has not answered in time. It may still do what it was asked."""


class AsyncControlClient:
    """Publishes commands to the control topic and hands their outcomes to who waits. An asynchronous context manager.

    One Pulsar client, made in a thread of its own, which connects, connects again where the broker was away, and reads
    the outcome topic. Starting never waits for the broker.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._waiting: dict[str, _Waiting] = {}
        self._reader: pulsar.Reader | None = None
        self._producer: pulsar.Producer | None = None
        self._trouble = "not connected yet"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped.set()
        await asyncio.to_thread(self._thread.join, 2 * _OPERATION_SECONDS)

    @property
    def is_connected(self) -> bool:
        """Whether commands can be sent and outcomes read."""
        reader, producer = self._reader, self._producer
        return reader is not None and producer is not None and reader.is_connected() and producer.is_connected()

    async def send(self, requests: Sequence[ControlRequest], timeout_seconds: float) -> list[Outcome]:
        """Publishes requests and returns their outcomes once all have come.

        Raises:
            ControlUnavailable: the broker can't be reached.
            NoAnswer: not everything was answered in time.
        """
        import pulsar

        producer = self._producer
        if producer is None or not self.is_connected:
            raise ControlUnavailable(f"no connection to the broker: {self._trouble}")
        waiting = _Waiting(requests, self._loop.create_future())
        self._waiting.update(dict.fromkeys(waiting.requests, waiting))
        try:
            for request in requests:
                producer.send_async(request.command.SerializeToString(), partial(self._sent, waiting))
            async with asyncio.timeout(timeout_seconds):
                await waiting.answered
        except pulsar.PulsarException as error:
            raise ControlUnavailable(f"the broker did not take the command: {error}") from error
        except TimeoutError:
            missing = [id for id, request in waiting.requests.items() if not request.is_answered]
            raise NoAnswer(
                f"no answer within {timeout_seconds:g} s (does the job run?); request id: {', '.join(missing)}"
            ) from None
        finally:
            for request_id in waiting.requests:
                del self._waiting[request_id]
        return waiting.outcomes

    def _sent(self, waiting: _Waiting, result: Any, _: object) -> None:
        """Called by the client's own thread; an exception here would hang the process."""
        with contextlib.suppress(Exception):
            if result.name != "Ok":
                self._loop.call_soon_threadsafe(waiting.fail, f"the broker did not take the command: {result.name}")

    def _take(self, data: bytes) -> None:
        told = ControlOutcome.FromString(data)
        if waiting := self._waiting.get(told.request_id):
            waiting.take(told)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._read_outcomes()
            except Exception as error:
                trouble = str(error) or type(error).__name__
                if trouble != self._trouble:
                    _log.warning("no connection to Pulsar at %s: %s", self._settings.pulsar.service_url, trouble)
                self._trouble = trouble
                self._stopped.wait(_RETRY_SECONDS)

    def _read_outcomes(self) -> None:
        import pulsar

        from streaming.pulsar_client import connect

        client = connect(self._settings.pulsar, operation_timeout_seconds=_OPERATION_SECONDS)
        try:
            # First the reader, so that no outcome is missed.
            reader = client.create_reader(self._settings.control.outcome_topic, pulsar.MessageId.latest)
            self._producer = client.create_producer(self._settings.control.topic)
            self._reader = reader
            connected_at = time.monotonic()
            while not self._stopped.is_set():
                with contextlib.suppress(pulsar.Timeout):
                    message = reader.read_next(_POLL_MILLIS)
                    if message.partition_key() in self._waiting:
                        self._loop.call_soon_threadsafe(self._take, message.data())
                if self.is_connected:
                    connected_at = time.monotonic()
                elif time.monotonic() - connected_at > _GIVE_UP_SECONDS:
                    raise ControlUnavailable("the broker is away")
        finally:
            self._reader = self._producer = None
            client.close()


class _Waiting:
    """A caller, and the requests that it waits for."""

    def __init__(self, requests: Sequence[ControlRequest], answered: asyncio.Future[None]) -> None:
        self.requests = {request.request_id: request for request in requests}
        self.outcomes: list[Outcome] = []
        self.answered = answered

    def take(self, told: ControlOutcome) -> None:
        outcome = self.requests[told.request_id].take(told)
        if outcome is not None:
            self.outcomes.append(outcome)
        if not self.answered.done() and all(request.is_answered for request in self.requests.values()):
            self.answered.set_result(None)

    def fail(self, reason: str) -> None:
        if not self.answered.done():
            self.answered.set_exception(ControlUnavailable(reason))
