"""A small file system of its own, which a test can fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A file system in memory, mounted at a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Lets a file take more room, until only so much is left."""
        with self._filler.open("ab", buffering=0) as file:  # what is left in a buffer would fail again at the end
            left = self.free_bytes - leave_bytes
            while left > 0:
                try:
                    left -= file.write(bytes(min(left, 1 << 16)))
                except OSError:
                    return

    def make_room(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, n_bytes: int) -> Iterator[SmallDisk]:
    """Mounts a file system for the block; skips the test where nothing can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here: that needs root")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
