"""Sends each tick's releases in the background, while the query goes on with the next ticks."""

from __future__ import annotations

import functools
import heapq
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

from conf.settings import Settings
from streaming.feedback import Feedback, FeedbackFile
from streaming.sender import Assignment, Sent, send_releases
from streaming.tables import DELIVERIES, Tables
from tracker.in_flight import SENDING
from tracker.messages import concat, int64, unpack
from tracker.time_slots import SLOT_MILLIS

_log = logging.getLogger(__name__)

_ROWS_A_TASK = 4_000  # of a smaller release one task sends all shards
_FIRST_LEAD_MILLIS = 800  # how long before its first row is due a job starts, until that has been measured
_WRITE_SECONDS = 0.5  # deliveries are written down this often
_RETRY_SECONDS = 1.0
_EPOCH_SECONDS = 1.0  # the warehouse's epoch is looked at this often: who has been overtaken sends nothing more
_MEASURED = 30  # the last so many jobs decide how far to look ahead


@dataclass(frozen=True)
class Job:
    """What a tick releases in one lane, all shards together."""

    tick: int
    is_planned: bool
    lane: str
    assignments: tuple[Assignment, ...]
    rows: int
    first_due: int

    def __lt__(self, other: Job) -> bool:
        return self.tick < other.tick


class Releaser:
    """Runs a Spark job for each release, in lanes, and writes down what was delivered.

    A lane's jobs run one after another, because they share producer names; the lanes run side by side. When a job's
    deliveries are in the table, its tick is confirmed through the feedback. A release that was finished before a
    restart is known by the table and not sent again.

    Args:
        application: the same for all runs on one checkpoint, and of no other.
        on_deliveries: is given the rows that were written to `deliveries`.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        tables: Tables,
        feedback: FeedbackFile,
        application: str,
        on_deliveries: Callable[[pa.Table], None],
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._settings_json = settings.model_dump_json()
        self._tables = tables
        self._feedback_file = feedback
        self._application = application
        self._on_deliveries = on_deliveries
        self._lock = threading.Condition()
        self._lanes: dict[str, list[Job]] = {}
        self._outstanding: dict[tuple[int, bool], Job] = {}
        self._accepted: set[tuple[int, bool]] = set()
        self._cutoffs: deque[tuple[int, int]] = deque()
        self._feedback = Feedback(lookahead_millis=settings.release.lookahead_millis)
        self._last_batch: tuple[int, int] | None = None  # the time it looked ahead from, and its cutoff
        self._lags: deque[int] = deque(maxlen=_MEASURED)
        self._leads: deque[int] = deque([_FIRST_LEAD_MILLIS], maxlen=_MEASURED)
        self._finished: queue.Queue[tuple[Job, pa.Table] | None] = queue.Queue()
        self._stopped = threading.Event()
        self._failure: str | None = None
        self._publish()
        self._writer = self._thread("write deliveries", self._write)

    @property
    def failure(self) -> str | None:
        """Why releases have stopped for good; None: they have not."""
        return self._failure

    @property
    def lookahead_millis(self) -> int:
        return self._feedback.lookahead_millis

    @property
    def sending(self) -> int:
        """The releases that are not finished."""
        return len(self._outstanding)

    def submit(
        self, tick: int, now: int, cutoff: int, next_due: int, bodies: list[tuple[int, int, bool, bytes]]
    ) -> None:
        """Takes a batch's releases.

        Args:
            tick: the batch's.
            now: the time from which the batch looked ahead.
            cutoff: the batch's.
            next_due: nothing that the state holds after the batch is due before.
            bodies: (shard, tick, is planned, packed rows); ticks of an earlier run come first.
        """
        releases: dict[tuple[int, bool], list[Assignment]] = {}
        for shard, of_tick, is_planned, body in bodies:
            assignment = Assignment(self._application, shard, of_tick, is_planned, body)
            releases.setdefault((of_tick, is_planned), []).append(assignment)
        with self._lock:
            for (of_tick, is_planned), assignments in sorted(releases.items()):
                if (of_tick, is_planned) not in self._accepted:
                    self._accepted.add((of_tick, is_planned))
                    self._enqueue(_job(of_tick, is_planned, assignments))
            planned = self._outstanding.get((tick, True))
            if planned is not None:
                self._measure(now, planned.first_due)
            self._cutoffs.append((tick, cutoff))
            self._last_batch = now, cutoff
            self._feedback = replace(self._feedback, next_due=next_due)
            self._confirm()

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until nothing is in flight; returns whether that came true in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._outstanding, timeout_seconds)

    def stop(self) -> None:
        """Starts no more jobs. What is not confirmed is handed out again by the next run."""
        self._stopped.set()
        with self._lock:
            self._feedback = replace(self._feedback, is_stopping=True)
            self._publish()
            self._lock.notify_all()
        self._finished.put(None)
        self._writer.join(timeout=10)

    def stop_ticks(self) -> None:
        """Asks the clock for no more batches."""
        with self._lock:
            self._feedback = replace(self._feedback, is_stopping=True)
            self._publish()

    def _enqueue(self, job: Job) -> None:
        self._outstanding[job.tick, job.is_planned] = job
        if job.lane not in self._lanes:
            self._lanes[job.lane] = []
            self._thread(f"lane {job.lane}", functools.partial(self._run_lane, job.lane))
        heapq.heappush(self._lanes[job.lane], job)
        self._lock.notify_all()

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Starts a thread whose unexpected end is a failure of the whole."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                _log.exception("%s", name)
                self._failure = f"{name}: {type(error).__name__}: {error}"

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _run_lane(self, lane: str) -> None:
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", "release")
        written = self._tables.written("deliveries", self._writer_name(lane))
        while not self._stopped.is_set():
            with self._lock:
                if not self._lock.wait_for(lambda: self._lanes[lane] or self._stopped.is_set(), timeout=60):
                    continue
                if self._stopped.is_set():
                    return
                job = heapq.heappop(self._lanes[lane])
            if job.tick <= written:
                self._finished.put((job, DELIVERIES.empty_table()))
                continue
            self._wait_until(job.first_due - self._lead())
            if (deliveries := self._send(job)) is not None:
                self._finished.put((job, deliveries))

    def _send(self, job: Job) -> pa.Table | None:
        while not self._stopped.is_set():
            self._check_epoch()
            started = time.time_ns() // 1_000_000
            tasks = len(job.assignments) if job.rows > _ROWS_A_TASK else 1
            try:
                sent: list[Sent] = (
                    self._spark.sparkContext.parallelize(job.assignments, tasks)
                    .mapPartitions(functools.partial(send_releases, self._settings_json, epoch=self._tables.epoch))
                    .collect()
                )
            except Exception as error:
                if not self._stopped.is_set():
                    _log.warning("release %d is sent again: %s", job.tick, _cause(error))
                    self._stopped.wait(_RETRY_SECONDS)
                continue
            with self._lock:
                self._leads.append(max(s.ready_at for s in sent) - started)
            return concat([unpack(s.deliveries) for s in sent], DELIVERIES)
        return None

    def _check_epoch(self) -> None:
        try:
            self._tables.check_epoch(max_age_seconds=_EPOCH_SECONDS)
        except (OSError, DeltaError) as error:  # a warehouse that does not answer holds up no release
            _log.debug("the warehouse's epoch: %s", error)

    def _lead(self) -> int:
        """How long before its first row is due a job has to start."""
        return int(np.percentile(list(self._leads), 95) * 1.3) + 50

    def _wait_until(self, millis: int) -> None:
        while (left := millis / 1000 - time.time()) > 0 and not self._stopped.wait(min(left, 1)):
            pass

    def _write(self) -> None:
        """Writes finished jobs' deliveries down, several in one commit, and confirms them."""
        is_last = False
        while not is_last:
            item = self._finished.get()
            done: list[tuple[Job, pa.Table] | None] = [item]
            if item is not None:
                self._stopped.wait(_WRITE_SECONDS)
            while not self._finished.empty():
                done.append(self._finished.get_nowait())
            is_last = any(d is None for d in done)
            self._write_down([d for d in done if d is not None])

    def _write_down(self, done: list[tuple[Job, pa.Table]]) -> None:
        rows = concat([deliveries for _, deliveries in done], DELIVERIES)
        if rows.num_rows:
            versions: dict[str, int] = {}
            for job, deliveries in done:
                if deliveries.num_rows:
                    versions[self._writer_name(job.lane)] = max(versions.get(self._writer_name(job.lane), 0), job.tick)
            while True:
                try:
                    self._tables.append("deliveries", rows, versions)
                    break
                except OSError as error:
                    _log.warning("deliveries are written again: %s", error)
                    if self._stopped.wait(_RETRY_SECONDS):
                        return
            self._on_deliveries(rows)
        with self._lock:
            for job, _ in done:
                self._outstanding.pop((job.tick, job.is_planned), None)
            self._confirm()
            self._lock.notify_all()

    def _measure(self, now: int, first_due: int) -> None:
        """Notes how far ahead the last batch should have looked for this one's releases to be at hand on time.

        What is due just beyond the last batch's cutoff was released by this one.
        """
        submitted = time.time_ns() // 1_000_000
        lag = submitted - now
        if self._last_batch is not None:  # else the time without a job would count
            last_now, last_cutoff = self._last_batch
            lag = max(lag, submitted - first_due + last_cutoff - last_now)
        self._lags.append(lag)

    def _confirm(self) -> None:
        """Works out the feedback: up to where all is done, and how far ahead to look."""
        if not self._cutoffs:
            return
        first_open = min((tick for tick, _ in self._outstanding), default=self._cutoffs[-1][0] + 1)
        settled = self._feedback.settled
        confirmed = self._feedback.confirmed
        while self._cutoffs and self._cutoffs[0][0] < first_open:
            confirmed, settled = self._cutoffs.popleft()
        self._accepted = {key for key in self._accepted if key[0] >= confirmed}
        self._feedback = replace(
            self._feedback,
            confirmed=confirmed,
            settled=settled,
            lookahead_millis=self._lookahead(),
            in_flight=sum(job.rows for job in self._outstanding.values()),
        )
        self._publish()

    def _lookahead(self) -> int:
        """From a batch's start to its job's first send, as measured, with something to spare."""
        limits = self._settings.release
        if len(self._lags) < 5:
            return limits.lookahead_millis
        # The slowest batch counts, not the usual one: a turn takes longer than the ticks between.
        needed = max(self._lags) + self._lead() + SLOT_MILLIS
        return int(min(max(needed, limits.min_lookahead_millis), limits.lookahead_ceiling_millis))

    def _publish(self) -> None:
        self._feedback_file.write(self._feedback)

    def _writer_name(self, lane: str) -> str:
        return f"{self._application}:{lane}"


def _job(tick: int, is_planned: bool, assignments: list[Assignment]) -> Job:
    tables = [unpack(assignment.body) for assignment in assignments]
    sending = json.loads((tables[0].schema.metadata or {}).get(SENDING.encode(), b"{}"))
    lane = assignments[0].lane(sending.get("lanes", 1))
    first_due = min(int(int64(table, "deliver_at").min()) for table in tables)
    return Job(tick, is_planned, lane, tuple(assignments), sum(t.num_rows for t in tables), first_due)


def _cause(error: Exception) -> str:
    """The line of a Spark error that says what happened in the task."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if "Error: " in line or "Exception: " in line or line.startswith("_pulsar")]
    return (own or lines or [type(error).__name__])[-1 if own else 0][:300]
