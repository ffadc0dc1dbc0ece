"""What the stateful operator does: gives each shard its input of the batch, and passes on what it leads to."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import Row

from conf.settings import TrackerSettings
from streaming.checkpoint.offset import Offset
from streaming.operator.schemas import OUTPUT_SCHEMA
from streaming.operator.state_store import SparkStore
from streaming.operator_input import (
    COMMANDS,
    FOUND,
    KEPT,
    MESSAGES,
    NO_COMMANDS,
    PART_ROWS,
    REBUILT,
    REBUILT_DELIVERED,
    REBUILT_MOVED,
    REBUILT_TAKEN,
    REBUILT_WAITING,
    REJECTED,
    REQUEST_IDS,
    SEGMENT,
    SWITCHES,
    TICK,
)
from tracker import Intake, Shard
from tracker.commands.cancelled import Compression
from tracker.commands.rebuilt import MOVED, TAKEN, Rebuilt
from tracker.commands.schema import COMMANDS as COMMAND_ROWS
from tracker.commands.schema import KNOWN, Switch
from tracker.messages import concat, pack, unpack
from warehouse.queries.first_answers import find_first_answers
from warehouse.queries.index_rows import LOOKED_UP
from warehouse.tables import Tables

RELEASE = "release"  # body: a release's rows, packed
SHORT_NOTICE = "short_notice"  # the same, of rows that came in too late to be planned
BUCKET = "bucket"  # body: rows of a sealed bucket
CANCELS = "cancels"
OUTCOMES = "outcomes"
ENTRIES = "entries"
REJECTS = "rejects"
STATUS = "status"  # body: counts as JSON

_output = Row(*OUTPUT_SCHEMA.names)

_TABLES = (
    MESSAGES,
    SEGMENT,
    COMMANDS,
    FOUND,
    KEPT,
    NO_COMMANDS,
    REJECTED,
    REBUILT_TAKEN,
    REBUILT_DELIVERED,
    REBUILT_MOVED,
    REBUILT_WAITING,
)


class Operator:
    """Runs a `Shard` a key.

    Args:
        state: Spark's map for the key that is being run.
        shard_keys: for each shard the key of its rows.
        settings_json: of the tracker. `min_index_count_per_bucket` is of all shards together.
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
        """Takes a shard's input rows of a batch; yields what the shard does.

        Args:
            key: the shard's.
        """
        started = time.perf_counter()
        offset: Offset | None = None
        request_ids: dict[str, int] = {}
        switches: list[Switch] = []
        rebuilt: Rebuilt | None = None
        tables: dict[str, list[pa.Table]] = {kind: [] for kind in _TABLES}
        for row in rows:
            if row.kind == TICK:
                offset = Offset.from_json(json.loads(row.body))
            elif row.kind == REQUEST_IDS:
                request_ids = json.loads(row.body)
            elif row.kind == SWITCHES:
                switches = [Switch(**switch) for switch in json.loads(row.body)]
            elif row.kind == REBUILT:
                meta = json.loads(row.body)
                rebuilt = Rebuilt(
                    meta["sealed"],
                    meta["unwanted"],
                    request_ids=meta["request_ids"],
                    paused=meta["paused"],
                    released=meta["released"],
                )
            else:
                tables[row.kind].append(unpack(bytes(row.body)))
        if offset is None:
            raise AssertionError(f"a batch without a tick for the shard of key {key}")
        # A version that a batch of an earlier program has not recorded is not known.
        version, now = dict(zip(LOOKED_UP, offset.lookup_versions, strict=False)).get("outcomes"), offset.now

        def first_answers(ids: Collection[str]) -> pa.Table:
            return find_first_answers(self._tables, version, ids, now)

        shard = Shard(
            SparkStore(self._state),
            offset.known_routes.subscriptions,
            self._min_index_count,
            self._settings.tick_time_millis,
            self._compression,
        )
        intake = Intake(
            messages=concat(tables[MESSAGES]),
            segment=concat(tables[SEGMENT]),
            commands=concat(tables[COMMANDS], COMMAND_ROWS),
            request_ids=request_ids,
            found=concat(tables[FOUND], KNOWN),
            kept=concat(tables[KEPT]),
            switches=switches,
            rebuilt=rebuilt
            and replace(
                rebuilt,
                taken=concat(tables[REBUILT_TAKEN], TAKEN),
                delivered=concat(tables[REBUILT_DELIVERED], TAKEN),
                moved=concat(tables[REBUILT_MOVED], MOVED),
                waiting=concat(tables[REBUILT_WAITING], COMMAND_ROWS),
            ),
            no_commands=concat(tables[NO_COMMANDS]),
            first_answers=first_answers,
            back={topic for topic, _ in offset.back},
            rejected=concat(tables[REJECTED]),
        )
        effects = shard.apply(offset.to_tick(), intake)

        number = self._shard_of[key]
        for release in effects.releases:
            kind = RELEASE if release.is_planned else SHORT_NOTICE
            yield _output(number, kind, release.tick, pack(release.rows))
        for kind, table in (
            (BUCKET, effects.bucket),
            (CANCELS, effects.cancels),
            (ENTRIES, effects.entries),
            (REJECTS, effects.rejects),
            (OUTCOMES, effects.outcomes),
        ):
            for start in range(0, table.num_rows, PART_ROWS):
                yield _output(number, kind, offset.tick, pack(table.slice(start, PART_ROWS)))
        millis = round((time.perf_counter() - started) * 1000)
        status = effects.status | {"operator_millis": millis, "run": offset.run, "unwritable": offset.unwritable}
        status |= {"changed": offset.changed}
        yield _output(number, STATUS, offset.tick, json.dumps(status).encode())
