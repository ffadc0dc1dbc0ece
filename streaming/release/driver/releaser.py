"""Sends each tick's releases in the background, while the query goes on with the next ticks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from broker.pulsar_admin.admin_rest import AdminClient
from conf.settings import Settings, dead_letter_topic, rejects_topic
from status.alerts import Alerts
from status.internal_errors import InternalErrors
from streaming.checkpoint.payload_files import PayloadSweep
from streaming.release.driver.feedback_writer import FeedbackWriter
from streaming.release.driver.lane_release import SentRelease
from streaming.release.driver.lookahead import Lookahead
from streaming.release.driver.release_files import ReleaseFiles
from streaming.release.driver.release_records import ReleaseRecords
from streaming.release.driver.release_sender import OrderSignals, ReleaseSender
from streaming.release.driver.releases import Releases
from streaming.release.driver.remainder_sender import RemainderSender
from streaming.release.driver.run_context import DispatchedBatch, RunStates, RunThreads, Sending
from streaming.release.driver.spacing import Spacing
from streaming.release.driver.spark_jobs import SparkJobs
from streaming.release.driver.transitions import ReleaseEvent
from streaming.release.driver.unwritable_destinations import RetryRules, UnwritableDestinations
from streaming.release.driver.unwritable_retries import UnwritableRetries
from streaming.release.feedback import FeedbackFile
from streaming.release.naming import Recipient
from streaming.release.producer_names import ProducerNames
from tracker.in_flight import IN_ORDER, PLANNED
from tracker.messages import concat
from tracker.subscriptions import dead_letters_of
from warehouse.delta.tables import Tables
from warehouse.routes.known_routes import KnownRoutes
from warehouse.schemas import DELIVERIES

_WRITE_SECONDS = 0.5  # the time between two commits


@dataclass(frozen=True)
class Run:
    """A run of the query.

    Attributes:
        app_id: of the checkpoint: the same in all its runs, another for each checkpoint.
        feedback: the file that the source process reads.
        routes: of the last batch of the run before; None: there was none.
        folder: of this run, where tasks run on this machine, too; None: they run on other machines.
        release_folder: for the rows of large releases, as `ReleaseFiles` has it.
        payloads: as `ReleaseFiles` has it.
    """

    app_id: str
    feedback: FeedbackFile
    routes: KnownRoutes | None = None
    folder: Path | None = None
    release_folder: Path | None = None
    payloads: PayloadSweep | None = None


class Releaser:
    """Runs a Spark job for each release, in lanes, and writes its deliveries to the table `deliveries`.

    Releases of a lane are sent one after another, because they share producer names; lanes run side by side. When the
    deliveries are in the table, the feedback confirms the tick. After a restart, the table's transactions show which
    releases were finished; these are not sent again.

    An unwritable destination holds up no other: `UnwritableRetries` takes over the messages for it.

    What happens to a release is decided in `transitions.py`, `releases.py`, `unwritable_destinations.py` and
    `release_attempts.py`, which have no threads and clocks. This class has the threads of lanes, and that which writes
    deliveries.

    Args:
        spark: runs the jobs.
        settings: of the job.
        tables: of the warehouse.
        run: in which it sends.
        on_deliveries: called with the rows that were written to `deliveries`, in several threads.
        alerts: records unwritable destinations and foreign producers.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        tables: Tables,
        run: Run,
        on_deliveries: Callable[[pa.Table], None],
        alerts: Alerts | None = None,
    ) -> None:
        alerts = alerts or Alerts()
        routes = (run.routes or KnownRoutes({})).updated_to(settings)
        rules = RetryRules(
            retry_max_seconds=settings.release.retry_max_millis / 1000,
            reject_after_millis=(
                settings.release.unwritable_after_millis if settings.release.unwritable == "reject" else None
            ),
            slow_seconds=settings.release.slow_after_millis / 1000,
            lookahead_ceiling_millis=settings.release.lookahead_ceiling_millis,
            gone=routes.gone | {(topic, dead_letters_of(name)) for topic, name in routes.gone},
        )
        self._files = ReleaseFiles(run.app_id, run.release_folder, run.payloads)
        self._on_deliveries = on_deliveries
        self._threads = RunThreads()
        self._releases = Releases()
        self._destinations = UnwritableDestinations(_topics(routes), rules, self._releases)
        states = RunStates(self._releases, self._destinations)
        self._lock, self._stopped = states.lock, states.stopped
        self._lookahead = Lookahead(settings.release, settings.ingest.batch_interval_millis)
        self._feedback = FeedbackWriter(states, run.feedback, self._lookahead)
        self._spark_jobs = SparkJobs(spark, settings, tables, self._lookahead)
        self._records = ReleaseRecords(tables, run.app_id, self._stopped, alerts)
        # Tasks on one machine keep to the rates themselves, with a shared file.
        spacing = Spacing(str(run.folder / "paces") if run.folder is not None else "")
        names = ProducerNames(settings, alerts, lambda: self._spark_jobs.check_epoch(0))
        sending = Sending(self._spark_jobs, names, spacing)
        remainders = RemainderSender(sending, tables, self._records, on_deliveries, self._stopped)
        self._errors = InternalErrors(alerts)
        self._retries = UnwritableRetries(
            states, self._feedback, remainders, self._spark_jobs, self._threads, alerts, self._errors
        )
        self._order_signals = OrderSignals(states, run.folder)
        self._release_sender = ReleaseSender(
            states,
            sending,
            self._retries,
            self._order_signals,
            AdminClient(settings.pulsar),
            self._errors,
            rules.slow_seconds,
        )
        self._writer = self._threads.start("write deliveries", self._write_deliveries)

    @property
    def failure(self) -> str | None:
        """The error that has ended all releases; None: there is none."""
        return self._threads.failure

    @property
    def lookahead_millis(self) -> int:
        """How long before its time a message is dispatched, ms."""
        return self._feedback.lookahead_millis

    @property
    def sending(self) -> int:
        """The number of releases that are not written yet."""
        return self._releases.unwritten

    def submit(self, batch: DispatchedBatch) -> None:
        """Takes a batch's releases, to send them in the background. Call it for each batch, also without releases."""
        tick = batch.tick
        shard_bodies: dict[tuple[int, int], dict[int, list[bytes]]] = {}
        for shard, of_tick, kind, body in batch.bodies:
            shard_bodies.setdefault((of_tick, kind), {}).setdefault(shard, []).append(body)
        with self._lock:
            releases = {
                release_id: self._files.lane_release(*release_id, of_shards, tick)
                for release_id, of_shards in sorted(shard_bodies.items())
                if not self._releases.is_accepted(release_id)
            }
            if not self._releases.has_batch and batch.unwritable:
                self._retries.resume(batch.unwritable, releases)
            self._releases.begin_batch(tick, batch.unwritable, batch.drained)
            self._destinations.forget_taken_back(batch.unwritable)
            for release in releases.values():
                if self._releases.add(release):
                    self._threads.start(f"lane {release.lane}", functools.partial(self._run_lane, release.lane))
            self._destinations.note_drained(batch.drained)
            planned = [
                releases[tick, kind].first_due for kind in (PLANNED, PLANNED | IN_ORDER) if (tick, kind) in releases
            ]
            self._lookahead.note_batch(batch.now, batch.cutoff, min(planned, default=None))
            self._releases.end_batch(tick, batch.cutoff)
            self._feedback.end_batch(batch)
            self._lock.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until all releases are written but for remainders; returns whether they are in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._releases.unwritten, timeout_seconds)

    def stop(self) -> None:
        """Sends no more releases, and ends the threads. The next run dispatches again what is not confirmed."""
        self._stopped.set()
        self.stop_ticks()
        self._writer.join(timeout=10)
        self._errors.close()

    def stop_ticks(self) -> None:
        """Asks the clock for no more batches."""
        self._feedback.stop_ticks()

    def _run_lane(self, lane: str) -> None:
        self._spark_jobs.use_pool()
        written = self._records.last_tick(self._records.writer(lane))
        while not self._stopped.is_set():
            self._send_next(lane, written)  # a thread that waits has no release: its files stay as long as it does

    def _send_next(self, lane: str, written: int) -> None:
        """Sends the next release of a lane; waits for a while where there is none.

        Args:
            lane: its name.
            written: the last tick of the lane that an earlier run has written.
        """
        with self._lock:
            if (release := self._releases.begin_next(lane)) is None:
                self._lock.wait(60)
                return
        if release.tick <= written:
            self._end(SentRelease(release), ReleaseEvent.WRITTEN_BEFORE)
            return
        is_far = release.first_due > self._lookahead.farthest()
        self._wait_until(release.first_due - self._lookahead.lead_millis)
        with self._lock:
            self._releases.note(release, ReleaseEvent.TIME)
        if is_far:
            self._feedback.write()  # its messages count as in flight from now on
        if (finished := self._release_sender.send(release)) is not None:
            self._end(finished, ReleaseEvent.COMPLETE)

    def _end(self, finished: SentRelease, event: ReleaseEvent) -> None:
        with self._lock:
            self._releases.end(finished, event)
            self._order_signals.announce()

    def _wait_until(self, millis: int) -> None:
        while (left := millis / 1000 - time.time()) > 0 and not self._stopped.wait(min(left, 1)):
            pass

    def _write_deliveries(self) -> None:
        """Writes what lanes have sent, several releases in one commit, until the stop and once after it."""
        is_last = False
        while not is_last:
            with self._lock:
                self._lock.wait_for(lambda: self._releases.has_sent or self._stopped.is_set())
            is_last = self._stopped.wait(_WRITE_SECONDS)
            self._write_sent()

    def _write_sent(self) -> None:
        with self._lock:
            finished = self._releases.take_named(self._destinations.open_remainders())
        if not finished:
            return
        rows = concat([one.deliveries for one in finished], DELIVERIES)
        versions: dict[str, int] = {}
        for one in finished:
            writer, tick = self._records.writer(one.release.lane), one.release.tick
            # Before the deliveries: when these are written, the release counts as done.
            if not self._records.write_refused(one.refused, writer, tick):
                return
            if one.deliveries.num_rows:
                versions[writer] = max(versions.get(writer, 0), tick)
        if not self._records.append("deliveries", rows, versions):
            return
        if rows.num_rows:
            self._on_deliveries(rows)
        with self._lock:
            self._releases.note_written(one.release for one in finished)
            self._feedback.write()
            self._lock.notify_all()


def _topics(routes: KnownRoutes) -> dict[Recipient, str]:
    """Returns the topic of each recipient: a destination, its topic of dead letters, or a rejects topic."""
    found = {(topic, s.name): s.destination for topic, route in routes.routes.items() for s in route.subscriptions}
    found |= {(topic, dead_letters_of(name)): dead_letter_topic(to) for (topic, name), to in found.items()}
    return found | {(topic, ""): rejects_topic(topic) for topic in routes.routes}
