"""The job's Spark session, with the settings that keep a batch quick."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pyspark
from pyspark import SparkConf
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from broker.jvm.class_archive import archive_options, discard_archive, make_archive
from broker.jvm.jars import cache_folder
from conf.errors import DelayLakeError
from conf.files import OWNER_ALONE
from conf.settings import Settings, local_threads
from streaming.local_files import set_modes_in_jvm
from streaming.spark_imports import import_without_pandas

__all__ = ["SparkSession"]  # the type, for those that import no PySpark

_log = logging.getLogger(__name__)

_SLOW_SLOTS = 8  # for tasks that send to slow destinations; as many as `streaming.release.attempt.MOST_CONNECTIONS`
_SECRET_VARIABLE = "_SPARK_AUTH_SECRET"  # noqa: S105  Spark's own


class ClusterError(DelayLakeError):
    """A cluster can't be used as the settings say. The message is one line."""


_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
# Spark's default manager forks processes for links on local disks, which takes 50 to 150 ms a batch. The rename of this
# manager is not exclusive, so the job holds a lock of its own on the checkpoint.
_CHECKPOINT_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

# Sockets of the system between Spark's JVM and Python, in the temporary folder. The system limits the length of a path.
_SOCKETS = "spark.python.unix.domain.socket.enabled"
_SOCKET_FOLDER_BYTES = 60

_CONF = {
    "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINT_FILES,
    "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    "spark.sql.streaming.stateStore.maintenanceInterval": "15s",
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.hadoop.fs.permissions.umask-mode": f"{OWNER_ALONE:03o}",  # Hadoop sets modes itself
    _SOCKETS: "true",
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

# On a cluster, between driver and executors: who does not know the secret of the application is refused, and what goes
# over the network, or is spilled to disks of executors, is encrypted.
_PROTECTION = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
    "spark.io.encryption.enabled": "true",
}
_SECRET = "spark.authenticate.secret"  # noqa: S105

# The JVM's quick compiler (C1) only: Spark's JVM plans batches and passes rows on, all other work is in Python. The
# second compiler (C2) takes a sixth of a core for minutes, makes the first batches last seconds, and gains hardly
# anything.
# New objects get 64 MiB, not a third of the heap. It begins with 224 MiB, not with a 64th of the machine's memory: what
# is alive takes some 80 MiB, and the rest would be filled with garbage before it is collected.
# A JVM that has run out of memory ends at once: a thread that the error has ended may have been writing state.
# What `jstat` shows is sampled every second, not twenty times as often, which an idle job pays for, too.
_JVM_OPTIONS = (
    "-XX:+UseSerialGC -Xms224m -Xmn64m -Xss4m -XX:TieredStopAtLevel=1 -XX:+ExitOnOutOfMemoryError "
    "-XX:PerfDataSamplingInterval=1000"
)

# For Spark's JVM and the Python processes. Else malloc has up to eight arenas for each core, each with freed memory
# that it does not return; and numpy starts threads for matrix products, which the job does not compute.
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1"}

_JVM_OPTIONS_KEY = "spark.driver.extraJavaOptions"

# A larger result of a task goes through Spark's block store and network stack, on one machine, too: 8 ms of CPU more
# for 2 MB. A shard's output of a batch is that large when batches take long, or much is due at once.
_DIRECT_RESULT = "32m"

_TASK_FAILURES = 4

# The packages of this program that tasks import, and the archive in which executors get them.
_SHIPPED = ("broker", "conf", "status", "streaming", "tracker", "warehouse")
_ARCHIVE = "delaylake.zip"


def create_session(
    settings: Settings, name: str, jars: Sequence[Path] = (), delta: bool = False, is_job: bool = True
) -> SparkSession:
    """Starts the job's Spark session, or returns the running one.

    On a cluster, executors get this program's own packages from the driver. The interpreter on the executors, at
    PYSPARK_PYTHON or else at the path of this process's interpreter, must have the other dependencies. Options of
    spark-submit override the defaults here; its master, if it is a cluster, overrides the settings. The function sets
    environment variables of this process, which Spark's processes inherit.

    Args:
        settings: `spark.master` may be local or a cluster; `spark.conf` overrides anything set here.
        name: of the application.
        jars: files to add to the class path.
        delta: whether Spark itself reads and writes Delta tables; `jars` must then contain Delta's JARs.
        is_job: whether the session runs the job; else it does heavy work, which keeps a core busy for each task.

    Raises:
        ClusterError: a standalone cluster's secret is missing.
    """
    home = _use_compiled_pyspark()
    import_without_pandas()
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    # Spark would start whatever python3 is first on the path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    submitted = dict(SparkConf().getAll()) if "PYSPARK_GATEWAY_PORT" in os.environ else {}
    master = submitted.pop("spark.master", "local")
    if master.startswith("local"):
        master = settings.spark.master
    is_local = master.startswith("local")
    conf = {**_CONF, _JVM_OPTIONS_KEY: _JVM_OPTIONS}
    if is_job:
        conf["spark.sql.shuffle.partitions"] = str(settings.tracker.shard_count)
        # A row of the operator's input or output has up to `tracker.packing.PART_BYTES`.
        conf["spark.sql.execution.arrow.maxRecordsPerBatch"] = "4"
    else:  # not in the folder where the command runs
        conf["spark.sql.warehouse.dir"] = _temporary_folder()
    if is_local:
        conf |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        conf["spark.task.maxDirectResultSize"] = _DIRECT_RESULT
    else:
        # Before a Python worker looks for what Spark ships, it starts with `streaming.daemon`.
        archive = _archive()
        conf |= {"spark.executor.extraJavaOptions": _JVM_OPTIONS, "spark.executorEnv.PYTHONPATH": archive.name}
        conf |= _PROTECTION
    if delta:
        conf["spark.sql.extensions"] = "io.delta.sql.DeltaSparkSessionExtension"
        conf["spark.sql.catalog.spark_catalog"] = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        if is_local:
            conf["spark.databricks.delta.snapshotPartitions"] = "2"
    if jars:
        conf["spark.jars"] = ",".join(str(jar) for jar in jars)
    if is_local:  # where this process has its temporary files, too, and not where each of Spark's parts would
        conf["spark.local.dir"] = tempfile.gettempdir()
        if len(os.fsencode(tempfile.gettempdir())) > _SOCKET_FOLDER_BYTES:
            conf[_SOCKETS] = "false"
    own = submitted | {key: str(value) for key, value in settings.spark.conf.items()}
    conf |= own
    if not is_local:
        _check_secret(master, conf)
    of_archive, of_process = [], []
    if home is not None and _JVM_OPTIONS_KEY not in own:
        of_archive = _archive_options(home, conf)
        if " " not in tempfile.gettempdir():  # Spark would cut the option there
            of_process = [f"-Djava.io.tmpdir={tempfile.gettempdir()}"]
    conf |= {"spark.app.name": name, "spark.master": _with_slots(master, settings) if is_job else master}
    try:
        spark = _start(conf | {_JVM_OPTIONS_KEY: " ".join([conf[_JVM_OPTIONS_KEY], *of_process, *of_archive])})
    except PySparkRuntimeError:
        if not discard_archive(of_archive):
            raise
        _log.info("Spark's JVM did not start with the archive of its classes: started without")
        spark = _start(conf | {_JVM_OPTIONS_KEY: " ".join([conf[_JVM_OPTIONS_KEY], *of_process])})
    if not is_local:
        spark.sparkContext.addPyFile(str(archive))
    return spark


def is_on_cluster(spark: SparkSession) -> bool:
    """Whether a session's executors are processes of their own, which may run on other machines."""
    return re.fullmatch(r"local(\[.*\])?", str(spark.sparkContext.master)) is None


def _check_secret(master: str, conf: Mapping[str, str]) -> None:
    """Checks that a standalone cluster's secret is known: YARN and Kubernetes make one for each application.

    Raises:
        ClusterError: it is not.
    """
    is_on = conf["spark.authenticate"].lower() == "true"
    if is_on and master.startswith("spark://") and not (conf.get(_SECRET) or os.environ.get(_SECRET_VARIABLE)):
        raise ClusterError(
            f"{master} needs a secret: set {_SECRET} in `spark.conf`, the same as of its master and workers "
            "(docs/deployment.md), or `spark.authenticate: false` for a network that nobody else reaches"
        )


def _start(conf: Mapping[str, str]) -> SparkSession:
    builder = SparkSession.builder
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    if conf["spark.master"].startswith("local"):
        set_modes_in_jvm(spark)
    return spark


def archive_classes(spark: SparkSession) -> None:
    """Archives the classes that Spark's JVM has loaded, if there is no archive yet; it makes later starts quicker.

    The archive is made later, in the background; under spark-submit none is made.
    """
    jvm = getattr(spark.sparkContext._gateway, "proc", None)
    if jvm is not None:
        make_archive(jvm.pid)


def _archive_options(home: Path, conf: Mapping[str, str]) -> list[str]:
    """Returns the options with which Spark's JVM uses the archive of its classes, see `broker.jvm.class_archive`."""
    folder = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(folder) / "bin")) if folder else shutil.which("java")
    if java is None:
        return []
    others = [f"{key}={value}" for key, value in sorted(conf.items()) if key.startswith("spark.driver.")]
    return archive_options("spark", Path(java), (home / "jars").glob("*.jar"), [str(home), *others])


def _use_compiled_pyspark() -> Path | None:
    """Lets Spark's Python processes import the installed PySpark, which is compiled.

    They would import its sources from the archive python/lib/pyspark.zip, and compile them: a second for each of the
    dozen processes of a start. A SPARK_HOME without that archive lets them import what this process imports.

    Returns:
        the folder that SPARK_HOME is set to, the same at each start, because an archive of classes names its JARs by
        their paths; None: SPARK_HOME was set before, or this runs under spark-submit.
    """
    if "SPARK_HOME" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ:
        return None
    installed = Path(pyspark.__file__).parent
    version = hashlib.sha256(f"{installed} {pyspark.__version__}".encode()).hexdigest()[:12]
    home = cache_folder() / f"spark-home-{version}"
    try:
        _link(installed, home)
    except OSError:  # the cache can't be written
        home = Path(_temporary_folder())
        _link(installed, home)
    os.environ["SPARK_HOME"] = str(home)
    # For the launcher's JVM, which only prints the command line of Spark's own: saves half of its 0.4 CPU seconds.
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    return home


def _link(installed: Path, home: Path) -> None:
    """Makes a folder with links to those folders of PySpark that Spark's scripts need, if they exist."""
    home.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "conf", "jars"):
        if (installed / name).exists():
            with suppress(FileExistsError):
                (home / name).symlink_to(installed / name)


def _temporary_folder() -> str:
    folder = tempfile.mkdtemp(prefix="delaylake-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _with_slots(master: str, settings: Settings) -> str:
    """Returns the master; a local one gets slots for release tasks, which mostly sleep, and retries of failed tasks."""
    if (threads := local_threads(master)) is None:
        return master
    # Planned and short notice, and twice each: lanes from before the clock was set back may wait for late messages.
    slots = threads + 4 * settings.release.lanes * settings.tracker.shard_count + _SLOW_SLOTS
    if any(subscription.order == "key" for route in settings.routes for subscription in route.subscriptions):
        slots += 4 * settings.release.lanes  # releases in order have lanes of their own, and one task each
    return f"local[{slots},{_TASK_FAILURES}]"


def _archive() -> Path:
    """Returns an archive of this program's packages, which the driver serves as long as it runs."""
    root = Path(__file__).parent.parent
    if root.is_file():
        return root  # this program itself is in an archive, from spark-submit's --py-files
    with zipfile.ZipFile(archive := Path(_temporary_folder()) / _ARCHIVE, "w") as file:
        for package in _SHIPPED:
            for module in sorted((root / package).rglob("*")):
                if module.suffix in (".py", ".sql"):
                    file.write(module, module.relative_to(root))
    return archive
