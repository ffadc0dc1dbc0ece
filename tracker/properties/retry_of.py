"""Reads and checks the properties of messages that a consumer sends back for a retry."""

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

# A re-driven dead letter has these instead of reason and wait: the id of the re-drive's request, and its issuer.
REDRIVE_REQUEST = "redriveRequest"
REDRIVE_BY = "redriveBy"

# Properties that are removed from a retry before it is delivered: a consumer that sends it back copies its properties.
NOT_PASSED_ON = (RETRY_SUBSCRIPTION, RETRY_REASON, RETRY_AFTER, REDRIVE_REQUEST, REDRIVE_BY)

MAX_REQUEST_BYTES = 256  # of the id of a re-drive's request
MAX_BY_BYTES = 1_024  # of the name of a re-drive's issuer
MAX_AFTER_MILLIS = 366 * 24 * 3600 * 1000  # the longest wait of a retry
MAX_REASON = 1_000  # characters of a retry's reason; more are cut off

_MAX_REASONS = 8_000  # characters of all reasons as JSON; beyond these the oldest reasons are left out
_MOST_READ = 100_000  # characters of what a message says its reasons are; the job's own are far fewer
_ID = re.compile(r"[0-9]{1,18}:[0-9]{1,18}(:-?[0-9]{1,9}){0,2}")
_NUMBER = re.compile(r"[0-9]{1,4}")


class RetryProperties(NamedTuple):
    """The properties of a message that was sent back."""

    attempt: int  # number of the retry, from 1; 0: a re-driven dead letter, whose attempts begin anew
    reasons: str | None  # JSON list of the reasons for this retry and earlier ones; None: re-driven


def sent_back(properties: Mapping[str, str]) -> RetryProperties:
    """Reads the properties of a message that was sent back to its source topic.

    Args:
        properties: the message's, with RETRY_OF.

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
        for name, most in ((REDRIVE_REQUEST, MAX_REQUEST_BYTES), (REDRIVE_BY, MAX_BY_BYTES)):
            if len(properties.get(name, "").encode()) > most:
                raise BadScheduleError(f"{name} has more than {most:,} bytes")
        return RetryProperties(0, None)
    wait_millis(properties)
    before = properties.get(ATTEMPT, "0")
    attempt = int(before) + 1 if _NUMBER.fullmatch(before) else 1
    return RetryProperties(attempt, with_reason(properties.get(REASONS), properties.get(RETRY_REASON, "")))


def wait_millis(properties: Mapping[str, str]) -> int:
    """Returns the wait that a message which was sent back asks for, ms; 0: the subscription's backoff decides.

    Raises:
        BadScheduleError: the property can't be read, or is longer than MAX_AFTER_MILLIS.
    """
    if (after := properties.get(RETRY_AFTER)) is None:
        return 0
    millis = duration(RETRY_AFTER, after)
    if millis > MAX_AFTER_MILLIS:
        raise BadScheduleError(f"{RETRY_AFTER} is more than 366 days: {after}")
    return millis


def with_reason(so_far: str | None, reason: str) -> str:
    """Adds a reason to a JSON list of reasons; a text that is no such list counts as an empty one."""
    try:
        listed = json.loads(so_far or "[]") if len(so_far or "") <= _MOST_READ else []
    except (ValueError, RecursionError):
        listed = []
    reasons = [str(one)[:MAX_REASON] for one in listed] if isinstance(listed, list) else []
    kept, size = [reason[:MAX_REASON]], len(json.dumps([reason[:MAX_REASON]], ensure_ascii=False))
    for earlier in reversed(reasons):
        size += len(json.dumps(earlier, ensure_ascii=False)) + len(", ")
        if size > _MAX_REASONS:
            break
        kept.append(earlier)
    return json.dumps(kept[::-1], ensure_ascii=False)
