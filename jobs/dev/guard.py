"""Ends the processes that a command has started, once the command's own process is gone, whatever ended it.

A guard is a process of its own. It reads a pipe of which the command has the other end, and which the system closes
also after a kill -9. What the command has started since then is known by a variable in its environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

_VARIABLE = "_DELAYLAKE_GUARD"  # not a setting: those begin with DELAYLAKE_
_END_SECONDS = 20


class Guard:
    """Whatever this process starts while the block runs ends with the block, or with the process. A context manager.

    Args:
        folder: removed at the end; None: none is.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        mark = uuid.uuid4().hex
        folders = [] if self._folder is None else [str(self._folder)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jobs.dev.guard", mark, *folders], stdin=subprocess.PIPE, start_new_session=True
        )
        os.environ[_VARIABLE] = mark
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.environ.pop(_VARIABLE, None)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def _end_marked(mark: str) -> None:
    """Kills all processes with the mark in their environment, until there is none."""
    while found := [process for process in psutil.process_iter() if _mark_of(process) == mark]:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=_END_SECONDS)


def _mark_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get(_VARIABLE)
    return None


def _main() -> None:
    mark, *folders = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _end_marked(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
