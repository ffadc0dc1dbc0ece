"""The checkpoint's disk: what is forced to it outlives a loss of power, and of the rest some.

It promises no more than POSIX: a file's content is there after fsync of the file, its name after fsync of its folder
(fsync(2)). Writes that were not forced reach the disk in some order; a loss of power keeps those up to some moment, or
any of them.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path


class Disk:
    """The files below a folder, and what of them a loss of power leaves.

    Args:
        folder: on a file system in memory.
        has_holes: a file's size may reach the disk before its content: what was not forced may be zeros.
    """

    def __init__(self, folder: Path, has_holes: bool = False) -> None:
        self.folder, self._has_holes = folder, has_holes
        self._forced_content: dict[int, bytes] = {}  # by inode
        # Of each folder its inode, and the names in it with theirs.
        self._forced_names: dict[Path, tuple[int, dict[str, int]]] = {}

    def force(self, path: Path) -> None:
        """Does what fsync does with a file or folder."""
        if path.is_dir():
            names = {entry.name: entry.inode() for entry in os.scandir(path)}
            self._forced_names[path] = path.stat().st_ino, names
        else:
            self._forced_content[path.stat().st_ino] = path.read_bytes()

    def move(self, old: Path, new: Path) -> None:
        """Takes a folder away from who has it open, and gives it another path: what is written to the old one fails."""
        old.rename(new)
        old.touch()  # no folder can be made there
        for folder in [folder for folder in self._forced_names if folder.is_relative_to(old)]:
            self._forced_names[new / folder.relative_to(old)] = self._forced_names.pop(folder)

    def lose_power(self, chance: random.Random) -> list[str]:
        """Loses some of what was not forced; returns the names of the files that are lost, torn or as before."""
        changed: list[str] = []
        for name, _, files in sorted(os.walk(self.folder)):
            folder = Path(name)
            inode, forced = self._forced_names.get(folder, (0, {}))
            if inode != folder.stat().st_ino:
                forced = {}  # of another folder, which had this name
            for file in sorted({*files, *forced}):
                if (folder / file).is_dir():
                    continue
                if self._lose(folder / file, forced.get(file), chance):
                    changed.append(str((folder / file).relative_to(self.folder)))
        return changed

    def _lose(self, file: Path, forced: int | None, chance: random.Random) -> bool:
        """Lets a file be as it was last forced, as it is now, or torn; returns whether it is not as it is now."""
        before = None if forced is None else self._forced_content.get(forced)
        now = file.read_bytes() if file.exists() else None
        inode = file.stat().st_ino if file.exists() else None
        if now is not None and inode == forced and before == now:
            return False
        if chance.random() < 0.5:  # the new one has come to the disk, if its content was forced, whole
            content = self._forced_content.get(inode) if inode is not None else None
            if now is None or content == now:
                return False
            torn = now[: chance.randrange(len(now) + 1)]
            if self._has_holes and len(torn) % 2:
                torn = torn.ljust(len(now), b"\0")
            file.write_bytes(torn)
            return torn != now
        if before is None:
            file.unlink(missing_ok=True)
        else:
            file.write_bytes(before)
            inode = file.stat().st_ino
            self._forced_content[inode] = before
            self._forced_names[file.parent][1][file.name] = inode
        return before != now

    def force_all(self, folder: Path) -> None:
        """Forces a folder with all that is in it, as who copies a checkpoint does."""
        for name, folders, files in os.walk(folder, topdown=False):
            for one in (*files, *folders):
                self.force(Path(name) / one)
        self.force(folder)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
