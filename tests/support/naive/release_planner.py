"""The plan of a release, row by row: plain, and slow. It says what the planner in columns has to return."""

from __future__ import annotations

import heapq
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pyarrow as pa

from broker.client import PulsarError
from conf.message_size import OWN_BYTES
from conf.partitions import java_string_hash, partition_name
from conf.settings import Settings
from streaming.release.attempt import Assignment, Attempt, FailedProducer
from streaming.release.naming import BATCH_MESSAGES, Recipient, producer_name, schema_suffix
from streaming.release.sequence_ids import sequence_id_of
from streaming.release.task.planning.destinations import Destination, Destinations
from streaming.release.task.shared_paces import RateLimit
from tracker.in_flight import IN_ORDER, PLACE, PLANNED, SENDING
from tracker.messages import MESSAGES, order_keys, readable
from tracker.properties import position_of
from tracker.shaping.token_bucket import SHAPED
from warehouse.schemas import DELIVERIES

OrderKey = tuple[str, str | None, bytes]  # source topic, subscription, the messages' key


@dataclass(slots=True, kw_only=True)
class PlannedSend:
    """A planned message. Times are ms since the epoch."""

    due: int
    sequence_id: int
    topic: str  # the destination, or its partition; empty: there is none
    producer: str  # the producer's first name, before it takes any other
    row: int  # the index of the row in the plan
    subscription: str | None  # None: it goes to the rejects topic
    is_batched: bool
    at: int  # when it is handed to the producer: when the last message of its batch is due
    was_at: int  # the same by the time before it was held back; else as `at`
    first_id: int  # the sequence id of the first message of its batch
    is_large: bool = False  # the client may refuse it
    is_last: bool = True  # it is the last message of its batch
    key: OrderKey | None = None  # messages with the same key arrive one after another; None: it waits for no other
    rank: tuple[int, ...] = ()  # the place among the messages of its key, of all shards
    is_dead: bool = False  # it is a dead letter of its subscription
    n_places: int = 1  # the number of places that its batch takes from the bucket


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The planned messages of one assignment."""

    tick: int
    kind: int
    rows: pa.Table
    columns: dict[str, list[Any]]  # the rows' columns of MESSAGES, by name
    sends: list[PlannedSend]
    skipped: set[Recipient]  # recipients of `Attempt.skipped` for which the assignment has messages
    failed: Sequence[FailedProducer]  # recipients whose destination can't be looked up
    has_held: bool  # whether some messages were held back
    limits: Mapping[tuple[str, str | None], RateLimit]  # the rates, by source topic and subscription
    dropped: Sequence[PlannedSend] = ()  # messages for subscriptions that the settings no longer have
    unsendable: Mapping[int, str] = field(default_factory=dict)  # by row: why it can't be sent
    is_put_off: bool = False  # whether some messages are sent later than they are due


BATCH_BYTES = 100_000  # the most bytes of a producer batch; a larger message is sent alone


def may_be_batched(columns: dict[str, list[Any]], row: int) -> bool:
    """Whether a message may be in a producer batch: it is small and has no key.

    A consumer of type Key_Shared gets whole batches, so messages with a key must not be in one.
    """
    has_key = columns["key"][row] is not None or columns["ordering_key"][row] is not None
    return not has_key and columns["ordering_key_bytes"][row] is None and size_of(columns, row) < BATCH_BYTES


def size_of(columns: dict[str, list[Any]], row: int) -> int:
    """Returns the approximate number of bytes of a row's message."""
    properties = columns["properties"][row] or ()
    return OWN_BYTES // 8 + len(columns["payload"][row] or b"") + sum(len(k) + len(v or "") for k, v in properties)


def cut_batches(
    sends: list[PlannedSend],
    columns: dict[str, list[Any]],
    batch_millis: int,
    limits: Mapping[tuple[str, str | None], RateLimit],
) -> None:
    """Puts messages that are due within the same `batch_millis` into a batch, which is sent when the last one is due.

    Messages that were held back are all due now; for them the earlier time counts. A batch has no more messages than
    the burst of their rate.

    The broker remembers only the first sequence id of a batch. So the ends of batches must follow from the release
    alone: then a release that is sent again has the same batches, and the broker has each of them wholly or not at all.

    Args:
        sends: the messages of a release, in order; the batched ones are changed.
        columns: of the release's rows, by name.
        batch_millis: the time that a batch spans, ms.
        limits: the rates, by source topic and subscription.
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
        key, size = (send.topic, send.producer), size_of(columns, send.row)
        batch = batches.setdefault(key, [])
        limit = limits.get((columns["topic"][send.row], send.subscription))
        if batch and (
            send.due // batch_millis != batch[0].due // batch_millis
            or send.was_at // batch_millis != batch[0].was_at // batch_millis
            or len(batch) == (BATCH_MESSAGES if limit is None else min(BATCH_MESSAGES, limit.burst))
            or sizes[key] + size > BATCH_BYTES
        ):
            end(batch)
            batch.clear()
        if not batch:
            sizes[key] = 0
        batch.append(send)
        sizes[key] += size
    for batch in batches.values():
        end(batch)


def partition_of(columns: dict[str, list[Any]], row: int, partitions: int, keys: list[bytes] | None) -> int:
    """Returns the number of a row's partition: by its key, as Pulsar's Java client does, else by its position.

    Args:
        columns: of the release's rows, by name.
        row: the index of the row.
        partitions: the number of partitions.
        keys: the order key of each row, of a release that has to come in order: rows without a partition key that have
            the same order key go to the same partition. None: of another release.
    """
    key = columns["key"][row]
    if key is None and keys is not None:
        return zlib.crc32(keys[row]) % partitions
    if key is None:
        return (
            int(columns["ledger_id"][row] + columns["entry_id"][row] + max(columns["batch_index"][row], 0)) % partitions
        )
    return java_string_hash(key) % partitions


def plan_release(
    settings: Settings,
    assignment: Assignment,
    attempt: Attempt,
    partitions_now: Callable[[str], int | PulsarError] = lambda topic: 0,
) -> Plan:
    """Plans for each row of an assignment its destination, time, producer name and sequence id.

    Sequence ids and batches follow from the release alone, so they are the same in each attempt.

    Args:
        settings: the settings now; their routes name the destinations.
        assignment: the rows; the table's metadata has lanes, partitions and routes from the offset.
        attempt: says which messages to leave out.
        partitions_now: as of `Destinations`.
    """
    release = _Release(assignment)
    columns, sending = release.columns, release.sending
    destinations = Destinations(settings, sending, attempt, partitions_now)
    shaped = sending.get(SHAPED, {})
    rates = {
        (topic, int(n)): RateLimit(*rate) for topic, of in shaped.get("rates", {}).items() for n, rate in of.items()
    }
    limits = destinations.by_name(rates)
    sends: list[PlannedSend] = []
    dropped: list[PlannedSend] = []
    addressed = (columns[name] for name in ("topic", "subscription_mask", "reason", "attempt"))
    for row, (topic, mask, reason, retry) in enumerate(zip(*addressed, strict=True)):
        for destination in destinations.of_messages(topic, mask, reason is not None, retry):
            send = release.planned(row, destination)
            if (assignment.tick, send.topic, send.producer) not in attempt.done:
                (sends if send.topic else dropped).append(send)
    destinations.log_dropped()
    if release.batch_millis:
        cut_batches(sends, columns, release.batch_millis, limits)
    put_off = attempt.put_off.get((assignment.tick, assignment.kind), {})
    if put_off:
        _put_off(sends, columns["topic"], destinations.by_name(put_off), shaped.get("now", 0))
    return Plan(
        tick=assignment.tick,
        kind=assignment.kind,
        rows=release.rows,
        columns=columns,
        sends=sends,
        skipped=destinations.skipped,
        failed=tuple(destinations.failed.values()),
        has_held=any(time is not None for time in columns["was_due"]),
        limits=limits,
        unsendable=release.unsendable,
        is_put_off=bool(put_off),
        dropped=dropped,
    )


class _Release:
    """The rows of an assignment, with lanes, partitions and routes from the offset.

    Attributes:
        rows: as they were packed.
        columns: of MESSAGES, by name, with the values of all rows.
        sending: lanes, partitions and routes from the offset with which the rows were handed out.
        batch_millis: messages that are due within so many ms may be in one producer batch; 0: there are no batches.
        unsendable: by row: why it can't be sent.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self.rows = rows = assignment.rows()
        self.unsendable: dict[int, str] = {}
        self.sending: dict[str, Any] = json.loads((rows.schema.metadata or {}).get(SENDING.encode(), b"{}"))
        self.batch_millis: int = self.sending.get("batch_millis", 0)
        # An earlier version of the program packed fewer columns.
        self.columns: dict[str, list[Any]] = {name: [None] * rows.num_rows for name in MESSAGES.names}
        try:
            self.columns |= {name: rows[name].to_pylist() for name in rows.column_names}
        except UnicodeDecodeError:
            self.rows, self.unsendable = readable(rows)
            self.columns |= {name: self.rows[name].to_pylist() for name in rows.column_names}
        self._lane = assignment.lane(self.sending.get("lanes", 1), self.sending.get("lane_set", 0))
        self._places = self.columns.get(PLACE) or range(rows.num_rows)
        self._producers: dict[tuple[str, str | None, bool, bytes | None], str] = {}  # the names of producers so far
        self._keys = order_keys(rows).to_pylist() if assignment.kind & IN_ORDER else None

    def planned(self, row: int, there: Destination) -> PlannedSend:
        """Plans the message of a row for a destination, in no producer batch yet."""
        columns, keys, subscription = self.columns, self._keys, there.subscription
        due, was_due = columns["deliver_at"][row], columns["was_due"][row]
        was_at = due if was_due is None else was_due
        sequence_id = sequence_id_of(self._assignment.tick, self._places[row])
        # Dead letters are in no batch, because they are acknowledged one by one when they are re-driven.
        may_be = self.batch_millis > 0 and subscription is not None and not there.is_dead
        is_batched = may_be and may_be_batched(columns, row)
        send = PlannedSend(
            due=due,
            sequence_id=sequence_id,
            topic=self._partition(row, there) if there.partitions else there.topic,
            producer=self._producer(row, subscription, is_batched),
            row=row,
            subscription=subscription,
            is_batched=is_batched,
            at=due,
            was_at=was_at,
            first_id=sequence_id,
            is_large=not is_batched and size_of(columns, row) >= BATCH_BYTES,
            is_dead=there.is_dead,
        )
        if keys is not None and not there.is_dead:
            send.key, send.rank = (columns["topic"][row], subscription, keys[row]), rank_of(columns, row, was_at)
        return send

    def _partition(self, row: int, there: Destination) -> str:
        """Returns the name of the partition of a destination that a row goes to."""
        return partition_name(there.topic, partition_of(self.columns, row, there.partitions, self._keys))

    def _producer(self, row: int, subscription: str | None, is_batched: bool) -> str:
        """Returns the first name of the producer that sends a row, before it takes any other name."""
        version = self.columns["schema_version"][row] if subscription is not None else None
        named = (self.columns["topic"][row], subscription, is_batched, version)
        if named not in self._producers:
            app_id, shard = self._assignment.app_id, self._assignment.shard
            name = producer_name(app_id, named[0], subscription, shard, self._lane, is_batched)
            self._producers[named] = name if version is None else name + schema_suffix(named[0], version)
        return self._producers[named]


def _put_off(
    sends: list[PlannedSend], topics: list[str], by: Mapping[tuple[str, str | None], int], handed_out: int
) -> None:
    """Sends messages later than they are due.

    Args:
        sends: the messages; changed.
        topics: the source topic of each row.
        by: how much later, ms, by source topic and subscription.
        handed_out: when the messages were handed out, ms since the epoch: overdue ones are put off from this time.
    """
    for send in sends:
        if send.subscription is not None and (millis := by.get((topics[send.row], send.subscription))):
            send.at = max(send.at, handed_out) + millis


def by_time(plans: list[Plan]) -> list[tuple[PlannedSend, Plan]]:
    """Returns the messages of all plans, each with its plan, in the order in which producers get them.

    Messages are ordered by `at`, and if any was held back, then by `was_at`. Messages of one producer stay in the order
    of their sequence ids, also across ticks; messages of one key stay in the order in which they were handed out. For
    that, `at` and `was_at` of some messages are set to later times.
    """
    plans = sorted(plans, key=lambda plan: (plan.tick, plan.kind))
    if plans and (plans[0].tick < plans[-1].tick or any(plan.is_put_off for plan in plans)):
        _not_before_lower_ids(plans)
    pending = [(send, plan) for plan in plans if not plan.kind & IN_ORDER for send in plan.sends]
    pending += _in_order_of_keys([plan for plan in plans if plan.kind & IN_ORDER])
    if any(plan.has_held for plan in plans):
        pending.sort(key=lambda p: p[0].was_at)
    pending.sort(key=lambda p: p[0].at)
    return pending


def _in_order_of_keys(plans: list[Plan]) -> list[tuple[PlannedSend, Plan]]:
    """Merges the messages of plans in the order of their keys; a message is not sent before an earlier one of its key.

    Args:
        plans: in order, ascending by tick, and within a tick by kind.
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


def _not_before_lower_ids(plans: list[Plan]) -> None:
    """Puts off messages that are due before another message of their producer with a lower sequence id.

    Args:
        plans: ascending by tick; their messages are changed.
    """
    last: dict[tuple[str, str], tuple[int, int]] = {}
    for plan in plans:
        for send in plan.sends:
            key = (send.topic, send.producer)
            last[key] = send.at, send.was_at = max((send.at, send.was_at), last.get(key, (0, 0)))


def rank_of(columns: dict[str, list[Any]], row: int, was_at: int) -> tuple[int, ...]:
    """Returns a row's sort key, the same as in `tracker.messages.in_order`."""
    position = (columns[name][row] for name in ("ledger_id", "entry_id", "batch_index"))
    return columns["deliver_at"][row], was_at, columns["sequence"][row] or 0, *position


def delivery_rows(pending: list[tuple[PlannedSend, Plan]], sent_at: Sequence[int]) -> pa.Table:
    """Returns rows of the table `deliveries`, one for each message to a destination.

    Args:
        pending: the messages that were sent, with their plans.
        sent_at: for each message when it was sent, ms since the epoch.
    """
    chosen = [(send, plan, at) for (send, plan), at in zip(pending, sent_at, strict=True) if send.subscription]
    columns: dict[str, Any] = {
        name: [plan.columns[name][send.row] for send, plan, _ in chosen]
        for name in (
            *("topic", "partition", "ledger_id", "entry_id", "batch_index", "deliver_at"),
            *("attempt", "shaped_from", "occurrence"),
        )
    }
    columns["occurrence_at"] = [_occurrence_at(plan.columns, send.row) for send, plan, _ in chosen]
    columns["position"] = [str(position_of(plan.columns, send.row)) for send, plan, _ in chosen]
    columns["subscription"] = [send.subscription for send, _, _ in chosen]
    columns["sent_at"] = [at for _, _, at in chosen]
    columns["short_notice"] = [not plan.kind & PLANNED for _, plan, _ in chosen]
    columns["destination"] = [send.topic for send, _, _ in chosen]
    columns["destination_message_id"] = [None] * len(chosen)
    columns["batch_id"] = [plan.tick for _, plan, _ in chosen]
    return pa.table([pa.array(columns[f.name], f.type) for f in DELIVERIES], schema=DELIVERIES)


def _occurrence_at(columns: dict[str, list[Any]], row: int) -> int | None:
    """Returns the time after which a recurring message's next occurrence is due, ms; None: it does not recur."""
    if columns["occurrence"][row] is None:
        return None
    due = columns["deliver_at"][row] if columns["shaped_from"][row] is None else columns["shaped_from"][row]
    return max(int(due), columns["occurrence_at"][row] or 0)
