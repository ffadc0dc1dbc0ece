"""The job: one streaming query and its releases, run until told to stop."""

from __future__ import annotations

import json
import logging
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from py4j.protocol import Py4JNetworkError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from conf.errors import DelayLakeError, one_line
from conf.settings import Settings, local_path
from status.alerts import DISK, FAILED, QUERY_FAILED, Alerts
from status.batch_status import BatchStatus
from status.disk_room import DiskRoom, is_of_full_disk
from streaming.batch_schema import shard_keys
from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.payload_files import PayloadSweep
from streaming.checkpoint.prepared import last_routes
from streaming.crash_recovery import GivenUpError, Restarts, check_broker, is_good_run, recover, wait_for_broker
from streaming.entry_points import DelayedDeliveryProcessor, DelayedDeliverySource
from streaming.jvm_end import JvmLog
from streaming.operator.schemas import OUTPUT_SCHEMA
from streaming.release.driver.releaser import Releaser, Run
from streaming.release.feedback import FeedbackFile
from streaming.sinks.batch_sink import BatchSink
from streaming.sinks.outcomes import OutcomePublisher
from warehouse.delta.tables import Tables

_log = logging.getLogger(__name__)

_STOP_SECONDS = 12.0
_SOURCE_ALERTS = "troubles.json"  # the file to which the source process writes its alerts
_LOOK_SECONDS = 0.5  # between two looks whether the query or the releaser has failed
_MEMORY_SECONDS = 5.0
# How the line of an exception begins that says what to do.
_EXCEPTION = re.compile(r"(?:[a-z_]\w*\.)*((?:TickFailed|StateLost|SequencesExhausted)Error: )")


class JobError(DelayLakeError):
    """The job can't go on. The message is one line."""


def source_rows(spark: SparkSession, source: type[DelayedDeliverySource], options: Mapping[str, str]) -> DataFrame:
    """Returns the rows of a source with options, by name, as a stream."""
    spark.dataSource.register(source)
    return spark.readStream.format(source.name()).options(**options).load()


def start_query(
    name: str,
    rows: DataFrame,
    settings: Settings,
    keys: list[int],
    sink: Callable[[DataFrame, int], None],
    checkpoint: Path,
) -> StreamingQuery:
    """Starts a query: a source's rows through the stateful operator to a sink.

    Args:
        name: of the query.
        rows: of the source.
        settings: of the job.
        keys: Spark's key of each shard's rows, by shard number.
        sink: called with each batch's output rows and Spark's number of the batch.
        checkpoint: the folder for Spark's checkpoint.
    """
    processor = DelayedDeliveryProcessor(keys, settings.tracker.model_dump_json(), settings.warehouse)
    return (
        rows.groupBy("shard")
        .transformWithState(processor, OUTPUT_SCHEMA, "Append", "None")
        .writeStream.queryName(name)
        .foreachBatch(sink)
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime="0 seconds")
        .start()
    )


def _state_memory_bytes(query: StreamingQuery) -> int:
    """Returns the memory that the state store took in the last batch that Spark tells of; 0: it tells of none."""
    progress = query.lastProgress
    return sum(operator.memoryUsedBytes for operator in progress.stateOperators) if progress is not None else 0


def _end_of(query: StreamingQuery) -> Future[None]:
    """Returns a future that is done when a query has ended, with the error that ended it.

    A thread waits in the JVM: to ask it again and again takes CPU while nothing happens. The thread is no reason for
    the process to go on, since a query whose stop has failed may never end.
    """
    end: Future[None] = Future()

    def await_end() -> None:
        try:
            query.awaitTermination()
        except BaseException as error:
            end.set_exception(error)
        else:
            end.set_result(None)

    threading.Thread(target=await_end, name="end of the query", daemon=True).start()
    return end


class DelayedDelivery:
    """Delivers the messages of all routes on time.

    Args:
        spark: made by `create_session`.
        settings: with at least one route.
        stopping: ends `run` after the current batch.
        on_batch: called after every batch, in the query's thread.
        on_deliveries: called with the rows that were written to the table `deliveries`, in the releaser's threads.
        alerts: records what an operator has to look at.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        stopping: threading.Event,
        on_batch: Callable[[BatchStatus], None] = lambda status: None,
        on_deliveries: Callable[[pa.Table], None] = lambda rows: None,
        alerts: Alerts | None = None,
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._on_batch = on_batch
        self._on_deliveries = on_deliveries
        self._alerts = alerts or Alerts()
        self._stopping = stopping
        self._ready = threading.Event()
        self._state_memory_bytes = 0
        self._has_new_progress = False

    @property
    def is_ready(self) -> bool:
        """Whether a batch has gone through since the start."""
        return self._ready.is_set()

    def run(self) -> None:
        """Runs until `stopping` is set; restarts from the checkpoint after a failure. The caller holds its lock.

        Raises:
            JobError: Spark's JVM has ended, or the query fails again and again.
            StartError, CheckpointError, NewClusterError, WarehouseError: settings, checkpoint, tables and broker do
                not match.
            FencedError: somebody else has taken the warehouse over.
        """
        folder = Path(local_path(self._settings.checkpoint))
        tables = Tables(self._settings.warehouse, self._settings.tracker.max_indexes_per_bucket_snapshot_segment)
        checkpoint = Checkpoint(folder)
        recover(self._settings, tables, checkpoint, self._alerts, self._stopping)
        keys = shard_keys(self._settings.tracker.shard_count)
        log = JvmLog(folder, str(self._settings.spark.conf.get("spark.driver.memory") or ""))
        disk = DiskRoom(self._settings, self._alerts)
        restarts = Restarts()
        while not self._stopping.is_set():
            started = time.monotonic()
            checkpoint.check_offsets()
            check_broker(self._settings, checkpoint)
            try:
                error = self._run_once(checkpoint, tables, keys)
            except (Py4JNetworkError, ConnectionError) as lost:
                raise JobError(log.why_ended(lost)) from lost
            except OSError as failed:
                if not is_of_full_disk(str(failed)):
                    raise
                error = one_line(failed)
            if error is None:
                return
            tables.check_epoch()
            is_full, error = is_of_full_disk(error), error[:500]
            is_full = is_full or disk.why_short() is not None
            try:
                pause = restarts.pause_after(error, time.monotonic() - started, is_full)
            except GivenUpError as given_up:
                raise JobError(str(given_up)) from None
            if is_full:
                _log.warning("a disk is full, the job goes on when there is room: %s", error)
                self._alerts.begin(DISK, "the job", f"waits until there is room: {error}")
            else:
                often = "" if restarts.failures == 1 else f" {restarts.failures} times in a row, last"
                text = f"the query failed{often}, and starts again: {error}"
                _log.warning("%s", text)
                self._alerts.begin(QUERY_FAILED, "the job", text)
            self._stopping.wait(pause)
            wait_for_broker(self._settings, self._alerts, self._stopping)

    def _run_once(self, checkpoint: Checkpoint, tables: Tables, keys: list[int]) -> str | None:
        """Runs the query until it ends. Returns the error that ended it, one line; None: `stopping` was set."""
        with tempfile.TemporaryDirectory(prefix="delaylake-") as folder:
            feedback_file = Path(folder) / "feedback.json"
            app_id = checkpoint.app_id_of(tables.epoch or 0)
            payloads = PayloadSweep(checkpoint.payload_folder)
            run = Run(
                app_id,
                FeedbackFile(feedback_file),
                last_routes(checkpoint.folder),
                Path(folder) if str(self._spark.sparkContext.master).startswith("local") else None,
                checkpoint.release_folder,
                payloads,
            )
            releaser = Releaser(self._spark, self._settings, tables, run, self._on_deliveries, self._alerts)
            outcomes = OutcomePublisher(self._settings, app_id, tables.check_epoch, self._alerts)
            run_id = uuid.uuid4().hex[:12]
            self._alerts.follow(Path(folder) / _SOURCE_ALERTS)
            sink = BatchSink(tables, releaser, outcomes, checkpoint, run_id, self._batch_done, payloads)
            options = {
                "settings": self._settings.model_dump_json(),
                "run": run_id,
                "feedback": str(feedback_file),
                "troubles": str(Path(folder) / _SOURCE_ALERTS),
                "shard_keys": json.dumps(keys),
                "epoch": str(checkpoint.epoch),
            }
            rows = source_rows(self._spark, DelayedDeliverySource, options)
            query = start_query(
                DelayedDeliverySource.name(), rows, self._settings, keys, sink, checkpoint.folder / "query"
            )
            end = _end_of(query)
            started = looked_at = time.monotonic()
            try:
                while not self._stopping.wait(_LOOK_SECONDS):
                    if end.done():
                        end.result()
                        break
                    if time.monotonic() - looked_at >= _MEMORY_SECONDS:
                        looked_at = time.monotonic()
                        if self._has_new_progress:
                            self._has_new_progress = False
                            self._state_memory_bytes = _state_memory_bytes(query)
                        if is_good_run(looked_at - started):
                            self._alerts.end(QUERY_FAILED, "the job")
                    if releaser.failure is not None:
                        return releaser.failure
            except Exception as error:
                return _cause(error)
            finally:
                self._end(query, releaser, is_fenced=tables.is_fenced)
                self._alerts.unfollow()
                outcomes.close()
        return None if self._stopping.is_set() else "the query ended"

    def _batch_done(self, status: BatchStatus) -> None:
        self._alerts.end(DISK, "the job")
        self._ready.set()
        self._has_new_progress = True
        for topic, name, why in status.failures:
            self._alerts.add(FAILED, topic, f"{name} is rejected: {why}", 1)
        self._on_batch(replace(status, state_memory_bytes=self._state_memory_bytes))

    def _end(self, query: StreamingQuery, releaser: Releaser, is_fenced: bool) -> None:
        """Stops the query. Its current batch and releases have up to _STOP_SECONDS to finish.

        Args:
            is_fenced: another job has taken the warehouse over: stop at once, and cancel Spark's jobs.
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


def _cause(error: Exception) -> str:
    """Returns the line of a Spark error that has the exception of the operator or the sink."""
    own = [line.strip() for line in str(error).splitlines() if _EXCEPTION.match(line.strip())]
    return _EXCEPTION.sub(r"\1", own[-1]) if own else one_line(error)
