"""Faults that are planted in the service one at a time: the simulator is worth something if it finds each of them."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

import streaming.source.reader
import warehouse.delta.commits
from admin.control import bulk
from broker.position import START, Position
from broker.protocol.building import Chunks
from broker.protocol.chunks import ChunkAssembler, Whole
from broker.protocol.producer import EntryProducer
from broker.protocol.sending import Sending
from checkpoint_from_tables import new_checkpoint
from checkpoint_from_tables.importing import topics
from checkpoint_from_tables.importing.importer import Importer
from checkpoint_from_tables.other_systems import importing
from checkpoint_from_tables.rebuild import changes, last_answers, rebuild
from checkpoint_from_tables.restore import another_broker
from conf.partitions import without_partition
from streaming import crash_recovery, start_checks
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.offset import UNKNOWN, Offset
from streaming.release.driver.release_records import ReleaseRecords
from streaming.release.driver.releases import Progress, Releases
from streaming.release.driver.spark_jobs import SparkJobs
from streaming.release.driver.unwritable_destinations import UnwritableDestinations
from streaming.release.driver.unwritable_retries import UnwritableRetries
from streaming.release.naming import producer_name
from streaming.release.task import send_on_time, sender
from streaming.release.task.planning import plan_release, sending_order
from streaming.release.task.planning.destinations import Destinations
from streaming.release.task.planning.plan_release import _Release
from streaming.release.task.producer_line import Line
from streaming.release.task.shared_paces import Pace
from streaming.sinks import batch_sink, outcomes
from streaming.sinks.batch_sink import BatchSink
from streaming.sinks.outcomes import OutcomePublisher
from streaming.source.batch_end import Acknowledgements
from streaming.source.clock import Clock
from streaming.source.discovery import Discovery
from streaming.source.intake import Intake
from streaming.source.reader import SourceReader
from streaming.source.receivers import Receivers
from streaming.source.receiving import acknowledgements as receiver_acknowledgements
from streaming.source.receiving.receiver import Receiver
from streaming.source.receiving.unreadable_messages import Acceptance
from streaming.source.watch.source_watch import SourceWatch
from tests.simulation import rebuilding
from tests.simulation.broker import Cluster
from tests.simulation.faults import USUAL_RATES
from tests.simulation.oracle import Oracle
from tracker import expiry, requests, shard, sharding
from tracker.buckets.time_slots import SLOT_MILLIS
from tracker.commands import decode
from tracker.commands.decide import NEW_TIMES
from tracker.commands.occurrences import Occurrences
from tracker.commands.repeats import Repeats, RequestLog
from tracker.commands.waiting import WaitingCommands
from tracker.expiry import Expiring
from tracker.in_flight import InFlight
from tracker.keys import superseding
from tracker.keys.live_keys import LiveKeys
from tracker.keys.superseding import KeyedMessages
from tracker.message_state.changes import CancelledMessages, Moved
from tracker.message_state.parking import Parking
from tracker.messages import empty_table, where, with_columns
from tracker.properties import Mode
from tracker.recurrence.columns import NEVER
from tracker.requests import MessageRequests
from tracker.schemas import COMMAND_ROWS, OUTCOME_ROWS
from tracker.shaping.shaper import Shaper
from tracker.shaping.token_bucket import OpenTime
from tracker.shard import Shard
from tracker.wire.delaylake_pb2 import Result
from warehouse import unseen_entries
from warehouse.audit import accounts as audit
from warehouse.backup import copying
from warehouse.delta.fencing import PauseWatch
from warehouse.delta.snapshot import Snapshot
from warehouse.delta.tables import Tables
from warehouse.maintenance import retention
from warehouse.maintenance.retention import Retention
from warehouse.named_queries import Sql
from warehouse.queries import drained_rows, pending_rows
from warehouse.queries.index_rows import read_light_segment
from warehouse.routes.known_routes import KnownRoutes

Planted = contextlib.AbstractContextManager[Any]


def _after(target: Any, name: str, change: Callable[..., Any]) -> Planted:
    """Replaces a function by one that is given its result, and then its arguments."""
    original = getattr(target, name)

    def changed(*args: Any, **named: Any) -> Any:
        return change(original(*args, **named), *args, **named)

    return mock.patch.object(target, name, changed)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _epoch_not_checked() -> Planted:
    return mock.patch.object(Tables, "_check", _nothing)


@contextlib.contextmanager
def _sent_without_a_look_at_the_epoch() -> Iterator[None]:
    with (
        mock.patch.object(PauseWatch, "check", _nothing),
        mock.patch.object(SparkJobs, "check_epoch", return_value=0.0),
        mock.patch.object(Tables, "_check", _nothing),
    ):
        yield


def _acknowledged_before_durable() -> Planted:
    def note_commit(self: Acknowledgements, durable_through: int) -> Any:
        return self._positions.pop(max(self._positions)) if self._positions else None

    return mock.patch.object(Acknowledgements, "note_commit", note_commit)


def _acknowledged_one_too_far() -> Planted:
    original = Receiver.acknowledge
    return mock.patch.object(Receiver, "acknowledge", lambda self, last: original(self, last.next))


def _acknowledged_in_all_partitions() -> Planted:
    original = Receivers.acknowledge

    def acknowledge(self: Receivers, positions: Mapping[str, str]) -> None:
        last: dict[str, Position] = {}
        for name, position in positions.items():
            topic = without_partition(name)
            last[topic] = max(last.get(topic, START), Position.parse(position))
        original(self, {name: str(last[without_partition(name)]) for name in positions})

    return mock.patch.object(Receivers, "acknowledge", acknowledge)


def _read_on_after_another_partition() -> Planted:
    original = Receivers.after
    last: dict[tuple[Receivers, str], Position] = {}

    def after(self: Receivers, name: str, position: Position) -> Receiver:
        key = self, without_partition(name)
        last[key] = max(last.get(key, START), position)
        return original(self, name, last[key])

    return mock.patch.object(Receivers, "after", after)


def _sequence_ids_from_a_counter() -> Planted:
    count = itertools.count(1, 1 << 12)

    def sequence_ids(self: _Release, row: Any) -> Any:
        return np.arange(len(row)) + next(count) + (1 << 40)

    return mock.patch.object(_Release, "_sequence_ids", sequence_ids)


def _sequence_ids_without_their_tick() -> Planted:
    return _after(_Release, "_sequence_ids", lambda ids, self, row: (ids & ((1 << 22) - 1)) + (1 << 22))


def _offset_and_input_not_forced() -> Planted:
    return mock.patch.object(Checkpoint, "sync_begun", _nothing)


def _commits_not_forced() -> Planted:
    return mock.patch.object(warehouse.delta.commits, "_first_unsynced", lambda synced_to, version: version + 1)


def _commits_of_the_killed_not_forced() -> Planted:
    return mock.patch.object(warehouse.delta.commits, "_first_unsynced", lambda synced_to, version: version)


def _confirmed_before_written() -> Planted:
    def progress(found: Progress, self: Releases, soon: int) -> Progress:
        last = max((tick for tick, _ in self._accepted), default=found.confirmed)
        return replace(found, confirmed=max(found.confirmed, last))

    return _after(Releases, "progress", progress)


def _confirmed_one_tick_too_far() -> Planted:
    original = InFlight.confirm_releases
    return mock.patch.object(
        InFlight, "confirm_releases", lambda self, tick, *others: original(self, tick + 1, *others)
    )


def _nothing_dispatched_again() -> Planted:
    return mock.patch.object(InFlight, "all_releases", return_value=[])


def _segment_begins_a_slot_too_late() -> Planted:
    original = read_light_segment

    def read(tables: Any, version: int, start: int, end: int, rule: Any) -> Any:
        return original(tables, version, start + SLOT_MILLIS, end, rule)

    return mock.patch.object(streaming.source.reader, "read_light_segment", read)


def _segment_ends_a_slot_too_late() -> Planted:
    original = read_light_segment

    def read(tables: Any, version: int, start: int, end: int, rule: Any) -> Any:
        return original(tables, version, start, end + 5 * SLOT_MILLIS, rule)

    return mock.patch.object(streaming.source.reader, "read_light_segment", read)


def _buckets_not_written() -> Planted:
    def output(rows: Any, table: str) -> Any:
        return rows

    original = BatchSink._append

    def append(self: BatchSink, table: str, rows: Any, tick: int) -> None:
        if table != "delayed_index" or tick % 3:
            original(self, table, output(rows, table), tick)

    return mock.patch.object(BatchSink, "_append", append)


def _rows_of_a_tick_written_again() -> Planted:
    original = Tables.append
    return mock.patch.object(Tables, "append", lambda self, name, rows, versions: original(self, name, rows, {}))


def _a_replay_sends() -> Planted:
    original = BatchSink.__call__

    def call(self: BatchSink, batch: Any, number: int) -> None:
        with mock.patch.object(BatchSink, "_append", BatchSink._append):
            self._run_id = _Any()
            original(self, batch, number)

    return mock.patch.object(BatchSink, "__call__", call)


class _Any(str):
    """Is equal to each run's id."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


def _deduplication_off() -> Planted:
    def store(self: Cluster, topic: Any, name: str, entry: Any, data: bytes) -> Any:
        topic.last_ids.pop(name, None)
        return original(self, topic, name, entry, data)

    original = Cluster.store
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(Cluster, "store", store))
    # Nor does such a broker know a producer's last id.
    stack.enter_context(_after(Cluster, "produce", lambda *_: -1))
    return stack


def _forgotten_for_good() -> Planted:
    of_topics: dict[Any, set[str]] = {}

    def forget(self: Cluster, topic: Any) -> None:
        before = {*topic.seen_at}
        original(self, topic)
        of_topics.setdefault(topic, set()).update(before - {*topic.seen_at})

    def store(self: Cluster, topic: Any, name: str, entry: Any, data: bytes) -> Any:
        if name in of_topics.get(topic, ()):
            topic.last_ids.pop(name, None)
        return store_it(self, topic, name, entry, data)

    original, store_it = Cluster._forget_unused, Cluster.store
    return mock.patch.multiple(Cluster, _forget_unused=forget, store=store)


def _two_lanes_with_one_name() -> Planted:
    original = producer_name

    def name(app: str, source: str, subscription: str | None, shard: int, lane: str, is_batched: bool) -> str:
        return original(app, source, subscription, shard, "lane", is_batched)

    return mock.patch.object(plan_release, "producer_name", name)


def _two_shards_with_one_name() -> Planted:
    original = producer_name

    def name(app: str, source: str, subscription: str | None, shard: int, lane: str, is_batched: bool) -> str:
        return original(app, source, subscription, 0, lane, is_batched)

    return mock.patch.object(plan_release, "producer_name", name)


def _names_of_each_attempt() -> Planted:
    def with_attempt(name: str, *_: Any) -> str:
        return f"{name}-again" if sender._is_repeated_task() else name

    return _after(plan_release, "producer_name", with_attempt)


def _of_many_that_a_command_names_one_is_left_out() -> Planted:
    original: Any = vars(decode._Request)["entries"].fget

    def entries(self: decode._Request) -> Any:
        found = original(self)
        return found[:-1] if len(found) > 1 else found

    return mock.patch.object(decode._Request, "entries", property(entries))


def _summed_up_one_too_few() -> Planted:
    def one_fewer(rows: Any, *_: Any) -> Any:
        n = rows["n_named"].to_numpy()
        fewer = pa.array(np.maximum(n - 1, np.minimum(n, 1)))
        return rows.set_column(rows.schema.get_field_index("n_named"), "n_named", fewer)

    return _after(outcomes, "to_publish", one_fewer)


def _none_named_is_the_first_alone() -> Planted:
    original = decode._rows

    def rows(request: Any, positions: Any, keys: Any, routes: Any, newest: Any) -> Any:
        if not request.command.subscriptions:
            request.command.subscriptions.append(routes[request.command.topic][0].name)
        return original(request, positions, keys, routes, newest)

    return mock.patch.object(decode, "_rows", rows)


def _sent_early() -> Planted:
    def early(entries: Any, *_: Any) -> Any:
        for entry in entries:
            entry.at -= 300
        return entries

    return _after(send_on_time, "_entries", early)


def _unanswered_counts_as_arrived() -> Planted:
    return mock.patch.object(Sending, "has_arrived", property(lambda self: True))


def _a_lost_task_counts_as_done() -> Planted:
    original = SparkJobs.run

    def run(self: SparkJobs, *args: Any) -> Any:
        try:
            return original(self, *args)
        except Exception:
            return []

    return mock.patch.object(SparkJobs, "run", run)


def _made_again_and_taken_for_the_one_before() -> Planted:
    """An entry has come before whose number in its ledger has, whatever its ledger."""

    def was_taken_in(self: receiver_acknowledgements.Acknowledgements, position: Position) -> bool:
        return position.entry_id <= self._taken_in_to.entry_id

    return mock.patch.object(receiver_acknowledgements.Acknowledgements, "was_taken_in", was_taken_in)


def _keyed_messages_in_order_of_their_entries_alone() -> Planted:
    """A message with a schedule key was there before another one if its number in its ledger is lower."""

    def is_after(self: superseding._KeyState, position: Any) -> bool:
        return self.row is None and position.entry_id < self.message.position.entry_id

    return mock.patch.object(superseding._KeyState, "is_after", is_after)


def _not_taken_by_a_slow_one_counts_as_sent() -> Planted:
    original = UnwritableRetries.leave

    def leave(self: Any, reasons: Any, remainders: Any, slow: Any = ()) -> None:
        original(self, {one: why for one, why in reasons.items() if one not in slow}, remainders, slow)

    return mock.patch.object(UnwritableRetries, "leave", leave)


def _not_taken_by_a_terminated_one_counts_as_sent() -> Planted:
    original = UnwritableRetries.leave

    def leave(self: Any, reasons: Any, remainders: Any, slow: Any = ()) -> None:
        original(self, {one: why for one, why in reasons.items() if "terminated" not in why}, remainders, slow)

    return mock.patch.object(UnwritableRetries, "leave", leave)


def _durable_before_settled() -> Planted:
    original = Clock.next

    def following(self: Clock, last: Any, at: Any, feedback: Any, index: Any) -> Any:
        return original(self, last, at, replace(feedback, settled=1 << 50, next_due=None), index)

    return mock.patch.object(Clock, "next", following)


def _durable_while_what_came_overdue_waits() -> Planted:
    original = Clock.next

    def following(self: Clock, last: Offset, at: Any, feedback: Any, index: Any) -> Offset:
        offset = original(self, last, at, feedback, index)
        if offset.seal_epoch == last.seal_epoch:
            return offset
        return replace(offset, marks=[*offset.marks[:-1], [*offset.marks[-1][:2], last.near_until]])

    return mock.patch.object(Clock, "next", following)


def _durable_before_confirmed() -> Planted:
    original = Clock.next

    def following(self: Clock, last: Offset, at: Any, feedback: Any, index: Any) -> Any:
        known = replace(last, marks=[[number, 0, time] for number, _, time in last.marks])
        return original(self, known, at, feedback, index)

    return mock.patch.object(Clock, "next", following)


def _a_shard_with_a_memory_of_its_own() -> Planted:
    count = itertools.count()
    original = Shard.apply

    def apply(self: Shard, tick: Any, tick_input: Any) -> Any:
        found = original(self, tick, tick_input)
        if next(count) % 2:
            found.bucket = where(found.bucket, np.arange(found.bucket.num_rows)[::-1] >= 0)
            found.status["messages"] = next(count)
        return found

    return mock.patch.object(Shard, "apply", apply)


def _a_message_in_two_shards() -> Planted:
    original = Shard.apply

    def apply(self: Shard, tick: Any, tick_input: Any) -> Any:
        found = original(self, tick, tick_input)
        found.entries = found.entries.slice(0, max(0, found.entries.num_rows - 1))
        return found

    return mock.patch.object(Shard, "apply", apply)


def _releases_of_a_lane_out_of_order() -> Planted:
    return mock.patch.object(Releases, "begin_next", _newest_first(Releases.begin_next))


def _newest_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def begin_next(self: Releases, lane: str) -> Any:
        queued = self._lanes[lane]
        queued.sort(key=lambda release: -release.tick)
        return original(self, lane) if queued else None

    return begin_next


def _told_before_written() -> Planted:
    written: list[Callable[[], None]] = []
    append, publish = BatchSink._append, OutcomePublisher.publish

    def note(self: BatchSink, table: str, rows: Any, tick: int) -> None:
        if table == "outcomes":
            written.append(lambda: append(self, table, rows, tick))
        else:
            append(self, table, rows, tick)

    def tell(self: OutcomePublisher, *args: Any) -> None:
        publish(self, *args)
        while written:
            written.pop(0)()

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(BatchSink, "_append", note))
    stack.enter_context(mock.patch.object(OutcomePublisher, "publish", tell))
    return stack


def _told_under_another_name_after_each_start() -> Planted:
    numbers = itertools.count()
    return mock.patch.object(outcomes, "_producer_name", lambda app: f"{app}-outcomes-{next(numbers)}")


def _barrier_one_entry_short() -> Planted:
    return _after(Receiver, "topic_end", lambda end, self: end._replace(entry_id=end.entry_id - 1))


def _repeats_not_recognized() -> Planted:
    return mock.patch.object(RequestLog, "find_ids", return_value={})


def _pauses_change_nothing() -> Planted:
    return mock.patch.object(Parking, "change_pauses", _nothing)


def _a_round_leaves_its_first_message_out() -> Planted:
    def without_first(found: Any, *_: Any) -> Any:
        rows, one = found
        return rows.slice(1), one

    return _after(drained_rows, "find_first_held", without_first)


def _cancels_not_kept() -> Planted:
    return mock.patch.object(CancelledMessages, "save", _nothing)


def _restores_change_nothing() -> Planted:
    return mock.patch.object(CancelledMessages, "remove", _nothing)


def _moves_not_found() -> Planted:
    return _after(Moved, "find_moves", lambda found, *_: tuple(0 * column for column in found))


def _moved_rows_without_their_sequence() -> Planted:
    def without(rows: Any, *_: Any) -> Any:
        return rows.set_column(rows.schema.get_field_index("sequence"), "sequence", pa.nulls(rows.num_rows, pa.int64()))

    return _after(batch_sink, "to_index", without)


def _commands_that_wait_are_forgotten() -> Planted:
    return _after(WaitingCommands, "take_commands", lambda found, *_: found.slice(0, 0))


def _postponed_from_now_on() -> Planted:
    return mock.patch.dict(NEW_TIMES, {"postpone": lambda due, by, now: np.maximum(now + by, now)})


def _expired_before_the_end() -> Planted:
    return _after(expiry, "ends_of", lambda ends, *_: ends - 1_500)


def _expired_in_silence() -> Planted:
    return mock.patch.object(Expiring, "note_expired", _nothing)


def _a_replaced_offset_is_taken() -> Planted:
    return mock.patch.object(Checkpoint, "_check_offset", _nothing)


def _who_hung_in_a_write_goes_on() -> Planted:
    return mock.patch.object(Intake, "parts", _without_pauses(Intake.parts))


def _without_pauses(original: Callable[..., Any]) -> Callable[..., Any]:
    def parts(self: Intake, *args: Any) -> Any:
        with mock.patch.object(self, "_pauses"):
            return original(self, *args)

    return parts


def _a_rebuild_reads_no_destination() -> Planted:
    return mock.patch.object(rebuild, "write_missing_deliveries", return_value=0)


def _a_rebuild_waits_for_nobody() -> Planted:
    return mock.patch.object(rebuilding, "_wait_for_overtaken", _nothing)


def _a_rebuild_keeps_what_comes_again() -> Planted:
    return mock.patch.object(rebuild, "_remove_not_durable", _nothing)


def _a_rebuild_forgets_deliveries() -> Planted:
    def without(found: Any, *_: Any) -> Any:
        return found.slice(0, 0)

    return _after(rebuild, "_delivered_rows", without)


def _a_rebuild_forgets_cancels() -> Planted:
    return _after(changes.Commands, "changes", lambda found, *_: replace(found, cancelled=found.cancelled.slice(0, 0)))


def _a_rebuild_forgets_pauses() -> Planted:
    return mock.patch.object(rebuild, "_paused", return_value={})


def _a_rebuild_forgets_waiting_commands() -> Planted:
    return _after(rebuild, "find_waiting", lambda found, *_: found.slice(0, 0))


def _a_rebuild_forgets_request_ids() -> Planted:
    return mock.patch.object(rebuild, "find_bodies", return_value={})


def _an_old_checkpoint_is_gone_on_from() -> Planted:
    stack = contextlib.ExitStack()
    for module in (crash_recovery, start_checks):
        stack.enter_context(mock.patch.object(module, "check_not_behind", _nothing))
    stack.enter_context(_after(crash_recovery, "_read_warehouse", lambda found, *_: replace(found, epoch=0)))
    return stack


def _none_yields_to_another_of_its_key() -> Planted:
    return mock.patch.object(KeyedMessages, "supersede_messages", return_value=empty_table(OUTCOME_ROWS))


def _the_first_of_a_key_is_not_kept() -> Planted:
    return _after(superseding, "key_rule", lambda rule, *_: rule._replace(mode=Mode.REPLACE))


def _debounced_without_limit() -> Planted:
    return _after(superseding, "key_rule", lambda rule, *_: rule._replace(debounce_max_millis=None))


def _the_limit_begins_with_each_message() -> Planted:
    def without_since(message: Any, *others: Any) -> Any:
        return original(message._replace(since=1 << 50), *others)

    original = superseding._KeyState
    return mock.patch.object(superseding, "_KeyState", without_since)


def _parked_at_their_places() -> Planted:
    retimed = Shaper._retimed

    def without_was_due(rows: pa.Table, *of: Any) -> pa.Table:
        found = retimed(rows, *of)
        return with_columns(found, was_due=pa.nulls(found.num_rows, pa.int64()))

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(shard, "slow_subscriptions", return_value={}))
    stack.enter_context(mock.patch.object(Shaper, "_retimed", staticmethod(without_was_due)))
    return stack


def _cold_keys_are_forgotten() -> Planted:
    return mock.patch.object(LiveKeys, "find_cold", return_value={})


def _waiting_commands_stay_in_their_homes() -> Planted:
    return mock.patch.object(streaming.source.reader, "find_waiting", return_value=empty_table(COMMAND_ROWS))


def _request_ids_of_earlier_ticks_are_forgotten() -> Planted:
    return mock.patch.object(MessageRequests, "_find_earlier", return_value={})


def _all_messages_of_a_request_id_are_alike() -> Planted:
    return mock.patch.object(requests, "body_of", return_value=1)


def _all_commands_of_a_request_id_are_alike() -> Planted:
    return mock.patch.object(decode, "_body", return_value=1)


def _rejects_are_not_written() -> Planted:
    original = BatchSink._append

    def append(self: BatchSink, table: str, rows: Any, tick: int) -> None:
        if table != "rejects":
            original(self, table, rows, tick)

    return mock.patch.object(BatchSink, "_append", append)


def _releases_of_a_key_do_not_wait() -> Planted:
    return mock.patch.object(Releases, "must_wait", return_value=False)


@contextlib.contextmanager
def _messages_of_a_key_side_by_side() -> Iterator[None]:
    # Two shards, with a producer each, have neighbours: else they rarely have messages of a key that are due together.
    with (
        mock.patch.object(sending_order, "_key_of", _nothing),
        mock.patch.object(sharding, "ENTRIES_TOGETHER", 2),
    ):
        yield


def _commands_for_a_schedule_change_nothing() -> Planted:
    return mock.patch.object(Occurrences, "_replace_all", _nothing)


def _an_occurrence_is_counted_twice() -> Planted:
    original = Occurrences._move_on

    def move_on(self: Occurrences, rows: Any, masks: Any, chosen: Any, pending: Any, is_replaced: Any) -> None:
        pending.numbers[pending.numbers == 3] = 2
        original(self, rows, masks, chosen, pending, is_replaced)

    return mock.patch.object(Occurrences, "_move_on", move_on)


def _an_occurrence_is_left_out() -> Planted:
    return _after(Occurrences, "_next_times", lambda times, self, current: np.where(current.numbers == 3, NEVER, times))


def _chunks_acknowledged_before_their_message_is_whole() -> Planted:
    return mock.patch.object(ChunkAssembler, "may_be_acknowledged", None)


def _chunks_acknowledged_before_their_message_is_durable() -> Planted:
    return mock.patch.object(receiver_acknowledgements.Acknowledgements, "add_chunked", _nothing)


def _chunks_without_the_first() -> Planted:
    def without_first(whole: Whole | None, *_: Any) -> Whole | None:
        return whole and replace(whole, payload=(whole.payload or b"")[1:])

    return _after(ChunkAssembler, "add", without_first)


def _what_is_late_is_sent_at_once() -> Planted:
    return mock.patch.object(Pace, "take", return_value=True)


@contextlib.contextmanager
def _places_for_all_at_once() -> Iterator[None]:
    with mock.patch.object(Shaper, "__bool__", return_value=False), mock.patch.object(Pace, "take", return_value=True):
        yield


def _named_again_and_still_out() -> Planted:
    original = KnownRoutes.updated_to

    def updated_to(self: KnownRoutes, settings: Any) -> KnownRoutes:
        routes = original(self, settings).routes
        out = {(t, s.name) for t, route in self.routes.items() for s in route.subscriptions if s.is_removed}
        return KnownRoutes(
            {
                topic: replace(
                    route,
                    subscriptions=tuple(
                        replace(s, is_removed=s.is_removed or (topic, s.name) in out) for s in route.subscriptions
                    ),
                )
                for topic, route in routes.items()
            }
        )

    return mock.patch.object(KnownRoutes, "updated_to", updated_to)


def _numbers_of_subscriptions_from_the_settings() -> Planted:
    original = KnownRoutes.updated_to
    return mock.patch.object(KnownRoutes, "updated_to", lambda self, settings: original(KnownRoutes({}), settings))


def _a_window_closes_too_late() -> Planted:
    return _after(OpenTime, "_of_day", lambda spans, *_: [(start, end + 20_000) for start, end in spans])


@contextlib.contextmanager
def _retention_of_what_waits() -> Iterator[None]:
    def horizons(_: Any, self: Retention, *__: Any) -> None:
        self._horizons["delayed_index"] += 60_000

    with (
        _after(Retention, "__init__", horizons),
        mock.patch.object(Retention, "_are_done", lambda self, rows, *_: np.ones(rows.num_rows, np.bool_)),
    ):
        yield


def _sent_in_part_counts_as_sent() -> Planted:
    return mock.patch.object(Line, "_may_be_in_part", return_value=False)


def _chunks_again_under_one_uuid() -> Planted:
    def made(_: Any, self: Chunks, *__: Any) -> None:
        self._metadata = re.sub(rb"-[0-9a-f]{16}", b"-0000000000000000", self._metadata)  # the number of the attempt

    return _after(Chunks, "__init__", made)


def _acknowledged_before_it_is_imported() -> Planted:
    original = topics._read_messages

    def read(importer: Importer, partition: Any, *rest: Any) -> Iterator[tuple[Any, Any]]:
        for messages, last in original(importer, partition, *rest):
            if last.entry_id >= 0:
                partition.consumer.acknowledge(last)
            yield messages, last

    return mock.patch.object(topics, "_read_messages", read)


def _parts_of_a_file_with_one_number() -> Planted:
    original = Importer.append

    def append(self: Importer, messages: Any, app_id: str, number: int, is_by_position: bool = False) -> None:
        original(self, messages, app_id, number if is_by_position else 1, is_by_position)

    return mock.patch.object(Importer, "append", append)


def _parts_depend_on_when_they_are_read() -> Planted:
    count = itertools.count()

    def read(batches: Any, *_: Any) -> Any:
        return list(batches)[:: -1 if next(count) % 2 else 1]

    return _after(SourceReader, "read", read)


def _opened_after_its_end() -> Planted:
    original = EntryProducer._new_link

    def new_link(self: EntryProducer, connection: Any) -> Any:
        with mock.patch.object(self._is_closed, "is_set", return_value=False):
            return original(self, connection)

    return mock.patch.object(EntryProducer, "_new_link", new_link)


def _commands_of_other_clusters_left_out() -> Planted:
    def accept(found: Acceptance, *_: Any) -> Acceptance:
        return replace(found, takes_replicated=False)

    return _after(Receivers, "_acceptance", accept)


def _a_filter_names_what_was_delivered() -> Planted:
    original = Snapshot.__init__

    def opened(self: Snapshot, warehouse: str, versions: Mapping[str, int | None]) -> None:
        original(self, warehouse, {name: 0 if name == "deliveries" else at for name, at in versions.items()})

    return mock.patch.object(Snapshot, "__init__", opened)


def _a_repeat_finds_done_what_it_asks_for() -> Planted:
    def done(found: Any, *_: Any) -> Any:
        repeated, others = found
        at, applied = repeated.schema.get_field_index("result"), int(Result.APPLIED)
        is_applied = pc.equal(repeated["result"], applied)
        results = pc.if_else(is_applied, int(Result.ALREADY_APPLIED), repeated["result"])
        return repeated.set_column(at, OUTCOME_ROWS.field("result"), results.cast(pa.int32())), others

    return _after(Repeats, "answer_again", done)


def _a_vacuum_keeps_no_version() -> Planted:
    original = DeltaTable.vacuum

    def vacuum(self: DeltaTable, dry_run: bool, full: bool) -> list[str]:
        return original(self, retention_hours=0, dry_run=dry_run, enforce_retention_duration=False, full=full)

    return mock.patch.object(DeltaTable, "vacuum", vacuum)


def _sent_again_to_the_partitions_of_now() -> Planted:
    original = Destinations.__init__

    def init(self: Destinations, settings: Any, sending: Mapping[str, Any], *of: Any) -> None:
        not_recorded = dict.fromkeys(sending.get("partitions", {}), UNKNOWN)
        original(self, settings, {**sending, "partitions": not_recorded}, *of)

    return mock.patch.object(Destinations, "__init__", init)


PLANTED: dict[str, Callable[[], Planted]] = {
    "the epoch is not checked before a commit": _epoch_not_checked,
    "nor before anything is sent": _sent_without_a_look_at_the_epoch,
    "acknowledged before durable": _acknowledged_before_durable,
    "acknowledged one entry too far": _acknowledged_one_too_far,
    "sequence ids from a counter": _sequence_ids_from_a_counter,
    "sequence ids without their tick": _sequence_ids_without_their_tick,
    "offset and input not forced to the disk": _offset_and_input_not_forced,
    "commits not forced to the disk": _commits_not_forced,
    "commits of a killed writer not forced": _commits_of_the_killed_not_forced,
    "releases confirmed before they are written": _confirmed_before_written,
    "releases confirmed one tick too far": _confirmed_one_tick_too_far,
    "nothing in flight dispatched again": _nothing_dispatched_again,
    "a segment begins a slot too late": _segment_begins_a_slot_too_late,
    "a segment ends some slots too late": _segment_ends_a_slot_too_late,
    "some buckets not written": _buckets_not_written,
    "rows of a tick written again": _rows_of_a_tick_written_again,
    "a replayed batch sends": _a_replay_sends,
    "the broker's deduplication is off": _deduplication_off,
    "deduplication is inactive after six hours": _forgotten_for_good,
    "two lanes with one producer name": _two_lanes_with_one_name,
    "two shards with one producer name": _two_shards_with_one_name,
    "sent a moment early": _sent_early,
    "what is not answered counts as arrived": _unanswered_counts_as_arrived,
    "a lost task counts as done": _a_lost_task_counts_as_done,
    "durable before it is settled": _durable_before_settled,
    "what came overdue is durable while it waits for a place": _durable_while_what_came_overdue_waits,
    "durable before it is confirmed": _durable_before_confirmed,
    "a shard's result depends on more than its input": _a_shard_with_a_memory_of_its_own,
    "an entry is not written down": _a_message_in_two_shards,
    "a lane's releases are sent newest first": _releases_of_a_lane_out_of_order,
    "an outcome is told before it is written": _told_before_written,
    "outcomes are told under another name after each start": _told_under_another_name_after_each_start,
    "a command's barrier is one entry short": _barrier_one_entry_short,
    "a repeated command is applied again": _repeats_not_recognized,
    "a repeated command is told that it had been done before": _a_repeat_finds_done_what_it_asks_for,
    "a pause changes nothing": _pauses_change_nothing,
    "a resumed round leaves its first message out": _a_round_leaves_its_first_message_out,
    "cancels are not kept": _cancels_not_kept,
    "a restore changes nothing": _restores_change_nothing,
    "the first row of a moved message counts, too": _moves_not_found,
    "moved rows are sealed without their sequence": _moved_rows_without_their_sequence,
    "commands that wait are forgotten": _commands_that_wait_are_forgotten,
    "postponed from now on": _postponed_from_now_on,
    "expired before the end": _expired_before_the_end,
    "expired in silence": _expired_in_silence,
    "an offset that another job has replaced is taken": _a_replaced_offset_is_taken,
    "who hung in the write of an offset makes its batch": _who_hung_in_a_write_goes_on,
    "a rebuild reads no destination": _a_rebuild_reads_no_destination,
    "a rebuild waits for nobody": _a_rebuild_waits_for_nobody,
    "a rebuild keeps rows of what comes again": _a_rebuild_keeps_what_comes_again,
    "a rebuild forgets deliveries": _a_rebuild_forgets_deliveries,
    "a rebuild forgets cancels": _a_rebuild_forgets_cancels,
    "a rebuild forgets pauses": _a_rebuild_forgets_pauses,
    "a rebuild forgets commands that wait": _a_rebuild_forgets_waiting_commands,
    "a rebuild forgets request ids": _a_rebuild_forgets_request_ids,
    "an old copy of the checkpoint is gone on from": _an_old_checkpoint_is_gone_on_from,
    "no message yields to another one of its schedule key": _none_yields_to_another_of_its_key,
    "the first message of a schedule key is not kept": _the_first_of_a_key_is_not_kept,
    "debounced without a limit": _debounced_without_limit,
    "the limit of a key begins with each message": _the_limit_begins_with_each_message,
    "cold schedule keys are forgotten": _cold_keys_are_forgotten,
    "a topic's first schedule key leaves its waiting commands where they are": _waiting_commands_stay_in_their_homes,
    "request ids of earlier ticks are forgotten": _request_ids_of_earlier_ticks_are_forgotten,
    "all messages of a request id are taken for alike": _all_messages_of_a_request_id_are_alike,
    "all commands of a request id are taken for alike": _all_commands_of_a_request_id_are_alike,
    "rejects are not written": _rejects_are_not_written,
    "releases of a key do not wait for each other": _releases_of_a_key_do_not_wait,
    "messages of a key are sent side by side": _messages_of_a_key_side_by_side,
    "commands for a schedule change nothing": _commands_for_a_schedule_change_nothing,
    "an occurrence is counted twice": _an_occurrence_is_counted_twice,
    "an occurrence is left out": _an_occurrence_is_left_out,
    "a chunk is acknowledged before its message is whole": _chunks_acknowledged_before_their_message_is_whole,
    "and before it is durable": _chunks_acknowledged_before_their_message_is_durable,
    "chunks are put together without the first": _chunks_without_the_first,
    "what is late is sent at once": _what_is_late_is_sent_at_once,
    "a rate gives places to all at once": _places_for_all_at_once,
    "a subscription that is named again stays out": _named_again_and_still_out,
    "a subscription has the number of its place in the settings": _numbers_of_subscriptions_from_the_settings,
    "a window closes 20 seconds too late": _a_window_closes_too_late,
    "retention deletes what waits": _retention_of_what_waits,
    "a vacuum keeps no version": _a_vacuum_keeps_no_version,
    "an import knows nothing of earlier ones": lambda: mock.patch.object(importing, "_known", return_value=set()),
    "what is imported of a topic is acknowledged before": _acknowledged_before_it_is_imported,
    "parts of an imported file have one number": _parts_of_a_file_with_one_number,
    "an import that was killed is not completed": lambda: mock.patch.object(importing, "_unfinished", return_value=[]),
    "a restore does not rewind the subscriptions": lambda: mock.patch.object(new_checkpoint, "rewind", _nothing),
    "a backup that finds a file gone gives up": lambda: mock.patch.object(copying, "_ATTEMPTS", 1),
    "what is sent in part counts as sent": _sent_in_part_counts_as_sent,
    "chunks are sent again under one UUID": _chunks_again_under_one_uuid,
    "a producer is opened after its end": _opened_after_its_end,
    "a destination is deleted that has what is not recorded": lambda: mock.patch.object(
        Oracle, "is_behind", return_value=False
    ),
    "of many messages that a command names one is left out": _of_many_that_a_command_names_one_is_left_out,
    "what is summed up is one too few": _summed_up_one_too_few,
    "a command without subscriptions is for the first one alone": _none_named_is_the_first_alone,
    "a task that Spark runs again has producer names of its own": _names_of_each_attempt,
    "a task that Spark runs again takes itself for the first": lambda: mock.patch.object(
        sender, "_is_repeated_task", return_value=False
    ),
    "what another cluster's job delivers is taken": lambda: mock.patch.object(Receiver, "_left_out", return_value=None),
    "what another cluster's job delivers is put aside": lambda: mock.patch.object(
        shard, "is_left_out", lambda rows: np.zeros(rows.num_rows, np.bool_)
    ),
    "what was sent in another cluster is left out, commands too": _commands_of_other_clusters_left_out,
    "the rows of a part depend on when it is read": _parts_depend_on_when_they_are_read,
    "a filter names what was delivered": _a_filter_names_what_was_delivered,
    "a filter names what was cancelled": lambda: mock.patch.object(
        pending_rows, "is_cancelled", return_value=Sql("FALSE")
    ),
    "a filter leaves the last message out": lambda: _after(
        bulk, "matching", lambda rows, *_: rows.slice(0, max(0, rows.num_rows - 1))
    ),
    "what another broker has published itself is not known": lambda: mock.patch.object(
        another_broker, "_later", lambda tables, topic, partition, known: known.slice(0, 0)
    ),
    "retention deletes what another broker is compared with": lambda: mock.patch.object(
        retention, "LAST_ENTRIES_MILLIS", 0
    ),
    "answers to commands that another broker lacks are not told": lambda: mock.patch.object(
        last_answers, "CLOCKS_MILLIS", -(10**15)
    ),
    "what another broker has is read as new": lambda: mock.patch.object(
        another_broker, "_pairs", return_value=(np.zeros(0, np.int64), np.zeros(0, np.int64))
    ),
    "an audit opens what is delivered before what has come": lambda: mock.patch.object(
        audit, "_OPENED", audit._OPENED[::-1]
    ),
    "an audit finds nothing overdue": lambda: mock.patch.object(
        audit, "_FINDINGS", tuple(kind for kind in audit._FINDINGS if kind != "overdue")
    ),
    "nobody tries a destination again": lambda: mock.patch.object(UnwritableRetries, "_look_after", _nothing),
    "what a slow destination did not take counts as sent": _not_taken_by_a_slow_one_counts_as_sent,
    "what a terminated destination did not take counts as sent": _not_taken_by_a_terminated_one_counts_as_sent,
    "nobody is told of destinations that take nothing": lambda: mock.patch.object(
        UnwritableDestinations, "alerts", return_value={}
    ),
    "what is skipped in a source topic is not named": lambda: mock.patch.object(SourceWatch, "_add", _nothing),
    "what is trimmed beside entries that are there is not counted": lambda: mock.patch.object(
        unseen_entries, "_n_messages", return_value=0
    ),
    "what is trimmed beside entries that are there is counted twice": lambda: _after(
        unseen_entries, "_n_messages", lambda n, *_: 2 * n
    ),
    "the status does not say what is skipped in a source topic": lambda: mock.patch.object(
        SourceWatch, "_tell", _nothing
    ),
    "a source topic that is made again is taken for the one before": _made_again_and_taken_for_the_one_before,
    "keyed messages are in the order of their entries, whatever their ledgers": (
        _keyed_messages_in_order_of_their_entries_alone
    ),
    "what a slow destination gets in rounds is parked at its place": _parked_at_their_places,
    "a partition is acknowledged as far as another one": _acknowledged_in_all_partitions,
    "a partition is read on after the last entry of another one": _read_on_after_another_partition,
    "what is sent again goes to the partitions of now": _sent_again_to_the_partitions_of_now,
    "what is left open is sent again whatever deliveries has": lambda: mock.patch.object(
        ReleaseRecords, "recorded", return_value=frozenset()
    ),
    "what a backup names that a killed one has committed is not forced": lambda: mock.patch.object(
        copying, "force_commits"
    ),
    "a backup leaves what a loss of power has torn": lambda: mock.patch.object(copying, "mend_log"),
    "a backup chooses versions while an import writes": lambda: mock.patch.object(copying, "_number", return_value=0),
    "partitions that are added are not read": lambda: _after(Discovery, "source", lambda names, *_: names[:2]),
}

# Of what only some faults show, these fall more often.
_LOST = {"checkpoint lost": 0.04}
_RARER = {"crash": 0.001, "pause": 0.0005, "power loss": 0.0002, "broker ends": 0.002, "checkpoint lost": 0.0}
_PLAIN = {kind: 0.0 for kind in USUAL_RATES if kind.startswith("seeds with")}
_PLAIN |= {"maintenance": 0.0, "checkpoint put back": 0.0}  # and a seed costs half as much
_IMPORTED = {"seeds with imports": 1.0, "import": 0.2, "crash": 0.01, "other system ends": 0.02}
_IMPORTED_ALONE = {**_IMPORTED, "seeds with backups": 0.0}
_IN_ORDER = {"clock jumps": 0.0, "seeds with a cluster": 0.0, **_RARER}
_RESTORED = {"seeds with backups": 1.0, "backup": 0.08, "warehouse lost": 0.06, **_RARER}
_SLOWLY = {
    "seeds with backups": 1.0,
    "seeds with slow backups": 1.0,
    "backup": 0.1,
    "warehouse lost": 0.0,
    "maintenance": 0.3,
}
_ELSEWHERE = {"seeds with another broker": 1.0, "backup": 0.08, "warehouse lost": 0.1}
_CUT_OFF = {"seeds with a cluster": 1.0, "executor cut off": 0.5, **_RARER}
_AUDITED = {"seeds with audits": 1.0}
_CHANGED = {"seeds with a changed source": 1.0, "source changed": 0.15}
_COMMANDED = {**_PLAIN, **_RARER, "seeds with a changed source": 1.0, "seeds with commands on a changed source": 1.0}
_TERMINATED = {"seeds with terminated destinations": 1.0, "destination terminated": 0.1}
_THROTTLED = {
    **_PLAIN,
    **dict.fromkeys(("crash", "pause", "power loss", "broker ends", "checkpoint lost"), 0.0),
    "seeds with audits": 1.0,
    "seeds with publish rates": 1.0,
    "publish rate": 0.3,
}
_PARTITIONED = {**_PLAIN, "topic offline": 0.0, "seeds with partitions": 1.0}
_OF_BACKUPS = {
    **{"seeds with backups": 1.0, "backup": 0.9, "power loss of a backup": 0.6, "warehouse lost": 0.0},
    **{"seeds with audits": 0.0, "seeds with filters": 0.0, "seeds with imports": 0.0, "seeds with replication": 0.0},
    **{"seeds with another broker": 0.0, "seeds with slow backups": 0.0, "maintenance": 0.0},
}

RATES: dict[str, dict[str, float]] = {
    "what a slow destination did not take counts as sent": {"seeds with publish rates": 1.0, "publish rate": 0.2},
    "what a slow destination gets in rounds is parked at its place": _THROTTLED,
    "what a terminated destination did not take counts as sent": _TERMINATED,
    "nobody is told of destinations that take nothing": _TERMINATED,
    "a partition is acknowledged as far as another one": _PARTITIONED,
    "a partition is read on after the last entry of another one": {**_PARTITIONED, "crash": 0.015},
    "what is sent again goes to the partitions of now": {
        "seeds with partitioned destinations": 1.0,
        "partition added": 0.2,
        "crash": 0.015,
    },
    "what a backup names that a killed one has committed is not forced": {
        **_OF_BACKUPS,
        "backup": 0.5,
        "power loss of a backup": 0.2,
        "warehouse lost": 0.2,
        "crash": 0.01,
    },
    "a backup leaves what a loss of power has torn": _OF_BACKUPS,
    "partitions that are added are not read": {**_PARTITIONED, "partition added": 0.1},
    "what is skipped in a source topic is not named": _CHANGED,
    "what is trimmed beside entries that are there is not counted": _CHANGED,
    "what is trimmed beside entries that are there is counted twice": _CHANGED,
    "a source topic that is made again is taken for the one before": _CHANGED,
    "the status does not say what is skipped in a source topic": {**_PLAIN, **_RARER, **_CHANGED},
    "keyed messages are in the order of their entries, whatever their ledgers": _COMMANDED,
    "an audit opens what is delivered before what has come": {**_AUDITED, **_RARER, "slow": 0.15},
    "an audit finds nothing overdue": {
        **_PLAIN,
        **_AUDITED,
        **dict.fromkeys(("crash", "power loss", "checkpoint lost"), 0.0),
        "pause": 0.006,
    },
    "an import knows nothing of earlier ones": _IMPORTED,
    "an import that was killed is not completed": _IMPORTED,
    "what is imported of a topic is acknowledged before": _IMPORTED_ALONE,
    "parts of an imported file have one number": _IMPORTED_ALONE,
    "a restore does not rewind the subscriptions": _RESTORED,
    **{name: {**_PLAIN, **_RARER, **_SLOWLY, "maintenance": 0.3} for name in PLANTED if name.startswith("a backup ")},
    "offset and input not forced to the disk": {"power loss": 0.006, "slow": 0.05},
    "commits of a killed writer not forced": {"power loss": 0.004, "crash": 0.01},
    "the epoch is not checked before a commit": {"pause": 0.008},
    "nor before anything is sent": {"pause": 0.008},
    "deduplication is inactive after six hours": {
        "seeds with a long pause": 1.0,
        "crash": 0.015,
        "connection lost": 0.05,
    },
    "durable before it is confirmed": {
        **_PLAIN,
        **dict.fromkeys(("crash", "pause", "power loss", "checkpoint lost"), 0.0),
        "topic offline": 0.03,
    },
    "durable before it is settled": _LOST,
    "what came overdue is durable while it waits for a place": {**_PLAIN, **_RARER, "topic offline": 0.05},
    "an offset that another job has replaced is taken": {"write hangs": 0.03},
    "who hung in the write of an offset makes its batch": {**_PLAIN, **_RARER, "write hangs": 0.1},
    "what is late is sent at once": {**_PLAIN, **_RARER, "broker ends": 0.04, "topic offline": 0.05},
    "an old copy of the checkpoint is gone on from": {"checkpoint put back": 0.06},
    "a subscription that is named again stays out": {**_PLAIN, **_RARER, "route edited": 1.0, "crash": 0.01},
    "a subscription has the number of its place in the settings": {"route edited": 0.5, "crash": 0.015},
    "retention deletes what waits": {"maintenance": 0.2},
    "a vacuum keeps no version": {**_PLAIN, **_RARER, "maintenance": 0.2},
    **{name: {"seeds with filters": 1.0, "maintenance": 0.0} for name in PLANTED if name.startswith("a filter ")},
    "what is sent in part counts as sent": {**_PLAIN, **_RARER, "unload": 0.15},
    "chunks are sent again under one UUID": {"connection lost": 0.03},
    "releases of a key do not wait for each other": _IN_ORDER,
    "messages of a key are sent side by side": {"unload": 0.15, "connection lost": 0.03, **_IN_ORDER},
    "a producer is opened after its end": {"topic offline": 0.1},
    "a task that Spark runs again has producer names of its own": _CUT_OFF,
    "a task that Spark runs again takes itself for the first": {**_CUT_OFF, "quota exceeded": 0.2},
    **{name: _ELSEWHERE for name in PLANTED if "another broker" in name},
    "retention deletes what another broker is compared with": {
        **_ELSEWHERE,
        "maintenance": 1.0,
        "warehouse lost": 0.03,
    },
    **{name: {"seeds with replication": 1.0} for name in PLANTED if "another cluster" in name},
    "nobody tries a destination again": {"topic offline": 0.0, "broker ends": 0.0, "quota exceeded": 0.05},
    "a destination is deleted that has what is not recorded": {"destination deleted": 0.5, "task lost after": 0.3},
    **{name: _LOST for name in PLANTED if name.startswith("a rebuild ")},
    "a rebuild waits for nobody": {"rebuilt elsewhere": 0.05},
}

# Not shown to be found. The first needs a line that ends while its producer looks for its broker, and finds it: none
# did in 18 seeds. `test_producer.py` closes one in that moment. The others were found before more forms of load and of
# faults came, and then not in a minute of CPU time, 21 to 33 seeds. The last is found with dense faults, by seed 1037.
NOT_FOUND = frozenset(
    {
        "a producer is opened after its end",
        "cold schedule keys are forgotten",
        "a rebuild waits for nobody",
        "a rebuild forgets pauses",
        "what a slow destination gets in rounds is parked at its place",
        "what is left open is sent again whatever deliveries has",
        "a backup chooses versions while an import writes",
        "a backup leaves what a loss of power has torn",
    }
)
