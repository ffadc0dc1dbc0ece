"""Commands, whichever way they go, and the messages that are sent for later."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal, get_args

from delaylake.errors import DelayLakeError, gravity, of_result
from delaylake.message_ids import MessageId, Outcome
from delaylake.times import due, millis, moment

Misfire = Literal["once", "all", "skip"]
ScheduleMode = Literal["replace", "keep", "debounce"]

Operation = Literal[
    "cancel",
    "skip",
    "reschedule",
    "deliverNow",
    "restore",
    "retry",
    "skipNext",
    "pauseSchedule",
    "resumeSchedule",
    "endSchedule",
]

_DONE = frozenset({"APPLIED", "ALREADY_APPLIED"})
_DELIVER_AT = "deliverAt"
_RESERVED = (
    *(_DELIVER_AT, "deliverAfter"),
    *("scheduleKey", "scheduleMode", "debounceMax"),
    *("repeat", "timeZone", "repeatUntil", "repeatTimes", "misfire"),
)
_OURS = "delaylake."

_MAX_KEY_BYTES = 512  # of a schedule key in UTF-8


@dataclass(frozen=True)
class Command:
    """What is to be done to one message.

    Attributes:
        topic: its full name, with the partition of the message.
        message: None: the one that waits under `schedule_key`.
        subscription: None: all that the topic has, and those that it is given later.
        deliver_at: of a cancel, when the message is due; of a reschedule, its new time; ms since the epoch.
        request_id: a command is applied once under it, however often it is sent.
        reason: of a retry.
        after_millis: of a retry, how long it waits; 0: as the subscription's backoff says.
        schedule_key: "": the command names its message by its id.
    """

    operation: Operation
    topic: str
    message: MessageId | None
    subscription: str | None
    deliver_at: int
    request_id: str
    reason: str = ""
    after_millis: int = 0
    schedule_key: str = ""

    @property
    def partition(self) -> int:
        """The partition of the message, as far as its id says it; -1: it does not."""
        return -1 if self.message is None else self.message.partition

    def is_done_by(self, result: str) -> bool:
        """Whether the command is done where an outcome has this result."""
        may_wait = self.operation == "cancel" and not self.schedule_key
        return result in _DONE or (result == "WAITING" and may_wait)

    def check(self, outcomes: Sequence[Outcome]) -> None:
        """Raises the error of the gravest outcome, where the command is not done, or not for all subscriptions."""
        if failed := [outcome for outcome in outcomes if not self.is_done_by(outcome.result)]:
            gravest = min(failed, key=lambda outcome: gravity(outcome.result))
            raise of_result(gravest.result)(str(gravest), outcomes, self.request_id)

    @contextmanager
    def time_in_errors(self) -> Iterator[None]:
        """Gives errors that are raised within the new time of a reschedule, with which it can be asked for again."""
        try:
            yield
        except DelayLakeError as error:
            if self.operation == "reschedule":
                error.deliver_at = moment(self.deliver_at)
            raise


def command(
    operation: Operation,
    topic: str,
    message: MessageId | str | None,
    subscription: str | None,
    request_id: str | None,
    schedule_key: str | None = None,
    deliver_at: int = 0,
) -> Command:
    """Makes a command for a message, or for the one that waits under a schedule key.

    Raises:
        ValueError: the topic, the message, the key or the request id can't be one, or there are both message and key.
    """
    if request_id == "" or subscription == "":
        raise ValueError("a request id and a subscription have at least one character")
    name, chosen = full_name(topic), request_id or uuid.uuid4().hex
    if schedule_key is not None:
        if message is not None:
            raise ValueError("a message is named by its id or by its schedule_key, not by both")
        key = _checked(schedule_key)
        return Command(operation, name, None, subscription, deliver_at, chosen, schedule_key=key)
    if message is None:
        raise ValueError("a command names its message, by its id or by its schedule_key")
    meant = MessageId.of(message)
    suffix = f"-partition-{meant.partition}" if meant.partition >= 0 else ""
    if not name.endswith(suffix):
        name += suffix
    return Command(operation, name, meant, subscription, deliver_at, chosen)


def cancel(
    topic: str,
    message: MessageId | str | None,
    subscription: str | None,
    request_id: str | None,
    deliver_at: datetime | None,
    schedule_key: str | None = None,
) -> Command:
    """Makes a command to cancel an entry, or the message that waits under a schedule key.

    Raises:
        ValueError: it is not known when the message is due, or it is one of a batch; or a key has a time.
    """
    if schedule_key is not None and deliver_at is not None:
        raise ValueError("deliver_at goes with a message's id: a schedule_key is of the message that waits")
    if message is None or schedule_key is not None:
        return command("cancel", topic, message, subscription, request_id, schedule_key)
    meant = MessageId.of(message, deliver_at)
    if meant.deliver_at is None:
        raise ValueError("a cancel needs deliver_at, which the id from schedule() has: it may come before the message")
    if meant.batch_index >= 0:
        raise ValueError(f"a cancel is of all messages of a batch: skip {meant}")
    return command("cancel", topic, meant, subscription, request_id, None, millis(meant.deliver_at))


def reschedule(
    topic: str,
    message: MessageId | str | None,
    subscription: str | None,
    request_id: str | None,
    at: datetime | None,
    after: timedelta | None,
    schedule_key: str | None = None,
) -> Command:
    """Makes a command to deliver a message, or the one that waits under a schedule key, at another time.

    Raises:
        ValueError: the time is none, or would be another one when the request is repeated.
    """
    if request_id and after is not None:
        raise ValueError("with a request id, give the time as at (an error has it): after is another time each time")
    return command("reschedule", topic, message, subscription, request_id, schedule_key, due(at, after))


def retry(
    topic: str,
    message: MessageId | str,
    subscription: str,
    reason: str,
    after: timedelta | None,
    request_id: str | None,
) -> Command:
    """Makes a command to deliver a message once more.

    Raises:
        ValueError: there is no subscription, or the wait is negative or less than a millisecond.
    """
    if not subscription or subscription == "*":
        raise ValueError("a retry is for one subscription: the one whose consumer failed")
    millis_after = 0 if after is None else after // timedelta(milliseconds=1)
    if after is not None and millis_after < 1:
        raise ValueError("a retry waits for a millisecond at least: without after as the backoff says")
    made = command("retry", topic, message, subscription, request_id)
    return replace(made, reason=reason, after_millis=millis_after)


@dataclass(frozen=True)
class Scheduled:
    """A message to send for later, with the property that says when it is due."""

    topic: str
    payload: bytes
    deliver_at: datetime | None  # of a recurring message None: its rule says it
    key: str | None
    ordering_key: str | None
    properties: dict[str, str]
    event_time: int  # ms since the epoch; 0: none


@dataclass(frozen=True)
class Repeat:
    """How a message recurs.

    Attributes:
        rule: a cron expression, `@every` and a duration, or an RRULE.
        time_zone: IANA name of the zone that the rule means.
        until: no occurrence is later; None: no such end.
        times: how many occurrences there are; None: no such end.
        misfire: what becomes of occurrences whose time has passed, as while the service was down.
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
        """Makes it of a caller's arguments; None: the message does not recur.

        Raises:
            ValueError: there is no rule, but something that goes with one; or a value is none that is allowed.
        """
        if rule is None:
            if (time_zone, until, times, misfire) != (None, None, None, None):
                raise ValueError("time_zone, repeat_until, repeat_times and misfire go with repeat")
            return None
        if not rule:
            raise ValueError("repeat is empty")
        if times is not None and times < 1:
            raise ValueError(f"repeat_times must be 1 or more: {times}")
        if misfire not in (None, *get_args(Misfire)):
            raise ValueError(f"misfire must be one of {', '.join(get_args(Misfire))}: {misfire!r}")
        return cls(rule, time_zone, until, times, misfire)

    @property
    def properties(self) -> dict[str, str]:
        """The properties of a message that recurs so.

        Raises:
            ValueError: the end has no time zone.
        """
        given = {
            "repeat": self.rule,
            "timeZone": self.time_zone,
            "repeatUntil": None if self.until is None else millis(self.until),
            "repeatTimes": self.times,
            "misfire": self.misfire,
        }
        return {name: str(value) for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class KeyRule:
    """How a message gets on with the one that waits under its schedule key.

    Attributes:
        mode: None: `replace`.
        debounce_max: how long after the first message of the key the newest is put off at most; None: no such limit.
    """

    key: str
    mode: ScheduleMode | None
    debounce_max: timedelta | None

    @classmethod
    def of(cls, key: str | None, mode: ScheduleMode | None, debounce_max: timedelta | None) -> KeyRule | None:
        """Makes it of a caller's arguments; None: the message has no schedule key.

        Raises:
            ValueError: there is no key, but something that goes with one; or a value is none that is allowed.
        """
        if key is None:
            if (mode, debounce_max) != (None, None):
                raise ValueError("schedule_mode and debounce_max go with schedule_key")
            return None
        if mode not in (None, *get_args(ScheduleMode)):
            raise ValueError(f"schedule_mode must be one of {', '.join(get_args(ScheduleMode))}: {mode!r}")
        if debounce_max is not None and mode != "debounce":
            raise ValueError('debounce_max goes with schedule_mode="debounce"')
        if debounce_max is not None and debounce_max < timedelta(milliseconds=1):
            raise ValueError(f"debounce_max must be a millisecond or more: {debounce_max!r}")
        return cls(_checked(key), mode, debounce_max)

    @property
    def properties(self) -> dict[str, str]:
        """The properties of a message with such a key."""
        longest = None if self.debounce_max is None else self.debounce_max // timedelta(milliseconds=1)
        given = {"scheduleKey": self.key, "scheduleMode": self.mode, "debounceMax": longest}
        return {name: str(value) for name, value in given.items() if value is not None}


def _checked(schedule_key: str) -> str:
    if not schedule_key:
        raise ValueError("schedule_key is empty")
    if len(schedule_key.encode()) > _MAX_KEY_BYTES:
        raise ValueError(f"schedule_key has more than {_MAX_KEY_BYTES} bytes")
    return schedule_key


def scheduled(
    topic: str,
    payload: bytes | str,
    at: datetime | None,
    after: timedelta | None,
    key: str | None,
    ordering_key: str | None,
    properties: Mapping[str, str] | None,
    event_time: datetime | None,
    repeat: Repeat | None = None,
    key_rule: KeyRule | None = None,
) -> Scheduled:
    """Makes a message; a text is sent as UTF-8.

    Raises:
        TypeError: the payload is neither bytes nor a text.
        ValueError: the time is none, or a property is one that the service sets or reads.
    """
    if not isinstance(payload, bytes | bytearray | memoryview | str):
        raise TypeError(f"the payload is neither bytes nor a text: {type(payload).__name__}")
    given = dict(properties or {})
    if wrong := [name for name in given if name in _RESERVED or name.startswith(_OURS)]:
        raise ValueError(f"the property {wrong[0]!r} is delaylake's own")
    for rule in (repeat, key_rule):
        if rule is not None:
            given.update(rule.properties)
    deliver_at = None if repeat is not None and at is None and after is None else due(at, after)
    if deliver_at is not None:
        given[_DELIVER_AT] = str(deliver_at)
    return Scheduled(
        full_name(topic),
        payload.encode() if isinstance(payload, str) else bytes(payload),
        None if deliver_at is None else moment(deliver_at),
        key,
        ordering_key,
        given,
        0 if event_time is None else millis(event_time),
    )


def full_name(topic: str) -> str:
    """Returns the full name of a topic: `orders` is `persistent://public/default/orders`.

    Raises:
        ValueError: it is no name of a persistent topic.
    """
    domain, separator, rest = topic.rpartition("://")
    parts = rest.split("/", 2)
    if not separator and len(parts) == 1:
        parts = ["public", "default", *parts]
    if len(parts) != 3 or not all(parts) or domain not in ("", "persistent"):
        raise ValueError(f"no persistent topic: {topic[:300]!r}")
    return f"persistent://{'/'.join(parts)}"
