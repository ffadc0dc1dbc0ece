"""Sends control commands and waits for their outcomes. Needs no JVM."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pulsar
from delaylake.commands import Named
from delaylake.control import ControlRequest, RequestFactory, Window
from delaylake.message_ids import Outcome
from delaylake.wire.delaylake_pb2 import ControlOutcome

from admin.control.outcome_source import OutcomeSource
from admin.control.requests import ControlError, request_factory
from broker.client import FIRST_SEQUENCE_ID, connect
from conf.partitions import partition_name
from conf.settings import Settings
from tracker.commands.decode import resolve_topic

if TYPE_CHECKING:
    from admin.control.bulk import Call


# The maximum number of messages in commands that are sent ahead of their outcomes. If these are more commands than
# Pulsar's client can queue, sending waits.
_MESSAGES_AHEAD = 100_000


class ControlClient:
    """Publishes commands to the control topic and reads their outcomes. A context manager.

    Outcomes are read from the moment the client is made, so that none is missed. Methods that yield outcomes send
    nothing until they are iterated.

    Args:
        issued_by: the commands' sender, as it appears in outcomes.

    Raises:
        ControlError: the broker does not answer.
    """

    def __init__(self, settings: Settings, issued_by: str) -> None:
        self._source = OutcomeSource(settings.warehouse)
        self._settings = settings
        self._issued_by = issued_by
        self._client = connect(settings.pulsar, operation_timeout_seconds=10)
        try:
            self._outcomes = self._client.create_reader(settings.control.outcome_topic, pulsar.MessageId.latest)
            self._producer = self._client.create_producer(
                settings.control.topic, block_if_queue_full=True, initial_sequence_id=FIRST_SEQUENCE_ID
            )
        except pulsar.PulsarException as error:
            self._client.close()
            raise ControlError(f"no connection to Pulsar at {settings.pulsar.service_url}: {error}") from error

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def send(
        self,
        topic: str,
        kind: str,
        named: Named | None,
        subscriptions: Sequence[str],
        timeout_seconds: float,
        **fields: int | str,
    ) -> Iterator[Outcome]:
        """Asks for an operation, and yields the outcomes.

        Args:
            topic: a source topic or a partition of it.
            kind, named, fields: as of `RequestFactory.make`.
            subscriptions: names of subscriptions; empty: all of the topic's.
            timeout_seconds: maximum time from one outcome to the next.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._exchange(self._factory(topic, subscriptions).make(kind, named, **fields), timeout_seconds)

    def run(self, topic: str, calls: Iterable[Call], timeout_seconds: float) -> Iterator[Outcome]:
        """Sends the commands of a plan's calls; yields outcomes that are summed up.

        Raises:
            ControlError: not everything was answered in time.
        """
        from admin.control.bulk import requests

        return self._exchange(requests(self._settings, self._issued_by, topic, calls), timeout_seconds)

    def _factory(self, topic: str, subscriptions: Sequence[str]) -> RequestFactory:
        """Raises ControlError if the topic is a partition that there is not."""
        source, partition = resolve_topic(topic, {route.source for route in self._settings.routes})
        if source is not None and partition >= 0:
            try:
                names = self._client.get_topic_partitions(source)
            except pulsar.PulsarException as error:
                raise ControlError(f"{self._settings.pulsar.service_url} does not tell partitions: {error}") from error
            if partition_name(source, partition) not in names:
                raise ControlError(f"no such topic: {source} has no partition {partition}")
        return request_factory(self._settings, self._issued_by, topic, subscriptions)

    def _exchange(self, requests: Iterable[ControlRequest], timeout_seconds: float) -> Iterator[Outcome]:
        """Publishes commands, several ahead of their outcomes, and yields the outcomes until all have come.

        Args:
            requests: the commands.
            timeout_seconds: maximum time from one outcome to the next.
        """
        window = Window(requests, _MESSAGES_AHEAD, timeout_seconds)
        while True:
            for request in window.to_send(time.monotonic):
                self._producer.send_async(request.command.SerializeToString(), None)
            if not window.waiting:
                return
            try:
                published = self._next_outcome(window.wait_until())
            except pulsar.Timeout:
                if window.is_late(time.monotonic()):
                    raise ControlError(window.no_answer()) from None
            else:
                yield from window.take(published)

    def _next_outcome(self, deadline: float) -> ControlOutcome:
        """Returns the next outcome of anybody's commands.

        Args:
            deadline: time by the monotonic clock, seconds.

        Raises:
            pulsar.Timeout: no outcome came before the deadline.
        """
        while True:
            left = int((deadline - time.monotonic()) * 1000)
            if left <= 0:
                raise pulsar.Timeout
            message = self._outcomes.read_next(left)
            if self._source.is_of_job(message):
                return ControlOutcome.FromString(message.data())
