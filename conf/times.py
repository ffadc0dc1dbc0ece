"""Times: moments, and how times and time zones are read and written."""

from __future__ import annotations

import time
from datetime import UTC, datetime, tzinfo
from typing import NamedTuple

from conf.time_zones import time_zone

LOCAL = "local"


class Moment(NamedTuple):
    """A time, by two clocks of one machine."""

    millis: int  # since the epoch
    seconds: float  # of a clock that never jumps

    @classmethod
    def now(cls) -> Moment:
        """Returns the time."""
        return cls(time.time_ns() // 1_000_000, time.monotonic())


def parse_time(text: str) -> int:
    """Returns a time as ms since the epoch.

    Args:
        text: that number, not negative, or ISO 8601 with a zone.

    Raises:
        ValueError: the text is neither; the message says what is allowed.
    """
    if text.strip().isdecimal():
        return int(text)
    try:
        parsed = datetime.fromisoformat(text.strip())
    except ValueError:
        parsed = None
    if parsed is None or parsed.tzinfo is None:
        raise ValueError(
            f"{text!r} is no time: give ms since the epoch, or ISO 8601 with a zone, as in 2030-01-31T12:00:00Z"
        )
    return round(parsed.timestamp() * 1000)


def parse_zone(name: str) -> tzinfo | None:
    """Returns a time zone by its name, as Europe/Berlin; None for "local", the machine's zone.

    Raises:
        ValueError: there is no such zone; the message says what is allowed.
    """
    if name == LOCAL:
        return None
    try:
        return UTC if name == "UTC" else time_zone(name)
    except KeyError:
        raise ValueError(f"{name!r} is no time zone: give UTC, {LOCAL}, or a name as Europe/Berlin") from None


def time_text(millis: int, zone: tzinfo | None = UTC) -> str:
    """Returns a time in ISO 8601 with its zone; a time beyond the year 9999 as a number.

    Args:
        millis: the time, ms since the epoch.
        zone: the zone; None: the machine's.
    """
    try:
        time = datetime.fromtimestamp(millis / 1000, zone)
        time = time.astimezone() if zone is None else time
    except (ValueError, OverflowError, OSError):
        return str(millis)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
