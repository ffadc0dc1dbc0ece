"""The parts of an RFC 5545 recurrence rule, read strictly."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import UTC, date, datetime
from functools import lru_cache
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tracker.messages import BoolArray, Int64Array

FREQUENCIES = ("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY", "SECONDLY")

_Item = TypeVar("_Item", int, tuple[int, int])

_WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")

_BY_DAY = re.compile(r"([+-]?[0-9]{1,2})?(MO|TU|WE|TH|FR|SA|SU)")

_UNTIL = re.compile(r"([0-9]{8})(?:T([0-9]{6})(Z)?)?")


class Parts(NamedTuple):
    """The parts of a recurrence rule. An empty tuple means that the rule lacks the part."""

    frequency: str
    interval: int
    times: int | None  # COUNT
    until: datetime | None  # aware: an instant; naive: a wall time
    week_start: int  # 0 is Monday
    by_month: tuple[int, ...]
    by_week_number: tuple[int, ...]
    by_year_day: tuple[int, ...]
    by_month_day: tuple[int, ...]
    by_day: tuple[tuple[int, int], ...]  # weekday, 0 is Monday; its number within the month or year, 0: each
    by_hour: tuple[int, ...]
    by_minute: tuple[int, ...]
    by_second: tuple[int, ...]
    by_set_position: tuple[int, ...]


def parse(text: str) -> Parts:
    """Reads a recurrence rule such as `FREQ=MONTHLY;BYDAY=-1FR`, with or without `RRULE:` before it.

    A line break or semicolon at its end is taken, as other programs write them.

    Raises:
        ValueError: it can't be read, or has parts that do not go together; its message goes on after "it".
    """
    texts: dict[str, str] = {}
    for part in text.upper().strip().removeprefix("RRULE:").rstrip(";").split(";"):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise ValueError(f"has a part that is no NAME=VALUE: {part[:40]!r}")
        if name not in _NAMES:
            raise ValueError(f"has an unknown part {name[:40]!r}: there are {', '.join(sorted(_NAMES))}")
        if name in texts:
            raise ValueError(f"has {name} twice")
        texts[name] = value
    if texts.get("FREQ") not in FREQUENCIES:
        raise ValueError(f"needs a FREQ of {', '.join(FREQUENCIES)}")
    parts = Parts(
        frequency=texts["FREQ"],
        interval=_positive("INTERVAL", texts.get("INTERVAL", "1")),
        times=_positive("COUNT", texts["COUNT"]) if "COUNT" in texts else None,
        until=_until(texts["UNTIL"]) if "UNTIL" in texts else None,
        week_start=_week_start(texts.get("WKST", "MO")),
        by_day=_items(texts, "BYDAY", _weekday),
        **{field: _items(texts, name, _number(name)) for name, (field, _, _) in _NUMBERS.items()},
    )
    _check(parts)
    return parts


# By part: the field of Parts, the greatest value, whether it may count from the end.
_NUMBERS = {
    "BYMONTH": ("by_month", 12, False),
    "BYWEEKNO": ("by_week_number", 53, True),
    "BYYEARDAY": ("by_year_day", 366, True),
    "BYMONTHDAY": ("by_month_day", 31, True),
    "BYHOUR": ("by_hour", 23, False),
    "BYMINUTE": ("by_minute", 59, False),
    "BYSECOND": ("by_second", 59, False),
    "BYSETPOS": ("by_set_position", 366, True),
}

_NAMES = {"FREQ", "INTERVAL", "COUNT", "UNTIL", "WKST", "BYDAY", *_NUMBERS}

_FROM_ZERO = {"BYHOUR", "BYMINUTE", "BYSECOND"}


def _items(texts: dict[str, str], name: str, read: Callable[[str], _Item]) -> tuple[_Item, ...]:
    return tuple(sorted({read(item) for item in texts[name].split(",")})) if name in texts else ()


def _number(name: str) -> Callable[[str], int]:
    _, greatest, from_end = _NUMBERS[name]
    least = 0 if name in _FROM_ZERO else 1

    def read(text: str) -> int:
        digits = text[1:] if text[:1] in (("+", "-") if from_end else ()) else text
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 3 and least <= int(digits) <= greatest):
            also = f" or -{least} to -{greatest}" if from_end else ""
            raise ValueError(f"has a {name} that is not {least} to {greatest}{also}: {text[:40]!r}")
        return int(text)

    return read


def _weekday(text: str) -> tuple[int, int]:
    match = _BY_DAY.fullmatch(text)
    number = int(match[1] or 0) if match else 0
    if not match or (match[1] and not 1 <= abs(number) <= 53):
        raise ValueError(f"has a BYDAY that is no day as MO, 1MO or -1MO: {text[:40]!r}")
    return _WEEKDAYS.index(match[2]), number


def _week_start(text: str) -> int:
    if text not in _WEEKDAYS:
        raise ValueError(f"has a WKST that is none of {', '.join(_WEEKDAYS)}: {text[:40]!r}")
    return _WEEKDAYS.index(text)


def _positive(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) > 0):
        raise ValueError(f"has a {name} that is no whole number above 0: {text[:40]!r}")
    return int(text)


def _until(text: str) -> datetime:
    """Reads an UNTIL; a day without a time ends with its last second."""
    match = _UNTIL.fullmatch(text)
    if match:
        try:
            time = datetime.strptime(match[1] + (match[2] or "235959"), "%Y%m%d%H%M%S")
            return time.replace(tzinfo=UTC) if match[3] else time
        except ValueError:
            pass
    raise ValueError(f"has an UNTIL that is no time as 20281231T235959Z or 20281231: {text[:40]!r}")


def _check(parts: Parts) -> None:
    """Checks that the RFC allows the parts together, and that they are supported; raises ValueError if not."""
    frequency = parts.frequency
    numbered = any(number for _, number in parts.by_day)
    wrong = {
        "COUNT and UNTIL together": parts.times is not None and parts.until is not None,
        f"BYWEEKNO with FREQ={frequency}": parts.by_week_number and frequency != "YEARLY",
        f"BYYEARDAY with FREQ={frequency}": parts.by_year_day and frequency in ("MONTHLY", "WEEKLY", "DAILY"),
        f"BYMONTHDAY with FREQ={frequency}": parts.by_month_day and frequency == "WEEKLY",
        f"a number in BYDAY with FREQ={frequency}": numbered and frequency not in ("YEARLY", "MONTHLY"),
        "a number in BYDAY with BYWEEKNO": numbered and parts.by_week_number,
        f"BYSETPOS with FREQ={frequency}": parts.by_set_position and frequency in FREQUENCIES[4:],
        "BYSETPOS alone": parts.by_set_position and not any(parts[5:13]),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ValueError(f"has {what}, which is not supported")


_DAY = 86_400

_UNIT = {"HOURLY": 3_600, "MINUTELY": 60, "SECONDLY": 1}

_ALL_HOURS, _ALL_OF_60 = range(24), range(60)


def shortest_in_day(hours: Collection[int], minutes: Collection[int], seconds: Collection[int]) -> int:
    """Returns the shortest time between two of a day's times, in seconds, also between days that follow each other."""
    within_hour = np.add.outer(60 * np.array(sorted(minutes)), sorted(seconds)).ravel()
    times = np.add.outer(3_600 * np.array(sorted(hours)), within_hour).ravel()
    return int(np.diff(times, append=times[0] + _DAY).min())


def shortest_of(parts: Parts) -> int:
    """Returns a time that no two occurrences of a recurrence rule are nearer to each other, in seconds."""
    unit = _UNIT.get(parts.frequency, _DAY)
    one = (0,)  # some minute or second, of DTSTART
    day_times = shortest_in_day(
        parts.by_hour or (_ALL_HOURS if unit < _DAY else one),
        parts.by_minute or (_ALL_OF_60 if unit < 3_600 else one),
        parts.by_second or (_ALL_OF_60 if unit < 60 else one),
    )
    if unit == _DAY:
        return day_times * parts.interval if parts.frequency == "DAILY" and day_times == _DAY else day_times
    # Within an hour or minute all times count; from one to the next it is the interval at least.
    minutes = (parts.by_minute or one) if unit == 3_600 else one
    seconds = (parts.by_second or one) if unit > 1 else one
    times = np.add.outer(60 * np.array(sorted(minutes)), sorted(seconds)).ravel()
    return max(day_times, int(np.diff(times, append=times[0] + parts.interval * unit).min()))


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


_LAST_DAY = date.max.toordinal() - _EPOCH_DAY

_YEARS_AT_ONCE = 64

_MOST_DAYS = {"YEARLY": 366, "MONTHLY": 31, "WEEKLY": 7, "DAILY": 1}


class CalendarRule:
    """The wall times of a recurrence rule from its DTSTART on: a `tracker.recurrence.recurrence.Rule`.

    A period is a year, month, week or day, as FREQ says; with FREQ HOURLY, MINUTELY and SECONDLY, that unit.
    """

    def __init__(self, parts: Parts, start: int) -> None:
        """Reads a rule. Missing parts are taken from DTSTART, as the RFC says.

        Args:
            parts: the rule's.
            start: DTSTART, a wall time in seconds.
        """
        self.every_pass = parts.frequency in _UNIT
        self._parts = parts
        self._unit = _UNIT.get(parts.frequency, _DAY)
        second = start % _DAY
        self._first_day = start // _DAY
        self._first_unit = start // self._unit
        self._hours = parts.by_hour or (tuple(range(24)) if self._unit < _DAY else (second // 3_600,))
        self._minutes = parts.by_minute or (tuple(range(60)) if self._unit < 3_600 else (second // 60 % 60,))
        self._seconds = parts.by_second or (tuple(range(60)) if self._unit < 60 else (second % 60,))
        self._days = _days(parts, date.fromordinal(_EPOCH_DAY + self._first_day))

    def after(self, wall: int) -> int | None:
        """Returns the first wall time of the rule after another; None: there is none in the 400 years after it."""
        day = wall // _DAY
        first = self._first_aligned(wall)
        if first > _LAST_DAY or _never(self._days):
            return None
        if self.every_pass:
            return self._after_in_units(wall, day, first)
        if self._parts.by_set_position:
            return self._after_in_set(wall, first)
        for days in self._day_blocks(first):
            nearest: list[int] = days[np.searchsorted(days, day) :][:2].tolist()
            for one in nearest:  # on the day itself it may be too late
                if one > day:
                    return one * _DAY + self._time_of_day(0)
                place = bisect_right(range(self._times_of_day), wall % _DAY, key=self._time_of_day)
                if place < self._times_of_day:
                    return one * _DAY + self._time_of_day(place)
        return None

    @property
    def _times_of_day(self) -> int:
        return len(self._hours) * len(self._minutes) * len(self._seconds)

    def _time_of_day(self, place: int) -> int:
        place, second = divmod(place, len(self._seconds))
        hour, minute = divmod(place, len(self._minutes))
        return self._hours[hour] * 3_600 + self._minutes[minute] * 60 + self._seconds[second]

    def _first_aligned(self, wall: int) -> int:
        """Returns the first day, since the epoch, of the period of `wall` or a later one that the interval includes."""
        parts, interval = self._parts, self._parts.interval
        day = wall // _DAY
        if self.every_pass:
            return max(day, _aligned(wall // self._unit, self._first_unit, interval) * self._unit // _DAY)
        if parts.frequency == "DAILY":
            return _aligned(day, self._first_day, interval)
        if parts.frequency == "WEEKLY":
            return _aligned(self._week(day), self._week(self._first_day), interval) * 7 + self._week_shift
        at, start = (date.fromordinal(_EPOCH_DAY + one) for one in (day, self._first_day))
        if parts.frequency == "YEARLY":
            year = _aligned(at.year, start.year, interval)
            return date(year, 1, 1).toordinal() - _EPOCH_DAY if year < 10_000 else _LAST_DAY + 1
        month = _aligned(at.year * 12 + at.month - 1, start.year * 12 + start.month - 1, interval)
        return date(month // 12, month % 12 + 1, 1).toordinal() - _EPOCH_DAY if month < 120_000 else _LAST_DAY + 1

    def _day_blocks(self, first: int) -> Iterator[Int64Array]:
        """Yields the days that the rule chooses in the 400 years from that of the first day on, some years at once.

        Args:
            first: of a period that the interval includes, days since the epoch.

        Yields:
            days since the epoch, ascending, int64, (n,); none before the first day. A block has whole periods.
        """
        year = date.fromordinal(_EPOCH_DAY + first).year
        is_yearly = self._parts.frequency == "YEARLY"
        years = range(year, 10_000, self._parts.interval if is_yearly else 1)[:CYCLE]
        carried = np.zeros(0, np.int64)
        at, n = 0, 1
        while at < len(years):
            days = days_of_years(self._days, years[at : at + n])
            if at == 0:
                days = days[np.searchsorted(days, first) :]
            if self._parts.interval > 1 and not is_yearly and not self.every_pass:
                days = days[(self._periods(days) - self._periods(np.array([first]))[0]) % self._parts.interval == 0]
            at, n = at + n, min(2 * n, _YEARS_AT_ONCE)
            if self._parts.frequency == "WEEKLY" and at < len(years):
                # The last week goes on in the next year.
                week = self._week(_new_year(years[at])) * 7 + self._week_shift
                days = np.concatenate([carried, days])
                end = np.searchsorted(days, week)
                carried, days = days[end:], days[:end]
            else:
                days = np.concatenate([carried, days])
            if len(days):
                yield days

    def _periods(self, days: Int64Array) -> Int64Array:
        """Returns the number of the period that each day is in, int64, (days,)."""
        if self._parts.frequency == "WEEKLY":
            return (days - self._week_shift) // 7
        if self._parts.frequency == "DAILY":
            return days
        period = "datetime64[M]" if self._parts.frequency == "MONTHLY" else "datetime64[Y]"
        return days.astype("datetime64[D]").astype(period).astype(np.int64)

    @property
    def _week_shift(self) -> int:
        """The first day of a week; the epoch was a Thursday."""
        return (self._parts.week_start - 3) % 7

    def _week(self, day: int) -> int:
        return (day - self._week_shift) // 7

    def _after_in_set(self, wall: int, first: int) -> int | None:
        """Returns the same as `after`, for a rule with BYSETPOS, from a period's first day on."""
        times, positions = self._times_of_day, self._parts.by_set_position
        least = min(map(abs, positions))
        if least > _MOST_DAYS[self._parts.frequency] * times:
            return None
        for days in self._day_blocks(first):
            begins = np.flatnonzero(np.diff(self._periods(days), prepend=-(1 << 40)))
            totals = np.diff(begins, append=len(days)) * times
            for i in np.flatnonzero(totals >= least)[:2].tolist():  # in the period of `wall` it may be too late
                begin, total = int(begins[i]), int(totals[i])
                places = sorted({n - 1 if n > 0 else total + n for n in positions if abs(n) <= total})
                found = (int(days[begin + n // times]) * _DAY + self._time_of_day(n % times) for n in places)
                if (at := next((one for one in found if one > wall), None)) is not None:
                    return at
        return None

    def _after_in_units(self, wall: int, day: int, first: int) -> int | None:
        """Returns the same as `after`, for a frequency of hours, minutes or seconds, from a day on."""
        interval = self._parts.interval
        chosen, begins = _units(self._unit, interval, self._hours, self._minutes, self._seconds)
        for days in self._day_blocks(first):
            # How many units after its begin each day has the first one that the interval includes.
            phases = (self._first_unit - days * len(chosen)) % interval
            has_any = (phases < len(begins)) & begins[np.minimum(phases, len(begins) - 1)]
            for i in np.flatnonzero(has_any)[:2].tolist():  # on the day itself it may be too late
                one = int(days[i])
                found = self._after_on_day(chosen, int(phases[i]), wall % _DAY if one == day else -1)
                if found is not None:
                    return one * _DAY + found
        return None

    def _after_on_day(self, chosen: BoolArray, phase: int, second: int) -> int | None:
        """Returns the first time of a day after another, both in seconds since its begin; None: there is none.

        Args:
            chosen: bool, (units of a day,): the rule has times in the unit.
            phase: the first unit that the interval includes.
            second: of the day; -1: before its begin.
        """
        interval = min(self._parts.interval, len(chosen))
        units = phase + interval * np.flatnonzero(chosen[phase::interval])
        for unit in units[np.searchsorted(units, second // self._unit) :][:2].tolist():
            begin = unit * self._unit
            found = next((begin + at for at in self._times_of_unit if begin + at > second), None)
            if found is not None:
                return int(found)
        return None

    @property
    def _times_of_unit(self) -> Iterator[int]:
        """The rule's times in an hour, minute or second, in seconds since its begin, ascending."""
        minutes = self._minutes if self._unit == 3_600 else (0,)
        seconds = self._seconds if self._unit > 1 else (0,)
        return (minute * 60 + second for minute, second in product(minutes, seconds))


def _aligned(value: int, anchor: int, interval: int) -> int:
    """Returns the least `anchor + n * interval` that is not below `value`."""
    return value + (anchor - value) % interval


def _new_year(year: int) -> int:
    return date(year, 1, 1).toordinal() - _EPOCH_DAY


@lru_cache(maxsize=64)
def _units(
    unit: int, interval: int, hours: tuple[int, ...], minutes: tuple[int, ...], seconds: tuple[int, ...]
) -> tuple[BoolArray, BoolArray]:
    """Finds the units of a day that have times of a rule.

    Args:
        unit: its seconds.
        interval: in units.
        hours: of the rule; also `minutes` and `seconds`.

    Returns:
        bool, (units of a day,): the unit has some; and bool, (units of a day or of the interval, whichever are fewer,):
        one of the units of the day has some that begin with this one and are an interval apart.
    """
    day_times = np.zeros(24, np.bool_)
    day_times[list(hours)] = True
    for length, chosen in ((3_600, minutes), (60, seconds)):
        if unit < length:
            within = np.zeros(60, np.bool_)
            within[list(chosen)] = True
            day_times = (day_times[:, None] & within).ravel()
    if interval >= len(day_times):
        return day_times, day_times
    begins = np.zeros(interval, np.bool_)
    begins[np.flatnonzero(day_times) % interval] = True
    return day_times, begins


@lru_cache(maxsize=4_096)
def _never(days: Days) -> bool:
    return days.never


@lru_cache(maxsize=4_096)
def _days(parts: Parts, first: date) -> Days:
    by_month, by_month_day, by_day = parts.by_month, parts.by_month_day, parts.by_day
    names_days = parts.by_year_day or by_month_day or by_day
    if parts.frequency == "YEARLY" and not names_days:
        if parts.by_week_number:
            by_day = ((first.weekday(), 0),)
        else:
            by_month, by_month_day = by_month or (first.month,), (first.day,)
    elif parts.frequency == "MONTHLY" and not names_days:
        by_month_day = (first.day,)
    elif parts.frequency == "WEEKLY" and not by_day:
        by_day = ((first.weekday(), 0),)
    is_by_month = parts.frequency == "MONTHLY" or bool(by_month)
    return Days(by_month, by_month_day, parts.by_year_day, parts.by_week_number, by_day, is_by_month, parts.week_start)
