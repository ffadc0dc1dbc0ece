"""Sends what is open for a destination once more, all of it together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pyarrow as pa

from streaming.release.attempt import Attempt, merged, note_arrived, note_done
from streaming.release.driver.job import shaped_of
from streaming.release.driver.job_sender import refused_of
from streaming.release.driver.spacing import Spacing
from streaming.release.driver.spark_jobs import SparkJobs
from streaming.release.driver.unwritable_destinations import Part
from streaming.release.driver.written_down import WrittenDown, of_target
from streaming.release.producer_names import ProducerNames
from tracker.messages import concat
from tracker.packing import unpack
from warehouse.delta.tables import Tables
from warehouse.schemas import DELIVERIES


class PartSender:
    """Sends parts of releases, and writes them down. Safe in several threads, each with a destination of its own.

    Args:
        spark_jobs: runs the tasks.
        names: gives producers other names, where somebody else has published under theirs.
        spacing: says how much later than planned messages are sent.
        tables: of the warehouse.
        written_down: the rows of releases in these tables.
        on_deliveries: called with the rows that were written to `deliveries`.
        stopped: nothing more is sent.
    """

    def __init__(
        self,
        spark_jobs: SparkJobs,
        names: ProducerNames,
        spacing: Spacing,
        tables: Tables,
        written_down: WrittenDown,
        on_deliveries: Callable[[pa.Table], None],
        stopped: threading.Event,
    ) -> None:
        self._spark_jobs = spark_jobs
        self._names = names
        self._spacing = spacing
        self._tables = tables
        self._written_down = written_down
        self._on_deliveries = on_deliveries
        self._stopped = stopped

    def send(self, parts: list[Part]) -> str:
        """Sends what releases have for one destination, in one task, and writes it down when all of it has arrived.

        Args:
            parts: for one target, the oldest first.

        Returns:
            why not all of it has arrived; an empty text: it has.
        """
        self._spark_jobs.use_pool()
        [target] = {part.target for part in parts}
        writers = {part.release: self._written_down.writer(part.job.lane, target) for part in parts}
        written = {writer: self._written_down.last_tick(writer) for writer in set(writers.values())}
        parts = [part for part in parts if part.job.tick > written[writers[part.release]]]
        if not parts:
            return ""
        if self._stopped.is_set():
            return "stopped"
        checked_at = self._spark_jobs.check_epoch()
        sent_to = max(part.job.sent_to for part in parts)
        attempt = Attempt(
            only=frozenset({target}),
            done=frozenset().union(*(part.done for part in parts)),
            arrived_to=merged(part.arrived_to for part in parts),
            generations=self._names.generations,
            sent_to=sent_to,
            put_off=self._spacing.put_off(shaped_of(part.job for part in parts), time.time_ns() // 1_000_000),
            pace_file=self._spacing.pace_file,
        )
        sent = self._spark_jobs.run([one for part in parts for one in part.job.assignments], 1, attempt, checked_at)
        failed = [one for s in sent for one in s.failed]
        if failed:
            for part in parts:
                note_arrived(part.arrived_to, failed)
                note_done(part.arrived_to, [line for one in sent for line in one.done])
            self._names.renew(failed, max(parts[-1].job.tick, sent_to))
            return failed[0].reason
        for part in parts:
            resumed = target if part.is_resumed else None
            refused = refused_of(sent, part.release)
            if not self._written_down.refuse(refused, writers[part.release], part.job.tick, resumed):
                return "stopped"
        rows = concat([unpack(one.deliveries) for one in sent], DELIVERIES)
        if ticks := [part.job.tick for part in parts if part.is_resumed]:
            rows = self._written_down.missing("deliveries", rows, ticks, *of_target(target))
        if rows.num_rows:
            self._tables.append("deliveries", rows, {writers[part.release]: part.job.tick for part in parts})
            self._on_deliveries(rows)
        return ""
