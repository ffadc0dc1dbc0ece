"""What is not as it should be while the job runs: what `delaylake status`, metrics and dashboard name."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# Kinds of trouble.
STANDING = "standing"  # a source topic that is not read although it has messages
NOT_SEEN = "not_seen"  # entries of a source topic that were passed over
UNWRITABLE = "unwritable"  # a destination that takes nothing
NO_ROUTE = "no_route"  # a topic or subscription that has pending messages and is not in the settings


@dataclass(frozen=True)
class Trouble:
    """Something that somebody has to look at.

    Attributes:
        kind: one of the constants of this module.
        name: of what: a topic, a topic partition, a destination or a subscription.
        since: ms since the epoch.
        text: what is the matter, and why as far as that is known; one line that does not repeat the name.
    """

    kind: str
    name: str
    since: int
    text: str


class Troubles:
    """The troubles of now, of one process. Safe in several threads.

    Args:
        file: where another process reads them with `follow`; written at each change. None: nobody does.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._own: dict[tuple[str, str], Trouble] = {}
        self._followed: Path | None = None

    def begin(self, kind: str, name: str, text: str) -> None:
        """Notes a trouble, or the new text of one that goes on: it keeps the time since when."""
        with self._lock:
            known = self._own.get((kind, name))
            since = time.time_ns() // 1_000_000 if known is None else known.since
            if known is None or known.text != text:
                self._own[kind, name] = Trouble(kind, name, since, " ".join(text.split()))
                self._write()

    def end(self, kind: str, name: str) -> None:
        """Notes that a trouble is over; nothing where there was none."""
        with self._lock:
            if self._own.pop((kind, name), None) is not None:
                self._write()

    def follow(self, file: Path) -> None:
        """From now on also tells of the troubles that another process writes to a file, in place of an earlier one."""
        self._followed = file

    def current(self) -> list[Trouble]:
        """All troubles, the oldest first."""
        with self._lock:
            found = dict(self._own)
        for trouble in _read(self._followed):
            found.setdefault((trouble.kind, trouble.name), trouble)
        return sorted(found.values(), key=lambda trouble: (trouble.since, trouble.kind, trouble.name))

    def _write(self) -> None:
        """A reader sees the old troubles or the new ones, whole."""
        if self._file is not None:
            temporary = self._file.with_suffix(".tmp")
            temporary.write_text(json.dumps([asdict(trouble) for trouble in self._own.values()]))
            temporary.replace(self._file)


def _read(file: Path | None) -> list[Trouble]:
    if file is None:
        return []
    try:
        return [Trouble(**values) for values in json.loads(file.read_text())]
    except FileNotFoundError:
        return []  # the other process has none, or has ended
