"""The feedback file: the driver tells the source process, on the same machine, how far the releases have come."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.files import replace_file


@dataclass(frozen=True)
class Feedback:
    """The progress of the releases, and the driver's instructions to the clock. Times are ms since the epoch."""

    confirmed: int = 0  # releases up to this tick have arrived and are recorded, or are open
    settled: int = 0  # the cutoff of that tick: messages due by then have arrived and are recorded, or are open
    lookahead_millis: int = 0  # how long before its time a message is to be dispatched; 0: as the settings say
    next_due: int | None = None  # no message in state is due before this time; None: not known
    in_flight: int = 0  # messages dispatched and not recorded yet, due within the longest lookahead from now
    in_flight_bytes: int = 0  # about the bytes of all messages dispatched and not recorded yet
    large_bytes: int = 0  # bytes of large payloads in the state's time slots
    is_stopping: bool = False  # the clock is to make no more ticks
    # Unwritable recipients, by source topic and subscription ("" for rejects): `since`, ms since the epoch; `open`, the
    # releases [tick, kind] with messages that have not arrived; `recalled`, those of which nothing was sent, and which
    # the shards are to park; `round`, of a slow one, rises when it wants `most` of what is parked; `rejects`,
    # the reason with which due messages are rejected, absent where they wait. None: not known yet in this run.
    unwritable: dict[str, dict[str, Any]] | None = None
    # (tick, shards): after that tick, by source topic and subscription, for each shard [number of messages that wait
    # for places of the next tick, last place that the shard gave, ms since the epoch].
    waiting: tuple[int, dict[str, dict[str, list[list[int]]]]] = (0, {})
    # (tick, subscriptions): after that tick, by source topic and subscription, which resumed ones get what is parked in
    # rounds, and a time, ms since the epoch, before which none of it was due.
    resuming: tuple[int, dict[str, dict[str, int]]] = (0, {})


class FeedbackFile:
    """A file with the newest feedback. Each write replaces the whole file: a reader sees the old one or the new one.

    Args:
        path: of the file, in an existing folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[tuple[int, int], Feedback] = ((0, 0), Feedback())

    def write(self, feedback: Feedback) -> None:
        """Replaces the feedback in the file."""
        replace_file(self._path, json.dumps(asdict(feedback)).encode())

    def read(self) -> Feedback:
        """Returns the feedback in the file; the defaults where there is no file."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return Feedback()
        # Two writes can have the same time, which is no finer than some milliseconds; but each makes another inode.
        changed = (status.st_mtime_ns, status.st_ino)
        if changed != self._read[0]:
            self._read = (changed, Feedback(**json.loads(self._path.read_text())))
        return self._read[1]
