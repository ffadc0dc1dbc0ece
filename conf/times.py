"""Times as people write them."""

from __future__ import annotations

from datetime import datetime


def parse_time(text: str) -> int:
    """Returns a time as ms since the epoch.

    Args:
        text: such a number, not negative, or ISO 8601 with a zone.

    Raises:
        ValueError: the text is neither; the message says what to give.
    """
    if text.strip().isdecimal():
        return int(text)
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise ValueError(
            f"{text!r} is no time: give ms since the epoch, or ISO 8601 with a zone, as in 2030-01-31T12:00:00Z"
        )
    return round(time.timestamp() * 1000)
