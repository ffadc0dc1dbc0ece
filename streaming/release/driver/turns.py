"""Lets jobs with messages that have to come in order begin one after another, as far as they have the same keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from streaming.release.driver.job import Job
from streaming.release.naming import Target
from streaming.release.task.turn_file import announce_turn

_Release = tuple[int, int]  # tick, kind


class Turns:
    """Knows which jobs have to have ended before another one begins.

    A job has to wait for each one that was handed out before it and has a message that comes before one of its own: of
    the same key, and due no later. Jobs of different keys run side by side in their lanes. Waiting jobs can't wait for
    each other, since each waits for earlier ones alone.

    A job's task may start before its turn, and have all ready when a file tells it that the turn has come.

    Args:
        lock: guards everything, and is notified when a job ends.
        stopped: ends waiting.
        unwritable: returns the targets whose destinations can't be written: what ended jobs have for them is left open.
        folder: for the files; None: tasks run on other machines, and start when their turn has come.
    """

    def __init__(
        self,
        lock: threading.Condition,
        stopped: threading.Event,
        unwritable: Callable[[], Iterable[Target]] = lambda: (),
        folder: Path | None = None,
    ) -> None:
        self._lock = lock
        self._stopped = stopped
        self._unwritable = unwritable
        self._folder = folder
        self._left: dict[_Release, Job] = {}  # jobs that have not ended
        self._waits_for: dict[_Release, set[_Release]] = {}
        self._files: dict[_Release, Path] = {}  # of jobs whose tasks wait

    def add(self, job: Job) -> None:
        """Adds a job; jobs come by tick, and on short notice before planned ones. One without keys waits for none."""
        if job.keys:
            with self._lock:
                self._waits_for[job.release] = {other for other, its in self._left.items() if _comes_before(its, job)}
                self._left[job.release] = job

    def begin(self, job: Job) -> str:
        """Lets a job begin, or waits until it may, or the stop.

        Returns:
            the file for which its task has to wait before it sends anything; empty: for none.
        """
        with self._lock:
            # When a shaped one begins decides when its messages go: it does not begin before its turn.
            if self._folder is not None and not job.shaped and self.must_wait(job):
                file = self._folder / f"turn-{job.tick}-{job.kind}"
                self._files[job.release] = file
                return str(file)
            while self.must_wait(job) and not self._stopped.is_set():
                self._lock.wait(1)
            return ""

    def must_wait(self, job: Job) -> bool:
        """Whether any job has not ended that has to end before another one begins."""
        return self._is_waiting(job.release)

    def end(self, job: Job) -> None:
        """Lets those begin that wait for a job: its messages have arrived, or are left to `UnwritableDestinations`."""
        if job.keys:
            with self._lock:
                self._left.pop(job.release, None)
                self._waits_for.pop(job.release, None)
                for release in [one for one in self._files if not self._is_waiting(one)]:
                    announce_turn(self._files.pop(release), self._unwritable())
                self._lock.notify_all()

    def _is_waiting(self, release: _Release) -> bool:
        return bool(self._waits_for.get(release, set()) & self._left.keys())


def _comes_before(first: Job, then: Job) -> bool:
    return any(first.keys[key][0] <= then.keys[key][1] for key in first.keys.keys() & then.keys.keys())
