"""The work of the stateful operator: gives each shard its input of a batch, and passes its output on."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import Row

from conf.settings import TrackerSettings
from streaming.checkpoint.offset import Offset
from streaming.operator.schemas import OUTPUT_SCHEMA
from streaming.operator.spark_store import SparkStore
from streaming.operator_input import PART_ROWS, InputKind
from tracker import Shard, TickInput
from tracker.commands.cancelled import Compression
from tracker.commands.pace import Pace
from tracker.commands.rebuilt import LIVE_KEYS, MOVED, NOT_TO_DELIVER, OCCURRENCES_DONE, Rebuilt
from tracker.commands.schema import COMMAND_ROWS, KNOWN, PauseChange
from tracker.entry_log import KEPT_SCHEMA
from tracker.messages import concat, pack, unpack
from tracker.sharding import Place
from warehouse.queries.first_answers import find_first_answers
from warehouse.queries.index_rows import LOOKED_UP, find_keyed_messages
from warehouse.tables import Tables


class OutputKind:
    """Values of the column `kind` of the operator's output, which say what a row's `body` is."""

    RELEASE = "release"  # body: a release's rows, packed
    SHORT_NOTICE = "short_notice"  # the same, of rows that came in too late to be planned
    RELEASE_IN_ORDER = "release_in_order"  # the same as these two, of rows that have to come in order of their keys
    SHORT_NOTICE_IN_ORDER = "short_notice_in_order"
    BUCKET = "bucket"  # body: rows of a sealed bucket, packed, as in those below
    CANCELS = "cancels"
    OUTCOMES = "outcomes"
    ENTRIES = "entries"
    REJECTS = "rejects"
    STATUS = "status"  # body: counts as JSON


# By the kind of a release, as `tracker.in_flight.Release.kind`, that of the output.
RELEASES = (
    OutputKind.SHORT_NOTICE,
    OutputKind.RELEASE,
    OutputKind.SHORT_NOTICE_IN_ORDER,
    OutputKind.RELEASE_IN_ORDER,
)

_output = Row(*OUTPUT_SCHEMA.names)

_TABLES = (
    InputKind.MESSAGES,
    InputKind.NOTES,
    InputKind.SEGMENT,
    InputKind.COMMANDS,
    InputKind.KNOWN_MESSAGES,
    InputKind.PAYLOAD_ROWS,
    InputKind.REJECTED_COMMANDS,
    InputKind.REJECTED,
    InputKind.REBUILT_CANCELLED,
    InputKind.REBUILT_DELIVERED,
    InputKind.REBUILT_MOVED,
    InputKind.REBUILT_WAITING,
    InputKind.REBUILT_KEYS,
    InputKind.REBUILT_OCCURRENCES,
)


class Operator:
    """Runs a `Shard` for each of Spark's keys.

    Args:
        state: Spark's map state, in which Spark finds the values of the key that is being run.
        shard_keys: for each shard the key of its rows.
        settings_json: the tracker's settings. `min_index_count_per_bucket` is for all shards together.
        warehouse: a folder or URI.
    """

    def __init__(self, state: Any, shard_keys: list[int], settings_json: str, warehouse: str) -> None:
        settings = TrackerSettings.model_validate_json(settings_json)
        self._state = state
        self._shard_of = {key: shard for shard, key in enumerate(shard_keys)}
        self._settings = settings
        self._tables = Tables(warehouse)
        self._min_index_count = max(1, settings.min_index_count_per_bucket // len(shard_keys))
        self._compression = Compression(
            settings.taken_back_compression_type, settings.taken_back_compression_threshold_bytes
        )

    def apply(self, key: int, rows: Iterator[Any]) -> Iterator[Any]:
        """Applies a batch to a shard; yields rows of OUTPUT_SCHEMA.

        Args:
            key: the shard's.
            rows: the shard's input, rows of INPUT_SCHEMA; one of them is the tick.
        """
        started = time.perf_counter()
        offset: Offset | None = None
        request_ids: dict[str, int] = {}
        pause_changes: list[PauseChange] = []
        pace: Pace = {}
        rebuilt_meta: dict[str, Any] | None = None
        tables: dict[str, list[pa.Table]] = {kind: [] for kind in _TABLES}
        for row in rows:
            if row.kind == InputKind.TICK:
                offset = Offset.from_json(json.loads(row.body))
            elif row.kind == InputKind.REQUEST_IDS:
                request_ids = json.loads(row.body)
            elif row.kind == InputKind.PAUSE_CHANGES:
                pause_changes = [PauseChange(**change) for change in json.loads(row.body)]
            elif row.kind == InputKind.PACE:
                pace = json.loads(row.body)
            elif row.kind == InputKind.REBUILT:
                rebuilt_meta = json.loads(row.body)
            else:
                tables[row.kind].append(unpack(bytes(row.body)))
        if offset is None:
            raise AssertionError(f"a batch without a tick for the shard of key {key}")
        rebuilt = None
        if rebuilt_meta is not None:
            bodies = rebuilt_meta["request_ids"]
            rebuilt = Rebuilt(
                rebuilt_meta["sealed"],
                rebuilt_meta["unwanted"],
                request_ids=bodies if isinstance(bodies, dict) else dict.fromkeys(bodies, 0),  # an earlier version's
                paused=rebuilt_meta["paused"],
                shaped_until=rebuilt_meta.get("shaped_until", {}),  # an earlier version prepared none
                released=rebuilt_meta["released"],
                cancelled=concat(tables[InputKind.REBUILT_CANCELLED], NOT_TO_DELIVER),
                delivered=concat(tables[InputKind.REBUILT_DELIVERED], NOT_TO_DELIVER),
                moved=concat(tables[InputKind.REBUILT_MOVED], MOVED),
                waiting=concat(tables[InputKind.REBUILT_WAITING], COMMAND_ROWS),
                keys=concat(tables[InputKind.REBUILT_KEYS], LIVE_KEYS),
                occurrences=concat(tables[InputKind.REBUILT_OCCURRENCES], OCCURRENCES_DONE),
            )
        # The offset of an earlier program may lack this version: then it is None.
        version, now = dict(zip(LOOKED_UP, offset.lookup_versions, strict=False)).get("outcomes"), offset.now

        def first_answers(ids: Collection[str]) -> pa.Table:
            return find_first_answers(self._tables, version, ids, now)

        index_version = offset.index_version

        def find_keyed(names: Collection[tuple[str, str]], groups: Sequence[int]) -> pa.Table:
            return find_keyed_messages(self._tables, index_version, names, groups)

        shard = Shard(
            SparkStore(self._state),
            offset.known_routes.subscriptions,
            self._min_index_count,
            self._settings.tick_time_millis,
            self._compression,
            Place(self._shard_of[key], len(self._shard_of)),
            self._settings.schedule_key_idle_millis,
        )
        tick_input = TickInput(
            messages=concat(tables[InputKind.MESSAGES]),
            notes=concat(tables[InputKind.NOTES], KEPT_SCHEMA),
            segment=concat(tables[InputKind.SEGMENT]),
            commands=concat(tables[InputKind.COMMANDS], COMMAND_ROWS),
            request_ids=request_ids,
            known_messages=concat(tables[InputKind.KNOWN_MESSAGES], KNOWN),
            payload_rows=concat(tables[InputKind.PAYLOAD_ROWS]),
            pause_changes=pause_changes,
            rebuilt=rebuilt,
            rejected_commands=concat(tables[InputKind.REJECTED_COMMANDS]),
            first_answers=first_answers,
            find_keyed=find_keyed,
            reinstated={topic for topic, _ in offset.reinstated},
            rejected=concat(tables[InputKind.REJECTED]),
            pace=pace,
        )
        effects = shard.apply(offset.to_tick(), tick_input)

        number = self._shard_of[key]
        for release in effects.releases:
            yield _output(number, RELEASES[release.kind], release.tick, pack(release.rows))
        for kind, table in (
            (OutputKind.BUCKET, effects.bucket),
            (OutputKind.CANCELS, effects.cancels),
            (OutputKind.ENTRIES, effects.entries),
            (OutputKind.REJECTS, effects.rejects),
            (OutputKind.OUTCOMES, effects.outcomes),
        ):
            for start in range(0, table.num_rows, PART_ROWS):
                yield _output(number, kind, offset.tick, pack(table.slice(start, PART_ROWS)))
        millis = round((time.perf_counter() - started) * 1000)
        status = effects.status | {"operator_millis": millis, "run": offset.run_id, "unwritable": offset.unwritable}
        status |= {"changed": offset.changed, "shaped_until": effects.shaped_until}
        status |= {"waiting": effects.waiting, "paused": effects.paused}
        yield _output(number, OutputKind.STATUS, offset.tick, json.dumps(status).encode())
