"""A second reading of RFC 5545, by brute force: each day of some years is asked, one after another, by the letter.

It shares nothing with `tracker.recurrence`, but how a rule's text is read: no calendar arithmetic beyond `datetime`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, timedelta
from functools import cache
from itertools import groupby, product

from tracker.recurrence.rrule import Parts

ONE_DAY = timedelta(days=1)


def occurrences(parts: Parts, start: datetime, last: date) -> Iterator[datetime]:
    """Yields all times of a rule of days from its DTSTART on, ascending, up to a day."""
    day = start.date() - timedelta(days=start.timetuple().tm_yday - 1 + 7)  # a period begins before DTSTART
    days = []
    while day <= last + timedelta(days=366):
        days.append(day)
        day += ONE_DAY
    chosen = [day for day in days if _is_in_phase(parts, start.date(), day) and _is_chosen(parts, start.date(), day)]
    times = list(
        product(parts.by_hour or (start.hour,), parts.by_minute or (start.minute,), parts.by_second or (start.second,))
    )
    for _, period in groupby(chosen, lambda day: _period(parts, day)):
        found = [datetime(day.year, day.month, day.day, *time) for day in period for time in times]
        if parts.by_set_position:
            places = sorted({n - 1 if n > 0 else len(found) + n for n in parts.by_set_position})
            found = [found[n] for n in places if 0 <= n < len(found)]
        yield from (at for at in found if at >= start and at.date() <= last)


def _period(parts: Parts, day: date) -> int:
    """Returns the number of the year, month, week or day that a day is in."""
    if parts.frequency == "YEARLY":
        return day.year
    if parts.frequency == "MONTHLY":
        return day.year * 12 + day.month
    if parts.frequency == "WEEKLY":
        return _week_start(day, parts.week_start).toordinal() // 7
    return day.toordinal()


def _is_in_phase(parts: Parts, first: date, day: date) -> bool:
    return (_period(parts, day) - _period(parts, first)) % parts.interval == 0


def _is_chosen(parts: Parts, first: date, day: date) -> bool:
    by_month, by_month_day, by_day = parts.by_month, parts.by_month_day, parts.by_day
    names_days = parts.by_month_day or parts.by_year_day or parts.by_day
    if parts.frequency == "YEARLY" and not names_days:
        if parts.by_week_number:
            by_day = ((first.weekday(), 0),)
        else:
            by_month, by_month_day = by_month or (first.month,), (first.day,)
    elif parts.frequency == "MONTHLY" and not names_days:
        by_month_day = (first.day,)
    elif parts.frequency == "WEEKLY" and not by_day:
        by_day = ((first.weekday(), 0),)
    return (
        (not by_month or day.month in by_month)
        and (not parts.by_week_number or _has_week_number(day, parts))
        and (not parts.by_year_day or _is_numbered(parts.by_year_day, _days_of_year(day.year), day))
        and (not by_month_day or _is_numbered(by_month_day, _days_of_month(day.year, day.month), day))
        and (not by_day or any(_is_weekday(parts, weekday, number, day) for weekday, number in by_day))
    )


def _is_numbered(numbers: tuple[int, ...], days: list[date], day: date) -> bool:
    """Tells whether a day is the n-th of some days, from their begin or their end, for one of the numbers."""
    return any(abs(n) <= len(days) and days[n - 1 if n > 0 else n] == day for n in numbers)


def _is_weekday(parts: Parts, weekday: int, number: int, day: date) -> bool:
    if day.weekday() != weekday:
        return False
    if not number:
        return True
    is_of_month = parts.frequency == "MONTHLY" or bool(parts.by_month)
    of_period = _days_of_month(day.year, day.month) if is_of_month else _days_of_year(day.year)
    return _is_numbered((number,), [one for one in of_period if one.weekday() == weekday], day)


def _has_week_number(day: date, parts: Parts) -> bool:
    """Tells whether a day is in a week of the numbers; a week belongs to the year that has four of its days."""
    week = _week_start(day, parts.week_start)
    return _is_numbered(parts.by_week_number, _weeks((week + 3 * ONE_DAY).year, parts.week_start), week)


@cache
def _weeks(year: int, week_start: int) -> list[date]:
    """Returns the first days of a year's weeks."""
    weeks = [_week_start(date(year, 1, 4), week_start)]
    while ((following := weeks[-1] + 7 * ONE_DAY) + 3 * ONE_DAY).year == year:
        weeks.append(following)
    return weeks


@cache
def _week_start(day: date, first_weekday: int) -> date:
    while day.weekday() != first_weekday:
        day -= ONE_DAY
    return day


@cache
def _days_of_year(year: int) -> list[date]:
    return [day for month in range(1, 13) for day in _days_of_month(year, month)]


@cache
def _days_of_month(year: int, month: int) -> list[date]:
    found = [date(year, month, 1)]
    while (following := found[-1] + ONE_DAY).month == month:
        found.append(following)
    return found
