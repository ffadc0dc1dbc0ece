"""The job: one streaming query and its releases, run until told to stop."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from filelock import FileLock, Timeout
from py4j.protocol import Py4JNetworkError
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from conf.errors import DelayLakeError, one_line
from conf.settings import Settings, local_path
from status.batch_status import BatchStatus
from status.troubles import Troubles
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.last_routes import last_routes
from streaming.entry_points import DelayedDeliveryProcessor, DelayedDeliverySource
from streaming.operator.schemas import OUTPUT_SCHEMA
from streaming.operator_input import shard_keys
from streaming.release.feedback import FeedbackFile
from streaming.release.releaser import Releaser
from streaming.sinks.batch_sink import BatchSink
from streaming.sinks.outcomes import OutcomePublisher
from streaming.start import begin, check_broker, check_sent
from warehouse.tables import Tables

_log = logging.getLogger(__name__)

_STOP_SECONDS = 12.0
_SOURCE_TROUBLES = "troubles.json"  # of the source, which lives in a process of its own
_RESTART_SECONDS = 1.0
_FAILURES_IN_A_ROW = 10
_GOOD_RUN_SECONDS = 60  # a run this long ends a row of failures


class JobError(DelayLakeError):
    """The job can't start, or can't go on. The message is one line."""


class DelayedDelivery:
    """Delivers the messages of all routes on time.

    Args:
        spark: made by `create_session`.
        settings: with at least one route.
        on_batch: called after every batch, in the query's thread.
        on_deliveries: called with the rows that were written to the table `deliveries`, in the releaser's threads.
        troubles: is told of what is wrong.

    Raises:
        JobError: the settings have no routes.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        on_batch: Callable[[BatchStatus], None] = lambda status: None,
        on_deliveries: Callable[[pa.Table], None] = lambda rows: None,
        troubles: Troubles | None = None,
    ) -> None:
        if not settings.routes:
            raise JobError("no routes in the settings: name at least one source topic under `routes`")
        self._spark = spark
        self._settings = settings
        self._on_batch = on_batch
        self._on_deliveries = on_deliveries
        self._troubles = troubles or Troubles()
        self._stopping = threading.Event()
        self._ready = threading.Event()

    @property
    def is_ready(self) -> bool:
        """Whether a batch has gone through since the start."""
        return self._ready.is_set()

    def run(self) -> None:
        """Runs until `stop` is called; goes on from the checkpoint after a failure.

        Raises:
            JobError: another job has the checkpoint, Spark's JVM has ended, or the query fails again and again.
            StartError, CheckpointError, NewClusterError, WarehouseError: settings, checkpoint, tables and broker do
                not go together.
            FencedError: somebody else has taken the warehouse over.
        """
        checkpoint = Path(local_path(self._settings.checkpoint))
        checkpoint.mkdir(parents=True, exist_ok=True)
        lock = FileLock(checkpoint / "delaylake.lock")
        try:
            with lock.acquire(timeout=5):
                self._run_until_stopped(checkpoint)
        except Timeout:
            raise JobError(f"another job runs on the checkpoint {checkpoint}") from None

    def stop(self) -> None:
        """Ends `run` after the current batch."""
        self._stopping.set()

    def _run_until_stopped(self, folder: Path) -> None:
        tables = Tables(self._settings.warehouse, self._settings.tracker.max_indexes_per_bucket_snapshot_segment)
        checkpoint = Checkpoint(folder)
        begin(self._settings, tables, checkpoint)
        check_sent(self._settings, checkpoint)
        keys = shard_keys(self._settings.tracker.shards)
        self._spark.dataSource.register(DelayedDeliverySource)
        failures = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            check_broker(self._settings, checkpoint)
            try:
                error = self._run_once(checkpoint, tables, keys)
            except (Py4JNetworkError, ConnectionError) as lost:
                raise JobError(f"Spark's JVM has ended ({lost}): its log is spark.log in {folder}") from lost
            if error is None:
                return
            tables.check_epoch()
            failures = 1 if time.monotonic() - started > _GOOD_RUN_SECONDS else failures + 1
            if failures >= _FAILURES_IN_A_ROW:
                raise JobError(f"the query failed {failures} times in a row: {error}")
            _log.warning("the query failed and starts again: %s", error)
            self._stopping.wait(_RESTART_SECONDS * failures)

    def _run_once(self, checkpoint: Checkpoint, tables: Tables, keys: list[int]) -> str | None:
        """Runs the query until it ends; returns the error that ended it, in one line; None: it was told to stop."""
        with tempfile.TemporaryDirectory(prefix="delaylake-") as folder:
            feedback = FeedbackFile(Path(folder) / "feedback.json")
            app_id = checkpoint.app_id
            releaser = Releaser(
                self._spark,
                self._settings,
                tables,
                feedback,
                app_id,
                self._on_deliveries,
                self._troubles,
                last_routes(checkpoint.folder),
            )
            outcomes = OutcomePublisher(self._settings, app_id, self._troubles)
            run_id = uuid.uuid4().hex[:12]
            self._troubles.follow(Path(folder) / _SOURCE_TROUBLES)
            sink = BatchSink(tables, releaser, outcomes, checkpoint, run_id, self._batch_done)
            query = self._start(checkpoint.folder, Path(folder), keys, run_id, checkpoint.epoch, sink)
            try:
                while not self._stopping.is_set():
                    if query.awaitTermination(0.2):  # type: ignore[arg-type]  # takes fractions, too
                        break
                    if releaser.failure is not None:
                        return releaser.failure
            except Exception as error:
                return one_line(error)[:500]
            finally:
                self._end(query, releaser, is_fenced=tables.is_fenced)
                outcomes.close()
        return None if self._stopping.is_set() else "the query ended"

    def _start(
        self, checkpoint: Path, folder: Path, keys: list[int], run_id: str, epoch: int, sink: BatchSink
    ) -> StreamingQuery:
        source = (
            self._spark.readStream.format(DelayedDeliverySource.name())
            .option("settings", self._settings.model_dump_json())
            .option("run", run_id)
            .option("feedback", str(folder / "feedback.json"))
            .option("troubles", str(folder / _SOURCE_TROUBLES))
            .option("shard_keys", json.dumps(keys))
            .option("epoch", str(epoch))
            .load()
        )
        processor = DelayedDeliveryProcessor(
            keys,
            self._settings.tracker.model_dump_json(),
            self._settings.warehouse,
        )
        outputs = source.groupBy("shard").transformWithState(processor, OUTPUT_SCHEMA, "Append", "None")
        return (
            outputs.writeStream.queryName("delaylake")
            .foreachBatch(sink)
            .option("checkpointLocation", str(checkpoint / "query"))
            .trigger(processingTime="0 seconds")
            .start()
        )

    def _batch_done(self, status: BatchStatus) -> None:
        self._ready.set()
        self._on_batch(status)

    def _end(self, query: StreamingQuery, releaser: Releaser, is_fenced: bool) -> None:
        """Ends the query; lets the current batch finish and its releases go out, as far as that does not take long.

        Args:
            is_fenced: somebody else has the warehouse: nothing is waited for, and Spark's jobs are cancelled.
        """
        deadline = time.monotonic() + (0 if is_fenced else _STOP_SECONDS)
        releaser.stop_ticks()
        try:
            if query.isActive:
                while query.status["isTriggerActive"] and query.isActive and time.monotonic() < deadline - 6:
                    time.sleep(0.05)
                releaser.wait(max(0.0, deadline - 3 - time.monotonic()))
        finally:
            releaser.stop()
            if is_fenced:
                self._spark.sparkContext.cancelAllJobs()
        try:
            query.stop()
        except Exception as error:
            _log.debug("stopping the query: %s", error)
