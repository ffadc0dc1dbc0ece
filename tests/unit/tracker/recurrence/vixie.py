"""Vixie cron's main loop, minute by minute, as its manual and source have it; much too slow for anything but tests."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)
MOST_CAUGHT_UP = timedelta(hours=3)


def runs(expression: str, zone: ZoneInfo, start: datetime, end: datetime) -> list[datetime]:
    """When cron starts a job of five fields after `start` and up to `end` (both aware); each time once."""
    return list(dict.fromkeys(_runs(expression, zone, start, end)))


def _runs(expression: str, zone: ZoneInfo, start: datetime, end: datetime) -> Iterator[datetime]:
    minutes, hours, *_ = expression.split()
    wildcard = minutes.startswith("*") or hours.startswith("*")
    now = start.astimezone(UTC)
    virtual = _shown(now, zone)  # up to where jobs of certain times have run
    while now < end:
        now += MINUTE
        shown = _shown(now, zone)
        if wildcard:
            if matches(expression, shown):
                yield now
            continue
        assert abs(shown - virtual) < MOST_CAUGHT_UP
        while virtual < shown:  # also what the clock has passed over; nothing while it shows again what it has shown
            virtual += MINUTE
            if matches(expression, virtual):
                yield now


def _shown(now: datetime, zone: ZoneInfo) -> datetime:
    return now.astimezone(zone).replace(tzinfo=None)


def matches(expression: str, time: datetime) -> bool:
    """Whether minute and hour fields match; the others are stars."""
    minutes, hours, *others = expression.split()
    assert others == ["*", "*", "*"]
    return time.minute in _values(minutes, 59) and time.hour in _values(hours, 23)


@cache
def _values(field: str, last: int) -> set[int]:
    found: set[int] = set()
    for item in field.split(","):
        span, _, step = item.partition("/")
        low, _, high = span.partition("-")
        first = 0 if low == "*" else int(low)
        end = last if low == "*" else int(high or low)
        found.update(range(first, end + 1, int(step or 1)))
    return found
