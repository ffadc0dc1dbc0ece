"""Writes the deliveries of finished jobs to the tables, several jobs in one commit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pyarrow as pa

from streaming.release.driver.job_sender import FinishedJob
from streaming.release.driver.release_records import ReleaseRecords
from streaming.release.driver.unconfirmed_releases import UnconfirmedReleases
from streaming.release.driver.unwritable_destinations import UnwritableDestinations
from tracker.messages import concat
from warehouse.schemas import DELIVERIES

_WRITE_SECONDS = 0.5  # the time between two commits


class WriteQueue:
    """Writes the deliveries of finished jobs, and notes that their releases are written down.

    A release with open parts is not written down before an offset names these parts. So after a crash either the whole
    release is handed out again, or its open parts are.

    Args:
        records: writes the rows.
        unconfirmed: notes which releases are written down, and knows the open parts in the last offset.
        unwritable: knows the open parts now.
        on_deliveries: called with the rows that were written to `deliveries`.
        stopped: ends waiting.
    """

    def __init__(
        self,
        records: ReleaseRecords,
        unconfirmed: UnconfirmedReleases,
        unwritable: UnwritableDestinations,
        on_deliveries: Callable[[pa.Table], None],
        stopped: threading.Event,
    ) -> None:
        self._records = records
        self._unconfirmed = unconfirmed
        self._unwritable = unwritable
        self._on_deliveries = on_deliveries
        self._stopped = stopped
        self._finished: queue.Queue[FinishedJob | None] = queue.Queue()

    def put(self, finished: FinishedJob) -> None:
        """Adds a finished job. Jobs of a lane come in the order in which they were sent."""
        self._finished.put(finished)

    def end(self) -> None:
        """Lets `run` return after it has written the jobs in the queue, as far as it can."""
        self._finished.put(None)

    def run(self) -> None:
        """Writes the jobs that are put into the queue, until `end`."""
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
        """Splits finished jobs into those that can be written, and those with open parts that no offset has yet.

        A job that has to wait holds up later ones of its lane: after a crash a lane continues after its last written
        release.
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
            writer, tick = self._records.writer(one.job.lane), one.job.tick
            # Before the deliveries: when these are written, the release counts as done.
            if not self._records.write_refused(one.refused, writer, tick):
                return
            if one.deliveries.num_rows:
                versions[writer] = max(versions.get(writer, 0), tick)
        if not self._records.append("deliveries", rows, versions):
            return
        if rows.num_rows:
            self._on_deliveries(rows)
        self._unconfirmed.note_written(one.job for one in finished)
