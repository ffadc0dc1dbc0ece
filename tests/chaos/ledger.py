"""What was sent, asked for and received, message by message, in a few bytes each: hours at 1,000/s fit into memory."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulsar

from jobs.demo.consumers import SteadyClock

_PAYLOAD = struct.Struct(">qq")  # a message's number and when it is due, ms since the epoch
_BEHIND_SECONDS = 100  # of so much of the load, the newest, it is known how much is to come
_SHOWN = 5

# What may become of a message for a subscription, by its route and the answers to the commands that name it.
DELIVERED, NOT_MEANT, EITHER = 0, 1, 2


# Which of a message's deliveries: the occurrence of a recurring one, and the attempt of a retry; 0: neither.
Which = tuple[int, int]
ONCE: Which = (0, 0)


def payload(number: int, due: int) -> bytes:
    return _PAYLOAD.pack(number, due)


def which_of(message: Any) -> Which:
    """Which delivery of its message it is."""
    given = message.properties()
    return int(given.get("delaylake.occurrence", 0)), int(given.get("delaylake.attempt", 0))


def number_of(message: Any) -> int:
    """The number of a message that was published, or delivered."""
    number, _ = _PAYLOAD.unpack(message.data())
    return int(number)


@dataclass
class Further:
    """An occurrence or a retry of a message for a subscription."""

    due: int  # it must not come before, ms since the epoch
    expected: int
    times: int = 0
    first: int = 0  # a hash of the delivery's message id
    is_early: bool = False


@dataclass
class Pause:
    """A pause of a subscription: what is due from `begin` on must not come before `end`, both ms since the epoch."""

    begin: int
    end: int | None = None  # None: it goes on


class Ledger:
    """The messages of one run, by their number, and what became of each for each subscription.

    A message that is to come several times has a row in `further` for each of its deliveries but for the plain one.

    Args:
        subscriptions: by name the destination.
        size: how many messages there can be.
    """

    def __init__(self, subscriptions: Iterable[str], size: int) -> None:
        self.names = list(subscriptions)
        self.due = np.zeros(size, np.int64)
        self.is_sent = np.zeros(size, np.bool_)
        self.sent = 0
        self._expected = {name: np.zeros(size, np.int8) for name in self.names}
        self._times = {name: np.zeros(size, np.uint8) for name in self.names}
        self._first = {name: np.zeros(size, np.int64) for name in self.names}  # a hash of the delivery's message id
        self._early = {name: np.zeros(size, np.bool_) for name in self.names}
        # By name and number of a message that is to be rescheduled, when it came, ms since the epoch; 0: not yet.
        self._came_at: dict[tuple[str, int], int] = {}
        self.further: dict[tuple[str, int, Which], Further] = {}
        self.pauses: dict[str, list[Pause]] = {name: [] for name in self.names}
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

    def expect(self, name: str, number: int, what: int) -> None:
        self._expected[name][number] = what

    def expect_further(self, name: str, number: int, which: Which, due: int, what: int) -> None:
        """Says of an occurrence or a retry what is to become of it, and before which time it must not come."""
        with self._lock:
            found = self.further.setdefault((name, number, which), Further(due, what))
            found.due, found.expected = due, what

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

    def receive(self, name: str, message: Any, received_at: int) -> bool:
        """A message came to a destination. Twice from a broker that lost an acknowledgement is once.

        Returns:
            whether it is the first time.
        """
        number, due = _PAYLOAD.unpack(message.data())
        which = which_of(message)
        where = hash((str(message.message_id()), message.topic_name())) or 1
        came_at = min(message.publish_timestamp(), received_at)
        with self._lock:
            if due != self.due[number]:
                self.wrong.append(f"{name}: message {number} is due at {due}, not at {self.due[number]}")
            if which != ONCE:
                return self._receive_further(name, number, which, where, came_at)
            if self._first[name][number] == where:
                return False
            is_first = not self._times[name][number]
            if is_first:
                self._first[name][number] = where
            self._times[name][number] += self._times[name][number] < 255
            if came_at < due:
                self._early[name][number] = True
            if self._came_at.get((name, number)) == 0:
                self._came_at[name, number] = came_at
            self._check_pauses(name, number, due, came_at)
            self.max_late_millis = max(self.max_late_millis, received_at - due)
            return is_first

    def _receive_further(self, name: str, number: int, which: Which, where: int, came_at: int) -> bool:
        found = self.further.get((name, number, which))
        if found is None:
            self.wrong.append(f"{name}: message {number} came as {which}, which nobody has asked for")
            return False
        if found.first == where:
            return False
        is_first = not found.times
        if is_first:
            found.first = where
        found.times += 1
        found.is_early |= came_at < found.due
        self._check_pauses(name, number, found.due, came_at)
        return is_first

    def _check_pauses(self, name: str, number: int, due: int, came_at: int) -> None:
        for pause in self.pauses[name]:
            if pause.begin <= due and pause.begin <= came_at and (pause.end is None or came_at < pause.end):
                self.wrong.append(f"{name}: message {number} came during a pause, at {came_at}: {pause}")

    def lost(self, n: int) -> set[int]:
        """Those of the first n messages of which a delivery has not come that must."""
        plain = {int(number) for name in self.names for number in np.flatnonzero(self._lost(name, n))}
        return plain | {number for _, number, _ in self._further_lost()}

    def was_not_stored(self, numbers: set[int]) -> None:
        """The broker does not have these messages, although it has acknowledged them."""
        self.is_sent[list(numbers)] = False
        self.sent -= len(numbers)
        self.not_stored += len(numbers)

    def missing(self, n: int) -> int:
        """How many deliveries of the first n messages have not come that must."""
        return sum(int(self._lost(name, n).sum()) for name in self.names) + len(self._further_lost())

    def outstanding(self, n: int, rate: int) -> int:
        """How many deliveries are to come of the newest of n messages, also of those that wait or were skipped.

        Args:
            rate: messages a second.
        """
        begin = max(0, n - _BEHIND_SECONDS * rate)
        return sum(int(self._lost(name, n, begin).sum()) for name in self.names)

    def delivered(self) -> int:
        plain = sum(int((times > 0).sum()) for times in self._times.values())
        return plain + sum(found.times > 0 for found in self.further.values())

    def comes_again(self) -> dict[str, int]:
        """How many occurrences and retries have come."""
        came = [which for (_, _, which), found in self.further.items() if found.times]
        return {kind: sum(which[i] > 0 for which in came) for i, kind in enumerate(("occurrences", "retries"))}

    def report(self, n: int) -> dict[str, Any]:
        """What is wrong with the first n messages: counts, and under `examples` some of each kind."""
        of_kind = {
            "lost": self._lost,
            "doubled": self._doubled,
            "early": self._hurried,
            "wrong": self._delivered_although_not_meant,
        }
        kinds = {kind: {name: of(name, n) for name in self.names} for kind, of in of_kind.items()}
        further = self._further_wrong()
        counts: dict[str, Any] = {
            kind: sum(int(f.sum()) for f in found.values()) + len(further[kind]) for kind, found in kinds.items()
        }
        counts["wrong"] += len(self.wrong)
        counts["examples"] = {
            kind: [
                {"subscription": name, "message": int(i), "due": int(self.due[i])}
                for name, f in found.items()
                for i in np.flatnonzero(f)[:_SHOWN]
            ]
            + [
                {"subscription": name, "message": number, "which": which, "due": self.further[name, number, which].due}
                for name, number, which in further[kind][:_SHOWN]
            ]
            for kind, found in kinds.items()
            if counts[kind]
        } | ({"other": self.wrong[:_SHOWN]} if self.wrong else {})
        return counts

    def _further_lost(self) -> list[tuple[str, int, Which]]:
        with self._lock:
            return [
                key
                for key, one in self.further.items()
                if one.expected == DELIVERED and not one.times and self.is_sent[key[1]]
            ]

    def _further_wrong(self) -> dict[str, list[tuple[str, int, Which]]]:
        """By kind of what is wrong the occurrences and retries."""
        of_kind: dict[str, Callable[[Further], bool]] = {
            "doubled": lambda one: one.times > 1,
            "early": lambda one: one.is_early,
            "wrong": lambda one: one.expected == NOT_MEANT and one.times > 0,
        }
        found = {kind: [key for key, one in self.further.items() if is_so(one)] for kind, is_so in of_kind.items()}
        return {"lost": self._further_lost(), **found}

    def _lost(self, name: str, n: int, begin: int = 0) -> Any:
        of = slice(begin, n)
        return self.is_sent[of] & (self._expected[name][of] == DELIVERED) & (self._times[name][of] == 0)

    def _doubled(self, name: str, n: int) -> Any:
        return self._times[name][:n] > 1

    def _hurried(self, name: str, n: int) -> Any:
        return self._early[name][:n]

    def _delivered_although_not_meant(self, name: str, n: int) -> Any:
        return (self._expected[name][:n] == NOT_MEANT) & (self._times[name][:n] > 0)


class Receivers:
    """Consumes the destinations, each as (subscription, topic), into a ledger, in a thread each.

    Args:
        on_first: called with the subscription and each message, when it has come for the first time.
    """

    def __init__(
        self,
        client: pulsar.Client,
        ledger: Ledger,
        destinations: Iterable[tuple[str, str]],
        on_first: Callable[[str, Any], None] = lambda name, message: None,
    ) -> None:
        self._client, self._ledger, self._on_first = client, ledger, on_first
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
                    if self._ledger.receive(name, message, self._clock.now()):
                        self._on_first(name, message)
                    consumer.acknowledge(message)
                consumer.close()
            except pulsar.PulsarException:
                self._stopped.wait(1)
