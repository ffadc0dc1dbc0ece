"""Sends releases, each row at its time. Runs in Spark tasks."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pulsar
import pyarrow as pa
from pyspark import TaskContext

from broker.client import AdminClient, connect
from conf.settings import MOST_LANES, Settings, rejects_topic
from streaming.release import outgoing
from streaming.release.lines import REFUSALS, Line, send_on_time
from streaming.source.discovery import UNKNOWN
from tracker.commands.giving_up import NOT_DELIVERED, NOT_TAKEN
from tracker.in_flight import PLACE, SENDING
from tracker.messages import MESSAGES, concat, pack, typed, unpack, with_columns
from warehouse.epoch import PauseWatch
from warehouse.message_schemas import DestinationSchemas, producer_with_schema, version_number
from warehouse.tables import DELIVERIES, Tables

_log = logging.getLogger(__name__)

# Of a sequence id, the bits that count a tick's rows; the others are the tick. Rising from row to row and tick to tick,
# and the same when a release is sent again, so that the broker's deduplication sees it.
ROW_BITS = 22

# What a delivered message has beside what came, but for names of topic and subscription: the delaylake properties, a
# schema's version, Pulsar's metadata, which counts to the broker's limit, too, and 150 bytes that broker and bookie put
# around it.
OWN_BYTES = 2_048

# A batch of ours is never cut by the client: these are far below what it is told of.
_BATCH_MESSAGES = 500
_BATCH_BYTES = 100_000

# Of a producer that never blocks, drops nothing by itself, and whose batches nothing cuts but flush_async.
PRODUCER_OPTIONS: dict[str, Any] = {
    "batching_max_messages": 10 * _BATCH_MESSAGES,
    "batching_max_allowed_size_in_bytes": 4 * 1024 * 1024,
    "batching_max_publish_delay_ms": 3_600_000,
    "max_pending_messages": 0,  # any number: a release is in memory as a whole
    "send_timeout_millis": 0,
}

_REJECT_MILLIS = 5_000  # how long the rejects topic is waited for

_MARGIN_MILLIS = 60_000  # by which the clocks of machines may differ

# A subscription of a source topic; "" is the topic of what was rejected.
Target = tuple[str, str]


def max_size_bytes(settings: Settings, topic: str) -> int:
    """How many bytes payload, keys and properties of a source topic's message may have, in all, to be sent on."""
    route = settings.route(topic)
    longest = max((len(s.name.encode()) for s in route.subscriptions), default=0) if route is not None else 0
    return settings.pulsar.max_message_size_bytes - OWN_BYTES - len(topic.encode()) - longest


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

    def lane(self, lanes: int, lane_set: int = 0) -> str:
        """Releases of one lane are sent one after another; of different lanes, side by side.

        Args:
            lane_set: another one has other lanes, as far as there are any left.
        """
        number = self.tick % lanes + lanes * (lane_set % (MOST_LANES // lanes))
        return f"{'planned' if self.is_planned else 'short'}{number}"


def producer_name(
    application: str, source: str, subscription: str | None, shard: int, lane: str, is_batched: bool
) -> str:
    """The name under which a shard's messages for a subscription, or for the rejects topic (None), are sent.

    With the source topic in it: subscriptions of several, of the same name, may go to one destination.
    """
    of_source = f"{application}-{zlib.crc32(source.encode()):08x}"
    return f"{of_source}-{subscription or ''}-{shard}-{lane}" + ("-batched" if is_batched else "")


def schema_suffix(topic: str, version: bytes) -> str:
    """What is added to it for messages that had a version of a source topic's schema."""
    return f"-schema{version_number(version)}-{zlib.crc32(topic.encode() + version):08x}"


def lane_names() -> list[str]:
    """All lanes that there can be, whatever their number was."""
    return [f"{kind}{number}" for kind in ("planned", "short") for number in range(MOST_LANES)]


@dataclass(frozen=True)
class Generation:
    """A producer that had to take another name, because somebody else has published under its own."""

    number: int  # of the name
    tick: int  # the release of this tick was the first to be sent under it; earlier ones may have been under others

    def name(self, producer: str) -> str:
        """The name under which what the plan has for a producer is sent."""
        return f"{producer}-{self.number}" if self.number else producer


@dataclass(frozen=True)
class Attempt:
    """What of the assignments is to be sent this time."""

    skipped: frozenset[Target] = frozenset()  # destinations that can't be written now
    only: frozenset[Target] | None = None  # None: all others
    done: frozenset[tuple[str, str]] = frozenset()  # topics and producers' names whose messages have arrived
    arrived_to: Mapping[tuple[str, str], int] = field(default_factory=dict)  # of others, as `Failed` has it
    generations: Mapping[tuple[str, str], Generation] = field(default_factory=dict)  # by topic and producer's name
    is_first: bool = False  # no attempt was made before, but by Spark itself
    patience_seconds: float = 10.0  # for a broker that does not answer


@dataclass(frozen=True)
class Failed:
    """A producer whose messages have not all arrived. Sending them again is safe."""

    topic: str  # the destination, or its partition
    producer: str
    target: Target
    reason: str
    is_refused: bool  # the broker has said no, rather than nothing
    foreign_id: int | None  # a sequence id that is none of ours, published under this name
    # Its messages up to this sequence id have arrived. The broker knows, too, as long as the topic is not made anew.
    arrived_to: int = -1


@dataclass(frozen=True)
class Sent:
    """What a task has sent."""

    deliveries: bytes  # rows of the table `deliveries`, packed
    ready_at: int  # when it could have sent the first row, ms since the epoch; 0: never
    done: tuple[tuple[str, str], ...] = ()  # topics and producers' names whose messages have arrived
    failed: tuple[Failed, ...] = ()
    skipped: frozenset[Target] = frozenset()  # those of the attempt that have messages in the release
    # Messages that the client does not take, packed, with the subscription and the reason; they are not delivered.
    refused: bytes = b""


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
    was_at: int  # the same of what was held back and goes out late: when it would have been
    first_id: int  # the sequence id of its batch's first message
    is_large: bool = False  # the client may refuse it
    is_last: bool = True  # of its batch
    line: Line = None  # type: ignore[assignment]  # set when all are planned


def send_releases(
    settings_json: str,
    attempt: Attempt,
    assignments: Iterable[Assignment],
    epoch: int | None = None,
    checked_at: float | None = None,
) -> Iterator[Sent]:
    """Sends the assigned releases together, by time, and returns when each producer has succeeded or failed.

    Args:
        epoch: of the warehouse, in which alone it may send; None: in any.
        checked_at: when that was the warehouse's, seconds; None: now.

    Raises:
        FencedError: after a pause somebody else has the warehouse.
    """
    settings = Settings(**json.loads(settings_json))
    watch = PauseWatch(lambda: _check_epoch(settings, epoch), since=checked_at)
    if _is_repeated_task():
        attempt = replace(attempt, is_first=False)
    partitions_now = functools.cache(functools.partial(_partitions_now, settings))
    plans = [_plan(settings, assignment, attempt, partitions_now) for assignment in assignments]
    if plans:
        yield _send(settings, attempt, plans, watch)


def _is_repeated_task() -> bool:
    """Whether Spark has run this task before, by itself: a worker or an executor was lost."""
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def can_write(settings_json: str, topics: Iterable[str]) -> Iterator[str]:
    """Tries to get a producer for each topic; yields why that does not work, or an empty text."""
    settings = Settings(**json.loads(settings_json))
    for topic in topics:
        try:
            client = _client(settings)
            for partition in client.get_topic_partitions(topic):
                client.create_producer(partition).close()
            yield ""
        except Exception as error:
            _forget_client()
            yield f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Plan:
    tick: int
    is_planned: bool
    rows: pa.Table
    columns: dict[str, list[Any]]
    sends: list[_Send]
    skipped: set[Target]
    failed: Sequence[Failed]  # whose destinations can't be looked up
    has_held: bool  # something that was held back


def _plan(
    settings: Settings,
    assignment: Assignment,
    attempt: Attempt,
    partitions_now: Callable[[str], int | pulsar.PulsarException] = lambda topic: 0,
) -> _Plan:
    """Which row goes where, when, and under which producer's name and sequence id.

    Args:
        partitions_now: of a destination that the settings have only now, or that could not be looked up; 0: it is not
            partitioned. An exception: it can't be looked up.
    """
    rows = unpack(assignment.body)
    sending = json.loads((rows.schema.metadata or {}).get(SENDING.encode(), b"{}"))
    partitions: dict[str, int] = sending.get("partitions", {})
    batch_millis: int = sending.get("batch_millis", 0)
    lane = assignment.lane(sending.get("lanes", 1), sending.get("lane_set", 0))
    columns: dict[str, list[Any]] = {name: [None] * rows.num_rows for name in MESSAGES.names}
    columns |= {name: rows[name].to_pylist() for name in rows.column_names}  # an earlier release packed fewer
    by_number = _destinations(settings, sending.get("routes", {}))
    dropped: Counter[tuple[str, str]] = Counter()
    places = columns.get(PLACE) or range(rows.num_rows)
    was_due = columns["was_due"]
    sends = []
    skipped = set()
    failed: dict[Target, Failed] = {}
    for row, (topic, wants, due, reason) in enumerate(
        zip(columns["topic"], columns["wants"], columns["deliver_at"], columns["reason"], strict=True)
    ):
        sequence_id = (assignment.tick << ROW_BITS) + places[row] + 1
        targets: list[_Target] = [_Target(None, rejects_topic(topic))]
        if reason is None:
            targets = [there for i, there in enumerate(by_number.get(topic, ())) if wants >> i & 1]
        for subscription, destination, is_new in targets:
            if destination is None:
                dropped[topic, str(subscription)] += 1
                continue
            target = (topic, subscription or "")
            if target in attempt.skipped:
                skipped.add(target)
                continue
            if attempt.only is not None and target not in attempt.only:
                continue
            n = partitions.get(destination, UNKNOWN if is_new else 0)
            if n == UNKNOWN:
                now = partitions_now(destination)
                if isinstance(now, pulsar.PulsarException):
                    failed[target] = _not_found(destination, target, now)
                    continue
                n = partitions[destination] = now
            if n:
                destination = f"{destination}-partition-{_partition(columns, row, n)}"
            is_batched = batch_millis > 0 and subscription is not None and _may_be_batched(columns, row)
            name = producer_name(assignment.application, topic, subscription, assignment.shard, lane, is_batched)
            if subscription is not None and (version := columns["schema_version"][row]) is not None:
                name += schema_suffix(topic, version)
            if (destination, name) in attempt.done:
                continue
            was_at = due if was_due[row] is None else was_due[row]
            send = _Send(due, sequence_id, destination, name, row, subscription, is_batched, due, was_at, sequence_id)
            send.is_large = not is_batched and _size(columns, row) >= _BATCH_BYTES
            sends.append(send)
    for (topic, name), n in dropped.items():
        _log.warning("%s: %d messages handed out to %s are not sent: the settings no longer have it", topic, n, name)
    if batch_millis:
        _cut_batches(sends, columns, batch_millis)
    has_held = any(time is not None for time in was_due)
    return _Plan(
        assignment.tick, assignment.is_planned, rows, columns, sends, skipped, tuple(failed.values()), has_held
    )


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


def _partitions_now(settings: Settings, topic: str) -> int | pulsar.PulsarException:
    """How many partitions a topic has, 0: it is not partitioned; the exception where the broker does not say."""
    try:
        partitions = _client(settings).get_topic_partitions(topic)
    except pulsar.PulsarException as error:
        return error
    return 0 if partitions == [topic] else len(partitions)


def _not_found(destination: str, target: Target, error: pulsar.PulsarException) -> Failed:
    return Failed(destination, "", target, f"{type(error).__name__}: {error}", isinstance(error, REFUSALS), None)


def _may_be_batched(columns: dict[str, list[Any]], row: int) -> bool:
    """A message with a key goes alone: a consumer of type Key_Shared gets whole batches."""
    keys = (columns[name][row] for name in ("key", "ordering_key", "ordering_key_bytes"))
    return all(key is None for key in keys) and _size(columns, row) < _BATCH_BYTES


def _size(columns: dict[str, list[Any]], row: int) -> int:
    properties = columns["properties"][row] or ()
    return OWN_BYTES // 8 + len(columns["payload"][row] or b"") + sum(len(k) + len(v or "") for k, v in properties)


def _cut_batches(sends: list[_Send], columns: dict[str, list[Any]], batch_millis: int) -> None:
    """Puts the messages of a few milliseconds into a batch, which goes when the last of them is due.

    So it does with what was held back and is due now, by when it was due.

    The broker remembers of a batch only its first sequence id. So where one ends must follow from the release alone:
    then one that is sent again has the same batches, and each of them is there wholly or not at all.
    """
    batches: dict[tuple[str, str], list[_Send]] = {}
    sizes: dict[tuple[str, str], int] = {}

    def end(batch: list[_Send]) -> None:
        for send in batch:
            send.at, send.first_id, send.is_last = batch[-1].due, batch[0].sequence_id, send is batch[-1]
            send.was_at = batch[-1].was_at

    for send in sends:
        if not send.is_batched:
            continue
        key, size = (send.topic, send.producer), _size(columns, send.row)
        batch = batches.setdefault(key, [])
        if batch and (
            send.due // batch_millis != batch[0].due // batch_millis
            or send.was_at // batch_millis != batch[0].was_at // batch_millis
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


def _in_order(plans: list[_Plan]) -> list[tuple[_Send, _Plan]]:
    """The messages of all plans by when they are handed over; what was held back by when it would have been."""
    pending = [(send, plan) for plan in plans for send in plan.sends]
    if any(plan.has_held for plan in plans):
        pending.sort(key=lambda p: p[0].was_at)
    pending.sort(key=lambda p: p[0].at)
    return pending


def _send(settings: Settings, attempt: Attempt, plans: list[_Plan], watch: PauseWatch) -> Sent:
    pending = _in_order(plans)
    lines = _lines(settings, attempt, pending)
    refused: dict[int, str] = {}

    def build(i: int) -> Any | None:
        send, plan = pending[i]
        if send.first_id <= send.line.before:
            return None  # it has arrived
        if send.line.found and _position(plan.columns, send.row) in send.line.found:
            return None  # under another name
        return _message(settings, send, plan)

    try:
        for line in lines.values():
            line.open()
        wake = next(iter(lines.values())).wake if lines else threading.Event()
        sent_at = send_on_time(
            [send for send, _ in pending],
            build,
            refused.__setitem__,
            wake,
            watch,
        )
    except BaseException:
        _forget_client()
        raise
    finally:
        for line in lines.values():
            line.close()
    for line in lines.values():
        line.check_repeated()
    failed = tuple(one for plan in plans for one in plan.failed) + tuple(
        Failed(line.topic, line.key, line.target, line.error, line.is_refused, line.foreign_id, line.arrived_to)
        for line in lines.values()
        if line.has_failed
    )
    if any(not one.is_refused for one in failed):
        _forget_client()  # it may hang
    arrived = [i for i, (send, _) in enumerate(pending) if not send.line.has_failed]
    taken = [i for i in arrived if i not in refused] if refused else arrived
    not_taken = [(*pending[i], refused[i]) for i in arrived if i in refused and pending[i][0].subscription is not None]
    _reject(settings, not_taken)
    return Sent(
        pack(_deliveries([pending[i] for i in taken], [sent_at[i] for i in taken])),
        max((line.opened_at for line in lines.values()), default=0),
        tuple(key for key, line in lines.items() if not line.has_failed),
        failed,
        frozenset(target for plan in plans for target in plan.skipped),
        _refused(not_taken),
    )


def ignore(_: Any) -> None:
    """What goes wrong shows in the last flush."""


def _lines(settings: Settings, attempt: Attempt, pending: list[tuple[_Send, _Plan]]) -> dict[tuple[str, str], Line]:
    """A line for each producer; its messages know it then."""
    client = _client(settings)
    wake = threading.Event()
    lines: dict[tuple[str, str], Line] = {}
    for send, plan in pending:
        key = (send.topic, send.producer)
        if key not in lines:
            generation = attempt.generations.get(key, Generation(0, 0))
            lines[key] = Line(
                *key,
                functools.partial(_producer, settings, client, send, plan, generation.name(send.producer)),
                attempt.patience_seconds,
                first_id=send.first_id,
                most_id=((plan.tick + 1) << ROW_BITS) - 1,
                is_first_attempt=attempt.is_first,
                wake=wake,
                target=(plan.columns["topic"][send.row], send.subscription or ""),
                find=None
                if plan.tick > generation.tick
                else functools.partial(_arrived, client, *key, send.at - _MARGIN_MILLIS),
                before=attempt.arrived_to.get(key, -1),
            )
        send.line = lines[key]
        send.line.last_id = send.first_id
    of_topic: dict[str, list[Line]] = {}
    for line in lines.values():
        line.others = of_topic.setdefault(line.topic, [])
        line.others.append(line)
    return lines


def _arrived(client: pulsar.Client, topic: str, producer: str, since: int) -> frozenset[str]:
    """The positions of the messages that a topic has got under a producer's names since a time, ms since the epoch."""
    found = set()
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    try:
        reader.seek(since)
        while reader.has_message_available():
            message = reader.read_next(10_000)
            name = message.producer_name()
            if name == producer or name.rpartition("-")[0] == producer:
                found.add(message.properties().get("delaylake.messageId", ""))
    finally:
        reader.close()
    return frozenset(found)


def _check_epoch(settings: Settings, epoch: int | None) -> None:
    tables = Tables(settings.warehouse)
    tables.join(epoch)
    tables.check_epoch()


def _position(columns: dict[str, list[Any]], row: int) -> str:
    return ":".join(str(columns[name][row]) for name in ("ledger_id", "entry_id", "partition", "batch_index"))


def _refused(messages: list[tuple[_Send, _Plan, str]]) -> bytes:
    """Messages that the client does not take, with the reason, packed."""
    if not messages:
        return b""
    rows = concat([typed(plan.rows.slice(send.row, 1), MESSAGES) for send, plan, _ in messages])
    names = [send.subscription for send, *_ in messages]
    reasons = [_reason(send, why) for send, _, why in messages]
    return pack(with_columns(rows, subscription=pa.array(names, pa.string()), reason=pa.array(reasons, pa.string())))


def _reason(send: _Send, why: str) -> str:
    return f"{NOT_DELIVERED}{send.subscription}{NOT_TAKEN}{why}"


def _reject(settings: Settings, messages: list[tuple[_Send, _Plan, str]]) -> None:
    """Sends messages that the client does not take to the rejects topic; where that fails the table alone has them."""
    producers: dict[tuple[str, str], Any] = {}
    try:
        for send, plan, why in sorted(messages, key=lambda message: message[0].sequence_id):
            key = (rejects_topic(plan.columns["topic"][send.row]), f"{send.producer}-refused")
            if key not in producers:
                options = PRODUCER_OPTIONS | {"send_timeout_millis": _REJECT_MILLIS}
                producers[key] = _client(settings).create_producer(
                    key[0], producer_name=key[1], batching_enabled=False, **options
                )
            reasons: list[Any] = [_reason(send, why)] * (send.row + 1)
            # Without what makes it large: it is the broker's limit that it is beyond.
            message = outgoing.rejected({**plan.columns, "reason": reasons}, send.row, send.sequence_id, max_size=0)
            producers[key]._producer.send_async(message, None)
        for producer in producers.values():
            producer.flush()
    except pulsar.PulsarException as error:
        _log.warning("what the client does not take did not reach the rejects topic: %s", error)
    finally:
        for producer in producers.values():
            _close(producer)


def _message(settings: Settings, send: _Send, plan: _Plan) -> Any:
    if send.subscription is None:
        max_size = max_size_bytes(settings, plan.columns["topic"][send.row])
        return outgoing.rejected(plan.columns, send.row, send.sequence_id, max_size)
    return outgoing.delivered(plan.columns, send.row, send.due, send.sequence_id)


def _deliveries(pending: list[tuple[_Send, _Plan]], sent_at: list[int]) -> pa.Table:
    """A row for each message sent to a subscription's destination."""
    chosen = [(send, plan, at) for (send, plan), at in zip(pending, sent_at, strict=True) if send.subscription]
    columns: dict[str, Any] = {
        name: [plan.columns[name][send.row] for send, plan, _ in chosen]
        for name in ("topic", "partition", "ledger_id", "entry_id", "batch_index", "deliver_at")
    }
    columns["position"] = [_position(plan.columns, send.row) for send, plan, _ in chosen]
    columns["subscription"] = [send.subscription for send, _, _ in chosen]
    columns["sent_at"] = [at for _, _, at in chosen]
    columns["short_notice"] = [not plan.is_planned for _, plan, _ in chosen]
    columns["destination"] = [send.topic for send, _, _ in chosen]
    columns["destination_message_id"] = [None] * len(chosen)
    columns["batch_id"] = [plan.tick for _, plan, _ in chosen]
    return pa.table([pa.array(columns[f.name], f.type) for f in DELIVERIES], schema=DELIVERIES)


def _producer(settings: Settings, client: pulsar.Client, send: _Send, plan: _Plan, name: str) -> Any:
    options = {"producer_name": name, "batching_enabled": send.is_batched, **PRODUCER_OPTIONS}
    version = plan.columns["schema_version"][send.row] if send.subscription is not None else None
    if version is None:
        return client.create_producer(send.topic, **options)
    info = _schemas(settings).info(client, send.topic, plan.columns["topic"][send.row], version)
    return producer_with_schema(client, send.topic, info, **options)


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
            # In the background: a connection that does not answer may take long to close.
            threading.Thread(target=_close, args=(client,), daemon=True).start()
    _shared.clear()


def _close(client: pulsar.Client | pulsar.Producer) -> None:
    try:
        client.close()
    except Exception as error:
        _log.debug("closing the client: %s", error)


@atexit.register
def _close_client() -> None:
    for owner, client in list(_shared.values()):
        if owner == os.getpid():
            _close(client)
    _shared.clear()
