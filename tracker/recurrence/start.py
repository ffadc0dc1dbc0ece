"""Computes when a recurring message has its first occurrence."""

from __future__ import annotations

from collections.abc import Mapping

from conf.errors import one_line
from tracker.properties.delivered import MESSAGE_ID, OCCURRENCE
from tracker.properties.schedule import DELIVER_AFTER, DELIVER_AT, TOO_FAR, BadScheduleError, deliver_at
from tracker.recurrence.errors import RecurrenceError
from tracker.recurrence.recurrence import REPEAT, REPEAT_UNTIL, SHORTEST_MILLIS, Recurrence, recurrence_of


def is_occurrence(properties: Mapping[str, str]) -> bool:
    """Tells whether a message is a delivered occurrence that comes in: from a destination, or because it is sent again.

    It has the properties of its schedule, but begins no new one: the schedule continues where it began.
    """
    return MESSAGE_ID in properties and OCCURRENCE in properties


def counts_from(last: int, published: int, now: int) -> int:
    """Returns the time after which occurrences count as missed, ms since the epoch.

    That is the last occurrence or the publish time, whichever is later. A producer's clock may be ahead, so a publish
    time after `now` counts as `now`.

    Args:
        last: when the last occurrence was due, ms since the epoch.
        published: when the message was published, ms since the epoch.
        now: ms since the epoch.
    """
    return max(last, min(published, now))


def accepted_first(
    properties: Mapping[str, str], published: int, max_delay_millis: int, shortest_millis: int = SHORTEST_MILLIS
) -> int:
    """Returns when the first occurrence of a new recurring message is, ms since the epoch.

    Args:
        properties: the message's. `deliverAt` or `deliverAfter` is the time of the first occurrence.
        published: when it was published, ms since the epoch.
        max_delay_millis: the longest delay of the first occurrence that is accepted, ms; 0: any.
        shortest_millis: the shortest time between two occurrences that is accepted, ms.

    Raises:
        BadScheduleError: a property can't be read, or the rule is none that is accepted, or the first occurrence would
            be after the schedule's end, or too late.
    """
    recurrence_of(properties).check(shortest_millis)
    return first_of(properties, published, max_delay_millis)


def stored(properties: Mapping[str, str], published: int) -> tuple[Recurrence, int]:
    """Returns the rule of a message that was taken in, and when its first occurrence is, ms since the epoch.

    What an earlier version has taken in may be none that this one reads, as of a time zone that is no more: then the
    schedule has ended. A message without any properties has lost them, and has ended, too.

    Args:
        properties: the message's.
        published: when it was published, ms since the epoch.
    """
    try:
        rule = recurrence_of(properties)
    except BadScheduleError as error:
        return Recurrence.unreadable(properties, str(error)), published
    except Exception as error:  # whatever it is, it is of this message alone
        why = f"{REPEAT} fails with {type(error).__name__}: {one_line(error)[:200]}"
        return Recurrence.unreadable(properties, why), published
    try:
        return rule, first_of(properties, published)
    except Exception:
        return rule, published


def first_of(properties: Mapping[str, str], published: int, max_delay_millis: int = 0) -> int:
    """Returns when the first occurrence of a recurring message is, ms since the epoch.

    Args:
        properties: the message's. `deliverAt` or `deliverAfter` is the time of the first occurrence.
        published: when it was published, ms since the epoch.
        max_delay_millis: the longest delay of the first occurrence that is accepted, ms; 0: any.

    Raises:
        BadScheduleError: a property can't be read, or the first occurrence would be after the schedule's end, or too
            late.
    """
    rule = recurrence_of(properties)
    has_time = DELIVER_AT in properties or DELIVER_AFTER in properties
    named = deliver_at(properties, published, published, max_delay_millis) if has_time else None
    first = rule.first(published, named)
    if first is None:
        # The schedule may end by `repeatUntil`, by the rule's UNTIL, or with the year 9999: the error names the first.
        if rule.until_millis is None:
            raise RecurrenceError(REPEAT, "has no occurrence up to the year 9999, or in 400 years")
        if properties.get(REPEAT_UNTIL) is None or int(properties[REPEAT_UNTIL]) > rule.until_millis:
            raise RecurrenceError(REPEAT, "has an UNTIL before the first occurrence")
        raise RecurrenceError(REPEAT_UNTIL, "is before the first occurrence")
    if 0 < max_delay_millis < first - published:
        raise BadScheduleError(TOO_FAR.format(max_delay_millis))
    return first
