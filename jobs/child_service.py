"""A command of the program that serves until it is stopped, as `run` or `api`, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import psutil

from conf.errors import DelayLakeError

_READY_SECONDS = 300
_STOP_SECONDS = 30


class ChildServiceError(DelayLakeError):
    """The process did not get ready. The message has the last line of its log."""


class ChildService:
    """`delaylake COMMAND` on a settings file.

    Args:
        command: the command and its options, as ["run"].
        settings_file: the settings file; None: the program's default.
        log: the file for the process's stderr, made anew at a start.
        show: called with each line of it; None: nobody is shown them.
    """

    def __init__(
        self, command: Sequence[str], settings_file: Path | None, log: Path, show: Callable[[str], None] | None = None
    ) -> None:
        self._command = command
        self._settings_file = settings_file
        self._log = log
        self._show = show
        self._process: subprocess.Popen[str] | None = None
        self._printed: queue.Queue[str | None] = queue.Queue()
        self._threads: list[threading.Thread] = []

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process, and returns at once."""
        program = Path(sys.executable).parent / "delaylake"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    str(program),
                    *self._command,
                    *(["--config", str(self._settings_file)] if self._settings_file else []),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if self._show else log,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        self._read(self._process.stdout, self._printed.put, self._printed)
        if self._show:
            self._read(self._process.stderr, self._log_line)

    def wait_until_ready(self) -> str:
        """Returns the next line that the process prints on stdout: that it is ready, or what comes before.

        Raises:
            ChildServiceError: it ended, or was not ready in five minutes.
        """
        line = None
        with contextlib.suppress(queue.Empty):
            line = self._printed.get(timeout=_READY_SECONDS)
        if line is None:
            self._join()
            raise ChildServiceError(f"`delaylake {self._command[0]}` did not get ready: {last_lines(self._log, 1)[0]}")
        return line

    def wait(self) -> int:
        """Returns the exit status, when the process has ended."""
        return 0 if self._process is None else self._process.wait()

    def stop(self) -> int:
        """Stops the process by SIGTERM, as a user does, or by SIGKILL if that takes too long.

        Returns:
            its exit status; 0 if it was never started.
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
        status = self._process.wait()
        self._join()
        return status

    def _read(
        self, stream: IO[str] | None, take: Callable[[str], None], ended: queue.Queue[str | None] | None = None
    ) -> None:
        def read() -> None:
            if stream is not None:
                with stream:
                    for line in stream:
                        take(line.rstrip("\n"))
            if ended is not None:
                ended.put(None)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _log_line(self, line: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{line}\n")
        if self._show:
            self._show(line)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=5)


def ignore_user_settings() -> None:
    """Removes settings from this process's environment: services with a settings file of their own have them all there.

    They must not touch the user's own tables.
    """
    for name in [name for name in os.environ if name.startswith("DELAYLAKE_") and name != "DELAYLAKE_CACHE"]:
        del os.environ[name]


def last_lines(log: Path, n: int) -> list[str]:
    """Returns the last lines of a log file that are not blank, at least one line."""
    with log.open(errors="replace") as lines:
        return [line.rstrip() for line in deque((line for line in lines if line.strip()), n)] or ["it left no log"]


def _session(leader: int) -> list[int]:
    """Returns the ids of a session's processes: the leader, Spark's JVM, and its workers, which have other groups."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                members.append(pid)
    return members
