"""Decides what the properties of a message that comes in mean, whichever way it comes: from a topic or by an import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from conf.errors import one_line
from tracker.due_time import (
    DELIVER_AFTER,
    DELIVER_AT,
    EXPIRE_AFTER,
    EXPIRE_AT,
    MAX_TIME_MILLIS,
    BadScheduleError,
    deliver_at,
    expires_at,
)
from tracker.properties import (
    EXPIRES_AT,
    REQUEST_ID,
    RETRY_OF,
    SCHEDULE_KEY,
    RetryProperties,
    request_id,
    schedule_key,
    sent_back,
)
from tracker.recurrence.columns import accepted_first, is_occurrence
from tracker.recurrence.recurrence import REPEAT

# A message without any of these properties is due at once, and nothing else is said of its delivery.
MEANINGFUL = frozenset({DELIVER_AT, DELIVER_AFTER, EXPIRE_AT, EXPIRE_AFTER, REPEAT, SCHEDULE_KEY, RETRY_OF, REQUEST_ID})


_MOST = 200  # characters of an error in a reason


class Scheduling(NamedTuple):
    """What a message's properties say of its delivery."""

    deliver_at: int  # ms since the epoch
    reason: str | None = None  # why the message is rejected; the fields below are None then, but for `request_id`
    schedule_key: str | None = None
    occurrence: int | None = None  # 1: the message recurs
    retry: RetryProperties | None = None  # of a message that was sent back for a retry
    request_id: str | None = None  # of a topic's messages with the same one the first counts
    expires_at: int | None = None  # ms since the epoch; None: it has no end, or it recurs, and each occurrence has one


def with_native_time(properties: dict[str, str], native: int | None) -> dict[str, str]:
    """Returns the properties of a message, with the time that its client gave it where they have none themselves."""
    if native is None or DELIVER_AT in properties or DELIVER_AFTER in properties:
        return properties
    return {**properties, DELIVER_AT: str(native)}


def scheduling(
    properties: Mapping[str, str],
    published: int,
    now: int,
    max_delay_millis: int = 0,
    first: Callable[[Mapping[str, str], int], int] | None = None,
) -> Scheduling:
    """Reads and checks the properties of a message that comes in.

    Args:
        properties: the message's.
        published: when it was published, ms since the epoch.
        now: when it came in, ms since the epoch.
        max_delay_millis: the longest delay that is accepted, ms; 0: any.
        first: returns when the first occurrence of a recurring message is, by its properties and publish time, or
            raises BadScheduleError; None: as `accepted_first`.
    """
    requested: str | None = None
    try:
        if RETRY_OF in properties:
            retry = sent_back(properties)
            return Scheduling(min(published, now), retry=retry, expires_at=_end_of_retry(properties, retry, published))
        requested = request_id(properties) if REQUEST_ID in properties else None
        due, occurrence = deliver_at(properties, published, now, max_delay_millis), None
        if is_occurrence(properties):
            return Scheduling(due, request_id=requested)
        if REPEAT in properties:
            if EXPIRE_AT in properties:
                raise BadScheduleError(f"{EXPIRE_AT} does not go with {REPEAT}: {EXPIRE_AFTER} is for each occurrence")
            occurrence = 1
            due = first(properties, published) if first else accepted_first(properties, published, max_delay_millis)
        key = schedule_key(properties) if SCHEDULE_KEY in properties else None
        end = expires_at(properties, due) if EXPIRE_AT in properties or EXPIRE_AFTER in properties else None
    except BadScheduleError as error:
        return Scheduling(min(published, now), str(error), request_id=requested)
    except Exception as error:  # so that the message fails alone, and keeps what could be read
        what = f"{type(error).__name__}: {one_line(error)[:_MOST]}"
        reason = f"{_what_fails(properties)} fails with {what}"
        return Scheduling(min(published, now), reason, request_id=requested)
    end = end if occurrence is None else None
    return Scheduling(due, None, key, occurrence, request_id=requested, expires_at=end)


def _end_of_retry(properties: Mapping[str, str], retry: RetryProperties, published: int) -> int | None:
    """Returns when a message expires that was sent back: as before, and never where it was re-driven."""
    if retry.attempt == 0:
        return None
    known = properties.get(EXPIRES_AT, "")
    if known.isascii() and known.isdigit() and int(known) <= MAX_TIME_MILLIS:
        return int(known)
    given = {name: properties[name] for name in (EXPIRE_AT, EXPIRE_AFTER) if name in properties}
    return expires_at(given, published) if given else None


def _what_fails(properties: Mapping[str, str]) -> str:
    """Names the property whose check has failed in a way that nobody expected."""
    names = (RETRY_OF, REPEAT, SCHEDULE_KEY, DELIVER_AT, DELIVER_AFTER, EXPIRE_AT, EXPIRE_AFTER, REQUEST_ID)
    return next((name for name in names if name in properties), "its time")
