"""A schedule: a recurring message with its progress for each subscription."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice
from typing import Any

from broker.entries.message_ids import MessageRef
from tracker.commands.occurrences import MISFIRE_GRACE_MILLIS
from tracker.message_state.changes import PAUSED_DELIVER_AT
from tracker.recurrence.recurrence import Misfire, Recurrence

MAX_UPCOMING = 1_000  # the maximum number of occurrences that are computed ahead


class ScheduleState(StrEnum):
    """The state of a schedule for a subscription."""

    WAITING = "waiting"  # its next occurrence waits
    HELD = "held"  # its next occurrence is due and parked, as by a pause of the subscription
    PAUSED = "paused"  # a command has paused it
    CANCELLED = "takenBack"  # a command has ended it
    ENDED = "ended"  # there is no further occurrence


@dataclass(frozen=True)
class Occurrence:
    """An occurrence's number, from 1, and when it is due (`at`), ms since the epoch."""

    number: int
    at: int

    def to_json(self) -> dict[str, int]:
        """Returns the occurrence as the REST API shows it."""
        return {"occurrence": self.number, "deliverAt": self.at}


@dataclass(frozen=True)
class Progress:
    """The progress of a schedule for a subscription.

    Attributes:
        delivered: the number of delivered occurrences, as far as the tables still have them.
        last: the last occurrence that was delivered or skipped, at the time that it had in the end: a command or a
            subscription's rate may have given it another one than the rule; None: none yet.
        next: the occurrence that waits; None: none. It is at HELD_DELIVER_AT if parked, at PAUSED_DELIVER_AT if
            paused.
        next_by_rule: when the next occurrence is due by the rule, ms since the epoch, also if it was rescheduled.
    """

    subscription: str
    state: ScheduleState
    delivered: int
    last: Occurrence | None
    next: Occurrence | None
    next_by_rule: int | None

    @property
    def is_active(self) -> bool:
        """Whether further occurrences will be delivered."""
        return self.state in (ScheduleState.WAITING, ScheduleState.HELD, ScheduleState.PAUSED)

    def to_json(self) -> dict[str, Any]:
        """The progress as JSON, as the admin API gives it."""
        has_time = self.state not in (ScheduleState.HELD, ScheduleState.PAUSED)
        return {
            "subscription": self.subscription,
            "state": self.state,
            "delivered": self.delivered,
            "lastOccurrence": self.last.number if self.last else None,
            "lastDeliverAt": self.last.at if self.last else None,
            "nextOccurrence": self.next.number if self.next else None,
            "nextDeliverAt": self.next.at if self.next and has_time else None,
        }


@dataclass(frozen=True)
class Schedule:
    """A recurring message. Times are ms since the epoch.

    Attributes:
        start: when the first occurrence is.
        cancel_at: the time that a cancel has to name: when the message's first row is due. The job finds the message by
            it, and it never changes, so that a repeated cancel is the same command.
        batch_size: the number of messages in the entry.
        progress: the progress for each chosen subscription.
        as_of: when the schedule was read.
    """

    ref: MessageRef
    rule: Recurrence
    start: int
    cancel_at: int
    batch_size: int
    key: str | None
    schedule_key: str | None
    publish_time: int
    producer_name: str
    progress: tuple[Progress, ...]
    as_of: int

    @property
    def is_active(self) -> bool:
        """Whether further occurrences will be delivered to any of the subscriptions."""
        return any(one.is_active for one in self.progress)

    @property
    def next(self) -> Progress | None:
        """The progress of the subscription with the soonest next occurrence; None: the schedule has ended."""
        waiting = [one for one in self.progress if one.next is not None and one.is_active]
        return min(waiting, key=lambda one: one.next.at if one.next else PAUSED_DELIVER_AT, default=None)

    def upcoming(self, n: int) -> list[Occurrence]:
        """Returns the next n occurrences, or fewer, if none will be missed.

        If the schedule is parked or paused they are as if it went on now, which `misfire` decides.
        """
        soonest = self.next
        if soonest is None or soonest.next is None:
            return []
        first, by_rule = soonest.next, soonest.next_by_rule or soonest.next.at
        if soonest.state in (ScheduleState.HELD, ScheduleState.PAUSED):
            at = self._made_up_for_at(by_rule)
            if at is None:
                return []
            first = Occurrence(first.number, at)
        after = max(by_rule, first.at)
        return list(islice(chain([first], occurrences_after(self.rule, first.number, after, self.start)), n))

    def _made_up_for_at(self, by_rule: int) -> int | None:
        """Returns when an occurrence would go out if its schedule went on now; None: never, and there is no later one.

        Args:
            by_rule: when it was due by the rule, ms since the epoch.
        """
        late = self.as_of - by_rule
        if late <= 0 or self.rule.misfire is Misfire.ALL:
            return by_rule
        if self.rule.misfire is Misfire.SKIP and late > MISFIRE_GRACE_MILLIS:
            return self.rule.following(self.as_of, self.start)
        return self.as_of

    def to_json(self) -> dict[str, Any]:
        """The schedule as JSON, as the admin API gives it."""
        soonest = self.next
        return {
            "id": str(self.ref),
            "repeat": self.rule.repeat,
            "timeZone": self.rule.time_zone,
            "repeatUntil": self.rule.until_millis,
            "repeatTimes": self.rule.times,
            "misfire": self.rule.misfire,
            "firstDeliverAt": self.start,
            "state": _state(self.progress),
            **{name: value for name, value in (soonest.to_json() if soonest else _NOTHING).items() if name in _NOTHING},
            "key": self.key,
            "scheduleKey": self.schedule_key,
            "publishTime": self.publish_time,
            "producerName": self.producer_name,
            "subscriptions": [one.to_json() for one in self.progress],
        }


_NOTHING = {"nextOccurrence": None, "nextDeliverAt": None}


def occurrences_after(rule: Recurrence, number: int, at: int, start: int) -> Iterator[Occurrence]:
    """Yields the occurrences after a given one, if none will be missed.

    Args:
        rule: the schedule's rule.
        number: the number of the given occurrence.
        at: when that is due, ms since the epoch.
        start: when the first occurrence is due, ms since the epoch.
    """
    while (found := rule.next_occurrence(number, at, start, at)) is not None:
        number, at = found
        yield Occurrence(number, at)


def _state(progress: Sequence[Progress]) -> ScheduleState:
    """Returns the state of a schedule as a whole: the first state, in the enum's order, of any subscription."""
    states = {one.state for one in progress}
    return next((state for state in ScheduleState if state in states), ScheduleState.ENDED)
