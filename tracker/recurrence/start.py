"""When a recurring message begins."""

from __future__ import annotations

from collections.abc import Mapping

from tracker.properties.delivered import MESSAGE_ID, OCCURRENCE
from tracker.properties.schedule import DELIVER_AFTER, DELIVER_AT, TOO_FAR, BadScheduleError, deliver_at
from tracker.recurrence.errors import RecurrenceError
from tracker.recurrence.recurrence import REPEAT, REPEAT_UNTIL, recurrence_of


def is_occurrence(properties: Mapping[str, str]) -> bool:
    """Whether a message is a delivered occurrence, whose destination is a source topic, too, or that was sent again.

    It has the properties of its schedule, but the schedule goes on where it began.
    """
    return MESSAGE_ID in properties and OCCURRENCE in properties


def counts_from(last: int, published: int, now: int) -> int:
    """Returns from when on occurrences are looked for that were missed since the last one, ms since the epoch.

    Nothing is missed before the message was published. Its producer's clock may be ahead, so at the latest it is now.

    Args:
        last: when the last occurrence was due.
        published: when the message was published.
        now: the time of the caller.
    """
    return max(last, min(published, now))


def first_of(properties: Mapping[str, str], published: int, max_delay_millis: int = 0) -> int:
    """Returns when the first occurrence of a recurring message is, ms since the epoch.

    Args:
        properties: the message's. A time that they name is that of the first occurrence.
        published: when it was published, ms since the epoch.
        max_delay_millis: the longest delay until then that is accepted, ms; 0: any.

    Raises:
        BadScheduleError: a property can't be read, or the first occurrence would be after the end or too late.
    """
    rule = recurrence_of(properties)
    has_time = DELIVER_AT in properties or DELIVER_AFTER in properties
    named = deliver_at(properties, published, published, max_delay_millis) if has_time else None
    first = rule.first(published, named)
    if first is None:
        # The rule's own end counts, too, where it is the first one; and nothing is after the year 9999.
        if rule.until_millis is None:
            raise RecurrenceError(REPEAT, "has no occurrence up to the year 9999")
        if properties.get(REPEAT_UNTIL) is None or int(properties[REPEAT_UNTIL]) > rule.until_millis:
            raise RecurrenceError(REPEAT, "has an UNTIL before the first occurrence")
        raise RecurrenceError(REPEAT_UNTIL, "is before the first occurrence")
    if 0 < max_delay_millis < first - published:
        raise BadScheduleError(TOO_FAR.format(max_delay_millis))
    return first
