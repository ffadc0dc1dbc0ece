"""Plans for each row of a release its destination, time, producer name, sequence id, and producer batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from broker.client import PulsarError
from conf.partitions import partition_name
from conf.settings import Settings
from streaming.release.attempt import Assignment, Attempt
from streaming.release.naming import producer_name, schema_suffix
from streaming.release.outgoing import cause_of
from streaming.release.sequence_ids import sequence_id_of
from streaming.release.task.planning.batches import BATCH_BYTES, cut_batches, may_be_batched, size_of
from streaming.release.task.planning.destinations import Destination, Destinations
from streaming.release.task.planning.partitions import partition_of
from streaming.release.task.planning.send_plan import Plan, PlannedSend
from streaming.release.task.planning.sending_order import rank_of
from streaming.release.task.shared_paces import RateLimit
from tracker.in_flight import IN_ORDER, PLACE, SENDING
from tracker.key_order import order_keys
from tracker.messages import MESSAGES
from tracker.readable import readable
from tracker.shaping.spans import SHAPED

# The columns of a message's content.
_CONTENT = ("key", "ordering_key", "ordering_key_bytes", "properties", "payload", "schema_version")


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
        for destination in destinations.of_message(topic, mask, reason is not None, retry):
            send = release.planned_alone(row, destination)
            if (assignment.tick, send.topic, send.producer) not in attempt.done:
                (sends if send.topic else dropped).append(send)
    destinations.log_dropped()
    if release.batch_millis:
        cut_batches(sends, columns, release.batch_millis, limits)
    if attempt.put_off:
        _put_off(sends, columns["topic"], destinations.by_name(attempt.put_off), shaped.get("now", 0))
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

    def planned_alone(self, row: int, there: Destination) -> PlannedSend:
        """Plans the message of a row; one that can't be planned as it is becomes unsendable, without content."""
        try:
            return self.planned(row, there)
        except MemoryError:
            raise
        except Exception as error:
            self.unsendable[row] = cause_of(error)
            for name in _CONTENT:
                self.columns[name][row] = None
            return self.planned(row, there)

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
