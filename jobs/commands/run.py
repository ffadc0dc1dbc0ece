"""`delaylake run`: runs the delivery job, until SIGTERM or SIGINT."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.logs import LogFormat, configure, name_settings
from jobs.open_topics import warn_of_open_topics
from jobs.options import Output, OutputOption, global_options
from jobs.reporter import Reporter
from jobs.spark_log import output_of_children, rotate, spark_log_of

if TYPE_CHECKING:
    import pyarrow as pa
    from filelock import FileLock
    from prometheus_client.registry import Collector

    from conf.settings import Settings
    from status.alerts import Alerts
    from status.batch_status import BatchStatus
    from status.status_writer import StatusWriter
    from streaming.session import SparkSession
    from warehouse.routes.known_routes import KnownRoute

_log = logging.getLogger(__name__)

_REPORT_SECONDS = 10.0
_LOCK_SECONDS = 15  # the longest time for which a job that ends keeps the checkpoint
_LOG_SECONDS = 1.0  # how often the size of Spark's log is looked at
_STANDBY_SECONDS = 0.5  # how often a standby checks whether it has to stop; it tries the lock ten times as often


def run(
    context: typer.Context,
    report_every: Annotated[float, typer.Option(min=0, help="Seconds between two lines of progress; 0 for none.")] = (
        _REPORT_SECONDS
    ),
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Start Spark, then wait until no other job runs on the checkpoint, and take over."
        ),
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Run the delivery job until SIGTERM or SIGINT. Prints `ready` once it reads; progress goes to stderr.

    With --standby it prints `standby` when it could take over.

    Before `ready` it prints a line for each change of the settings' routes since the last run. With --output json each
    line of stdout is an object: {"event": "standby"}, {"event": "changed", "text": ...}, {"event": "ready"}, then
    {"event": "progress", ...}.
    """
    options = global_options(context)
    configure(logging.DEBUG if options.verbose else logging.INFO, options.log_format or LogFormat.TEXT)
    name_settings(options.settings.file)
    faulthandler.register(signal.SIGUSR1, 2)  # stderr: what each thread does
    reporter = Reporter(output, report_every, options.settings.release.max_in_flight_messages)
    run_job(options.settings, reporter, keeps_spark_log=not options.verbose, is_standby=standby)


def run_job(settings: Settings, reporter: Reporter, keeps_spark_log: bool = True, is_standby: bool = False) -> None:
    """Runs the job in this process until SIGTERM or SIGINT.

    Args:
        settings: the settings.
        reporter: prints the job's progress.
        keeps_spark_log: whether Spark's output goes to `spark.log` in the checkpoint's folder, and not to this
            process's output.
        is_standby: whether to start Spark and then wait until no other job has the checkpoint.

    Raises:
        StartError, CheckpointError, FolderError: the job can't start.
        JobError: it can't go on.
        RoutesError: the settings' routes don't fit the checkpoint.
    """
    from filelock import Timeout

    from broker.client import is_listening
    from conf.arrow import use_system_memory
    from conf.files import make_folder
    from conf.settings import is_object_storage, local_path
    from jobs.temporary_folder import temporary_folder
    from streaming.checkpoint.checkpoint import checkpoint_lock
    from streaming.checkpoint.shard_count import with_shard_count

    use_system_memory()
    if not settings.routes:
        from streaming.start_checks import StartError

        raise StartError("no routes in the settings: name at least one source topic under `routes`")
    settings = with_shard_count(settings)
    folder = Path(local_path(settings.checkpoint))
    lock, stopping = checkpoint_lock(folder), threading.Event()
    if not is_object_storage(settings.warehouse):
        make_folder(Path(local_path(settings.warehouse)), "warehouse")
    if has_broker := is_listening(settings.pulsar):
        warn_of_namespaces(settings)
        warn_of_open_topics(settings)
    else:
        _log.warning("no broker at %s, trying again", settings.pulsar.service_url)
    with ExitStack() as sessions:  # ended last: that takes a second, for which no other job is to wait
        sessions.enter_context(temporary_folder())
        spark = None
        if is_standby:
            spark = sessions.enter_context(_spark(settings, keeps_spark_log, stopping))
            if not _stand_by(spark, settings, reporter, lock, stopping):
                return
        else:
            try:
                lock.acquire(timeout=_LOCK_SECONDS)
            except Timeout:
                from streaming.start_checks import StartError

                raise StartError(f"another job runs on the checkpoint {folder}") from None
        try:
            with _reporting(settings) as (status, alerts):
                spark = spark or sessions.enter_context(_spark(settings, keeps_spark_log, stopping))
                _deliver(spark, settings, reporter, status, alerts, stopping, warns_when_ready=not has_broker)
        finally:
            lock.release()


@contextmanager
def _spark(settings: Settings, keeps_log: bool, stopping: threading.Event) -> Iterator[SparkSession]:
    """Runs Spark while the block runs; from then on SIGTERM and SIGINT set `stopping`."""
    from py4j.protocol import Py4JError

    from streaming.session import create_session

    log = spark_log_of(settings) if keeps_log else None
    with output_of_children(log), ThreadPoolExecutor(1) as thread:
        thread.submit(importlib.import_module, "streaming.query")  # takes a second, while Spark's JVM starts
        spark = create_session(settings, "delaylake")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        yield spark
    finally:
        with suppress(ConnectionError, Py4JError):  # there may be no JVM to stop any more
            spark.stop()


def _stand_by(
    spark: SparkSession, settings: Settings, reporter: Reporter, lock: FileLock, stopping: threading.Event
) -> bool:
    """Waits until no other job has the checkpoint; returns whether it has the lock now, and was not stopped."""
    from filelock import Timeout

    from conf.settings import local_path
    from streaming.checkpoint.checkpoint import Checkpoint
    from streaming.crash_recovery import check_checkpoint
    from streaming.warm_up import warm_up

    check_checkpoint(settings, Checkpoint(Path(local_path(settings.checkpoint))))
    warm_up(spark, settings)
    reporter.standby()
    while not stopping.is_set():
        spark.sparkContext.defaultParallelism  # noqa: B018  raises if the JVM is gone
        with suppress(Timeout):
            lock.acquire(timeout=_STANDBY_SECONDS)
            return True
    return False


@contextmanager
def _reporting(settings: Settings) -> Iterator[tuple[StatusWriter, Alerts]]:
    """Writes the job's status, and serves its metrics, while the block runs."""
    from status import otlp
    from status.alerts import Alerts
    from status.metrics import JobCollector
    from status.status_writer import StatusWriter

    alerts = Alerts()
    status = StatusWriter(settings.warehouse, settings.release.max_in_flight_messages, alerts.current)
    collector = JobCollector(status.status)
    with status, _metrics_server(settings, collector), otlp.exported(collector):
        yield status, alerts


def _deliver(
    spark: SparkSession,
    settings: Settings,
    reporter: Reporter,
    status: StatusWriter,
    alerts: Alerts,
    stopping: threading.Event,
    warns_when_ready: bool,
) -> None:
    """Runs the job until `stopping` is set.

    Args:
        spark: the Spark session.
        settings: the settings.
        reporter: prints the job's progress.
        status: writes the job's status.
        alerts: the job's alerts.
        stopping: set when the job has to end.
        warns_when_ready: whether to call `warn_of_namespaces` when the job is ready, since there was no broker before.
    """
    from jobs.background_maintenance import BackgroundMaintenance
    from streaming.query import DelayedDelivery
    from streaming.session import archive_classes, is_on_cluster
    from warehouse.routes.missing_routes import MissingRoutesWatch

    def on_batch(batch: BatchStatus) -> None:
        status.batch(batch)
        reporter.batch(batch)

    def on_deliveries(rows: pa.Table) -> None:
        status.deliveries(rows)
        reporter.deliveries(rows)

    if is_on_cluster(spark):
        status.runs_on_cluster()
    missing = _update_routes(settings, reporter, status)
    job = DelayedDelivery(spark, settings, stopping, on_batch, on_deliveries, alerts)
    failure: list[BaseException] = []

    def work() -> None:
        try:
            job.run()
        except BaseException as error:
            failure.append(error)

    log = spark_log_of(settings)
    # Signals are handled between bytecodes of the main thread, so that must not be inside a call to Spark.
    worker = threading.Thread(target=work, name="job")
    worker.start()
    watch = MissingRoutesWatch(missing, lambda topic: _waiting(settings, missing, topic), alerts)
    with watch:
        while worker.is_alive() and not job.is_ready:
            worker.join(0.2)
        if warns_when_ready and job.is_ready:
            warn_of_namespaces(settings)
            warn_of_open_topics(settings)
        archive_classes(spark)
        # Maintenance begins only after the job has taken the warehouse over: an earlier epoch may not commit.
        with BackgroundMaintenance(settings) if settings.maintain.automatic else nullcontext():
            while worker.is_alive():
                worker.join(_LOG_SECONDS)
                rotate(log)
    if failure:
        raise failure[0]


def _update_routes(settings: Settings, reporter: Reporter, status: StatusWriter) -> Mapping[str, KnownRoute]:
    """Prints the changes of the routes since the last run; returns the missing routes, by topic.

    Raises:
        StartError, CheckpointError: another program has written the checkpoint, or for other settings.
        RoutesError: the settings' routes don't fit the checkpoint.
    """
    from conf.settings import local_path
    from streaming.checkpoint.checkpoint import Checkpoint
    from streaming.checkpoint.prepared import last_routes
    from streaming.crash_recovery import check_checkpoint
    from warehouse.routes.known_routes import KnownRoutes, changes
    from warehouse.schedules.schedules import schedules_left_out

    folder = Path(local_path(settings.checkpoint))
    check_checkpoint(settings, Checkpoint(folder))
    before = last_routes(folder)
    now = (before or KnownRoutes.from_json(status.status().routes)).updated_to(settings)
    if before is not None:
        reporter.changed(changes(before, now) + schedules_left_out(settings, before, now))
    status.routes(now.to_json())
    return now.missing


def _waiting(settings: Settings, missing: Mapping[str, KnownRoute], topic: str) -> int:
    """Returns the number of pending messages of a topic without a route."""
    from warehouse.queries.pending_messages import Pending
    from warehouse.routes.known_routes import as_routes

    return Pending(settings.model_copy(update={"routes": as_routes(missing)}), topic).count()


@contextmanager
def _metrics_server(settings: Settings, collector: Collector) -> Iterator[None]:
    """Serves the job's metrics while the block runs, if `metrics.port` is set; logs a warning if it can't."""
    if not settings.metrics.port:
        yield
        return
    from jobs.metrics_server import serve_metrics

    try:
        server, thread = serve_metrics(settings, collector)
    except OSError as error:
        _log.warning("no metrics on %s:%d: %s", settings.metrics.host, settings.metrics.port, error)
        yield
        return
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def warn_of_namespaces(settings: Settings) -> None:
    """Logs a warning for each namespace of destinations that may get a message twice after a crash.

    That is possible without deduplication, which drops the second one, or without retention, with which a rebuild finds
    the first one.
    """
    from broker.client import PulsarError
    from broker.pulsar_admin.admin_rest import AdminClient

    destinations = [s.destination for route in settings.routes for s in route.subscriptions]
    namespaces = sorted({"/".join(d.removeprefix("persistent://").split("/")[:2]) for d in destinations})
    with AdminClient(settings.pulsar) as admin:
        for namespace in namespaces:
            try:
                if not admin.deduplication_enabled(namespace):
                    _log.warning(
                        "delivery to %s is at least once, not exactly once: its broker has no deduplication", namespace
                    )
                elif not admin.has_retention(namespace):
                    _log.warning(
                        "%s has no retention: if the checkpoint is lost soon after a restart of its broker, what was "
                        "sent just before comes twice; some minutes of retention are enough",
                        namespace,
                    )
            except PulsarError as error:
                _log.warning("whether %s has deduplication and a retention is not known: %s", namespace, error)
