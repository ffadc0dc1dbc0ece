"""The clock: decides when there is a batch, how far ahead it looks, and when buckets are sealed and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from streaming.release.feedback import Feedback
from tracker.buckets.time_slots import SLOT_MILLIS
from tracker.shard import Tick
from warehouse.known_routes import KnownRoutes

# The time between two batches that have nothing urgent to do: more of them would only take the senders' time.
_MIN_TICK_SECONDS = 0.3
_MAX_TICK_SECONDS = 1.2


@dataclass(frozen=True)
class Offset:
    """The end of a batch in Spark's offset log. What a batch does is a function of its offsets and the state.

    A mark is a turn whose intake is not settled yet: [turn, its tick, what was due before this went unsealed].
    """

    tick: int = 0
    now: int = 0
    cutoff: int = 0
    turn: int = 0
    load_horizon: int = 0
    near_until: int = 0
    run: str = ""
    confirmed: int = 0
    booked: int = 0
    marks: list[list[int]] = field(default_factory=list)
    index_version: int = 0  # the version of delayed_index that segments are loaded from
    lookup_versions: list[int] = field(default_factory=list)  # of segments.LOOKED_UP, where there are commands
    barriers: list[Any] = field(default_factory=list)  # [tick, ends]: what was published before that tick's commands
    passed: int = 0  # all barriers of this tick and earlier ones have been passed
    positions: dict[str, str] = field(default_factory=dict)  # by topic partition the last entry taken
    destinations: dict[str, int] = field(default_factory=dict)  # partitions of the partitioned ones, -1: not known
    lanes: int = 1
    batch_millis: int = 0
    routes: dict[str, Any] = field(default_factory=dict)  # as `KnownRoutes` has them
    back: list[list[str]] = field(default_factory=list)  # [topic, subscription]: to which messages go out again
    held_version: int = 0  # the version of delayed_index that has what was held back for them; 0: index_version
    unwritable: dict[str, dict[str, Any]] = field(default_factory=dict)  # as in `Feedback`
    rejects_since: dict[str, int] = field(default_factory=dict)  # by source the first tick whose rejects are held back
    rejects_version: int = 0  # the version of rejects that has what was held back for the topics in `back`
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)  # subscriptions, as `warehouse.tenure.Changes`
    lane_set: int = 0  # how often the clock was set back: what was handed out before may wait in its lanes for long

    @property
    def known_routes(self) -> KnownRoutes:
        """The routes when the batch was made; without any: none was yet."""
        return KnownRoutes.from_json(self.routes)

    def to_json(self) -> dict[str, Any]:
        """As Spark keeps it. Offsets are compared as text, so the order of keys is fixed."""
        return {
            **asdict(self),
            "positions": dict(sorted(self.positions.items())),
            "destinations": dict(sorted(self.destinations.items())),
        }

    @classmethod
    def from_json(cls, offset: Mapping[str, Any]) -> Offset:
        return cls(**offset)

    def to_tick(self) -> Tick:
        sending = json.dumps(
            {
                "lanes": self.lanes,
                "lane_set": self.lane_set,
                "partitions": self.destinations,
                "batch_millis": self.batch_millis,
                "routes": self.known_routes.destinations,
            },
            sort_keys=True,
        )
        return Tick(
            self.tick,
            self.cutoff,
            self.turn,
            self.load_horizon,
            self.near_until,
            self.run,
            self.confirmed,
            self.booked,
            self.now,
            self.passed,
            sending,
            self.unwritable,
        )


@dataclass(frozen=True)
class ClockSettings:
    """Times in ms. `max_segment_rows` is how many rows a turn loads at most, if they are not all due at once."""

    run: str
    lookahead_millis: int
    seal_interval_millis: int
    load_ahead_millis: int
    max_segment_rows: int = 100_000
    max_lookahead_millis: int = 0  # 0: lookahead_millis


def tick_seconds(batch_seconds: float) -> float:
    """The time from one batch to the next that has nothing urgent to do, where a batch mostly takes so long.

    Batches one after another would leave the senders late on full cores: each has a cost that does not depend on what
    is in it.
    """
    return min(max(_MIN_TICK_SECONDS, 2 * batch_seconds - _MIN_TICK_SECONDS), _MAX_TICK_SECONDS)


class Clock:
    """Makes the next offset of the last one, the time, and what the driver tells of the batches before."""

    def __init__(self, settings: ClockSettings) -> None:
        self._settings = settings
        self._next_turn = 0.0
        self._is_behind = False

    def is_time(self, last: Offset, now: int, monotonic: float, feedback: Feedback) -> bool:
        """Whether a batch is worth it although nothing has come in."""
        return (
            last.run != self._settings.run
            or self._is_behind
            or self._is_set_back(last, now, feedback)
            or monotonic >= self._next_turn
            or (feedback.unwritable is not None and feedback.unwritable != last.unwritable)
            or self._has_due(last, self._target(last, now, feedback), feedback)
        )

    def next(
        self,
        last: Offset,
        now: int,
        monotonic: float,
        feedback: Feedback,
        index_version: Callable[[], int],
        rows_due: Callable[[int, int, int], list[tuple[int, int]]],
    ) -> Offset:
        """The offset after the last one, but for what has come in.

        Args:
            now: ms since the epoch.
            monotonic: seconds, of a clock that never jumps.
            index_version: gives the newest version of delayed_index.
            rows_due: gives (slot, rows) of what is due in a version of delayed_index from one time to before another,
                ascending.
        """
        is_set_back = self._is_set_back(last, now, feedback)
        target = self._reach(now, feedback) if is_set_back else self._target(last, now, feedback)
        tick = last.tick + 1
        turn, load, near, booked, marks, version = (
            last.turn,
            last.load_horizon,
            last.near_until,
            last.booked,
            last.marks,
            last.index_version,
        )
        confirmed = max(last.confirmed, feedback.confirmed)
        is_new_run = last.run != self._settings.run
        if is_new_run or self._is_behind or is_set_back or monotonic >= self._next_turn or target >= last.near_until:
            self._next_turn = monotonic + self._settings.seal_interval_millis / 1000
            turn += 1
            version = index_version()
            load, near = self._horizons(last, now, feedback, version, rows_due)
            near = near if is_set_back else max(last.near_until, near)
            marks = [*marks, [turn, tick, last.near_until]]
            while marks and marks[0][1] <= confirmed and marks[0][2] <= feedback.settled + 1:
                booked = marks[0][0]
                marks = marks[1:]
        cutoff = min(target, near - 1) if is_set_back else max(last.cutoff, min(target, near - 1))
        unwritable = last.unwritable if feedback.unwritable is None else feedback.unwritable
        return Offset(
            tick,
            now,
            cutoff,
            turn,
            load,
            near,
            self._settings.run,
            confirmed,
            booked,
            marks,
            version,
            unwritable=unwritable,
            lane_set=last.lane_set + is_set_back,
        )

    def _target(self, last: Offset, now: int, feedback: Feedback) -> int:
        """The end of the last whole slot that the lookahead reaches, or has reached."""
        return max(last.cutoff, self._reach(now, feedback))

    def _reach(self, now: int, feedback: Feedback) -> int:
        return _slot_start(now + self.lookahead(feedback)) - 1

    def _is_set_back(self, last: Offset, now: int, feedback: Feedback) -> bool:
        """Whether the machine's clock has been set back: the cutoff is beyond all that a lookahead reaches from now.

        Then it goes back, too. Else what comes in due before it would be handed out long before its time, and wait in
        the lanes in front of what is due.
        """
        limits = self._settings
        most = max(limits.max_lookahead_millis, limits.lookahead_millis, self.lookahead(feedback))
        return last.cutoff > now + most + SLOT_MILLIS

    def lookahead(self, feedback: Feedback) -> int:
        """How far ahead of its time a message is to be handed out, ms."""
        return feedback.lookahead_millis or self._settings.lookahead_millis

    def _has_due(self, last: Offset, target: int, feedback: Feedback) -> bool:
        return target > last.cutoff and (feedback.next_due is None or feedback.next_due <= target)

    def _horizons(
        self,
        last: Offset,
        now: int,
        feedback: Feedback,
        version: int,
        rows_due: Callable[[int, int, int], list[tuple[int, int]]],
    ) -> tuple[int, int]:
        """The new load horizon and what is near from now on: nearer where too many rows are due before."""
        near = _slot_start(now + self._settings.seal_interval_millis + self.lookahead(feedback) + 2 * SLOT_MILLIS)
        load = max(last.load_horizon, near, _slot_start(now + self._settings.load_ahead_millis))
        rows = 0
        for slot, count in rows_due(version, last.load_horizon, load):
            if rows and rows + count > self._settings.max_segment_rows:
                load = slot * SLOT_MILLIS
                break
            rows += count
        self._is_behind = load < near
        return load, min(near, load)


def _slot_start(time: int) -> int:
    return time // SLOT_MILLIS * SLOT_MILLIS
