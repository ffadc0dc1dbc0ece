"""Files that others read while they are written."""

from __future__ import annotations

from pathlib import Path


def replace_file(file: Path, content: bytes) -> None:
    """Replaces a file in a folder that exists: a reader sees the old content or the new one, whole.

    What a restart relies on is written by `warehouse.durable.write_durably`.
    """
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(file)
