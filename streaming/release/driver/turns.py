"""Lets jobs with messages in order begin when their turn has come, and tells tasks that wait for it."""

from __future__ import annotations

import threading
from pathlib import Path

from streaming.release.driver.destinations import Destinations
from streaming.release.driver.job import Job, Release
from streaming.release.driver.releases import Releases
from streaming.release.driver.transitions import ReleaseEvent
from streaming.release.task.turn_file import announce_turn


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
