"""Writes files that other processes read at the same time."""

from __future__ import annotations

from pathlib import Path


def replace_file(file: Path, content: bytes) -> None:
    """Replaces a file in an existing folder atomically: a reader sees the old content or the new one.

    It may be lost at a loss of power: files for a restart are written by `warehouse.durable.write_durably`.
    """
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(file)
