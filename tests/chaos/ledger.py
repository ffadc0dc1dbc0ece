"""What was sent, asked for and received, message by message, in a few bytes each: hours at 1,000/s fit into memory."""

from __future__ import annotations

import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pulsar

from jobs.demo.consumers import SteadyClock
from tracker.wire.delaylake_pb2 import ControlOutcome, Result

_PAYLOAD = struct.Struct(">qq")  # a message's number and when it is due, ms since the epoch
_SHOWN = 5

# What may become of a message for a subscription, by its route and the answers to the commands that name it.
DELIVERED, NOT_MEANT, EITHER = 0, 1, 2


def payload(number: int, due: int) -> bytes:
    return _PAYLOAD.pack(number, due)


def number_of(message: Any) -> int:
    """The number of a message that was published, or delivered."""
    number, _ = _PAYLOAD.unpack(message.data())
    return int(number)


class Ledger:
    """The messages of one run, by their number, and what became of each for each subscription.

    Args:
        subscriptions: by name the destination.
        size: how many messages there can be.
    """

    def __init__(self, subscriptions: Iterable[str], size: int) -> None:
        self.names = list(subscriptions)
        self.due = np.zeros(size, np.int64)
        self.is_sent = np.zeros(size, np.bool_)
        self.sent = 0
        self.outstanding = 0  # deliveries that are to come, also of messages that wait or were skipped
        self._expected = {name: np.zeros(size, np.int8) for name in self.names}
        self._times = {name: np.zeros(size, np.uint8) for name in self.names}
        self._first = {name: np.zeros(size, np.int64) for name in self.names}  # a hash of the delivery's message id
        self._early = {name: np.zeros(size, np.bool_) for name in self.names}
        # By name and number of a message that is to be rescheduled, when it came, ms since the epoch; 0: not yet.
        self._came_at: dict[tuple[str, int], int] = {}
        self.not_stored = 0  # messages that the broker has acknowledged, and does not have
        self.wrong: list[str] = []
        self.max_late_millis = 0
        self._lock = threading.Lock()

    def send(self, number: int, due: int, names: Iterable[str]) -> None:
        """A message is about to be published, for some subscriptions: it may come before its acknowledgement does."""
        self.due[number] = due
        for name in set(self.names).difference(names):
            self.expect(name, number, NOT_MEANT)

    def acknowledge(self, number: int) -> None:
        """The broker has it."""
        self.is_sent[number] = True
        with self._lock:
            self.sent += 1
            self.outstanding += sum(int(expected[number] == DELIVERED) for expected in self._expected.values())

    def expect(self, name: str, number: int, what: int) -> None:
        self._expected[name][number] = what

    def may_miss(self, name: str, until: int) -> None:
        """Messages that were due by a time, ms since the epoch, and have not come, need not: nobody is to get them."""
        is_due = (self.due > 0) & (self.due <= until) & (self._times[name] == 0)
        self._expected[name][is_due & (self._expected[name] == DELIVERED)] = EITHER

    def watch(self, name: str, number: int) -> None:
        """A message is about to be rescheduled: when it comes will be asked for."""
        self._came_at[name, number] = 0

    def not_before(self, name: str, number: int, at: int) -> None:
        """A message that is watched must not have come, or come, before a time, ms since the epoch."""
        if 0 < self._came_at[name, number] < at:
            self._early[name][number] = True

    def receive(self, name: str, message: Any, received_at: int) -> None:
        """A message came to a destination. Twice from a broker that lost an acknowledgement is once."""
        number, due = _PAYLOAD.unpack(message.data())
        where = hash((str(message.message_id()), message.topic_name())) or 1
        with self._lock:
            if self._first[name][number] == where:
                return
            if not self._times[name][number]:
                self._first[name][number] = where
                self.outstanding -= 1
            self._times[name][number] += self._times[name][number] < 255
            if due != self.due[number]:
                self.wrong.append(f"{name}: message {number} is due at {due}, not at {self.due[number]}")
            came_at = min(message.publish_timestamp(), received_at)
            if came_at < due:
                self._early[name][number] = True
            if self._came_at.get((name, number)) == 0:
                self._came_at[name, number] = came_at
            self.max_late_millis = max(self.max_late_millis, received_at - due)

    def lost(self, n: int) -> set[int]:
        """Those of the first n messages of which a delivery has not come that must."""
        return {int(number) for name in self.names for number in np.flatnonzero(self._lost(name, n))}

    def was_not_stored(self, numbers: set[int]) -> None:
        """The broker does not have these messages, although it has acknowledged them."""
        self.is_sent[list(numbers)] = False
        self.sent -= len(numbers)
        self.not_stored += len(numbers)

    def missing(self, n: int) -> int:
        """How many deliveries of the first n messages have not come that must."""
        return sum(int(self._lost(name, n).sum()) for name in self.names)

    def delivered(self) -> int:
        return sum(int((times > 0).sum()) for times in self._times.values())

    def report(self, n: int) -> dict[str, Any]:
        """What is wrong with the first n messages: counts, and under `examples` some of each kind."""
        of_kind = {
            "lost": self._lost,
            "doubled": self._doubled,
            "early": self._hurried,
            "wrong": self._delivered_although_not_meant,
        }
        kinds = {kind: {name: of(name, n) for name in self.names} for kind, of in of_kind.items()}
        counts: dict[str, Any] = {kind: sum(int(f.sum()) for f in found.values()) for kind, found in kinds.items()}
        counts["wrong"] += len(self.wrong)
        counts["examples"] = {
            kind: [
                {"subscription": name, "message": int(i), "due": int(self.due[i])}
                for name, f in found.items()
                for i in np.flatnonzero(f)[:_SHOWN]
            ]
            for kind, found in kinds.items()
            if counts[kind]
        } | ({"other": self.wrong[:_SHOWN]} if self.wrong else {})
        return counts

    def _lost(self, name: str, n: int) -> Any:
        return self.is_sent[:n] & (self._expected[name][:n] == DELIVERED) & (self._times[name][:n] == 0)

    def _doubled(self, name: str, n: int) -> Any:
        return self._times[name][:n] > 1

    def _hurried(self, name: str, n: int) -> Any:
        return self._early[name][:n]

    def _delivered_although_not_meant(self, name: str, n: int) -> Any:
        return (self._expected[name][:n] == NOT_MEANT) & (self._times[name][:n] > 0)


class Receivers:
    """Consumes the destinations, each as (subscription, topic), into a ledger, in a thread each."""

    def __init__(self, client: pulsar.Client, ledger: Ledger, destinations: Iterable[tuple[str, str]]) -> None:
        self._client, self._ledger = client, ledger
        self._clock = SteadyClock()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(name, topic), daemon=True) for name, topic in destinations
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=10)

    def _run(self, name: str, topic: str) -> None:
        while not self._stopped.is_set():
            try:
                consumer = self._client.subscribe(
                    topic, "chaos", initial_position=pulsar.InitialPosition.Earliest, receiver_queue_size=2_000
                )
                while not self._stopped.is_set():
                    try:
                        message = consumer.receive(300)
                    except pulsar.Timeout:
                        continue
                    self._ledger.receive(name, message, self._clock.now())
                    consumer.acknowledge(message)
                consumer.close()
            except pulsar.PulsarException:
                self._stopped.wait(1)


class Asked(NamedTuple):
    """A command for a message."""

    number: int
    name: str  # the subscription that it is for
    deliver_at: int | None = None  # of a reschedule the new time, ms since the epoch, later than the first; None: none


_DONE = {int(Result.APPLIED), int(Result.ALREADY_APPLIED)}


@dataclass
class Commands:
    """The commands that were sent, and what they were answered."""

    asked: dict[str, Asked] = field(default_factory=dict)  # by request id
    # By request id all last answers, one however often it is told. One for no subscription is for all.
    answers: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    not_stored: int = 0  # commands that were sent, and that the broker does not have

    def take(self, data: bytes) -> None:
        published = ControlOutcome.FromString(data)
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
        for request, (number, name, deliver_at) in self.asked.items():
            answers = self.answers.get(request, set())
            if deliver_at is None:
                ledger.expect(name, number, EITHER if not answers else NOT_MEANT if answers & _DONE else DELIVERED)
            elif answers & _DONE:
                ledger.not_before(name, number, deliver_at)


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
