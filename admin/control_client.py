"""Sends control commands and waits for what they did. Needs no JVM."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pulsar

from admin.message_ids import MessageRef
from conf.errors import DelayLakeError
from conf.settings import Settings
from proto.delaylake_pb2 import CancelDelayedMessage, ControlCommand, ControlOutcome, Result, SkipEntry, SkipMessages
from streaming.pulsar_client import connect

MAX_ENTRIES = 1_000  # of a command; more are sent as several

DONE = frozenset({Result.APPLIED, Result.ALREADY_APPLIED})


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
    is_done: bool  # the message will not be delivered

    def to_json(self) -> dict[str, object]:
        return {
            "subscription": self.subscription,
            "ledgerId": self.message.ledger_id,
            "entryId": self.message.entry_id,
            "batchIndex": self.message.batch_index,
            "result": self.result,
            "reason": self.reason,
        }


class ControlClient:
    """Publishes commands to the control topic and reads their outcomes. A context manager.

    Outcomes are read from the moment the client is made, so that none is missed.
    """

    def __init__(self, settings: Settings, issued_by: str) -> None:
        self._settings = settings
        self._issued_by = issued_by
        self._client = connect(settings.pulsar, operation_timeout_seconds=10)
        try:
            self._outcomes = self._client.create_reader(settings.control.outcome_topic, pulsar.MessageId.latest)
            self._producer = self._client.create_producer(settings.control.topic, block_if_queue_full=True)
        except pulsar.PulsarException as error:
            self._client.close()
            raise ControlError(f"no connection to Pulsar at {settings.pulsar.service_url}: {error}") from error

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def cancel(
        self, topic: str, cancels: Iterable[Cancel], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Cancels delayed messages, as PIP-423's cancelDelayedMessage; yields what became of each.

        Args:
            subscriptions: their names; none: all of the topic's.

        Raises:
            ControlError: not everything was answered in time.
        """
        commands = []
        for cancel in cancels:
            command = self._command(topic, subscriptions)
            command.cancel.CopyFrom(
                CancelDelayedMessage(
                    ledger_id=cancel.message.ledger_id, entry_id=cancel.message.entry_id, deliver_at=cancel.deliver_at
                )
            )
            commands.append((command, [cancel.message]))
        # In advance of its message a cancel is kept, which is all that can be done.
        return self._send(commands, DONE | {Result.WAITING}, timeout_seconds)

    def skip(
        self, topic: str, messages: Sequence[MessageRef], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Skips messages or whole entries, as PIP-423's skipByMessageIds; yields what became of each.

        Raises:
            ControlError: not everything was answered in time.
        """
        commands = []
        for start in range(0, len(messages), MAX_ENTRIES):
            part = messages[start : start + MAX_ENTRIES]
            command = self._command(topic, subscriptions)
            command.skip.CopyFrom(SkipMessages(entries=[_skip_entry(message) for message in part]))
            commands.append((command, list(part)))
        return self._send(commands, DONE, timeout_seconds)

    def _command(self, topic: str, subscriptions: Sequence[str]) -> ControlCommand:
        return ControlCommand(
            request_id=uuid.uuid4().hex,
            topic=topic,
            subscriptions=subscriptions,
            issued_at=time.time_ns() // 1_000_000,
            issued_by=self._issued_by,
        )

    def _send(
        self, commands: list[tuple[ControlCommand, list[MessageRef]]], done: frozenset[int], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Publishes commands and yields their outcomes until each message of each subscription has its last one."""
        open_requests: dict[str, set[tuple[str, int, int, int]]] = {}
        for command, messages in commands:
            names = list(command.subscriptions) or self._subscriptions(command.topic)
            open_requests[command.request_id] = {
                (name, m.ledger_id, m.entry_id, m.batch_index) for name in names for m in messages
            }
            self._producer.send_async(command.SerializeToString(), None)
        self._producer.flush()
        deadline = time.monotonic() + timeout_seconds
        while open_requests:
            left = int((deadline - time.monotonic()) * 1000)
            try:
                if left <= 0:
                    raise pulsar.Timeout
                outcome = ControlOutcome.FromString(self._outcomes.read_next(left).data())
            except pulsar.Timeout:
                raise ControlError(
                    f"no answer within {timeout_seconds:.0f} s (does the job run?); "
                    f"request ids: {', '.join(list(open_requests)[:5])}"
                ) from None
            expected = open_requests.get(outcome.request_id)
            if expected is None or (outcome.result == Result.WAITING and Result.WAITING not in done):
                continue
            yield Outcome(
                outcome.subscription,
                MessageRef(outcome.ledger_id, outcome.entry_id, -1, outcome.batch_index),
                Result.Name(outcome.result),
                outcome.reason,
                outcome.result in done,
            )
            _answer(expected, outcome)
            if not expected:
                del open_requests[outcome.request_id]

    def _subscriptions(self, topic: str) -> list[str]:
        name = topic.rpartition("-partition-")[0] or topic
        route = self._settings.route(topic) or self._settings.route(name)
        # Of a topic without a route nothing is known but that there will be one answer.
        return [s.name for s in route.subscriptions] if route else [""]


def _skip_entry(message: MessageRef) -> SkipEntry:
    entry = SkipEntry(ledger_id=message.ledger_id, entry_id=message.entry_id)
    if message.batch_index >= 0:
        entry.batch_indexes.append(message.batch_index)
    if message.partition >= 0:
        entry.partition = message.partition
    return entry


def _answer(expected: set[tuple[str, int, int, int]], outcome: ControlOutcome) -> None:
    """Takes out of the expected answers those that an outcome gives."""
    answered = {
        key
        for key in expected
        if (not outcome.subscription or key[0] in ("", outcome.subscription))
        and (outcome.ledger_id < 0 or key[1:3] == (outcome.ledger_id, outcome.entry_id))
        and (outcome.batch_index < 0 or key[3] in (-1, outcome.batch_index))
    }
    expected -= answered
