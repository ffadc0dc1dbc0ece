"""Sends each tick's releases in the background, while the query goes on with the next ticks."""

from __future__ import annotations

import functools
import heapq
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from broker.admin_rest import AdminClient
from broker.client import PulsarError
from conf.settings import Settings, dead_letter_topic, rejects_topic
from status.troubles import Troubles
from streaming.release.attempt import Assignment, Attempt, Failed, Sent, merged, note_arrived, note_done
from streaming.release.feedback import Feedback, FeedbackFile
from streaming.release.job import Job, job_of, shaped_of
from streaming.release.lookahead import Lookahead
from streaming.release.naming import Target
from streaming.release.producer_names import ProducerNames
from streaming.release.spacing import Spacing
from streaming.release.spark_jobs import SparkJobs
from streaming.release.turns import Turns
from streaming.release.unwritable import Part, Unwritable
from streaming.release.written_down import WrittenDown, of_target
from tracker.dead_letters import dead_letters_of
from tracker.in_flight import IN_ORDER, PLANNED
from tracker.messages import MESSAGES, concat, unpack
from warehouse.known_routes import KnownRoutes
from warehouse.schemas import DELIVERIES
from warehouse.tables import Tables

_log = logging.getLogger(__name__)

_ROWS_A_TASK = 4_000  # a release of no more rows is sent by one task, a larger one by a task for each shard

_WRITE_SECONDS = 0.5  # deliveries are written down this often
_RETRY_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0  # how long a destination that does not answer may hold up a lane, once


@dataclass
class _Done:
    """What has become of a job: rows to be written down, and where some of it did not arrive."""

    job: Job
    deliveries: pa.Table  # rows of the table `deliveries`
    refused: pa.Table = field(default_factory=MESSAGES.empty_table)  # messages that no producer takes
    parts: list[Part] = field(default_factory=list)  # for destinations that can't be written


class Releaser:
    """Runs a Spark job for each release, in lanes, and writes down what was delivered.

    A lane's jobs run one after another, because they share producer names; the lanes run side by side. When a job's
    deliveries are in the table, its tick is confirmed through the feedback. A release that was finished before a
    restart is known by the table's transactions, and not sent again.

    A destination that can't be written holds up no other: what a release has for it is left to `Unwritable`. Such a
    release is not written down before an offset says that it is open, so that after a crash either the whole of it is
    handed out again, or that part of it.

    Args:
        feedback: the file by which the source process gets to know of it.
        app_id: the checkpoint's: the same for all its runs, and another for each checkpoint.
        on_deliveries: called with the rows that were written to `deliveries`, in several threads.
        troubles: is told of destinations that can't be written, and of foreign producers.
        routes: of the last batch of the run before; None: there was none.
        folder: of this run, on the machine on which tasks run, too; None: these run on other machines.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        tables: Tables,
        feedback: FeedbackFile,
        app_id: str,
        on_deliveries: Callable[[pa.Table], None],
        troubles: Troubles | None = None,
        routes: KnownRoutes | None = None,
        folder: Path | None = None,
    ) -> None:
        troubles = troubles or Troubles()
        routes = (routes or KnownRoutes({})).taken_on(settings)
        self._settings = settings
        self._tables = tables
        self._feedback_file = feedback
        self._app_id = app_id
        self._on_deliveries = on_deliveries
        self._lock = threading.Condition()
        self._lanes: dict[str, list[Job]] = {}
        self._outstanding: dict[tuple[int, int], Job] = {}  # not written down yet
        self._accepted: set[tuple[int, int]] = set()  # releases that were submitted in this run
        self._cutoffs: deque[tuple[int, int]] = deque()  # (tick, cutoff) of ticks that are not confirmed
        self._feedback = Feedback(lookahead_millis=settings.release.lookahead_millis)
        self._finished: queue.Queue[_Done | None] = queue.Queue()
        self._stopped = threading.Event()
        self._lookahead = Lookahead(settings.release)
        self._written_down = WrittenDown(tables, self._stopped)
        self._spark_jobs = SparkJobs(spark, settings, tables, self._lookahead)
        self._admin = AdminClient(settings.pulsar)
        self._names = ProducerNames(settings, troubles)
        # On one machine tasks keep to the rates themselves, with a file.
        self._pace_file = str(folder / "paces") if folder is not None else ""
        self._spacing = Spacing()
        self._turns = Turns(self._lock, self._stopped, lambda: self._unwritable.targets, folder)
        self._unwritable = Unwritable(
            _destinations(routes),
            settings.release.retry_max_millis / 1000,
            self._settle,
            self._send_parts,
            self._spark_jobs.probe,
            self._is_on_its_way,
            self._confirm,
            troubles,
            self._stopped,
            settings.release.unwritable_after_millis if settings.release.unwritable == "reject" else None,
            routes.gone | {(topic, dead_letters_of(name)) for topic, name in routes.gone},
        )
        self._recorded: Mapping[str, Any] | None = None  # `unwritable` of the last batch's offset; None: no batch yet
        self._held_since: dict[Target, int] = {}  # by target in `_recorded` the first tick whose offset has it
        self._failure: str | None = None
        self._publish()
        self._writer = self._thread("write deliveries", self._write)

    @property
    def failure(self) -> str | None:
        """Why releases have stopped for good; None: they have not."""
        return self._failure

    @property
    def lookahead_millis(self) -> int:
        """How long before its time a message is handed out, ms."""
        return self._feedback.lookahead_millis

    @property
    def sending(self) -> int:
        """The number of releases that are not written down yet."""
        return len(self._outstanding)

    def submit(
        self,
        tick: int,
        now: int,
        cutoff: int,
        next_due: int,
        bodies: Iterable[tuple[int, int, int, bytes]],
        unwritable: Mapping[str, Any] | None = None,
        waiting: dict[str, dict[str, list[list[int]]]] | None = None,
    ) -> None:
        """Takes a batch's releases, to be sent in the background. To be called for each batch, also without any.

        Args:
            tick: the batch's.
            now: the time from which the batch looked ahead, ms since the epoch.
            cutoff: the batch's, ms since the epoch.
            next_due: nothing that is in state after the batch is due before this time, ms since the epoch.
            bodies: (shard, tick, kind, packed rows); the first batch of a run has releases of earlier ticks, too.
            unwritable: `Offset.unwritable` of the batch's offset.
            waiting: for the clock, as in `Feedback`.
        """
        releases: dict[tuple[int, int], list[Assignment]] = {}
        for shard, of_tick, kind, body in bodies:
            assignment = Assignment(self._app_id, shard, of_tick, kind, body)
            releases.setdefault((of_tick, kind), []).append(assignment)
        with self._lock:
            jobs = {
                release: job_of(*release, assignments, tick)
                for release, assignments in sorted(releases.items())
                if release not in self._accepted
            }
            if self._recorded is None and unwritable:
                self._unwritable.begin(unwritable, jobs)
            self._recorded = unwritable or {}
            self._unwritable.forget_rejected(self._recorded)
            held = {(source, name) for source, names in self._recorded.items() for name in names}
            self._held_since = {target: self._held_since.get(target, tick) for target in held}
            for release, job in jobs.items():
                self._accepted.add(release)
                self._enqueue(job)
            planned = [jobs[tick, kind].first_due for kind in (PLANNED, PLANNED | IN_ORDER) if (tick, kind) in jobs]
            self._lookahead.note_batch(now, cutoff, min(planned, default=None))
            self._cutoffs.append((tick, cutoff))
            self._feedback = replace(self._feedback, next_due=next_due, waiting=(tick, waiting or {}))
            self._confirm()

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until all releases are written down, but for what is open; returns whether that came true in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._outstanding, timeout_seconds)

    def stop(self) -> None:
        """Starts no more jobs, and ends the threads. What is not confirmed is handed out again by the next run."""
        self._stopped.set()
        self.stop_ticks()
        self._finished.put(None)
        self._writer.join(timeout=10)

    def stop_ticks(self) -> None:
        """Asks the clock for no more batches."""
        with self._lock:
            self._feedback = replace(self._feedback, is_stopping=True)
            self._publish()
            self._lock.notify_all()

    def _enqueue(self, job: Job) -> None:
        self._outstanding[job.release] = job
        self._turns.add(job)
        if job.lane not in self._lanes:
            self._lanes[job.lane] = []
            self._thread(f"lane {job.lane}", functools.partial(self._run_lane, job.lane))
        heapq.heappush(self._lanes[job.lane], job)
        self._lock.notify_all()

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Starts a thread; an exception in it ends all releases: it becomes `failure`."""

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
        self._spark_jobs.use_pool()
        written = self._tables.written("deliveries", self._writer_name(lane))
        while not self._stopped.is_set():
            with self._lock:
                if not self._lock.wait_for(lambda: self._lanes[lane] or self._stopped.is_set(), timeout=60):
                    continue
                if self._stopped.is_set():
                    return
                job = heapq.heappop(self._lanes[lane])
            if job.tick <= written:
                self._turns.end(job)
                self._finished.put(_Done(job, DELIVERIES.empty_table()))
                continue
            is_far = job.first_due > self._soon()
            self._wait_until(job.first_due - self._lookahead.lead_millis)
            if is_far:
                self._confirm()  # its messages count as in flight from now on
            if (done := self._send(job)) is not None:
                self._turns.end(job)
                self._finished.put(done)

    def _send(self, job: Job) -> _Done | None:
        """Sends a job until each message has arrived, or is left to `Unwritable`; None: told to stop."""
        result = _Done(job, DELIVERIES.empty_table())
        arrived: frozenset[tuple[int, str, str]] = frozenset()
        arrived_to: dict[tuple[str, str], int] = {}
        is_first = job.is_new
        turn_file = self._turns.begin(job)
        put_off = self._put_off(job.shaped)
        while not self._stopped.is_set():
            checked_at = self._spark_jobs.check_epoch()
            attempt = Attempt(
                skipped=self._unwritable.targets,
                done=arrived,
                arrived_to=arrived_to,
                generations=self._names.generations,
                is_first=is_first,
                sent_to=job.sent_to,
                put_off=put_off,
                pace_file=self._pace_file,
                patience_seconds=_PATIENCE_SECONDS,
                turn_file=turn_file,
            )
            is_first, turn_file = False, ""
            try:
                tasks = len(job.assignments) if job.rows > _ROWS_A_TASK and not job.is_in_order else 1
                sent = self._spark_jobs.run(job.assignments, tasks, attempt, checked_at)
            except Exception as error:
                if not self._stopped.is_set():
                    _log.warning("release %d is sent again: %s", job.tick, _cause(error))
                    self._stopped.wait(_RETRY_SECONDS)
                turn_file = self._turns.begin(job)
                continue
            arrived |= {line for one in sent for line in one.done}
            result.deliveries = concat([result.deliveries, *(unpack(one.deliveries) for one in sent)], DELIVERIES)
            result.refused = concat([result.refused, _refused(sent, job.release)])
            failed = [one for s in sent for one in s.failed]
            note_arrived(arrived_to, failed)
            others = self._names.renew(failed, max(job.tick, job.sent_to))
            given_up = self._given_up(others)
            left = {target: "" for one in sent for target in one.skipped}
            for target, reason in (left | given_up).items():
                part = Part(job, target, arrived, arrived_to)
                # In this order: while it is open it is not skipped over by a job that knows nothing of it.
                self._unwritable.add(target, reason, [part])
                result.parts.append(part)
            again = [one for one in others if one.target not in given_up]
            if again:
                _log.warning("release %d is sent again: %s: %s", job.tick, again[0].topic, again[0].reason)
                self._stopped.wait(_RETRY_SECONDS)
            elif len(others) == len(failed):
                return result
        return None

    def _put_off(self, shaped: Mapping[tuple[str, int], tuple[int, int]]) -> Mapping[tuple[str, int], int]:
        """Returns by how much messages of tasks that don't share a file are sent later, as `Attempt.put_off`."""
        return {} if self._pace_file else self._spacing.put_off(shaped, time.time_ns() // 1_000_000)

    def _given_up(self, failed: list[Failed]) -> dict[Target, str]:
        """Returns the destinations that are not waited for any more, and why; none while the broker is away."""
        if not failed:
            return {}
        try:
            is_broker_there = any(one.is_refused for one in failed) or self._admin.health()
        except PulsarError:
            is_broker_there = False
        return {one.target: one.reason for one in failed if (one.is_refused or is_broker_there) and not one.is_behind}

    def _settle(self, part: Part) -> None:
        """Waits until a part's release, and all older ones of its lane, are written down but for such parts.

        Of a lane's parts for a destination the table knows the last tick alone: if an older release came to have one
        later, it would count as written down.
        """
        with self._lock:
            self._lock.wait_for(
                lambda: (
                    self._stopped.is_set()
                    or not any(
                        job.lane == part.job.lane and job.tick <= part.job.tick for job in self._outstanding.values()
                    )
                )
            )

    def _send_parts(self, parts: list[Part]) -> str:
        """Sends what releases have for one destination, in one task, and writes it down when all of it has arrived.

        Args:
            parts: for one target, the oldest first.

        Returns:
            why not all of it has arrived; an empty text: it has.
        """
        self._spark_jobs.use_pool()
        [target] = {part.target for part in parts}
        names = {part.release: f"{self._writer_name(part.job.lane)}:{target[0]}:{target[1]}" for part in parts}
        written = {name: self._tables.written("deliveries", name) for name in set(names.values())}
        parts = [part for part in parts if part.job.tick > written[names[part.release]]]
        if not parts:
            return ""
        if self._stopped.is_set():
            return "stopped"
        checked_at = self._spark_jobs.check_epoch()
        sent_to = max(part.job.sent_to for part in parts)
        attempt = Attempt(
            only=frozenset({target}),
            done=frozenset().union(*(part.done for part in parts)),
            arrived_to=merged(part.arrived_to for part in parts),
            generations=self._names.generations,
            sent_to=sent_to,
            put_off=self._put_off(shaped_of(part.job for part in parts)),
            pace_file=self._pace_file,
        )
        sent = self._spark_jobs.run([one for part in parts for one in part.job.assignments], 1, attempt, checked_at)
        failed = [one for s in sent for one in s.failed]
        if failed:
            for part in parts:
                note_arrived(part.arrived_to, failed)
                note_done(part.arrived_to, [line for one in sent for line in one.done])
            self._names.renew(failed, max(parts[-1].job.tick, sent_to))
            return failed[0].reason
        for part in parts:
            writer, resumed = names[part.release], target if part.is_resumed else None
            if not self._written_down.refuse(_refused(sent, part.release), writer, part.job.tick, resumed):
                return "stopped"
        rows = concat([unpack(one.deliveries) for one in sent], DELIVERIES)
        if ticks := [part.job.tick for part in parts if part.is_resumed]:
            rows = self._written_down.missing("deliveries", rows, ticks, *of_target(target))
        if rows.num_rows:
            self._tables.append("deliveries", rows, {names[part.release]: part.job.tick for part in parts})
            self._on_deliveries(rows)
        return ""

    def _is_on_its_way(self, target: Target) -> bool:
        """Whether a lane may still have messages for a subscription that were handed out before it was held back."""
        soon = self._soon()
        with self._lock:
            since = self._held_since.get(target)
            return since is None or any(
                job.tick < since and job.first_due <= soon for job in self._outstanding.values()
            )

    def _soon(self) -> int:
        """Returns how far any lookahead reaches, ms since the epoch.

        What is in flight and due later was handed out before the clock was set back: its lane waits for long.
        """
        return time.time_ns() // 1_000_000 + self._settings.release.lookahead_ceiling_millis

    def _wait_until(self, millis: int) -> None:
        while (left := millis / 1000 - time.time()) > 0 and not self._stopped.wait(min(left, 1)):
            pass

    def _write(self) -> None:
        """Writes finished jobs' deliveries down, several in one commit, and confirms them."""
        is_last = False
        waiting: list[_Done] = []
        while not is_last:
            try:
                item = self._finished.get(timeout=_WRITE_SECONDS if waiting else None)
            except queue.Empty:
                item = None
            else:
                is_last = item is None
                waiting += [item] if item is not None else []
                if not is_last:
                    self._stopped.wait(_WRITE_SECONDS)
            while not self._finished.empty():
                item = self._finished.get_nowait()
                is_last = is_last or item is None
                waiting += [item] if item is not None else []
            done, waiting = self._recorded_ones(waiting)
            if done:
                self._write_down(done)

    def _recorded_ones(self, finished: list[_Done]) -> tuple[list[_Done], list[_Done]]:
        """Returns those that can be written down, and those that can't yet: an offset has to say first what is open.

        Where one has to wait, later ones of its lane do, too: after a crash a lane goes on after its last release that
        is written down.
        """
        ready: list[_Done] = []
        left: list[_Done] = []
        with self._lock:
            recorded = {
                (source, subscription, tick, kind)
                for source, of_source in (self._recorded or {}).items()
                for subscription, stuck in of_source.items()
                for tick, kind in stuck["open"]
            }
        for done in finished:
            is_unknown = any(
                (*part.target, *done.job.release) not in recorded
                and self._unwritable.has(done.job.release, part.target)
                for part in done.parts
            )
            is_behind = any(other.job.lane == done.job.lane for other in left)
            (left if is_unknown or is_behind else ready).append(done)
        return ready, left

    def _write_down(self, done: list[_Done]) -> None:
        rows = concat([one.deliveries for one in done], DELIVERIES)
        versions: dict[str, int] = {}
        for one in done:
            # Before its deliveries: once these are written down, the release counts as done.
            if not self._written_down.refuse(one.refused, self._writer_name(one.job.lane), one.job.tick):
                return
            if one.deliveries.num_rows:
                name = self._writer_name(one.job.lane)
                versions[name] = max(versions.get(name, 0), one.job.tick)
        if not self._written_down.append("deliveries", rows, versions):
            return
        if rows.num_rows:
            self._on_deliveries(rows)
        with self._lock:
            for one in done:
                self._outstanding.pop(one.job.release, None)
            self._confirm()
            self._lock.notify_all()

    def _confirm(self) -> None:
        """Writes the feedback anew: up to which tick all is done, how far ahead to look, how much is in flight."""
        with self._lock:
            if self._recorded is None:
                return
            soon = self._soon()
            last = self._cutoffs[-1][0] if self._cutoffs else self._feedback.confirmed
            first_open = min((tick for tick, _ in self._outstanding), default=last + 1)
            settled = self._feedback.settled
            confirmed = self._feedback.confirmed
            while self._cutoffs and self._cutoffs[0][0] < first_open:
                confirmed, settled = self._cutoffs.popleft()
            self._accepted = {key for key in self._accepted if key[0] >= confirmed}
            self._feedback = replace(
                self._feedback,
                confirmed=confirmed,
                settled=settled,
                lookahead_millis=self._lookahead.millis,
                in_flight=sum(job.rows_due(soon) for job in self._outstanding.values()),
                unwritable=self._unwritable.recorded,
            )
            self._publish()

    def _publish(self) -> None:
        self._feedback_file.write(self._feedback)

    def _writer_name(self, lane: str) -> str:
        return f"{self._app_id}:{lane}"


def _refused(sent: Iterable[Sent], release: tuple[int, int]) -> pa.Table:
    return concat(unpack(one.refused[release]) for one in sent if release in one.refused)


def _destinations(routes: KnownRoutes) -> dict[Target, str]:
    """Returns by target the destination, its topic of dead letters, or the source's rejects topic."""
    found = {(topic, s.name): s.destination for topic, route in routes.routes.items() for s in route.subscriptions}
    found |= {(topic, dead_letters_of(name)): dead_letter_topic(to) for (topic, name), to in found.items()}
    return found | {(topic, ""): rejects_topic(topic) for topic in routes.routes}


def _cause(error: Exception) -> str:
    """Returns the line of a Spark error that says what happened in the task."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if "Error: " in line or "Exception: " in line or line.startswith("_pulsar")]
    return (own or lines or [type(error).__name__])[-1 if own else 0][:300]
