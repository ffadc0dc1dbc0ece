"""Collects the running job's figures, and writes them as its status."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from conf.errors import one_line
from conf.settings import is_object_storage
from status.alerts import NOT_SENT
from status.dead_letters import count_dead_letters, destinations_of
from status.job_status import JobStatus, Lateness, Point, known_status, write_status
from tracker.messages import attempts_of, where

if TYPE_CHECKING:
    from status.alerts import Alert
    from status.batch_status import BatchStatus

_STEP_MILLIS = 500  # smaller steps do not count; NTP slews a clock by half a millisecond a second

_READ_SECONDS = 0.05  # the most time between the readings of two clocks that are compared


class ClockSteps:
    """Compares the machine's clock with one that never jumps.

    Args:
        wall: returns ms since the epoch.
        monotonic: returns seconds.
    """

    def __init__(
        self,
        wall: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._last: float | None = None

    def look(self) -> int:
        """Returns the step since the last look, ms: negative where the clock was set back; 0: it was not set.

        After a machine has slept, its clock may count as set ahead.
        """
        before = self._monotonic()
        now = self._wall()
        after = self._monotonic()
        if after - before > _READ_SECONDS:
            return 0
        difference = now - after * 1000
        step = 0 if self._last is None else round(difference - self._last)
        self._last = difference
        return step if abs(step) >= _STEP_MILLIS else 0


_log = logging.getLogger(__name__)

_WRITE_SECONDS = 1.0

_WRITE_OBJECT_SECONDS = 3.0  # requests to object storage cost money

_POINT_SECONDS = 5.0

_POINTS = 180  # a quarter of an hour

# The counts of a batch that are added up over all batches.
_SUMMED_UP = ("taken", "rejected", "left_out", "sealed", "commands", "shaped", "misfires", "expired")


class StatusWriter:
    """Collects the job's figures, and writes them as its status every second (3 s to object storage). Thread-safe.

    A context manager, whose end writes the state `stopped` or `failed`. A failed write is logged, and does not stop the
    job.

    Args:
        warehouse: folder or URI of the tables.
        max_in_flight: with more messages in flight the job is held up: source topics are not read.
        alerts: returns the current alerts.
        steps: measures steps of the machine's clock; None: one that reads the real clocks.
    """

    def __init__(
        self,
        warehouse: str,
        max_in_flight: int,
        alerts: Callable[[], list[Alert]] = lambda: [],
        steps: ClockSteps | None = None,
    ) -> None:
        self._warehouse = warehouse
        self._max_in_flight = max_in_flight
        self._alerts = alerts
        self._steps = steps or ClockSteps()
        self._logged_alerts: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {
            "started_at": _now(),
            "host": socket.gethostname(),
            "process_id": os.getpid(),
        }
        self._destinations: dict[tuple[str, str], str] = {}
        # Only the status tells a rebuild of missing routes, so a start that is refused must not lose them.
        if (last := known_status(warehouse)) is not None:
            self.routes(last.routes)
        of_deliveries = ("delivered", "retried", "dead_letters", "occurrences")
        self._totals = dict.fromkeys(("batches", "batch_millis_sum", "clock_steps", *of_deliveries, *_SUMMED_UP), 0)
        self._lateness = {"planned": Lateness(), "short_notice": Lateness()}
        self._history: deque[Point] = deque(maxlen=_POINTS)
        self._most_per_second = 0.0
        self._point_began = time.monotonic()
        self._point = (0, 0)
        self._point_late: list[np.ndarray] = []
        self._state, self._reason = "starting", ""
        self._stopped = threading.Event()
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="job status", daemon=True)

    def __enter__(self) -> StatusWriter:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        with self._lock:
            self._state = "stopped" if error is None else "failed"
            self._reason = "" if error is None else one_line(error)[:500]
        self._stopped.set()
        self._thread.join(timeout=5)
        self._write()

    def routes(self, routes: dict[str, Any]) -> None:
        """Sets the known routes, as `KnownRoutes.to_json` gives them."""
        with self._lock:
            self._values["routes"] = routes
            self._destinations = destinations_of(routes)

    def runs_on_cluster(self) -> None:
        """Says that Spark's executors run on other machines."""
        with self._lock:
            self._values["is_on_cluster"] = True

    def batch(self, status: BatchStatus) -> None:
        """Adds the figures of a batch that has ended."""
        counts = status.counts
        with self._lock:
            self._state = "running"
            self._values |= {
                "last_batch_at": _now(),
                "pending": counts["delayed"],
                "in_state": counts["loaded"],
                "in_flight": counts["in_flight"],
                "is_held_up": counts["in_flight"] > self._max_in_flight,
                "waiting_commands": counts["waiting_commands"],
                "schedule_keys": counts["schedule_keys"],
                "cold_schedule_keys": counts["cold_schedule_keys"],
                "lookahead_millis": status.lookahead_millis,
                "batch_millis_last": counts["sink_millis"],
                "operator_millis_last": counts["operator_millis"],
                "sending": status.sending,
                "state_memory_bytes": status.state_memory_bytes,
                "shaped_until": status.shaped_until,
                "paused": status.paused,
                "resuming": status.resuming,
                "outcome_producer": status.outcome_producer,
            }
            self._totals["batches"] += 1
            self._totals["batch_millis_sum"] += counts["sink_millis"]
            for name in _SUMMED_UP:
                self._totals[name] += counts.get(name, 0)

    def deliveries(self, rows: pa.Table) -> None:
        """Adds delivered messages: rows of the table `deliveries`."""
        late = rows["sent_at"].to_numpy() - rows["deliver_at"].to_numpy()
        is_short = np.asarray(rows["short_notice"].to_numpy(zero_copy_only=False), dtype=np.bool_)
        with self._lock:
            self._totals["delivered"] += rows.num_rows
            self._totals["occurrences"] += rows.num_rows - rows["occurrence"].null_count
            retries = where(rows, attempts_of(rows) > 0)
            if retries.num_rows:
                self._totals["retried"] += retries.num_rows
                self._totals["dead_letters"] += count_dead_letters(retries, self._destinations)
            for name, values in (("planned", late[~is_short]), ("short_notice", late[is_short])):
                self._lateness[name] = self._lateness[name].with_values(values)
            self._point_late.append(late[~is_short])

    def status(self) -> JobStatus:
        """Returns the job's status now."""
        with self._lock:
            if time.monotonic() - self._point_began >= _POINT_SECONDS:
                self._end_point()
            alerts = self._alerts()
            figures: dict[str, Any] = {**self._values, **self._totals, **self._lateness}
            figures["rejected"] += sum(alert.count for alert in alerts if alert.kind == NOT_SENT)
            return JobStatus(
                state=self._state,
                reason=self._reason,
                updated_at=_now(),
                most_per_second=self._most_per_second,
                history=list(self._history),
                troubles=alerts,
                **figures,
            )

    def _end_point(self) -> None:
        seconds = time.monotonic() - self._point_began
        totals = self._totals["taken"], self._totals["delivered"]
        late = np.concatenate(self._point_late) if self._point_late else np.zeros(0)
        p50, p99 = (round(float(p), 1) for p in np.percentile(late, [50, 99])) if len(late) else (None, None)
        rates = [round((now - before) / seconds, 1) for now, before in zip(totals, self._point, strict=True)]
        self._history.append(Point(_now(), rates[0], rates[1], p50, p99))
        self._most_per_second = max(self._most_per_second, rates[1])
        self._point_began, self._point, self._point_late = time.monotonic(), totals, []

    def _run(self) -> None:
        seconds = _WRITE_OBJECT_SECONDS if is_object_storage(self._warehouse) else _WRITE_SECONDS
        while not self._stopped.wait(seconds):
            self.look_at_clock()
            self._write()

    def look_at_clock(self) -> None:
        """Logs and counts a step of the machine's clock since the last look."""
        if step := self._steps.look():
            way = (
                f"ahead by {step / 1000:,.1f} s, or the machine slept" if step > 0 else f"back by {-step / 1000:,.1f} s"
            )
            _log.warning("the machine's clock was set %s", way)
            with self._lock:
                self._totals["clock_steps"] += 1

    def _log_alerts(self, alerts: list[Alert]) -> None:
        """Logs each alert when it begins, and when it is over."""
        current = {(alert.kind, alert.name): alert for alert in alerts}
        for key, alert in current.items():
            if key not in self._logged_alerts:
                _log.warning("%s: %s: %s", alert.kind.replace("_", " "), alert.name, alert.text)
        for kind, name in self._logged_alerts - current.keys():
            _log.info("over: %s: %s", kind.replace("_", " "), name)
        self._logged_alerts = set(current)

    def _write(self) -> None:
        status = self.status()
        self._log_alerts(status.troubles)
        try:
            write_status(self._warehouse, status)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                _log.warning("the job's status can't be written: %s", error)
            self._is_failing = True


def _now() -> int:
    return time.time_ns() // 1_000_000
