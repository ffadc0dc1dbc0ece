"""Converts a rule's wall times to instants. Changes of the offset from UTC are handled as in Vixie cron."""

from __future__ import annotations

from copy import copy
from datetime import datetime, timedelta
from typing import Protocol
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from tracker.recurrence.rrule import shortest_in_day

_WEEK = 7 * 86_400  # no time zone changes its offset there and back within a week

_NEAR = 2 * 86_400  # a change of a clock is less than this


class Rule(Protocol):
    """A rule that says which wall times recur.

    A wall time is an int: the seconds between 1970-01-01T00:00:00 and the time that a wall clock shows, as if each day
    had 24 hours.
    """

    # Whether it recurs in both passes of an hour that the clock shows twice: unless it is of certain times of the day.
    every_pass: bool

    def after(self, wall: int) -> int | None:
        """Returns the first wall time of the rule after another; None: there is none within 50 years, at least."""


def next_instant(rule: Rule, zone: ZoneInfo | None, after: int) -> int | None:
    """Returns when a rule next recurs.

    When the clock is put forward, a rule of certain times of the day recurs at the end of the gap instead of within it;
    any other rule ignores the gap. When the clock is put back, a rule of certain times of the day recurs only in the
    first of the two passes, any other rule in both.

    Args:
        rule: on the wall clock.
        zone: the wall clock's time zone; None: UTC.
        after: the result is later than this, seconds since the epoch.

    Returns:
        seconds since the epoch; None: there is none.
    """
    try:
        if zone is None:
            return rule.after(after)
        return _every_pass(rule, zone, after) if rule.every_pass else _first_pass(rule, zone, after)
    except (OverflowError, ValueError):  # beyond the year 9999
        return None


def wall_time(zone: ZoneInfo | None, instant: int) -> int:
    """Returns the wall time of a zone (None: UTC) at an instant, seconds since the epoch."""
    return instant if zone is None else instant + _offset(zone, instant)


def _every_pass(rule: Rule, zone: ZoneInfo, after: int) -> int | None:
    offset = _offset(zone, after)
    shown = after + offset
    while True:
        wall = rule.after(shown)
        instant = None if wall is None else wall - offset
        near = after + _NEAR
        change = _first_change(zone, after, near if instant is None else min(instant, near))
        if change is not None:
            # From the change on the clock shows other times: search again from the second before it.
            after, offset = change, _offset(zone, change)
            shown = after + offset - 1
        elif instant is None or instant <= near:
            return instant
        else:
            # The rule has no time until then, whatever the clock shows: the changes in between do not matter.
            after = max(near, instant - _NEAR)
            offset = _offset(zone, after)
            shown = after + offset


def _first_pass(rule: Rule, zone: ZoneInfo, after: int) -> int | None:
    offset = _offset(zone, after)
    shown = after + offset
    first = _instant(zone, shown)
    if first < after:  # in the second pass: all times that it shows were in the first pass
        change = _change(zone, first, after)
        shown = max(shown, change - 1 + _offset(zone, first))
    wall = rule.after(shown)
    return None if wall is None else _instant(zone, wall)


def _instant(zone: ZoneInfo, wall: int) -> int:
    """Returns the first instant at which the clock shows `wall`; if `wall` is in a gap, the end of the gap."""
    shown = _datetime(wall)
    before = _seconds(zone.utcoffset(shown))
    after = _seconds(zone.utcoffset(shown.replace(fold=1)))
    if before >= after:  # the clock shows it once, or twice: the earlier instant
        return wall - before
    return _change(zone, wall - after - 1, wall - before)


def _change(zone: ZoneInfo, low: int, high: int) -> int:
    """Returns the same as `_first_change`, for a zone whose offset at `high` differs from that at `low`."""
    change = _first_change(zone, low, high)
    if change is None:
        raise LookupError(f"{zone} keeps its offset between {low} and {high}")
    return change


def _first_change(zone: ZoneInfo, low: int, high: int) -> int | None:
    """Returns the first instant after `low`, up to `high`, with another offset than `low`; None: it stays."""
    offset = _offset(zone, low)
    while low < high:
        end = min(low + _WEEK, high)
        if _offset(zone, end) != offset:
            while end - low > 1:
                middle = (low + end) // 2
                if _offset(zone, middle) == offset:
                    low = middle
                else:
                    end = middle
            return end
        low = end
    return None


def _offset(zone: ZoneInfo, instant: int) -> int:
    return _seconds(datetime.fromtimestamp(instant, zone).utcoffset())


_EPOCH = datetime(1970, 1, 1)


def _datetime(wall: int) -> datetime:
    return _EPOCH + timedelta(seconds=wall)


def _seconds(offset: timedelta | None) -> int:
    if offset is None:
        raise LookupError("a time zone without an offset from UTC")
    return offset.days * 86_400 + offset.seconds


_SECOND = timedelta(seconds=1)


class CronRule:
    """The wall times of a cron expression, as Debian's cron reads it: a `tracker.recurrence.wall_clock.Rule`.

    Args:
        expression: five fields, or six of which the first are seconds.

    Raises:
        ValueError: it can't be read; its message goes on after "it".
    """

    def __init__(self, expression: str) -> None:
        fields = expression.split()
        if len(fields) not in (5, 6):
            raise ValueError(f"has {len(fields)} fields: a cron expression has five, or six with seconds")
        try:
            # Without a time zone: `tracker.recurrence.wall_clock` handles its changes.
            self._sim = CronSim(expression, _EPOCH)
        except CronSimError as error:
            message = str(error)
            raise ValueError(f"has a {message[:1].lower()}{message[1:]}") from error
        self.every_pass = any(field.startswith("*") for field in fields[-5:-3])

    @property
    def shortest(self) -> int:
        """The shortest time between two of its times, in seconds, on a day or on two that follow each other."""
        seconds = self._sim.seconds or {0}
        return shortest_in_day(self._sim.hours, self._sim.minutes, seconds)

    def after(self, wall: int) -> int | None:
        """Returns the first wall time of the rule after another; None: there is none within 50 years."""
        sim = copy(self._sim)
        sim.dt = _EPOCH + timedelta(seconds=wall)
        found = next(sim, None)
        return None if found is None else (found - _EPOCH) // _SECOND
