"""Re-drives dead letters: sends them back to their source topic, from where the job delivers them once more."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from admin.control.async_client import ControlUnavailableError
from admin.control.bulk import MAX_MATCHED, TooManyError
from admin.control.dead_letters import DeadLetter, DeadLetterFilter, belongs_to, sequence_id
from broker.client import PulsarError, SchemaRefusedError
from broker.dead_letter_subscription import DeadLetterConsumer, UnacknowledgedEntry, is_busy
from broker.protocol.brokers import Brokers
from broker.protocol.building import large_message
from broker.protocol.entries import Message
from broker.protocol.producer import EntryProducer, EntryTooLargeError, check_size
from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import Schema, ServerError
from broker.pulsar_admin.admin_rest import AdminClient
from conf.errors import DelayLakeError, one_line
from conf.message_size import max_delivered_bytes
from conf.settings import Route, Settings, Subscription
from tracker.commands.decode import resolve_topic
from warehouse.message_schemas import MessageSchema, UnknownSchemaError, on_the_wire, version_number
from warehouse.queries.listing import PendingError, UnknownTopicError

_log = logging.getLogger(__name__)

_SHOWN = 100  # dead letters that a dry run shows
_SHOWN_BYTES = 4 << 20  # of these in an answer
_AT_ONCE = 100  # dead letters that are sent, and then acknowledged, at a time
_AT_ONCE_BYTES = 32 << 20
_MOST_LINES = 100  # producers at a time
_MOST_LOGGED = 20  # dead letters that are refused
_SEND_SECONDS = 30.0  # as Pulsar's clients wait for a receipt
_CLOSE_SECONDS = 5.0
_BUSY_SECONDS = 5.0  # how long to wait for another re-drive of the same dead letters

# A broker counts a message as published of which it has some chunks.
_MAY_BE_THERE = (
    "it was being sent in chunks when this re-drive ended before, and the source topic may have some of them only: "
    "if it is not delivered, re-drive it under another request id"
)


class RedriveBusyError(PendingError):
    """Another re-drive of the same dead letters is at work."""


class _RefusedError(DelayLakeError):
    """A dead letter can't be sent back, while others can."""


class _Line(NamedTuple):
    """A producer that sends dead letters back to one source topic partition, with its sequence ids."""

    producer: EntryProducer
    before: int  # the last sequence id that an earlier run has sent; -1: none


class _SentBack(NamedTuple):
    """A dead letter that was sent back, by this run or an earlier one, and is not acknowledged."""

    entry: UnacknowledgedEntry
    message: Message
    line: _Line
    sequence_id: int


@dataclass
class Redrive:
    """A re-drive of the dead letters of one subscription that match a filter.

    A dead letter is acknowledged after it has been sent back. If the process ends in between, the next re-drive gets it
    again; under the same request id it knows what the broker has already, since the producer's name is made of the
    request and the sequence id of the dead letter's position (with broker deduplication).

    Attributes:
        topic: the source topic, or a partition of it.
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
    _lines: dict[tuple[str, bytes], _Line | _RefusedError] = field(default_factory=dict)
    _progress: threading.Event = field(default_factory=threading.Event)
    _logged: int = 0  # dead letters that were refused

    def dry_run(self) -> dict[str, Any]:
        """Returns the number of matching dead letters, the first of them, and how many entries can't be read.

        Raises:
            UnknownTopicError: there is no such topic or subscription.
            RedriveBusyError: another re-drive of them is at work.
            ControlUnavailableError: the broker does not answer, or refuses.
        """
        shown: list[dict[str, Any]] = []
        matched = n_bytes = n_unreadable = 0
        with _connected(self.settings) as broker:
            for partition in broker.partitions(self._subscription.dead_letter_topic):
                with broker.consumer(partition) as consumer:
                    for _, _, letter in self._matching(consumer):
                        matched += 1
                        n_bytes += letter.n_shown_bytes if matched <= _SHOWN else 0
                        if matched <= _SHOWN and n_bytes <= _SHOWN_BYTES:
                            shown.append(letter.to_json(self.wanted.subscription))
                        self.on_progress(matched)
                    n_unreadable += consumer.n_unreadable
        return {"matched": matched, "unreadable": n_unreadable, "messages": shown}

    def run(self) -> dict[str, Any]:
        """Sends the matching dead letters back, and acknowledges them; returns counts.

        Raises:
            TooManyError: too many dead letters match; nothing was done.
            UnknownTopicError, RedriveBusyError, ControlUnavailableError: as `dry_run`; some may have been sent back.
        """
        found = self.dry_run()
        matched = found["matched"]
        if matched > self.max_matched:
            raise TooManyError(f"{matched:,} dead letters match, and at most {self.max_matched:,} may")
        counts = {"matched": matched, "redriven": 0, "alreadyRedriven": 0, "refused": 0}
        counts["unreadable"] = found["unreadable"]
        with _connected(self.settings) as broker:
            for partition in broker.partitions(self._subscription.dead_letter_topic) if matched else ():
                with broker.consumer(partition) as consumer:
                    self._redrive(broker, consumer, counts)
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

    def _matching(self, consumer: DeadLetterConsumer) -> Iterator[tuple[UnacknowledgedEntry, Message, DeadLetter]]:
        route, subscription, refs = self._route, self._subscription, self.wanted.refs
        _, asked_partition = resolve_topic(self.topic, {route.source})
        for entry, message in consumer.messages():
            letter = DeadLetter.of(message, entry.metadata)
            if (
                letter is not None
                and letter.source == route.source
                and asked_partition in (-1, letter.ref.partition)
                and belongs_to(letter, subscription, route.subscriptions)
                and letter.matches(self.wanted, refs)
            ):
                yield entry, message, letter

    def _redrive(self, broker: _Broker, consumer: DeadLetterConsumer, counts: dict[str, int]) -> None:
        n_partitions = broker.admin.partitions(self._route.source) or 0
        most_in_entry = broker.admin.max_message_bytes(self._route.source) or 2**63
        most_in_chunks = max_delivered_bytes(self.settings, self._route.source)
        pending: list[_SentBack] = []
        n_bytes = 0
        try:
            for entry, message, letter in self._matching(consumer):
                try:
                    target = letter.target(n_partitions)
                    if target is None:
                        raise _RefusedError(f"its source topic has no partition {letter.ref.partition}")
                    number = sequence_id(entry.position, message.batch_index)
                    line = self._line(broker, letter, target, consumer.topic)
                    back = letter.sent_back(self.wanted.subscription, self.request_id, self.issued_by, number)
                    producer = line.producer
                    data = large_message(back, producer.name, time.time_ns() // 1_000_000, producer.schema_version)
                    is_in_chunks = not data.is_one_entry(producer.max_message_bytes)
                    most_bytes = most_in_chunks if is_in_chunks else most_in_entry
                    # Before it is known whether it was sent: what was refused was not, though later ones were.
                    if data.n_bytes > most_bytes:
                        raise _RefusedError(f"it has {data.n_bytes} bytes, its source topic takes {most_bytes}")
                    check_size(data, producer.max_message_bytes)
                    # The broker counts it as there when it has the first chunk, also after later letters have come.
                    if is_in_chunks and number <= line.before:
                        raise _RefusedError(_MAY_BE_THERE)
                    if number > line.before:
                        producer.send(data, is_more=True)
                except (_RefusedError, EntryTooLargeError, OverflowError) as error:
                    self._refuse(counts, consumer.topic, entry, error)
                    continue
                counts["redriven" if number > line.before else "alreadyRedriven"] += 1
                pending.append(_SentBack(entry, message, line, number))
                n_bytes += data.n_bytes
                if len(pending) >= _AT_ONCE or n_bytes > _AT_ONCE_BYTES:
                    self._settle(consumer, pending, counts)
                    n_bytes = 0
                    self.on_progress(counts["redriven"])
            self._settle(consumer, pending, counts)
            self.on_progress(counts["redriven"])
        finally:
            self._close_lines()

    def _settle(self, consumer: DeadLetterConsumer, pending: list[_SentBack], counts: dict[str, int]) -> None:
        """Waits until the broker has the messages that were sent back, and acknowledges their dead letters."""
        deadline = time.monotonic() + _SEND_SECONDS
        lines = [line for line in self._lines.values() if isinstance(line, _Line)]
        refused: dict[tuple[EntryProducer, int], PulsarError] = {}
        for line in lines:
            line.producer.flush()
        for line in lines:
            producer = line.producer
            while producer.n_pending and producer.error is None and (left := deadline - time.monotonic()) > 0:
                self._progress.wait(min(left, 1.0))
                self._progress.clear()
            refused |= {(producer, one.entry.sequence_id): one.error for one in producer.take_refused()}
            if producer.n_pending or producer.error is not None:
                why = "" if producer.error is None else f" ({one_line(producer.error)})"
                raise ControlUnavailableError(f"the broker has not taken all{why}: ask again, with the same request id")
        arrived = [one for one in pending if (one.line.producer, one.sequence_id) not in refused]
        for one in pending:
            if (error := refused.get((one.line.producer, one.sequence_id))) is not None:
                counts["redriven"] -= 1
                self._refuse(counts, consumer.topic, one.entry, error)
        consumer.acknowledge([(one.entry, one.message) for one in arrived])
        pending.clear()
        if len(self._lines) > _MOST_LINES:
            self._close_lines()

    def _refuse(
        self, counts: dict[str, int], topic: str, entry: UnacknowledgedEntry, error: DelayLakeError | OverflowError
    ) -> None:
        counts["refused"] += 1
        self._logged += 1
        if self._logged <= _MOST_LOGGED:
            _log.warning("%s: the dead letter %s is not sent back: %s", topic, entry.position, one_line(error))

    def _line(self, broker: _Broker, letter: DeadLetter, target: str, partition: str) -> _Line:
        """Returns the line of a dead letter.

        Raises:
            _RefusedError: the source topic does not take its schema.
        """
        key = (target, letter.schema_version)
        found = self._lines.get(key)
        if found is None:
            asked = (self.request_id, self.topic, self.wanted.model_dump_json(), partition, letter.schema_version.hex())
            name = f"delaylake-redrive-{hashlib.blake2b(chr(0).join(asked).encode(), digest_size=12).hexdigest()}"
            try:
                schema = broker.schema(letter, self._subscription.dead_letter_topic)
                producer = broker.brokers.produce(target, name, schema, self._progress.set)
                found = _Line(producer, producer.last_sequence_id)
            except (SchemaRefusedError, UnknownSchemaError, RefusedError) as error:
                if isinstance(error, RefusedError) and error.error != ServerError.IncompatibleSchema:
                    raise
                found = _RefusedError(f"its source topic does not take its schema: {one_line(error)}")
            self._lines[key] = found
        if isinstance(found, _RefusedError):
            raise found
        return found

    def _close_lines(self) -> None:
        closing = [line.producer.close() for line in self._lines.values() if isinstance(line, _Line)]
        self._lines.clear()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for wait in closing:  # else the next one could not have the name
            wait(max(deadline - time.monotonic(), 0))


@dataclass(frozen=True)
class _Broker:
    """The connections of a re-drive."""

    brokers: Brokers
    admin: AdminClient

    def partitions(self, topic: str) -> list[str]:
        """Returns a topic's partitions, or the topic itself; empty if there is no such topic."""
        return [] if self.admin.partitions(topic) is None else self.brokers.partition_names(topic)

    @contextmanager
    def consumer(self, partition: str) -> Iterator[DeadLetterConsumer]:
        """Opens a consumer of the unacknowledged dead letters of a topic partition, for the block."""
        try:
            consumer = DeadLetterConsumer(self.brokers, self.admin, partition, _BUSY_SECONDS)
        except PulsarError as error:
            if is_busy(error):
                raise RedriveBusyError("another re-drive of these dead letters is at work") from error
            raise
        try:
            yield consumer
        finally:
            consumer.close()

    def schema(self, letter: DeadLetter, topic: str) -> Schema | None:
        """Registers the schema of a dead letter with its source topic, and returns it; None: the letter has none.

        Args:
            topic: the topic of dead letters, which has the schema.

        Raises:
            SchemaRefusedError: the source topic does not take it.
            UnknownSchemaError: its definition is none of its type.
        """
        found = None
        if letter.schema_version:
            found = self.admin.schema(topic, version_number(letter.schema_version))
        schema = None if found is None else MessageSchema(*found)
        own = None if schema is None else on_the_wire(schema)
        if schema is not None and own is not None:
            # Not by the producer alone: the namespace may let nobody but the admin API register schemas.
            self.admin.register_schema(letter.source, schema.type, schema.definition, schema.properties)
        return own


@contextmanager
def _connected(settings: Settings) -> Iterator[_Broker]:
    """Opens the connections, for the block.

    Raises:
        ControlUnavailableError: instead of each error of Pulsar's.
    """
    try:
        brokers = Brokers(settings.pulsar)
        try:
            with AdminClient(settings.pulsar) as admin:
                yield _Broker(brokers, admin)
        finally:
            brokers.close()
    except PulsarError as error:
        raise ControlUnavailableError(f"the dead letters can't be re-driven now: {one_line(error)}") from error
