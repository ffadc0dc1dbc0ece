"""When a message is due, and when it expires: reads `deliverAt`, `deliverAfter`, `expireAt` and `expireAfter`."""

from __future__ import annotations

from collections.abc import Mapping

from conf.errors import DelayLakeError
from conf.times import EXAMPLES, parse_duration

DELIVER_AT = "deliverAt"

DELIVER_AFTER = "deliverAfter"

EXPIRE_AT = "expireAt"

EXPIRE_AFTER = "expireAfter"

MAX_TIME_MILLIS = 253_402_300_799_999  # the end of the year 9999

# Pulsar's own wording.
TOO_FAR = "Exceeds max allowed delivery delay of {} milliseconds"


class BadScheduleError(DelayLakeError):
    """A property about a message's delivery is not valid. The error's message is the reason, one line."""


def deliver_at(properties: Mapping[str, str], publish_time: int, now: int, max_delay_millis: int = 0) -> int:
    """Returns the time at which a message is due. A message without deliverAt and deliverAfter is due at once.

    Args:
        properties: the message's. `deliverAt` is ms since the epoch, `deliverAfter` ms from the publish time; if it
            has both, `deliverAt` counts.
        publish_time: ms since the epoch, by the producer's clock, which may be ahead.
        now: when the message came in, ms since the epoch.
        max_delay_millis: the longest delay from the publish time that is accepted, ms; 0: any.

    Returns:
        ms since the epoch.

    Raises:
        BadScheduleError: the property is no whole number, or negative, or the delay is longer than accepted, or the
            time or the publish time is beyond the year 9999.
    """
    if publish_time > MAX_TIME_MILLIS:
        raise BadScheduleError(f"the publish time {publish_time} is beyond the year 9999")
    if (at := properties.get(DELIVER_AT)) is not None:
        due = _millis(DELIVER_AT, at)
    elif (after := properties.get(DELIVER_AFTER)) is not None:
        due = publish_time + _millis(DELIVER_AFTER, after)
    else:
        return min(publish_time, now)
    if due > MAX_TIME_MILLIS:
        raise BadScheduleError(f"deliverAt {due} is beyond the year 9999")
    if 0 < max_delay_millis < due - publish_time:
        raise BadScheduleError(TOO_FAR.format(max_delay_millis))
    return due


def expires_at(properties: Mapping[str, str], due: int) -> int | None:
    """Returns the time from which on a message is not sent, ms since the epoch; None: it has no such time.

    Args:
        properties: the message's. `expireAt` is ms since the epoch, `expireAfter` a duration from when the message is
            due; if it has both, the earlier end counts.
        due: when the message is due, ms since the epoch.

    Raises:
        BadScheduleError: `expireAt` is no whole number, negative, beyond the year 9999, or not after a time that the
            message itself names; or `expireAfter` is no duration above 0.
    """
    ends: list[int] = []
    if (at := properties.get(EXPIRE_AT)) is not None:
        end = _millis(EXPIRE_AT, at)
        if end > MAX_TIME_MILLIS:
            raise BadScheduleError(f"{EXPIRE_AT} {end} is beyond the year 9999")
        if end <= due and (DELIVER_AT in properties or DELIVER_AFTER in properties):
            raise BadScheduleError(f"{EXPIRE_AT} {end} is not after the time at which the message is due, {due}")
        ends.append(end)
    if (after := properties.get(EXPIRE_AFTER)) is not None:
        ends.append(min(due + duration(EXPIRE_AFTER, after), MAX_TIME_MILLIS))
    return min(ends, default=None)


def duration(name: str, text: str) -> int:
    """Reads a property that is a duration above 0, as `90s`, `5m`, `2h`, `1d`, or ms: ms.

    Args:
        name: the property's name, for the error.
        text: its value.

    Raises:
        BadScheduleError: the value is no such duration.
    """
    try:
        millis = parse_duration(text)
    except ValueError:
        millis = 0
    if not 0 < millis <= MAX_TIME_MILLIS:
        raise BadScheduleError(f"{name} is no duration above 0, {EXAMPLES}: {text[:40]!r}")
    return millis


def _millis(name: str, text: str) -> int:
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 19:
        raise BadScheduleError(f"{name} is no whole number of milliseconds: {text[:40]!r}")
    if text[0] == "-" and int(digits):
        raise BadScheduleError(f"{name} is negative: {text}")
    return int(digits)
