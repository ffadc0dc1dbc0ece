"""Finds the days of a year that the BY parts of a recurrence rule choose, by masks over the year's days.

Which days of a year they are depends on the weekday that it begins with, its length, and its neighbours' lengths. There
are 28 such kinds of years, so that the days of all years are soon known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import date
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tracker.messages import BoolArray, Int64Array

CYCLE = 400  # years, after which the calendar repeats, weekdays too

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_ORDINALS = 54  # a year has at most 53 of a weekday
_Days16 = npt.NDArray[np.int16]


class Days(NamedTuple):
    """The parts of a rule that choose days. An empty part excludes no day."""

    by_month: tuple[int, ...]
    by_month_day: tuple[int, ...]  # negative: counted from the end
    by_year_day: tuple[int, ...]  # negative: counted from the end
    by_week_number: tuple[int, ...]  # negative: counted from the end
    by_day: tuple[tuple[int, int], ...]  # weekday, 0 is Monday; its number within the month or year, 0: each
    is_by_month: bool  # whether the numbers in `by_day` count within the month
    week_start: int  # 0 is Monday

    @property
    def never(self) -> bool:
        """Whether no day of any year matches."""
        return not any(len(_days_of_kind(self, kind)) for kind in _KINDS)


def days_of_years(days: Days, years: Iterable[int]) -> Int64Array:
    """Returns the days that match, of ascending years: days since the epoch, ascending, int64, (n,)."""
    found = [
        _days_of_kind(days, _KIND_OF[year % CYCLE]) + np.int64(date(year, 1, 1).toordinal() - _EPOCH_DAY)
        for year in years
    ]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _is_leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def _kinds() -> list[int]:
    """Returns for each year of a cycle from 2000 on the first one with the same calendar, and the same neighbours."""
    firsts: dict[tuple[int, ...], int] = {}
    of = [
        (date(year, 1, 1).weekday(), *(_is_leap(year + n) for n in (-1, 0, 1))) for year in range(2_000, 2_000 + CYCLE)
    ]
    return [firsts.setdefault(kind, year) for year, kind in enumerate(of, 2_000)]


_KIND_OF = _kinds()  # by year modulo 400; 2000 is the first
_KINDS = sorted(set(_KIND_OF))


@lru_cache(maxsize=16_384)
def _days_of_kind(days: Days, year: int) -> _Days16:
    """Returns the days that match in a year such as this one: days since its first, ascending, int16, (n,)."""
    of = _calendar(year)
    chosen = np.ones(len(of.month), np.bool_)
    if days.by_month:
        chosen &= _are_among(of.month, days.by_month)
    if days.by_month_day:
        chosen &= _are_numbered(of.day, of.days_of_month, days.by_month_day)
    if days.by_year_day:
        chosen &= _are_numbered(of.day_of_year, np.full_like(of.day_of_year, len(of.month)), days.by_year_day)
    if days.by_week_number:
        chosen &= _are_numbered(*_week_numbers(year, days.week_start), days.by_week_number)
    if days.by_day:
        chosen &= _are_weekdays(of, days)
    found = np.flatnonzero(chosen).astype(np.int16)
    found.setflags(write=False)
    return found


def _are_among(values: _Days16, chosen: Collection[int]) -> BoolArray:
    allowed = np.zeros(int(values.max()) + 1, np.bool_)
    allowed[[value for value in chosen if 0 <= value < len(allowed)]] = True
    found: BoolArray = allowed[values]
    return found


def _are_numbered(numbers: _Days16, totals: _Days16, chosen: Collection[int]) -> BoolArray:
    """Tells which numbers, from 1 of a total each, are among the chosen ones; a negative one counts from the end."""
    return _are_among(numbers, [n for n in chosen if n > 0]) | _are_among(
        totals - numbers + 1, [-n for n in chosen if n < 0]
    )


def _are_weekdays(of: _Calendar, days: Days) -> BoolArray:
    # The n-th of a weekday is in the n-th seven days of the period.
    number, total = (of.day, of.days_of_month) if days.is_by_month else (of.day_of_year, of.days_of_year)
    chosen = np.zeros((7, 2 * _ORDINALS), np.bool_)  # by weekday and n; negative ones count from the end
    for weekday, n in days.by_day:
        chosen[weekday, n if n else slice(None)] = True
    found: BoolArray = chosen[of.weekday, (number - 1) // 7 + 1] | chosen[of.weekday, -((total - number) // 7 + 1)]
    return found


class _Calendar(NamedTuple):
    """The days of a year: int16, (days,) each. `day` and `day_of_year` begin with 1; weekday 0 is Monday."""

    month: _Days16
    day: _Days16
    days_of_month: _Days16
    day_of_year: _Days16
    days_of_year: _Days16
    weekday: _Days16


@lru_cache(maxsize=len(_KINDS))
def _calendar(year: int) -> _Calendar:
    lengths = np.array([31, 28 + _is_leap(year), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], np.int16)
    day_of_year = np.arange(1, lengths.sum() + 1, dtype=np.int16)
    month = np.repeat(np.arange(1, 13, dtype=np.int16), lengths)
    before = np.cumsum(lengths, dtype=np.int16) - lengths
    return _Calendar(
        month=month,
        day=day_of_year - before[month - 1],
        days_of_month=lengths[month - 1],
        day_of_year=day_of_year,
        days_of_year=np.full_like(day_of_year, len(day_of_year)),
        weekday=(day_of_year - 1 + date(year, 1, 1).weekday()).astype(np.int16) % np.int16(7),
    )


@lru_cache(maxsize=7 * len(_KINDS))
def _week_numbers(year: int, week_start: int) -> tuple[_Days16, _Days16]:
    """Returns the number of the week that each day is in, and how many weeks that week's year has.

    A week belongs to the year that has four of its days or more. So the first days of a year may be in the last week of
    the year before, and its last ones in week 1 of the next.

    Args:
        year: of the days.
        week_start: the weekday that weeks begin with, 0 is Monday.

    Returns:
        int16, (days,) each.
    """
    first, following = (_first_week(year + n, week_start) for n in (0, 1))
    day = np.arange(date(year, 1, 1).toordinal(), date(year + 1, 1, 1).toordinal())
    began = np.where(day < first, _first_week(year - 1, week_start), np.where(day < following, first, following))
    ends = np.where(day < first, first, np.where(day < following, following, _first_week(year + 2, week_start)))
    return ((day - began) // 7 + 1).astype(np.int16), ((ends - began) // 7).astype(np.int16)


def _first_week(year: int, week_start: int) -> int:
    """Returns the ordinal of the first day of a year's week 1: of the week that January 4 is in."""
    fourth = date(year, 1, 4)
    return fourth.toordinal() - (fourth.weekday() - week_start) % 7
