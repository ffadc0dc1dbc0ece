"""The Spark session, with the settings that keep a batch quick."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from conf.settings import Settings

_RELEASE_POOL = "release"

_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
# The default one forks processes for links on local disks: 50 to 150 ms a batch. Its rename is not exclusive, so the
# job holds a lock of its own on the checkpoint.
_CHECKPOINT_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

_CONF = {
    "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    "spark.sql.streaming.stateStore.maintenanceInterval": "15s",
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.daemon.module": "streaming.daemon",
    "spark.scheduler.mode": "FAIR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.ui.retainedExecutions": "20",
    "spark.ui.retainedJobs": "50",
    "spark.ui.retainedStages": "50",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Release tasks mostly sleep; speculative copies of them would only wait for the same producer's name.
    "spark.speculation": "false",
}

# The quick compiler only: what Spark's JVM does here is planning and passing on, all else is in Python. The other one
# takes a sixth of a core for minutes and makes the first batches last seconds, for code that is hardly faster.
_JVM_OPTIONS = "-XX:+UseSerialGC -Xss4m -XX:TieredStopAtLevel=1"

_TASK_FAILURES = 4


def create_session(settings: Settings, name: str, jars: Sequence[Path] = (), delta: bool = False) -> SparkSession:
    """A Spark session for the job.

    Args:
        settings: `spark.master` may be local or a cluster's; `spark.conf` overrides anything set here.
        jars: to add to the class path.
        delta: whether Spark itself reads and writes Delta tables (the JARs must be those of Delta).
    """
    # Spark would start whatever python3 is first on the path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    conf = {
        **_CONF,
        "spark.sql.shuffle.partitions": str(settings.tracker.shards),
        "spark.driver.extraJavaOptions": _JVM_OPTIONS,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
    }
    if not settings.spark.master.startswith("local"):
        del conf["spark.driver.bindAddress"], conf["spark.driver.host"]
    if settings.checkpoint.startswith(("file:", "/", ".")):
        conf["spark.sql.streaming.checkpointFileManagerClass"] = _CHECKPOINT_FILES
    if delta:
        conf["spark.sql.extensions"] = "io.delta.sql.DeltaSparkSessionExtension"
        conf["spark.sql.catalog.spark_catalog"] = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        conf["spark.databricks.delta.snapshotPartitions"] = "2"
    if jars:
        conf["spark.jars"] = ",".join(str(jar) for jar in jars)
    conf |= {key: str(value) for key, value in settings.spark.conf.items()}
    builder = SparkSession.builder.appName(name).master(_master(settings))
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _master(settings: Settings) -> str:
    """The master; a local one gets slots for release tasks, which mostly sleep, and retries of a failed task."""
    local = re.fullmatch(r"local(\[(\*|\d+)\])?", settings.spark.master)
    if not local:
        return settings.spark.master
    cores = os.cpu_count() or 1
    threads = {None: 1, "*": cores}.get(local[2]) or int(local[2])
    slots = threads + 2 * settings.release.lanes * settings.tracker.shards
    return f"local[{slots},{_TASK_FAILURES}]"


def shard_keys(spark: SparkSession, shards: int) -> list[int]:
    """For each shard an integer that Spark's hash puts in a partition of its own, so that no task gets two shards."""
    partitions = [
        row[0]
        for row in spark.sql(f"SELECT pmod(hash(cast(id AS int)), {shards}) FROM range({shards * 64})").collect()  # noqa: S608
    ]
    return [partitions.index(shard) for shard in range(shards)]
