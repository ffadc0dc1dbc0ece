"""Lets jobs with messages that have to come in order begin one after another, as far as they have the same keys."""

from __future__ import annotations

import threading

from streaming.release.job import Job

_Release = tuple[int, int]  # tick, kind


class Turns:
    """Knows which jobs have to have ended before another one begins.

    A job has to wait for each one that was handed out before it and has a message that comes before one of its own: of
    the same key, and due no later. Jobs of different keys run side by side in their lanes. Waiting jobs can't wait for
    each other, since each waits for earlier ones alone.

    Args:
        lock: guards everything, and is notified when a job ends.
        stopped: ends waiting.
    """

    def __init__(self, lock: threading.Condition, stopped: threading.Event) -> None:
        self._lock = lock
        self._stopped = stopped
        self._left: dict[_Release, Job] = {}  # jobs that have not ended
        self._waits_for: dict[_Release, set[_Release]] = {}

    def add(self, job: Job) -> None:
        """Adds a job; jobs come by tick, and on short notice before planned ones. One without keys waits for none."""
        if job.keys:
            with self._lock:
                release = job.tick, job.kind
                self._waits_for[release] = {other for other, its in self._left.items() if _comes_before(its, job)}
                self._left[release] = job

    def wait(self, job: Job) -> None:
        """Waits until all that a job has to wait for has ended, or the stop."""
        if job.keys:
            with self._lock:
                while self.must_wait(job) and not self._stopped.is_set():
                    self._lock.wait(1)

    def must_wait(self, job: Job) -> bool:
        """Whether any job has not ended that has to end before another one begins."""
        return bool(self._waits_for.get((job.tick, job.kind), set()) & self._left.keys())

    def end(self, job: Job) -> None:
        """Lets those begin that wait for a job: its messages have arrived, or are left to `Unwritable`."""
        if job.keys:
            with self._lock:
                self._left.pop((job.tick, job.kind), None)
                self._waits_for.pop((job.tick, job.kind), None)
                self._lock.notify_all()


def _comes_before(first: Job, then: Job) -> bool:
    return any(first.keys[key][0] <= then.keys[key][1] for key in first.keys.keys() & then.keys.keys())
