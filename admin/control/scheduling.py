"""Publishes messages on source topics, and finds out which of those with the same request id counts."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from delaylake.wire.delaylake_pb2 import ControlOutcome, Result
from deltalake.exceptions import DeltaError

from admin.control.async_client import AsyncControlClient, ControlUnavailableError, NoOutcomeError
from admin.control.source_producers import ProducerSchema, SourceProducers
from broker.client import PulsarError
from broker.pulsar_admin.admin_rest import AdminClient
from conf.errors import DelayLakeError, UnreadableWarehouseError
from conf.settings import Settings
from tracker.messages import position_texts
from tracker.properties import MessagePosition
from tracker.requests import OPERATION, outcome_id
from warehouse.delta.tables import Tables
from warehouse.queries.first_answers import find_first_answers

if TYPE_CHECKING:
    import pulsar

_SCHEMA_SECONDS = 30.0  # after which a topic's schema is read again


class MessageRefusedError(DelayLakeError):
    """A message can't be scheduled as it is. The text is one line."""


class MessageTooLargeError(MessageRefusedError):
    """The broker takes no message of this size."""


# The types of schemas that a message can have: those whose payload is the bytes of one value.
SCHEMAS = (
    *("STRING", "JSON", "AVRO", "PROTOBUF", "PROTOBUF_NATIVE"),
    *("INT8", "INT16", "INT32", "INT64", "FLOAT", "DOUBLE"),
)


@dataclass(frozen=True)
class NewMessage:
    """A message to be published.

    Attributes:
        deliver_at: when it is due, ms since the epoch, if no other of its request id has come before.
        request_id: empty: it has none.
        schema: type of the topic's newest schema, in which the payload is; empty: it has none.
    """

    payload: bytes
    key: str | None
    ordering_key: str | None
    properties: Mapping[str, str]
    event_time: int  # ms since the epoch; 0: none
    deliver_at: int
    request_id: str = ""
    schema: str = ""


@dataclass(frozen=True)
class ScheduledMessage:
    """The message that counts: the published one, or the first under its request id."""

    position: str  # ledger:entry:partition:batchIndex
    deliver_at: int  # ms since the epoch


class Scheduler:
    """Schedules messages, from one event loop.

    A message with a request id is answered when the job has decided whether it is the first under it. So a call that
    was broken off can be repeated: what it publishes then is a repetition, and the answer that of the first.

    Args:
        settings: of the API.
        control: has the connection to the broker, and hears the job's outcomes.
        tables: where outcomes are that were not heard.
    """

    def __init__(self, settings: Settings, control: AsyncControlClient, tables: Tables) -> None:
        self._timeout_seconds = settings.api.answer_timeout_millis / 1000
        self._control = control
        self._tables = tables
        self._pulsar = settings.pulsar
        self._producers = SourceProducers(control.make_producer)
        self._schemas: dict[str, tuple[float, ProducerSchema | None]] = {}  # by source topic, with when it was read
        self._client: object = None

    async def schedule(self, source: str, topic: str, message: NewMessage) -> ScheduledMessage:
        """Publishes a message; returns the one that counts, and its time.

        Args:
            source: the source topic, as its route names it.
            topic: `source`, or one of its partitions.
            message: the message.

        Raises:
            ControlUnavailableError: the broker can't be reached, or does not let the API produce: nothing was sent.
            NoOutcomeError: broker or job have not answered in time. The message may have been sent.
            MessageRefusedError: the message can't be scheduled as it is, or another one has had the request id.
        """
        deadline = time.monotonic() + self._timeout_seconds
        if not message.request_id:
            position = await self._publish(source, topic, message, deadline)
            if position.ledger_id < 0:
                raise NoOutcomeError("the message was sent twice while the connection was lost: its id is not known")
            return ScheduledMessage(str(position), message.deliver_at)
        with self._control.hearing(outcome_id(source, message.request_id)) as heard:
            position = await self._publish(source, topic, message, deadline)
            return await self._answer(source, message, position, heard, deadline)

    async def _publish(self, source: str, topic: str, message: NewMessage, deadline: float) -> MessagePosition:
        """Publishes a message; returns its position, with -1 as ledger where the broker says that it had it already."""
        import pulsar

        await self._control.connected()
        if self._client is not self._control.client:  # another one since: the producers are closed
            self._client = self._control.client
            self._producers.forget()
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                schema = await self._schema(source, message.schema) if message.schema else None
                async with self._producers.producer(topic, schema) as producer:
                    result, message_id = await _sent(producer, message)
        except pulsar.PulsarException as error:
            raise ControlUnavailableError(f"{topic}: the broker gives no producer: {type(error).__name__}") from error
        except TimeoutError:
            raise NoOutcomeError(f"{topic}: the broker has not taken the message in time; {_may_be(message)}") from None
        _check_sent(result.name, topic, message)
        ids = message_id.ledger_id(), message_id.entry_id(), message_id.partition(), message_id.batch_index()
        return MessagePosition(*ids)

    async def _schema(self, source: str, wanted: str) -> ProducerSchema:
        """Returns the newest schema of a source topic.

        Args:
            source: the source topic.
            wanted: the schema's type.

        Raises:
            MessageRefusedError: it is of another type, or there is none.
            ControlUnavailableError: the broker does not say.
        """
        read_at, schema = self._schemas.get(source, (-math.inf, None))
        if schema is None or schema.type != wanted or time.monotonic() - read_at > _SCHEMA_SECONDS:
            schema = await asyncio.to_thread(self._read_schema, source)
            self._schemas[source] = time.monotonic(), schema
        if schema is None:
            raise MessageRefusedError(f"schema: the topic has none, not {wanted[:40]}")
        if schema.type != wanted:
            raise MessageRefusedError(f"schema: the topic's newest is {schema.type}, not {wanted[:40]}")
        return schema

    def _read_schema(self, source: str) -> ProducerSchema | None:
        try:
            with AdminClient(self._pulsar) as admin:
                found = admin.schema(source)
        except PulsarError as error:
            raise ControlUnavailableError(f"the topic's schema can't be read: {error}") from error
        return None if found is None else ProducerSchema(found[0], found[1])

    async def _answer(
        self,
        source: str,
        message: NewMessage,
        position: MessagePosition,
        heard: asyncio.Queue[ControlOutcome],
        deadline: float,
    ) -> ScheduledMessage:
        """Waits for the job's answer to a message that was published, and looks in the tables where it is not heard."""
        look_at = deadline - self._timeout_seconds / 2
        while (now := time.monotonic()) < deadline:
            try:
                async with asyncio.timeout((look_at if now < look_at else deadline) - now):
                    outcome = await heard.get()
            except TimeoutError:
                look = partial(_find, self._tables, outcome_id(source, message.request_id), str(position))
                found = None
                with contextlib.suppress(DeltaError, UnreadableWarehouseError, OSError):
                    found = await asyncio.to_thread(look)
                if found is not None:
                    return found
                continue
            ids = outcome.ledger_id, outcome.entry_id, outcome.batch_index
            is_own = ids == (position.ledger_id, position.entry_id, position.batch_index)
            if outcome.operation == OPERATION and (is_own or position.ledger_id < 0):
                return _scheduled(outcome, position)
        raise NoOutcomeError(f"no answer (does the job run?); {_may_be(message)}")


async def _sent(producer: pulsar.Producer, message: NewMessage) -> tuple[Any, Any]:
    """Sends a message, and waits for Pulsar's result and the message's id."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[Any, Any]] = loop.create_future()

    def settle(result: Any, message_id: Any) -> None:
        if not answer.done():
            answer.set_result((result, message_id))

    def answered(result: Any, message_id: Any) -> None:
        with contextlib.suppress(Exception):  # in a thread of Pulsar's client, which an exception would hang
            loop.call_soon_threadsafe(settle, result, message_id)

    producer.send_async(
        message.payload,
        answered,
        properties=dict(message.properties),
        partition_key=message.key,
        ordering_key=message.ordering_key,
        event_timestamp=message.event_time or None,
    )
    return await answer


_MAY_BE_SENT = ("Timeout", "AlreadyClosed", "Disconnected")


def _check_sent(result: str, topic: str, message: NewMessage) -> None:
    if result == "Ok":
        return
    text = f"{topic}: the broker did not take the message: {result}"
    if result == "MessageTooBig":
        raise MessageTooLargeError(text)
    if result in _MAY_BE_SENT:
        raise NoOutcomeError(f"{text}; {_may_be(message)}")
    raise ControlUnavailableError(text)


def _may_be(message: NewMessage) -> str:
    """Says what the caller may do after a call that was not answered."""
    if message.request_id:
        return f"the message may be scheduled: repeat the call with the same key (requestId {message.request_id})"
    return "the message may be scheduled: repeated without an Idempotency-Key, the call may schedule it twice"


def _scheduled(outcome: ControlOutcome, position: MessagePosition) -> ScheduledMessage:
    """Returns what an outcome says.

    Raises:
        MessageRefusedError: it says that the message is rejected.
    """
    if outcome.result == Result.INVALID:
        raise MessageRefusedError(outcome.reason)
    own = MessagePosition(outcome.ledger_id, outcome.entry_id, position.partition, outcome.batch_index)
    return ScheduledMessage(outcome.superseded_by or str(own), outcome.deliver_at)


def _find(tables: Tables, request_id: str, position: str) -> ScheduledMessage | None:
    """Finds the answer to a published message in the table `outcomes`; None: it is not there.

    Raises:
        MessageRefusedError: the message is rejected.
    """
    answers = find_first_answers(tables, None, [request_id], time.time_ns() // 1_000_000)
    rows = answers.append_column("position", position_texts(answers)).to_pylist()
    for row in rows:
        if row["operation"] == OPERATION and row["position"] == position:
            if row["result"] == Result.INVALID:
                raise MessageRefusedError(row["reason"])
            return ScheduledMessage(row["superseded_by"] or position, row["deliver_at"])
    return None
