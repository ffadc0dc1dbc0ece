"""The running job's status: a small file in the warehouse, written every second or so.

A reader goes by its age, too: a job that was killed, or hangs, does not write it any more.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from conf.errors import UnreadableWarehouseError, one_line
from conf.files import replace_file
from conf.settings import is_object_storage, local_path
from status.clock_steps import ClockSteps
from status.dead_letters import count_dead_letters, destinations_of
from status.troubles import Trouble
from tracker.messages import attempts_of, where

if TYPE_CHECKING:
    from pyarrow.fs import PyFileSystem

    from status.batch_status import BatchStatus

_log = logging.getLogger(__name__)

FILE = "_job_status.json"
STALE_MILLIS = 10_000  # a status older than this says that the job does not run, or hangs
_BATCH_MILLIS = 3 * STALE_MILLIS  # a job that finishes no batch for longer hangs
_REST_MILLIS = 60_000  # how much longer a batch may take where nothing is in state

# Upper bounds of the histogram of lateness, ms; one more for what is beyond.
LATENESS_MILLIS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000)

_WRITE_SECONDS = 1.0
_WRITE_OBJECT_SECONDS = 3.0  # requests to object storage cost money
_POINT_SECONDS = 5.0
_POINTS = 180  # a quarter of an hour


@dataclass(frozen=True)
class Point:
    """Rates and lateness in the few seconds before `at`, ms since the epoch.

    The percentiles are of how late planned messages were sent, ms; None: there were none.
    """

    at: int
    taken_per_second: float
    delivered_per_second: float
    late_millis_p50: float | None
    late_millis_p99: float | None


@dataclass(frozen=True)
class Lateness:
    """A histogram of how late messages were sent.

    Attributes:
        counts: for each bound of LATENESS_MILLIS the messages that were at most this late, and later than the bound
            before; at last those beyond all bounds.
        sum_millis: of all messages' lateness.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENESS_MILLIS) + 1))
    sum_millis: int = 0

    def with_values(self, millis: np.ndarray) -> Lateness:
        """Returns a histogram with further messages, too: how late each was, ms, (messages,)."""
        places = np.searchsorted(LATENESS_MILLIS, millis)
        counts = np.bincount(places, minlength=len(self.counts)) + np.array(self.counts)
        return Lateness(counts.tolist(), self.sum_millis + int(millis.sum()))


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """A job at one time. Times are ms since the epoch; totals are since it started."""

    state: str  # starting, running, stopped or failed
    updated_at: int
    started_at: int
    last_batch_at: int = 0  # 0: none yet
    reason: str = ""  # why it failed
    host: str = ""
    process_id: int = 0
    pending: int = 0  # messages that wait, in state or in the delayed index
    in_state: int = 0
    in_flight: int = 0  # handed to the senders, not written down yet
    is_held_up: bool = False  # the senders are behind, and the source topics not read
    waiting_commands: int = 0  # for messages that have not come
    schedule_keys: int = 0  # of which a message waits, or waited a while ago
    cold_schedule_keys: int = 0  # of these those of which the state has little: nothing has named them for a while
    lookahead_millis: int = 0
    batches: int = 0
    batch_millis_sum: int = 0
    batch_millis_last: int = 0
    operator_millis_last: int = 0  # how much of that was spent in the stateful operator, all shards together
    sending: int = 0  # releases that are being sent, in lanes
    taken: int = 0
    delivered: int = 0
    retried: int = 0  # of the delivered those that were retries
    dead_letters: int = 0  # of these the ones that went to topics of dead letters
    occurrences: int = 0  # of the delivered those of recurring messages
    misfires: int = 0  # how often a schedule left out what was missed, for each subscription
    rejected: int = 0
    left_out: int = 0  # messages that were replicated from another cluster
    sealed: int = 0
    commands: int = 0
    shaped: int = 0  # messages that got a later time, because of their subscription's rate or windows
    # By source topic and subscription the last time that such a message has got, ms since the epoch.
    shaped_until: dict[str, dict[str, int]] = field(default_factory=dict)
    paused: dict[str, list[str]] = field(default_factory=dict)  # by source topic the subscriptions that are paused
    clock_steps: int = 0  # how often the machine's clock was set
    planned: Lateness = field(default_factory=Lateness)
    short_notice: Lateness = field(default_factory=Lateness)
    most_per_second: float = 0.0  # the most messages delivered a second, over some seconds
    history: list[Point] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)  # what somebody has to look at; the job goes on meanwhile
    routes: dict[str, Any] = field(default_factory=dict)  # the known routes, as `KnownRoutes.to_json` gives them

    def queues(self, topic: str, subscription: str, now: int) -> list[tuple[str, int]]:
        """Returns a topic's subscriptions whose rate or windows have put messages off, and when the last one goes, ms.

        Args:
            topic: a source topic.
            subscription: the only one that is asked for; empty: all.
            now: ms since the epoch.
        """
        return sorted(
            (name, until)
            for name, until in self.shaped_until.get(topic, {}).items()
            if until > now and subscription in ("", name)
        )

    def trouble(self, now: int) -> str | None:
        """Returns why the job does no work, one line; None: it does. `now`: ms since the epoch."""
        if self.state == "failed":
            return f"the job has failed: {self.reason}"
        if self.state == "stopped":
            return "the job has been stopped"
        if now - self.updated_at > STALE_MILLIS:
            return f"no sign of life of the job for {(now - self.updated_at) // 1000:,} s"
        most = _BATCH_MILLIS if self.in_state or self.in_flight else _BATCH_MILLIS + _REST_MILLIS
        if self.state == "running" and now - self.last_batch_at > most:
            return f"the job has finished no batch for {(now - self.last_batch_at) // 1000:,} s"
        return None


# Counts of a batch that are summed up.
_SUMMED_UP = ("taken", "rejected", "left_out", "sealed", "commands", "shaped", "misfires")

_STATUS = TypeAdapter(JobStatus)


def read_status(warehouse: str) -> JobStatus | None:
    """Reads the status that the job of a warehouse wrote last; None: there is none, as no job has run yet.

    Raises:
        UnreadableWarehouseError: it is there and can't be read.
    """
    try:
        return _STATUS.validate_json(_read(warehouse))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise UnreadableWarehouseError(warehouse, f"{FILE} is damaged") from error
    except OSError as error:
        raise UnreadableWarehouseError(warehouse, error) from error


def known_status(warehouse: str) -> JobStatus | None:
    """As `read_status`, for those who go on without: None also where it can't be read."""
    try:
        return read_status(warehouse)
    except UnreadableWarehouseError:
        return None


def _read(warehouse: str) -> bytes:
    if not is_object_storage(warehouse):
        return (Path(local_path(warehouse)) / FILE).read_bytes()
    with _object_storage(warehouse).open_input_stream(FILE) as stream:
        content: bytes = stream.read()
        return content


def _write(warehouse: str, content: bytes) -> None:
    """Replaces the status file: a reader sees the old content or the new one, whole."""
    if is_object_storage(warehouse):
        # Through a buffer: without one delta-rs does not take what Arrow hands over.
        with _object_storage(warehouse).open_output_stream(FILE, buffer_size=len(content) + 1) as stream:
            stream.write(content)
        return
    file = Path(local_path(warehouse)) / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, content)


@functools.lru_cache
def _object_storage(warehouse: str) -> PyFileSystem:
    """Opens a warehouse in object storage with delta-rs, whose environment variables have the endpoint and credentials.

    Raises:
        OSError: it can't be opened.
    """
    from deltalake.exceptions import DeltaError
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import PyFileSystem

    try:
        return PyFileSystem(DeltaStorageHandler(warehouse))
    except DeltaError as error:
        raise OSError(str(error)) from error


class StatusWriter:
    """Collects the job's figures, and writes them as its status every second (3 s to object storage).

    A context manager, whose end writes the state `stopped` or `failed`. Safe in several threads. A status that can't be
    written is logged, and never stops the job.

    Args:
        warehouse: a folder or URI.
        max_in_flight: with more messages than this in flight the job is held up: the source topics are not read.
        troubles: returns the current troubles.
        steps: notices that the machine's clock was set; None: one for the real clocks.
    """

    def __init__(
        self,
        warehouse: str,
        max_in_flight: int,
        troubles: Callable[[], list[Trouble]] = lambda: [],
        steps: ClockSteps | None = None,
    ) -> None:
        self._warehouse = warehouse
        self._max_in_flight = max_in_flight
        self._troubles = troubles
        self._steps = steps or ClockSteps()
        self._logged_troubles: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._values: dict[str, object] = {
            "started_at": _now(),
            "host": socket.gethostname(),
            "process_id": os.getpid(),
        }
        self._destinations: dict[tuple[str, str], str] = {}
        # A rebuild knows of missing routes by these alone: a start that is refused must not lose them.
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
                "shaped_until": status.shaped_until,
                "paused": status.paused,
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
            return _STATUS.validate_python(
                {
                    "state": self._state,
                    "reason": self._reason,
                    "updated_at": _now(),
                    **self._values,
                    **self._totals,
                    **self._lateness,
                    "most_per_second": self._most_per_second,
                    "history": list(self._history),
                    "troubles": [asdict(trouble) for trouble in self._troubles()],
                }
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

    def _log_troubles(self, troubles: list[Trouble]) -> None:
        """Logs each trouble when it begins, and when it is over."""
        current = {(trouble.kind, trouble.name): trouble for trouble in troubles}
        for key, trouble in current.items():
            if key not in self._logged_troubles:
                _log.warning("%s: %s: %s", trouble.kind.replace("_", " "), trouble.name, trouble.text)
        for kind, name in self._logged_troubles - current.keys():
            _log.info("over: %s: %s", kind.replace("_", " "), name)
        self._logged_troubles = set(current)

    def _write(self) -> None:
        status = self.status()
        self._log_troubles(status.troubles)
        try:
            _write(self._warehouse, json.dumps(asdict(status)).encode())
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                _log.warning("the job's status can't be written: %s", error)
            self._is_failing = True


def _now() -> int:
    return time.time_ns() // 1_000_000
