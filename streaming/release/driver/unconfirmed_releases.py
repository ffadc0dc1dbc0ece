"""Knows which releases are not confirmed yet, and tells the source process how far the job has got."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from streaming.release.driver.job import Job
from streaming.release.driver.lookahead import Lookahead
from streaming.release.driver.unwritable_destinations import Part
from streaming.release.feedback import Feedback, FeedbackFile
from streaming.release.naming import Target


class UnconfirmedReleases:
    """The releases that are not written down yet, and the feedback that follows from them. Safe in several threads.

    Up to the tick before the first of them all is confirmed.

    Args:
        lock: guards everything, and is notified when releases are written down.
        feedback: the file by which the source process gets to know of it.
        lookahead: says how far ahead the clock has to look.
        unwritable: returns the destinations that can't be written, as `Feedback.unwritable`.
        stopped: ends waiting.
    """

    def __init__(
        self,
        lock: threading.Condition,
        feedback: FeedbackFile,
        lookahead: Lookahead,
        unwritable: Callable[[], dict[str, Any]],
        stopped: threading.Event,
    ) -> None:
        self._lock = lock
        self._file = feedback
        self._lookahead = lookahead
        self._unwritable = unwritable
        self._stopped = stopped
        self._jobs: dict[tuple[int, int], Job] = {}  # by release, not written down yet
        self._accepted: set[tuple[int, int]] = set()  # releases that were added in this run
        self._cutoffs: deque[tuple[int, int]] = deque()  # (tick, cutoff) of ticks that are not confirmed
        self._recorded: Mapping[str, Any] | None = None  # `unwritable` of the last batch's offset; None: no batch yet
        self._held_since: dict[Target, int] = {}  # by target in `_recorded` the first tick whose offset has it
        self._feedback = Feedback(lookahead_millis=lookahead.millis)
        self._publish()

    @property
    def lookahead_millis(self) -> int:
        """How long before its time a message is handed out, as the source process was told, ms."""
        return self._feedback.lookahead_millis

    @property
    def has_batch(self) -> bool:
        """Whether a batch of this run has come."""
        return self._recorded is not None

    def __len__(self) -> int:
        return len(self._jobs)

    def is_accepted(self, release: tuple[int, int]) -> bool:
        """Whether a release (tick, kind) was added in this run, and may not be confirmed yet."""
        return release in self._accepted

    def begin_batch(self, tick: int, recorded: Mapping[str, Any]) -> None:
        """Takes over what a batch's offset records of unwritable destinations.

        Args:
            tick: the batch's.
            recorded: `Offset.unwritable` of the batch's offset.
        """
        held = {(source, name) for source, names in recorded.items() for name in names}
        with self._lock:
            self._recorded = recorded
            self._held_since = {target: self._held_since.get(target, tick) for target in held}

    def add(self, job: Job) -> None:
        """Adds a release that is to be sent."""
        with self._lock:
            self._accepted.add(job.release)
            self._jobs[job.release] = job

    def end_batch(self, tick: int, cutoff: int, next_due: int, waiting: dict[str, dict[str, list[list[int]]]]) -> None:
        """Has a tick confirmed as soon as its releases, which have been added, and all earlier ones are written down.

        Args:
            tick: the batch's.
            cutoff: the batch's, ms since the epoch.
            next_due: nothing that is in state after the batch is due before this time, ms since the epoch.
            waiting: as in `Feedback`.
        """
        with self._lock:
            self._cutoffs.append((tick, cutoff))
            self._feedback = replace(self._feedback, next_due=next_due, waiting=(tick, waiting))
            self.confirm()

    def note_written(self, jobs: Iterable[Job]) -> None:
        """Notes that releases are written down, but for what is open."""
        with self._lock:
            for job in jobs:
                self._jobs.pop(job.release, None)
            self.confirm()
            self._lock.notify_all()

    def confirm(self) -> None:
        """Writes the feedback anew: up to which tick all is done, how far ahead to look, how much is in flight."""
        with self._lock:
            if self._recorded is None:
                return
            soon = self._lookahead.farthest()
            last = self._cutoffs[-1][0] if self._cutoffs else self._feedback.confirmed
            first_open = min((tick for tick, _ in self._jobs), default=last + 1)
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
                in_flight=sum(job.rows_due(soon) for job in self._jobs.values()),
                unwritable=self._unwritable(),
            )
            self._publish()

    def stop_ticks(self) -> None:
        """Asks the clock for no more batches."""
        with self._lock:
            self._feedback = replace(self._feedback, is_stopping=True)
            self._publish()
            self._lock.notify_all()

    def recorded_parts(self) -> set[tuple[Target, tuple[int, int]]]:
        """Returns what the last batch's offset says is open: targets with releases (tick, kind)."""
        with self._lock:
            return {
                ((source, subscription), (tick, kind))
                for source, of_source in (self._recorded or {}).items()
                for subscription, stuck in of_source.items()
                for tick, kind in stuck["open"]
            }

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until all releases are written down, but for what is open; returns whether that came true in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._jobs, timeout_seconds)

    def settle(self, part: Part) -> None:
        """Waits until a part's release, and all older ones of its lane, are written down but for such parts.

        Of a lane's parts for a destination the table knows the last tick alone: if an older release came to have one
        later, it would count as written down.
        """
        lane, tick = part.job.lane, part.job.tick
        with self._lock:
            self._lock.wait_for(
                lambda: (
                    self._stopped.is_set()
                    or not any(job.lane == lane and job.tick <= tick for job in self._jobs.values())
                )
            )

    def is_on_its_way(self, target: Target) -> bool:
        """Whether a lane may still have messages for a subscription that were handed out before it was held back."""
        soon = self._lookahead.farthest()
        with self._lock:
            since = self._held_since.get(target)
            return since is None or any(job.tick < since and job.first_due <= soon for job in self._jobs.values())

    def _publish(self) -> None:
        self._file.write(self._feedback)
