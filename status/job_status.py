"""The job's status: a small file in the warehouse, which the running job writes every second or so.

Readers check its age, too: a job that was killed, or hangs, writes it no more.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from conf.errors import UnreadableWarehouseError
from conf.files import replace_file
from conf.settings import is_object_storage, local_path
from status.alerts import Alert

if TYPE_CHECKING:
    from pyarrow.fs import PyFileSystem

FILE = "_job_status.json"
STALE_MILLIS = 10_000  # an older status means that the job does not run, or hangs
_BATCH_MILLIS = 3 * STALE_MILLIS  # a job that finishes no batch for longer hangs
_REST_MILLIS = 60_000  # how much longer a batch may take while no message is in state or in flight

# Upper bounds of the lateness histogram's buckets, ms; the last bucket has no bound.
LATENESS_MILLIS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000)


@dataclass(frozen=True)
class Point:
    """Rates and lateness in the few seconds before `at`, ms since the epoch.

    The percentiles are of the lateness of planned messages, ms; None: no planned message was sent.
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
        counts: the number of messages in each bucket: for each bound of LATENESS_MILLIS those that were at most this
            late, and later than the bound before; then those beyond all bounds.
        sum_millis: the sum of the lateness of all messages, ms.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENESS_MILLIS) + 1))
    sum_millis: int = 0

    def with_values(self, millis: np.ndarray) -> Lateness:
        """Returns a histogram with more messages, too.

        Args:
            millis: how late each of these messages was, ms, int64, shape (messages,).
        """
        places = np.searchsorted(LATENESS_MILLIS, millis)
        counts = np.bincount(places, minlength=len(self.counts)) + np.array(self.counts)
        return Lateness(counts.tolist(), self.sum_millis + int(millis.sum()))


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The job's figures at one time. Times are ms since the epoch; totals are since the job started."""

    state: str  # starting, running, stopped or failed
    updated_at: int
    started_at: int
    last_batch_at: int = 0  # 0: none yet
    reason: str = ""  # why it failed
    host: str = ""
    process_id: int = 0
    is_on_cluster: bool = False  # executors on other machines send its messages; they may live on without it
    pending: int = 0  # messages that wait, in state or in the delayed index
    in_state: int = 0
    in_flight: int = 0  # messages handed to the senders and not recorded yet
    is_held_up: bool = False  # the senders are behind, so source topics are not read
    waiting_commands: int = 0  # commands for messages that have not come
    schedule_keys: int = 0  # schedule keys with a message that waits, or waited a while ago
    cold_schedule_keys: int = 0  # the cold ones among them
    lookahead_millis: int = 0
    state_memory_bytes: int = 0  # memory that Spark's state store takes, of all shards
    batches: int = 0
    batch_millis_sum: int = 0
    batch_millis_last: int = 0
    operator_millis_last: int = 0  # the part of the last batch in the stateful operator, all shards together
    sending: int = 0  # releases that are being sent, in lanes
    taken: int = 0
    delivered: int = 0
    retried: int = 0  # the retries among the delivered messages
    dead_letters: int = 0  # the dead letters among these retries
    occurrences: int = 0  # the occurrences of recurring messages among the delivered messages
    misfires: int = 0  # how often a schedule has left out missed occurrences, counted for each subscription
    expired: int = 0  # messages that could not be sent by their end, counted for each subscription
    rejected: int = 0
    left_out: int = 0  # messages that were replicated from another cluster
    sealed: int = 0
    commands: int = 0
    outcome_producer: str = ""  # the name under which the job publishes outcomes; empty: an earlier version's job
    shaped: int = 0  # messages that got a later time, because of their subscription's rate or windows
    # The latest time that a shaped message has got, ms since the epoch, by source topic and subscription.
    shaped_until: dict[str, dict[str, int]] = field(default_factory=dict)
    paused: dict[str, list[str]] = field(default_factory=dict)  # the paused subscriptions, by source topic
    # By source topic and resumed subscription: about how many messages are parked yet, and the bytes of their payloads.
    resuming: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    clock_steps: int = 0  # how often the machine's clock was set
    planned: Lateness = field(default_factory=Lateness)
    short_notice: Lateness = field(default_factory=Lateness)
    most_per_second: float = 0.0  # the highest `delivered_per_second` of all points
    history: list[Point] = field(default_factory=list)
    troubles: list[Alert] = field(default_factory=list)
    routes: dict[str, Any] = field(default_factory=dict)  # the known routes, as `KnownRoutes.to_json` gives them

    def queues(self, topic: str, subscription: str, now: int) -> list[tuple[str, int]]:
        """Returns a topic's subscriptions with shaped messages that wait.

        Args:
            topic: the source topic.
            subscription: the only subscription to look at; empty: all.
            now: ms since the epoch.

        Returns:
            (subscription, time of its last shaped message, ms since the epoch).
        """
        return sorted(
            (name, until)
            for name, until in self.shaped_until.get(topic, {}).items()
            if until > now and subscription in ("", name)
        )

    def trouble(self, now: int) -> str | None:
        """Returns why the job does not work, one line; None: it works. `now` is in ms since the epoch."""
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


_STATUS = TypeAdapter(JobStatus)


def read_status(warehouse: str) -> JobStatus | None:
    """Reads the last status of a warehouse's job; None: there is none, because no job has run yet.

    Raises:
        UnreadableWarehouseError: the status exists and can't be read.
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
    """Does the same as `read_status`, but returns None where the status can't be read."""
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


def write_status(warehouse: str, status: JobStatus) -> None:
    """Replaces the status file of a warehouse: a reader sees the old content or the new one, whole.

    Raises:
        OSError: the file can't be written.
    """
    content = json.dumps(status, default=vars).encode()  # `asdict` would copy the whole history, each second
    if is_object_storage(warehouse):
        # With a buffer, because delta-rs does not accept Arrow's unbuffered writes.
        with _object_storage(warehouse).open_output_stream(FILE, buffer_size=len(content) + 1) as stream:
            stream.write(content)
        return
    file = Path(local_path(warehouse)) / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, content)


@functools.lru_cache
def _object_storage(warehouse: str) -> PyFileSystem:
    """Opens a warehouse in object storage with delta-rs; its environment variables have endpoint and credentials.

    Raises:
        OSError: the warehouse can't be opened.
    """
    from deltalake.exceptions import DeltaError
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import PyFileSystem

    try:
        return PyFileSystem(DeltaStorageHandler(warehouse))
    except DeltaError as error:
        raise OSError(str(error)) from error
