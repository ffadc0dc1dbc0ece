"""Converts between datetimes with a zone and ms since the epoch, UTC, as messages have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta, timezone

_DURATION = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18}(?=[a-z]))?)(ms|s|m|h|d)?")
_UNIT_MILLIS = {None: 1, "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MILLI = timedelta(milliseconds=1)

MAX_MILLIS = 253_402_300_799_999  # the end of the year 9999


_clock: ContextVar[Callable[[], datetime] | None] = ContextVar("_clock", default=None)


def now() -> datetime:
    """Returns the time, by this machine's clock unless `clock` says otherwise."""
    read = _clock.get()
    return datetime.now(timezone.utc) if read is None else read()


@contextmanager
def clock(read: Callable[[], datetime]) -> Iterator[None]:
    """Lets `now` be what a function returns, while the block runs."""
    token = _clock.set(read)
    try:
        yield
    finally:
        _clock.reset(token)


def millis(name: str, moment: datetime) -> int:
    """Returns a time as ms since the epoch, rounded up, so that nothing is early.

    Args:
        name: the argument's name, for errors.

    Raises:
        TypeError: it is not a datetime.
        ValueError: it has no zone, is before 1970, or beyond the year 9999 in UTC.
    """
    if not isinstance(moment, datetime):
        raise TypeError(f"{name} is no datetime: {moment!r}")
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise ValueError(f"{name} has no time zone: {moment!r} (datetime.now(timezone.utc), or astimezone())")
    since = -((_EPOCH - moment) // _MILLI)
    if since < 0:
        raise ValueError(f"{name} is before 1970: {moment!r}")
    if since > MAX_MILLIS:
        raise ValueError(f"{name} is beyond the year 9999: {moment!r}")
    return since


def duration_millis(name: str, duration: timedelta) -> int:
    """Returns a duration as ms, rounded down.

    Args:
        name: the argument's name, for errors.

    Raises:
        TypeError: it is not a timedelta.
        ValueError: it is negative, or reaches beyond the year 9999.
    """
    if not isinstance(duration, timedelta):
        raise TypeError(f"{name} is no timedelta: {duration!r}")
    if duration < timedelta(0):
        raise ValueError(f"{name} is negative: {duration!r}")
    if duration // _MILLI > MAX_MILLIS:
        raise ValueError(f"{name} is beyond the year 9999: {duration!r}")
    return duration // _MILLI


def shift_millis(name: str, shift: timedelta) -> int:
    """Returns by how many ms something is put off, rounded towards 0; negative: sooner.

    Args:
        name: the argument's name, for errors.

    Raises:
        TypeError: it is not a timedelta.
        ValueError: it is less than a millisecond, or reaches beyond the year 9999.
    """
    if not isinstance(shift, timedelta):
        raise TypeError(f"{name} is no timedelta: {shift!r}")
    size = duration_millis(name, abs(shift))
    if not size:
        raise ValueError(f"{name} is less than a millisecond")
    return size if shift > timedelta(0) else -size


def parse_millis(text: str) -> int | None:
    """Returns a duration as the service reads it, such as `90s` or `1.5h`, in ms; None: the text is none."""
    found = _DURATION.fullmatch(text.strip())
    return None if found is None else round(float(found[1]) * _UNIT_MILLIS[found[2]])


def moment(since_epoch: int) -> datetime:
    """Returns a time in UTC from ms since the epoch."""
    return _EPOCH + since_epoch * _MILLI


def due(at: datetime | None, after: timedelta | None) -> int:
    """Returns when a message is due, ms since the epoch: `at`, or `after` from now by this machine's clock.

    Raises:
        TypeError: `at` is not a datetime, or `after` not a timedelta.
        ValueError: both or none are given, `at` has no zone, `after` is negative, or the time is beyond the year 9999.
    """
    if at is not None and after is None:
        return millis("at", at)
    if after is None or at is not None:
        raise ValueError("one of at and after is needed")
    duration_millis("after", after)
    try:
        return millis("after", now() + after)
    except OverflowError:
        raise ValueError(f"after is beyond the year 9999: {after!r}") from None
