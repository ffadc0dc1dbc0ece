"""Orders jobs with messages that have to come in order: those with the same keys run one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from streaming.release.driver.job import Job
from streaming.release.naming import Target
from streaming.release.task.turn_file import announce_turn

_Release = tuple[int, int]  # tick, kind


class Turns:
    """Knows which jobs have to end before another one begins.

    A job waits for each job that was handed out before it and has a message that comes before one of its own: of the
    same key, and due no later. Jobs of different keys run side by side in their lanes. There is no deadlock, because a
    job waits for earlier ones alone.

    A job's task may start before its turn, and prepare; a file tells it that its turn has come.

    Args:
        lock: guards all attributes, and is notified when a job ends.
        stopped: ends waiting.
        unwritable: returns the targets whose destinations can't be written; ended jobs may have left messages for them.
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
        self._files: dict[_Release, Path] = {}  # the turn files of jobs whose tasks wait

    def add(self, job: Job) -> None:
        """Adds a job. Jobs come by tick, those on short notice before planned ones. A job without keys never waits."""
        if job.keys:
            with self._lock:
                self._waits_for[job.release] = {other for other, its in self._left.items() if _comes_before(its, job)}
                self._left[job.release] = job

    def begin(self, job: Job) -> str:
        """Returns when a job's task may start: at once with a turn file, else when its turn has come, or at the stop.

        Returns:
            the file for which the task has to wait before it sends anything; empty: it need not wait.
        """
        with self._lock:
            # A shaped job waits here: the time of its start decides when its messages are sent.
            if self._folder is not None and not job.shaped and self.must_wait(job):
                file = self._folder / f"turn-{job.tick}-{job.kind}"
                self._files[job.release] = file
                return str(file)
            while self.must_wait(job) and not self._stopped.is_set():
                self._lock.wait(1)
            return ""

    def must_wait(self, job: Job) -> bool:
        """Whether a job has to wait for one that has not ended."""
        return self._is_waiting(job.release)

    def end(self, job: Job) -> None:
        """Notes that a job has ended, and lets those begin that wait for it.

        Its messages have arrived, or are left to `UnwritableDestinations`.
        """
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
