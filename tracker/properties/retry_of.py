"""Messages that are sent back for a retry: their properties, and what makes them wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from tracker.properties.delivered import ATTEMPT, REASONS
from tracker.properties.schedule import BadScheduleError, duration

RETRY_OF = "retryOf"
RETRY_SUBSCRIPTION = "retrySubscription"
RETRY_REASON = "retryReason"
RETRY_AFTER = "retryAfter"

# A dead letter that is sent back by a re-drive has these instead of reason and wait: the id of the re-drive's request,
# and who asked for it.
REDRIVE_REQUEST = "redriveRequest"
REDRIVE_BY = "redriveBy"

# What a message that was sent back is not delivered with: a consumer that sends it back again copies its properties.
NOT_PASSED_ON = (RETRY_SUBSCRIPTION, RETRY_REASON, RETRY_AFTER, REDRIVE_REQUEST, REDRIVE_BY)

MAX_AFTER_MILLIS = 366 * 24 * 3600 * 1000  # that a retry may wait
MAX_REASON = 1_000  # characters of why a retry is asked for; more are cut off

_MAX_REASONS = 8_000  # characters of all reasons, as JSON: the oldest are left out
_ID = re.compile(r"[0-9]{1,18}:[0-9]{1,18}(:-?[0-9]{1,9}){0,2}")
_NUMBER = re.compile(r"[0-9]{1,4}")


class RetryProperties(NamedTuple):
    """A message that is sent back: it is a retry of this number, for these reasons, a JSON list.

    The number of a dead letter that is re-driven is 0, without reasons: its attempts begin anew.
    """

    attempt: int
    reasons: str | None


def sent_back(properties: Mapping[str, str]) -> RetryProperties:
    """Reads the properties of a message that is sent back, as it comes from its source topic.

    Raises:
        BadScheduleError: one of them is missing or can't be read.
    """
    if not _ID.fullmatch(properties[RETRY_OF]):
        raise BadScheduleError(
            f"{RETRY_OF} is no message's id, ledger:entry:partition:batchIndex: {properties[RETRY_OF][:40]!r}"
        )
    if not properties.get(RETRY_SUBSCRIPTION):
        raise BadScheduleError(f"{RETRY_SUBSCRIPTION} is missing: the subscription whose consumer failed")
    if REDRIVE_REQUEST in properties:
        return RetryProperties(0, None)
    wait_millis(properties)
    before = properties.get(ATTEMPT, "0")
    attempt = int(before) + 1 if _NUMBER.fullmatch(before) else 1
    return RetryProperties(attempt, with_reason(properties.get(REASONS), properties.get(RETRY_REASON, "")))


def wait_millis(properties: Mapping[str, str]) -> int:
    """Returns how long a retry that is sent back is to wait, ms; 0: as the subscription's backoff says.

    Raises:
        BadScheduleError: the property can't be read, or says too long.
    """
    if (after := properties.get(RETRY_AFTER)) is None:
        return 0
    millis = duration(RETRY_AFTER, after)
    if millis > MAX_AFTER_MILLIS:
        raise BadScheduleError(f"{RETRY_AFTER} is more than 366 days: {after}")
    return millis


def with_reason(so_far: str | None, reason: str) -> str:
    """Adds a reason to a JSON list of them; what is no such list counts as empty."""
    try:
        listed = json.loads(so_far or "[]")
    except (ValueError, RecursionError):
        listed = []
    reasons = [str(one)[:MAX_REASON] for one in listed] if isinstance(listed, list) else []
    reasons.append(reason[:MAX_REASON])
    while len(text := json.dumps(reasons, ensure_ascii=False)) > _MAX_REASONS and len(reasons) > 1:
        del reasons[0]
    return text
