"""Keeps the open parts of releases for unwritable destinations, and tries these destinations again."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from status.troubles import UNWRITABLE, Troubles
from streaming.release.naming import Target
from tracker.dead_letter_targets import without_dead_letters

if TYPE_CHECKING:
    from streaming.release.driver.job import Job

_log = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 1.0  # until the first new attempt
_POLL_SECONDS = 0.1
_ROWS_AT_ONCE = 20_000  # the most rows of releases that are sent together, because one task has them all in memory

Release = tuple[int, int]  # tick, kind


@dataclass(frozen=True)
class OpenPart:
    """An open part: the messages of a release for one target that have not arrived."""

    job: Job
    target: Target
    done: frozenset[tuple[int, str, str]] = frozenset()  # messages that have arrived before, as `SendReport.done`
    # `FailedProducer.arrived_to` of producers with messages that have not arrived, by topic and producer's name.
    arrived_to: dict[tuple[str, str], int] = field(default_factory=dict)
    is_resumed: bool = False  # of an earlier run: some messages may have arrived, and be written down

    @property
    def release(self) -> Release:
        """The release (tick, kind) of the part."""
        return self.job.release


@dataclass
class _Stuck:
    """An unwritable destination of a target."""

    since: int  # ms since the epoch
    reason: str  # why it can't be written
    destination: str
    parts: dict[Release, OpenPart] = field(default_factory=dict)
    rejects: str = ""  # the reason with which due messages are rejected; empty: they wait
    delay: float = _FIRST_DELAY_SECONDS  # until the next attempt, seconds


class UnwritableDestinations:
    """The unwritable destinations, and the open parts of releases for them. Thread-safe.

    A thread for each target tries its destination again, at longer and longer intervals. It sends the open parts
    together, ordered by when messages are due. The destination is writable again when all open parts have arrived, or,
    without open parts, when it accepts a producer. Until then no more messages are handed out for the target, so that
    it gets all in order.

    Args:
        destinations: the topic of each target.
        retry_max_seconds: the longest time between two attempts.
        wait_written: waits until the release of a part, and older ones of its lane, are written but for open parts.
        send: sends parts of one target again, together, the oldest first, and writes their deliveries when all have
            arrived. Returns why some have not; an empty text: all have.
        probe: tries whether a topic accepts a producer. Returns why it does not; an empty text: it does.
        is_on_its_way: whether a lane may still have messages for a target that were handed out before it was held back.
        on_change: called when `recorded` has changed.
        troubles: records each unwritable destination.
        stopped: set when the job stops; then the threads end.
        reject_after_millis: due messages of a subscription are rejected when its destination has been unwritable for so
            long; None: they wait. Rejects and dead letters always wait for their topic.
        gone: targets that the settings no longer have; they are forgotten when they have no open parts.
    """

    def __init__(
        self,
        destinations: Mapping[Target, str],
        retry_max_seconds: float,
        *,
        wait_written: Callable[[OpenPart], None],
        send: Callable[[list[OpenPart]], str],
        probe: Callable[[str], str],
        is_on_its_way: Callable[[Target], bool],
        on_change: Callable[[], None],
        troubles: Troubles,
        stopped: threading.Event,
        reject_after_millis: int | None = None,
        gone: Collection[Target] = frozenset(),
    ) -> None:
        self._destinations = destinations
        self._retry_max_seconds = retry_max_seconds
        self._wait_written = wait_written
        self._send = send
        self._probe = probe
        self._is_on_its_way = is_on_its_way
        self._on_change = on_change
        self._troubles = troubles
        self._stopped = stopped
        self._reject_after_millis = reject_after_millis
        self._gone = gone
        self._lock = threading.RLock()
        self._stuck: dict[Target, _Stuck] = {}

    @property
    def targets(self) -> frozenset[Target]:
        """The targets whose destinations can't be written."""
        with self._lock:
            return frozenset(self._stuck)

    @property
    def recorded(self) -> dict[str, Any]:
        """The unwritable targets and their open parts, as `Feedback.unwritable` has them."""
        with self._lock:
            found: dict[str, dict[str, Any]] = {}
            for (source, subscription), stuck in sorted(self._stuck.items()):
                open_releases = sorted([tick, kind] for tick, kind in stuck.parts)
                one: dict[str, Any] = {"since": stuck.since, "open": open_releases}
                found.setdefault(source, {})[subscription] = one | ({"rejects": stuck.rejects} if stuck.rejects else {})
            return found

    def begin(self, recorded: Mapping[str, Any], jobs: Mapping[Release, Job]) -> None:
        """Takes over the unwritable targets of the run before.

        Args:
            recorded: `Offset.unwritable` of its last offset.
            jobs: the releases that are handed out again; open parts of other releases are dropped.
        """
        for source, of_source in recorded.items():
            for subscription, stuck in of_source.items():
                target = (source, subscription)
                open_releases = [(tick, kind) for tick, kind in stuck["open"]]
                parts = [
                    OpenPart(jobs[release], target, is_resumed=True) for release in open_releases if release in jobs
                ]
                rejects = stuck.get("rejects", "") if self._reject_after_millis is not None else ""
                self.add(target, "so it was before the start", parts, stuck["since"], rejects)

    def forget_rejected(self, recorded: Mapping[str, Any]) -> None:
        """Forgets open parts whose messages the shards reject.

        Args:
            recorded: `Offset.unwritable`, which says for which targets they are rejected.
        """
        with self._lock:
            for source, of_source in recorded.items():
                for subscription, stuck in of_source.items():
                    if "rejects" in stuck and (known := self._stuck.get((source, subscription))) is not None:
                        for tick, kind in stuck["open"]:
                            known.parts.pop((tick, kind), None)

    def add(
        self, target: Target, reason: str, parts: list[OpenPart], since: int | None = None, rejects: str = ""
    ) -> None:
        """Notes that the destination of a target can't be written, and keeps open parts for it.

        Args:
            target: of the destination.
            reason: why the destination can't be written; empty: as before.
            parts: the open parts; may be empty.
            since: since when it can't be written, ms since the epoch; None: now. Ignored for a known target.
            rejects: the reason with which due messages are rejected; empty: they wait. Ignored for a known target.
        """
        with self._lock:
            stuck = self._stuck.get(target)
            if stuck is None:
                destination = self._destinations[target]
                now = time.time_ns() // 1_000_000
                stuck = self._stuck[target] = _Stuck(since or now, reason, destination, rejects=rejects)
                _log.warning("%s can't be written, and what is due for it waits: %s", destination, reason)
                thread = threading.Thread(target=self._retry, args=(target,), name=f"retry {destination}", daemon=True)
                thread.start()
            if reason:
                self._tell(stuck, reason)
            for part in parts:
                stuck.parts.setdefault(part.release, part)
        self._on_change()

    def has(self, release: Release, target: Target) -> bool:
        """Whether a release has an open part for a target."""
        with self._lock:
            return target in self._stuck and release in self._stuck[target].parts

    def _tell(self, stuck: _Stuck, reason: str) -> None:
        stuck.reason = reason
        what = "; what is due for it is rejected" if stuck.rejects else ""
        self._troubles.begin(UNWRITABLE, stuck.destination, f"can't be written: {reason}{what}")

    def _reject_in_time(self, target: Target, stuck: _Stuck) -> None:
        """Begins to reject due messages of a subscription, if its destination has been unwritable for long enough.

        If it is too early, the next attempt is made at that time at the latest.
        """
        if self._reject_after_millis is None or stuck.rejects or not target[1] or without_dead_letters(target[1])[1]:
            return
        left = stuck.since + self._reject_after_millis - time.time_ns() // 1_000_000
        if left > 0:
            stuck.delay = min(stuck.delay, left / 1000)
            return
        _log.warning("%s can't be written for too long, and what is due for it is rejected", stuck.destination)
        stuck.rejects = f"{stuck.destination} can't be written: {stuck.reason}"
        self._on_change()

    def _retry(self, target: Target) -> None:
        while not self._stopped.wait(self._stuck[target].delay):
            stuck = self._stuck[target]
            try:
                reason = self._try(target, stuck)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            if self._stopped.is_set():
                return
            if reason:
                stuck.delay = min(max(2 * stuck.delay, _FIRST_DELAY_SECONDS), self._retry_max_seconds)
                stuck.reason = reason
                self._reject_in_time(target, stuck)
                self._tell(stuck, reason)
                continue
            stuck.delay = 0.0
            while self._is_on_its_way(target):
                if self._stopped.wait(_POLL_SECONDS):
                    return
            with self._lock:
                if stuck.parts:
                    stuck.delay = _POLL_SECONDS if stuck.rejects else 0.0
                    continue
                del self._stuck[target]
                if all(other.destination != stuck.destination for other in self._stuck.values()):
                    self._troubles.end(UNWRITABLE, stuck.destination)
            now = "is not in the settings, and nothing is open" if target in self._gone else "can be written again"
            _log.warning("%s %s", stuck.destination, now)
            self._on_change()
            return

    def _try(self, target: Target, stuck: _Stuck) -> str:
        """Sends the open parts; without any, tries whether the destination accepts a producer.

        Returns:
            why that failed; an empty text: it worked.
        """
        while not self._stopped.is_set():
            parts = self._oldest(stuck)
            if not parts or stuck.rejects:
                return "" if target in self._gone else self._probe(stuck.destination)
            for part in parts:
                self._wait_written(part)
            if parts != self._oldest(stuck):
                continue  # other parts have been added meanwhile
            if reason := self._send(parts):
                return reason
            with self._lock:
                for part in parts:
                    stuck.parts.pop(part.release, None)
            self._on_change()
        return ""

    def _oldest(self, stuck: _Stuck) -> list[OpenPart]:
        """Returns the parts to send together: all, or those of the oldest ticks where all have too many rows."""
        with self._lock:
            parts = [stuck.parts[release] for release in sorted(stuck.parts)]
        chosen: list[OpenPart] = []
        rows = 0
        for _, of_tick in itertools.groupby(parts, lambda part: part.job.tick):
            added = list(of_tick)
            rows += sum(part.job.rows for part in added)
            if chosen and rows > _ROWS_AT_ONCE:
                break
            chosen += added
        return chosen
