"""Sends releases in Spark tasks: each message at its time."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pulsar
import pyarrow as pa
from pyspark import TaskContext

from broker import dead_letters
from broker.admin_rest import AdminClient
from broker.client import close_quietly, connect
from conf.settings import Settings, rejects_topic
from streaming.release import outgoing
from streaming.release.attempt import Assignment, Attempt, Failed, Generation, Sent
from streaming.release.naming import PRODUCER_OPTIONS, ROW_BITS, max_size_bytes
from streaming.release.pace import Pace, Paces
from streaming.release.plan import OrderKey, Plan, PlannedSend, by_time, plan_release, target_of
from streaming.release.producer_line import REFUSALS, Line, send_on_time
from streaming.release.traces import Delivery, are_traced, trace
from streaming.release.turns import wait_for_turn
from tracker.commands.giving_up import NOT_DELIVERED, NOT_TAKEN
from tracker.in_flight import PLANNED
from tracker.messages import MESSAGES, concat, pack, typed, with_columns
from tracker.retry_of import ATTEMPT
from warehouse.epoch import PauseWatch
from warehouse.message_schemas import DestinationSchemas, producer_with_schema
from warehouse.schemas import DELIVERIES
from warehouse.tables import Tables

_log = logging.getLogger(__name__)


_REJECT_MILLIS = 5_000  # how long a rejects topic is waited for

_MARGIN_MILLIS = 60_000  # by which the clocks of machines may differ


def send_releases(
    settings_json: str,
    attempt: Attempt,
    assignments: Iterable[Assignment],
    epoch: int | None = None,
    checked_at: float | None = None,
) -> Iterator[Sent]:
    """Sends assignments together, by time, and yields a report when each producer has succeeded or failed.

    Args:
        settings_json: the settings as JSON.
        attempt: what is left out this time.
        assignments: of one release or of several, of any shards.
        epoch: of the warehouse, in which alone the task may send; None: in any.
        checked_at: when the driver last checked that, seconds since the epoch; None: now.

    Yields:
        one report; none without assignments.

    Raises:
        FencedError: the process stood still for a while, and somebody else has taken the warehouse over.
    """
    settings = Settings(**json.loads(settings_json))
    watch = PauseWatch(lambda: _check_epoch(settings, epoch), since=checked_at)
    if _is_repeated_task():
        attempt = replace(attempt, is_first=False)
    partitions_now = functools.cache(functools.partial(_partitions_now, settings))
    plans = [plan_release(settings, assignment, attempt, partitions_now) for assignment in assignments]
    if plans:
        yield _send(settings, attempt, plans, watch)


def _is_repeated_task() -> bool:
    """Whether Spark repeats this task by itself, because a worker or an executor was lost."""
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def can_write(settings_json: str, topics: Iterable[str]) -> Iterator[str]:
    """Tries to get a producer for each partition of a topic; yields for each topic why it fails, or an empty text."""
    settings = Settings(**json.loads(settings_json))
    for topic in topics:
        try:
            client = _client(settings)
            for partition in client.get_topic_partitions(topic):
                client.create_producer(partition).close()
            yield ""
        except Exception as error:
            if not isinstance(error, REFUSALS):
                _forget_client()  # it may hang; after a refusal the next release needs it, and a new one takes time
            yield f"{type(error).__name__}: {error}"


def _partitions_now(settings: Settings, topic: str) -> int | pulsar.PulsarException:
    """Returns how many partitions a topic has, 0: it is not partitioned; or why the broker does not say."""
    try:
        partitions = _client(settings).get_topic_partitions(topic)
    except pulsar.PulsarException as error:
        return error
    return 0 if partitions == [topic] else len(partitions)


def _send(settings: Settings, attempt: Attempt, plans: list[Plan], watch: PauseWatch) -> Sent:
    pending = by_time(plans)
    lines = _lines(settings, attempt, pending)
    if attempt.pace_file:
        _set_paces(_paces(attempt.pace_file), pending)
    refused: dict[int, str] = {}

    def build(i: int) -> Any | None:
        send, plan = pending[i]
        if send.first_id <= send.line.before:
            return None  # it has arrived
        if send.line.found and (_position(plan.columns, send.row), _attempt(plan.columns, send.row)) in send.line.found:
            return None  # under another name
        return _message(settings, send, plan)

    try:
        for line in lines.values():
            line.open()
        behind = wait_for_turn(attempt.turn_file, watch.check)
        for line in lines.values():
            if line.target in behind:
                line.fail("what comes before has not arrived", is_refused=True)
        wake = next(iter(lines.values())).wake if lines else threading.Event()
        sent_at = send_on_time(
            [send for send, _ in pending],
            build,
            refused.__setitem__,
            wake,
            watch,
            _after(pending),
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
        Failed(
            *(line.topic, line.key, line.target, line.error, line.is_refused, line.foreign_id, line.arrived_to),
            is_behind=line.is_behind,
        )
        for line in lines.values()
        if line.has_failed
    )
    if any(not one.is_refused for one in failed):
        _forget_client()  # it may hang
    arrived = [i for i, (send, _) in enumerate(pending) if not send.line.has_failed]
    taken = [i for i in arrived if i not in refused] if refused else arrived
    not_taken = [(*pending[i], refused[i]) for i in arrived if i in refused and pending[i][0].subscription is not None]
    _reject(settings, not_taken)
    if are_traced():
        try:
            trace(_traced(*pending[i], sent_at[i]) for i in taken if pending[i][0].subscription is not None)
        except Exception as error:  # what was sent is not sent again for that
            _log.warning("no spans of a release: %s", error)
    return Sent(
        pack(_deliveries([pending[i] for i in taken], [sent_at[i] for i in taken])),
        max((line.opened_at for line in lines.values()), default=0),
        tuple({(pending[i][1].tick, pending[i][0].topic, pending[i][0].producer) for i in arrived}),
        failed,
        frozenset(target for plan in plans for target in plan.skipped),
        _refused(not_taken),
    )


def _after(pending: list[tuple[PlannedSend, Plan]]) -> list[int]:
    """Returns for each message the place of the one that has to arrive before it is sent, -1: none; [] if none has."""
    after = [-1] * len(pending)
    last: dict[OrderKey, int] = {}
    for i, (send, _) in enumerate(pending):
        if send.key is not None:
            before = last.get(send.key, -1)
            if before >= 0 and pending[before][0].line is not send.line:  # one producer's arrive in order by themselves
                after[i] = before
            last[send.key] = i
    return after if last else []


def _set_paces(paces: Paces, pending: list[tuple[PlannedSend, Plan]]) -> None:
    """Sets in the first message of each batch where it takes places, as far as the messages have a rate."""
    of_name: dict[tuple[str, ...], Pace] = {}
    for send, plan in pending:
        topic = plan.columns["topic"][send.row]
        limit = plan.limits.get((topic, send.subscription))
        # Dead letters go elsewhere, at the places that they have been given.
        if limit is not None and not send.is_dead and send.first_id == send.sequence_id:
            key = (plan.columns["key"][send.row] or "") if limit.is_per_key else ""
            name = (topic, str(send.subscription), key)
            if name not in of_name:
                of_name[name] = Pace(paces, limit, *name)
            send.pace = of_name[name]


@functools.lru_cache(maxsize=1)
def _paces(file: str) -> Paces:
    """Returns the rates' buckets: the file stays open in this process, for its next tasks."""
    return Paces(Path(file))


def _lines(
    settings: Settings, attempt: Attempt, pending: list[tuple[PlannedSend, Plan]]
) -> dict[tuple[str, str], Line]:
    """Makes a line for each (topic, producer's name in the plan), and sets it in the messages."""
    client = _client(settings)
    wake = threading.Event()
    lines: dict[tuple[str, str], Line] = {}
    since: dict[tuple[str, str], int] = {}  # ms since the epoch: none of a line's messages is sent before
    for send, plan in pending:
        key = (send.topic, send.producer)
        if key not in lines:
            generation = attempt.generations.get(key, Generation(0, 0))
            lines[key] = Line(
                *key,
                functools.partial(_producer, settings, client, send, plan, generation.name(send.producer)),
                attempt.patience_seconds,
                is_first_attempt=attempt.is_first,
                wake=wake,
                target=target_of(plan.columns["topic"][send.row], send.subscription, send.is_dead),
                before=attempt.arrived_to.get(key, -1),
            )
            since[key] = send.at - _MARGIN_MILLIS
        line = send.line = lines[key]
        if line.find is None and key in attempt.generations and plan.tick <= attempt.generations[key].tick:
            # It may have been sent under an earlier name. The topic says what has arrived; what was noted may not have:
            # the broker may have taken it for a repetition of somebody else's.
            line.find, line.before = functools.partial(_arrived, client, *key, since[key]), -1
        line.last_id = send.first_id
        line.ids.append(send.sequence_id)
        line.most_id = ((max(plan.tick, attempt.sent_to) + 1) << ROW_BITS) - 1
    of_topic: dict[str, list[Line]] = {}
    for line in lines.values():
        line.others = of_topic.setdefault(line.topic, [])
        line.others.append(line)
    return lines


def _arrived(client: pulsar.Client, topic: str, producer: str, since: int) -> frozenset[tuple[str, str]]:
    """Reads which messages a topic has under a producer's names since a time, ms since the epoch.

    Returns:
        their positions on the source topic, as in the property `delaylake.messageId`, each with its attempt, a number
        or empty.
    """
    found = set()
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    try:
        reader.seek(since)
        while reader.has_message_available():
            message = reader.read_next(10_000)
            name = message.producer_name()
            if name == producer or name.rpartition("-")[0] == producer:
                properties = message.properties()
                found.add((properties.get("delaylake.messageId", ""), properties.get(ATTEMPT, "")))
    finally:
        reader.close()
    return frozenset(found)


def _check_epoch(settings: Settings, epoch: int | None) -> None:
    tables = Tables(settings.warehouse)
    tables.join(epoch)
    tables.check_epoch()


def _position(columns: dict[str, list[Any]], row: int) -> str:
    return ":".join(str(columns[name][row]) for name in ("ledger_id", "entry_id", "partition", "batch_index"))


def _attempt(columns: dict[str, list[Any]], row: int) -> str:
    attempt = columns["attempt"][row]
    return "" if attempt is None else str(attempt)


def _refused(messages: list[tuple[PlannedSend, Plan, str]]) -> dict[tuple[int, int], bytes]:
    """Packs messages that the client does not take, with the reason; returns them by release (tick, kind)."""
    of_release: dict[tuple[int, int], list[tuple[PlannedSend, Plan, str]]] = {}
    for message in messages:
        of_release.setdefault((message[1].tick, message[1].kind), []).append(message)
    return {release: _packed(some) for release, some in of_release.items()}


def _packed(messages: list[tuple[PlannedSend, Plan, str]]) -> bytes:
    rows = concat([typed(plan.rows.slice(send.row, 1), MESSAGES) for send, plan, _ in messages])
    names = [send.subscription for send, *_ in messages]
    reasons = [_reason(send, why) for send, _, why in messages]
    return pack(with_columns(rows, subscription=pa.array(names, pa.string()), reason=pa.array(reasons, pa.string())))


def _reason(send: PlannedSend, why: str) -> str:
    return f"{NOT_DELIVERED}{send.subscription}{NOT_TAKEN}{why}"


def _reject(settings: Settings, messages: list[tuple[PlannedSend, Plan, str]]) -> None:
    """Sends messages that the client does not take to rejects topics; where that fails only the table has them."""
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
            # With max_size=0 without payload and keys: the message may be beyond the broker's limit.
            message = outgoing.rejected({**plan.columns, "reason": reasons}, send.row, send.sequence_id, max_size=0)
            producers[key]._producer.send_async(message, None)
        for producer in producers.values():
            producer.flush()
    except pulsar.PulsarException as error:
        _log.warning("what the client does not take did not reach the rejects topic: %s", error)
    finally:
        for producer in producers.values():
            close_quietly(producer)


def _message(settings: Settings, send: PlannedSend, plan: Plan) -> Any:
    if send.subscription is None:
        max_size = max_size_bytes(settings, plan.columns["topic"][send.row])
        return outgoing.rejected(plan.columns, send.row, send.sequence_id, max_size)
    return outgoing.delivered(
        plan.columns, send.row, send.due, send.sequence_id, send.subscription if send.is_dead else None
    )


def _deliveries(pending: list[tuple[PlannedSend, Plan]], sent_at: list[int]) -> pa.Table:
    """Returns rows of the table `deliveries`: one for each message that was sent to a subscription's destination."""
    chosen = [(send, plan, at) for (send, plan), at in zip(pending, sent_at, strict=True) if send.subscription]
    columns: dict[str, Any] = {
        name: [plan.columns[name][send.row] for send, plan, _ in chosen]
        for name in (
            *("topic", "partition", "ledger_id", "entry_id", "batch_index", "deliver_at"),
            *("attempt", "shaped_from", "occurrence"),
        )
    }
    columns["occurrence_at"] = [_occurrence_at(plan.columns, send.row) for send, plan, _ in chosen]
    columns["position"] = [_position(plan.columns, send.row) for send, plan, _ in chosen]
    columns["subscription"] = [send.subscription for send, _, _ in chosen]
    columns["sent_at"] = [at for _, _, at in chosen]
    columns["short_notice"] = [not plan.kind & PLANNED for _, plan, _ in chosen]
    columns["destination"] = [send.topic for send, _, _ in chosen]
    columns["destination_message_id"] = [None] * len(chosen)
    columns["batch_id"] = [plan.tick for _, plan, _ in chosen]
    return pa.table([pa.array(columns[f.name], f.type) for f in DELIVERIES], schema=DELIVERIES)


def _traced(send: PlannedSend, plan: Plan, sent_at: int) -> Delivery:
    columns, row = plan.columns, send.row
    return Delivery(
        properties=columns["properties"][row] or (),
        message_id=_position(columns, row),
        source=columns["topic"][row],
        subscription=str(send.subscription),
        destination=send.topic,
        published_at=columns["publish_time"][row],
        due=columns["deliver_at"][row],
        sent_at=sent_at,
        attempt=columns["attempt"][row],
        occurrence=columns["occurrence"][row],
    )


def _occurrence_at(columns: dict[str, list[Any]], row: int) -> int | None:
    """Returns after which time the next occurrence of a recurring message is, ms; None: the message does not recur."""
    if columns["occurrence"][row] is None:
        return None
    due = columns["deliver_at"][row] if columns["shaped_from"][row] is None else columns["shaped_from"][row]
    return max(int(due), columns["occurrence_at"][row] or 0)


def _producer(settings: Settings, client: pulsar.Client, send: PlannedSend, plan: Plan, name: str) -> Any:
    options = {"producer_name": name, "batching_enabled": send.is_batched, **PRODUCER_OPTIONS}
    if send.is_dead:
        dead_letters.keep(client, send.topic)  # each time: the topic may have been made anew
    version = plan.columns["schema_version"][send.row] if send.subscription is not None else None
    if version is None:
        return client.create_producer(send.topic, **options)
    info = _schemas(settings).info(client, send.topic, plan.columns["topic"][send.row], version)
    return producer_with_schema(client, send.topic, info, **options)


_shared: dict[str, tuple[int, pulsar.Client]] = {}  # by service URL (process id, its client): a fork has another id
_shared_schemas: dict[tuple[str, str], DestinationSchemas] = {}


def _client(settings: Settings) -> pulsar.Client:
    """Returns this process's client. It is kept, because to open one takes longer than a task has time for."""
    url = settings.pulsar.service_url
    owner, client = _shared.get(url, (0, None))
    if client is None or owner != os.getpid():
        client = connect(settings.pulsar)
        _shared[url] = (os.getpid(), client)
    return client


def _schemas(settings: Settings) -> DestinationSchemas:
    """Returns this process's schemas of destinations, which are kept: to register one takes longer than to send."""
    key = (settings.warehouse, settings.pulsar.admin_url)
    if key not in _shared_schemas:
        _shared_schemas[key] = DestinationSchemas(settings.warehouse, AdminClient(settings.pulsar))
    return _shared_schemas[key]


def _taken_clients() -> list[pulsar.Client]:
    """Returns this process's clients, which are kept no longer."""
    own = [client for owner, client in list(_shared.values()) if owner == os.getpid()]
    _shared.clear()
    return own


def _forget_client() -> None:
    for client in _taken_clients():
        # In the background: a connection that does not answer may take long to close.
        threading.Thread(target=close_quietly, args=(client,), daemon=True).start()


@atexit.register
def _close_client() -> None:
    for client in _taken_clients():
        close_quietly(client)
