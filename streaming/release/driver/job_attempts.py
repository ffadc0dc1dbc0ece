"""The attempts to send a job: what each one is to send, and what follows from the reports of its tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from streaming.release.attempt import MOST_CONNECTIONS, Attempt, FailedProducer, Generation, SendReport, note_arrived
from streaming.release.driver.job import FinishedJob, Job, OpenPart
from streaming.release.driver.transitions import ReleaseEvent
from streaming.release.naming import Target
from tracker.messages import concat
from tracker.packing import unpack
from warehouse.schemas import DELIVERIES

_PATIENCE_SECONDS = 5.0  # how long a destination that does not answer may hold up a lane, once


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows from an attempt.

    Attributes:
        event: COMPLETE or INCOMPLETE.
        reasons: why the destination of each target to be left can't be written; an empty text: as before.
        parts: the messages that are left open, by target.
        slow: the targets of these whose destinations are slow.
        again: the failed producers whose messages the next attempt sends.
        waits: whether the next attempt is made after a pause.
    """

    event: ReleaseEvent
    reasons: Mapping[Target, str]
    parts: Mapping[Target, OpenPart]
    slow: frozenset[Target]
    again: list[FailedProducer]
    waits: bool


class JobAttempts:
    """The attempts to send a job. No threads, clocks or I/O.

    Args:
        job: of the release.
        lately_slow: the targets whose destinations were slow a short while ago.
        slow_seconds: a destination that takes for longer what it is given is slow; 0: none is.
        put_off: as `Attempt.put_off`.
        pace_file: as `Attempt.pace_file`.
    """

    def __init__(
        self,
        job: Job,
        lately_slow: frozenset[Target],
        slow_seconds: float,
        put_off: Mapping[tuple[str, int], int],
        pace_file: str = "",
    ) -> None:
        self._job = job
        self._apart = lately_slow
        # What has to come in order is not parked because its destination is slow: what is in the delayed index already
        # would then go first. Its lanes wait, which have nothing else.
        self._slow_seconds = 0.0 if job.is_in_order else slow_seconds
        self._put_off = put_off
        self._pace_file = pace_file
        self._arrived: frozenset[tuple[int, str, str]] = frozenset()
        self._arrived_to: dict[tuple[str, str], int] = {}
        self._is_first = job.is_new
        self._was_first = False
        self.finished = FinishedJob(job)

    def next(
        self, unwritable: frozenset[Target], generations: Mapping[tuple[str, str], Generation], turn_file: str
    ) -> Attempt:
        """Returns the next attempt.

        Args:
            unwritable: the targets whose destinations are not writable.
            generations: as `Attempt.generations`.
            turn_file: as `Attempt.turn_file`.
        """
        self._was_first, self._is_first = self._is_first, False
        return Attempt(
            skipped=unwritable,
            done=self._arrived,
            arrived_to=self._arrived_to,
            generations=generations,
            is_first=self._was_first,
            sent_to=self._job.sent_to,
            put_off=self._put_off,
            pace_file=self._pace_file,
            patience_seconds=_PATIENCE_SECONDS,
            apart=self._apart,
            slow_after_seconds=self._slow_seconds,
            turn_file=turn_file,
        )

    def take(self, reports: Collection[SendReport]) -> list[FailedProducer]:
        """Takes what has arrived by the reports of an attempt's tasks; returns the producers that have failed."""
        finished = self.finished
        self._arrived |= {line for one in reports for line in one.done}
        finished.deliveries = concat([finished.deliveries, *(unpack(one.deliveries) for one in reports)], DELIVERIES)
        finished.refused = concat([finished.refused, refused_of(reports, self._job.release)])
        failed = [producer for one in reports for producer in one.failed]
        note_arrived(self._arrived_to, failed)
        return failed

    def candidates(self, reports: Collection[SendReport], others: Collection[FailedProducer]) -> list[FailedProducer]:
        """Returns the failed producers whose destinations may be left, if it is not the broker that fails.

        Args:
            reports: of the attempt's tasks.
            others: the failed producers that are not sent to again under another name.
        """
        slow = _slow(others)
        # Where others are answered, or few are late a second time, it is not the broker that is slow.
        is_known = len(slow) <= MOST_CONNECTIONS and (slow <= self._apart or any(one.done for one in reports))
        return [one for one in others if not one.is_slow or (is_known and one.is_alone)]

    def decide(
        self,
        reports: Collection[SendReport],
        failed: Collection[FailedProducer],
        others: Collection[FailedProducer],
        is_broker_there: bool,
    ) -> Decision:
        """Decides which destinations the job waits for no longer, and whether there is another attempt.

        Args:
            reports: of the attempt's tasks.
            failed: as `take` returned it.
            others: as for `candidates`.
            is_broker_there: whether the broker answers. While it does not, no destination is left.
        """
        given_up = {
            one.target: one.reason
            for one in self.candidates(reports, others)
            if (one.is_refused or is_broker_there) and not one.is_behind
        }
        skipped = {target: "" for one in reports for target in one.skipped}
        slow, reasons = _slow(others), skipped | given_up
        untouched = {*skipped, *_untouched(failed, self.finished)} if self._was_first else set()
        parts = {
            target: OpenPart(self._job, target, self._arrived, self._arrived_to, is_untouched=target in untouched)
            for target in reasons
        }
        again = [one for one in others if one.target not in given_up]
        suspects = slow - given_up.keys() if again else frozenset()
        if suspects:
            # One of those that share a connection may hold up the others. Where all of many are slow, each with few
            # others, it is the broker.
            self._slow_seconds = 0.0 if suspects == self._apart else self._slow_seconds
            self._apart = suspects
        # A producer that goes on under another name is sent to again, too.
        is_complete = not again and len(others) == len(failed)
        return Decision(
            event=ReleaseEvent.COMPLETE if is_complete else ReleaseEvent.INCOMPLETE,
            reasons=reasons,
            parts=parts,
            slow=slow,
            again=again,
            waits=bool(again) and not suspects,
        )


def refused_of(reports: Iterable[SendReport], release: tuple[int, int]) -> pa.Table:
    """Returns the messages of a release (tick, kind) that the client does not take, from the reports of tasks."""
    return concat(unpack(one.refused[release]) for one in reports if release in one.refused)


def _slow(failed: Collection[FailedProducer]) -> frozenset[Target]:
    return frozenset(one.target for one in failed if one.is_slow)


def _untouched(failed: Collection[FailedProducer], finished: FinishedJob) -> set[Target]:
    """Returns the targets of failed producers to which nothing can have arrived of a job, after its first attempt."""
    if not failed:
        return set()
    touched = {one.target for one in failed if not one.is_untouched}
    for rows in (finished.deliveries, finished.refused):
        pairs = (
            rows.select(["topic", "subscription"]).group_by(["topic", "subscription"], use_threads=False).aggregate([])
        )
        touched |= set(zip(*(column.to_pylist() for column in pairs.columns), strict=True))
    return {one.target for one in failed} - touched
