"""Takes in messages and commands, and decides where each batch ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from broker.position import START, Position
from conf.message_size import batch_millis
from conf.settings import Settings, local_path
from conf.time_zones import TIME_ZONE_DATA_VERSION
from conf.times import Moment
from status.alerts import Alerts
from status.disk_room import DiskRoom
from streaming.batch_schema import InputKind, InputRow, input_rows
from streaming.checkpoint.batch_input import BatchInput, Received
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.offset import Offset
from streaming.checkpoint.payload_files import PayloadFiles
from streaming.checkpoint.time_zone_files import TimeZoneFiles
from streaming.release.feedback import Feedback, FeedbackFile
from streaming.source.arrivals import ANY
from streaming.source.barriers import Barriers, Ends
from streaming.source.batch_end import Acknowledgements, Backlog, BatchEnds, may_rest, why_not_taking
from streaming.source.batch_shares import BatchShares, Waiting
from streaming.source.clock import MAX_REST_SECONDS, Clock, ClockSettings
from streaming.source.late_large_messages import LateLargeMessages
from streaming.source.receivers import Receivers
from streaming.source.receiving.few_rows import FewRows, table_of
from streaming.source.rejects_rounds import add_round
from streaming.source.resumed_rounds import Since, resumed_rounds, without_unwritable
from tracker.buckets.large_rows import LargeKey, LargeRule
from tracker.entry_log import ENTRY_LOG_ROWS
from tracker.messages import has_keys, has_requests
from tracker.packing import LARGE_BYTES
from tracker.requests import first_of_tick
from tracker.subscriptions import without_dead_letters
from warehouse.delta.fencing import PauseWatch
from warehouse.delta.tables import Tables
from warehouse.queries.drained_rows import shared_by
from warehouse.queries.index_rows import LOOKED_UP, large_due, large_rule, rows_due
from warehouse.routes import membership

_log = logging.getLogger(__name__)

# How often the loop that ends batches looks at the feedback and the clock; and while only what comes in can be a
# reason for a batch, which wakes it.
_POLL_SECONDS = 0.05
_REST_POLL_SECONDS = 0.25

# So many times as much of large payloads in files is dispatched in a tick: a sender alone reads them.
_FILE_SHARE = 4


@dataclass(frozen=True)
class TableIndex:
    """Answers what the clock asks of the table `delayed_index`: see `DelayedIndex`.

    Attributes:
        tables: of the warehouse.
        in_order: the source topics with messages in the order of their keys.
    """

    tables: Tables
    in_order: Sequence[str]

    def version(self) -> int:
        """Returns the newest version of the table."""
        return self.tables.version("delayed_index")

    def rows_due(self, version: int, start: int, end: int) -> list[tuple[int, int]]:
        """Returns the number of rows that are due from start to before end, by time slot."""
        return rows_due(self.tables, version, start, end)

    def large_rule(self, version: int, start: int, end: int) -> LargeRule:
        """Returns which of the rows that are due from start to before end are large."""
        return large_rule(self.tables, LARGE_BYTES, self.in_order, version, start, end)

    def large_due(self, version: int, rule: LargeRule, after: LargeKey, end: int) -> list[tuple[LargeKey, int]]:
        """Returns (key, bytes) of the large rows after a key that are due before end."""
        return large_due(self.tables, version, rule, after, end)


class Intake:
    """Receives all source topics and the control topic, and decides where batches end. Runs in the source process.

    It begins to receive with the first call that names an offset.

    Args:
        settings: of the job.
        run_id: of this run of the query.
        feedback: the file with the driver's feedback, read before each batch.
        shard_keys: Spark's key of each shard's rows, by shard number.
        tables: of the warehouse.
        alerts: records source topics that stand still, and entries that were not seen.
    """

    def __init__(
        self,
        settings: Settings,
        run_id: str,
        feedback: FeedbackFile,
        shard_keys: list[int],
        tables: Tables,
        alerts: Alerts,
    ) -> None:
        self._settings = settings
        self._run_id = run_id
        self._feedback = feedback
        self._shard_keys = shard_keys
        self._tables = tables
        self._clock = Clock(
            ClockSettings(
                run_id,
                settings.release.lookahead_millis,
                settings.tracker.max_seal_interval_millis,
                settings.tracker.load_ahead_millis,
                max_lookahead_millis=settings.release.lookahead_ceiling_millis,
                max_segment_millis=settings.tracker.max_time_step_per_bucket_snapshot_segment_seconds * 1_000,
            )
        )
        checkpoint = Checkpoint(Path(local_path(settings.checkpoint)))
        self._input = BatchInput(checkpoint.input_folder)
        self._payloads = PayloadFiles(checkpoint.payload_folder)
        self._time_zones = TimeZoneFiles(checkpoint.time_zones_folder)
        self._disk = DiskRoom(settings, alerts)
        self._receivers = Receivers(settings, tables, alerts, self._why_not_taking)
        self._shares = BatchShares(settings)
        self._late_large = LateLargeMessages(tables, alerts)
        self._sources = [route.source for route in settings.routes]
        in_order = sorted(r.source for r in settings.routes if any(s.order == "key" for s in r.subscriptions))
        self._index = TableIndex(tables, in_order)
        self._barriers = Barriers(
            self._receivers.open, settings.control.topic, self._sources, self._receivers.looked_up
        )
        self._batch_ends = BatchEnds(settings.ingest, self._clock)
        self._acknowledgements = Acknowledgements()
        # Between a batch's end and its input the driver writes the offset, in which it may hang, and be overtaken.
        self._pauses = PauseWatch(tables.check_epoch)
        # (version of delayed_index, time in ms): it has no row that is due from the load horizon to this time.
        self._nothing_due = (-1, 0)
        self._started: Offset | None = None
        self._last_commands: tuple[Offset, pa.Table] | None = None  # a batch's end, and its rows of the control topic

    def next_offset(self, last: Offset) -> Offset:
        """Waits until there is reason for a batch, and returns its end; `last` where the driver asks for no more.

        Raises:
            NewClusterError: a topic was made again, in another cluster.
        """
        self._start(last)
        self._batch_ends.note_ready(time.monotonic())
        while True:
            self._receivers.check()
            feedback = self._feedback.read()
            if feedback.is_stopping or self._receivers.stopped.is_set():
                return last
            now = Moment.now()
            seconds_left = self._batch_ends.seconds_left(now.seconds, feedback)
            has_waiting = self._barriers.has_waiting
            wakes_for_any = seconds_left <= 0 or has_waiting or bool(last.barriers)
            self._receivers.arrivals.wake_until = ANY if wakes_for_any else now.millis + self._clock.lookahead(feedback)
            commands, ends = self._barriers.take() or ({}, None)
            if ends is not None or self._is_due(last, now, feedback):
                self._batch_ends.note_end(now.seconds)
                self._pauses.check()
                positions = self._take_into_batch(last, self._takes_messages(feedback), commands)
                return self._offset(last, positions, ends, now, feedback)
            if self._barriers.has_waiting and not has_waiting:
                continue  # what they wait for may have come before the loop was to wake up for it
            poll = _POLL_SECONDS if has_waiting or self._goes_on(last, feedback) else _REST_POLL_SECONDS
            self._receivers.arrivals.wait(min(poll, seconds_left) if seconds_left > 0 else poll)

    def _is_due(self, last: Offset, now: Moment, feedback: Feedback) -> bool:
        """Whether a batch is to end now."""
        # Of hundreds of topics most have nothing.
        receivers = [r for r in list(self._receivers.open.values()) if r.waiting and not self._receivers.is_control(r)]
        backlog = Backlog(
            sum(receiver.waiting for receiver in receivers),
            sum(receiver.waiting_bytes for receiver in receivers),
            lambda soon: any(receiver.has_due(soon) for receiver in receivers),
            self._takes_messages(feedback),
            bool(resumed_rounds(last, feedback, self._settings.release.max_in_flight_messages)),
        )
        has_nothing_to_do = partial(self._has_nothing_to_do, last, now.millis, feedback)
        return self._batch_ends.is_due(backlog, last, now, feedback, has_nothing_to_do)

    def _goes_on(self, last: Offset, feedback: Feedback) -> bool:
        """Whether time, or the driver's feedback, may soon be a reason for a batch."""
        return bool(feedback.resuming[1]) or not may_rest(last, self._acknowledgements.durable, feedback)

    def _has_nothing_to_do(self, last: Offset, now: int, feedback: Feedback) -> bool:
        """Whether nothing in state comes due, nothing is in flight or loaded soon, and all that came in is durable."""
        if not may_rest(last, self._acknowledgements.durable, feedback):
            return False
        # As far as a seal epoch would load before the next check. Another program may have added rows.
        load = now + self._settings.tracker.load_ahead_millis + self._settings.tracker.max_seal_interval_millis
        version, until = self._tables.version("delayed_index"), load + int(MAX_REST_SECONDS * 1000)
        if self._nothing_due[0] != version or self._nothing_due[1] < load:
            if rows_due(self._tables, version, last.load_horizon, until):
                return False
            self._nothing_due = version, until
        return True

    def parts(self, first: Offset, last: Offset) -> list[InputRow]:
        """Packs the input of the batch between two offsets, as far as it is in this process: ticks and messages.

        Raises:
            FencedError: the driver stood still, and another job has taken the warehouse over meanwhile.
        """
        self._pauses.check()
        messages = self._received_between(first, last).messages
        content: list[tuple[InputKind, Any]] = [
            (InputKind.TICK, last.to_json() | {"positions": {}, "barriers": []}),
            *((InputKind.TIME_ZONES, packed) for packed in self._time_zones.other(last)),
            (InputKind.MESSAGES, messages),
        ]
        if has_keys(messages):
            content.append((InputKind.NOTES, messages.select(ENTRY_LOG_ROWS.names)))
        if has_requests(messages):
            content.append((InputKind.MESSAGE_REQUESTS, first_of_tick(messages)))
        return [row for kind, of_kind in content for row in input_rows(kind, of_kind, self._shard_keys)]

    def control_messages(self, first: Offset, last: Offset) -> pa.Table:
        """Returns the messages of the control topic between two offsets, as MESSAGES."""
        if self._last_commands is not None and self._last_commands[0] is last:
            return self._last_commands[1]  # they are asked for after the batch's messages
        return self._received_between(first, last).commands

    def has_segment(self, first: Offset, last: Offset) -> bool:
        """Whether the delayed index has rows between the load horizons of two offsets."""
        return first.load_horizon < last.load_horizon and bool(
            rows_due(self._tables, last.index_version, first.load_horizon, last.load_horizon)
        )

    def commit(self, end: Offset) -> None:
        """Forgets the input of the batches up to an offset, and acknowledges durable entries in the background."""
        self._input.forget(end)
        self._last_commands = None
        self._receivers.forget(end.positions)
        durable = self._acknowledgements.note_commit(end.durable_through)
        if durable is not None:
            self._receivers.acknowledge(durable)

    def stop(self) -> None:
        """Stops receiving, and closes the connection."""
        self._receivers.stop()

    def _start(self, at: Offset) -> None:
        if self._started is None:
            self._started = at
            self._receivers.begin(at)

    def _received_between(self, first: Offset, last: Offset) -> Received:
        """Returns the messages between two offsets; of a batch that runs again the same as before."""
        received = self._input.read(last)
        if received is not None:
            self._start(last)
            return received
        self._start(first)
        messages = self._received_rows(first, last, is_control=False)
        received = Received(
            self._payloads.put_aside(messages, last.tick, is_synced=True),
            self._received_rows(first, last, is_control=True),
        )
        self._input.write(last, received)
        self._last_commands = last, received.commands
        return received

    def _received_rows(self, first: Offset, last: Offset, is_control: bool) -> pa.Table:
        kept: list[pa.Table | FewRows] = []
        for name, end in last.positions.items():
            before = first.positions.get(name, str(START))
            if before == end:
                continue
            after = Position.parse(before)
            receiver = self._receivers.after(name, after)
            if self._receivers.is_control(receiver) == is_control:
                kept += receiver.kept_rows(after, Position.parse(end))
        return table_of(kept).combine_chunks()

    def _takes_messages(self, feedback: Feedback) -> bool:
        """Whether batches take messages: not while the senders are behind, or a disk is full: they wait in Pulsar."""
        return (
            why_not_taking(feedback, self._settings.release.max_in_flight_messages, self._disk.why_short()) is None
            and self._receivers.has_read_old_commands()
        )

    def _why_not_taking(self) -> str | None:
        """Returns why batches take no messages now; None: they do."""
        most, short = self._settings.release.max_in_flight_messages, self._disk.why_short()
        return why_not_taking(self._feedback.read(), most, short, self._receivers.old_commands)

    def _take_into_batch(self, last: Offset, takes_messages: bool, commands: Mapping[str, Position]) -> dict[str, str]:
        """Takes messages into a batch, up to its size, shared fairly among topic partitions.

        Args:
            last: the offset before.
            takes_messages: whether the batch takes messages of source topics.
            commands: the last entry to take of each partition of the control topic; empty: the batch takes no commands.

        Returns:
            by topic partition the last entry of the batch. Those with nothing that waits stay where they are.
        """
        receivers = list(self._receivers.open.items())
        control = {name for name, receiver in receivers if self._receivers.is_control(receiver)}
        waiting = [
            Waiting(name, receiver, name in control)
            for name, receiver in receivers
            if receiver.waiting and (name in commands if name in control else takes_messages)
        ]
        taken = self._shares.take(last.tick + 1, waiting, commands, len(control), self._feedback.read())
        return last.positions | {name: str(end) for name, end in taken.items()}

    def _offset(
        self,
        last: Offset,
        positions: dict[str, str],
        ends: Ends | None,
        now: Moment,
        feedback: Feedback,
    ) -> Offset:
        offset = self._clock.next(last, now, feedback, self._index)
        keyed = {*last.keyed, *(r.source.topic for r in list(self._receivers.open.values()) if r.has_keys)}
        offset = replace(
            offset,
            positions=positions,
            destinations=self._receivers.destinations,
            lanes=self._settings.release.lanes,
            batch_millis=batch_millis(self._settings),
            max_bytes=max(1, self._settings.ingest.max_bytes_per_batch // len(self._shard_keys)),
            max_file_bytes=max(1, _FILE_SHARE * self._settings.ingest.max_bytes_per_batch // len(self._shard_keys)),
            max_delay_millis=self._settings.tracker.max_delay_millis,
            keyed=sorted(keyed),
            newly_keyed=sorted(keyed.difference(last.keyed)) if len(self._shard_keys) > 1 else [],
            time_zone_data=TIME_ZONE_DATA_VERSION,
            **self._routes(last),
        )
        if last.run_id != self._run_id:
            self._time_zones.keep(last.time_zone_data)
        if last.time_zone_data not in ("", TIME_ZONE_DATA_VERSION):
            _log.warning(
                "time zones are now those of %s, before of %s: of recurring messages the next occurrence stays as it "
                "is, and those after it go by the new ones",
                TIME_ZONE_DATA_VERSION,
                last.time_zone_data,
            )
        has_earlier_commands = any(of_topic["handed_out"] >= 0 for of_topic in offset.changed.values())
        if ends is not None or has_earlier_commands or offset.newly_keyed:
            offset = replace(offset, lookup_versions=[self._tables.version(name) for name in LOOKED_UP])
        if self._settings.release.unwritable == "wait":
            offset = replace(offset, unwritable=_waiting(offset.unwritable))
        reinstated = _pairs(last.unwritable) - _pairs(offset.unwritable)
        if reinstated:
            reinstated |= {(topic, name) for topic, name in offset.reinstated}
            pairs = [list(pair) for pair in sorted(reinstated)]
            offset = replace(offset, reinstated=pairs, held_version=self._tables.version("delayed_index"))
        rounds = resumed_rounds(last, feedback, self._settings.release.max_in_flight_messages)
        rounds = without_unwritable(rounds, offset.unwritable)
        if drains := _drains(last.unwritable, offset.unwritable, rounds):
            version = offset.held_version or self._tables.version("delayed_index")
            offset = replace(offset, drains=drains, drained_before=rounds, held_version=version)
        if ends is None and (offset.reinstated or offset.lookup_versions):
            # Commands begin to wait in this tick, too: for messages that are published until the ends are known.
            ends = dict.fromkeys(self._sources)
        offset = self._barriers.advance(last, offset, ends)
        offset = add_round(offset, last, feedback, self._tables)
        if offset.seal_epoch != last.seal_epoch:
            self._acknowledgements.note_seal_epoch(offset.seal_epoch, positions)
        self._late_large.look(offset)
        return offset

    def _routes(self, last: Offset) -> dict[str, Any]:
        """Returns an offset's fields about routes; the first offset of a run has the changes of the settings."""
        if last.run_id == self._run_id:
            return {"routes": last.routes}
        before = last.known_routes
        routes = before.updated_to(self._settings)
        reinstated = [list(pair) for pair in routes.reinstated_since(before)] if before.routes else []
        # After a rebuild (no run yet) messages that are due from the load horizon on are dispatched again.
        handed_out = last.cutoff if last.run_id else last.load_horizon - 1
        changed = membership.changes(before, routes, handed_out, last.positions)
        # Subscriptions that are new since before a rebuild are new to the commands, too.
        changed = changed if last.run_id else last.changed | changed
        return {"routes": routes.to_json(), "reinstated": reinstated, "changed": changed}


def _pairs(unwritable: Mapping[str, Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Returns the recipients (source topic, subscription) whose due messages wait, as the destination can't be written.

    Dead letters do not wait: they are dispatched, and stay open.
    """
    return {
        (topic, name)
        for topic, names in unwritable.items()
        for name, one in names.items()
        if "rejects" not in one and not without_dead_letters(name)[1]
    }


def _drains(
    before: Mapping[str, Mapping[str, Any]], unwritable: Mapping[str, Mapping[str, Any]], resumed: Since
) -> dict[str, dict[str, int]]:
    """Returns `Offset.drains`.

    Args:
        before: `Offset.unwritable` of the last offset.
        unwritable: the same of this one. A slow recipient has a round when the driver has asked for it in between.
        resumed: the resumed subscriptions that have one.
    """
    most = shared_by(sum(map(len, resumed.values()))).rows
    found: dict[str, dict[str, int]] = {topic: dict.fromkeys(names, most) for topic, names in resumed.items()}
    for topic, names in unwritable.items():
        for name, one in names.items():
            if one.get("round", 0) > before.get(topic, {}).get(name, {}).get("round", 0):
                found.setdefault(topic, {})[name] = one["most"]
    return found


def _waiting(unwritable: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns an offset's `unwritable` after `release.unwritable` was changed from `reject` to `wait`.

    No recipient rejects any more. A recipient that did has nothing open, because its open messages have been rejected.
    """
    return {
        topic: {name: {"since": one["since"], "open": []} if "rejects" in one else one for name, one in names.items()}
        for topic, names in unwritable.items()
    }
