"""Reads and checks the properties of messages with a schedule key."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from tracker.properties.schedule import BadScheduleError, duration

SCHEDULE_KEY = "scheduleKey"
SCHEDULE_MODE = "scheduleMode"
DEBOUNCE_MAX = "debounceMax"

MAX_KEY_BYTES = 512


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
