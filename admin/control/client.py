"""Sends control commands and waits for their outcomes. Needs no JVM."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pulsar

from admin.control.outcome_source import OutcomeSource
from admin.control.requests import (
    Cancel,
    ControlError,
    ControlRequest,
    Outcome,
    RequestFactory,
)
from admin.control.window import Window
from broker.client import FIRST_SEQUENCE_ID, connect
from broker.entries.message_ids import MessageRef
from conf.partitions import partition_name
from conf.settings import Settings
from tracker.commands.decode import resolve_topic
from tracker.wire.delaylake_pb2 import ControlOutcome

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
        settings: the settings.
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

    def cancel(
        self, topic: str, cancels: Iterable[Cancel], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Cancels delayed messages; yields their outcomes.

        Args:
            topic: a source topic or a partition of it, here and in the methods below.
            cancels: the messages.
            subscriptions: names of subscriptions; empty: all of the topic's.
            timeout_seconds: maximum time from one outcome to the next.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send(map(self._factory(topic, subscriptions).cancel, cancels), timeout_seconds)

    def skip(
        self, topic: str, messages: Sequence[MessageRef], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Skips messages or whole entries; yields their outcomes.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send(self._factory(topic, subscriptions).skip(messages), timeout_seconds)

    def reschedule(
        self,
        topic: str,
        messages: Sequence[MessageRef],
        deliver_at: int,
        subscriptions: Sequence[str],
        timeout_seconds: float,
    ) -> Iterator[Outcome]:
        """Reschedules pending messages; yields their outcomes.

        Args:
            deliver_at: their new time, ms since the epoch; a past one means at once.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send(self._factory(topic, subscriptions).reschedule(messages, deliver_at), timeout_seconds)

    def retry(
        self,
        topic: str,
        messages: Sequence[MessageRef],
        subscription: str,
        reason: str,
        after_millis: int,
        timeout_seconds: float,
    ) -> Iterator[Outcome]:
        """Delivers messages to a subscription once more; yields their outcomes.

        Args:
            reason: why the consumer failed.
            after_millis: the delay from now; 0: as the subscription's backoff says.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send(self._factory(topic, [subscription]).retry(messages, reason, after_millis), timeout_seconds)

    def skip_next(
        self, topic: str, messages: Sequence[MessageRef], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Skips the next occurrence of recurring messages; yields their outcomes.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send(self._factory(topic, subscriptions).skip_next(messages), timeout_seconds)

    def pause_schedules(
        self,
        topic: str,
        messages: Sequence[MessageRef],
        subscriptions: Sequence[str],
        is_paused: bool,
        timeout_seconds: float,
    ) -> Iterator[Outcome]:
        """Pauses recurring messages, or resumes them (`is_paused` is False); yields their outcomes.

        Raises:
            ControlError: not everything was answered in time.
        """
        made = self._factory(topic, subscriptions).pause_schedules(messages, is_paused)
        return self._send(made, timeout_seconds)

    def cancel_keys(
        self, topic: str, keys: Sequence[str], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Cancels the messages that wait under schedule keys; yields their outcomes.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send(self._factory(topic, subscriptions).cancel_keys(keys), timeout_seconds)

    def skip_keys(
        self, topic: str, keys: Sequence[str], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Skips the messages that wait under schedule keys; yields their outcomes.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send(self._factory(topic, subscriptions).skip_keys(keys), timeout_seconds)

    def reschedule_keys(
        self, topic: str, keys: Sequence[str], deliver_at: int, subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Reschedules the messages that wait under schedule keys; yields their outcomes.

        Args:
            deliver_at: their new time, ms since the epoch; a past one means at once.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send(self._factory(topic, subscriptions).reschedule_keys(keys, deliver_at), timeout_seconds)

    def skip_next_of_keys(
        self, topic: str, keys: Sequence[str], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Skips the next occurrence of the recurring messages of schedule keys; yields their outcomes.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send(self._factory(topic, subscriptions).skip_next_of_keys(keys), timeout_seconds)

    def pause_schedules_of_keys(
        self, topic: str, keys: Sequence[str], subscriptions: Sequence[str], is_paused: bool, timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Pauses the recurring messages of schedule keys, or resumes them; yields their outcomes.

        Raises:
            ControlError: not everything was answered in time.
        """
        made = self._factory(topic, subscriptions).pause_schedules_of_keys(keys, is_paused)
        return self._send(made, timeout_seconds)

    def restore(
        self, topic: str, messages: Sequence[MessageRef], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Undoes cancels and skips; yields their outcomes.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send(self._factory(topic, subscriptions).restore(messages), timeout_seconds)

    def pause(
        self, topic: str, subscriptions: Sequence[str], is_paused: bool, timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Pauses subscriptions, or resumes them (`is_paused` is False); yields an outcome for each.

        Raises:
            ControlError: not everything was answered in time.
        """
        return self._send([self._factory(topic, subscriptions).pause(is_paused)], timeout_seconds)

    def run(self, topic: str, calls: Iterable[Call], timeout_seconds: float) -> Iterator[Outcome]:
        """Sends the commands of a plan's calls; yields outcomes that are summed up.

        Raises:
            ControlError: not everything was answered in time.
        """
        from admin.control.bulk import requests

        return self._send(requests(self._settings, self._issued_by, topic, calls), timeout_seconds)

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
        return RequestFactory(self._settings, self._issued_by, topic, subscriptions)

    def _send(self, requests: Iterable[ControlRequest], timeout_seconds: float) -> Iterator[Outcome]:
        """Publishes commands, several ahead of their outcomes, and yields the outcomes until all have come.

        Args:
            requests: the commands.
            timeout_seconds: maximum time from one outcome to the next.
        """
        window = Window(requests, _MESSAGES_AHEAD)
        deadline = 0.0
        while True:
            while request := window.next():
                self._producer.send_async(request.command.SerializeToString(), None)
                deadline = time.monotonic() + timeout_seconds
            if not window.waiting:
                return
            try:
                try:
                    published = self._next_outcome(deadline - timeout_seconds / 2)
                except pulsar.Timeout:
                    for request in window.repeat():
                        self._producer.send_async(request.command.SerializeToString(), None)
                    published = self._next_outcome(deadline)
            except pulsar.Timeout:
                raise ControlError(window.no_answer(timeout_seconds)) from None
            # The topic has outcomes of others' commands, too.
            if published.request_id in window.waiting:
                yield from window.take(published)
                deadline = time.monotonic() + timeout_seconds

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
