"""Counts what a running job does in its checkpoint's folder, as requests that it would be on object storage.

    python benchmarks/checkpoint_requests.py CHECKPOINT [SECONDS]

Prints one JSON object: the batches in that time, and for each batch, by folder, how many files were written (a PUT),
read (a GET), removed (a DELETE) and how often a folder was listed (a LIST).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import struct
import sys
import time
from collections import Counter
from pathlib import Path

_CLOSE_WRITE, _CLOSE_READ, _MOVED_TO, _CREATE, _DELETE, _OPEN = 0x8, 0x10, 0x80, 0x100, 0x200, 0x20
_IS_FOLDER = 0x40000000
_EVENT = struct.Struct("iIII")


class Watched:
    """Counts events below a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.handle = self._libc.inotify_init()
        self._folders: dict[int, Path] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        for folder, _, _ in os.walk(root):
            self._watch(Path(folder))

    def _watch(self, folder: Path) -> None:
        mask = _CLOSE_WRITE | _CLOSE_READ | _MOVED_TO | _CREATE | _DELETE | _OPEN
        self._folders[self._libc.inotify_add_watch(self.handle, os.fsencode(folder), mask)] = folder

    def take(self) -> None:
        data, at = os.read(self.handle, 1 << 20), 0
        while at < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            name = data[at : at + length].rstrip(b"\0").decode()
            at += length
            folder = self._folders.get(watch, self._root)
            if mask & _IS_FOLDER:
                if mask & _CREATE:
                    self._watch(folder / name)
                elif mask & _OPEN and not name:  # a folder within tells of it, too
                    self._count(folder, "LIST")
            elif (mask & _CLOSE_WRITE and not _is_temporary(name)) or mask & _MOVED_TO:
                self._count(folder, "PUT")
            elif mask & _CLOSE_READ:
                self._count(folder, "GET")
            elif mask & _DELETE and not _is_temporary(name):
                self._count(folder, "DELETE")

    def _count(self, folder: Path, what: str) -> None:
        place = folder.relative_to(self._root).parts[:2] or (".",)
        self.counts["/".join(place), what] += 1


def _is_temporary(name: str) -> bool:
    """Whether a file is renamed when it is complete; checksums would not be written to object storage."""
    return name.endswith((".tmp", ".crc")) or name.startswith(".")


def main() -> None:
    root, seconds = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 30
    watched = Watched(root)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([watched.handle], [], [], left)[0]:
            watched.take()
    batches = watched.counts["query/commits", "PUT"]
    by_folder: dict[str, dict[str, float]] = {}
    for (folder, what), n in sorted(watched.counts.items()):
        by_folder.setdefault(folder, {})[what] = round(n / max(batches, 1), 2)
    print(json.dumps({"seconds": seconds, "batches": batches, "requests_a_batch": by_folder}))


if __name__ == "__main__":
    main()
