"""The Spark session, with the settings that keep a batch quick."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pyspark
from pyspark import SparkConf
from pyspark.sql import SparkSession

from conf.settings import Settings

_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
# The default one forks processes for links on local disks: 50 to 150 ms a batch. Its rename is not exclusive, so the
# job holds a lock of its own on the checkpoint.
_CHECKPOINT_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

_CONF = {
    "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINT_FILES,
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

# What tasks import of this program, and the archive in which executors get it.
_SHIPPED = ("broker", "conf", "status", "streaming", "tracker", "warehouse")
_ARCHIVE = "delaylake.zip"


def create_session(settings: Settings, name: str, jars: Sequence[Path] = (), delta: bool = False) -> SparkSession:
    """A Spark session for the job.

    On a cluster executors get this program's own packages from the driver; they need an interpreter with the other
    dependencies where PYSPARK_PYTHON says, by default at this one's path. Under spark-submit its options come before
    the defaults here, and its master, if that is a cluster's, before the settings'.

    Args:
        settings: `spark.master` may be local or a cluster's; `spark.conf` overrides anything set here.
        jars: to add to the class path.
        delta: whether Spark itself reads and writes Delta tables (the JARs must be those of Delta).
    """
    _use_compiled_pyspark()
    # Spark would start whatever python3 is first on the path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    submitted = dict(SparkConf().getAll()) if "PYSPARK_GATEWAY_PORT" in os.environ else {}
    master = submitted.pop("spark.master", "local")
    if master.startswith("local"):
        master = settings.spark.master
    is_local = master.startswith("local")
    conf = {
        **_CONF,
        "spark.sql.shuffle.partitions": str(settings.tracker.shards),
        "spark.driver.extraJavaOptions": _JVM_OPTIONS,
    }
    if is_local:
        conf |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    else:
        # Before a Python worker looks for what Spark ships, it starts with `streaming.daemon`.
        archive = _archive()
        conf |= {"spark.executor.extraJavaOptions": _JVM_OPTIONS, "spark.executorEnv.PYTHONPATH": archive.name}
    if delta:
        conf["spark.sql.extensions"] = "io.delta.sql.DeltaSparkSessionExtension"
        conf["spark.sql.catalog.spark_catalog"] = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        conf["spark.databricks.delta.snapshotPartitions"] = "2"
    if jars:
        conf["spark.jars"] = ",".join(str(jar) for jar in jars)
    conf |= submitted | {key: str(value) for key, value in settings.spark.conf.items()}
    builder = SparkSession.builder.appName(name).master(_with_slots(master, settings))
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    if not is_local:
        spark.sparkContext.addPyFile(str(archive))
    return spark


def _use_compiled_pyspark() -> None:
    """Has Spark's Python processes import PySpark as it is installed.

    They would take it from an archive of its sources beside it, python/lib/pyspark.zip, and compile it: a second for
    each of the dozen processes of a start. Where there is no such archive, they import what this process does.
    """
    if "SPARK_HOME" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ:
        return
    installed = Path(pyspark.__file__).parent
    home = Path(_temporary_folder())
    for name in ("bin", "conf", "jars"):
        if (installed / name).exists():
            (home / name).symlink_to(installed / name)
    os.environ["SPARK_HOME"] = str(home)


def _temporary_folder() -> str:
    folder = tempfile.mkdtemp(prefix="delaylake-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _with_slots(master: str, settings: Settings) -> str:
    """The master; a local one gets slots for release tasks, which mostly sleep, and retries of a failed task."""
    local = re.fullmatch(r"local(\[(\*|\d+)\])?", master)
    if not local:
        return master
    cores = os.cpu_count() or 1
    threads = {None: 1, "*": cores}.get(local[2]) or int(local[2])
    # Twice the lanes: those from before the clock was set back may wait for what they have until it is due.
    slots = threads + 4 * settings.release.lanes * settings.tracker.shards
    return f"local[{slots},{_TASK_FAILURES}]"


def _archive() -> Path:
    """An archive of this program's packages, for the driver to serve as long as it runs."""
    root = Path(__file__).parent.parent
    if root.is_file():
        return root  # came in an archive itself, by spark-submit's --py-files
    with zipfile.ZipFile(archive := Path(_temporary_folder()) / _ARCHIVE, "w") as file:
        for package in _SHIPPED:
            for module in sorted((root / package).rglob("*.py")):
                file.write(module, module.relative_to(root))
    return archive
