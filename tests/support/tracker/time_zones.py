"""Another version of the time zones: what the package `tzdata` would be."""

from __future__ import annotations

import shutil
import struct
from importlib import resources
from pathlib import Path

VERSION = "2999z"


def other_version(folder: Path, offset_seconds: int, zone: str = "Europe/Berlin") -> Path:
    """Makes a package `tzdata` in which one zone has another offset from UTC, always.

    Args:
        folder: where the package is put.
        offset_seconds: the zone's.

    Returns:
        the package's folder.
    """
    with resources.as_file(resources.files("tzdata")) as package:
        copy = Path(shutil.copytree(package, folder / "tzdata", ignore=shutil.ignore_patterns("__pycache__")))
    (copy / "__init__.py").write_text(f'IANA_VERSION = "{VERSION}"\n')
    # RFC 8536, version 1: one type of local time, no change.
    header = struct.pack(">4s16x6l", b"TZif", 0, 0, 0, 0, 1, 4)
    (copy / "zoneinfo" / zone).write_bytes(header + struct.pack(">lBB4s", offset_seconds, 0, 0, b"NEW\0"))
    return copy
