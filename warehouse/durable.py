"""Writes files so that they survive a crash and a loss of power."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO

_CHUNK_BYTES = 4 << 20


def write_durably(file: Path, content: str | bytes) -> None:
    """Replaces a file atomically: a reader, also after a crash, sees the old content or the new one, whole.

    The file's folder is made if it is missing.
    """
    new = [folder for folder in file.parents if not folder.exists()]
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    _sync(temporary)
    temporary.replace(file)
    for folder in (file.parent, *(folder.parent for folder in new)):
        _sync(folder)


def copy_durably(source: IO[bytes], file: Path) -> None:
    """Makes a file of a stream: under its name it is whole, also after a loss of power. `sync_folder` forces the name.

    The file's folder is made if it is missing.
    """
    temporary = file.with_name(f"{file.name}.copy")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("wb") as copy:
        shutil.copyfileobj(source, copy, _CHUNK_BYTES)
    _sync(temporary)
    temporary.replace(file)


def create_durably(file: Path, content: str, temporary: Path) -> None:
    """Makes a file that a reader, also after a crash, sees whole; does nothing if another process has made it first.

    Args:
        file: the file; its folder is made if it is missing.
        content: of the file.
        temporary: a name in the same folder that no other process uses.
    """
    write_durably(temporary, content)
    try:
        os.link(temporary, file)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        temporary.replace(file)
    temporary.unlink(missing_ok=True)
    _sync(file.parent)


def sync(files: Iterable[Path]) -> None:
    """Forces files and their folders to the disk (fsync); ignores files that are gone."""
    folders = set()
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            _sync(file)
            folders.add(file.parent)
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            _sync(folder)


def sync_folder(folder: Path) -> None:
    """Forces the names of a folder's files to the disk."""
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
