"""Sends a job until each message has arrived, or is left open because its destination is unwritable."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from broker.client import PulsarError
from broker.pulsar_admin.admin_rest import AdminClient
from streaming.release.attempt import MOST_CONNECTIONS, Attempt, FailedProducer, SendReport, note_arrived
from streaming.release.driver.job import Job
from streaming.release.driver.open_parts import OpenPart
from streaming.release.driver.spacing import Spacing
from streaming.release.driver.spark_jobs import SparkJobs
from streaming.release.driver.turns import Turns
from streaming.release.driver.unwritable_destinations import UnwritableDestinations
from streaming.release.naming import Target
from streaming.release.producer_names import ProducerNames
from tracker.messages import MESSAGES, concat
from tracker.packing import unpack
from warehouse.schemas import DELIVERIES

_log = logging.getLogger(__name__)

_ROWS_A_TASK = 4_000  # one task sends a release of up to so many rows, a task for each shard a larger one
_RETRY_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0  # how long a destination that does not answer may hold up a lane, once


@dataclass
class FinishedJob:
    """The result of a job: rows to be written to tables, and parts that have not arrived."""

    job: Job
    deliveries: pa.Table = field(default_factory=DELIVERIES.empty_table)  # rows of the table `deliveries`
    refused: pa.Table = field(default_factory=MESSAGES.empty_table)  # messages that the client does not take
    parts: list[OpenPart] = field(default_factory=list)  # messages for unwritable destinations


class JobSender:
    """Sends whole jobs. Thread-safe, with one thread for each lane.

    Args:
        spark_jobs: runs the tasks.
        names: gives producers other names, where somebody else has published under theirs.
        spacing: says how much later than planned messages are sent.
        turns: says when a job with messages in order may begin.
        unwritable: takes over messages for unwritable destinations.
        admin: says whether the broker answers.
        stopped: when set, `send` ends.
        slow_seconds: a destination that takes for longer what it is given is slow; 0: none is.
    """

    def __init__(
        self,
        spark_jobs: SparkJobs,
        names: ProducerNames,
        spacing: Spacing,
        turns: Turns,
        unwritable: UnwritableDestinations,
        admin: AdminClient,
        stopped: threading.Event,
        slow_seconds: float,
    ) -> None:
        self._spark_jobs = spark_jobs
        self._names = names
        self._spacing = spacing
        self._turns = turns
        self._unwritable = unwritable
        self._admin = admin
        self._stopped = stopped
        self._slow_seconds = slow_seconds

    def send(self, job: Job) -> FinishedJob | None:
        """Sends a job until each message has arrived, or is left to `UnwritableDestinations`.

        Returns:
            the result; None: `stopped` was set.

        Raises:
            FencedError: another job has taken the warehouse over.
        """
        finished = FinishedJob(job)
        arrived: frozenset[tuple[int, str, str]] = frozenset()
        arrived_to: dict[tuple[str, str], int] = {}
        is_first = job.is_new
        # What has to come in order is not held back because its destination is slow: what is in the delayed index
        # already would then go first. Its lanes wait, which have nothing else.
        apart, slow_seconds = self._unwritable.lately_slow, 0.0 if job.is_in_order else self._slow_seconds
        turn_file = self._turns.begin(job)
        put_off = self._spacing.put_off(job.shaped, time.time_ns() // 1_000_000)
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
                pace_file=self._spacing.pace_file,
                patience_seconds=_PATIENCE_SECONDS,
                apart=apart,
                slow_after_seconds=slow_seconds,
                turn_file=turn_file,
            )
            was_first, is_first, turn_file = is_first, False, ""
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
            finished.deliveries = concat([finished.deliveries, *(unpack(one.deliveries) for one in sent)], DELIVERIES)
            finished.refused = concat([finished.refused, refused_of(sent, job.release)])
            failed = [one for s in sent for one in s.failed]
            note_arrived(arrived_to, failed)
            others = self._names.renew(failed, max(job.tick, job.sent_to))
            slow = frozenset(one.target for one in others if one.is_slow)
            # Where others are answered, or few are late a second time, it is not the broker that is slow.
            is_known = len(slow) <= MOST_CONNECTIONS and (slow <= apart or any(one.done for one in sent))
            given_up = self._given_up([one for one in others if not one.is_slow or (is_known and one.is_alone)])
            left = {target: "" for one in sent for target in one.skipped}
            untouched = {*left, *_untouched(failed, finished)} if was_first else set()
            self._leave(left | given_up, finished, arrived, arrived_to, slow, untouched)
            again = [one for one in others if one.target not in given_up]
            if again:
                _log.warning("release %d is sent again: %s: %s", job.tick, again[0].topic, again[0].reason)
                if suspects := slow - given_up.keys():
                    # One of those that share a connection may hold up the others. Where all of many are slow, each with
                    # few others, it is the broker.
                    slow_seconds = 0.0 if suspects == apart else slow_seconds
                    apart = suspects
                else:
                    self._stopped.wait(_RETRY_SECONDS)
            elif len(others) == len(failed):
                return finished
        return None

    def _leave(
        self,
        reasons: Mapping[Target, str],
        finished: FinishedJob,
        arrived: frozenset[tuple[int, str, str]],
        arrived_to: dict[tuple[str, str], int],
        slow: Collection[Target],
        untouched: Collection[Target],
    ) -> None:
        """Leaves messages that have not arrived to `UnwritableDestinations`, and notes these parts in `finished`.

        Args:
            reasons: why the destination of each target can't be written; an empty text: as before.
            finished: the result of the job.
            arrived: as `OpenPart.done`.
            arrived_to: as `OpenPart.arrived_to`.
            slow: the targets whose destinations are slow.
            untouched: as `OpenPart.is_untouched`.
        """
        for target, reason in reasons.items():
            part = OpenPart(finished.job, target, arrived, arrived_to, is_untouched=target in untouched)
            # In this order, so that the part is open before the job's result names it.
            self._unwritable.add(target, reason, [part], is_slow=target in slow)
            finished.parts.append(part)

    def _given_up(self, failed: list[FailedProducer]) -> dict[Target, str]:
        """Returns the targets that the job waits for no longer, and why; none while the broker does not answer."""
        if not failed:
            return {}
        try:
            is_broker_there = any(one.is_refused for one in failed) or self._admin.health()
        except PulsarError:
            is_broker_there = False
        return {one.target: one.reason for one in failed if (one.is_refused or is_broker_there) and not one.is_behind}


def _untouched(failed: Iterable[FailedProducer], finished: FinishedJob) -> set[Target]:
    """Returns the targets of failed producers to which nothing can have arrived of a job, after its first attempt."""
    failed = list(failed)
    if not failed:
        return set()
    touched = {one.target for one in failed if not one.is_untouched}
    for rows in (finished.deliveries, finished.refused):
        pairs = (
            rows.select(["topic", "subscription"]).group_by(["topic", "subscription"], use_threads=False).aggregate([])
        )
        touched |= set(zip(*(column.to_pylist() for column in pairs.columns), strict=True))
    return {one.target for one in failed} - touched


def refused_of(sent: Iterable[SendReport], release: tuple[int, int]) -> pa.Table:
    """Returns the messages of a release (tick, kind) that the client does not take, from the reports of tasks."""
    return concat(unpack(one.refused[release]) for one in sent if release in one.refused)


def _cause(error: Exception) -> str:
    """Returns the line of a Spark error with the exception of the task."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if "Error: " in line or "Exception: " in line or line.startswith("_pulsar")]
    return (own or lines or [type(error).__name__])[-1 if own else 0][:300]
