"""Builds messages to be delivered later, with their properties, and refuses wrong ones before they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, get_args
from zoneinfo import ZoneInfo

from delaylake.arguments import check_number, check_request_id, check_text, check_texts, checked_properties
from delaylake.commands import checked_key, full_name
from delaylake.payloads import Payload, PulsarSchema, payload_bytes, schema_type
from delaylake.times import MAX_MILLIS, due, duration_millis, millis, moment, now, parse_millis

Misfire = Literal["once", "all", "skip"]
ScheduleMode = Literal["replace", "keep", "debounce"]

_DELIVER_AT = "deliverAt"
_DELIVER_AFTER = "deliverAfter"
_REQUEST_ID = "requestId"
# The properties that arguments set; the admin API has a field for each.
PROPERTIES_WITH_FIELDS = (
    *(_DELIVER_AT, _DELIVER_AFTER, _REQUEST_ID),
    *("expireAt", "expireAfter"),
    *("scheduleKey", "scheduleMode", "debounceMax"),
    *("repeat", "timeZone", "repeatUntil", "repeatTimes", "misfire"),
)
_OURS = "delaylake."

_MAX_REPEAT_BYTES = 512  # of a rule in UTF-8
_SHORTEST_MILLIS = 1_000  # between two occurrences
_FREQUENCIES = ("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY", "SECONDLY")
_MAX_TIMES = 10**18 - 1

# A zone that is missing on machines with no or incomplete time zone data.
_LEGACY_ZONE = "US/Eastern"


@dataclass(frozen=True)
class Scheduled:
    """A message to be delivered later; its properties say when."""

    topic: str
    payload: bytes
    deliver_at: datetime | None  # None: it recurs, and its rule says when it is due
    key: str | None
    ordering_key: str | None
    properties: dict[str, str]
    event_time: int  # ms since the epoch; 0: none
    request_id: str = ""  # given by the caller; empty: none
    schema: PulsarSchema | str | None = None  # or the name of its type; None: none


@dataclass(frozen=True)
class Repeat:
    """How a message recurs.

    Attributes:
        rule: a cron expression, `@every` and a duration, or an RRULE.
        time_zone: IANA name of the rule's zone; None: UTC.
        until: no occurrence is later; None: no limit.
        times: the number of occurrences; None: no limit.
        misfire: what happens to occurrences whose time has passed, as while the service was down.
    """

    rule: str
    time_zone: str | None
    until: datetime | None
    times: int | None
    misfire: Misfire | None

    @classmethod
    def of(
        cls,
        rule: str | None,
        time_zone: str | None,
        until: datetime | None,
        times: int | None,
        misfire: Misfire | None,
    ) -> Repeat | None:
        """Makes a `Repeat` of a caller's arguments; None if the message does not recur.

        Raises:
            ValueError: an argument that goes with a rule is given without one, or a value is not allowed.
        """
        if rule is None:
            if (time_zone, until, times, misfire) != (None, None, None, None):
                raise ValueError("time_zone, repeat_until, repeat_times and misfire go with repeat")
            return None
        _check_rule(rule)
        if time_zone is not None:
            _check_zone(time_zone)
        if times is not None:
            check_number("repeat_times", times, 1, _MAX_TIMES)
        if misfire not in (None, *get_args(Misfire)):
            raise ValueError(f"misfire must be one of {', '.join(get_args(Misfire))}: {misfire!r}")
        return cls(rule, time_zone, until, times, misfire)

    @property
    def properties(self) -> dict[str, str]:
        """The message's properties for this rule.

        Raises:
            ValueError: `until` has no time zone.
        """
        given = {
            "repeat": self.rule,
            "timeZone": self.time_zone,
            "repeatUntil": None if self.until is None else millis("repeat_until", self.until),
            "repeatTimes": self.times,
            "misfire": self.misfire,
        }
        return {name: str(value) for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class KeyRule:
    """A message's schedule key, and what happens if another message waits under it.

    Attributes:
        mode: None: `replace`.
        debounce_max: how long after the key's first message the newest may be put off; None: no limit.
    """

    key: str
    mode: ScheduleMode | None
    debounce_max: timedelta | None

    @classmethod
    def of(cls, key: str | None, mode: ScheduleMode | None, debounce_max: timedelta | None) -> KeyRule | None:
        """Makes a `KeyRule` of a caller's arguments; None if the message has no schedule key.

        Raises:
            ValueError: an argument that goes with a key is given without one, or a value is not allowed.
        """
        if key is None:
            if (mode, debounce_max) != (None, None):
                raise ValueError("schedule_mode and debounce_max go with schedule_key")
            return None
        if mode not in (None, *get_args(ScheduleMode)):
            raise ValueError(f"schedule_mode must be one of {', '.join(get_args(ScheduleMode))}: {mode!r}")
        if debounce_max is not None and mode != "debounce":
            raise ValueError('debounce_max goes with schedule_mode="debounce"')
        if debounce_max is not None and duration_millis("debounce_max", debounce_max) < 1:
            raise ValueError(f"debounce_max must be a millisecond or more: {debounce_max!r}")
        return cls(checked_key(key), mode, debounce_max)

    @property
    def properties(self) -> dict[str, str]:
        """The message's properties for this key."""
        longest = None if self.debounce_max is None else duration_millis("debounce_max", self.debounce_max)
        given = {"scheduleKey": self.key, "scheduleMode": self.mode, "debounceMax": longest}
        return {name: str(value) for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Expiry:
    """From when on a message is not sent any more; with both the earlier end counts.

    Attributes:
        at: None: no such end.
        after: from when it is due, of a recurring message each occurrence; None: no such end.
    """

    at: datetime | None
    after: timedelta | None

    @classmethod
    def of(cls, at: datetime | None, after: timedelta | None) -> Expiry | None:
        """Makes an `Expiry` of a caller's arguments; None if the message has no end.

        Raises:
            ValueError: the duration is none above 0.
        """
        if after is not None and not 1 <= duration_millis("expire_after", after) <= MAX_MILLIS:
            raise ValueError(f"expire_after must be a millisecond or more: {after!r}")
        return None if at is None and after is None else cls(at, after)

    def properties(self, due: int | None) -> dict[str, str]:
        """Returns the message's properties for this end.

        Args:
            due: when the message is due, ms since the epoch; None: it recurs, or is due at once.

        Raises:
            ValueError: `at` has no time zone, or is not after `due`.
        """
        given: dict[str, str] = {}
        if self.at is not None:
            end = millis("expire_at", self.at)
            if due is not None and end <= due:
                raise ValueError(f"expire_at is not after the time at which the message is due: {self.at!r}")
            given["expireAt"] = str(end)
        if self.after is not None:
            given["expireAfter"] = str(duration_millis("expire_after", self.after))
        return given


def _check_rule(rule: str) -> None:
    """Raises ValueError if a rule does not even look like one; the service checks it in full."""
    check_text("repeat", rule, _MAX_REPEAT_BYTES)
    if rule.startswith("@every "):
        every = parse_millis(rule.removeprefix("@every "))
        if every is None or not _SHORTEST_MILLIS <= every <= MAX_MILLIS:
            raise ValueError(f"repeat needs a duration after @every, a second or more, as 90s, 5m or 1d: {rule!r}")
    elif "=" in rule:
        parts = [part.partition("=") for part in rule.upper().strip().removeprefix("RRULE:").rstrip(";").split(";")]
        if not all(name and value for name, _, value in parts):
            raise ValueError(f"repeat is no RRULE, which has parts NAME=VALUE with ; between them: {rule!r}")
        if not any(name == "FREQ" and value in _FREQUENCIES for name, _, value in parts):
            raise ValueError(f"repeat is no RRULE, which has a FREQ of {', '.join(_FREQUENCIES)}: {rule!r}")
    elif len(rule.split()) not in (5, 6):
        raise ValueError(f"repeat is no cron expression of five fields, or six with seconds, @every or RRULE: {rule!r}")


def _check_zone(name: str) -> None:
    """Raises ValueError for an unknown zone, unless this machine's time zone data may be incomplete."""
    check_text("time_zone", name)
    if not _is_zone(name) and _is_zone(_LEGACY_ZONE):
        raise ValueError(f"time_zone is none that this machine knows, as Europe/Berlin: {name!r}")


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        return False
    return True


def scheduled(
    topic: str,
    payload: Payload,
    at: datetime | None,
    after: timedelta | None,
    key: str | None,
    ordering_key: str | None,
    properties: Mapping[str, str] | None,
    event_time: datetime | None,
    repeat: Repeat | None = None,
    key_rule: KeyRule | None = None,
    request_id: str | None = None,
    expiry: Expiry | None = None,
    schema: PulsarSchema | str | None = None,
) -> Scheduled:
    """Makes a message.

    Raises:
        TypeError: the payload is none that can be sent, or an argument or a property is of another type.
        ValueError: the time is wrong, or a property is one that the service sets or reads.
    """
    if schema is not None:
        schema_type(schema)  # raises here if it is none
    content = payload_bytes(payload, schema)
    check_texts(key=key, ordering_key=ordering_key)
    given = checked_properties(properties)
    if wrong := [name for name in given if name in PROPERTIES_WITH_FIELDS or name.startswith(_OURS)]:
        raise ValueError(f"the property {wrong[0]!r} is delaylake's own")
    for rule in (repeat, key_rule):
        if rule is not None:
            given.update(rule.properties)
    deliver_at = None if repeat is not None and at is None and after is None else due(at, after)
    if expiry is not None:
        if repeat is not None and expiry.at is not None:
            raise ValueError("expire_at does not go with repeat: expire_after is for each occurrence")
        given.update(expiry.properties(None if at is None and after is None else deliver_at))
    if request_id is not None:
        check_request_id(request_id)
        given[_REQUEST_ID] = request_id
    if deliver_at is not None and after is not None and request_id is not None:
        given[_DELIVER_AFTER] = str(duration_millis("after", after))  # a repetition of the call is the same message
    elif deliver_at is not None:
        given[_DELIVER_AT] = str(deliver_at)
    if repeat is not None and repeat.until is not None:
        first = millis("at", now()) if deliver_at is None else deliver_at
        if millis("repeat_until", repeat.until) < first:
            raise ValueError(f"repeat_until is before the first occurrence: {repeat.until!r}")
    return Scheduled(
        full_name(topic),
        content,
        None if deliver_at is None else moment(deliver_at),
        key,
        ordering_key,
        given,
        0 if event_time is None else millis("event_time", event_time),
        request_id or "",
        schema,
    )
