"""Commands about one message, whether they go to the admin API or to the control topic."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from delaylake.arguments import check_text, check_texts
from delaylake.errors import DelayLakeError, gravity, of_result
from delaylake.message_ids import MessageId, Outcome
from delaylake.times import due, duration_millis, millis, moment

Operation = Literal[
    "cancel",
    "skip",
    "reschedule",
    "deliverNow",
    "postpone",
    "restore",
    "retry",
    "skipNext",
    "pauseSchedule",
    "resumeSchedule",
    "endSchedule",
]

_DONE = frozenset({"APPLIED", "ALREADY_APPLIED"})

_MAX_KEY_BYTES = 512  # of a schedule key in UTF-8


@dataclass(frozen=True)
class Command:
    """A command about one message.

    Attributes:
        topic: full name of the topic, with the message's partition.
        message: None: the message that waits under `schedule_key`.
        subscription: None: all subscriptions that the topic has or gets later.
        deliver_at: for a cancel, when the message is due; for a reschedule, its new time; ms since the epoch.
        by_millis: how much later a postponed message is due; negative: sooner.
        request_id: a command is applied once under it, however often it is sent.
        reason: why a retry is wanted.
        after_millis: the delay of a retry; 0: as the subscription's backoff says.
        schedule_key: empty: the command names its message by its id.
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
    by_millis: int = 0

    @property
    def partition(self) -> int:
        """The partition in the message's id; -1 if it has none."""
        return -1 if self.message is None else self.message.partition

    def message_of(self, ledger_id: int, entry_id: int, batch_index: int) -> MessageId:
        """Returns the id of an outcome's message; the command's own if the outcome names no message."""
        if ledger_id < 0 and self.message is not None:
            return self.message
        return MessageId(ledger_id, entry_id, self.partition, batch_index)

    def is_done_by(self, result: str) -> bool:
        """Whether an outcome with this result means that the command is done."""
        may_wait = self.operation == "cancel" and not self.schedule_key
        return result in _DONE or (result == "WAITING" and may_wait)

    def check(self, outcomes: Sequence[Outcome]) -> None:
        """Raises the error of the gravest outcome unless the command is done for all subscriptions."""
        if failed := [outcome for outcome in outcomes if not self.is_done_by(outcome.result)]:
            gravest = min(failed, key=lambda outcome: gravity(outcome.result))
            raise of_result(gravest.result)(str(gravest), outcomes, self.request_id)

    @contextmanager
    def time_in_errors(self) -> Iterator[None]:
        """Adds the new time of a reschedule to errors that are raised in the block: it is needed to repeat the call."""
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
        TypeError: an argument is of another type.
        ValueError: the topic, message, key or request id is wrong, or both or none of message and key are given.
    """
    check_texts(subscription=subscription, request_id=request_id)
    if request_id == "" or subscription == "":
        raise ValueError("request_id and subscription have at least one character")
    name, chosen = full_name(topic), request_id or uuid.uuid4().hex
    if schedule_key is not None:
        if message is not None:
            raise ValueError("a message is named by its id or by its schedule_key, not by both")
        key = checked_key(schedule_key)
        return Command(operation, name, None, subscription, deliver_at, chosen, schedule_key=key)
    if message is None:
        raise ValueError("a command names its message, by its id or by its schedule_key")
    message_id = MessageId.of(message)
    suffix = f"-partition-{message_id.partition}" if message_id.partition >= 0 else ""
    if not name.endswith(suffix):
        name += suffix
    return Command(operation, name, message_id, subscription, deliver_at, chosen)


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
        ValueError: the time at which the message is due is unknown, the message is one of a batch, or a time is given
            with a key.
    """
    if schedule_key is not None and deliver_at is not None:
        raise ValueError("deliver_at goes with a message's id: a schedule_key is of the message that waits")
    if message is None or schedule_key is not None:
        return command("cancel", topic, message, subscription, request_id, schedule_key)
    message_id = MessageId.of(message, deliver_at)
    if message_id.deliver_at is None:
        raise ValueError(
            "a cancel needs deliver_at, since it may come before the message. The id from schedule() has it, unless the"
            " message recurs by its rule alone: then end_schedule, or skip"
        )
    if message_id.batch_index >= 0:
        raise ValueError(f"a cancel is of all messages of a batch: skip {message_id}")
    due_millis = millis("deliver_at", message_id.deliver_at)
    return command("cancel", topic, message_id, subscription, request_id, None, due_millis)


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
        ValueError: the time is wrong, or would be another one when the request is repeated.
    """
    if request_id and after is not None:
        raise ValueError("with a request id, give the time as at (an error has it): after is another time each time")
    return command("reschedule", topic, message, subscription, request_id, schedule_key, due(at, after))


def postpone(
    topic: str,
    message: MessageId | str | None,
    subscription: str | None,
    request_id: str | None,
    by: timedelta,
    schedule_key: str | None = None,
) -> Command:
    """Makes a command to deliver a message, or the one that waits under a schedule key, so much later.

    Raises:
        TypeError: an argument is of another type.
        ValueError: `by` is less than a millisecond, or reaches beyond the year 9999.
    """
    if not isinstance(by, timedelta):
        raise TypeError(f"by is no timedelta: {by!r}")
    by_millis = duration_millis("by", abs(by))
    if not by_millis:
        raise ValueError("by is less than a millisecond")
    made = command("postpone", topic, message, subscription, request_id, schedule_key)
    return replace(made, by_millis=by_millis if by > timedelta(0) else -by_millis)


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
        TypeError: an argument is of another type.
        ValueError: no subscription is given, or the delay is less than a millisecond.
    """
    check_text("reason", reason)
    if not subscription or subscription == "*":
        raise ValueError("a retry is for one subscription: the one whose consumer failed")
    millis_after = 0 if after is None else duration_millis("after", after)
    if after is not None and millis_after < 1:
        raise ValueError("a retry waits for a millisecond at least: without after as the backoff says")
    made = command("retry", topic, message, subscription, request_id)
    return replace(made, reason=reason, after_millis=millis_after)


def checked_key(schedule_key: str) -> str:
    """Returns a schedule key, checked.

    Raises:
        TypeError: it is not a text.
        ValueError: it is empty or too long.
    """
    check_text("schedule_key", schedule_key, _MAX_KEY_BYTES)
    return schedule_key


def full_name(topic: str) -> str:
    """Returns the full name of a topic: `orders` is `persistent://public/default/orders`.

    Raises:
        TypeError: it is not a text.
        ValueError: it is not the name of a persistent topic.
    """
    check_text("topic", topic)
    domain, separator, rest = topic.rpartition("://")
    parts = rest.split("/", 2)
    if not separator and len(parts) == 1:
        parts = ["public", "default", *parts]
    if len(parts) != 3 or not all(parts) or domain not in ("", "persistent"):
        raise ValueError(f"no persistent topic: {topic[:300]!r}")
    return f"persistent://{'/'.join(parts)}"
