"""Sends the open parts of a destination again, all of them together."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pyarrow as pa

from streaming.release.attempt import MOST_CONNECTIONS, Attempt, merged, note_arrived, note_done
from streaming.release.driver.job import OpenPart, PartsSent, shaped_of
from streaming.release.driver.job_attempts import refused_of
from streaming.release.driver.release_records import ReleaseRecords, target_conditions
from streaming.release.driver.spacing import Spacing
from streaming.release.driver.spark_jobs import SparkJobs
from streaming.release.producer_names import ProducerNames
from tracker.messages import concat
from tracker.packing import unpack
from warehouse.delta.tables import Tables
from warehouse.schemas import DELIVERIES

# How long a task waits for a broker that does not answer. One that throttles a topic answers nothing for long, after a
# producer batch of many. A destination that answers, and has not taken all half as long after, is slow.
_PATIENCE_SECONDS = 10.0
_SLOW_PATIENCE_SECONDS = 40.0


class PartSender:
    """Sends open parts, and writes their deliveries. Thread-safe, with one thread for each destination.

    Args:
        spark_jobs: runs the tasks.
        names: gives producers other names, where somebody else has published under theirs.
        spacing: says how much later than planned messages are sent.
        tables: of the warehouse.
        records: writes the rows of releases to these tables.
        on_deliveries: called with the rows that were written to `deliveries`.
        stopped: when set, nothing more is sent.
    """

    def __init__(
        self,
        spark_jobs: SparkJobs,
        names: ProducerNames,
        spacing: Spacing,
        tables: Tables,
        records: ReleaseRecords,
        on_deliveries: Callable[[pa.Table], None],
        stopped: threading.Event,
    ) -> None:
        self._spark_jobs = spark_jobs
        self._names = names
        self._spacing = spacing
        self._tables = tables
        self._records = records
        self._on_deliveries = on_deliveries
        self._stopped = stopped
        self._turns = threading.Semaphore(MOST_CONNECTIONS)

    def send(self, parts: list[OpenPart], is_slow: bool) -> PartsSent:
        """Sends open parts of one destination, in one task, and writes their deliveries when all have arrived.

        Args:
            parts: of one target, the oldest first.
            is_slow: whether the destination is slow. Only some are sent to at a time, so that tasks for others run.
        """
        with self._turns if is_slow else contextlib.nullcontext():
            return self._send(parts, is_slow)

    def _send(self, parts: list[OpenPart], is_slow: bool) -> PartsSent:
        self._spark_jobs.use_pool()
        [target] = {part.target for part in parts}
        writers = {part.release: self._records.writer(part.job.lane, target) for part in parts}
        written = {writer: self._records.last_tick(writer) for writer in set(writers.values())}
        parts = [part for part in parts if part.job.tick > written[writers[part.release]]]
        if not parts:
            return PartsSent()
        if self._stopped.is_set():
            return PartsSent("stopped")
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
            apart=frozenset({target}),
            patience_seconds=_SLOW_PATIENCE_SECONDS if is_slow else _PATIENCE_SECONDS,
            most_seconds=1.5 * (_SLOW_PATIENCE_SECONDS if is_slow else _PATIENCE_SECONDS),
        )
        sent = self._spark_jobs.run([one for part in parts for one in part.job.assignments], 1, attempt, checked_at)
        failed = [one for s in sent for one in s.failed]
        if failed:
            for part in parts:
                note_arrived(part.arrived_to, failed)
                note_done(part.arrived_to, [line for one in sent for line in one.done])
            self._names.renew(failed, max(parts[-1].job.tick, sent_to))
            return PartsSent(failed[0].reason, all(one.is_slow for one in failed))
        for part in parts:
            resumed = target if part.is_resumed else None
            refused = refused_of(sent, part.release)
            if not self._records.write_refused(refused, writers[part.release], part.job.tick, resumed):
                return PartsSent("stopped")
        rows = concat([unpack(one.deliveries) for one in sent], DELIVERIES)
        messages = rows.num_rows
        if ticks := [part.job.tick for part in parts if part.is_resumed]:
            rows = self._records.missing("deliveries", rows, ticks, *target_conditions(target))
        if rows.num_rows:
            self._tables.append("deliveries", rows, {writers[part.release]: part.job.tick for part in parts})
            self._on_deliveries(rows)
        return PartsSent(messages=messages)
