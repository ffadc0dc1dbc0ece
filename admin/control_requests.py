"""Control commands as requests: built from ids, and kept until each outcome that they wait for has come."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from admin.message_ids import MessageRef
from conf.errors import DelayLakeError
from conf.settings import Settings
from proto.delaylake_pb2 import (
    CancelDelayedMessage,
    ControlCommand,
    ControlOutcome,
    PauseSubscriptions,
    RescheduleMessages,
    RestoreMessages,
    Result,
    ResumeSubscriptions,
    SkipEntry,
    SkipMessages,
)

MAX_ENTRIES = 1_000  # of a command; more are sent as several

# The results with which it is done: of a skip, the message will not be delivered. In advance of its message a cancel is
# kept, which is all that can be done.
SKIPPED = frozenset({Result.APPLIED, Result.ALREADY_APPLIED})
CANCELLED = SKIPPED | {Result.WAITING}


class ControlError(DelayLakeError):
    """A command can't be sent, or is not answered. The message is one line."""


@dataclass(frozen=True)
class Cancel:
    """A delayed message to cancel; deliver_at in ms since the epoch, as it was sent."""

    message: MessageRef
    deliver_at: int


@dataclass(frozen=True)
class Outcome:
    """What was done to one message, or entry, of one subscription."""

    subscription: str
    message: MessageRef
    result: str  # the name of a Result
    reason: str
    is_done: bool  # what was asked for is done, or was before

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
    """A command, and the outcomes that it still waits for: one for each message of each subscription."""

    def __init__(
        self,
        command: ControlCommand,
        messages: Sequence[MessageRef],
        subscriptions: Sequence[str],
        done: frozenset[int],
    ) -> None:
        self.command = command
        self.n_messages = len(messages)
        self._done = done
        # By entry, the subscription and batch index of each outcome.
        self._expected: dict[tuple[int, int], set[tuple[str, int]]] = defaultdict(set)
        for m in messages:
            self._expected[m.ledger_id, m.entry_id].update((name, m.batch_index) for name in subscriptions)

    @property
    def request_id(self) -> str:
        return self.command.request_id

    @property
    def is_answered(self) -> bool:
        return not self._expected

    def take(self, told: ControlOutcome) -> Outcome | None:
        """Takes one of its outcomes; None where that is not the last word on its message."""
        if told.result == Result.WAITING and Result.WAITING not in self._done:
            return None
        entries = list(self._expected) if told.ledger_id < 0 else [(told.ledger_id, told.entry_id)]
        for entry in entries:
            left = {key for key in self._expected.pop(entry, ()) if not _answers(told, *key)}
            if left:
                self._expected[entry] = left
        return Outcome(
            told.subscription,
            MessageRef(told.ledger_id, told.entry_id, -1, told.batch_index),
            Result.Name(told.result),
            told.reason,
            told.result in self._done,
        )


def cancel_request(
    settings: Settings, issued_by: str, topic: str, cancel: Cancel, subscriptions: Sequence[str]
) -> ControlRequest:
    """A request to cancel a delayed message, as PIP-423's cancelDelayedMessage.

    Args:
        subscriptions: their names; none: all of the topic's.
    """
    command = _command(issued_by, topic, subscriptions)
    command.cancel.CopyFrom(
        CancelDelayedMessage(
            ledger_id=cancel.message.ledger_id, entry_id=cancel.message.entry_id, deliver_at=cancel.deliver_at
        )
    )
    return ControlRequest(command, [cancel.message], _names(settings, topic, subscriptions), CANCELLED)


def skip_requests(
    settings: Settings,
    issued_by: str,
    topic: str,
    messages: Sequence[MessageRef],
    subscriptions: Sequence[str],
    times: Sequence[int] = (),
) -> Iterator[ControlRequest]:
    """Requests to skip messages or whole entries, as PIP-423's skipByMessageIds; arguments as above.

    Args:
        times: when the messages wait, where that is known: they are found sooner.
    """
    return _of_entries(settings, issued_by, topic, messages, subscriptions, times, skip=SkipMessages())


def reschedule_requests(
    settings: Settings,
    issued_by: str,
    topic: str,
    messages: Sequence[MessageRef],
    deliver_at: int,
    subscriptions: Sequence[str],
) -> Iterator[ControlRequest]:
    """Requests to deliver messages that wait at another time, ms since the epoch; one that is past: at once."""
    operation = RescheduleMessages(deliver_at=deliver_at)
    return _of_entries(settings, issued_by, topic, messages, subscriptions, reschedule=operation)


def restore_requests(
    settings: Settings, issued_by: str, topic: str, messages: Sequence[MessageRef], subscriptions: Sequence[str]
) -> Iterator[ControlRequest]:
    """Requests to undo cancels and skips of messages that are not due yet."""
    return _of_entries(settings, issued_by, topic, messages, subscriptions, restore=RestoreMessages())


def pause_request(
    settings: Settings, issued_by: str, topic: str, subscriptions: Sequence[str], is_paused: bool
) -> ControlRequest:
    """A request to hold back what comes due for subscriptions, or to end that."""
    command = _command(issued_by, topic, subscriptions)
    if is_paused:
        command.pause.CopyFrom(PauseSubscriptions())
    else:
        command.resume.CopyFrom(ResumeSubscriptions())
    # Answered by subscription, not by message.
    return ControlRequest(command, [MessageRef(-1, -1)], _names(settings, topic, subscriptions), SKIPPED)


def _of_entries(
    settings: Settings,
    issued_by: str,
    topic: str,
    messages: Sequence[MessageRef],
    subscriptions: Sequence[str],
    times: Sequence[int] = (),
    **operation: SkipMessages | RescheduleMessages | RestoreMessages,
) -> Iterator[ControlRequest]:
    [(name, body)] = operation.items()
    for start in range(0, len(messages), MAX_ENTRIES):
        part = messages[start : start + MAX_ENTRIES]
        command = _command(issued_by, topic, subscriptions)
        named = getattr(command, name)
        named.CopyFrom(body)
        known = times[start : start + MAX_ENTRIES] or [0] * len(part)
        named.entries.extend(_skip_entry(message, time) for message, time in zip(part, known, strict=True))
        yield ControlRequest(command, part, _names(settings, topic, subscriptions), SKIPPED)


def _command(issued_by: str, topic: str, subscriptions: Sequence[str]) -> ControlCommand:
    return ControlCommand(
        request_id=uuid.uuid4().hex,
        topic=topic,
        subscriptions=subscriptions,
        issued_at=time.time_ns() // 1_000_000,
        issued_by=issued_by,
    )


def _names(settings: Settings, topic: str, subscriptions: Sequence[str]) -> list[str]:
    """The subscriptions that will answer."""
    if subscriptions:
        return list(subscriptions)
    name = topic.rpartition("-partition-")[0] or topic
    route = settings.route(topic) or settings.route(name)
    # Of a topic without a route nothing is known but that there will be one answer.
    return [s.name for s in route.subscriptions] if route else [""]


def _skip_entry(message: MessageRef, deliver_at: int) -> SkipEntry:
    entry = SkipEntry(ledger_id=message.ledger_id, entry_id=message.entry_id, deliver_at=deliver_at)
    if message.batch_index >= 0:
        entry.batch_indexes.append(message.batch_index)
    if message.partition >= 0:
        entry.partition = message.partition
    return entry


def _answers(told: ControlOutcome, subscription: str, batch_index: int) -> bool:
    """Whether an outcome for an entry answers for one of its messages, or all (-1), of a subscription."""
    if told.subscription and subscription not in ("", told.subscription):
        return False
    if told.batch_index < 0 or told.batch_index == batch_index:
        return True
    # An entry is answered by its messages where they do not share a result: by the last of them.
    return batch_index < 0 and not told.has_more
