"""Sends a job until each message has arrived, or is left open because its destination is unwritable."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Collection
from pathlib import Path

from broker.client import PulsarError
from broker.pulsar_admin.admin_rest import AdminClient
from streaming.release.attempt import FailedProducer
from streaming.release.driver.destination_retries import DestinationRetries, moment
from streaming.release.driver.destinations import Destinations
from streaming.release.driver.job import FinishedJob, Job, Release
from streaming.release.driver.job_attempts import JobAttempts
from streaming.release.driver.releases import Releases
from streaming.release.driver.spacing import Spacing
from streaming.release.driver.spark_jobs import SparkJobs
from streaming.release.driver.transitions import ReleaseEvent
from streaming.release.producer_names import ProducerNames
from streaming.release.task.turn_file import announce_turn
from tracker.store import StateLostError

_log = logging.getLogger(__name__)

_ROWS_A_TASK = 4_000  # one task sends a release of up to so many rows, a task for each shard a larger one
_RETRY_SECONDS = 1.0
_LOST = re.compile(rf"{StateLostError.__name__}: (.*)")


class Turns:
    """Lets a job begin when no release has to end before it: see `Releases.must_wait`. Thread-safe.

    A job's task may start before its turn, and prepare; a file tells it that its turn has come.

    Args:
        lock: guards the states, and is notified when a job ends.
        releases: of this run.
        destinations: of this run; ended jobs may have left messages for those that can't be written.
        stopped: ends waiting.
        folder: for the files; None: tasks run on other machines, and start when their turn has come.
    """

    def __init__(
        self,
        lock: threading.Condition,
        releases: Releases,
        destinations: Destinations,
        stopped: threading.Event,
        folder: Path | None = None,
    ) -> None:
        self._lock = lock
        self._releases = releases
        self._destinations = destinations
        self._stopped = stopped
        self._folder = folder
        self._files: dict[Release, Path] = {}  # the turn files of jobs whose tasks wait

    def begin(self, job: Job) -> str:
        """Returns when a job's task may start: at once with a turn file, else when its turn has come, or at the stop.

        Returns:
            the file for which the task has to wait before it sends anything; empty: it need not wait.
        """
        with self._lock:
            file = ""
            # A shaped job waits here: the time of its start decides when its messages are sent.
            if self._folder is not None and not job.shaped and self._releases.must_wait(job.release):
                self._files[job.release] = self._folder / f"turn-{job.tick}-{job.kind}"
                file = str(self._files[job.release])
            while not file and self._releases.must_wait(job.release) and not self._stopped.is_set():
                self._lock.wait(1)
            self._releases.note(job, ReleaseEvent.TURN)
            return file

    def announce(self) -> None:
        """Lets those begin that waited for a job that has ended."""
        with self._lock:
            for release in [one for one in self._files if not self._releases.must_wait(one)]:
                announce_turn(self._files.pop(release), self._destinations.targets)
            self._lock.notify_all()


class JobSender:
    """Sends whole jobs. Thread-safe, with one thread for each lane.

    Args:
        lock: guards the states.
        releases: of this run.
        destinations: of this run.
        retries: takes over messages for unwritable destinations.
        turns: says when a job with messages in order may begin.
        spark_jobs: runs the tasks.
        names: gives producers other names, where somebody else has published under theirs.
        spacing: says how much later than planned messages are sent.
        admin: says whether the broker answers.
        stopped: when set, `send` ends.
        slow_seconds: a destination that takes for longer what it is given is slow; 0: none is.
    """

    def __init__(
        self,
        lock: threading.Condition,
        releases: Releases,
        destinations: Destinations,
        *,
        retries: DestinationRetries,
        turns: Turns,
        spark_jobs: SparkJobs,
        names: ProducerNames,
        spacing: Spacing,
        admin: AdminClient,
        stopped: threading.Event,
        slow_seconds: float,
    ) -> None:
        self._lock = lock
        self._releases = releases
        self._destinations = destinations
        self._retries = retries
        self._turns = turns
        self._spark_jobs = spark_jobs
        self._names = names
        self._spacing = spacing
        self._admin = admin
        self._stopped = stopped
        self._slow_seconds = slow_seconds

    def send(self, job: Job) -> FinishedJob | None:
        """Sends a job, which is BEHIND, until each message has arrived, or is left to `DestinationRetries`.

        Returns:
            the result; None: `stopped` was set.

        Raises:
            FencedError: another job has taken the warehouse over.
            StateLostError: the payload of a message is not where the tracker's state says.
        """
        with self._lock:
            lately_slow = self._destinations.lately_slow(moment())
        turn_file = self._turns.begin(job)
        put_off = self._spacing.put_off(job.shaped, time.time_ns() // 1_000_000)
        attempts = JobAttempts(job, lately_slow, self._slow_seconds, put_off, self._spacing.pace_file)
        while not self._stopped.is_set():
            checked_at = self._spark_jobs.check_epoch()
            with self._lock:
                unwritable = self._destinations.targets
            attempt, turn_file = attempts.next(unwritable, self._names.generations, turn_file), ""
            try:
                tasks = len(job.assignments) if job.rows > _ROWS_A_TASK and not job.is_in_order else 1
                reports = self._spark_jobs.run(job.assignments, tasks, attempt, checked_at)
            except Exception as error:
                if lost := _LOST.search(str(error)):
                    raise StateLostError(lost[1]) from None
                if not self._stopped.is_set():
                    _log.warning("release %d is sent again: %s", job.tick, _cause(error))
                    self._stopped.wait(_RETRY_SECONDS)
                with self._lock:
                    self._releases.note(job, ReleaseEvent.LOST)
                turn_file = self._turns.begin(job)
                continue
            failed = attempts.take(reports)
            others = self._names.renew(failed, max(job.tick, job.sent_to))
            is_broker_there = self._is_broker_there(attempts.candidates(reports, others))
            decision = attempts.decide(reports, failed, others, is_broker_there)
            if decision.reasons:
                # In this order, so that a part is open before the job's result names it.
                self._retries.leave(decision.reasons, decision.parts, decision.slow)
                attempts.finished.parts += decision.parts.values()
            if decision.event == ReleaseEvent.COMPLETE:
                return attempts.finished
            with self._lock:
                self._releases.note(job, decision.event)
            if decision.again:
                first = decision.again[0]
                _log.warning("release %d is sent again: %s: %s", job.tick, first.topic, first.reason)
            if decision.waits:
                self._stopped.wait(_RETRY_SECONDS)
        return None

    def _is_broker_there(self, failed: Collection[FailedProducer]) -> bool:
        if not failed:
            return False
        try:
            return any(one.is_refused for one in failed) or self._admin.health()
        except PulsarError:
            return False


def _cause(error: Exception) -> str:
    """Returns the line of a Spark error with the exception of the task."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if "Error: " in line or "Exception: " in line or line.startswith("_pulsar")]
    return (own or lines or [type(error).__name__])[-1 if own else 0][:300]
