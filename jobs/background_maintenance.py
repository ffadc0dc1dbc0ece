"""Maintains the tables while the job runs: a process of the lowest priority, started at intervals."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Self

import psutil

from conf.settings import Settings

_log = logging.getLogger(__name__)

_STOP_SECONDS = 5


class BackgroundMaintenance:
    """A context manager that maintains the tables while it is open.

    Every `maintain.interval_millis` it merges files if there are many small ones; every
    `maintain.retention_interval_millis` it also deletes old rows and files. A failure is one line in the log, and the
    next run begins as usual. As long as nobody commits to a table, no process starts to look for small files.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopping = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if (process := self._process) is not None:
            process.kill()  # commits are whole, and a later vacuum deletes files that were not committed
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        intervals = self._settings.maintain
        retained_at = -float("inf")
        seen: dict[str, int] | None = None  # the tables' versions when the last run began; None: not known
        while not self._stopping.wait(intervals.interval_millis / 1000):
            merges_only = time.monotonic() - retained_at < intervals.retention_interval_millis / 1000
            if not merges_only:
                retained_at = time.monotonic()
            commits = self._newest_commits()
            if merges_only and commits is not None and commits == seen:
                continue
            try:
                status, words = self._maintain(["--merges-only"] if merges_only else [])
            except OSError as error:
                status, words = 1, str(error)
            if status and not self._stopping.is_set():
                _log.warning("maintenance of the tables failed, the job goes on: %s", words or f"exit status {status}")
            elif words:
                _log.debug("tables maintained: %s", words)
            seen = None if status else commits

    def _newest_commits(self) -> dict[str, int] | None:
        """Returns the tables' versions; None: they can't be read now."""
        from warehouse.maintenance.maintain import newest_commits

        try:
            return newest_commits(self._settings)
        except Exception as error:  # the process looks again, and its failure is told
            _log.debug("the tables' versions can't be read: %s", error)
            return None

    def _maintain(self, options: list[str]) -> tuple[int, str]:
        """Runs maintenance once; returns the process' exit status and the last line that it printed."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jobs.background_maintenance", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if self._stopping.is_set():
            self._process.kill()
        printed, _ = self._process.communicate(self._settings.model_dump_json())
        return self._process.returncode, (printed.strip().splitlines() or [""])[-1]


def _main() -> None:
    """Maintains the tables; reads the settings as JSON from stdin."""
    process = psutil.Process()
    process.nice(19)
    if hasattr(psutil, "IOPRIO_CLASS_IDLE"):
        with contextlib.suppress(psutil.Error, OSError):
            process.ionice(psutil.IOPRIO_CLASS_IDLE)
    settings = Settings(**json.loads(sys.stdin.read()))

    from warehouse.delta.tables import Tables
    from warehouse.maintenance.maintain import Extent, UnderWayError, maintain, needs_maintenance

    merges_only = "--merges-only" in sys.argv
    if merges_only and not needs_maintenance(settings, Tables(settings.warehouse)):
        return
    with contextlib.suppress(UnderWayError):
        reports = maintain(settings, extent=Extent.MERGES if merges_only else Extent.ALL)
        merged = ", ".join(f"{r.table} {r.files_before} -> {r.files_after} files" for r in reports if r.files_merged)
        deleted, seconds = sum(r.rows_deleted for r in reports), sum(r.seconds for r in reports)
        print(f"{merged or 'nothing merged'}, {deleted:,} rows deleted, in {seconds:.1f} s")


if __name__ == "__main__":
    _main()
