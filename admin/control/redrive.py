"""Re-drives dead letters: sends them back to their source topic, from where the job delivers them once more."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pulsar

from admin.control.async_client import ControlUnavailableError
from admin.control.bulk import MAX_MATCHED, TooManyError
from admin.control.dead_letters import DeadLetter, DeadLetterFilter, belongs_to, sequence_id
from broker import dead_letter_subscription
from broker.client import PulsarError, close_quietly, connect
from broker.pulsar_admin.admin_rest import AdminClient
from conf.errors import one_line
from conf.settings import Route, Settings, Subscription
from tracker.commands.decode import resolve_topic
from warehouse.message_schemas import MessageSchema, producer_with_schema, registered, version_number
from warehouse.queries.listing import PendingError, UnknownTopicError

_SHOWN = 100  # dead letters that a dry run shows
_AT_ONCE = 100  # dead letters that are sent, and then acknowledged, at a time
_POLL_MILLIS = 200
_SILENT_SECONDS = 5.0  # if a connected broker sends no message for this long, there are no more
_GIVE_UP_SECONDS = 30.0
_BUSY_SECONDS = 5.0  # how long to wait for another re-drive of the same dead letters


class RedriveBusyError(PendingError):
    """Another re-drive of the same dead letters is at work."""


class _Line:
    """A producer that sends dead letters back to one source topic partition, with its sequence ids."""

    def __init__(self, producer: Any) -> None:
        self.producer = producer
        self.before: int = producer.last_sequence_id()  # the last one that an earlier run has sent; -1: none
        self.last = self.before  # the last one that was handed to the client


@dataclass
class Redrive:
    """A re-drive of the dead letters of one subscription that match a filter.

    A dead letter is acknowledged after it has been sent back. If the process ends in between, the next re-drive gets it
    again; under the same request id it knows what the broker has already, since the producer's name is made of the
    request and the sequence id of the dead letter's position (with broker deduplication).

    Attributes:
        topic: the source topic, or a partition of it.
        wanted: the filter.
        request_id: unique among re-drives.
        max_matched: if more dead letters match, nothing is done.
        on_progress: called with the number of dead letters that were examined, or sent back.
    """

    settings: Settings
    issued_by: str
    topic: str
    wanted: DeadLetterFilter
    request_id: str
    max_matched: int = MAX_MATCHED
    on_progress: Callable[[int], None] = lambda n: None
    _lines: dict[tuple[str, bytes], _Line] = field(default_factory=dict)

    def dry_run(self) -> dict[str, Any]:
        """Returns the number of matching dead letters, and the first of them.

        Raises:
            UnknownTopicError: there is no such topic or subscription.
            RedriveBusyError: another re-drive of them is at work.
            ControlUnavailableError: the broker does not answer, or refuses.
        """
        shown: list[dict[str, Any]] = []
        matched = 0
        with _Broker(self.settings) as broker:
            for partition in broker.partitions(self._subscription.dead_letter_topic):
                with broker.consumer(partition) as consumer:
                    for _, letter in self._matching(broker, consumer, partition):
                        matched += 1
                        if len(shown) < _SHOWN:
                            shown.append(letter.to_json(self.wanted.subscription))
                        self.on_progress(matched)
        return {"matched": matched, "messages": shown}

    def run(self) -> dict[str, Any]:
        """Sends the matching dead letters back, and acknowledges them; returns counts.

        Raises:
            TooManyError: too many dead letters match; nothing was done.
            UnknownTopicError, RedriveBusyError, ControlUnavailableError: as `dry_run`; some may have been sent back.
        """
        matched = self.dry_run()["matched"]
        if matched > self.max_matched:
            raise TooManyError(f"{matched:,} dead letters match, and at most {self.max_matched:,} may")
        counts = {"matched": matched, "redriven": 0, "alreadyRedriven": 0, "refused": 0}
        with _Broker(self.settings) as broker:
            for partition in broker.partitions(self._subscription.dead_letter_topic) if matched else ():
                with broker.consumer(partition) as consumer:
                    self._redrive(broker, consumer, partition, counts)
        return counts | {"requestId": self.request_id}

    @property
    def _subscription(self) -> Subscription:
        for subscription in self._route.subscriptions:
            if subscription.name == self.wanted.subscription:
                return subscription
        raise UnknownTopicError(f"the topic {self.topic} has no such subscription: {self.wanted.subscription[:300]!r}")

    @property
    def _route(self) -> Route:
        source, _ = resolve_topic(self.topic, {route.source for route in self.settings.routes})
        route = self.settings.route(source) if source else None
        if route is None:
            raise UnknownTopicError(f"no route has the topic {self.topic[:300]!r}")
        return route

    def _matching(
        self, broker: _Broker, consumer: pulsar.Consumer, partition: str
    ) -> Iterator[tuple[pulsar.Message, DeadLetter]]:
        route, subscription, refs = self._route, self._subscription, self.wanted.refs
        _, of_partition = resolve_topic(self.topic, {route.source})
        for message in broker.messages(consumer, partition):
            letter = DeadLetter.of(message)
            if (
                letter is not None
                and letter.source == route.source
                and of_partition in (-1, letter.ref.partition)
                and belongs_to(letter, subscription, route.subscriptions)
                and letter.matches(self.wanted, refs)
            ):
                yield message, letter

    def _redrive(self, broker: _Broker, consumer: pulsar.Consumer, partition: str, counts: dict[str, int]) -> None:
        self._lines = {}
        chunk: list[pulsar.Message] = []
        try:
            for message, letter in self._matching(broker, consumer, partition):
                number = sequence_id(message.message_id())
                line = self._line(broker, letter, partition)
                if number <= line.before:
                    counts["alreadyRedriven"] += 1
                else:
                    back = letter.sent_back(self.wanted.subscription, self.request_id, self.issued_by, number)
                    try:
                        line.producer.send_async(back, None)
                    except pulsar.MessageTooBig:
                        counts["refused"] += 1
                        continue
                    line.last = number
                    counts["redriven"] += 1
                chunk.append(message)
                if len(chunk) == _AT_ONCE:
                    self._settle(broker, consumer, chunk)
                    self.on_progress(counts["redriven"])
            self._settle(broker, consumer, chunk)
            self.on_progress(counts["redriven"])
        finally:
            for line in self._lines.values():
                close_quietly(line.producer)

    def _settle(self, broker: _Broker, consumer: pulsar.Consumer, chunk: list[pulsar.Message]) -> None:
        """Waits until the broker has the messages that were sent back, and acknowledges their dead letters."""
        for line in self._lines.values():
            line.producer.flush()
            if line.producer.last_sequence_id() < line.last:
                raise ControlUnavailableError("the broker has not taken all: ask again, with the same request id")
        for message in chunk:
            consumer.acknowledge(message)
        broker.acknowledged += len(chunk)
        chunk.clear()

    def _line(self, broker: _Broker, letter: DeadLetter, partition: str) -> _Line:
        key = (letter.target, letter.schema_version)
        if key not in self._lines:
            asked = (self.request_id, self.topic, self.wanted.model_dump_json(), partition, letter.schema_version.hex())
            name = f"delaylake-redrive-{hashlib.blake2b(chr(0).join(asked).encode(), digest_size=12).hexdigest()}"
            self._lines[key] = _Line(broker.producer(letter, self._subscription.dead_letter_topic, name))
        return self._lines[key]


class _Broker:
    """The connections of a re-drive. A context manager that turns Pulsar's errors into ControlUnavailableError."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.acknowledged = 0  # the number of messages that the current consumer has acknowledged

    def __enter__(self) -> _Broker:
        self._admin = AdminClient(self._settings.pulsar)
        self._client = connect(self._settings.pulsar)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        close_quietly(self._client)
        self._admin.close()
        if isinstance(error, pulsar.ConsumerBusy):
            raise RedriveBusyError("another re-drive of these dead letters is at work") from error
        if isinstance(error, (pulsar.PulsarException, PulsarError, OverflowError)):
            raise ControlUnavailableError(f"the dead letters can't be re-driven now: {one_line(error)}") from error

    def partitions(self, topic: str) -> list[str]:
        """Returns a topic's partitions, or the topic itself; empty if there is no such topic."""
        if self._admin.partitions(topic) is None:
            return []
        found: list[str] = self._client.get_topic_partitions(topic)
        return found

    @contextmanager
    def consumer(self, partition: str) -> Iterator[pulsar.Consumer]:
        """Opens a consumer of the unacknowledged dead letters of a topic partition, for the block."""
        consumer = dead_letter_subscription.subscribe(self._client, partition, _BUSY_SECONDS)
        try:
            yield consumer
        finally:
            close_quietly(consumer)

    def messages(self, consumer: pulsar.Consumer, partition: str) -> Iterator[pulsar.Message]:
        """Yields the unacknowledged messages that are there now, in order, each once.

        Raises:
            pulsar.Timeout: the broker does not answer.
        """
        self.acknowledged = 0
        end = consumer.get_last_message_id()
        last = (-1, -1, -1)
        heard_at, n = time.monotonic(), 0
        while end.ledger_id() >= 0:
            try:
                message = consumer.receive(_POLL_MILLIS)
            except pulsar.Timeout:
                silent = time.monotonic() - heard_at
                if self._backlog(partition) <= n - self.acknowledged or (
                    silent > _SILENT_SECONDS and consumer.is_connected()
                ):
                    return
                if silent > _GIVE_UP_SECONDS:
                    raise
                continue
            heard_at, message_id = time.monotonic(), message.message_id()
            at = (message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())
            if at <= last:
                continue  # after a lost connection the broker begins again
            if at[:2] > (end.ledger_id(), end.entry_id()):
                return
            n, last = n + (at[:2] != last[:2]), at
            yield message
            if at == (end.ledger_id(), end.entry_id(), -1):
                return

    def producer(self, letter: DeadLetter, topic: str, name: str) -> Any:
        """Makes a producer for the source topic of a dead letter, with its schema.

        Args:
            letter: the dead letter.
            topic: the topic of dead letters, which has the schema.
            name: the producer's name.
        """
        # Unbatched, since the broker remembers only the first sequence id of a batch.
        options = {"producer_name": name, "batching_enabled": False, "max_pending_messages": 0}
        found = None
        if letter.schema_version:
            found = self._admin.schema(topic, version_number(letter.schema_version))
        if found is None:
            return self._client.create_producer(letter.target, **options)._producer
        info = registered(self._admin, self._client, letter.source, MessageSchema(*found))
        return producer_with_schema(self._client, letter.target, info, **options)._producer

    def _backlog(self, partition: str) -> int:
        try:
            return self._admin.backlog(partition, dead_letter_subscription.SUBSCRIPTION) or 0
        except PulsarError:
            return 2**31  # unknown
