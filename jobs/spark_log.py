"""Spark's log, `spark.log` beside the checkpoint: the output of its JVM and Python workers, limited in size."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from conf.settings import Settings, local_path

MAX_BYTES = 16 << 20


def spark_log_of(settings: Settings) -> Path:
    """Returns the log file of the job on the settings' checkpoint."""
    return Path(local_path(settings.checkpoint)) / "spark.log"


@contextmanager
def output_of_children(file: Path | None) -> Iterator[None]:
    """Redirects stdout and stderr to a file while the block runs, so that processes started in it print there.

    What this process logs meanwhile, in other threads, goes on to come where it did.

    Args:
        file: the file, to which output is appended; None: nothing changes.
    """
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(file, "ab") as log, open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace") as own_stderr:
        handlers = [one for one in logging.getLogger().handlers if isinstance(one, logging.StreamHandler)]
        handlers = [handler for handler in handlers if handler.stream is sys.stderr]
        for handler in handlers:
            handler.setStream(own_stderr)
        try:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            yield
        finally:
            for number, old in zip((1, 2), saved, strict=True):
                os.dup2(old, number)
                os.close(old)
            for handler in handlers:
                handler.setStream(sys.stderr)


def rotate(log: Path) -> None:
    """Empties a log of more than MAX_BYTES after copying it to `.1`.

    Processes that have it open for appending, as those of `output_of_children`, go on at its beginning. Lines that they
    print at this moment may be lost.
    """
    with suppress(OSError):  # such as a missing file
        if log.stat().st_size > MAX_BYTES:
            with suppress(OSError):  # on a full disk the log is emptied without a copy
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)
