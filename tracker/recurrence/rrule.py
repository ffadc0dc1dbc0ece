"""An RFC 5545 recurrence rule (RRULE): computes its wall times.

dateutil finds the matching days of a month or year. This module steps from period to period, because dateutil would
step from DTSTART on, however long ago that is, and would search up to the year 9999 if nothing matches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from datetime import date
from functools import lru_cache

from tracker.recurrence.rrule_days import Days, days_of_month, days_of_year
from tracker.recurrence.rrule_parts import Parts

_DAY = 86_400
_EPOCH_DAY = date(1970, 1, 1).toordinal()

# How many periods are searched for a match: those of 50 years, at least.
_PERIODS = {"YEARLY": 51, "MONTHLY": 601, "WEEKLY": 2_610, "DAILY": 18_263}
_STEPS = 20_000  # for HOURLY and below: how many days, hours, minutes or seconds without a match are searched

_UNIT = {"HOURLY": 3_600, "MINUTELY": 60, "SECONDLY": 1}


class CalendarRule:
    """The wall times of a recurrence rule from its DTSTART on: a `tracker.recurrence.wall_clock.Rule`."""

    def __init__(self, parts: Parts, start: int) -> None:
        """Reads a rule. Missing parts are taken from DTSTART, as the RFC says.

        Args:
            parts: the rule's.
            start: DTSTART, a wall time in seconds.
        """
        self.every_pass = parts.frequency in _UNIT
        self._parts, self._start = parts, start
        self._first_day = date.fromordinal(_EPOCH_DAY + start // _DAY)
        unit = _UNIT.get(parts.frequency, _DAY)
        second = start % _DAY
        self._hours = parts.by_hour or (range(24) if unit < _DAY else (second // 3_600,))
        self._minutes = parts.by_minute or (range(60) if unit < 3_600 else (second // 60 % 60,))
        self._seconds = parts.by_second or (range(60) if unit < 60 else (second % 60,))
        self._days = _days(parts, self._first_day)

    def after(self, wall: int) -> int | None:
        """Returns the first wall time of the rule after another, which is DTSTART or later; None: none in 50 years."""
        if self.every_pass:
            return self._after_in_days(wall)
        for days in self._periods(date.fromordinal(_EPOCH_DAY + wall // _DAY)):
            found = self._after_among(days, wall)
            if found is not None:
                return found
        return None

    def _after_among(self, days: list[int], wall: int) -> int | None:
        """Returns the first time after `wall` on the days of a period (days since the epoch, ascending)."""
        times = len(self._hours) * len(self._minutes) * len(self._seconds)
        total = len(days) * times

        def time(place: int) -> int:
            return days[place // times] * _DAY + self._time_of_day(place % times)

        if self._parts.by_set_position:
            chosen = sorted({n - 1 if n > 0 else total + n for n in self._parts.by_set_position})
            return next((at for at in (time(n) for n in chosen if 0 <= n < total) if at > wall), None)
        place = bisect_right(range(total), wall, key=time)
        return time(place) if place < total else None

    def _time_of_day(self, place: int) -> int:
        place, second = divmod(place, len(self._seconds))
        hour, minute = divmod(place, len(self._minutes))
        return self._hours[hour] * 3_600 + self._minutes[minute] * 60 + self._seconds[second]

    def _periods(self, day: date) -> Iterator[list[int]]:
        """Yields the matching days of each period, every n-th by the interval, from the one that `day` is in."""
        parts, start, interval = self._parts, self._first_day, self._parts.interval
        limit = _PERIODS[parts.frequency]
        if parts.frequency == "YEARLY":
            for year in range(_aligned(day.year, start.year, interval), 10_000, interval)[:limit]:
                yield [date(year, *month_day).toordinal() - _EPOCH_DAY for month_day in days_of_year(self._days, year)]
        elif parts.frequency == "MONTHLY":
            month_0 = _aligned(day.year * 12 + day.month - 1, start.year * 12 + start.month - 1, interval)
            for month in range(month_0, 120_000, interval)[:limit]:
                first = date(month // 12, month % 12 + 1, 1).toordinal() - _EPOCH_DAY - 1
                yield [first + number for number in days_of_month(self._days, month // 12, month % 12 + 1)]
        else:
            length = 7 if parts.frequency == "WEEKLY" else 1
            # The first day of a week, relative to ordinal 0, which would be a Sunday.
            shift = (parts.week_start + 1) % 7 if length == 7 else 0
            period = _aligned((day.toordinal() - shift) // length, (start.toordinal() - shift) // length, interval)
            for number in range(period, date.max.toordinal() // length, interval)[:limit]:
                first = number * length + shift
                yield [n - _EPOCH_DAY for n in range(first, first + length) if self._is_day(n)]

    def _is_day(self, ordinal: int) -> bool:
        if self._days.every_day:
            return True
        day = date.fromordinal(ordinal)
        return day.day in days_of_month(self._days, day.year, day.month)

    def _after_in_days(self, wall: int) -> int | None:
        """Returns the same as `after`, for a frequency of hours, minutes or seconds."""
        unit = _UNIT[self._parts.frequency]
        interval, anchor = self._parts.interval * unit, self._start // unit * unit
        at = _aligned(wall // unit * unit, anchor, interval)
        for _ in range(_STEPS):
            day, second = divmod(at, _DAY)
            if not self._is_day(_EPOCH_DAY + day):
                at = _aligned((day + 1) * _DAY, anchor, interval)
            elif second // 3_600 not in self._hours:
                at = _aligned(at // 3_600 * 3_600 + 3_600, anchor, interval)
            elif unit < 3_600 and second // 60 % 60 not in self._minutes:
                at = _aligned(at // 60 * 60 + 60, anchor, interval)
            elif unit < 60 and second % 60 not in self._seconds:
                at = _aligned(at + 1, anchor, interval)
            else:
                found = self._after_in_period(at, unit, wall)
                if found is not None:
                    return found
                at = _aligned(at + 1, anchor, interval)
        return None

    def _after_in_period(self, at: int, unit: int, wall: int) -> int | None:
        minutes = self._minutes if unit == 3_600 else (0,)
        seconds = self._seconds if unit > 1 else (0,)
        return next((t for m in minutes for s in seconds if (t := at + m * 60 + s) > wall), None)


def _aligned(value: int, anchor: int, interval: int) -> int:
    """Returns the least `anchor + n * interval` that is not below `value`."""
    return value + (anchor - value) % interval


@lru_cache(maxsize=4_096)
def _days(parts: Parts, first: date) -> Days:
    by_month, by_month_day, by_day = parts.by_month, parts.by_month_day, parts.by_day
    if parts.frequency == "YEARLY":
        if parts.by_week_number:
            by_day = by_day or ((first.weekday(), 0),)
        elif not (parts.by_year_day or by_month_day or by_day):
            by_month, by_month_day = by_month or (first.month,), (first.day,)
    elif parts.frequency == "MONTHLY" and not (by_month_day or by_day):
        by_month_day = (first.day,)
    elif parts.frequency == "WEEKLY" and not by_day:
        by_day = ((first.weekday(), 0),)
    return Days(by_month, by_month_day, parts.by_year_day, parts.by_week_number, by_day, parts.week_start)
