"""Makes control commands of message ids or schedule keys, and keeps track of their outcomes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from admin.control.expected_outcomes import ByKey, OneByOne, SummedUp
from broker.entries.message_ids import MessageRef
from conf.errors import DelayLakeError
from conf.partitions import without_partition
from conf.settings import Settings
from tracker.commands.kinds import CANCEL, OPERATIONS, Operation
from tracker.subscriptions import ALSO_LATER
from tracker.wire.delaylake_pb2 import (
    CancelDelayedMessage,
    ControlCommand,
    ControlOutcome,
    Result,
    SkipEntry,
)

MAX_ENTRIES = 1_000  # of a command; for more several commands are sent
# The results with which a command is done, now or before. A cancel that comes before its message waits for it, and that
# is enough.
DONE = frozenset({Result.APPLIED, Result.ALREADY_APPLIED})


class ControlError(DelayLakeError):
    """A command can't be sent, or was not answered. The message is one line."""


@dataclass(frozen=True)
class Ids:
    """Messages, or whole entries, by their ids.

    Attributes:
        times: when each is due, ms since the epoch, which a cancel needs, and by which a skip finds it sooner; empty:
            unknown.
        batch_size: the number of messages in each.
    """

    messages: Sequence[MessageRef]
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

    def make(self, kind: str, named: Named | None = None, **fields: int | str) -> Iterator[ControlRequest]:
        """Makes the requests for an operation.

        Args:
            kind: of the operation: a key of OPERATIONS.
            named: the messages; None: the operation is for all that the subscriptions get.
            fields: of the operation's message in proto/delaylake.proto, beside the messages: `deliver_at` of a
                reschedule, ms since the epoch, where a past time means at once; `reason` and `after_millis` of a retry.
        """
        operation = OPERATIONS[kind]
        if named is None:
            command = self._command()
            getattr(command, kind).SetInParent()
            # The outcome for each subscription has no position.
            yield self._request(command, operation, Ids([MessageRef(-1, -1)]))
            return
        parts: Iterator[Named] = named.parts(1 if operation.names_one else MAX_ENTRIES)
        for number, part in enumerate(parts):
            command = self._command(number)
            if kind == CANCEL:
                _fill_cancel(command, part)
            else:
                _fill(getattr(command, kind), operation, part, fields)
            yield self._request(command, operation, part)

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

    def _request(self, command: ControlCommand, operation: Operation, part: Named) -> ControlRequest:
        # There is no outcome for `*` of an operation on a schedule: a later subscription has no next occurrence.
        names = self._names(with_later=not operation.is_of_schedule)
        if isinstance(part, Keys):
            return ControlRequest(command, len(part), ByKey(part.keys, names), DONE)
        size = part.batch_size
        expected = SummedUp(len(part), names, size) if self.sum_up else OneByOne(part.messages, names)
        return ControlRequest(command, len(part) * size, expected, done_results(operation.kind))

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


def done_results(kind: str) -> frozenset[int]:
    """Returns the results with which an operation that names messages by their ids is done."""
    return DONE | {Result.WAITING} if OPERATIONS[kind].may_wait else DONE


def _fill_cancel(command: ControlCommand, part: Named) -> None:
    if isinstance(part, Keys):
        command.cancels.messages.extend(CancelDelayedMessage(schedule_key=key) for key in part.keys)
        return
    messages = [
        CancelDelayedMessage(ledger_id=one.ledger_id, entry_id=one.entry_id, deliver_at=time)
        for one, time in zip(part.messages, part.times, strict=True)
    ]
    if len(messages) == 1 and not command.sum_up:
        command.cancel.CopyFrom(messages[0])  # as PIP-423's cancelDelayedMessage
    else:
        command.cancels.messages.extend(messages)


def _fill(content: Any, operation: Operation, part: Named, fields: Mapping[str, int | str]) -> None:
    """Fills an operation's message in a command.

    Args:
        content: the message, such as `command.skip`.
    """
    if isinstance(part, Keys):
        entries = [SkipEntry(schedule_key=key) for key in part.keys]
    else:
        entries = [_skip_entry(*one) for one in zip(part.messages, part.times or [0] * len(part), strict=True)]
    if operation.names_one:
        content.entry.CopyFrom(entries[0])
    else:
        content.entries.extend(entries)
    for name, value in fields.items():
        setattr(content, name, value)


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
