"""The Spark jobs that send releases."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence

from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

from conf.settings import Settings
from streaming.release.attempt import Assignment, Attempt, SendReport
from streaming.release.driver.lookahead import Lookahead
from streaming.release.task.can_write import can_write
from streaming.release.task.sender import send_releases
from warehouse.delta.tables import Tables

_log = logging.getLogger(__name__)

_EPOCH_SECONDS = 1.0  # how old the last check of the warehouse's epoch may be: a fenced job sends no more


class SparkJobs:
    """Runs tasks that send to destinations. Thread-safe.

    Args:
        spark: runs the tasks.
        settings: of the job.
        tables: of the warehouse.
        lookahead: notes how long they take until they are ready to send.
    """

    def __init__(self, spark: SparkSession, settings: Settings, tables: Tables, lookahead: Lookahead) -> None:
        self._spark = spark
        self._settings_json = settings.model_dump_json()
        self._tables = tables
        self._lookahead = lookahead

    def use_pool(self) -> None:
        """Puts jobs of the calling thread into Spark's pool for releases, so that they do not queue after batches."""
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", "release")

    def check_epoch(self, max_age_seconds: float = _EPOCH_SECONDS) -> float:
        """Checks that this job may still send; returns the time of the check, seconds since the epoch.

        Args:
            max_age_seconds: the check is left out if the last one was less than this ago.

        Raises:
            FencedError: another job has taken the warehouse over.
        """
        at = time.time()
        try:
            self._tables.check_epoch(max_age_seconds)
        except (OSError, DeltaError) as error:  # a warehouse that does not answer holds up no release
            _log.debug("the warehouse's epoch: %s", error)
        return at

    def run(
        self, assignments: Sequence[Assignment], tasks: int, attempt: Attempt, checked_at: float
    ) -> list[SendReport]:
        """Sends assignments, and returns the report of each task.

        Args:
            assignments: the releases to send.
            tasks: the number of tasks, which run side by side.
            attempt: what to send now.
            checked_at: as `check_epoch` returned it.
        """
        started = time.time_ns() // 1_000_000
        sent: list[SendReport] = (
            self._spark.sparkContext.parallelize(assignments, tasks)
            .mapPartitions(
                functools.partial(
                    send_releases, self._settings_json, attempt, epoch=self._tables.epoch, checked_at=checked_at
                )
            )
            .collect()
        )
        ready = [one.ready_at for one in sent if one.ready_at]
        if ready and not any(one.failed for one in sent) and attempt.only is None:
            self._lookahead.note_spark_job(max(ready) - started)
        return sent

    def probe(self, topic: str) -> str:
        """Tries in a task to get a producer for a topic. Returns the error; an empty text: it worked."""
        self.use_pool()
        probed: list[str] = (
            self._spark.sparkContext.parallelize([topic], 1)
            .mapPartitions(functools.partial(can_write, self._settings_json))
            .collect()
        )
        return probed[0]
