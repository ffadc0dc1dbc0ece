"""Sends the remainders of a destination again, all of them together."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pyarrow as pa

from streaming.release.attempt import MOST_CONNECTIONS, Attempt, merged, note_arrived, note_done
from streaming.release.driver.lane_release import Remainder, RemainderResult
from streaming.release.driver.release_attempts import refused_of
from streaming.release.driver.release_records import ReleaseRecords, recipient_conditions
from streaming.release.driver.run_context import Sending
from streaming.release.naming import Recipient
from tracker.messages import concat
from tracker.packing import unpack
from warehouse.delivery_key import Key
from warehouse.delta.tables import Tables
from warehouse.schemas import DELIVERIES

# How long a task waits for a broker that does not answer. One that throttles a topic answers nothing for long, after a
# producer batch of many. A destination that answers, and has not taken all half as long after, is slow.
_PATIENCE_SECONDS = 10.0
_SLOW_PATIENCE_SECONDS = 40.0


class RemainderSender:
    """Sends remainders, and writes their deliveries. Thread-safe, with one thread for each destination.

    Args:
        sending: how tasks run.
        tables: of the warehouse.
        records: writes the rows of releases to these tables.
        on_deliveries: called with the rows that were written to `deliveries`.
        stopped: when set, nothing more is sent.
    """

    def __init__(
        self,
        sending: Sending,
        tables: Tables,
        records: ReleaseRecords,
        on_deliveries: Callable[[pa.Table], None],
        stopped: threading.Event,
    ) -> None:
        self._spark_jobs, self._names, self._spacing = sending.spark_jobs, sending.names, sending.spacing
        self._tables = tables
        self._records = records
        self._on_deliveries = on_deliveries
        self._stopped = stopped
        self._recorded: dict[Recipient, tuple[tuple[int, ...], frozenset[Key]]] = {}  # with the ticks, of resumed ones
        self._slow_ones = threading.Semaphore(MOST_CONNECTIONS)

    def send(self, remainders: list[Remainder], is_slow: bool) -> RemainderResult:
        """Sends remainders of one destination, in one task, and writes their deliveries when all have arrived.

        Args:
            remainders: of one recipient, the oldest first.
            is_slow: whether the destination is slow. Only some are sent to at a time, so that tasks for others run.
        """
        with self._slow_ones if is_slow else contextlib.nullcontext():
            return self._send(remainders, is_slow)

    def _send(self, remainders: list[Remainder], is_slow: bool) -> RemainderResult:
        self._spark_jobs.use_pool()
        [recipient] = {remainder.recipient for remainder in remainders}
        writers = {
            remainder.release_id: self._records.writer(remainder.release.lane, recipient) for remainder in remainders
        }
        written = {writer: self._records.last_tick(writer) for writer in set(writers.values())}
        remainders = [
            remainder for remainder in remainders if remainder.release.tick > written[writers[remainder.release_id]]
        ]
        if not remainders:
            return RemainderResult()
        if self._stopped.is_set():
            return RemainderResult("stopped")
        checked_at = self._spark_jobs.check_epoch()
        sent_to = max(remainder.release.sent_to for remainder in remainders)
        resumed_ticks = tuple(remainder.release.tick for remainder in remainders if remainder.is_resumed)
        recorded = self._recorded_of(recipient, resumed_ticks)
        now = time.time_ns() // 1_000_000
        # Each release on its own: one may be hours late, beside others that were just dispatched.
        put_off = {one.release_id: self._spacing.put_off(one.release.shaped, now) for one in remainders}
        attempt = Attempt(
            only=frozenset({recipient}),
            done=frozenset().union(*(remainder.done for remainder in remainders)),
            arrived_to=merged(remainder.arrived_to for remainder in remainders),
            recorded=recorded,
            generations=self._names.generations,
            sent_to=sent_to,
            put_off=put_off,
            pace_file=self._spacing.pace_file,
            apart=frozenset({recipient}),
            patience_seconds=_SLOW_PATIENCE_SECONDS if is_slow else _PATIENCE_SECONDS,
            most_seconds=1.5 * (_SLOW_PATIENCE_SECONDS if is_slow else _PATIENCE_SECONDS),
        )
        try:
            sent = self._spark_jobs.run(
                [one for remainder in remainders for one in remainder.release.assignments], 1, attempt, checked_at
            )
        finally:
            for one in remainders:  # each attempt would else come after the one that has failed
                self._spacing.forget(one.release.shaped, put_off[one.release_id])
        failed = [one for s in sent for one in s.failed]
        if failed:
            for remainder in remainders:
                note_arrived(remainder.arrived_to, failed)
                note_done(remainder.arrived_to, [line for one in sent for line in one.done])
            self._names.renew(failed, max(remainders[-1].release.tick, sent_to))
            return RemainderResult(failed[0].reason, all(one.is_slow for one in failed))
        for remainder in remainders:
            resumed = recipient if remainder.is_resumed else None
            refused = refused_of(sent, remainder.release_id)
            if not self._records.write_refused(refused, writers[remainder.release_id], remainder.release.tick, resumed):
                return RemainderResult("stopped")
        self._recorded.pop(recipient, None)
        rows = concat([unpack(one.deliveries) for one in sent], DELIVERIES)
        messages = rows.num_rows
        if resumed_ticks:
            rows = self._records.missing("deliveries", rows, resumed_ticks, *recipient_conditions(recipient))
        if rows.num_rows:
            self._tables.append(
                "deliveries", rows, {writers[remainder.release_id]: remainder.release.tick for remainder in remainders}
            )
            self._on_deliveries(rows)
        return RemainderResult(messages=messages)

    def _recorded_of(self, recipient: Recipient, ticks: tuple[int, ...]) -> frozenset[Key]:
        """Returns what an earlier run has written of resumed remainders to `deliveries`; looked up once for them."""
        if not ticks or not recipient[1]:  # `deliveries` has nothing of rejects topics
            return frozenset()
        if self._recorded.get(recipient, ((), None))[0] != ticks:
            self._recorded[recipient] = ticks, self._records.recorded(ticks, recipient)
        return self._recorded[recipient][1]
