"""Makes the lines of a task, one for each producer, with the sequence ids that have arrived before."""

from __future__ import annotations

import functools
import threading
import time

from broker import dead_letter_subscription
from broker.client import SchemaRefusedError
from broker.protocol.brokers import Brokers
from broker.protocol.producer import EntryProducer
from broker.protocol.reading import before_time, read_messages
from broker.protocol.session import RefusedError
from broker.protocol.wire.pulsar_pb2 import ServerError
from broker.pulsar_admin.admin_rest import AdminClient
from conf.errors import one_line
from conf.message_size import OWN_BYTES
from conf.settings import Settings
from streaming.release.attempt import Attempt, Generation
from streaming.release.outgoing import Columns, content_bytes
from streaming.release.sequence_ids import last_sequence_id
from streaming.release.task import process_clients
from streaming.release.task.connections import Connections
from streaming.release.task.lag import Lag
from streaming.release.task.planning.destinations import target_of
from streaming.release.task.planning.send_plan import Plan, PlannedSend
from streaming.release.task.planning.sending_order import Pending
from streaming.release.task.producer_line import LARGE_BYTES, Large, Line, Producer
from streaming.release.task.refusing_producer import RefusingProducer
from tracker.messages import Int64Array
from warehouse.delivery_key import Key, key_of, key_of_row
from warehouse.message_schemas import UnknownSchemaError, version_number

_MARGIN_MILLIS = 60_000  # the most by which the clocks of machines differ
_SILENT_SECONDS = 10.0  # for which a broker may send nothing of what has arrived


def lines_of(settings: Settings, attempt: Attempt, pending: Pending, connections: Connections) -> list[Line]:
    """Makes a line for each of `pending.lines`, in their order, and sets `line` of the messages; opens none."""
    wake = threading.Event()
    ends_at = time.monotonic() + attempt.most_seconds if attempt.most_seconds else 0.0
    lines: list[Line] = []
    for planned, of_line in zip(pending.lines, pending.by_line(), strict=True):
        topic, producer = key = planned.key
        send, plan = pending[of_line[0]]
        ticks = [of.tick for of in pending.plans_of(of_line)]
        generation = attempt.generations.get(key, Generation(0, 0))
        recipient = target_of(planned.source, planned.subscription, planned.is_dead)
        brokers, name = connections.brokers_of(recipient), generation.name(planned.producer)
        ids = pending.columns.sequence_id[of_line].tolist()
        line = Line(
            topic,
            producer,
            functools.partial(_producer, settings, brokers, send, plan, name, wake),
            attempt.patience_seconds,
            max_id=last_sequence_id(max(*ticks, attempt.sent_to)),
            ids=ids,
            n_bytes=pending.payload_bytes(of_line),
            is_first_attempt=attempt.is_first,
            wake=wake,
            recipient=recipient,
            resume_after=attempt.arrived_to.get(key, -1),
            lag=Lag(attempt.slow_after_seconds),
            ends_at=ends_at,
            max_entry_bytes=settings.pulsar.max_message_size_bytes,
        )
        # No message of the line was sent before, ms since the epoch. `at` may be later now than it was in a run before.
        since = int(pending.columns.due[of_line].min()) - _MARGIN_MILLIS
        if not attempt.is_first:
            line.read_arrived_if_unclear = functools.partial(_arrived, settings, topic, producer, since)
            line.large = _large_of(pending, of_line)
        if key in attempt.generations and min(ticks) <= generation.tick:
            # A message may have been sent under an earlier name. Only the topic says what has arrived: the noted
            # sequence id may be that of messages which the broker dropped as repetitions of somebody else's.
            line.read_arrived_keys = functools.partial(_arrived, settings, topic, producer, since)
            line.resume_after = -1
        elif attempt.is_first and not planned.is_dead and planned.schema_version is None:
            line.begin = functools.partial(brokers.begin_producing, topic, name, wake.set)
        lines.append(line)
    for one, number in zip(pending.sends, pending.columns.line.tolist(), strict=True):
        one.line = lines[number]
    by_topic: dict[str, list[Line]] = {}
    for line in lines:
        of_topic = by_topic.setdefault(line.topic, [])
        of_topic.append(line)
        line.of_topic = of_topic
    return lines


def _large_of(pending: Pending, of_line: Int64Array) -> dict[int, Large]:
    """Returns the messages of a line that are not in batches and may be too large for one entry, by sequence id.

    Args:
        pending: all messages.
        of_line: the indexes of the line's messages.
    """
    found = {}
    for i in of_line.tolist():
        send, plan = pending[i]
        is_large = plan.payload_bytes[send.row] > LARGE_BYTES and send.row not in plan.unsendable
        # What goes to a rejects topic is never in chunks.
        if is_large and not send.is_batched and send.subscription is not None:
            n_bytes = _most_bytes(plan.columns, send.row, send.subscription)
            found[send.sequence_id] = Large(n_bytes, key_of_row(plan.columns, send.row, is_rejected=False))
    return found


def _most_bytes(columns: Columns, row: int, subscription: str) -> int:
    """Returns the most bytes that the message of a row has as one entry; a dead letter names its subscription, too."""
    texts = columns["topic"][row], subscription, subscription, columns["retry_reasons"][row] or ""
    return OWN_BYTES + content_bytes(columns, row) + sum(len(text.encode()) for text in texts)


def _producer(
    settings: Settings, brokers: Brokers, send: PlannedSend, plan: Plan, name: str, wake: threading.Event
) -> Producer:
    """Makes the producer of a message's line; where the destination refuses their schema, one that takes none."""
    try:
        return _taking_producer(settings, brokers, send, plan, name, wake)
    except (SchemaRefusedError, UnknownSchemaError, RefusedError) as error:
        is_other = isinstance(error, RefusedError) and error.error != ServerError.IncompatibleSchema
        if is_other or send.subscription is None:
            raise  # the table `rejects` has what goes to a rejects topic already
        version = plan.columns["schema_version"][send.row]
        of = "messages without a schema" if version is None else f"schema version {version_number(version)}"
        topic = plan.columns["topic"][send.row]
        return RefusingProducer(f"{send.topic} does not take {of} of {topic}: {one_line(error)}")


def _taking_producer(
    settings: Settings, brokers: Brokers, send: PlannedSend, plan: Plan, name: str, wake: threading.Event
) -> EntryProducer:
    if send.is_dead:
        dead_letter_subscription.ensure_subscription(
            brokers, send.topic
        )  # each time, because the topic may have been made again
    schema = None
    version = plan.columns["schema_version"][send.row] if send.subscription is not None else None
    if version is not None:
        schemas = process_clients.destination_schemas(settings)
        schema = schemas.schema(send.topic, plan.columns["topic"][send.row], version)
    return brokers.produce(send.topic, name, schema, wake.set)


def _arrived(settings: Settings, topic: str, producer: str, since: int) -> frozenset[Key]:
    """Reads the messages that a producer has published to a topic, under any of its names.

    Args:
        settings: of the job.
        topic: the topic partition.
        producer: the first name.
        since: only messages published from this time on, ms since the epoch.

    Returns:
        the delivery keys of the messages.

    Raises:
        PulsarError: the broker does not answer, or refuses.
    """
    brokers = process_clients.new_brokers(settings)
    try:
        with AdminClient(settings.pulsar) as admin:
            after = before_time(admin, topic, since)
        return frozenset(
            key_of(message.properties)
            for message in read_messages(brokers, topic, after, _SILENT_SECONDS)
            if producer in (message.producer, message.producer.rpartition("-")[0])
        )
    finally:
        brokers.close()
