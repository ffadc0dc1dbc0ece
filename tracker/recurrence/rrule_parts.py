"""The parts of an RFC 5545 recurrence rule, read strictly."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

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
    given: dict[str, str] = {}
    for part in text.upper().strip().removeprefix("RRULE:").rstrip(";").split(";"):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise ValueError(f"has a part that is no NAME=VALUE: {part[:40]!r}")
        if name not in _NAMES:
            raise ValueError(f"has an unknown part {name[:40]!r}: there are {', '.join(sorted(_NAMES))}")
        if name in given:
            raise ValueError(f"has {name} twice")
        given[name] = value
    if given.get("FREQ") not in FREQUENCIES:
        raise ValueError(f"needs a FREQ of {', '.join(FREQUENCIES)}")
    parts = Parts(
        frequency=given["FREQ"],
        interval=_positive("INTERVAL", given.get("INTERVAL", "1")),
        times=_positive("COUNT", given["COUNT"]) if "COUNT" in given else None,
        until=_until(given["UNTIL"]) if "UNTIL" in given else None,
        week_start=_week_start(given.get("WKST", "MO")),
        by_day=_items(given, "BYDAY", _weekday),
        **{field: _items(given, name, _number(name)) for name, (field, _, _) in _NUMBERS.items()},
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


def _items(given: dict[str, str], name: str, read: Callable[[str], _Item]) -> tuple[_Item, ...]:
    return tuple(sorted({read(item) for item in given[name].split(",")})) if name in given else ()


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
