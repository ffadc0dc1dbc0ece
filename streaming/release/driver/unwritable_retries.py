"""Tries unwritable and slow destinations again, a thread for each: does what `UnwritableDestinations` says is next."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from conf.times import Moment
from status.alerts import Alerts
from status.internal_errors import InternalErrors
from streaming.release.driver.feedback_writer import FeedbackWriter
from streaming.release.driver.lane_release import LaneRelease, ReleaseId, Remainder, RemainderResult
from streaming.release.driver.remainder_sender import RemainderSender
from streaming.release.driver.run_context import RunStates, RunThreads
from streaming.release.driver.spark_jobs import SparkJobs
from streaming.release.driver.transitions import TransitionError
from streaming.release.driver.unwritable_destinations import Ended, Probe, Send, Wait
from streaming.release.naming import Recipient

_log = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0  # until a destination is looked after again whose thread something has failed for


class UnwritableRetries:
    """Looks after destinations until they are writable. Thread-safe.

    Args:
        states: of the run.
        feedback: is written when the destinations have changed.
        remainders: sends remainders.
        spark_jobs: tries whether a topic accepts a producer.
        threads: of the run.
        alerts: records each unwritable or slow destination.
        errors: tells of what fails while one is looked after.
    """

    def __init__(
        self,
        states: RunStates,
        feedback: FeedbackWriter,
        remainders: RemainderSender,
        spark_jobs: SparkJobs,
        threads: RunThreads,
        alerts: Alerts,
        errors: InternalErrors,
    ) -> None:
        self._lock, self._stopped, self._destinations = states.lock, states.stopped, states.destinations
        self._feedback = feedback
        self._remainders = remainders
        self._spark_jobs = spark_jobs
        self._threads = threads
        self._alerts = alerts
        self._errors = errors
        self._recorded: dict[str, Any] = {}  # as the feedback has it
        self._shown: dict[tuple[str, str], str] = {}  # as `alerts` has them

    def resume(self, recorded: Mapping[str, Any], releases: Mapping[ReleaseId, LaneRelease]) -> None:
        """Takes over the unwritable recipients of the run before: see `UnwritableDestinations.resume`."""
        with self._lock:
            recipients = self._destinations.resume(recorded, releases, Moment.now())
        self._begin(recipients)

    def leave(
        self,
        reasons: Mapping[Recipient, str],
        remainders: Mapping[Recipient, Remainder],
        slow: Collection[Recipient] = (),
    ) -> None:
        """Leaves remainders to their destinations.

        Args:
            reasons: why the destination of each recipient can't be written; an empty text: as before.
            remainders: by recipient.
            slow: the recipients whose destinations are slow.
        """
        with self._lock:
            now = Moment.now()
            is_new = {
                recipient: self._destinations.add(recipient, reason, [remainders[recipient]], now, recipient in slow)
                for recipient, reason in reasons.items()
            }
        self._begin([recipient for recipient in reasons if is_new[recipient]])

    def _begin(self, recipients: Collection[Recipient]) -> None:
        for recipient in recipients:
            self._threads.start(f"retry {recipient[0]} {recipient[1]}", partial(self._look_after, recipient))
        self._publish()

    def _publish(self) -> None:
        """Writes the feedback, and the alerts, where the destinations have changed."""
        with self._lock:
            if (recorded := self._destinations.recorded()) != self._recorded:
                self._feedback.write()
                self._recorded = recorded
            current = self._destinations.alerts()
            for (kind, topic), text in current.items():
                if self._shown.get((kind, topic)) != text:
                    self._alerts.begin(kind, topic, text)
            for kind, topic in self._shown.keys() - current.keys():
                self._alerts.end(kind, topic)
            self._shown = current

    def _look_after(self, recipient: Recipient) -> None:
        """Tries a destination again until it is writable, whatever fails meanwhile: nobody else would."""
        doing = f"looking after the destination of {recipient[1]} of {recipient[0]}"
        while not self._stopped.is_set():
            try:
                is_over = not self._try(recipient)
                self._errors.succeeded(doing)
                if is_over:
                    return
            except TransitionError:
                raise
            except Exception as error:
                _log.exception("%s is tried again", recipient)
                self._errors.note(doing, error)
                self._stopped.wait(_AGAIN_SECONDS)

    def _try(self, recipient: Recipient) -> bool:
        """Does what is next for a destination; returns whether anything is to be done after it."""
        with self._lock:
            step = self._destinations.next_step(recipient, Moment.now())
            self._publish()
            if isinstance(step, Wait):
                self._lock.wait(step.seconds)
                return not self._stopped.is_set()
        if isinstance(step, Ended):
            return False
        sent = self._done(step)
        if self._stopped.is_set():
            return False
        with self._lock:
            self._destinations.note_result(recipient, step, sent, Moment.now())
        self._publish()
        return True

    def _done(self, step: Probe | Send) -> RemainderResult:
        try:
            if isinstance(step, Probe):
                return RemainderResult(self._spark_jobs.probe(step.topic))
            return self._remainders.send(step.remainders, step.is_slow)
        except Exception as error:
            return RemainderResult(f"{type(error).__name__}: {error}")
