"""Runs some empty batches on a Spark session, so that the job's first batch is as quick as later ones."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition

from conf.settings import Settings
from streaming.batch_schema import InputKind, input_rows, shard_keys
from streaming.checkpoint.offset import Offset
from streaming.entry_points import DelayedDeliveryReader, DelayedDeliverySource
from streaming.query import source_rows, start_query
from streaming.source.reader import SourceReader, TickPart, to_batches

_log = logging.getLogger(__name__)

_BATCHES = 3
_SECONDS = 60  # for all of them


class WarmUpSource(DelayedDeliverySource):
    """A source of batches with nothing but a tick. Its options are those of the job's source."""

    @classmethod
    def name(cls) -> str:
        """The source's name: the format of `spark.readStream`."""
        return "delaylake-warm-up"

    def streamReader(self, schema: Any) -> DelayedDeliveryReader:
        """Makes a reader with the source's options."""
        return _WarmUpReader(self.options)


class _WarmUpReader(DelayedDeliveryReader):
    @cached_property
    def _reader(self) -> SourceReader:
        return _Ticks(self._options)


class _Ticks(SourceReader):
    """Makes offsets with nothing but a tick; neither reads topics nor writes files."""

    def initial_offset(self) -> dict[str, Any]:
        return Offset().to_json()

    def next_offset(self, start: dict[str, Any]) -> dict[str, Any]:
        tick = Offset.from_json(start).tick + 1
        return start if tick > _BATCHES else Offset(tick=tick, run_id="warm-up").to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [TickPart(input_rows(InputKind.TICK, end, self._shard_keys))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, TickPart):
            raise TypeError(f"a part of another source: {type(partition).__name__}")
        return to_batches(partition.rows)

    def commit(self, end: dict[str, Any]) -> None:
        pass

    def stop(self) -> None:
        pass


def warm_up(spark: SparkSession, settings: Settings) -> None:
    """Runs the job's query for some empty batches, on a checkpoint of their own. A failure is only logged.

    By that Spark's JVM loads its classes, and its Python processes import the modules that the job needs.
    """
    keys = shard_keys(settings.tracker.shard_count)
    done = threading.Event()

    def sink(batch: Any, batch_id: int) -> None:
        batch.toArrow()
        spark.sparkContext.parallelize([batch_id], 1).mapPartitions(list).collect()  # as a release
        if batch_id == _BATCHES - 1:
            done.set()

    with tempfile.TemporaryDirectory(prefix="delaylake-", ignore_cleanup_errors=True) as folder:
        try:
            rows = source_rows(spark, WarmUpSource, {"shard_keys": json.dumps(keys)})
            query = start_query(WarmUpSource.name(), rows, settings, keys, sink, Path(folder))
            if not done.wait(_SECONDS):
                _log.warning("the warm-up did not end in time: %s", query.exception())
            query.stop()
        except Exception as error:
            _log.warning("the warm-up failed: %s", error)
