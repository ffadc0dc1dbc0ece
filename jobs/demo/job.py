"""The delivery job of the demo: `delaylake run` in a separate process, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import psutil

from conf.errors import DelayLakeError

_READY_SECONDS = 300
_STOP_SECONDS = 30


class DemoJobError(DelayLakeError):
    """The job did not get ready. The message has the last line of its log."""


class DemoJob:
    """`delaylake run` on a settings file; its log is the file `job.log` beside that."""

    def __init__(self, settings_file: Path) -> None:
        self._settings_file = settings_file
        self._log = settings_file.with_name("job.log")
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the job, and returns when it is ready, that is reads the source topics.

        Raises:
            DemoJobError: the job ended, or was not ready in five minutes.
        """
        program = Path(sys.executable).parent / "delaylake"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(program), "run", "--config", str(self._settings_file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        lines: list[str] = []
        reader = threading.Thread(target=self._read_line, args=(self._process.stdout, lines), daemon=True)
        reader.start()
        reader.join(timeout=_READY_SECONDS)
        if lines != ["ready"]:
            raise DemoJobError(f"the job did not get ready: {self._last_words()}")

    def stop(self) -> int:
        """Stops the job by SIGTERM, as a user does, or by SIGKILL if that takes too long.

        Returns:
            its exit status; 0 if the job was never started.
        """
        if self._process is None:
            return 0
        if self.is_running:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_STOP_SECONDS)
        for pid in _session(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self._process.wait()

    @staticmethod
    def _read_line(stdout: IO[str] | None, lines: list[str]) -> None:
        if stdout is not None:
            lines.append(stdout.readline().strip())

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it left no log"


def _session(leader: int) -> list[int]:
    """Returns the ids of a session's processes: the leader, Spark's JVM, and its workers, which have other groups."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                members.append(pid)
    return members
