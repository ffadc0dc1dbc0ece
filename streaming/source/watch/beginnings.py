"""Keeps in a file of the checkpoint where each topic partition began for the job, also one that was empty.

A run begins after the last offset, which has no position for a topic partition of which no message was ingested. Its
subscription alone does not tell where it began: the broker moves it on when messages expire.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from broker.position import Position
from conf.settings import Settings, local_path
from warehouse.durable import write_durably

_log = logging.getLogger(__name__)

# Inside the query's folder: the job of a new warehouse begins again. A rebuild takes the file over.
BEGINNINGS_FILE = Path("query/beginnings.json")


@dataclass(frozen=True)
class Beginning:
    """The place before the first entry of a topic partition that is for the job."""

    position: Position  # with entry_id -1 the beginning of a ledger
    index: int | None  # broker entry index of the last message up to there, -1 before the first; None: unknown


class Beginnings:
    """The beginnings of topic partitions, by name. Thread-safe.

    It begins with those in the file of an earlier run. A beginning is in the file when `keep` returns.
    """

    def __init__(self, settings: Settings) -> None:
        self._file = Path(local_path(settings.checkpoint)) / BEGINNINGS_FILE
        self._known = _read(self._file)
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._written = dict(self._known)

    def get(self, name: str) -> Beginning | None:
        """Returns the beginning of a topic partition; None: it is not known."""
        with self._lock:
            return self._known.get(name)

    def all(self) -> dict[str, Beginning]:
        """Returns all beginnings that are known, by topic partition."""
        with self._lock:
            return dict(self._known)

    def keep(self, name: str, beginning: Beginning) -> None:
        """Keeps the beginning of a topic partition; one of several waiting threads writes for all."""
        with self._lock:
            self._known[name] = beginning
        with self._writing:
            with self._lock:
                known = dict(self._known)
            if self._written == known:
                return
            try:
                write_durably(self._file, json.dumps({n: [*one.position, one.index] for n, one in known.items()}))
            except OSError as error:
                _log.error("where %s begins is forgotten at a stop, it can't be written down: %s", name, error)
                return
            self._written = known


def _read(file: Path) -> dict[str, Beginning]:
    try:
        return {
            name: Beginning(Position(ledger, entry), index)
            for name, (ledger, entry, index) in json.loads(file.read_text()).items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.error("where source topics begin is lost: %s: %s", file, error)
        return {}
