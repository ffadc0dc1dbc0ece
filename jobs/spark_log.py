"""Spark's log, `spark.log` beside the checkpoint: what its JVM and Python workers print. It is kept small."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from conf.settings import Settings, local_path

MAX_BYTES = 16 << 20


def spark_log_of(settings: Settings) -> Path:
    """The log of the job on a checkpoint."""
    return Path(local_path(settings.checkpoint)) / "spark.log"


@contextmanager
def output_of_children(file: Path | None) -> Iterator[None]:
    """Sends stdout and stderr to a file while the block runs, so that processes started in it print there.

    Args:
        file: what is printed is appended to it; None: nothing changes.
    """
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(file, "ab") as log:
        try:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            yield
        finally:
            for number, old in zip((1, 2), saved, strict=True):
                os.dup2(old, number)
                os.close(old)


def bound(log: Path) -> None:
    """Empties a log of more than MAX_BYTES, and keeps what was in it as `.1`, instead of what that was before.

    Processes that have it open for appending, as those of `output_of_children`, go on at its beginning. What they
    print in this moment may be missing.
    """
    with suppress(OSError):  # it is not there, say
        if log.stat().st_size > MAX_BYTES:
            with suppress(OSError):  # the disk is full: all the more
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)
