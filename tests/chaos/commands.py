"""The commands of a run: sends them, and knows what each was answered."""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pulsar

from broker.client import FIRST_SEQUENCE_ID
from tests.chaos.ledger import DELIVERED, EITHER, NOT_MEANT, Ledger, Pause
from tests.support.service.harness import now
from tracker.wire.delaylake_pb2 import ControlCommand, ControlOutcome, Result, SkipEntry

MOST_AHEAD_MILLIS = 5_000  # more than the longest lookahead
_LATER_MILLIS = 5_000  # by how much messages are rescheduled
_RETRY_MILLIS = 500  # how long a retry waits


class Asked(NamedTuple):
    """A command for a message."""

    number: int
    name: str  # the subscription that it is for
    # Of a reschedule the new time, ms since the epoch, later than the first; of a retry the earliest; None: neither.
    deliver_at: int | None = None
    attempt: int = 0  # of a retry its number; 0: it is none


_DONE = {int(Result.APPLIED), int(Result.ALREADY_APPLIED)}


@dataclass
class Commands:
    """The commands that were sent, and what they were answered."""

    asked: dict[str, Asked] = field(default_factory=dict)  # by request id
    # By request id all last answers, one however often it is told. One for no subscription is for all.
    answers: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    not_stored: int = 0  # commands that were sent, and that the broker does not have
    # By request id of a pause or its end what it was answered.
    of_pauses: dict[str, set[int]] = field(default_factory=dict)

    def take(self, data: bytes) -> None:
        published = ControlOutcome.FromString(data)
        if published.request_id in self.of_pauses:
            self.of_pauses[published.request_id].add(published.result)
        asked = self.asked.get(published.request_id)
        if asked and published.subscription in ("", asked.name) and published.result != Result.WAITING:
            self.answers[published.request_id].add(published.result)

    def unanswered(self) -> set[str]:
        """The request ids of commands that were not answered."""
        return {request for request in list(self.asked) if not self.answers.get(request)}

    def contradicted(self) -> dict[str, list[str]]:
        """By request id the answers to a command, where the last word was not the last."""
        return {r: sorted(map(Result.Name, a)) for r, a in list(self.answers.items()) if len(a) > 1}

    def were_not_stored(self, request_ids: set[str]) -> None:
        """The broker does not have these commands."""
        self.not_stored += len(request_ids)
        for request_id in request_ids:
            del self.asked[request_id]

    def settle(self, ledger: Ledger) -> None:
        """What was answered APPLIED must not come, or not before its time; what was not answered may have been done."""
        for request, (number, name, deliver_at, attempt) in list(self.asked.items()):
            answers = self.answers.get(request, set())
            if attempt:
                what = EITHER if not answers else DELIVERED if answers & _DONE else NOT_MEANT
                ledger.expect_further(name, number, (0, attempt), deliver_at or 0, what)
            elif deliver_at is None:
                ledger.expect(name, number, EITHER if not answers else NOT_MEANT if answers & _DONE else DELIVERED)
            elif answers & _DONE:
                ledger.not_before(name, number, deliver_at)


class Commander:
    """Sends commands, and has the ledger expect what follows from them.

    Args:
        topic: the control topic.
    """

    def __init__(self, client: pulsar.Client, topic: str, ledger: Ledger, commands: Commands) -> None:
        self._ledger, self._commands = ledger, commands
        self._producer = client.create_producer(
            topic, initial_sequence_id=FIRST_SEQUENCE_ID, send_timeout_millis=0, block_if_queue_full=True
        )
        self._ended = threading.Event()
        self._pausing: dict[str, threading.Thread] = {}  # by subscription

    def flush(self) -> None:
        self._producer.flush()

    def change(self, topic: str, number: int, message_id: Any, name: str) -> None:
        """Skips, reschedules or, where it is alone in its entry, cancels a message that was sent."""
        ledger_id, entry_id, partition, batch_index = (
            getattr(message_id, part)() for part in ("ledger_id", "entry_id", "partition", "batch_index")
        )
        entry = _entry(ledger_id, entry_id, partition, batch_index)
        due, deliver_at = int(self._ledger.due[number]), None
        command = _command(topic, name)
        kind = number // 7 % 3
        if kind == 0 and batch_index < 0:
            command.topic = f"{topic}-partition-{partition}"
            command.cancel.ledger_id, command.cancel.entry_id = ledger_id, entry_id
            command.cancel.deliver_at = due
        elif kind == 1:
            command.reschedule.entries.append(entry)
            command.reschedule.deliver_at = deliver_at = due + _LATER_MILLIS
            self._ledger.watch(name, number)
        else:
            command.skip.entries.append(entry)
        self._commands.asked[command.request_id] = Asked(number, name, deliver_at)
        self._send(command)

    def retry(self, number: int, name: str, delivered: Any) -> None:
        """Has a message that was delivered come once more, as after a failure."""
        given, not_before = delivered.properties(), now() + _RETRY_MILLIS
        command = _command(given["delaylake.source"], name)
        command.retry.entry.CopyFrom(_entry(*map(int, given["delaylake.messageId"].split(":"))))
        command.retry.after_millis = _RETRY_MILLIS
        self._ledger.expect_further(name, number, (0, 1), not_before, EITHER)
        self._commands.asked[command.request_id] = Asked(number, name, not_before, attempt=1)
        self._send(command)

    def pause(self, topic: str, name: str, seconds: float) -> bool:
        """Begins to pause a subscription for some time; returns false where it is paused already."""
        if self.is_paused(name):
            return False
        thread = threading.Thread(target=self._pause, args=(topic, name, seconds), daemon=True)
        self._pausing[name] = thread
        thread.start()
        return True

    def is_paused(self, name: str) -> bool:
        """Whether a subscription is, or is being, paused or resumed."""
        return name in self._pausing and self._pausing[name].is_alive()

    def end_pauses(self) -> None:
        """Ends all pauses, as soon as the job answers."""
        self._ended.set()

    def _pause(self, topic: str, name: str, seconds: float) -> None:
        command = _command(topic, name)
        command.pause.SetInParent()
        is_paused = self._ask(command)
        pause = Pause(now() + MOST_AHEAD_MILLIS)
        if is_paused:
            self._ledger.pauses[name].append(pause)
        self._ended.wait(seconds)
        pause.end = now()
        while True:  # while its route is missing there is no such subscription
            command = _command(topic, name)
            command.resume.SetInParent()
            if self._ask(command):
                return
            time.sleep(1)

    def _ask(self, command: ControlCommand) -> bool:
        """Sends a command of a pause, and waits for its answer; returns whether it was applied."""
        answers = self._commands.of_pauses[command.request_id] = set()
        self._send(command)
        while not answers:
            time.sleep(0.05)
        return bool(answers & _DONE)

    def _send(self, command: ControlCommand) -> None:
        self._producer.send_async(command.SerializeToString(), None)


def _command(topic: str, name: str) -> ControlCommand:
    return ControlCommand(
        request_id=uuid.uuid4().hex, topic=topic, subscriptions=[name], issued_at=now(), issued_by="chaos"
    )


def _entry(ledger_id: int, entry_id: int, partition: int, batch_index: int) -> SkipEntry:
    """The entry of a command for one message.

    Args:
        partition: negative: its topic has none.
        batch_index: negative: the message is alone in its entry.
    """
    entry = SkipEntry(ledger_id=ledger_id, entry_id=entry_id)
    if batch_index >= 0:
        entry.batch_indexes.append(batch_index)
    if partition >= 0:
        entry.partition = partition
    return entry


def follow_outcomes(client: pulsar.Client, topic: str, commands: Commands, stopped: threading.Event) -> None:
    """Consumes the outcome topic, in a thread: a reader would pass over what the broker drops when it unloads it."""

    def run() -> None:
        consumer = client.subscribe(topic, "chaos", initial_position=pulsar.InitialPosition.Earliest)
        while not stopped.is_set():
            try:
                message = consumer.receive(300)
                commands.take(message.data())
                consumer.acknowledge(message)
            except pulsar.Timeout:
                continue
            except pulsar.PulsarException:
                time.sleep(0.5)

    threading.Thread(target=run, daemon=True).start()
