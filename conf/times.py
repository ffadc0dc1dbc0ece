"""Moments, and times and durations as texts."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, tzinfo
from fractions import Fraction
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


_DURATION = re.compile(r"([0-9]{1,18})(?:(\.[0-9]{1,18})?(ms|s|m|h|d))?")

_UNIT_MILLIS = {None: 1, "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

# Allowed values, for errors.
EXAMPLES = "as 90s, 5m, 2h, 1d or milliseconds"


def parse_duration(text: str) -> int:
    """Returns a duration in ms, rounded to a whole number.

    Args:
        text: a number with the unit ms, s, m, h or d, as `90s` or `1.5h`; or a whole number of milliseconds.

    Raises:
        ValueError: the text is not a duration; the message says what is allowed.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"must be a duration, {EXAMPLES}")
    return round(Fraction(match[1] + (match[2] or "")) * _UNIT_MILLIS[match[3]])
