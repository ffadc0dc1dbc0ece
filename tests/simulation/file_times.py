"""The times of a table's files as the simulated clock has them.

A vacuum goes by the system's clock, by when files were written, and by the times at which the log says that files were
removed. Here all of them are moved before it: what is a second old by the simulated clock is a day old by the system's,
and the tables keep old versions by so much longer, too. So the time that the vacuum takes itself counts for nothing. It
goes by the world's clock: the file system and the process that vacuums have the same, which does not jump.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

STRETCH = 86_400  # seconds of the system's clock for a simulated one
_LOG = "_delta_log"
_MARGIN = 600  # seconds of the system's clock: no vacuum takes so long
_OLDEST = 600  # simulated seconds: no file is older to a vacuum


class FileTimes:
    """When the files of a table's folder came, and when they were removed, in seconds by the simulated clock.

    Attributes:
        written_at: by path in the folder; of commits, too.
        removed_at: of files that a newer version does not have.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.written_at: dict[str, float] = {}
        self.removed_at: dict[str, float] = {}

    def files(self) -> set[str]:
        """The data files that are there."""
        return {file.name for file in self._folder.glob("*.parquet")}

    def note(self, now: float) -> None:
        """Notes what has come since the last time."""
        for file in sorted([*self._folder.glob("*.parquet"), *(self._folder / _LOG).iterdir()]):
            path = str(file.relative_to(self._folder))
            if path in self.written_at:
                continue
            self.written_at[path] = now
            if file.suffix == ".json":
                for action in map(json.loads, file.read_text().splitlines()):
                    if "remove" in action:
                        self.removed_at.setdefault(action["remove"]["path"], now)

    def set(self, now: float) -> None:
        """Gives the files, and what the log says of those that were removed, the times that they have by now."""
        self.note(now)
        begun = time.time() + _MARGIN

        def real(at: float) -> float:
            return begun - min(now - at, _OLDEST) * STRETCH

        def set_removed(actions: list[dict[str, Any]]) -> None:
            for removed in filter(None, (action.get("remove") for action in actions)):
                removed["deletionTimestamp"] = round(real(self.removed_at[removed["path"]]) * 1000)

        for file in sorted((self._folder / _LOG).glob("*.json")):
            actions = [json.loads(line) for line in file.read_text().splitlines()]
            set_removed(actions)
            file.write_text("".join(f"{json.dumps(action)}\n" for action in actions))
        for file in (self._folder / _LOG).glob("*.checkpoint.parquet"):
            checkpoint = pq.read_table(file)
            rows = checkpoint.to_pylist()
            set_removed(rows)
            pq.write_table(pa.Table.from_pylist(rows, checkpoint.schema), file)
        for path, written_at in self.written_at.items():
            if (self._folder / path).exists():
                os.utime(self._folder / path, (real(written_at), real(written_at)))
