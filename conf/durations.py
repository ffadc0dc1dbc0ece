"""Parses durations in settings, message properties and on the command line, which requires a unit."""

from __future__ import annotations

import re
from fractions import Fraction

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
