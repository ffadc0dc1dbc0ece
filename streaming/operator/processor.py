"""The work of the stateful operator: applies a batch's input to each shard, and yields the shard's output."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import Row

from conf.settings import TrackerSettings
from conf.time_zones import using
from streaming.operator.schemas import OUTPUT_SCHEMA
from streaming.operator.shard_input import ShardInput, read_input
from streaming.operator.spark_store import SparkStore
from streaming.operator_input import InputKind
from tracker import Shard, TickInput
from tracker.containment import apply_contained
from tracker.entry_log import ENTRY_LOG_ROWS
from tracker.message_state.cancelled import Compression
from tracker.messages import concat
from tracker.packing import in_parts, pack
from tracker.schemas import COMMAND_ROWS, KNOWN
from tracker.shard import StateOptions
from tracker.sharding import ShardId
from tracker.store import Store
from warehouse.delta.tables import Tables
from warehouse.queries.first_answers import find_first_answers
from warehouse.queries.index_rows import LOOKED_UP, find_keyed_messages


class OutputKind:
    """Values of the column `kind` of the operator's output: they say how a row's `body` is to be read."""

    RELEASE = "release"  # body: a release's rows, packed; large releases come in several parts, in order
    SHORT_NOTICE = "short_notice"  # body: a release on short notice, packed
    RELEASE_IN_ORDER = "release_in_order"  # the same, of rows that have to come in the order of their keys
    SHORT_NOTICE_IN_ORDER = "short_notice_in_order"
    BUCKET = "bucket"  # body: rows of a sealed bucket, packed, as of the kinds below but STATUS
    CANCELS = "cancels"
    OUTCOMES = "outcomes"
    ENTRIES = "entries"
    REJECTS = "rejects"
    STATUS = "status"  # body: counts as JSON


# The kind of output for each kind of release, as `tracker.in_flight.Release.kind` numbers them.
RELEASES = (
    OutputKind.SHORT_NOTICE,
    OutputKind.RELEASE,
    OutputKind.SHORT_NOTICE_IN_ORDER,
    OutputKind.RELEASE_IN_ORDER,
)

_MOST_NAMED = 1_000  # failures that are told

_output = Row(*OUTPUT_SCHEMA.names)


class Operator:
    """Runs a `Shard` for each of Spark's keys.

    Args:
        state: Spark's map state; it has the values of the key that Spark processes now.
        shard_keys: Spark's key of each shard's rows, by shard number.
        settings_json: the section `tracker` of the settings. `min_index_count_per_bucket` is for all shards together.
        warehouse: folder or URI of the tables.
    """

    def __init__(self, state: Any, shard_keys: list[int], settings_json: str, warehouse: str) -> None:
        settings = TrackerSettings.model_validate_json(settings_json)
        self._state = state
        self._shard_of = {key: shard for shard, key in enumerate(shard_keys)}
        self._settings = settings
        self._tables = Tables(warehouse)
        self._min_index_count = max(1, settings.min_index_count_per_bucket // len(shard_keys))
        compression = Compression(settings.taken_back_compression_type, settings.taken_back_compression_threshold_bytes)
        self._options = StateOptions(compression, settings.schedule_key_idle_millis)

    def apply(self, key: int, rows: Iterator[Any]) -> Iterator[Any]:
        """Applies a batch to a shard; yields rows of OUTPUT_SCHEMA.

        Args:
            key: Spark's key of the shard.
            rows: the shard's input, rows of INPUT_SCHEMA; one of them is the tick.

        Raises:
            NoTickError: no row is the tick.
        """
        started = time.perf_counter()
        given, number = read_input(key, rows), self._shard_of[key]
        offset = given.offset

        def shard_on(store: Store) -> Shard:
            return Shard(
                store,
                offset.known_routes.subscriptions,
                self._min_index_count,
                self._settings.tick_time_millis,
                self._options,
                ShardId(number, len(self._shard_of)),
            )

        with using(given.time_zones):
            effects = apply_contained(SparkStore(self._state), shard_on, offset.to_tick(), self._tick_input(given))
        for release in effects.releases:
            for part in in_parts(release.rows):
                yield _output(number, RELEASES[release.kind], release.tick, pack(part))
        for kind, table in (
            (OutputKind.BUCKET, effects.bucket),
            (OutputKind.CANCELS, effects.cancels),
            (OutputKind.ENTRIES, effects.entries),
            (OutputKind.REJECTS, effects.rejects),
            (OutputKind.OUTCOMES, concat([*given.tables[InputKind.REBUILT_OUTCOMES], effects.outcomes])),
        ):
            for part in in_parts(table):
                yield _output(number, kind, offset.tick, pack(part))
        millis = round((time.perf_counter() - started) * 1000)
        status = effects.status | {"operator_millis": millis, "run": offset.run_id, "unwritable": offset.unwritable}
        status |= {"changed": offset.changed, "shaped_until": effects.shaped_until}
        status |= {"drained": effects.drained, "waiting": effects.waiting, "paused": effects.paused}
        status |= {"failures": effects.failures[:_MOST_NAMED]}
        yield _output(number, OutputKind.STATUS, offset.tick, json.dumps(status).encode())

    def _tick_input(self, given: ShardInput) -> TickInput:
        """Makes the tracker's input. Its look-ups read the tables at the versions that the offset records."""
        tables, now, index_version = given.tables, given.offset.now, given.offset.index_version
        # The offset of an earlier program may lack this version: then it is None.
        version = dict(zip(LOOKED_UP, given.offset.lookup_versions, strict=False)).get("outcomes")

        def first_answers(ids: Collection[str]) -> pa.Table:
            return find_first_answers(self._tables, version, ids, now)

        def find_keyed(names: Collection[tuple[str, str]], groups: Sequence[int]) -> pa.Table:
            return find_keyed_messages(self._tables, index_version, names, groups)

        return TickInput(
            messages=concat(tables[InputKind.MESSAGES]),
            elsewhere=concat(tables[InputKind.NOTES], ENTRY_LOG_ROWS),
            segment=concat(tables[InputKind.SEGMENT]),
            commands=concat(tables[InputKind.COMMANDS], COMMAND_ROWS),
            request_ids=given.request_ids,
            known_messages=concat(tables[InputKind.KNOWN_MESSAGES], KNOWN),
            payload_rows=concat(tables[InputKind.PAYLOAD_ROWS]),
            pause_changes=given.pause_changes,
            rebuilt=given.rebuilt,
            rejected_commands=concat(tables[InputKind.REJECTED_COMMANDS]),
            first_answers=first_answers,
            find_keyed=find_keyed,
            reinstated={topic for topic, _ in given.offset.reinstated},
            rejected=concat(tables[InputKind.REJECTED]),
            drained=concat(tables[InputKind.DRAINED]),
            drained_until=given.drained_until,
            pace=given.pace,
        )
