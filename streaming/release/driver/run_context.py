"""What the parts of the driver's side share in a run: states and their lock, how tasks run, threads, and each batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streaming.release.driver.releases import Releases
from streaming.release.driver.spacing import Spacing
from streaming.release.driver.spark_jobs import SparkJobs
from streaming.release.driver.unwritable_destinations import UnwritableDestinations
from streaming.release.naming import Recipient
from streaming.release.producer_names import ProducerNames

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStates:
    """The states of a run. They are read and changed with the lock held.

    Attributes:
        releases: where each is.
        destinations: those that are unwritable or slow.
        lock: guards both, and is notified when a release has ended or is written.
        stopped: set when the job stops: nothing more is sent, and threads end.
    """

    releases: Releases
    destinations: UnwritableDestinations
    lock: threading.Condition = field(default_factory=lambda: threading.Condition())
    stopped: threading.Event = field(default_factory=lambda: threading.Event())


@dataclass(frozen=True)
class Sending:
    """How a run sends.

    Attributes:
        spark_jobs: runs the tasks.
        names: gives producers other names, where somebody else has published under theirs.
        spacing: says how much later than planned messages are sent.
    """

    spark_jobs: SparkJobs
    names: ProducerNames
    spacing: Spacing


@dataclass(frozen=True, kw_only=True)
class DispatchedBatch:
    """What a batch's shards have dispatched, all together, and what else they say of their state.

    Attributes:
        tick: of the batch.
        now: the time from which the batch looked ahead, ms since the epoch.
        cutoff: of the batch, ms since the epoch.
        next_due: no message that is in state after the batch is due before this time, ms since the epoch.
        bodies: (shard, tick, kind, packed rows); the first batch of a run has releases of earlier ticks, too. A large
            release comes in several parts, in order.
        unwritable: `Offset.unwritable` of the batch's offset.
        waiting: messages that wait for places, as `Feedback.waiting` has them by source topic and subscription.
        drained: the slow recipients to which the batch dispatches messages that were parked: how many, and whether
            others wait.
        resuming: resumed subscriptions, as `Feedback.resuming` has them by source topic and subscription.
        large_bytes: bytes of large payloads in the state's time slots after the batch.
    """

    tick: int
    now: int
    cutoff: int
    next_due: int
    bodies: Iterable[tuple[int, int, int, bytes]] = ()
    unwritable: Mapping[str, Any] = field(default_factory=dict)
    waiting: dict[str, dict[str, list[list[int]]]] = field(default_factory=dict)
    drained: Mapping[Recipient, tuple[int, bool]] = field(default_factory=dict)
    resuming: dict[str, dict[str, int]] = field(default_factory=dict)
    large_bytes: int = 0


class RunThreads:
    """Starts threads. An exception in one becomes `failure`."""

    def __init__(self) -> None:
        self.failure: str | None = None  # the error that has ended a thread

    def start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Starts a thread, which ends with the process."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # also a panic of a library in Rust, which is no Exception
                _log.exception("%s", name)
                self.failure = f"{name}: {type(error).__name__}: {error}"

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread
