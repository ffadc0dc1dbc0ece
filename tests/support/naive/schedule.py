"""A naive reading of what docs/schedules.md says of one schedule and one subscription, an occurrence at a time."""

from __future__ import annotations

from dataclasses import dataclass

from tracker.commands.kinds import CANCEL, PAUSE_SCHEDULE, RESCHEDULE, RESTORE, RESUME_SCHEDULE, SKIP, SKIP_NEXT
from tracker.commands.occurrences import MISFIRE_GRACE_MILLIS
from tracker.wire.delaylake_pb2 import Result

APPLIED, ALREADY, LATE, INVALID = Result.APPLIED, Result.ALREADY_APPLIED, Result.TOO_LATE, Result.INVALID


@dataclass
class NaiveSchedule:
    """The next occurrence of a message that recurs every so many ms. Times are ms since the epoch.

    Attributes:
        every: ms.
        start: when the first occurrence is.
        published: when the message was published.
        misfire: as its property.
        times: how many occurrences there are at most; None: any number.
        number: of the next occurrence.
        by_rule: when that is by the rule.
        due: when it is, whatever has moved it; of one that is held, when it was due.
        is_paused, is_cancelled, is_held: what keeps it from being handed out; held for its subscription.
        is_over: nothing comes any more.
    """

    every: int
    start: int
    published: int
    misfire: str
    times: int | None = None
    number: int = 1
    is_paused: bool = False
    is_cancelled: bool = False
    is_held: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        self.by_rule = self.due = self.start

    def command(self, kind: str, now: int, released: int, at: int = 0) -> int:
        """Applies a command, and returns its result.

        Args:
            kind: of the command.
            now: the time.
            released: what was due up to this time has been handed out.
            at: of a reschedule.
        """
        is_late = self.is_over or (self.due <= released and not self.is_paused and not self.is_held)
        if kind in (CANCEL, SKIP):
            result = ALREADY if self.is_cancelled else LATE if is_late else APPLIED
            self.is_cancelled |= result == APPLIED
            return result
        if kind == RESTORE:
            result = ALREADY if not self.is_cancelled else LATE if is_late else APPLIED
            self.is_cancelled &= result != APPLIED
            return result
        if self.is_cancelled:
            return INVALID
        if is_late:
            return LATE
        if kind == RESCHEDULE:
            if self.is_paused:
                return INVALID
            self.due, self.is_held = max(at, now), False
        elif kind == PAUSE_SCHEDULE:
            if self.is_paused:
                return ALREADY
            self.is_paused, self.is_held, self.due = True, False, self.by_rule
        elif kind == RESUME_SCHEDULE:
            if not self.is_paused:
                return ALREADY
            self.is_paused, self.due = False, self.by_rule
        elif kind == SKIP_NEXT:
            self._move_on(now, 1)
            self.is_held = False
        return APPLIED

    def resume_subscription(self) -> None:
        """The subscription gets its messages again."""
        self.is_held = False

    def tick(self, now: int, cutoff: int, is_subscription_paused: bool) -> list[tuple[int, int]]:
        """Returns what is handed out in a tick: numbers, and when they were due."""
        out: list[tuple[int, int]] = []
        while not (self.is_over or self.is_paused or self.is_held) and self.due <= cutoff:
            if self.is_cancelled:
                self.is_over = True
            elif is_subscription_paused:
                self.is_held = True
            elif self.misfire == "skip" and now - self.due > MISFIRE_GRACE_MILLIS:
                self._move_on(now, 0)
            else:
                out.append((self.number, self.due))
                self._move_on(now, 1)
        return out

    def _move_on(self, now: int, n: int) -> None:
        """Goes on to the first occurrence after this one that is made up for, which gets a number higher by n."""
        if self.times is not None and self.number + n > self.times:
            self.is_over = True
            return
        not_missed = min(self.published, now) if self.misfire == "all" else now
        after = max(self.by_rule, self.due, not_missed)
        self.number += n
        self.by_rule = self.due = self.start + ((after - self.start) // self.every + 1) * self.every
