"""Folders that settings name, and files that others read while they are written."""

from __future__ import annotations

import os
from pathlib import Path

from conf.errors import DelayLakeError, one_line

# The umask of all processes: tables, checkpoint and cache have messages and what is run, which are the owner's alone.
OWNER_ALONE = 0o077


class FolderError(DelayLakeError):
    """A folder can't be made or written. The message is one line, and names its setting."""


def make_folder(folder: Path, setting: str) -> None:
    """Makes a folder, if it is not there, in which files are to be written.

    Args:
        folder: its parents are made, too.
        setting: the name of the one that says where it is.

    Raises:
        FolderError: it can't be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(
            f"the folder {folder} can't be made ({one_line(error)}): see `{setting}` in the settings"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FolderError(f"the folder {folder} can't be written: see `{setting}` in the settings")


def replace_file(file: Path, content: bytes) -> None:
    """Replaces a file in an existing folder atomically: a reader sees the old content or the new one.

    It may be lost at a loss of power: files for a restart are written by `warehouse.durable.write_durably`.
    """
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(file)
