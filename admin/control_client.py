"""Sends control commands and waits for what they did. Needs no JVM."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pulsar

from admin.control_requests import (
    Cancel,
    ControlError,
    ControlRequest,
    Outcome,
    cancel_request,
    pause_request,
    reschedule_requests,
    restore_requests,
    skip_requests,
)
from admin.message_ids import MessageRef
from conf.settings import Settings
from proto.delaylake_pb2 import ControlOutcome
from streaming.pulsar_client import connect

if TYPE_CHECKING:
    from admin.bulk import Call

# So many messages are named in commands that are not answered yet: enough for the job to have some at hand always, and
# few enough that the answers begin soon, and that it does not wait for ever where nobody answers.
_MESSAGES_AHEAD = 100_000


class ControlClient:
    """Publishes commands to the control topic and reads their outcomes. A context manager.

    Outcomes are read from the moment the client is made, so that none is missed.
    """

    def __init__(self, settings: Settings, issued_by: str) -> None:
        self._settings = settings
        self._issued_by = issued_by
        self._client = connect(settings.pulsar, operation_timeout_seconds=10)
        try:
            self._outcomes = self._client.create_reader(settings.control.outcome_topic, pulsar.MessageId.latest)
            self._producer = self._client.create_producer(settings.control.topic, block_if_queue_full=True)
        except pulsar.PulsarException as error:
            self._client.close()
            raise ControlError(f"no connection to Pulsar at {settings.pulsar.service_url}: {error}") from error

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def cancel(
        self, topic: str, cancels: Iterable[Cancel], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Cancels delayed messages; yields what became of each.

        Args:
            subscriptions: their names; none: all of the topic's.

        Raises:
            ControlError: not everything was answered in time.
        """
        requests = (cancel_request(self._settings, self._issued_by, topic, c, subscriptions) for c in cancels)
        return self._send(requests, timeout_seconds)

    def skip(
        self, topic: str, messages: Sequence[MessageRef], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Skips messages or whole entries; yields what became of each.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send(
            skip_requests(self._settings, self._issued_by, topic, messages, subscriptions), timeout_seconds
        )

    def reschedule(
        self,
        topic: str,
        messages: Sequence[MessageRef],
        deliver_at: int,
        subscriptions: Sequence[str],
        timeout_seconds: float,
    ) -> Iterator[Outcome]:
        """Delivers messages that wait at another time, ms since the epoch; yields what became of each.

        Raises:
            ControlError: not everything was answered in time.
        """
        arguments = (self._settings, self._issued_by, topic, messages, deliver_at, subscriptions)
        return self._send(reschedule_requests(*arguments), timeout_seconds)

    def restore(
        self, topic: str, messages: Sequence[MessageRef], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Undoes cancels and skips; yields what became of each.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send(
            restore_requests(self._settings, self._issued_by, topic, messages, subscriptions), timeout_seconds
        )

    def pause(
        self, topic: str, subscriptions: Sequence[str], is_paused: bool, timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Pauses subscriptions, or resumes them; yields an outcome each.

        Raises:
            ControlError: not everything was answered in time.
        """
        request = pause_request(self._settings, self._issued_by, topic, subscriptions, is_paused)
        return self._send([request], timeout_seconds)

    def run(self, topic: str, calls: Iterable[Call], timeout_seconds: float) -> Iterator[Outcome]:
        """Does what the calls of a plan say; yields what became of each message or entry.

        Raises:
            ControlError: not everything was answered in time.
        """
        from admin.bulk import requests

        made = (r for call in calls for r in requests(self._settings, self._issued_by, topic, call))
        return self._send(made, timeout_seconds)

    def _send(self, requests: Iterable[ControlRequest], timeout_seconds: float) -> Iterator[Outcome]:
        """Publishes commands, some of them ahead, and yields their outcomes until each has all of them.

        Args:
            timeout_seconds: from one outcome to the next.
        """
        coming = iter(requests)
        waiting: dict[str, ControlRequest] = {}
        ahead = 0
        while True:
            while ahead < _MESSAGES_AHEAD and (request := next(coming, None)):
                waiting[request.request_id] = request
                ahead += request.n_messages
                self._producer.send_async(request.command.SerializeToString(), None)
            if not waiting:
                return
            try:
                told, request = self._next_outcome(waiting, timeout_seconds)
            except pulsar.Timeout:
                raise ControlError(
                    f"no answer within {timeout_seconds:.0f} s (does the job run?); "
                    f"request ids: {', '.join(list(waiting)[:5])}"
                ) from None
            outcome = request.take(told)
            if outcome is not None:
                yield outcome
            if request.is_answered:
                del waiting[told.request_id]
                ahead -= request.n_messages

    def _next_outcome(
        self, waiting: Mapping[str, ControlRequest], timeout_seconds: float
    ) -> tuple[ControlOutcome, ControlRequest]:
        """The next outcome of a request that waits; others may have commands of their own."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = int((deadline - time.monotonic()) * 1000)
            if left <= 0:
                raise pulsar.Timeout
            told = ControlOutcome.FromString(self._outcomes.read_next(left).data())
            if request := waiting.get(told.request_id):
                return told, request
