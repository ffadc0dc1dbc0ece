"""Keeps the releases that are not confirmed yet, and writes the feedback for the source process."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from streaming.release.driver.job import Job
from streaming.release.driver.lookahead import Lookahead
from streaming.release.driver.open_parts import OpenPart
from streaming.release.feedback import Feedback, FeedbackFile
from streaming.release.naming import Target

_log = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0  # until feedback that could not be written is written again


class UnconfirmedReleases:
    """The releases that are not written down yet, and the feedback that follows from them. Thread-safe.

    The ticks before the first of these releases are confirmed.

    Args:
        lock: guards all attributes, and is notified when releases are written down.
        feedback: the file that the source process reads.
        lookahead: has the measured lookahead.
        unwritable: returns the unwritable targets, as `Feedback.unwritable`.
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
        self._jobs: dict[tuple[int, int], Job] = {}  # jobs that are not written down yet, by release
        self._accepted: set[tuple[int, int]] = set()  # releases that were added in this run
        self._cutoffs: deque[tuple[int, int]] = deque()  # (tick, cutoff) of ticks that are not confirmed
        self._recorded: Mapping[str, Any] | None = None  # `unwritable` of the last batch's offset; None: no batch yet
        self._held_since: dict[
            Target, int
        ] = {}  # of each target in `_recorded` the first tick that hands out nothing for it
        self._feedback = Feedback(lookahead_millis=lookahead.millis)
        self._is_behind = False  # the file lacks what could not be written, and is written again
        self._publish()

    @property
    def lookahead_millis(self) -> int:
        """How long before its time a message is handed out, as the feedback says, ms."""
        return self._feedback.lookahead_millis

    @property
    def has_batch(self) -> bool:
        """Whether a batch of this run has come."""
        return self._recorded is not None

    def __len__(self) -> int:
        return len(self._jobs)

    def is_accepted(self, release: tuple[int, int]) -> bool:
        """Whether a release (tick, kind) was added in this run and is not known to be confirmed."""
        return release in self._accepted

    def begin_batch(self, tick: int, recorded: Mapping[str, Any], drained: Iterable[Target] = ()) -> None:
        """Notes the unwritable targets in a batch's offset.

        Args:
            tick: of the batch.
            recorded: `Offset.unwritable` of the batch's offset.
            drained: those of the targets to which the batch hands out messages that were held back.
        """
        held = {(source, name) for source, names in recorded.items() for name in names}
        with self._lock:
            self._recorded = recorded
            self._held_since = {target: self._held_since.get(target, tick) for target in held}
            self._held_since |= dict.fromkeys(held & set(drained), tick + 1)

    def add(self, job: Job) -> None:
        """Adds a release that is to be sent."""
        with self._lock:
            self._accepted.add(job.release)
            self._jobs[job.release] = job

    def end_batch(
        self,
        tick: int,
        cutoff: int,
        next_due: int,
        waiting: dict[str, dict[str, list[list[int]]]],
        large_bytes: int = 0,
    ) -> None:
        """Ends a batch, whose releases have all been added: its tick can be confirmed when these are written down.

        Args:
            tick: of the batch.
            cutoff: of the batch, ms since the epoch.
            next_due: no message that is in state after the batch is due before this time, ms since the epoch.
            waiting: messages that wait for places, as `Feedback.waiting` has them by source topic and subscription.
            large_bytes: bytes of large payloads in the state's time slots after the batch.
        """
        with self._lock:
            self._cutoffs.append((tick, cutoff))
            self._feedback = replace(
                self._feedback, next_due=next_due, waiting=(tick, waiting), large_bytes=large_bytes
            )
            self.confirm()

    def note_written(self, jobs: Iterable[Job]) -> None:
        """Notes that releases are written down, but for open parts."""
        with self._lock:
            for job in jobs:
                self._jobs.pop(job.release, None)
            self.confirm()
            self._lock.notify_all()

    def confirm(self) -> None:
        """Computes and writes the feedback: the confirmed tick, the lookahead, the number of messages in flight."""
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
                in_flight_bytes=sum(job.n_bytes for job in self._jobs.values()),
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
        """Returns the open parts in the last batch's offset, as (target, release)."""
        with self._lock:
            return {
                ((source, subscription), (tick, kind))
                for source, of_source in (self._recorded or {}).items()
                for subscription, stuck in of_source.items()
                for tick, kind in [*stuck["open"], *stuck.get("recalled", ())]
            }

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until all releases are written down but for open parts; returns whether they are in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._jobs, timeout_seconds)

    def wait_written(self, part: OpenPart) -> None:
        """Waits until the release of a part, and older ones of its lane, are written down but for open parts.

        The table knows only the last tick of a lane's parts for a destination: a part that an older release left open
        later would count as written down.
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
        """Whether a lane may still have messages for a target that were handed out before it was held back."""
        soon = self._lookahead.farthest()
        with self._lock:
            since = self._held_since.get(target)
            return since is None or any(job.tick < since and job.first_due <= soon for job in self._jobs.values())

    def _publish(self) -> None:
        """Writes the feedback. Whoever has changed it goes on where the disk is full: it is written again."""
        try:
            self._file.write(self._feedback)
        except OSError as error:
            if not self._is_behind:
                _log.warning("the feedback is written again: %s", error)
                self._is_behind = True
                threading.Thread(target=self._publish_again, name="feedback", daemon=True).start()

    def _publish_again(self) -> None:
        while self._is_behind and not self._stopped.wait(_AGAIN_SECONDS):
            with self._lock, contextlib.suppress(OSError):
                self._file.write(self._feedback)
                self._is_behind = False
