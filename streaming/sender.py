"""Sends releases, each row at its time. Runs in Spark tasks."""

from __future__ import annotations

import atexit
import json
import logging
import os
import time
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pulsar
import pyarrow as pa

from conf.settings import MOST_LANES, Settings, rejects_topic
from streaming import outgoing
from streaming.fence import PauseWatch
from streaming.message_schemas import DestinationSchemas, UnknownSchema, producer_with_schema, version_number
from streaming.pulsar_client import AdminClient, PulsarError, connect
from streaming.tables import DELIVERIES, Tables
from tracker.in_flight import SENDING
from tracker.messages import MESSAGES, pack, unpack

_log = logging.getLogger(__name__)

# Of a sequence id, the bits that count a tick's rows; the others are the tick. Rising from row to row and tick to tick,
# and the same when a release is sent again, so that the broker's deduplication sees it.
ROW_BITS = 22

# What a delivered message has beside the payload and properties that came: the delaylake properties, key, metadata.
OWN_BYTES = 2_048

_PRODUCER_SECONDS = 120  # a producer's name may be taken until the broker notices that its last owner is gone
_MAX_PENDING = 5_000
_BUILT_AT_ONCE = 20  # takes a quarter of a millisecond, by which a message may be late
_SENT_AT_ONCE = 100

# A batch of ours is never cut by the client: these are far below what it is told of.
_BATCH_MESSAGES = 500
_BATCH_BYTES = 100_000

# Of a producer that waits for the broker as long as it takes, and whose batches nothing cuts but flush_async.
PRODUCER_OPTIONS: dict[str, Any] = {
    "batching_max_messages": _MAX_PENDING,
    "batching_max_allowed_size_in_bytes": 4 * 1024 * 1024,
    "batching_max_publish_delay_ms": 3_600_000,
    "block_if_queue_full": True,
    "max_pending_messages": _MAX_PENDING,
    "send_timeout_millis": 0,
}


class SendError(Exception):
    """A release was not sent completely. Sending it again is safe."""


@dataclass(frozen=True)
class Assignment:
    """A shard's release, for a task to send.

    `application` is the same for all runs on one checkpoint, and of no other.
    """

    application: str
    shard: int
    tick: int
    is_planned: bool
    body: bytes

    def lane(self, lanes: int) -> str:
        """Releases of one lane are sent one after another; of different lanes, side by side."""
        return f"{'planned' if self.is_planned else 'short'}{self.tick % lanes}"


def lane_names() -> list[str]:
    """All lanes that there can be, whatever their number was."""
    return [f"{kind}{number}" for kind in ("planned", "short") for number in range(MOST_LANES)]


@dataclass(frozen=True)
class Sent:
    """What a task has sent."""

    deliveries: bytes  # rows of the table `deliveries`, packed
    ready_at: int  # when it could have sent the first row, ms since the epoch


@dataclass(slots=True)
class _Send:
    due: int
    sequence_id: int
    topic: str
    producer: str
    row: int
    subscription: str | None  # None: to the rejects topic
    is_batched: bool
    at: int  # when it is handed over: its batch's last message's time
    first_id: int  # the sequence id of its batch's first message
    is_last: bool  # of its batch


def send_releases(settings_json: str, assignments: Iterable[Assignment], epoch: int | None = None) -> Iterator[Sent]:
    """Sends the assigned releases together, by time, and returns when the broker has all of them.

    Args:
        epoch: of the warehouse, in which alone it may send; None: in any.

    Raises:
        FencedError: after a pause somebody else has the warehouse.
        SendError: it does not have all of them.
    """
    settings = Settings(**json.loads(settings_json))
    plans = [_plan(settings, assignment, partial(_partitions_now, settings)) for assignment in assignments]
    if plans:
        yield _send(settings, plans, epoch)


@dataclass(frozen=True)
class _Plan:
    tick: int
    is_planned: bool
    rows: pa.Table
    columns: dict[str, list[Any]]
    sends: list[_Send]


def _plan(settings: Settings, assignment: Assignment, partitions_now: Callable[[str], int] = lambda topic: 0) -> _Plan:
    """Which row goes where, when, and under which producer's name and sequence id.

    Args:
        partitions_now: of a destination that the settings have only now; 0: it is not partitioned.
    """
    rows = unpack(assignment.body)
    sending = json.loads((rows.schema.metadata or {}).get(SENDING.encode(), b"{}"))
    partitions: dict[str, int] = sending.get("partitions", {})
    batch_millis: int = sending.get("batch_millis", 0)
    lane = assignment.lane(sending.get("lanes", 1))
    columns: dict[str, list[Any]] = {name: [None] * rows.num_rows for name in MESSAGES.names}
    columns |= {name: rows[name].to_pylist() for name in rows.column_names}  # an earlier release packed fewer
    by_number = _destinations(settings, sending.get("routes", {}))
    dropped: Counter[tuple[str, str]] = Counter()
    sends = []
    for row, (topic, wants, due, reason) in enumerate(
        zip(columns["topic"], columns["wants"], columns["deliver_at"], columns["reason"], strict=True)
    ):
        sequence_id = (assignment.tick << ROW_BITS) + row + 1
        targets: list[_Target] = [_Target(None, rejects_topic(topic))]
        if reason is None:
            targets = [target for i, target in enumerate(by_number.get(topic, ())) if wants >> i & 1]
        for subscription, destination, is_new in targets:
            if destination is None:
                dropped[topic, str(subscription)] += 1
                continue
            if is_new and destination not in partitions:
                partitions[destination] = partitions_now(destination)
            if n := partitions.get(destination, 0):
                destination = f"{destination}-partition-{_partition(columns, row, n)}"
            name = f"{assignment.application}-{subscription or 'rejects'}-{assignment.shard}-{lane}"
            is_batched = batch_millis > 0 and subscription is not None and _may_be_batched(columns, row)
            if is_batched:
                name += "-batched"
            if subscription is not None and (version := columns["schema_version"][row]) is not None:
                name += f"-schema{version_number(version)}-{zlib.crc32(topic.encode() + version):08x}"
            sends.append(
                _Send(due, sequence_id, destination, name, row, subscription, is_batched, due, sequence_id, True)
            )
    for (topic, name), n in dropped.items():
        _log.warning("%s: %d messages handed out to %s are not sent: the settings no longer have it", topic, n, name)
    if batch_millis:
        _cut_batches(sends, columns, batch_millis)
    return _Plan(assignment.tick, assignment.is_planned, rows, columns, sends)


class _Target(NamedTuple):
    """Where a message goes."""

    subscription: str | None  # None: to the rejects topic
    destination: str | None  # None: nowhere, the settings no longer have the subscription
    is_new: bool = False  # the settings had another destination when the message was handed out


def _destinations(settings: Settings, recorded: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, list[_Target]]:
    """By source topic where its subscriptions' messages go, by the subscriptions' numbers.

    To where the settings say now. What was handed out before its route was taken out of them goes where it was to go.

    Args:
        recorded: by source topic the subscriptions' names and destinations when the messages were handed out.
    """
    by_number: dict[str, list[_Target]] = {
        topic: [_Target(name, destination) for name, destination in subscriptions]
        for topic, subscriptions in recorded.items()
    }
    for route in settings.routes:
        now = {s.name: s.destination for s in route.subscriptions}
        if route.source in by_number:
            by_number[route.source] = [
                _Target(name, now.get(name), now.get(name) != before)
                for name, before, _ in by_number[route.source]
                if name is not None
            ]
        else:
            by_number[route.source] = [_Target(name, destination) for name, destination in now.items()]
    return by_number


def _partitions_now(settings: Settings, topic: str) -> int:
    partitions = _client(settings).get_topic_partitions(topic)
    return 0 if partitions == [topic] else len(partitions)


def _may_be_batched(columns: dict[str, list[Any]], row: int) -> bool:
    """A message with a key goes alone: a consumer of type Key_Shared gets whole batches."""
    keys = (columns[name][row] for name in ("key", "ordering_key", "ordering_key_bytes"))
    return all(key is None for key in keys) and _size(columns, row) < _BATCH_BYTES


def _size(columns: dict[str, list[Any]], row: int) -> int:
    properties = columns["properties"][row] or ()
    return OWN_BYTES // 8 + len(columns["payload"][row] or b"") + sum(len(k) + len(v or "") for k, v in properties)


def _cut_batches(sends: list[_Send], columns: dict[str, list[Any]], batch_millis: int) -> None:
    """Puts the messages of a few milliseconds into a batch, which goes when the last of them is due.

    The broker remembers of a batch only its first sequence id. So where one ends must follow from the release alone:
    then one that is sent again has the same batches, and each of them is there wholly or not at all.
    """
    batches: dict[tuple[str, str], list[_Send]] = {}
    sizes: dict[tuple[str, str], int] = {}

    def end(batch: list[_Send]) -> None:
        for send in batch:
            send.at, send.first_id, send.is_last = batch[-1].due, batch[0].sequence_id, send is batch[-1]

    for send in sends:
        if not send.is_batched:
            continue
        key, size = (send.topic, send.producer), _size(columns, send.row)
        batch = batches.setdefault(key, [])
        if batch and (
            send.due // batch_millis != batch[0].due // batch_millis
            or len(batch) == _BATCH_MESSAGES
            or sizes[key] + size > _BATCH_BYTES
        ):
            end(batch)
            batch.clear()
        if not batch:
            sizes[key] = 0
        batch.append(send)
        sizes[key] += size
    for batch in batches.values():
        end(batch)


def _partition(columns: dict[str, list[Any]], row: int, partitions: int) -> int:
    """The partition of a destination: by key as Pulsar's Java client chooses, by position where there is no key."""
    key = columns["key"][row]
    if key is None:
        return (
            int(columns["ledger_id"][row] + columns["entry_id"][row] + max(columns["batch_index"][row], 0)) % partitions
        )
    return java_string_hash(key) % partitions


def java_string_hash(text: str) -> int:
    """Java's String.hashCode without its sign: Pulsar's JavaStringHash."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for i in range(0, len(units), 2):
        value = (31 * value + (units[i] << 8 | units[i + 1])) & 0xFFFFFFFF
    return value & 0x7FFFFFFF


def _send(settings: Settings, plans: list[_Plan], epoch: int | None) -> Sent:
    client = _client(settings)
    producers: dict[tuple[str, str], pulsar.Producer] = {}
    try:
        for plan in plans:
            for send in plan.sends:
                if (send.topic, send.producer) not in producers:
                    producers[send.topic, send.producer] = _producer(settings, client, send, plan)
        before = {key: producer.last_sequence_id() for key, producer in producers.items()}
        pending = sorted(((send, plan) for plan in plans for send in plan.sends), key=lambda p: p[0].at)
        ready_at = _now()
        sent_at = _send_on_time(pending, producers, before, PauseWatch(lambda: _check_epoch(settings, epoch)))
        expected = {(send.topic, send.producer): send.first_id for send, _ in pending}
        for key, producer in producers.items():
            producer.flush()
            if producer.last_sequence_id() < expected[key]:
                raise SendError(f"{key[0]}: the broker has {producer.last_sequence_id()} of {expected[key]}")
        return Sent(pack(_deliveries(pending, sent_at)), ready_at)
    except BaseException:
        _forget_client()
        raise
    finally:
        for producer in producers.values():
            try:
                producer.close()
            except Exception as error:
                _log.debug("closing a producer: %s", error)


def _send_on_time(
    pending: list[tuple[_Send, _Plan]],
    producers: dict[tuple[str, str], pulsar.Producer],
    before: dict[tuple[str, str], int],
    watch: PauseWatch,
) -> list[int]:
    """Hands each message to its producer, never before it is due; returns when, ms since the epoch."""
    due = [send.at for send, _ in pending]
    sent_at = [0] * len(pending)
    # Messages are built while there is time: when they are due only the hand-over is left.
    ready: list[tuple[Any, Any] | None] = []
    done = 0
    while done < len(pending):
        watch.turn()
        now = _now()
        if due[done] > now:
            if len(ready) < len(pending):
                ready += _built(pending[len(ready) : len(ready) + _BUILT_AT_ONCE], producers, before)
            else:
                time.sleep(min(max(due[done] / 1e3 - time.time(), 0), 0.5))
            continue
        end = min(bisect_right(due, now), done + _SENT_AT_ONCE)
        ready += _built(pending[len(ready) : end], producers, before)
        for i in range(done, end):
            item = ready[i]
            if item is not None:
                producer, message = item
                producer.send_async(message, None)  # no callback: a failure shows in flush and the last sequence id
                if pending[i][0].is_last and pending[i][0].is_batched:
                    producer.flush_async(ignore)  # cuts the batch, and sends it
                ready[i] = None
            sent_at[i] = now
        done = end
    return sent_at


def _check_epoch(settings: Settings, epoch: int | None) -> None:
    tables = Tables(settings.warehouse)
    tables.join(epoch)
    tables.check_epoch()


def _built(
    pending: list[tuple[_Send, _Plan]],
    producers: dict[tuple[str, str], pulsar.Producer],
    before: dict[tuple[str, str], int],
) -> list[tuple[Any, Any] | None]:
    """For each message its producer and what that is to be given; None: the broker has it already."""
    built: list[tuple[Any, Any] | None] = []
    for send, plan in pending:
        key = (send.topic, send.producer)
        if send.first_id <= before[key]:
            built.append(None)
        else:
            producer = producers[key]
            built.append((producer._producer, _message(send, plan)))
    return built


def ignore(_: Any) -> None:
    """What goes wrong shows in the last flush."""


def _message(send: _Send, plan: _Plan) -> Any:
    if send.subscription is None:
        return outgoing.rejected(plan.columns, send.row, send.sequence_id)
    return outgoing.delivered(plan.columns, send.row, send.due, send.sequence_id)


def _deliveries(pending: list[tuple[_Send, _Plan]], sent_at: list[int]) -> pa.Table:
    """A row for each message sent to a subscription's destination."""
    chosen = [(send, plan, at) for (send, plan), at in zip(pending, sent_at, strict=True) if send.subscription]
    columns: dict[str, Any] = {
        name: [plan.columns[name][send.row] for send, plan, _ in chosen]
        for name in ("topic", "partition", "ledger_id", "entry_id", "batch_index", "deliver_at")
    }
    columns["position"] = [
        f"{ledger}:{entry}:{partition}:{batch_index}"
        for ledger, entry, partition, batch_index in zip(
            *(columns[name] for name in ("ledger_id", "entry_id", "partition", "batch_index")), strict=True
        )
    ]
    columns["subscription"] = [send.subscription for send, _, _ in chosen]
    columns["sent_at"] = [at for _, _, at in chosen]
    columns["short_notice"] = [not plan.is_planned for _, plan, _ in chosen]
    columns["destination"] = [send.topic for send, _, _ in chosen]
    columns["destination_message_id"] = [None] * len(chosen)
    columns["batch_id"] = [plan.tick for _, plan, _ in chosen]
    return pa.table([pa.array(columns[f.name], f.type) for f in DELIVERIES], schema=DELIVERIES)


def _producer(settings: Settings, client: pulsar.Client, send: _Send, plan: _Plan) -> Any:
    options = {"producer_name": send.producer, "batching_enabled": send.is_batched, **PRODUCER_OPTIONS}
    version = plan.columns["schema_version"][send.row] if send.subscription is not None else None
    deadline = time.monotonic() + _PRODUCER_SECONDS
    while True:
        try:
            if version is None:
                return client.create_producer(send.topic, **options)
            info = _schemas(settings).info(client, send.topic, plan.columns["topic"][send.row], version)
            return producer_with_schema(client, send.topic, info, **options)
        except (pulsar.ProducerBusy, pulsar.ConnectError, pulsar.Timeout, pulsar.ServiceUnitNotReady) as error:
            if time.monotonic() > deadline:
                raise SendError(f"{send.topic}: no producer {send.producer}: {error}") from error
            time.sleep(0.1)
        except (PulsarError, UnknownSchema) as error:
            raise SendError(f"{send.topic}: no producer {send.producer}: {error}") from error


def _now() -> int:
    return time.time_ns() // 1_000_000


_shared: dict[str, tuple[int, pulsar.Client]] = {}
_shared_schemas: dict[tuple[str, str], DestinationSchemas] = {}


def _client(settings: Settings) -> pulsar.Client:
    """This process's client. Opening one costs more than a task has time for."""
    url = settings.pulsar.service_url
    owner, client = _shared.get(url, (0, None))
    if client is None or owner != os.getpid():
        client = connect(settings.pulsar)
        _shared[url] = (os.getpid(), client)
    return client


def _schemas(settings: Settings) -> DestinationSchemas:
    """This process's schemas of destinations: to register one takes longer than to open its producers."""
    key = (settings.warehouse, settings.pulsar.admin_url)
    if key not in _shared_schemas:
        _shared_schemas[key] = DestinationSchemas(settings.warehouse, AdminClient(settings.pulsar))
    return _shared_schemas[key]


def _forget_client() -> None:
    for owner, client in list(_shared.values()):
        if owner == os.getpid():
            try:
                client.close()
            except Exception as error:
                _log.debug("closing the client: %s", error)
    _shared.clear()


atexit.register(_forget_client)
