"""What was sent, asked for and received, message by message, in a few bytes each: hours at 1,000/s fit into memory."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

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
            if min(message.publish_timestamp(), received_at) < due:
                self._early[name][number] = True
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
    """Consumes the destinations into a ledger, in a thread each."""

    def __init__(self, client: pulsar.Client, ledger: Ledger, destinations: dict[str, str]) -> None:
        self._client, self._ledger = client, ledger
        self._clock = SteadyClock()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(name, topic), daemon=True) for name, topic in destinations.items()
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


@dataclass
class Commands:
    """The commands that were sent, and what they were answered."""

    asked: dict[str, tuple[int, list[str]]] = field(default_factory=dict)  # by request id the message, and for which
    answers: dict[tuple[str, str], int] = field(default_factory=dict)  # by request id and subscription
    not_stored: int = 0  # commands that were sent, and that the broker does not have

    def take(self, data: bytes) -> None:
        published = ControlOutcome.FromString(data)
        if published.request_id in self.asked and published.result != Result.WAITING:
            self.answers[published.request_id, published.subscription] = published.result

    def unanswered(self) -> set[str]:
        """The request ids of commands that were not answered for each subscription."""
        asked = list(self.asked.items())
        return {request for request, (_, names) in asked for name in names if (request, name) not in self.answers}

    def were_not_stored(self, request_ids: set[str]) -> None:
        """The broker does not have these commands."""
        self.not_stored += len(request_ids)
        for request_id in request_ids:
            del self.asked[request_id]

    def settle(self, ledger: Ledger) -> None:
        """What was answered APPLIED must not come; what was not answered may have been done."""
        done = (Result.APPLIED, Result.ALREADY_APPLIED)
        for request, (number, names) in self.asked.items():
            for name in names:
                answer = self.answers.get((request, name))
                ledger.expect(name, number, EITHER if answer is None else NOT_MEANT if answer in done else DELIVERED)


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
