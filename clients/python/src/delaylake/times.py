"""Times as people have them, with a zone, and as messages have them: ms since the epoch, UTC."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MILLI = timedelta(milliseconds=1)


def millis(moment: datetime) -> int:
    """Returns a time as ms since the epoch; a part of a millisecond counts as a whole one, so that nothing is early.

    Raises:
        ValueError: it has no zone, so it may be any of 24 hours; or it is before 1970.
    """
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise ValueError(f"{moment!r} has no time zone: datetime.now(timezone.utc), or astimezone()")
    since = -((_EPOCH - moment) // _MILLI)
    if since < 0:
        raise ValueError(f"{moment!r} is before 1970")
    return since


def moment(since_epoch: int) -> datetime:
    """Returns the time that is so many ms after the epoch, in UTC."""
    return _EPOCH + since_epoch * _MILLI


def due(at: datetime | None, after: timedelta | None) -> int:
    """Returns when a message is due, ms since the epoch: `at`, or `after` from now by this machine's clock.

    Raises:
        ValueError: both or none are given, `at` has no zone, or `after` is negative.
    """
    if at is not None and after is None:
        return millis(at)
    if after is None or at is not None:
        raise ValueError("one of at and after is needed")
    if after < timedelta(0):
        raise ValueError(f"{after!r} is negative")
    return millis(datetime.now(timezone.utc) + after)
