"""Watches the room on the disks that the job writes to: a full one stops every topic, so reading stops before."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from conf.settings import Settings, is_object_storage, local_path
from status.alerts import DISK, Alerts

_LOOK_SECONDS = 1.0
_LEAST_FILES = 1_000  # a file system with room for fewer new files is as good as full

# What the system says of a disk that takes nothing: ENOSPC and EDQUOT, by the C library's words, also in Java's errors.
_FULL = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")


class DiskRoom:
    """The room on the disks of warehouse, checkpoint and temporary files, as far as they are of this machine.

    With less than twice `ingest.min_free_bytes` it is an alert; with less than that the job must not read further.

    Args:
        alerts: records disks that are short of room.
    """

    def __init__(self, settings: Settings, alerts: Alerts) -> None:
        self._least = settings.ingest.min_free_bytes
        self._alerts = alerts
        self._folders = _folders(settings)
        self._looked_at = -_LOOK_SECONDS
        self._short: str | None = None

    def why_short(self) -> str | None:
        """Returns why the job must not read further, one line; None: there is room. Looks once a second."""
        if time.monotonic() - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._short = self._look()
        return self._short

    def _look(self) -> str | None:
        short = None
        for folder in self._folders:
            free = _free_bytes(folder)
            if free < 2 * self._least:
                stops = free < self._least
                text = f"{free:,} bytes are free; " + (
                    "the source topics are not read until there is room"
                    if stops
                    else f"with less than {self._least:,} the source topics are not read"
                )
                short = f"the disk of {folder} is full" if stops else short
                with contextlib.suppress(OSError):  # the alerts are a file, and this disk may be its own
                    self._alerts.begin(DISK, str(folder), text)
            else:
                with contextlib.suppress(OSError):
                    self._alerts.end(DISK, str(folder))
        return short


def is_of_full_disk(error: str) -> bool:
    """Whether an error's text says that a disk, of this machine or another one of the job, takes nothing more."""
    return any(words in error for words in _FULL)


def _folders(settings: Settings) -> list[Path]:
    local_dirs = str(settings.spark.conf.get("spark.local.dir", "")).split(",")
    places: Iterable[str] = (settings.warehouse, settings.checkpoint, tempfile.gettempdir(), *local_dirs)
    return list(dict.fromkeys(Path(local_path(place)) for place in places if place and not is_object_storage(place)))


def _free_bytes(folder: Path) -> int:
    """Returns the free bytes of a folder's disk; 0: it takes no new files; of a missing folder those of its parent."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = os.statvfs(folder)
    if found.f_files and found.f_favail < _LEAST_FILES:
        return 0
    return found.f_bavail * found.f_frsize
