"""Finished jobs, whose deliveries are written down several in one commit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pyarrow as pa

from streaming.release.driver.job_sender import FinishedJob
from streaming.release.driver.unconfirmed_releases import UnconfirmedReleases
from streaming.release.driver.unwritable_destinations import UnwritableDestinations
from streaming.release.driver.written_down import WrittenDown
from tracker.messages import concat
from warehouse.schemas import DELIVERIES

_WRITE_SECONDS = 0.5  # deliveries are written down this often


class WriteQueue:
    """Writes down what finished jobs have delivered, and has them confirmed.

    A release that has open parts is not written down before an offset says that these are open, so that after a crash
    either the whole of it is handed out again, or that part of it.

    Args:
        written_down: the tables.
        unconfirmed: is told of what is written down, and knows what offsets say.
        unwritable: knows what is open.
        on_deliveries: called with the rows that were written to `deliveries`.
        stopped: ends waiting.
    """

    def __init__(
        self,
        written_down: WrittenDown,
        unconfirmed: UnconfirmedReleases,
        unwritable: UnwritableDestinations,
        on_deliveries: Callable[[pa.Table], None],
        stopped: threading.Event,
    ) -> None:
        self._written_down = written_down
        self._unconfirmed = unconfirmed
        self._unwritable = unwritable
        self._on_deliveries = on_deliveries
        self._stopped = stopped
        self._finished: queue.Queue[FinishedJob | None] = queue.Queue()

    def put(self, finished: FinishedJob) -> None:
        """Adds a finished job; of a lane they come in the order in which they were sent."""
        self._finished.put(finished)

    def end(self) -> None:
        """Lets `run` return when what is in the queue by now has been written down, as far as it can be."""
        self._finished.put(None)

    def run(self) -> None:
        """Writes down what comes in, until `end`."""
        is_last = False
        waiting: list[FinishedJob] = []
        while not is_last:
            try:
                item = self._finished.get(timeout=_WRITE_SECONDS if waiting else None)
            except queue.Empty:
                item = None
            else:
                is_last = item is None
                waiting += [item] if item is not None else []
                if not is_last:
                    self._stopped.wait(_WRITE_SECONDS)
            while not self._finished.empty():
                item = self._finished.get_nowait()
                is_last = is_last or item is None
                waiting += [item] if item is not None else []
            ready, waiting = self._recorded_ones(waiting)
            if ready:
                self._write(ready)

    def _recorded_ones(self, finished: list[FinishedJob]) -> tuple[list[FinishedJob], list[FinishedJob]]:
        """Splits finished jobs: those that can be written down, and those with open parts that no offset records.

        Where one has to wait, later ones of its lane do, too: after a crash a lane goes on after its last release that
        is written down.
        """
        ready: list[FinishedJob] = []
        left: list[FinishedJob] = []
        recorded = self._unconfirmed.recorded_parts()
        for one in finished:
            is_unknown = any(
                (part.target, part.release) not in recorded and self._unwritable.has(part.release, part.target)
                for part in one.parts
            )
            is_behind = any(other.job.lane == one.job.lane for other in left)
            (left if is_unknown or is_behind else ready).append(one)
        return ready, left

    def _write(self, finished: list[FinishedJob]) -> None:
        rows = concat([one.deliveries for one in finished], DELIVERIES)
        versions: dict[str, int] = {}
        for one in finished:
            writer, tick = self._written_down.writer(one.job.lane), one.job.tick
            # Before its deliveries: once these are written down, the release counts as done.
            if not self._written_down.refuse(one.refused, writer, tick):
                return
            if one.deliveries.num_rows:
                versions[writer] = max(versions.get(writer, 0), tick)
        if not self._written_down.append("deliveries", rows, versions):
            return
        if rows.num_rows:
            self._on_deliveries(rows)
        self._unconfirmed.note_written(one.job for one in finished)
