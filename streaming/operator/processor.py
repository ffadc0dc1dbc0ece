"""The work of the stateful operator: applies a batch's input to each shard, and yields the shard's output."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import Row

from conf.errors import DelayLakeError
from conf.settings import TrackerSettings
from conf.time_zones import using
from streaming.batch_schema import InputKind, ShardStatus, fields_of, output_rows, read_input, status_row
from streaming.checkpoint.offset import Offset
from streaming.operator.schemas import OUTPUT_SCHEMA
from streaming.operator.spark_store import SparkStore
from tracker.message_state.changes import Compression
from tracker.messages import concat
from tracker.rebuilt import Rebuilt
from tracker.schemas import OUTCOME_ROWS
from tracker.shard import Shard, StateOptions
from tracker.sharding import ShardId
from tracker.store import Store
from tracker.tick import Effects, TickInput
from tracker.tick_failures import apply_without_failing_rows
from warehouse.delta.tables import Tables
from warehouse.queries.first_answers import find_first_answers
from warehouse.queries.index_rows import LOOKED_UP, find_keyed_messages

_MOST_NAMED = 1_000  # failures that are told

_TIMES = frozenset(["tick", "now", "cutoff", "next_due"])  # in `Effects.status`: no counts

_output = Row(*OUTPUT_SCHEMA.names)


class NoTickError(DelayLakeError):
    """The input of a batch has no tick for a shard."""


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
        received, number = read_input(rows), self._shard_of[key]
        if InputKind.TICK not in received:
            raise NoTickError(f"a batch without a tick for the shard of key {key}")
        offset = Offset.from_json(received[InputKind.TICK])

        store = SparkStore(self._state)

        def shard_on(store: Store) -> Shard:
            return Shard(
                store,
                offset.known_routes.subscriptions,
                self._min_index_count,
                self._settings.tick_time_millis,
                self._options,
                ShardId(number, len(self._shard_of)),
            )

        with using(received.get(InputKind.TIME_ZONES)):
            tick_input = self._tick_input(offset, received)
            effects = apply_without_failing_rows(store, shard_on, offset.to_tick(), tick_input)
        store.save()
        if InputKind.REBUILT_OUTCOMES in received:
            effects.outcomes = concat([received[InputKind.REBUILT_OUTCOMES], effects.outcomes], OUTCOME_ROWS)
        for row in output_rows(number, offset.tick, effects):
            yield _output(*row)
        millis = round((time.perf_counter() - started) * 1000)
        yield _output(*status_row(replace(_status(number, offset, effects, millis), payload_files=sorted(store.files))))

    def _tick_input(self, offset: Offset, received: Mapping[InputKind, Any]) -> TickInput:
        """Makes the tracker's input. Its look-ups read the tables at the versions that the offset records."""
        # The offset of an earlier program may lack this version: then it is None.
        version = dict(zip(LOOKED_UP, offset.lookup_versions, strict=False)).get("outcomes")

        def first_answers(ids: Collection[str]) -> pa.Table:
            return find_first_answers(self._tables, version, ids, offset.now)

        def find_keyed(names: Collection[tuple[str, str]], groups: Sequence[int]) -> pa.Table:
            return find_keyed_messages(self._tables, offset.index_version, names, groups)

        fields = fields_of(TickInput, received)
        if InputKind.REBUILT in received:
            fields["rebuilt"] = replace(received[InputKind.REBUILT], **fields_of(Rebuilt, received))
        reinstated = {topic for topic, _ in offset.reinstated} | {*offset.newly_keyed}
        return TickInput(**fields, first_answers=first_answers, find_keyed=find_keyed, reinstated=reinstated)


def _status(shard: int, offset: Offset, effects: Effects, millis: int) -> ShardStatus:
    counts = {name: n for name, n in effects.status.items() if name not in _TIMES}
    return ShardStatus(
        shard=shard,
        tick=offset.tick,
        now=offset.now,
        cutoff=offset.cutoff,
        run_id=offset.run_id,
        unwritable=offset.unwritable,
        changed=offset.changed,
        next_due=effects.status["next_due"],
        counts=counts | {"operator_millis": millis},
        shaped_until=effects.shaped_until,
        drained=effects.drained,
        resuming=effects.resuming,
        waiting=effects.waiting,
        paused=effects.paused,
        failures=effects.failures[:_MOST_NAMED],
    )
