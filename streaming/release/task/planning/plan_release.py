"""Plans for each row of a release its destination, time, producer name, sequence id, and producer batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.client import PulsarError
from conf.message_size import BATCH_BYTES
from conf.partitions import partition_name
from conf.settings import Settings
from streaming.checkpoint.payload_files import PayloadFiles, Payloads
from streaming.release.attempt import Assignment, Attempt
from streaming.release.naming import producer_name, schema_suffix
from streaming.release.sequence_ids import sequence_id_of
from streaming.release.task.planning.batches import cut_batches
from streaming.release.task.planning.contents import CONTENT, contents_of, has_values
from streaming.release.task.planning.destinations import Destination, Destinations
from streaming.release.task.planning.groups import groups_of
from streaming.release.task.planning.partitions import partitions_of
from streaming.release.task.planning.send_plan import Plan, PlannedLine, Sends, columns_of, planned_sends
from streaming.release.task.shared_paces import RateLimit
from tracker.in_flight import IN_ORDER, PLACE, SENDING, SUBSCRIPTION_MASK
from tracker.messages import Int64Array, int64, is_rejected, order_keys, readable
from tracker.payload_refs import has_refs, refs_of
from tracker.shaping.token_bucket import SHAPED


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
    destinations = Destinations(settings, release.sending, attempt, partitions_now)
    shaped = release.sending.get(SHAPED, {})
    rates = {
        (topic, int(n)): RateLimit(*rate) for topic, of in shaped.get("rates", {}).items() for n, rate in of.items()
    }
    limits = destinations.by_name(rates)
    lines, sends = release.planned(*release.addressed(destinations))
    destinations.log_dropped()
    done = np.array([(assignment.tick, *line.key) in attempt.done for line in lines], np.bool_)
    is_gone = np.array([not line.topic for line in lines], np.bool_)
    dropped = planned_sends(lines, sends.take((is_gone & ~done)[sends.line])) if is_gone.any() else []
    if (left_out := is_gone | done).any():
        sends = sends.take(~left_out[sends.line])
    if release.batch_millis:
        of_lines = [limits.get((line.source, line.subscription)) for line in lines]
        cut_batches(sends, lines, release.contents.sizes[sends.row], release.batch_millis, of_lines)
    put_off = attempt.put_off.get((assignment.tick, assignment.kind), {})
    if put_off:
        _put_off(sends, lines, destinations.by_name(put_off), shaped.get("now", 0))
    return Plan(
        tick=assignment.tick,
        kind=assignment.kind,
        rows=release.rows,
        columns=release.columns(settings),
        lines=lines,
        sends=sends,
        payload_bytes=release.contents.payload_bytes,
        skipped=destinations.skipped,
        failed=tuple(destinations.failed.values()),
        has_held=has_values(release.rows, "was_due"),
        limits=limits,
        order_keys=release.order_keys,
        is_put_off=bool(put_off),
        unsendable=release.unsendable,
        dropped=dropped,
    )


class _Release:
    """The rows of an assignment, with lanes, partitions and routes from the offset.

    Attributes:
        rows: as they were packed; what can't be read is null.
        sending: lanes, partitions and routes from the offset with which the rows were dispatched.
        batch_millis: messages that are due within so many ms may be in one producer batch; 0: there are no batches.
        contents: of the rows.
        order_keys: the order key of each row, of a release that has to come in order; None: of another release.
        unsendable: by row: why it can't be sent.
        blank: those of these rows that are planned as if they had no content.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        rows = assignment.rows()
        self.sending: dict[str, Any] = json.loads((rows.schema.metadata or {}).get(SENDING.encode(), b"{}"))
        self.batch_millis: int = self.sending.get("batch_millis", 0)
        self.order_keys: list[bytes] | None = order_keys(rows).to_pylist() if assignment.kind & IN_ORDER else None
        self.rows, self.unsendable = readable(rows)
        self.contents, self.blank = contents_of(self.rows)
        self.unsendable |= self.blank
        self._lane = assignment.lane(self.sending.get("lanes", 1), self.sending.get("lane_set", 0))

    def columns(self, settings: Settings) -> dict[str, Sequence[Any]]:
        """Returns the columns of which messages are built; payloads in files are read when they are asked for."""
        columns: dict[str, Sequence[Any]] = {**columns_of(self.rows, self.blank, CONTENT)}
        if has_refs(self.rows):
            refs = {row: ref for row, ref in refs_of(self.rows).items() if row not in self.blank}
            columns["payload"] = Payloads(columns["payload"], refs, PayloadFiles.of(settings))
        return columns

    def addressed(self, destinations: Destinations) -> tuple[Int64Array, Int64Array, list[tuple[str, Destination]]]:
        """Finds the destinations of all rows.

        Returns:
            (rows, numbers, destinations): the index of each message's row, int64, (messages,), ascending; the number of
            its destination, int64, (messages,); by number the source topic and the destination.
        """
        rows = self.rows
        topics = rows["topic"].combine_chunks().dictionary_encode("encode")
        names = topics.dictionary.to_pylist()
        of_topic, masks, rejected = topics.indices.to_numpy(), int64(rows, SUBSCRIPTION_MASK), is_rejected(rows)
        attempts = np.full(rows.num_rows, -1, np.int64)
        if has_values(rows, "attempt"):
            attempts = pc.fill_null(rows["attempt"].cast(pa.int64()), -1).to_numpy()
        groups, examples = groups_of(of_topic, masks, rejected, attempts)
        counts = np.bincount(groups, minlength=len(examples)).tolist()
        found: dict[tuple[str, Destination], int] = {}
        numbers: list[int] = []  # of the destinations of each group, one group after another
        ends = [0]
        for row, n in zip(examples.tolist(), counts, strict=True):
            topic, retry = names[of_topic[row]], int(attempts[row])
            attempt = None if retry < 0 else retry
            of_group = destinations.of_messages(topic, int(masks[row]), bool(rejected[row]), attempt, n)
            numbers += [found.setdefault((topic, destination), len(found)) for destination in of_group]
            ends.append(len(numbers))
        begins = np.array(ends, np.int64)
        of_rows = np.diff(begins)[groups]
        chosen = np.repeat(np.arange(rows.num_rows), of_rows)
        nth = np.arange(len(chosen)) - np.repeat(np.cumsum(of_rows) - of_rows, of_rows)
        return chosen, np.array(numbers, np.int64)[begins[:-1][groups[chosen]] + nth], list(found)

    def planned(
        self, row: Int64Array, number: Int64Array, destinations: Sequence[tuple[str, Destination]]
    ) -> tuple[list[PlannedLine], Sends]:
        """Plans messages, in no producer batch yet; the arguments are what `addressed` returns."""
        are_small = self.contents.sizes < BATCH_BYTES
        # A consumer of type Key_Shared gets whole batches, so messages with a key must not be in one. Dead letters are
        # in no batch, because they are acknowledged one by one when they are re-driven.
        may_be = np.array(
            [self.batch_millis > 0 and to.subscription is not None and not to.is_dead for _, to in destinations],
            np.bool_,
        )
        are_batched = may_be[number] & (are_small & ~self.contents.have_keys)[row]
        versions, of_version = self._schema_versions()
        has_schema = np.array([to.subscription is not None for _, to in destinations], np.bool_)
        version = np.where(has_schema[number], of_version[row], -1)
        partition = self._partitions(row, number, destinations)
        line, examples = groups_of(number, are_batched, version, partition)
        lines = [
            self._line(destinations[number[i]], bool(are_batched[i]), versions[version[i]], int(partition[i]))
            for i in examples.tolist()
        ]
        due = int64(self.rows, "deliver_at")
        was_due = pc.coalesce(self.rows["was_due"], self.rows["deliver_at"]).to_numpy() if self._has_held else due
        sequence_id = self._sequence_ids(row)
        return lines, Sends(
            row=row,
            line=line,
            due=due[row],
            sequence_id=sequence_id,
            at=due[row],
            was_at=was_due[row],
            first_id=sequence_id.copy(),
            is_last=np.ones(len(row), np.bool_),
            is_large=~are_batched & ~are_small[row],
            n_places=np.ones(len(row), np.int64),
        )

    @property
    def _has_held(self) -> bool:
        return has_values(self.rows, "was_due")

    def _sequence_ids(self, row: Int64Array) -> Int64Array:
        """Returns the sequence ids of messages, by the index of their rows; raises as `sequence_id_of` does."""
        has_places = PLACE in self.rows.column_names
        places = int64(self.rows, PLACE)[row] if has_places else row
        if not len(places):
            return places
        sequence_id_of(self._assignment.tick, int(places.min()))
        sequence_id_of(self._assignment.tick, int(places.max()))
        return places + sequence_id_of(self._assignment.tick, 0)

    def _schema_versions(self) -> tuple[list[bytes | None], Int64Array]:
        """Returns the versions of schemas, the last is None; and the index of each row's version, -1: it has none."""
        if not has_values(self.rows, "schema_version"):
            return [None], np.full(self.rows.num_rows, -1, np.int64)
        encoded = self.rows["schema_version"].combine_chunks().dictionary_encode()
        of_rows = pc.fill_null(encoded.indices, -1).to_numpy().astype(np.int64)
        of_rows[list(self.blank)] = -1
        return [*encoded.dictionary.to_pylist(), None], of_rows

    def _partitions(
        self, row: Int64Array, number: Int64Array, destinations: Sequence[tuple[str, Destination]]
    ) -> Int64Array:
        """Returns the partition of the destination to which each message goes; -1: it has none."""
        found = np.full(len(row), -1, np.int64)
        for i, (_, to) in enumerate(destinations):
            if to.partitions:
                there = np.flatnonzero(number == i)
                found[there] = partitions_of(
                    self.rows, row[there], to.partitions, self.contents.key_hashes, self.order_keys
                )
        return found

    def _line(
        self, there: tuple[str, Destination], is_batched: bool, version: bytes | None, partition: int
    ) -> PlannedLine:
        source, to = there
        shard = self._assignment.shard
        name = producer_name(self._assignment.app_id, source, to.subscription, shard, self._lane, is_batched)
        return PlannedLine(
            topic=partition_name(to.topic, partition),
            producer=name if version is None else name + schema_suffix(source, version),
            source=source,
            subscription=to.subscription,
            is_batched=is_batched,
            is_dead=to.is_dead,
            schema_version=version,
        )


def _put_off(
    sends: Sends, lines: Sequence[PlannedLine], by: Mapping[tuple[str, str | None], int], handed_out: int
) -> None:
    """Sends messages later than they are due.

    Args:
        sends: the messages; changed.
        lines: of these messages.
        by: how much later, ms, by source topic and subscription.
        handed_out: when the messages were dispatched, ms since the epoch: overdue ones are put off from this time.
    """
    of_lines = [by.get((line.source, line.subscription), 0) if line.subscription is not None else 0 for line in lines]
    millis = np.array(of_lines, np.int64)[sends.line]
    sends.at = np.where(millis != 0, np.maximum(sends.at, handed_out) + millis, sends.at)
