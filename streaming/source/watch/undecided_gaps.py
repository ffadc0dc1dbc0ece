"""Keeps undecided gaps in a file of the checkpoint: those for which the broker has not told yet what is missing.

A run begins after the last offset, which may be after such a gap; then the run would not find the gap itself.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from broker.entries.continuity import Gap
from broker.position import Position, SourceTopic
from conf.settings import Settings, local_path
from warehouse.durable import write_durably

_log = logging.getLogger(__name__)

# Inside the query's folder: the job of a new warehouse reads all entries again. A rebuild takes the file over.
GAPS_FILE = Path("query/undecided_gaps.json")

_MAX_STORED = 10_000  # the most gaps in the file, which is written as a whole each time

SourceGap = tuple[SourceTopic, Gap]


class UndecidedGaps:
    """The undecided gaps, in the order in which they are to be decided. Thread-safe.

    It begins with the gaps in the file of an earlier run. A change is in the file when the call returns; if the file
    can't be written, `write` or the next change tries again.
    """

    def __init__(self, settings: Settings) -> None:
        self._file = Path(local_path(settings.checkpoint)) / GAPS_FILE
        self._gaps: dict[SourceGap, None] = dict.fromkeys(_read(self._file))
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._changes = self._written = 0

    def __len__(self) -> int:
        return len(self._gaps)

    def first(self, n: int) -> list[SourceGap]:
        """Returns the first n gaps, or as many as there are."""
        with self._lock:
            return list(islice(self._gaps, n))

    def all(self) -> list[SourceGap]:
        """Returns all gaps."""
        with self._lock:
            return list(self._gaps)

    def sources(self) -> set[SourceTopic]:
        """Returns the topic partitions that have gaps."""
        with self._lock:
            return {source for source, _ in self._gaps}

    def add(self, gaps: Iterable[SourceGap]) -> None:
        """Adds gaps, and writes the first _MAX_STORED of all to the file; a stop loses the others."""
        with self._lock:
            n = len(self._gaps)
            self._gaps |= dict.fromkeys(gaps)
            self._changes += n < _MAX_STORED
            is_too_many = n <= _MAX_STORED < len(self._gaps)
        if is_too_many:
            _log.warning("%d gaps are not decided: what comes to them is forgotten at a stop", _MAX_STORED)
        self.write()

    def remove(self, decided: Iterable[SourceGap], failed: Iterable[SourceGap]) -> None:
        """Removes decided gaps, and moves those for which there was no answer behind the others."""
        failed = list(failed)
        with self._lock:
            n = len(self._gaps)
            for gap in [*decided, *failed]:
                self._gaps.pop(gap, None)
            self._changes += len(self._gaps) + len(failed) < n or n > _MAX_STORED
            self._gaps |= dict.fromkeys(failed)
        self.write()

    def replace(self, source: SourceTopic, gap: Gap, by: Gap) -> None:
        """Replaces a gap by what is to be decided instead."""
        with self._lock:
            self._gaps = dict.fromkeys((source, by) if one == (source, gap) else one for one in self._gaps)
            self._changes += 1
        self.write()

    def write(self) -> None:
        """Writes the gaps to the file if they have changed; one of several waiting threads writes for all."""
        wanted = self._changes
        with self._writing:
            if self._written >= wanted:
                return
            with self._lock:
                changes, stored = self._changes, list(islice(self._gaps, _MAX_STORED))
            try:
                write_durably(self._file, json.dumps(_to_json(stored)))
            except OSError as error:
                _log.error("gaps of the source topics are forgotten at a stop, they can't be written down: %s", error)
                return
            self._written = changes


def _to_json(gaps: Iterable[SourceGap]) -> list[list[object]]:
    """Returns [name, source topic, partition, gaps] for each topic partition; a gap is a list of numbers."""
    by_source: dict[SourceTopic, list[object]] = {}
    for source, gap in gaps:
        by_source.setdefault(source, []).append([*gap.after, *gap.before, gap.after_index, gap.before_index])
    return [[source.name, source.topic, source.partition, own] for source, own in by_source.items()]


def _read(file: Path) -> list[SourceGap]:
    try:
        return [
            (SourceTopic(name, topic, partition), Gap(Position(a, b), Position(c, d), after_index, before_index))
            for name, topic, partition, gaps in json.loads(file.read_text())
            for a, b, c, d, after_index, before_index in gaps
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        _log.error("which gaps of the source topics were not decided is lost: %s: %s", file, error)
        return []
