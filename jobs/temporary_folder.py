"""The job's folder for temporary files, of which a job that was killed leaves nothing for good."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

_PREFIX = "delaylake-run-"
_LOCK = "lock"  # held as long as its folder is in use


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Makes a folder in which this process, and those that it starts, have their temporary files, while the block runs.

    Spark's alone may be hundreds of MB. Folders that killed jobs have left are removed: nobody holds their locks.
    """
    root = Path(tempfile.gettempdir())
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError, Timeout):
            _remove_unused(folder)
    # It gets its name once it is locked: before, another job might remove it.
    new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))
    lock = FileLock(new / _LOCK, timeout=0)
    before = os.environ.get("TMPDIR")
    with lock:
        folder = new.rename(root / new.name.removeprefix("."))
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        try:
            yield folder
        finally:
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before
            shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(folder: Path) -> None:
    """Removes a folder of this user's, unless its lock is gone: a cleaner of old files may have taken that.

    Raises:
        Timeout: it is in use.
        OSError: it can't be looked at.
    """
    if folder.lstat().st_uid == os.geteuid() and not folder.is_symlink() and (folder / _LOCK).exists():
        with FileLock(folder / _LOCK, timeout=0):
            shutil.rmtree(folder, ignore_errors=True)
