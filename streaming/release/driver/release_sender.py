"""Sends a release until each message has arrived, or is left open because its destination is unwritable."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection
from pathlib import Path

from broker.client import PulsarError
from broker.pulsar_admin.admin_rest import AdminClient
from conf.times import Moment
from status.internal_errors import InternalErrors
from streaming.release.attempt import FailedProducer
from streaming.release.driver.lane_release import LaneRelease, ReleaseId, SentRelease
from streaming.release.driver.release_attempts import ReleaseAttempts
from streaming.release.driver.run_context import RunStates, Sending
from streaming.release.driver.transitions import ReleaseEvent
from streaming.release.driver.unwritable_retries import UnwritableRetries
from streaming.release.task.order_signal import write_signal
from tracker.store import StateLostError

_log = logging.getLogger(__name__)

_ROWS_A_TASK = 4_000  # one task sends a release of up to so many rows, a task for each shard a larger one
_RETRY_SECONDS = 1.0
_LOST = re.compile(rf"{StateLostError.__name__}: (.*)")


class OrderSignals:
    """Lets a release begin when none has to end before it: see `Releases.must_wait`. Thread-safe.

    A task may start before, and prepare; a file signals that the releases have ended for which it waits.

    Args:
        states: of the run; ended releases may have left messages for destinations that can't be written.
        folder: for the files; None: tasks run on other machines, and start when they need not wait.
    """

    def __init__(self, states: RunStates, folder: Path | None = None) -> None:
        self._lock, self._stopped = states.lock, states.stopped
        self._releases, self._destinations = states.releases, states.destinations
        self._folder = folder
        self._files: dict[ReleaseId, Path] = {}  # of releases whose tasks wait

    def begin(self, release: LaneRelease) -> str:
        """Returns when the tasks may start: at once with a signal file, else when they need not wait, or at the stop.

        Returns:
            the file for which the task has to wait before it sends anything; empty: it need not wait.
        """
        with self._lock:
            file = ""
            # A shaped release waits here: the time of its start decides when its messages are sent.
            if self._folder is not None and not release.shaped and self._releases.must_wait(release.id):
                self._files[release.id] = self._folder / f"ended-before-{release.tick}-{release.kind}"
                file = str(self._files[release.id])
            while not file and self._releases.must_wait(release.id) and not self._stopped.is_set():
                self._lock.wait(1)
            self._releases.note(release, ReleaseEvent.UNBLOCKED)
            return file

    def announce(self) -> None:
        """Lets those begin that waited for a release that has ended."""
        with self._lock:
            for release_id in [one for one in self._files if not self._releases.must_wait(one)]:
                write_signal(self._files.pop(release_id), self._destinations.recipients)
            self._lock.notify_all()


class ReleaseSender:
    """Sends whole releases. Thread-safe, with one thread for each lane.

    Args:
        states: of the run.
        sending: how tasks run.
        retries: takes over messages for unwritable destinations.
        order_signals: say when a release with messages in order may begin.
        admin: says whether the broker answers.
        errors: tells of what fails in Spark, again and again perhaps.
        slow_seconds: a destination that takes for longer what it is given is slow; 0: none is.
    """

    def __init__(
        self,
        states: RunStates,
        sending: Sending,
        retries: UnwritableRetries,
        order_signals: OrderSignals,
        admin: AdminClient,
        errors: InternalErrors,
        slow_seconds: float,
    ) -> None:
        self._lock, self._stopped = states.lock, states.stopped
        self._releases, self._destinations = states.releases, states.destinations
        self._spark_jobs, self._names, self._spacing = sending.spark_jobs, sending.names, sending.spacing
        self._retries = retries
        self._order_signals = order_signals
        self._admin = admin
        self._errors = errors
        self._slow_seconds = slow_seconds

    def send(self, release: LaneRelease) -> SentRelease | None:
        """Sends a release, which is BLOCKED, until each message has arrived, or is left to `UnwritableRetries`.

        Returns:
            the result; None: `stopped` was set.

        Raises:
            FencedError: another job has taken the warehouse over.
            StateLostError: the payload of a message is not where the tracker's state says.
        """
        doing = f"sending what comes due in lane {release.lane}"
        with self._lock:
            lately_slow = self._destinations.lately_slow(Moment.now())
        order_signal = self._order_signals.begin(release)
        put_off = self._spacing.put_off(release.shaped, time.time_ns() // 1_000_000)
        attempts = ReleaseAttempts(release, lately_slow, self._slow_seconds, put_off, self._spacing.pace_file)
        while not self._stopped.is_set():
            checked_at = self._spark_jobs.check_epoch()
            with self._lock:
                unwritable = self._destinations.recipients
            attempt, order_signal = attempts.next(unwritable, self._names.generations, order_signal), ""
            try:
                tasks = len(release.assignments) if release.rows > _ROWS_A_TASK and not release.is_in_order else 1
                reports = self._spark_jobs.run(release.assignments, tasks, attempt, checked_at)
            except Exception as error:
                if lost := _LOST.search(str(error)):
                    raise StateLostError(lost[1]) from None
                if not self._stopped.is_set():
                    cause = _cause(error)
                    _log.warning("release %d is sent again: %s", release.tick, cause)
                    self._errors.note(doing, cause)
                    self._stopped.wait(_RETRY_SECONDS)
                with self._lock:
                    self._releases.note(release, ReleaseEvent.LOST)
                order_signal = self._order_signals.begin(release)
                continue
            self._errors.succeeded(doing)
            failed = attempts.take(reports)
            others = self._names.renew(failed, max(release.tick, release.sent_to))
            is_broker_there = self._is_broker_there(attempts.candidates(reports, others))
            decision = attempts.decide(reports, failed, others, is_broker_there)
            if decision.reasons:
                # In this order, so that a remainder is open before the release's result names it.
                self._retries.leave(decision.reasons, decision.remainders, decision.slow)
                attempts.finished.remainders += decision.remainders.values()
            if decision.event == ReleaseEvent.COMPLETE:
                return attempts.finished
            with self._lock:
                self._releases.note(release, decision.event)
            if decision.again:
                first = decision.again[0]
                _log.warning("release %d is sent again: %s: %s", release.tick, first.topic, first.reason)
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
