"""The operations: how a command is made, and the methods that both clients have for it.

An operation's name is that of its field in ControlCommand. A command goes to the admin API (`rest.py`) or to the
control topic (`control.py`). These read its name, its messages and its fields, and know none but the oldest operations.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Generic, Protocol, TypeVar

from delaylake.arguments import check_text, check_texts
from delaylake.errors import DelayLakeError, gravity, result_error
from delaylake.message_ids import MessageId, Outcome
from delaylake.times import due, duration_millis, millis, moment, shift_millis

_Answer = TypeVar("_Answer")

CANCEL, SKIP, RESCHEDULE = "cancel", "skip", "reschedule"
SKIP_NEXT, PAUSE_SCHEDULE, RESUME_SCHEDULE = "skip_next", "pause_schedule", "resume_schedule"

# Operations of clients that the control topic does not have: a reschedule to a past time, and a call of the admin API,
# which cancels what it finds in the tables.
DELIVER_NOW, END_SCHEDULE = "deliver_now", "end_schedule"

# Operations on recurring messages. Subscriptions that are added later get nothing of a schedule that has begun.
SCHEDULE_OPERATIONS = frozenset({SKIP_NEXT, PAUSE_SCHEDULE, RESUME_SCHEDULE, END_SCHEDULE})

DONE = frozenset({"APPLIED", "ALREADY_APPLIED"})  # the results with which a command is done, now or before
WAITING = "WAITING"

_MAX_KEY_BYTES = 512  # of a schedule key in UTF-8


class Position(Protocol):
    """The id of a message, or with batch_index -1 of a whole entry. Partition -1: none, or unknown."""

    @property
    def ledger_id(self) -> int: ...
    @property
    def entry_id(self) -> int: ...
    @property
    def partition(self) -> int: ...
    @property
    def batch_index(self) -> int: ...


@dataclass(frozen=True)
class Ids:
    """Messages, or whole entries, by their ids.

    Attributes:
        times: when each is due, ms since the epoch, which a cancel needs, and by which a skip finds it sooner; empty:
            unknown.
        batch_size: the number of messages in each.
    """

    messages: Sequence[Position]
    times: Sequence[int] = ()
    batch_size: int = 1

    def __len__(self) -> int:
        return len(self.messages)

    def parts(self, most: int) -> Iterator[Ids]:
        """Yields the messages in parts of at most `most`."""
        for start in range(0, len(self), most):
            end = start + most
            yield Ids(self.messages[start:end], self.times[start:end], self.batch_size)


@dataclass(frozen=True)
class Keys:
    """The messages that wait under schedule keys."""

    keys: Sequence[str]

    def __len__(self) -> int:
        return len(self.keys)

    def parts(self, most: int) -> Iterator[Keys]:
        """Yields the keys in parts of at most `most`."""
        return (Keys(self.keys[start : start + most]) for start in range(0, len(self), most))


Named = Ids | Keys


def done_results(operation: str, named: Named | None) -> frozenset[str]:
    """Returns the results with which a command is done, by what it names.

    A cancel by id that comes before its message waits for it, and that is enough.
    """
    return DONE | {WAITING} if operation in (CANCEL, END_SCHEDULE) and isinstance(named, Ids) else DONE


@dataclass(frozen=True)
class Command:
    """A command about one message.

    Attributes:
        topic: full name of the topic, with the message's partition.
        message: None: the message that waits under `schedule_key`, or without one all that the subscription gets.
        subscription: None: all subscriptions that the topic has or gets later.
        deliver_at: for a cancel, when the message is due, ms since the epoch.
        request_id: a command is applied once under it, however often it is sent.
        schedule_key: empty: the command names its message by its id.
        fields: what the operation's message in proto/delaylake.proto has beside the messages.
    """

    operation: str
    topic: str
    message: MessageId | None
    subscription: str | None
    deliver_at: int
    request_id: str
    schedule_key: str = ""
    fields: Mapping[str, int | str] = field(default_factory=dict)

    @property
    def named(self) -> Named | None:
        """The message, as the operation names it; its partition is the topic's."""
        if self.message is None:
            return Keys([self.schedule_key]) if self.schedule_key else None
        return Ids([replace(self.message, partition=-1)], [self.deliver_at])

    def with_fields(self, **fields: int | str) -> Command:
        """Returns the command with its operation's own fields."""
        return replace(self, fields=fields)

    @property
    def partition(self) -> int:
        """The partition in the message's id; -1 if it has none."""
        return -1 if self.message is None else self.message.partition

    @property
    def control_operation(self) -> tuple[str, Mapping[str, int | str]]:
        """The operation as the control topic has it, and its fields: any past time means now."""
        return (RESCHEDULE, {"deliver_at": 0}) if self.operation == DELIVER_NOW else (self.operation, self.fields)

    def message_id_at(self, ledger_id: int, entry_id: int, batch_index: int) -> MessageId:
        """Returns the id of an outcome's message; the command's own if the outcome names no message."""
        if ledger_id < 0 and self.message is not None:
            return self.message
        return MessageId(ledger_id, entry_id, self.partition, batch_index)

    def is_done_by(self, result: str) -> bool:
        """Whether an outcome with this result means that the command is done."""
        return result in done_results(self.operation, self.named)

    def check(self, outcomes: Sequence[Outcome]) -> None:
        """Raises the error of the gravest outcome unless the command is done for all subscriptions."""
        if failed := [outcome for outcome in outcomes if not self.is_done_by(outcome.result)]:
            gravest = min(failed, key=lambda outcome: gravity(outcome.result))
            raise result_error(gravest.result)(str(gravest), outcomes, self.request_id)

    @contextmanager
    def time_in_errors(self) -> Iterator[None]:
        """Adds the new time of a reschedule to errors that are raised in the block: it is needed to repeat the call."""
        try:
            yield
        except DelayLakeError as error:
            if self.operation == RESCHEDULE:
                error.deliver_at = moment(int(self.fields["deliver_at"]))
            raise


def command(
    operation: str,
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


def subscription_command(operation: str, topic: str, subscription: str, request_id: str | None) -> Command:
    """Makes a command for all that a subscription gets.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the topic or the request id is wrong, or no subscription is named.
    """
    check_text("subscription", subscription)
    check_texts(request_id=request_id)
    if request_id == "" or subscription == "":
        raise ValueError("request_id and subscription have at least one character")
    return Command(operation, full_name(topic), None, subscription, 0, request_id or uuid.uuid4().hex)


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
        return command(CANCEL, topic, message, subscription, request_id, schedule_key)
    message_id = MessageId.of(message, deliver_at)
    if message_id.deliver_at is None:
        raise ValueError(
            "a cancel needs deliver_at, since it may come before the message. The id from schedule() has it, unless the"
            " message recurs by its rule alone: then end_schedule, or skip"
        )
    if message_id.batch_index >= 0:
        raise ValueError(f"a cancel is of all messages of a batch: skip {message_id}")
    due_millis = millis("deliver_at", message_id.deliver_at)
    return command(CANCEL, topic, message_id, subscription, request_id, None, due_millis)


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
    made = command(RESCHEDULE, topic, message, subscription, request_id, schedule_key)
    return made.with_fields(deliver_at=due(at, after))


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
    return made.with_fields(reason=reason, after_millis=millis_after)


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


class Commands(Generic[_Answer]):
    """The operations of both clients: here each is made, `_do` sends it and answers.

    A method returns the command's outcomes, one for each subscription; of the asynchronous client they are awaited, and
    so are errors.
    """

    def _do(self, make: Callable[[], Command]) -> _Answer:
        raise NotImplementedError

    def cancel(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        deliver_at: datetime | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> _Answer:
        """Cancels a message. A cancel by id may come before its message: then it waits until just after `deliver_at`.

        Args:
            deliver_at: when the message is due, if its id does not have it.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(lambda: cancel(topic, message, subscription, request_id, deliver_at, schedule_key))

    def skip(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> _Answer:
        """Cancels a message, also a single one of a batch; the time at which it is due need not be known.

        Raises:
            NotAllowed: the subscription's type is Exclusive or Failover.
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(lambda: command(SKIP, topic, message, subscription, request_id, schedule_key))

    def reschedule(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        at: datetime | None = None,
        after: timedelta | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> _Answer:
        """Moves a pending message to an earlier or later time. The message keeps its id.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there. To repeat the call with the error's
                `request_id`, give the error's `deliver_at` as `at`.
        """
        return self._do(lambda: reschedule(topic, message, subscription, request_id, at, after, schedule_key))

    def postpone(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        by: timedelta,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> _Answer:
        """Moves a pending message so much later than it would be delivered; each call adds up.

        Args:
            by: negative: sooner, but not before now.

        Raises:
            ValueError: `by` is less than a millisecond, or reaches beyond the year 9999.
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        named = topic, message, subscription, request_id, schedule_key
        return self._do(lambda: command("postpone", *named).with_fields(by_millis=shift_millis("by", by)))

    def retry(
        self,
        topic: str,
        message: MessageId | str,
        *,
        subscription: str,
        reason: str = "",
        after: timedelta | None = None,
        request_id: str | None = None,
    ) -> _Answer:
        """Delivers a message once more to a subscription whose consumer failed on it.

        Args:
            topic: the source topic: the delivered message's property `delaylake.source`.
            message: the delivered message's property `delaylake.messageId`.
            subscription: the consumer's subscription.
            reason: why the consumer failed; shown with the attempts and the dead letters.
            after: the delay; None: as the subscription's backoff says.
            request_id: choose one for each message and attempt, and a consumer that asks twice gets one retry.

        Raises:
            NotFound: there is no such message, or its payload is not kept any more.
            Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(lambda: retry(topic, message, subscription, reason, after, request_id))

    def deliver_now(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> _Answer:
        """Delivers a pending message at once.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(lambda: command(DELIVER_NOW, topic, message, subscription, request_id, schedule_key))

    def restore(
        self, topic: str, message: MessageId | str, *, subscription: str | None = None, request_id: str | None = None
    ) -> _Answer:
        """Undoes a cancel or skip of a message whose time has not come.

        Raises:
            TooLate, NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(lambda: command("restore", topic, message, subscription, request_id))

    def skip_next(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> _Answer:
        """Skips the next occurrence of a recurring message.

        Raises:
            Invalid: also if the message does not recur.
            TooLate, NotFound, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(lambda: command(SKIP_NEXT, topic, message, subscription, request_id, schedule_key))

    def pause_schedule(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> _Answer:
        """Pauses a schedule: the recurring message's next occurrence waits until the schedule is resumed.

        To pause a paused schedule does nothing.

        Raises:
            Invalid: also if the message does not recur.
            TooLate, NotFound, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(lambda: command(PAUSE_SCHEDULE, topic, message, subscription, request_id, schedule_key))

    def resume_schedule(
        self,
        topic: str,
        message: MessageId | str | None = None,
        *,
        schedule_key: str | None = None,
        subscription: str | None = None,
        request_id: str | None = None,
    ) -> _Answer:
        """Resumes a paused schedule. For occurrences that were missed meanwhile see its `misfire`.

        Raises:
            Invalid: also if the message does not recur.
            TooLate, NotFound, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(lambda: command(RESUME_SCHEDULE, topic, message, subscription, request_id, schedule_key))

    def end_schedule(
        self, topic: str, message: MessageId | str, *, subscription: str | None = None, request_id: str | None = None
    ) -> _Answer:
        """Ends a schedule: no further occurrence of the recurring message is delivered. Needs the admin API.

        To end an ended schedule does nothing.

        Raises:
            NotFound: also if the message has come within the last seconds.
            TooLate, NotAllowed, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(lambda: command(END_SCHEDULE, topic, message, subscription, request_id))

    def pause(self, topic: str, *, subscription: str, request_id: str | None = None) -> _Answer:
        """Pauses a subscription: messages that come due for it wait until it is resumed, or they are rescheduled.

        Raises:
            NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(lambda: subscription_command("pause", topic, subscription, request_id))

    def resume(self, topic: str, *, subscription: str, request_id: str | None = None) -> _Answer:
        """Ends the pause of a subscription: messages that came due meanwhile are delivered now.

        Raises:
            NotFound, Invalid, Forbidden, Unavailable, NoAnswer: see there.
        """
        return self._do(lambda: subscription_command("resume", topic, subscription, request_id))
