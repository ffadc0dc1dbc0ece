"""Where each release is between its lane and the tables, and what of that the clock is told."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from streaming.release.driver.lane_release import LaneRelease, ReleaseId, Remainder, SentRelease
from streaming.release.driver.transitions import ReleaseEvent, ReleaseState, after
from streaming.release.naming import Recipient


@dataclass(frozen=True)
class Progress:
    """How far the releases have come.

    Attributes:
        confirmed: releases up to this tick are written but for remainders.
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

    A release with remainders is not written before an offset names these remainders. So after a crash either the whole
    release is dispatched again, or its remainders are.
    """

    def __init__(self) -> None:
        self._states: dict[ReleaseId, ReleaseState] = {}  # of those that are not written
        self._unwritten: dict[ReleaseId, LaneRelease] = {}  # likewise
        self._lanes: dict[str, list[LaneRelease]] = {}  # heaps of those that are QUEUED
        self._sent: dict[ReleaseId, SentRelease] = {}  # those that are SENT; those of a lane in order
        self._before: dict[ReleaseId, set[ReleaseId]] = {}  # in-order releases that had not ended when one came
        self._accepted: set[ReleaseId] = set()  # that have come in this run, and are not known to be confirmed
        self._cutoffs: deque[tuple[int, int]] = deque()  # (tick, cutoff) of ticks that are not confirmed
        self._confirmed = self._settled = 0
        self._recorded: Mapping[str, Any] | None = None  # `Offset.unwritable` of the last batch; None: no batch yet
        self._parked_since: dict[
            Recipient, int
        ] = {}  # by recipient in `_recorded` the first tick that dispatches nothing

    @property
    def has_batch(self) -> bool:
        """Whether a batch of this run has come."""
        return self._recorded is not None

    @property
    def unwritten(self) -> int:
        """The number of releases that are not written."""
        return len(self._unwritten)

    @property
    def has_sent(self) -> bool:
        """Whether a release is SENT."""
        return bool(self._sent)

    def state(self, release_id: ReleaseId) -> ReleaseState | None:
        """Returns a release's state; None: it has not come in this run, or is WRITTEN."""
        return self._states.get(release_id)

    def is_accepted(self, release_id: ReleaseId) -> bool:
        """Whether a release has come in this run and is not known to be confirmed."""
        return release_id in self._accepted

    def begin_batch(self, tick: int, recorded: Mapping[str, Any], drained: Iterable[Recipient] = ()) -> None:
        """Notes the unwritable recipients in a batch's offset.

        Args:
            tick: of the batch.
            recorded: `Offset.unwritable` of the batch's offset.
            drained: those of the recipients to which the batch dispatches messages that were parked.
        """
        parked = {(source, name) for source, names in recorded.items() for name in names}
        self._recorded = recorded
        self._parked_since = {recipient: self._parked_since.get(recipient, tick) for recipient in parked}
        self._parked_since |= dict.fromkeys(parked & set(drained), tick + 1)

    def add(self, release: LaneRelease) -> bool:
        """Adds a release: by tick, those on short notice before planned ones. Returns whether its lane is new."""
        self._accepted.add(release.id)
        self._unwritten[release.id] = release
        self._states[release.id] = ReleaseState.QUEUED
        if release.keys:
            self._before[release.id] = {
                other
                for other in self._before
                if not self._has_ended(other) and _comes_before(self._unwritten[other], release)
            }
        is_new = release.lane not in self._lanes
        heapq.heappush(self._lanes.setdefault(release.lane, []), release)
        return is_new

    def end_batch(self, tick: int, cutoff: int) -> None:
        """Ends a batch, whose releases have all been added: its tick can be confirmed when these are written.

        Args:
            tick: of the batch.
            cutoff: of the batch, ms since the epoch.
        """
        self._cutoffs.append((tick, cutoff))

    def begin_next(self, lane: str) -> LaneRelease | None:
        """Takes up the oldest release of a lane; None: the lane has none. The one before has ended."""
        if not self._lanes[lane]:
            return None
        release = heapq.heappop(self._lanes[lane])
        self.note(release, ReleaseEvent.BEGUN)
        return release

    def note(self, release: LaneRelease, event: ReleaseEvent) -> None:
        """Notes what has happened to a release."""
        self._states[release.id] = after(self._states[release.id], event)

    def must_wait(self, release_id: ReleaseId) -> bool:
        """Whether a release has to wait for one that has not ended, because of the order of their messages."""
        return any(not self._has_ended(other) for other in self._before.get(release_id, ()))

    def end(self, finished: SentRelease, event: ReleaseEvent) -> None:
        """Notes that each message of a release has arrived or is left open, or that an earlier run has written it."""
        self.note(finished.release, event)
        self._sent[finished.release.id] = finished
        self._before.pop(finished.release.id, None)

    def take_named(self, open_remainders: Collection[tuple[Recipient, ReleaseId]]) -> list[SentRelease]:
        """Takes the releases that may be written, which are WRITING then.

        One with a remainder that no offset names yet holds up later ones of its lane: after a crash a lane goes on
        after its last written release.

        Args:
            open_parts: the remainders that are open now, as (recipient, release).
        """
        named = {
            ((source, subscription), (tick, kind))
            for source, names in (self._recorded or {}).items()
            for subscription, one in names.items()
            for tick, kind in [*one["open"], *one.get("recalled", ())]
        }
        taken: list[SentRelease] = []
        held_up: set[str] = set()
        for finished in self._sent.values():
            remainders = {(remainder.recipient, remainder.release_id) for remainder in finished.remainders}
            if finished.release.lane in held_up or any(
                remainder in open_remainders and remainder not in named for remainder in remainders
            ):
                held_up.add(finished.release.lane)
            else:
                taken.append(finished)
        for finished in taken:
            self.note(finished.release, ReleaseEvent.NAMED)
            del self._sent[finished.release.id]
        return taken

    def note_written(self, releases: Iterable[LaneRelease]) -> None:
        """Notes that releases are written but for remainders."""
        for release in releases:
            self.note(release, ReleaseEvent.STORED)
            del self._states[release.id], self._unwritten[release.id]

    def is_written(self, remainder: Remainder) -> bool:
        """Whether the release of a remainder, and older ones of its lane, are written but for remainders.

        The table knows only the last tick of a lane's remainders for a destination: one that an older release left open
        later would count as written.
        """
        lane, tick = remainder.release.lane, remainder.release.tick
        return not any(release.lane == lane and release.tick <= tick for release in self._unwritten.values())

    def is_on_its_way(self, recipient: Recipient, soon: int) -> bool:
        """Whether a lane may still have messages for a recipient that were dispatched before it was parked.

        Args:
            recipient: of the messages.
            soon: the furthest time that a lookahead reaches, ms since the epoch.
        """
        since = self._parked_since.get(recipient)
        return since is None or any(
            release.tick < since and release.first_due <= soon for release in self._unwritten.values()
        )

    def progress(self, soon: int) -> Progress:
        """Confirms ticks up to the first release that is not written, and returns how far all have come.

        Args:
            soon: the furthest time that a lookahead reaches, ms since the epoch.
        """
        last = self._cutoffs[-1][0] if self._cutoffs else self._confirmed
        first_unwritten = min((tick for tick, _ in self._unwritten), default=last + 1)
        while self._cutoffs and self._cutoffs[0][0] < first_unwritten:
            self._confirmed, self._settled = self._cutoffs.popleft()
        self._accepted = {release_id for release_id in self._accepted if release_id[0] >= self._confirmed}
        return Progress(
            self._confirmed,
            self._settled,
            in_flight=sum(release.rows_due(soon) for release in self._unwritten.values()),
            in_flight_bytes=sum(release.n_bytes for release in self._unwritten.values()),
        )

    def _has_ended(self, release_id: ReleaseId) -> bool:
        return self._states.get(release_id) not in (
            ReleaseState.QUEUED,
            ReleaseState.EARLY,
            ReleaseState.BLOCKED,
            ReleaseState.SENDING,
        )


def _comes_before(first: LaneRelease, then: LaneRelease) -> bool:
    return any(first.keys[key][0] <= then.keys[key][1] for key in first.keys.keys() & then.keys.keys())
