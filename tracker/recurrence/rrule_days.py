"""Finds, with dateutil, the days of a month or year that the BY parts of a recurrence rule choose."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from dateutil.rrule import MONTHLY, YEARLY, rrule, weekday

# With such an interval dateutil looks at one period: the next one is beyond the year 9999.
_ONE_YEAR, _ONE_MONTH = 10_000, 120_000


class Days(NamedTuple):
    """The parts of a rule that choose days. An empty part excludes no day."""

    by_month: tuple[int, ...]
    by_month_day: tuple[int, ...]  # negative: counted from the end
    by_year_day: tuple[int, ...]  # negative: counted from the end
    by_week_number: tuple[int, ...]
    by_day: tuple[tuple[int, int], ...]  # weekday, 0 is Monday; its number within the month or year, 0: each
    week_start: int

    @property
    def every_day(self) -> bool:
        """Whether all days match."""
        return not any(self[:5])


@lru_cache(maxsize=8_192)
def days_of_year(days: Days, year: int) -> tuple[tuple[int, int], ...]:
    """Returns the month and day of each match of a year, ascending."""
    found = rrule(YEARLY, datetime(year, 1, 1), interval=_ONE_YEAR, **_arguments(days, range(1, 367)))
    return tuple((day.month, day.day) for day in found)


@lru_cache(maxsize=65_536)
def days_of_month(days: Days, year: int, month: int) -> tuple[int, ...]:
    """Returns the days of a month that match, ascending. The number in a BYDAY counts within the month."""
    if days.by_month and month not in days.by_month:
        return ()
    found = rrule(MONTHLY, datetime(year, month, 1), interval=_ONE_MONTH, **_arguments(days, ()))
    return tuple(day.day for day in found)


def _arguments(days: Days, otherwise: range | tuple[()]) -> dict[str, Any]:
    by_day = [weekday(day, number or None) for day, number in days.by_day]
    chosen: dict[str, Any] = {
        "bymonth": days.by_month,
        "bymonthday": days.by_month_day,
        "byyearday": days.by_year_day,
        "byweekno": days.by_week_number,
        "byweekday": by_day,
    }
    given = {name: value for name, value in chosen.items() if value}
    if not given.keys() - {"bymonth"}:  # without any part dateutil would only choose the period's first day
        given["bymonthday"] = range(1, 32)
    return {**given, "wkst": days.week_start}
