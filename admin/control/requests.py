"""Control commands as requests: made of message ids, and kept until each outcome that they wait for has come."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from broker.message_ids import MessageRef
from conf.errors import DelayLakeError
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

_SHOWN_IDS = 5

_T = TypeVar("_T")

MAX_ENTRIES = 1_000  # of a command; more are sent as several

# The results with which a command is done: of a skip, the message will not be delivered. A cancel that comes before its
# message waits for it, which is all that can be done.
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
    """What a command did to one message, or entry, of one subscription; where they are summed up, to several."""

    subscription: str
    message: MessageRef  # -1 throughout: several messages, or all
    result: str  # the name of a Result
    reason: str
    is_done: bool  # the command is done, by this one or before
    n_messages: int = 1  # how many messages, counted for each subscription, it is of

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
        n_messages: how many messages the command names.
        expected: the outcomes.
        done: the results with which it is done.
    """

    def __init__(
        self,
        command: ControlCommand,
        n_messages: int,
        expected: _OneByOne | _ByKey | _SummedUp,
        done: frozenset[int],
    ) -> None:
        self.command = command
        self.n_messages = n_messages
        self._expected = expected
        self._done = done

    @property
    def request_id(self) -> str:
        return self.command.request_id

    @property
    def is_answered(self) -> bool:
        return not self._expected.left

    def take(self, published: ControlOutcome) -> Outcome | None:
        """Takes an outcome of the command as it was published; None: another will follow for its message."""
        if published.result == Result.WAITING and Result.WAITING not in self._done:
            return None
        return Outcome(
            published.subscription,
            MessageRef(published.ledger_id, published.entry_id, -1, published.batch_index),
            Result.Name(published.result),
            published.reason,
            published.result in self._done,
            self._expected.settle(published),
        )


class _OneByOne:
    """Expects an outcome for each message of each subscription."""

    def __init__(self, messages: Sequence[MessageRef], subscriptions: Sequence[str]) -> None:
        # For each entry, (ledger, entry), the subscription and batch index of the outcomes that are to come.
        self.left: dict[tuple[int, int], set[tuple[str, int]]] = defaultdict(set)
        for m in messages:
            self.left[m.ledger_id, m.entry_id].update((name, m.batch_index) for name in subscriptions)

    def settle(self, published: ControlOutcome) -> int:
        """Strikes out the messages that an outcome is of; returns of how many it is, which here counts as 1."""
        entries = list(self.left) if published.ledger_id < 0 else [(published.ledger_id, published.entry_id)]
        for entry in entries:
            left = {key for key in self.left.pop(entry, ()) if not _answers(published, *key)}
            if left:
                self.left[entry] = left
        return 1


class _ByKey:
    """Expects an outcome for each schedule key of each subscription."""

    def __init__(self, keys: Sequence[str], subscriptions: Sequence[str]) -> None:
        self.left = {(name, key) for name in subscriptions for key in keys}

    def settle(self, published: ControlOutcome) -> int:
        """Strikes out the key that an outcome is of, or all where it is of none; returns 1."""
        self.left = {
            (name, key)
            for name, key in self.left
            if (published.subscription and name not in ("", published.subscription))
            or published.schedule_key not in ("", key)
        }
        return 1


class _SummedUp:
    """Expects outcomes for as many messages or entries as a command names, for each subscription.

    Args:
        n: how many messages or entries the command names.
        batch_size: how many messages each of these has.
    """

    def __init__(self, n: int, subscriptions: Sequence[str], batch_size: int) -> None:
        self.left = dict.fromkeys(subscriptions, n)
        self._batch_size = batch_size

    def settle(self, published: ControlOutcome) -> int:
        """Counts off the messages or entries that an outcome is of; returns of how many messages it is."""
        names = [n for n in self.left if published.subscription in ("", n) or not n]
        if published.ledger_id >= 0:
            # It is of one of the messages of an entry that was named whole: only the last of them ends the entry.
            settled = dict.fromkeys(names, int(not published.has_more))
        else:
            # An outcome without a number is of all.
            settled = {name: min(published.n_named or self.left[name], self.left[name]) for name in names}
        self.left = {n: left for n in self.left if (left := self.left[n] - settled.get(n, 0))}
        return len(names) if published.ledger_id >= 0 else sum(settled.values()) * self._batch_size


class Window:
    """Requests that are to be sent, some of them ahead of the outcomes of others.

    Args:
        most: how many messages may be named by commands that are not answered yet, about: enough for the job to have
            some at hand always, and few enough that the outcomes begin soon.
    """

    def __init__(self, requests: Iterable[ControlRequest], most: int) -> None:
        self._coming = iter(requests)
        self._most = most
        self._ahead = 0
        self.waiting: dict[str, ControlRequest] = {}  # by request id: sent, and not answered

    def no_answer(self, timeout_seconds: float) -> str:
        """Returns the error's text where no outcome came in time, with some request ids, which `outcomes` has, too."""
        ids = ", ".join(list(self.waiting)[:_SHOWN_IDS])
        return f"no answer within {timeout_seconds:g} s (does the job run?); request id: {ids}"

    def next(self) -> ControlRequest | None:
        """Returns the next request to send; None: there is none, or too many messages wait for their outcomes."""
        if self._ahead >= self._most:
            return None
        request = next(self._coming, None)
        if request is not None:
            self.waiting[request.request_id] = request
            self._ahead += request.n_messages
        return request

    def take(self, published: ControlOutcome) -> Outcome | None:
        """Takes an outcome as it was published.

        Returns:
            the outcome; None: it is of no request that waits, or another will follow for its message.
        """
        request = self.waiting.get(published.request_id)
        if request is None:
            return None
        outcome = request.take(published)
        if request.is_answered:
            del self.waiting[published.request_id]
            self._ahead -= request.n_messages
        return outcome


@dataclass(frozen=True)
class RequestFactory:
    """Makes requests for messages of one topic.

    Attributes:
        issued_by: who commands, as the outcomes tell it.
        topic: a source topic or a partition of it.
        subscriptions: their names; none: all of the topic's.
        sum_up: whether the messages of a command that share a result have one outcome together.
        request_id: of the first command, chosen by who asks, so that asking again changes nothing more; further
            commands of the call have a number behind it. "": each has an id of its own.
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
            times: when each message is due, ms since the epoch, by which it is found sooner; none: not known.
        """
        parts = zip(_parts(messages), _parts(times or [0] * len(messages)), strict=True)
        for number, (part, known) in enumerate(parts):
            command = self._command(number)
            command.skip.entries.extend(map(_skip_entry, part, known))
            yield self._request(command, part, SKIPPED)

    def reschedule(self, messages: Sequence[MessageRef], deliver_at: int) -> Iterator[ControlRequest]:
        """Makes requests to deliver pending messages at another time, ms since the epoch; one that is past: at once."""
        for number, part in enumerate(_parts(messages)):
            command = self._command(number)
            command.reschedule.entries.extend(map(_skip_entry, part))
            command.reschedule.deliver_at = deliver_at
            yield self._request(command, part, SKIPPED)

    def retry(self, messages: Sequence[MessageRef], reason: str, after_millis: int) -> Iterator[ControlRequest]:
        """Makes requests to deliver messages, which a consumer of the subscription failed on, once more.

        Args:
            reason: why, for the attempts and the dead letters.
            after_millis: how long from now; 0: as the subscription's backoff says.
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
            yield self._request(command, part, SKIPPED)

    def cancel_keys(self, keys: Sequence[str]) -> Iterator[ControlRequest]:
        """Makes requests to cancel the messages that wait under schedule keys."""
        for part in _parts(keys):
            command = self._command()
            command.cancels.messages.extend(CancelDelayedMessage(schedule_key=key) for key in part)
            yield self._by_key(command, part)

    def skip_keys(self, keys: Sequence[str]) -> Iterator[ControlRequest]:
        """Makes requests to skip the messages that wait under schedule keys."""
        for part in _parts(keys):
            command = self._command()
            command.skip.entries.extend(SkipEntry(schedule_key=key) for key in part)
            yield self._by_key(command, part)

    def reschedule_keys(self, keys: Sequence[str], deliver_at: int) -> Iterator[ControlRequest]:
        """Makes requests to deliver the messages that wait under schedule keys at another time, as `reschedule`."""
        for part in _parts(keys):
            command = self._command()
            command.reschedule.entries.extend(SkipEntry(schedule_key=key) for key in part)
            command.reschedule.deliver_at = deliver_at
            yield self._by_key(command, part)

    def _by_key(self, command: ControlCommand, keys: Sequence[str]) -> ControlRequest:
        return ControlRequest(command, len(keys), _ByKey(keys, self._names()), SKIPPED)

    def restore(self, messages: Sequence[MessageRef]) -> Iterator[ControlRequest]:
        """Makes requests to undo cancels and skips of messages that are not due yet."""
        for number, part in enumerate(_parts(messages)):
            command = self._command(number)
            command.restore.entries.extend(map(_skip_entry, part))
            yield self._request(command, part, SKIPPED)

    def pause(self, is_paused: bool) -> ControlRequest:
        """Makes a request to hold back the messages that come due for the subscriptions, or to end that."""
        command = self._command()
        if is_paused:
            command.pause.CopyFrom(PauseSubscriptions())
        else:
            command.resume.CopyFrom(ResumeSubscriptions())
        # There is an outcome for each subscription, with no position.
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
        self, command: ControlCommand, messages: Sequence[MessageRef], done: frozenset[int], batch_size: int = 1
    ) -> ControlRequest:
        names = self._names()
        expected = _SummedUp(len(messages), names, batch_size) if self.sum_up else _OneByOne(messages, names)
        return ControlRequest(command, len(messages) * batch_size, expected, done)

    def _names(self) -> list[str]:
        """Returns the subscriptions for which there will be outcomes; "" stands for any."""
        others = [ALSO_LATER] if ALSO_LATER in self.subscriptions else []
        if self.subscriptions and not others:
            return list(self.subscriptions)
        name = self.topic.rpartition("-partition-")[0] or self.topic
        route = self.settings.route(self.topic) or self.settings.route(name)
        # For a topic without a route there will be one outcome.
        return [*others, *(s.name for s in route.subscriptions)] if route else others or [""]


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yields items in parts of at most MAX_ENTRIES, as a command can name."""
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


def _answers(published: ControlOutcome, subscription: str, batch_index: int) -> bool:
    """Whether an outcome for an entry is the last for one of its messages, or for all of it (-1), of a subscription."""
    if published.subscription and subscription not in ("", published.subscription):
        return False
    if published.batch_index < 0 or published.batch_index == batch_index:
        return True
    # Where an entry's messages do not share a result, each has an outcome, and the last of them ends the entry.
    return batch_index < 0 and not published.has_more
