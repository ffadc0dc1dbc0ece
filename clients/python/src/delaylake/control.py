"""Commands on the control topic without I/O: makes them, knows their answers, and says which are to be sent again.

Who sends them publishes what `Window.next` returns, and gives the window each outcome that is published. Needs the
extra `pulsar`, of which only protobuf is used here.
"""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from delaylake.commands import CANCEL, SCHEDULE_OPERATIONS, WAITING, Ids, Keys, Named, Position, done_results
from delaylake.message_ids import MessageId, Outcome
from delaylake.wire.delaylake_pb2 import CancelDelayedMessage, ControlCommand, ControlOutcome, Result, SkipEntry

MAX_ENTRIES = 1_000  # of a command; for more several commands are sent
ALSO_LATER = "*"  # in place of a subscription's name: those that are added to the topic later, too

_SHOWN_IDS = 5
_MOST_REPEATED = 1_000  # the maximum number of requests that are repeated at a time


@dataclass(frozen=True)
class Settled:
    """An outcome as it was published, and the number of its messages, counted for each subscription."""

    published: ControlOutcome
    n_messages: int


class OneByOne:
    """Expects an outcome for each message of each subscription."""

    def __init__(self, messages: Sequence[Position], subscriptions: Sequence[str]) -> None:
        # The (subscription, batch index) of the outcomes still to come, by (ledger, entry).
        self.left: dict[tuple[int, int], set[tuple[str, int]]] = defaultdict(set)
        for m in messages:
            self.left[m.ledger_id, m.entry_id].update((name, m.batch_index) for name in subscriptions)

    def settle(self, published: ControlOutcome) -> list[Settled]:
        """Strikes out the messages of an outcome; returns the outcome, which counts as one message here."""
        entries = list(self.left) if published.ledger_id < 0 else [(published.ledger_id, published.entry_id)]
        for entry in entries:
            left = {key for key in self.left.pop(entry, ()) if not _answers(published, *key)}
            if left:
                self.left[entry] = left
        return [Settled(published, 1)]


class ByKey:
    """Expects an outcome for each schedule key of each subscription."""

    def __init__(self, keys: Sequence[str], subscriptions: Sequence[str]) -> None:
        self._keys = frozenset(keys)
        self.left = {(name, key) for name in subscriptions for key in keys}

    def settle(self, published: ControlOutcome) -> list[Settled]:
        """Strikes out the key of an outcome, or all keys if the outcome has none; returns the outcome.

        That of another key, as of a reused request id, is left out.
        """
        if published.schedule_key and published.schedule_key not in self._keys:
            return []
        self.left = {
            (name, key)
            for name, key in self.left
            if (published.subscription and name not in ("", published.subscription))
            or published.schedule_key not in ("", key)
        }
        return [Settled(published, 1)]


class SummedUp:
    """Expects outcomes for as many messages or entries as a command names, for each subscription.

    Two outcomes with numbers may be about the same messages. So the outcomes that a repeated command gets in a tick,
    which are all that is known by then, are an answer of their own, and the first complete answer counts.

    Args:
        n: the number of messages or entries that the command names.
        subscriptions: names of the subscriptions.
        batch_size: the number of messages in each of these.
    """

    def __init__(self, n: int, subscriptions: Sequence[str], batch_size: int) -> None:
        self.left = dict.fromkeys(subscriptions, n)  # what is missing in the most complete answer
        self._named = dict(self.left)
        self._batch_size = batch_size
        # The answers to repeats by their time, ms since the epoch; 0: the first answer, which may be published in
        # several ticks.
        self._answers: dict[int, _Answer] = {}

    def settle(self, published: ControlOutcome) -> list[Settled]:
        """Counts off the messages or entries of an outcome; returns the outcomes of its answer if that is complete."""
        answered_at = published.applied_at if published.is_repeat else 0
        answer = self._answers.setdefault(answered_at, _Answer(self._named, self._batch_size))
        answer.take(published)
        self.left = min((one.left for one in self._answers.values()), key=lambda left: sum(left.values()))
        return [] if answer.left else answer.outcomes


class _Answer:
    """An answer to a command whose outcomes are summed up.

    Args:
        named: the number of messages or entries that the command names, by subscription.
        batch_size: the number of messages in each of these.
    """

    def __init__(self, named: dict[str, int], batch_size: int) -> None:
        self.left = named
        self._batch_size = batch_size
        self.outcomes: list[Settled] = []

    def take(self, published: ControlOutcome) -> None:
        names = [n for n in self.left if published.subscription in ("", n) or not n]
        if published.ledger_id >= 0:
            # An outcome of one message of an entry that was named whole: only the last of them ends the entry.
            settled = dict.fromkeys(names, int(not published.has_more))
            n_messages = len(names)
        else:
            # An outcome without a number is for all messages.
            settled = {name: min(published.n_named or self.left[name], self.left[name]) for name in names}
            n_messages = sum(settled.values()) * self._batch_size
        self.left = {n: left for n in self.left if (left := self.left[n] - settled.get(n, 0))}
        self.outcomes.append(Settled(published, n_messages))


_Expected = OneByOne | ByKey | SummedUp


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
        expected: _Expected,
        done: frozenset[str],
    ) -> None:
        self.command = command
        self.n_messages = n_messages
        self._expected = expected
        self._done = done
        names = frozenset(command.subscriptions)
        self._subscriptions = frozenset() if ALSO_LATER in names else names  # empty: those of the topic, whichever
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
        if self._subscriptions and published.subscription not in ("", *self._subscriptions):
            return []
        if published.result == Result.WAITING and WAITING not in self._done:
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
        result = Result.Name(published.result)
        return Outcome(
            published.subscription,
            MessageId(published.ledger_id, published.entry_id, -1, published.batch_index),
            result,
            published.reason,
            result in self._done,
            n_messages,
        )


@dataclass(frozen=True)
class RequestFactory:
    """Makes requests for messages of one topic.

    Attributes:
        issued_by: the commands' sender, as it appears in outcomes.
        topic: a source topic or a partition of it.
        subscriptions: names of subscriptions; empty: all of the topic's; `*`: also those that are added later.
        known: the topic's subscriptions, where `subscriptions` stands for all; empty: the topic has no route.
        sum_up: whether messages of a command with the same result have one outcome together.
        request_id: the first command's request id, chosen by the caller, so that a repeated call has no further effect;
            further commands have a number behind it. Empty: each command gets an id.
    """

    issued_by: str
    topic: str
    subscriptions: Sequence[str] = ()
    known: Sequence[str] = ()
    sum_up: bool = False
    request_id: str = ""

    def make(self, operation: str, named: Named | None = None, **fields: int | str) -> Iterator[ControlRequest]:
        """Makes the requests for an operation.

        Args:
            operation: the name of its field in ControlCommand.
            named: the messages; None: the operation is for all that the subscriptions get.
            fields: of the operation's message in proto/delaylake.proto, beside the messages: `deliver_at` of a
                reschedule, ms since the epoch, where a past time means at once; `reason` and `after_millis` of a retry.
        """
        if named is None:
            command = self._command()
            getattr(command, operation).SetInParent()
            # The outcome for each subscription has no position.
            yield self._request(command, operation, Ids([MessageId(-1, -1)]))
            return
        names_one = "entry" in getattr(ControlCommand(), operation).DESCRIPTOR.fields_by_name
        parts: Iterator[Named] = named.parts(1 if names_one else MAX_ENTRIES)
        for number, part in enumerate(parts):
            command = self._command(number)
            if operation == CANCEL:
                _fill_cancel(command, part)
            else:
                _fill(getattr(command, operation), names_one, part, fields)
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

    def _request(self, command: ControlCommand, operation: str, part: Named) -> ControlRequest:
        names, done = self._names(operation), done_results(operation, part)
        if isinstance(part, Keys):
            return ControlRequest(command, len(part), ByKey(part.keys, names), done)
        size = part.batch_size
        expected = SummedUp(len(part), names, size) if self.sum_up else OneByOne(part.messages, names)
        return ControlRequest(command, len(part) * size, expected, done)

    def _names(self, operation: str) -> list[str]:
        """Returns the subscriptions for which there will be outcomes; "" stands for any."""
        is_for_later = ALSO_LATER in self.subscriptions
        if self.subscriptions and not is_for_later:
            return list(self.subscriptions)
        # There is no outcome for `*` of an operation on a schedule: a later subscription has no next occurrence.
        later = [ALSO_LATER] if is_for_later and operation not in SCHEDULE_OPERATIONS else []
        # There will be one outcome for a topic without a route.
        return [*later, *self.known] or [""]


class Window:
    """Requests to be sent, several of them ahead of the outcomes of others.

    Args:
        requests: the requests.
        most: about the maximum number of messages in commands without an answer: enough that the job always has some,
            and few enough that outcomes begin soon.
        timeout_seconds: maximum time from one outcome to the next.
        until: when all outcomes have to be there, instead, by the caller's clock, seconds.
    """

    def __init__(
        self,
        requests: Iterable[ControlRequest],
        most: int,
        timeout_seconds: float = math.inf,
        until: float | None = None,
    ) -> None:
        self._coming = iter(requests)
        self._timeout_seconds = timeout_seconds
        self._until = until
        self._has_taken = False
        self._deadline = self._wait_until = math.inf if until is None else until  # for the next outcome
        self._most = most
        self._ahead = 0
        self.waiting: dict[str, ControlRequest] = {}  # requests that were sent and not answered, by request id

    def to_send(self, clock: Callable[[], float]) -> Iterator[ControlRequest]:
        """Yields the requests to be sent now; when no outcome came for half of the time, also those that are repeated.

        Args:
            clock: returns the time, seconds. Whoever sends the requests, or took an outcome, may be busy with it.
        """
        if self._has_taken:
            self._has_taken = False
            self._extend(clock())
        while request := self.next():
            yield request
            self._extend(clock())
        self._wait_until = self._repeat_at
        if clock() >= self._repeat_at:
            self._wait_until = self._deadline
            yield from self.repeat()

    def wait_until(self) -> float:
        """Returns until when to wait for an outcome, perhaps a time in the past, before `to_send` is asked again.

        That follows from the time by which `to_send` was asked: by a later one a repeat would be left out.
        """
        return self._wait_until

    def is_late(self, now: float) -> bool:
        """Whether no outcome came in time."""
        return now >= self._deadline

    def no_answer(self) -> str:
        """Returns the error's text if no outcome came in time, with some request ids to look up in `outcomes`."""
        ids = ", ".join(list(self.waiting)[:_SHOWN_IDS])
        return f"no answer within {self._timeout_seconds:g} s (does the job run?); request id: {ids}"

    @property
    def _repeat_at(self) -> float:
        return self._deadline - self._timeout_seconds / 2

    def _extend(self, now: float) -> None:
        if self._until is None:
            self._deadline = now + self._timeout_seconds

    def next(self) -> ControlRequest | None:
        """Returns the next request to send; None: there is none, or too many messages wait for outcomes."""
        if self._ahead >= self._most:
            return None
        request = next(self._coming, None)
        if request is not None:
            self.waiting[request.request_id] = request
            self._ahead += request.n_messages
        return request

    def repeat(self) -> list[ControlRequest]:
        """Returns requests to be repeated, once each, because their outcomes may have been missed.

        A reader misses outcomes if the broker unloads the outcome topic. Not all of many requests are returned: if none
        of them gets an answer, the job is not running.
        """
        waiting = itertools.islice(self.waiting.values(), _MOST_REPEATED)
        return [request for request in waiting if request.repeat()]

    def take(self, published: ControlOutcome) -> list[Outcome]:
        """Takes a published outcome, of anybody's command.

        Returns:
            as `ControlRequest.take`; empty if no request waits for the outcome.
        """
        request = self.waiting.get(published.request_id)
        if request is None:
            return []
        self._has_taken = True
        outcomes = request.take(published)
        if request.is_answered:
            del self.waiting[published.request_id]
            self._ahead -= request.n_messages
        return outcomes


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


def _fill(content: Any, names_one: bool, part: Named, fields: Mapping[str, int | str]) -> None:
    """Fills an operation's message in a command.

    Args:
        content: the message, such as `command.skip`.
        names_one: whether it has one entry, and not a list of them.
    """
    if isinstance(part, Keys):
        entries = [SkipEntry(schedule_key=key) for key in part.keys]
    else:
        entries = [_skip_entry(*one) for one in zip(part.messages, part.times or [0] * len(part), strict=True)]
    if names_one:
        content.entry.CopyFrom(entries[0])
    else:
        content.entries.extend(entries)
    for name, value in fields.items():
        setattr(content, name, value)


def _skip_entry(message: Position, deliver_at: int = 0) -> SkipEntry:
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


def _answers(published: ControlOutcome, subscription: str, batch_index: int) -> bool:
    """Whether an outcome for an entry is the last one for a subscription and one of its messages, or all (-1)."""
    if published.subscription and subscription not in ("", published.subscription):
        return False
    if published.batch_index < 0 or published.batch_index == batch_index:
        return True
    # If the messages of an entry have different results, each has an outcome, and the last one ends the entry.
    return batch_index < 0 and not published.has_more
