"""The properties of a message that has a schedule key, and what makes them wrong."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from tracker.schedule import MAX_TIME_MILLIS, BadSchedule

SCHEDULE_KEY = "scheduleKey"
SCHEDULE_MODE = "scheduleMode"
DEBOUNCE_MAX = "debounceMax"

MAX_KEY_BYTES = 512

_DURATION = re.compile(r"([0-9]{1,18})(ms|s|m|h|d)?")
_UNIT_MILLIS = {None: 1, "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class Mode(StrEnum):
    """What a message does to the one of its key that waits."""

    REPLACE = "replace"  # takes its place
    KEEP = "keep"  # yields to it
    DEBOUNCE = "debounce"  # takes its place, but is due at the latest `debounceMax` after the first one was published


class KeyRule(NamedTuple):
    """How a message with a schedule key gets on with others of the key."""

    mode: Mode
    debounce_max_millis: int | None  # None: no limit


def schedule_key(properties: Mapping[str, str]) -> str | None:
    """Returns the schedule key of a message; None: it has none.

    Raises:
        BadSchedule: the key is empty or too long, or one of the properties that go with it can't be read.
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
        BadSchedule: it is empty or too long.
    """
    if not key:
        raise BadSchedule(f"{SCHEDULE_KEY} is empty")
    if len(key) > MAX_KEY_BYTES or len(key.encode()) > MAX_KEY_BYTES:
        raise BadSchedule(f"{SCHEDULE_KEY} has more than {MAX_KEY_BYTES} bytes")


def key_rule(properties: Mapping[str, str]) -> KeyRule:
    """Reads how a message with a schedule key gets on with others of the key.

    Raises:
        BadSchedule: a property can't be read.
    """
    mode = properties.get(SCHEDULE_MODE, Mode.REPLACE)
    if mode not in list(Mode):
        raise BadSchedule(f"{SCHEDULE_MODE} is none of {', '.join(Mode)}: {mode[:40]!r}")
    longest = properties.get(DEBOUNCE_MAX)
    return KeyRule(Mode(mode), None if longest is None else _duration(longest))


def key_hash(topic: str, key: str) -> tuple[int, int]:
    """Returns a hash of 128 bits of a topic's schedule key, as two numbers of 64 bits, signed."""
    # Topics are names without a NUL.
    digest = hashlib.blake2b(f"{topic}\0{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)


def _duration(text: str) -> int:
    match = _DURATION.fullmatch(text)
    millis = int(match[1]) * _UNIT_MILLIS[match[2]] if match else 0
    if not 0 < millis <= MAX_TIME_MILLIS:
        raise BadSchedule(f"{DEBOUNCE_MAX} is no duration above 0, as 90s, 5m, 2h, 1d or milliseconds: {text[:40]!r}")
    return millis
