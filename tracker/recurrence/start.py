"""When a recurring message begins."""

from __future__ import annotations

from collections.abc import Mapping

from tracker.recurrence.errors import RecurrenceError
from tracker.recurrence.recurrence import REPEAT, REPEAT_UNTIL, Recurrence
from tracker.schedule import DELIVER_AFTER, DELIVER_AT, TOO_FAR, BadSchedule, deliver_at


def first_of(properties: Mapping[str, str], published: int, max_delay_millis: int = 0) -> int:
    """Returns when the first occurrence of a recurring message is, ms since the epoch.

    Args:
        properties: the message's. A time that they name is that of the first occurrence.
        published: when it was published, ms since the epoch.
        max_delay_millis: the longest delay until then that is accepted, ms; 0: any.

    Raises:
        BadSchedule: a property can't be read, or the first occurrence would be after `repeatUntil` or too late.
    """
    rule = Recurrence.of_properties(properties)
    if rule is None:
        raise RecurrenceError(REPEAT, "is missing")
    has_time = DELIVER_AT in properties or DELIVER_AFTER in properties
    named = deliver_at(properties, published, published, max_delay_millis) if has_time else None
    first = rule.first(published, named)
    if first is None:
        raise RecurrenceError(REPEAT_UNTIL, "is before the first occurrence")
    if 0 < max_delay_millis < first - published:
        raise BadSchedule(TOO_FAR.format(max_delay_millis))
    return first
