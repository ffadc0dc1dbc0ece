"""Sends each tick's releases in the background, while the query goes on with the next ticks."""

from __future__ import annotations

import functools
import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from broker.pulsar_admin.admin_rest import AdminClient
from conf.settings import Settings, dead_letter_topic, rejects_topic
from status.alerts import Alerts
from streaming.release.driver.job import Job
from streaming.release.driver.job_sender import FinishedJob, JobSender
from streaming.release.driver.lookahead import Lookahead
from streaming.release.driver.part_sender import PartSender
from streaming.release.driver.release_files import ReleaseFiles
from streaming.release.driver.release_records import ReleaseRecords
from streaming.release.driver.spacing import Spacing
from streaming.release.driver.spark_jobs import SparkJobs
from streaming.release.driver.turns import Turns
from streaming.release.driver.unconfirmed_releases import UnconfirmedReleases
from streaming.release.driver.unwritable_destinations import UnwritableDestinations
from streaming.release.driver.write_queue import WriteQueue
from streaming.release.feedback import FeedbackFile
from streaming.release.naming import Target
from streaming.release.producer_names import ProducerNames
from tracker.in_flight import IN_ORDER, PLANNED
from tracker.subscriptions import dead_letters_of
from warehouse.delta.tables import Tables
from warehouse.routes.known_routes import KnownRoutes

_log = logging.getLogger(__name__)


class Releaser:
    """Runs a Spark job for each release, in lanes, and writes its deliveries to the table `deliveries`.

    Jobs of a lane run one after another, because they share producer names; lanes run side by side. When a job's
    deliveries are in the table, the feedback confirms its tick. After a restart, the table's transactions show which
    releases were finished; these are not sent again.

    An unwritable destination holds up no other: `UnwritableDestinations` takes over the messages for it.

    Args:
        spark: runs the jobs.
        settings: of the job.
        tables: of the warehouse.
        feedback: the file that the source process reads.
        app_id: of the checkpoint: the same in all its runs, another for each checkpoint.
        on_deliveries: called with the rows that were written to `deliveries`, in several threads.
        alerts: records unwritable destinations and foreign producers.
        routes: of the last batch of the run before; None: there was none.
        folder: of this run, where tasks run on this machine, too; None: they run on other machines.
        release_folder: for the rows of large releases, as `ReleaseFiles` has it.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        tables: Tables,
        feedback: FeedbackFile,
        app_id: str,
        on_deliveries: Callable[[pa.Table], None],
        alerts: Alerts | None = None,
        routes: KnownRoutes | None = None,
        folder: Path | None = None,
        release_folder: Path | None = None,
    ) -> None:
        alerts = alerts or Alerts()
        routes = (routes or KnownRoutes({})).updated_to(settings)
        rejects_after = settings.release.unwritable_after_millis if settings.release.unwritable == "reject" else None
        self._files = ReleaseFiles(app_id, release_folder)
        slow_seconds = settings.release.slow_after_millis / 1000
        self._failure: str | None = None
        self._lock = threading.Condition()
        self._stopped = threading.Event()
        self._lanes: dict[str, list[Job]] = {}
        self._lookahead = Lookahead(settings.release)
        self._spark_jobs = SparkJobs(spark, settings, tables, self._lookahead)
        self._records = ReleaseRecords(tables, app_id, self._stopped, alerts)
        names = ProducerNames(settings, alerts)
        # Tasks on one machine keep to the rates themselves, with a shared file.
        spacing = Spacing(str(folder / "paces") if folder is not None else "")
        self._unconfirmed = UnconfirmedReleases(
            self._lock, feedback, self._lookahead, lambda: self._unwritable.recorded, self._stopped
        )
        parts = PartSender(self._spark_jobs, names, spacing, tables, self._records, on_deliveries, self._stopped)
        self._unwritable = UnwritableDestinations(
            _destinations(routes),
            settings.release.retry_max_millis / 1000,
            wait_written=self._unconfirmed.wait_written,
            send=parts.send,
            probe=self._spark_jobs.probe,
            is_on_its_way=self._unconfirmed.is_on_its_way,
            on_change=self._unconfirmed.confirm,
            alerts=alerts,
            stopped=self._stopped,
            reject_after_millis=rejects_after,
            slow_seconds=slow_seconds,
            gone=routes.gone | {(topic, dead_letters_of(name)) for topic, name in routes.gone},
        )
        self._turns = Turns(self._lock, self._stopped, lambda: self._unwritable.targets, folder)
        admin = AdminClient(settings.pulsar)
        self._job_sender = JobSender(
            self._spark_jobs, names, spacing, self._turns, self._unwritable, admin, self._stopped, slow_seconds
        )
        self._write_queue = WriteQueue(self._records, self._unconfirmed, self._unwritable, on_deliveries, self._stopped)
        self._writer = self._thread("write deliveries", self._write_queue.run)

    @property
    def failure(self) -> str | None:
        """The error that has ended all releases; None: there is none."""
        return self._failure

    @property
    def lookahead_millis(self) -> int:
        """How long before its time a message is handed out, ms."""
        return self._unconfirmed.lookahead_millis

    @property
    def sending(self) -> int:
        """The number of releases that are not written down yet."""
        return len(self._unconfirmed)

    def submit(
        self,
        tick: int,
        now: int,
        cutoff: int,
        next_due: int,
        bodies: Iterable[tuple[int, int, int, bytes]],
        unwritable: Mapping[str, Any] | None = None,
        waiting: dict[str, dict[str, list[list[int]]]] | None = None,
        drained: Mapping[Target, tuple[int, bool]] | None = None,
        large_bytes: int = 0,
    ) -> None:
        """Takes a batch's releases, to send them in the background. Call it for each batch, also without releases.

        Args:
            tick: of the batch.
            now: the time from which the batch looked ahead, ms since the epoch.
            cutoff: of the batch, ms since the epoch.
            next_due: no message that is in state after the batch is due before this time, ms since the epoch.
            bodies: (shard, tick, kind, packed rows); the first batch of a run has releases of earlier ticks, too. A
                large release comes in several parts, in order.
            unwritable: `Offset.unwritable` of the batch's offset.
            drained: the slow targets to which the batch hands out messages that were held back: how many, and whether
                others wait.
            waiting: messages that wait for places, as `Feedback.waiting` has them by source topic and subscription.
            large_bytes: bytes of large payloads in the state's time slots after the batch.
        """
        releases: dict[tuple[int, int], dict[int, list[bytes]]] = {}
        for shard, of_tick, kind, body in bodies:
            releases.setdefault((of_tick, kind), {}).setdefault(shard, []).append(body)
        with self._lock:
            jobs = {
                release: self._files.job(*release, of_shards, tick)
                for release, of_shards in sorted(releases.items())
                if not self._unconfirmed.is_accepted(release)
            }
            if not self._unconfirmed.has_batch and unwritable:
                self._unwritable.begin(unwritable, jobs)
            self._unconfirmed.begin_batch(tick, unwritable or {}, drained or {})
            self._unwritable.forget_taken_back(unwritable or {})
            for job in jobs.values():
                self._enqueue(job)
            self._unwritable.note_drained(drained or {})
            planned = [jobs[tick, kind].first_due for kind in (PLANNED, PLANNED | IN_ORDER) if (tick, kind) in jobs]
            self._lookahead.note_batch(now, cutoff, min(planned, default=None))
            self._unconfirmed.end_batch(tick, cutoff, next_due, waiting or {}, large_bytes)

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until all releases are written down but for open parts; returns whether they are in time."""
        return self._unconfirmed.wait(timeout_seconds)

    def stop(self) -> None:
        """Starts no more jobs, and ends the threads. The next run hands out again releases that are not confirmed."""
        self._stopped.set()
        self.stop_ticks()
        self._write_queue.end()
        self._writer.join(timeout=10)

    def stop_ticks(self) -> None:
        """Asks the clock for no more batches."""
        self._unconfirmed.stop_ticks()

    def _enqueue(self, job: Job) -> None:
        self._unconfirmed.add(job)
        self._turns.add(job)
        if job.lane not in self._lanes:
            self._lanes[job.lane] = []
            self._thread(f"lane {job.lane}", functools.partial(self._run_lane, job.lane))
        heapq.heappush(self._lanes[job.lane], job)
        self._lock.notify_all()

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Starts a thread. An exception in it becomes `failure`, and ends all releases."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # also a panic of a library in Rust, which is no Exception
                _log.exception("%s", name)
                self._failure = f"{name}: {type(error).__name__}: {error}"

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _run_lane(self, lane: str) -> None:
        self._spark_jobs.use_pool()
        written = self._records.last_tick(self._records.writer(lane))
        while not self._stopped.is_set():
            with self._lock:
                if not self._lock.wait_for(lambda: self._lanes[lane] or self._stopped.is_set(), timeout=60):
                    continue
                if self._stopped.is_set():
                    return
                job = heapq.heappop(self._lanes[lane])
            if job.tick <= written:
                self._turns.end(job)
                self._write_queue.put(FinishedJob(job))
                continue
            is_far = job.first_due > self._lookahead.farthest()
            self._wait_until(job.first_due - self._lookahead.lead_millis)
            if is_far:
                self._unconfirmed.confirm()  # the job's messages count as in flight from now on
            if (finished := self._job_sender.send(job)) is not None:
                self._turns.end(job)
                self._write_queue.put(finished)

    def _wait_until(self, millis: int) -> None:
        while (left := millis / 1000 - time.time()) > 0 and not self._stopped.wait(min(left, 1)):
            pass


def _destinations(routes: KnownRoutes) -> dict[Target, str]:
    """Returns the topic of each target: a destination, its topic of dead letters, or a rejects topic."""
    found = {(topic, s.name): s.destination for topic, route in routes.routes.items() for s in route.subscriptions}
    found |= {(topic, dead_letters_of(name)): dead_letter_topic(to) for (topic, name), to in found.items()}
    return found | {(topic, ""): rejects_topic(topic) for topic in routes.routes}
