"""Makes control commands of message ids or schedule keys, and keeps track of their outcomes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from admin.control.expected_outcomes import ByKey, OneByOne, SummedUp
from broker.entries.message_ids import MessageRef
from conf.errors import DelayLakeError
from conf.partitions import without_partition
from conf.settings import Settings
from tracker.subscriptions import ALSO_LATER
from tracker.wire.delaylake_pb2 import (
    CancelDelayedMessage,
    ControlCommand,
    ControlOutcome,
    PauseSubscriptions,
    Result,
    ResumeSubscriptions,
    SkipEntry,
)

_T = TypeVar("_T")

MAX_ENTRIES = 1_000  # of a command; for more several commands are sent
# The results with which a command is done: a skipped message will not be delivered. A cancel that comes before its
# message waits for it, and that is enough.
SKIPPED = frozenset({Result.APPLIED, Result.ALREADY_APPLIED})
CANCELLED = SKIPPED | {Result.WAITING}


class ControlError(DelayLakeError):
    """A command can't be sent, or was not answered. The message is one line."""


@dataclass(frozen=True)
class Cancel:
    """A delayed message to cancel; `deliver_at` is the time with which it was sent, ms since the epoch."""

    message: MessageRef
    deliver_at: int


@dataclass(frozen=True)
class Outcome:
    """What a command did to one message, or entry, of one subscription; if outcomes are summed up, to several."""

    subscription: str
    message: MessageRef  # with -1 in all fields: several messages, or all
    result: str  # the name of a Result
    reason: str
    is_done: bool  # whether the command is done, now or before
    n_messages: int = 1  # the number of messages, counted for each subscription

    def to_json(self) -> dict[str, object]:
        return {
            "subscription": self.subscription,
            "ledgerId": self.message.ledger_id,
            "entryId": self.message.entry_id,
            "batchIndex": self.message.batch_index,
            "result": self.result,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        # An outcome for all that a command names has no position.
        position = f"{self.message.ledger_id}:{self.message.entry_id}" if self.message.ledger_id >= 0 else ""
        if self.message.batch_index >= 0:
            position += f":{self.message.batch_index}"
        return " ".join(part for part in (position, self.subscription, self.result, self.reason) if part)


class ControlRequest:
    """A command, and the outcomes that it still waits for.

    Args:
        command: the command.
        n_messages: the number of messages that it names.
        expected: the outcomes still to come.
        done: the results with which it is done.
    """

    def __init__(
        self,
        command: ControlCommand,
        n_messages: int,
        expected: OneByOne | ByKey | SummedUp,
        done: frozenset[int],
    ) -> None:
        self.command = command
        self.n_messages = n_messages
        self._expected = expected
        self._done = done
        self._is_begun = False  # whether an outcome has been taken that is not summed up
        self._is_repeated = False
        self._taken: set[bytes] = set()  # the outcomes since the command was repeated

    @property
    def request_id(self) -> str:
        return self.command.request_id

    @property
    def is_answered(self) -> bool:
        return not self._expected.left

    def repeat(self) -> bool:
        """Notes that the command is repeated; False: it must not be, as it was before, or is being answered."""
        if self._is_begun or self._is_repeated:
            return False
        self._is_repeated = True
        return True

    def take(self, published: ControlOutcome) -> list[Outcome]:
        """Takes a published outcome of the command.

        Returns:
            the outcome; empty if another one will follow for its message, or if it was published before. If outcomes
            are summed up: empty until the answer is complete, then all of its outcomes.
        """
        if published.result == Result.WAITING and Result.WAITING not in self._done:
            return []
        if not self.command.sum_up:
            if self._is_repeated:
                content = _without_repeat(published)
                if content in self._taken:
                    return []
                self._taken.add(content)
            self._is_begun = True
        return [self._outcome(one.published, one.n_messages) for one in self._expected.settle(published)]

    def _outcome(self, published: ControlOutcome, n_messages: int) -> Outcome:
        return Outcome(
            published.subscription,
            MessageRef(published.ledger_id, published.entry_id, -1, published.batch_index),
            Result.Name(published.result),
            published.reason,
            published.result in self._done,
            n_messages,
        )


@dataclass(frozen=True)
class RequestFactory:
    """Makes requests for messages of one topic.

    Attributes:
        issued_by: the commands' sender, as it appears in outcomes.
        topic: a source topic or a partition of it.
        subscriptions: names of subscriptions; empty: all of the topic's.
        sum_up: whether messages of a command with the same result have one outcome together.
        request_id: the first command's request id, chosen by the caller, so that a repeated call has no further effect;
            further commands have a number behind it. Empty: each command gets an id.
    """

    settings: Settings
    issued_by: str
    topic: str
    subscriptions: Sequence[str] = ()
    sum_up: bool = False
    request_id: str = ""

    def cancel(self, cancel: Cancel) -> ControlRequest:
        """Makes a request to cancel a delayed message, as PIP-423's cancelDelayedMessage."""
        command = self._command()
        command.cancel.CopyFrom(_cancel_message(cancel))
        return self._request(command, [cancel.message], CANCELLED)

    def cancel_entries(self, cancels: Sequence[Cancel], batch_size: int = 1) -> Iterator[ControlRequest]:
        """Makes requests to cancel many entries, each of `batch_size` messages."""
        for number, part in enumerate(_parts(cancels)):
            command = self._command(number)
            command.cancels.messages.extend(map(_cancel_message, part))
            yield self._request(command, [cancel.message for cancel in part], CANCELLED, batch_size)

    def skip(self, messages: Sequence[MessageRef], times: Sequence[int] = ()) -> Iterator[ControlRequest]:
        """Makes requests to skip messages or whole entries, as PIP-423's skipByMessageIds.

        Args:
            messages: the messages or entries.
            times: when each message is due, ms since the epoch, with which it is found sooner; empty: unknown.
        """
        parts = zip(_parts(messages), _parts(times or [0] * len(messages)), strict=True)
        for number, (part, known) in enumerate(parts):
            command = self._command(number)
            command.skip.entries.extend(map(_skip_entry, part, known))
            yield self._request(command, part, SKIPPED)

    def reschedule(self, messages: Sequence[MessageRef], deliver_at: int) -> Iterator[ControlRequest]:
        """Makes requests to deliver pending messages at another time, ms since the epoch; a past time means at once."""
        for number, part in enumerate(_parts(messages)):
            command = self._command(number)
            command.reschedule.entries.extend(map(_skip_entry, part))
            command.reschedule.deliver_at = deliver_at
            yield self._request(command, part, SKIPPED)

    def retry(self, messages: Sequence[MessageRef], reason: str, after_millis: int) -> Iterator[ControlRequest]:
        """Makes requests to deliver messages once more that a consumer of the subscription failed on.

        Args:
            messages: the messages.
            reason: why the consumer failed; shown with the attempts and the dead letters.
            after_millis: the delay from now; 0: as the subscription's backoff says.
        """
        for number, message in enumerate(messages):
            command = self._command(number)
            command.retry.entry.CopyFrom(_skip_entry(message))
            command.retry.reason = reason
            command.retry.after_millis = after_millis
            yield self._request(command, [message], SKIPPED)

    def skip_next(self, messages: Sequence[MessageRef]) -> Iterator[ControlRequest]:
        """Makes requests to skip the next occurrence of recurring messages."""
        for number, part in enumerate(_parts(messages)):
            command = self._command(number)
            command.skip_next.entries.extend(map(_skip_entry, part))
            # There is no outcome for `*`: a later subscription has no next occurrence.
            yield self._request(command, part, SKIPPED, with_later=False)

    def pause_schedules(self, messages: Sequence[MessageRef], is_paused: bool) -> Iterator[ControlRequest]:
        """Makes requests to pause recurring messages, or to resume them."""
        for number, part in enumerate(_parts(messages)):
            command = self._command(number)
            entries = command.pause_schedule.entries if is_paused else command.resume_schedule.entries
            entries.extend(map(_skip_entry, part))
            yield self._request(command, part, SKIPPED, with_later=False)

    def cancel_keys(self, keys: Sequence[str]) -> Iterator[ControlRequest]:
        """Makes requests to cancel the messages that wait under schedule keys."""
        for number, part in enumerate(_parts(keys)):
            command = self._command(number)
            command.cancels.messages.extend(CancelDelayedMessage(schedule_key=key) for key in part)
            yield self._by_key(command, part)

    def skip_keys(self, keys: Sequence[str]) -> Iterator[ControlRequest]:
        """Makes requests to skip the messages that wait under schedule keys."""
        for number, part in enumerate(_parts(keys)):
            command = self._command(number)
            command.skip.entries.extend(SkipEntry(schedule_key=key) for key in part)
            yield self._by_key(command, part)

    def reschedule_keys(self, keys: Sequence[str], deliver_at: int) -> Iterator[ControlRequest]:
        """Makes requests to deliver the messages that wait under schedule keys at another time, as `reschedule`."""
        for number, part in enumerate(_parts(keys)):
            command = self._command(number)
            command.reschedule.entries.extend(SkipEntry(schedule_key=key) for key in part)
            command.reschedule.deliver_at = deliver_at
            yield self._by_key(command, part)

    def skip_next_of_keys(self, keys: Sequence[str]) -> Iterator[ControlRequest]:
        """Makes requests to skip the next occurrence of the recurring messages of schedule keys."""
        for number, part in enumerate(_parts(keys)):
            command = self._command(number)
            command.skip_next.entries.extend(SkipEntry(schedule_key=key) for key in part)
            yield self._by_key(command, part, with_later=False)

    def pause_schedules_of_keys(self, keys: Sequence[str], is_paused: bool) -> Iterator[ControlRequest]:
        """Makes requests to pause the recurring messages of schedule keys, or to resume them."""
        for number, part in enumerate(_parts(keys)):
            command = self._command(number)
            entries = command.pause_schedule.entries if is_paused else command.resume_schedule.entries
            entries.extend(SkipEntry(schedule_key=key) for key in part)
            yield self._by_key(command, part, with_later=False)

    def _by_key(self, command: ControlCommand, keys: Sequence[str], with_later: bool = True) -> ControlRequest:
        return ControlRequest(command, len(keys), ByKey(keys, self._names(with_later)), SKIPPED)

    def restore(self, messages: Sequence[MessageRef]) -> Iterator[ControlRequest]:
        """Makes requests to undo cancels and skips of messages that are not due yet."""
        for number, part in enumerate(_parts(messages)):
            command = self._command(number)
            command.restore.entries.extend(map(_skip_entry, part))
            yield self._request(command, part, SKIPPED)

    def pause(self, is_paused: bool) -> ControlRequest:
        """Makes a request to pause the subscriptions (hold back messages that come due), or to resume them."""
        command = self._command()
        if is_paused:
            command.pause.CopyFrom(PauseSubscriptions())
        else:
            command.resume.CopyFrom(ResumeSubscriptions())
        # The outcome for each subscription has no position.
        return self._request(command, [MessageRef(-1, -1)], SKIPPED)

    def _command(self, number: int = 0) -> ControlCommand:
        chosen = f"{self.request_id}.{number}" if number else self.request_id
        return ControlCommand(
            request_id=chosen if self.request_id else uuid.uuid4().hex,
            topic=self.topic,
            subscriptions=self.subscriptions,
            issued_at=time.time_ns() // 1_000_000,
            issued_by=self.issued_by,
            sum_up=self.sum_up,
        )

    def _request(
        self,
        command: ControlCommand,
        messages: Sequence[MessageRef],
        done: frozenset[int],
        batch_size: int = 1,
        with_later: bool = True,
    ) -> ControlRequest:
        names = self._names(with_later)
        expected = SummedUp(len(messages), names, batch_size) if self.sum_up else OneByOne(messages, names)
        return ControlRequest(command, len(messages) * batch_size, expected, done)

    def _names(self, with_later: bool = True) -> list[str]:
        """Returns the subscriptions for which there will be outcomes; "" stands for any.

        Args:
            with_later: whether there will be an outcome for `*`, if the command is for that, too.
        """
        is_for_later = ALSO_LATER in self.subscriptions
        if self.subscriptions and not is_for_later:
            return list(self.subscriptions)
        later = [ALSO_LATER] if is_for_later and with_later else []
        route = self.settings.route(self.topic) or self.settings.route(without_partition(self.topic))
        # There will be one outcome for a topic without a route.
        return [*later, *(s.name for s in route.subscriptions)] if route else later or [""]


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yields items in parts of at most MAX_ENTRIES, the maximum of a command."""
    return (items[start : start + MAX_ENTRIES] for start in range(0, len(items), MAX_ENTRIES))


def _cancel_message(cancel: Cancel) -> CancelDelayedMessage:
    return CancelDelayedMessage(
        ledger_id=cancel.message.ledger_id, entry_id=cancel.message.entry_id, deliver_at=cancel.deliver_at
    )


def _skip_entry(message: MessageRef, deliver_at: int = 0) -> SkipEntry:
    entry = SkipEntry(ledger_id=message.ledger_id, entry_id=message.entry_id, deliver_at=deliver_at)
    if message.batch_index >= 0:
        entry.batch_indexes.append(message.batch_index)
    if message.partition >= 0:
        entry.partition = message.partition
    return entry


def _without_repeat(published: ControlOutcome) -> bytes:
    """Returns an outcome's bytes without the fields in which a repeated one differs from the first."""
    same = ControlOutcome()
    same.CopyFrom(published)
    same.ClearField("applied_at")
    same.ClearField("is_repeat")
    return same.SerializeToString(deterministic=True)
