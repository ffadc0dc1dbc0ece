"""Properties of messages beside the due time: position, schedule key, those of delivered messages and of retries."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from tracker.due_time import BadScheduleError, duration


class MessagePosition(NamedTuple):
    """The position of a message. As text it is `ledger:entry:partition:batchIndex`."""

    ledger_id: int
    entry_id: int
    partition: int  # -1: the topic is not partitioned
    batch_index: int  # -1: the entry is one message

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> MessagePosition:
        """Reads a position as `str` writes it.

        Raises:
            ValueError: it is not four numbers.
        """
        ledger_id, entry_id, partition, batch_index = map(int, text.split(":"))
        return cls(ledger_id, entry_id, partition, batch_index)


# The SQL expression of a row's position as text.
POSITION_SQL = f"concat_ws(':', {', '.join(MessagePosition._fields)})"

_TEXT = re.compile(r"[0-9]{1,18}:[0-9]{1,18}:(-1|[0-9]{1,9}):(-1|[0-9]{1,9})")


def is_position(text: str) -> bool:
    """Tells whether a text is a position as `str` writes it, with numbers that fit the tables' columns."""
    return _TEXT.fullmatch(text) is not None


def position_of(columns: Mapping[str, Sequence[Any]], row: int) -> MessagePosition:
    """Returns the position of a row.

    Args:
        columns: the columns of MESSAGES, by name.
        row: index of the row.
    """
    return MessagePosition(*(columns[name][row] for name in MessagePosition._fields))


RESERVED_PREFIX = "delaylake."

SOURCE = "delaylake.source"

MESSAGE_ID = "delaylake.messageId"  # ledger:entry:partition:batchIndex

DELIVER_AT = "delaylake.deliverAt"

SHAPED_FROM = "delaylake.shapedFrom"  # when it was due before its subscription's rate or windows moved it

OCCURRENCE = "delaylake.occurrence"  # of a recurring message

EXPIRES_AT = "delaylake.expiresAt"  # from when on the message is not sent, also not once more

KEY_ENCODING = "delaylake.keyEncoding"  # of a key whose bytes are not text

BASE64 = "base64"  # the value of KEY_ENCODING

# Of a retry: its number; the reasons for it and for earlier ones.
ATTEMPT = "delaylake.attempt"

REASONS = "delaylake.reasons"

DEAD_LETTER_OF = "delaylake.subscription"  # of a dead letter: the subscription whose consumers failed

REASON = "delaylake.reason"  # of a rejected message: why it is rejected

SCHEDULE_KEY = "scheduleKey"

SCHEDULE_MODE = "scheduleMode"

DEBOUNCE_MAX = "debounceMax"

MAX_KEY_BYTES = 512


REQUEST_ID = "requestId"


def request_id(properties: Mapping[str, str]) -> str | None:
    """Returns the request id of a message; None: it has none.

    A copy of a delivered message has none of its own: it has come back for a retry, or to another source topic.

    Raises:
        BadScheduleError: the id is empty or too long.
    """
    chosen = properties.get(REQUEST_ID)
    if chosen is None or MESSAGE_ID in properties:
        return None
    if not 0 < len(chosen.encode()) <= MAX_REQUEST_BYTES:
        raise BadScheduleError(f"{REQUEST_ID} is empty or has more than {MAX_REQUEST_BYTES} bytes")
    return chosen


class Mode(StrEnum):
    """Which of two messages with the same schedule key is delivered, if one waits and another comes in."""

    REPLACE = "replace"  # the new one
    KEEP = "keep"  # the one that waits
    DEBOUNCE = "debounce"  # the new one, due at the latest `debounceMax` after the key's first message was published


class KeyRule(NamedTuple):
    """How a message with a schedule key supersedes, or yields to, the one of its key that waits."""

    mode: Mode
    debounce_max_millis: int | None  # None: no limit


def schedule_key(properties: Mapping[str, str]) -> str | None:
    """Returns the schedule key of a message; None: it has none.

    Raises:
        BadScheduleError: the key is empty or too long, or `scheduleMode` or `debounceMax` can't be read.
    """
    key = properties.get(SCHEDULE_KEY)
    if key is None:
        return None
    check_key(key)
    key_rule(properties)
    return key


def check_key(key: str) -> None:
    """Checks that a text can be a schedule key.

    Raises:
        BadScheduleError: it is empty or too long.
    """
    if not key:
        raise BadScheduleError(f"{SCHEDULE_KEY} is empty")
    if len(key) > MAX_KEY_BYTES or len(key.encode()) > MAX_KEY_BYTES:
        raise BadScheduleError(f"{SCHEDULE_KEY} has more than {MAX_KEY_BYTES} bytes")


def key_rule(properties: Mapping[str, str]) -> KeyRule:
    """Reads `scheduleMode` and `debounceMax`.

    Raises:
        BadScheduleError: one of them can't be read.
    """
    mode = properties.get(SCHEDULE_MODE, Mode.REPLACE)
    if mode not in list(Mode):
        raise BadScheduleError(f"{SCHEDULE_MODE} is none of {', '.join(Mode)}: {mode[:40]!r}")
    longest = properties.get(DEBOUNCE_MAX)
    return KeyRule(Mode(mode), None if longest is None else duration(DEBOUNCE_MAX, longest))


def key_hash(topic: str, key: str) -> tuple[int, int]:
    """Returns a 128-bit hash of a topic's schedule key, as two signed 64-bit numbers."""
    # A topic's name has no NUL, so different pairs give different texts.
    digest = hashlib.blake2b(f"{topic}\0{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)


RETRY_OF = "retryOf"

RETRY_SUBSCRIPTION = "retrySubscription"

RETRY_REASON = "retryReason"

RETRY_AFTER = "retryAfter"

# A re-driven dead letter has these instead of reason and wait: the id of the re-drive's request, and its issuer.
REDRIVE_REQUEST = "redriveRequest"

REDRIVE_BY = "redriveBy"

# Properties that are removed from a retry before it is delivered: a consumer that sends it back copies its properties.
NOT_PASSED_ON = (RETRY_SUBSCRIPTION, RETRY_REASON, RETRY_AFTER, REDRIVE_REQUEST, REDRIVE_BY)

MAX_REQUEST_BYTES = 256  # of the id of a re-drive's request, or of a message's

MAX_BY_BYTES = 1_024  # of the name of a re-drive's issuer

MAX_AFTER_MILLIS = 366 * 24 * 3600 * 1000  # the longest wait of a retry

MAX_REASON = 1_000  # characters of a retry's reason; more are cut off

_MAX_REASONS = 8_000  # characters of all reasons as JSON; beyond these the oldest reasons are left out

_MOST_READ = 100_000  # characters of what a message says its reasons are; the job's own are far fewer

_ID = re.compile(r"[0-9]{1,18}:[0-9]{1,18}(:-?[0-9]{1,9}){0,2}")

_NUMBER = re.compile(r"[0-9]{1,4}")


class RetryProperties(NamedTuple):
    """The properties of a message that was sent back."""

    attempt: int  # number of the retry, from 1; 0: a re-driven dead letter, whose attempts begin again
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
