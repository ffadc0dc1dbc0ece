"""Where each release is between its lane and the tables, and what of that the clock is told."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from streaming.release.driver.job import FinishedJob, Job, OpenPart, Release
from streaming.release.driver.transitions import ReleaseEvent, ReleaseState, after
from streaming.release.naming import Target


@dataclass(frozen=True)
class Progress:
    """How far the releases have come.

    Attributes:
        confirmed: releases up to this tick are written but for open parts.
        settled: the cutoff of that tick, ms since the epoch.
        in_flight: messages that are dispatched and not written, due soon.
        in_flight_bytes: about the bytes of all messages that are dispatched and not written.
    """

    confirmed: int
    settled: int
    in_flight: int
    in_flight_bytes: int


class Releases:
    """The state of each release of this run, and the ticks that are confirmed.

    Releases of a lane are sent one after another. A release with messages in order begins its tasks when all have ended
    that were dispatched before it and have a message that comes before one of its own: of the same key, and due no
    later. There is no deadlock, because a release waits for earlier ones alone.

    A release with open parts is not written before an offset names these parts. So after a crash either the whole
    release is dispatched again, or its open parts are.
    """

    def __init__(self) -> None:
        self._states: dict[Release, ReleaseState] = {}  # of those that are not written
        self._jobs: dict[Release, Job] = {}  # likewise
        self._lanes: dict[str, list[Job]] = {}  # heaps of those that are QUEUED
        self._sent: dict[Release, FinishedJob] = {}  # those that are SENT; those of a lane in order
        self._before: dict[Release, set[Release]] = {}  # in-order releases that had not ended when one came
        self._accepted: set[Release] = set()  # that have come in this run, and are not known to be confirmed
        self._cutoffs: deque[tuple[int, int]] = deque()  # (tick, cutoff) of ticks that are not confirmed
        self._confirmed = self._settled = 0
        self._recorded: Mapping[str, Any] | None = None  # `Offset.unwritable` of the last batch; None: no batch yet
        self._parked_since: dict[Target, int] = {}  # by target in `_recorded` the first tick that dispatches nothing

    @property
    def has_batch(self) -> bool:
        """Whether a batch of this run has come."""
        return self._recorded is not None

    @property
    def unwritten(self) -> int:
        """The number of releases that are not written."""
        return len(self._jobs)

    @property
    def has_sent(self) -> bool:
        """Whether a release is SENT."""
        return bool(self._sent)

    def state(self, release: Release) -> ReleaseState | None:
        """Returns a release's state; None: it has not come in this run, or is WRITTEN."""
        return self._states.get(release)

    def is_accepted(self, release: Release) -> bool:
        """Whether a release has come in this run and is not known to be confirmed."""
        return release in self._accepted

    def begin_batch(self, tick: int, recorded: Mapping[str, Any], drained: Iterable[Target] = ()) -> None:
        """Notes the unwritable targets in a batch's offset.

        Args:
            tick: of the batch.
            recorded: `Offset.unwritable` of the batch's offset.
            drained: those of the targets to which the batch dispatches messages that were parked.
        """
        parked = {(source, name) for source, names in recorded.items() for name in names}
        self._recorded = recorded
        self._parked_since = {target: self._parked_since.get(target, tick) for target in parked}
        self._parked_since |= dict.fromkeys(parked & set(drained), tick + 1)

    def add(self, job: Job) -> bool:
        """Adds a release: by tick, those on short notice before planned ones. Returns whether its lane is new."""
        self._accepted.add(job.release)
        self._jobs[job.release] = job
        self._states[job.release] = ReleaseState.QUEUED
        if job.keys:
            self._before[job.release] = {
                other for other in self._before if not self._has_ended(other) and _comes_before(self._jobs[other], job)
            }
        is_new = job.lane not in self._lanes
        heapq.heappush(self._lanes.setdefault(job.lane, []), job)
        return is_new

    def end_batch(self, tick: int, cutoff: int) -> None:
        """Ends a batch, whose releases have all been added: its tick can be confirmed when these are written.

        Args:
            tick: of the batch.
            cutoff: of the batch, ms since the epoch.
        """
        self._cutoffs.append((tick, cutoff))

    def begin_next(self, lane: str) -> Job | None:
        """Takes up the oldest release of a lane; None: the lane has none. The one before has ended."""
        if not self._lanes[lane]:
            return None
        job = heapq.heappop(self._lanes[lane])
        self.note(job, ReleaseEvent.BEGUN)
        return job

    def note(self, job: Job, event: ReleaseEvent) -> None:
        """Notes what has happened to a release."""
        self._states[job.release] = after(self._states[job.release], event)

    def must_wait(self, release: Release) -> bool:
        """Whether a release has to wait for one that has not ended, because of the order of their messages."""
        return any(not self._has_ended(other) for other in self._before.get(release, ()))

    def end(self, finished: FinishedJob, event: ReleaseEvent) -> None:
        """Notes that each message of a release has arrived or is left open, or that an earlier run has written it."""
        self.note(finished.job, event)
        self._sent[finished.job.release] = finished
        self._before.pop(finished.job.release, None)

    def take_named(self, open_parts: Collection[tuple[Target, Release]]) -> list[FinishedJob]:
        """Takes the releases that may be written, which are WRITING then.

        One with an open part that no offset names yet holds up later ones of its lane: after a crash a lane goes on
        after its last written release.

        Args:
            open_parts: the parts that are open now, as (target, release).
        """
        named = {
            ((source, subscription), (tick, kind))
            for source, names in (self._recorded or {}).items()
            for subscription, one in names.items()
            for tick, kind in [*one["open"], *one.get("recalled", ())]
        }
        taken: list[FinishedJob] = []
        held_up: set[str] = set()
        for finished in self._sent.values():
            parts = {(part.target, part.release) for part in finished.parts}
            if finished.job.lane in held_up or any(part in open_parts and part not in named for part in parts):
                held_up.add(finished.job.lane)
            else:
                taken.append(finished)
        for finished in taken:
            self.note(finished.job, ReleaseEvent.NAMED)
            del self._sent[finished.job.release]
        return taken

    def note_written(self, jobs: Iterable[Job]) -> None:
        """Notes that releases are written but for open parts."""
        for job in jobs:
            self.note(job, ReleaseEvent.STORED)
            del self._states[job.release], self._jobs[job.release]

    def is_written(self, part: OpenPart) -> bool:
        """Whether the release of a part, and older ones of its lane, are written but for open parts.

        The table knows only the last tick of a lane's parts for a destination: a part that an older release left open
        later would count as written.
        """
        lane, tick = part.job.lane, part.job.tick
        return not any(job.lane == lane and job.tick <= tick for job in self._jobs.values())

    def is_on_its_way(self, target: Target, soon: int) -> bool:
        """Whether a lane may still have messages for a target that were dispatched before it was parked.

        Args:
            target: of the messages.
            soon: the furthest time that a lookahead reaches, ms since the epoch.
        """
        since = self._parked_since.get(target)
        return since is None or any(job.tick < since and job.first_due <= soon for job in self._jobs.values())

    def progress(self, soon: int) -> Progress:
        """Confirms ticks up to the first release that is not written, and returns how far all have come.

        Args:
            soon: the furthest time that a lookahead reaches, ms since the epoch.
        """
        last = self._cutoffs[-1][0] if self._cutoffs else self._confirmed
        first_unwritten = min((tick for tick, _ in self._jobs), default=last + 1)
        while self._cutoffs and self._cutoffs[0][0] < first_unwritten:
            self._confirmed, self._settled = self._cutoffs.popleft()
        self._accepted = {release for release in self._accepted if release[0] >= self._confirmed}
        return Progress(
            self._confirmed,
            self._settled,
            in_flight=sum(job.rows_due(soon) for job in self._jobs.values()),
            in_flight_bytes=sum(job.n_bytes for job in self._jobs.values()),
        )

    def _has_ended(self, release: Release) -> bool:
        return self._states.get(release) not in (
            ReleaseState.QUEUED,
            ReleaseState.EARLY,
            ReleaseState.BEHIND,
            ReleaseState.SENDING,
        )


def _comes_before(first: Job, then: Job) -> bool:
    return any(first.keys[key][0] <= then.keys[key][1] for key in first.keys.keys() & then.keys.keys())
