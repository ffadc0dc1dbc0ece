"""Plans which row of a release goes where, when, under which producer name and sequence id, and in which batch."""

from __future__ import annotations

import heapq
import json
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import pulsar
import pyarrow as pa

from conf.settings import Settings, dead_letter_topic, rejects_topic
from streaming.checkpoint.offset import UNKNOWN
from streaming.release.attempt import Assignment, Attempt, Failed
from streaming.release.naming import BATCH_MESSAGES, OWN_BYTES, ROW_BITS, Target, producer_name, schema_suffix
from streaming.release.pace import Pace, RateLimit
from streaming.release.producer_line import REFUSALS, Line
from tracker.backoff import DEFAULT_BACKOFF
from tracker.dead_letters import dead_letters_of
from tracker.in_flight import IN_ORDER, PLACE, SENDING
from tracker.key_order import order_keys
from tracker.messages import MESSAGES, unpack
from tracker.shaping.spans import SHAPED

_log = logging.getLogger(__name__)

_BATCH_BYTES = 100_000  # the most bytes of a producer batch; a message of so many goes alone


OrderKey = tuple[str, str | None, bytes]  # source topic, subscription, the messages' key


@dataclass(slots=True)
class PlannedSend:
    """A message that a plan sends. Times are ms since the epoch."""

    due: int
    sequence_id: int
    topic: str  # the destination, or its partition
    producer: str  # the producer's name, as long as it has its own
    row: int  # the index of its row in the plan
    subscription: str | None  # None: to the rejects topic
    is_batched: bool
    at: int  # when it is handed over: when the last message of its batch is due
    was_at: int  # the same, but where that was held back: when it was due before
    first_id: int  # the sequence id of its batch's first message
    is_large: bool = False  # the client may refuse it
    is_last: bool = True  # of its batch
    key: OrderKey | None = None  # messages with the same one arrive one after another; None: it waits for none
    rank: tuple[int, ...] = ()  # with a key: its place among those of all shards
    is_dead: bool = False  # it goes to the dead letters of its subscription
    pace: Pace | None = None  # where its batch takes places before it is handed over; set when all are planned
    n_places: int = 1  # of its batch
    line: Line = None  # type: ignore[assignment]  # set when all are planned


@dataclass(frozen=True)
class Plan:
    """The messages of one assignment: where, when, and under which names they are sent."""

    tick: int
    kind: int
    rows: pa.Table
    columns: dict[str, list[Any]]  # the rows' columns of MESSAGES, by name
    sends: list[PlannedSend]
    skipped: set[Target]  # destinations of `Attempt.skipped` for which it has messages
    failed: Sequence[Failed]  # destinations that can't be looked up
    has_held: bool  # whether it has messages that were held back
    limits: Mapping[tuple[str, str | None], RateLimit]  # by source topic and subscription, of those with a rate


def plan_release(
    settings: Settings,
    assignment: Assignment,
    attempt: Attempt,
    partitions_now: Callable[[str], int | pulsar.PulsarException] = lambda topic: 0,
) -> Plan:
    """Plans which rows of an assignment go where, when, and under which producer name and sequence id.

    What a row's sequence id and batch are depends on the release alone, so they are the same in each attempt.

    Args:
        settings: their routes say where subscriptions' messages go now.
        assignment: the rows, with what the offset says of lanes, partitions and routes in the table's metadata.
        attempt: what is left out this time.
        partitions_now: looks up how many partitions a destination has, 0: it is not partitioned; returns the exception
            where that fails. Called where the settings have another destination than the offset, or the offset does
            not know the number.
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
    was_due, retries = columns["was_due"], columns["attempt"]
    keys = order_keys(rows).to_pylist() if assignment.kind & IN_ORDER else None
    most_retries = sending.get("attempts", {})
    limits = _limits(sending.get(SHAPED, {}).get("rates", {}), by_number)
    sends = []
    skipped = set()
    failed: dict[Target, Failed] = {}
    for row, (topic, masks, due, reason) in enumerate(
        zip(columns["topic"], columns["subscription_mask"], columns["deliver_at"], columns["reason"], strict=True)
    ):
        sequence_id = (assignment.tick << ROW_BITS) + places[row] + 1
        targets: list[_Target] = [_Target(None, rejects_topic(topic))]
        if reason is None:
            targets = [there for i, there in enumerate(by_number.get(topic, ())) if masks >> i & 1]
        for subscription, destination, is_new in targets:
            if destination is None:
                dropped[topic, str(subscription)] += 1
                continue
            is_dead = False
            if (attempt_of := retries[row]) is not None and subscription is not None:
                is_dead = attempt_of > most_retries.get(topic, {}).get(subscription, DEFAULT_BACKOFF.attempts)
                destination = dead_letter_topic(destination) if is_dead else destination
            target = target_of(topic, subscription, is_dead)
            if target in attempt.skipped:
                skipped.add(target)
                continue
            if attempt.only is not None and target not in attempt.only:
                continue
            n = partitions.get(destination, UNKNOWN if is_new or is_dead else 0)
            if n == UNKNOWN:
                now = partitions_now(destination)
                if isinstance(now, pulsar.PulsarException):
                    failed[target] = _not_found(destination, target, now)
                    continue
                n = partitions[destination] = now
            if n:
                destination = f"{destination}-partition-{_partition(columns, row, n, keys)}"
            # Dead letters are acknowledged one by one, as they are re-driven.
            is_batched = batch_millis > 0 and subscription is not None and not is_dead and _may_be_batched(columns, row)
            name = producer_name(assignment.app_id, topic, subscription, assignment.shard, lane, is_batched)
            if subscription is not None and (version := columns["schema_version"][row]) is not None:
                name += schema_suffix(topic, version)
            if (assignment.tick, destination, name) in attempt.done:
                continue
            was_at = due if was_due[row] is None else was_due[row]
            send = PlannedSend(
                due, sequence_id, destination, name, row, subscription, is_batched, due, was_at, sequence_id
            )
            send.is_dead = is_dead
            send.is_large = not is_batched and _size(columns, row) >= _BATCH_BYTES
            if keys is not None and not is_dead:
                send.key, send.rank = (topic, subscription, keys[row]), _rank(columns, row, was_at)
            sends.append(send)
    for (topic, name), n in dropped.items():
        _log.warning("%s: %d messages handed out to %s are not sent: the settings no longer have it", topic, n, name)
    if batch_millis:
        _cut_batches(sends, columns, batch_millis, limits)
    if attempt.put_off:
        by_name = {
            (topic, by_number[topic][number].subscription): millis
            for (topic, number), millis in attempt.put_off.items()
            if number < len(by_number.get(topic, ()))
        }
        _put_off(sends, columns["topic"], by_name, sending.get(SHAPED, {}).get("now", 0))
    has_held = any(time is not None for time in was_due)
    not_found = tuple(failed.values())
    return Plan(assignment.tick, assignment.kind, rows, columns, sends, skipped, not_found, has_held, limits)


def target_of(topic: str, subscription: str | None, is_dead: bool) -> Target:
    """Returns the target of a source topic's message; None: it is rejected. Dead letters are one of their own."""
    return topic, dead_letters_of(subscription) if subscription and is_dead else subscription or ""


class _Target(NamedTuple):
    """Where a message goes."""

    subscription: str | None  # None: to the rejects topic
    destination: str | None  # None: nowhere, the settings no longer have the subscription
    is_new: bool = False  # the settings had another destination when the message was handed out


def _destinations(settings: Settings, recorded: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, list[_Target]]:
    """Returns by source topic where messages go for each of its subscriptions, in the order of their numbers.

    That is where the settings say now; for a route that they no longer have, where it was when they were handed out.

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


def _limits(
    recorded: Mapping[str, Mapping[str, Sequence[Any]]], by_number: Mapping[str, Sequence[_Target]]
) -> dict[tuple[str, str | None], RateLimit]:
    """Returns the rates by source topic and subscription, of those recorded by source topic and number."""
    return {
        (topic, by_number[topic][int(number)].subscription): RateLimit(*rate)
        for topic, rates in recorded.items()
        for number, rate in rates.items()
        if int(number) < len(by_number.get(topic, ()))
    }


def _put_off(
    sends: list[PlannedSend], topics: list[str], by: Mapping[tuple[str, str | None], int], handed_out: int
) -> None:
    """Has messages sent later than they are due, by topic and subscription; what was overdue counts from `handed_out`.

    Args:
        by: ms.
        handed_out: ms since the epoch.
    """
    for send in sends:
        if send.subscription is not None and (millis := by.get((topics[send.row], send.subscription))):
            send.at = max(send.at, handed_out) + millis


def _not_found(destination: str, target: Target, error: pulsar.PulsarException) -> Failed:
    return Failed(destination, "", target, f"{type(error).__name__}: {error}", isinstance(error, REFUSALS), None)


def _may_be_batched(columns: dict[str, list[Any]], row: int) -> bool:
    """Whether a message may be in a batch: no large one, and none with a key.

    A consumer of type Key_Shared gets whole batches, whatever their messages' keys.
    """
    keys = (columns[name][row] for name in ("key", "ordering_key", "ordering_key_bytes"))
    return all(key is None for key in keys) and _size(columns, row) < _BATCH_BYTES


def _size(columns: dict[str, list[Any]], row: int) -> int:
    properties = columns["properties"][row] or ()
    return OWN_BYTES // 8 + len(columns["payload"][row] or b"") + sum(len(k) + len(v or "") for k, v in properties)


def _cut_batches(
    sends: list[PlannedSend],
    columns: dict[str, list[Any]],
    batch_millis: int,
    limits: Mapping[tuple[str, str | None], RateLimit],
) -> None:
    """Puts messages that are due within the same few milliseconds into a batch, which goes when the last one is due.

    For messages that were held back, and are all due now, it is when they were due before that counts. A batch has no
    more messages than the burst of their rate.

    The broker remembers of a batch only its first sequence id. So where one ends must follow from the release alone:
    then a release that is sent again has the same batches, and each of them is there wholly or not at all.
    """
    batches: dict[tuple[str, str], list[PlannedSend]] = {}
    sizes: dict[tuple[str, str], int] = {}

    def end(batch: list[PlannedSend]) -> None:
        for send in batch:
            send.at, send.first_id, send.is_last = batch[-1].due, batch[0].sequence_id, send is batch[-1]
            send.was_at, send.n_places = batch[-1].was_at, len(batch)

    for send in sends:
        if not send.is_batched:
            continue
        key, size = (send.topic, send.producer), _size(columns, send.row)
        batch = batches.setdefault(key, [])
        limit = limits.get((columns["topic"][send.row], send.subscription))
        if batch and (
            send.due // batch_millis != batch[0].due // batch_millis
            or send.was_at // batch_millis != batch[0].was_at // batch_millis
            or len(batch) == (BATCH_MESSAGES if limit is None else min(BATCH_MESSAGES, limit.burst))
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


def _rank(columns: dict[str, list[Any]], row: int, was_at: int) -> tuple[int, ...]:
    """Returns by what a row is in order, as `tracker.messages.in_order` has it."""
    position = (columns[name][row] for name in ("ledger_id", "entry_id", "batch_index"))
    return columns["deliver_at"][row], was_at, columns["sequence"][row] or 0, *position


def _partition(columns: dict[str, list[Any]], row: int, partitions: int, keys: list[bytes] | None) -> int:
    """Returns the number of a row's partition: by key as Pulsar's Java client chooses it, without a key by position.

    Args:
        keys: of a release that has to come in order, by row: those that have no partition key, but one of these, stay
            together by it.
    """
    key = columns["key"][row]
    if key is None and keys is not None:
        return zlib.crc32(keys[row]) % partitions
    if key is None:
        return (
            int(columns["ledger_id"][row] + columns["entry_id"][row] + max(columns["batch_index"][row], 0)) % partitions
        )
    return java_string_hash(key) % partitions


def java_string_hash(text: str) -> int:
    """Returns Java's String.hashCode without its sign, 0 to 2^31 - 1: Pulsar's JavaStringHash."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for i in range(0, len(units), 2):
        value = (31 * value + (units[i] << 8 | units[i + 1])) & 0xFFFFFFFF
    return value & 0x7FFFFFFF


def by_time(plans: list[Plan]) -> list[tuple[PlannedSend, Plan]]:
    """Returns the messages of all plans, with their plans, in the order in which they are to be handed over.

    That is by `at`, and where some were held back, then by `was_at`. Those of one producer stay in the order of their
    sequence ids, also where the plans are of several ticks, and those of one key in the order in which they were handed
    out: for that, `at` and `was_at` may be set to later times.
    """
    plans = sorted(plans, key=lambda plan: (plan.tick, plan.kind))
    if plans and plans[0].tick < plans[-1].tick:
        _not_before_earlier_ticks(plans)
    pending = [(send, plan) for plan in plans if not plan.kind & IN_ORDER for send in plan.sends]
    pending += _in_order_of_keys([plan for plan in plans if plan.kind & IN_ORDER])
    if any(plan.has_held for plan in plans):
        pending.sort(key=lambda p: p[0].was_at)
    pending.sort(key=lambda p: p[0].at)
    return pending


def _in_order_of_keys(plans: list[Plan]) -> list[tuple[PlannedSend, Plan]]:
    """Joins the messages of plans in the order in which those of a key are to arrive; puts off what is due before.

    Args:
        plans: ascending by tick, and within a tick by kind.
    """
    joined: list[tuple[PlannedSend, Plan]] = []
    for _, of_release in groupby(plans, key=lambda plan: (plan.tick, plan.kind)):
        of_shards = [[(send, plan) for send in plan.sends] for plan in of_release]
        joined += heapq.merge(*of_shards, key=lambda one: one[0].rank)
    last: dict[Any, tuple[int, int]] = {}
    for send, _ in joined:
        line = (send.topic, send.producer)
        time = max((send.at, send.was_at), last.get(line, (0, 0)), last.get(send.key, (0, 0)))
        last[line] = last[send.key] = send.at, send.was_at = time
    return joined


def _not_before_earlier_ticks(plans: list[Plan]) -> None:
    """Puts messages off that are due before another one of their producer that has a lower sequence id.

    Args:
        plans: ascending by tick.
    """
    last: dict[tuple[str, str], tuple[int, int]] = {}
    for plan in plans:
        for send in plan.sends:
            key = (send.topic, send.producer)
            last[key] = send.at, send.was_at = max((send.at, send.was_at), last.get(key, (0, 0)))
