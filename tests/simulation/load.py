"""What users publish in a simulation: messages alone and in batches, due at once, soon and later, of every kind."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from broker.protocol.building import OutgoingMessage, batch_entry, encoded_property, single_entry
from broker.protocol.wire.pulsar_pb2 import MessageMetadata
from conf.partitions import partition_name
from conf.settings import Settings
from tests.simulation.broker import Cluster
from tests.simulation.expected import Chunked, Expected, Repeat, ScheduleKey
from tests.simulation.scheduler import EPOCH_SECONDS, Scheduler
from tests.support.clients.raw_producer import entry as raw_entry

_ENDS_MILLIS = (200, 2_000, 20_000)  # from when a message is due on
_DUE_MILLIS = (-2_000, 0, 300, 900, 2_500, 4_000, 8_000, 20_000, 45_000)  # from when it is published on
_DEBOUNCE_MILLIS = (1_500, 6_000, 15_000)
SCHEDULE_KEYS = ("k0", "k1", "k2", "k3")
KINDS = {"plain": 0.7, "keyed": 0.15, "requested": 0.05, "again": 0.05, "bad": 0.03, "recurring": 0.02}
IN_CHUNKS = 0.04  # of the messages that are alone in their entry
_LARGE = 0.06  # of the messages that are alone in their entry, or in chunks
_LARGE_BYTES = 130_500  # of a payload, or of a chunk's: with what the service adds it does not fit an entry
_BETWEEN_CHUNKS_SECONDS = (0.0, 0.1, 1.0, 4.0)
_KEYS = ("", "", "", "x", "y")  # the messages' own, for their order
_TOGETHER = 0.4  # of those with a key, so many are due with the one before of their key
_TOGETHER_MILLIS = (-2, 0, 1, 5)
_FIRST_KEYS_SECONDS = 6.0  # for which half of the messages have a schedule key where a topic gets its first one late
_INTERVALS_SECONDS = (2, 3, 5, 6)  # of those that recur: each divides a minute

# Properties that make a message bad, beside a time.
_BAD = (
    {"deliverAt": "soon"},
    {"expireAt": "1"},
    {"scheduleKey": "k0", "scheduleMode": "any"},
    {"repeat": "61 * * * *"},
    {"requestId": ""},
)


class _InChunks(NamedTuple):
    """A message that is published in chunks, of which the last one has a number, from 0."""

    chance: random.Random
    source: str
    partition: int
    uuid: str
    last: int
    whole: Chunked
    parts: list[bytes]


class Publications(Protocol):
    """Who is told what is published.

    Attributes:
        chunks: by entry.
    """

    chunks: dict[str, Chunked]

    def sent(self, position: str, expected: Expected) -> None:
        """A message is in a source topic."""


class Producers:
    """Publish to all source topics until a time.

    Args:
        accounts: are told what is published.
        until: seconds.
        per_second: the number of entries.
        first: the number of the first message, beyond those of other producers.
        kinds: how often messages of each kind come, at random by these weights.
        in_chunks: so many of the messages that are alone in their entry come in chunks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cluster: Cluster,
        accounts: Publications,
        settings: Settings,
        until: float,
        per_second: float,
        trace: Callable[[str], None],
        first: int = 0,
        kinds: Mapping[str, float] = KINDS,
        in_chunks: float = IN_CHUNKS,
    ) -> None:
        self._scheduler, self._cluster, self._accounts = scheduler, cluster, accounts
        self._routes = {r.source: frozenset(s.name for s in r.subscriptions) for r in settings.routes}
        self._until, self._per_second, self._trace = until, per_second, trace
        self._name = f"load {scheduler.random.random()}"
        self._random = random.Random(self._name)
        # Some topics get their first schedule key when commands wait already.
        self.keys_from = {
            source: self._random.choice([0.0, self._random.uniform(5.0, 25.0)]) for source in self._routes
        }
        self.on_published: Callable[[str, str], None] = lambda source, position: None
        self._due_of_key: dict[tuple[str, str], int] = {}  # of the last message, ms since the epoch
        self._n_entries, self._n = 0, first
        self._kinds, self._in_chunks = kinds, in_chunks
        # By topic and partition: what came under request ids, and the first message of each.
        self._requested: dict[tuple[str, int], list[tuple[Expected, str]]] = defaultdict(list)
        self.last_due = 0
        self.is_ended = False
        scheduler.after(1.0, self._publish)

    def _publish(self) -> None:
        if self._scheduler.now > self._until or self.is_ended:
            return
        # The next one is drawn before this one: it stays as it is where this one is left out.
        self._scheduler.after(self._random.expovariate(self._per_second), partial(self._publish))
        self._n_entries += 1
        between, self._random = self._random, random.Random(f"{self._name} {self._n_entries}")
        if self._cluster.faults.is_done("publish"):
            self._publish_entry()
        self._random = between

    def _publish_entry(self) -> None:
        source = self._random.choice(sorted(self._routes))
        now = self._now()
        n = self._random.choice([1, 1, 1, 3])
        partition = self._choose_partition(source)
        if n == 1 and self._random.random() < self._in_chunks:
            self._n += 1
            last = 2 if self._random.random() < 0.9 else 3
            uuid = f"user-{self._n}"
            parts = [self._padded(f"{uuid} {part}".encode()) for part in "abcd"[: last + 1]]
            self._publish_chunk(_InChunks(self._random, source, partition, uuid, last, Chunked(now), parts), 0)
            return
        name = partition_name(source, partition)
        following = self._cluster.topic(name).end.next
        messages, said = [], []
        for i in range(n):
            position = f"{following.ledger_id}:{following.entry_id}:{partition}:{i if n > 1 else -1}"
            expected = self._expected(source, position, now, is_alone=n == 1)
            self._accounts.sent(position, expected)
            self.last_due = max(self.last_due, expected.due)
            messages.append(outgoing(self._n, expected))
            said.append(", ".join(f"{one} {value}" for one, value in expected.properties.items()))
        entry = batch_entry(messages, b"user", now) if n > 1 else single_entry(messages[0], b"user", now)
        self._trace(f"published {following} to {name.rpartition('/')[2]}: {'; '.join(said)}")
        self._cluster.publish(name, entry.data, n)
        self.on_published(source, position)

    def _choose_partition(self, source: str) -> int:
        """Returns to which partition of a topic the next entry goes; -1: the topic is not partitioned."""
        n = self._cluster.partitions.get(source, 0)
        return random.Random(f"{self._name} partition {self._n_entries}").randrange(n) if n else -1

    def _padded(self, payload: bytes) -> bytes:
        """Returns a payload, sometimes so large that its message is delivered in chunks; the same for each message."""
        is_large = random.Random(f"{self._name} large {self._n}").random() < _LARGE
        return payload.ljust(_LARGE_BYTES, b".") if is_large else payload

    def _now(self) -> int:
        return round((EPOCH_SECONDS + self._scheduler.now) * 1000)

    def _publish_chunk(self, message: _InChunks, number: int) -> None:
        """Publishes a chunk of a message, and the next one later; of four chunks the last one is never published."""
        if number == 3:
            return
        chance, source, partition, uuid, last, whole, parts = message
        name = partition_name(source, partition)
        position = self._cluster.topic(name).end.next
        metadata = MessageMetadata(producer_name=b"user", sequence_id=self._n, publish_time=self._now())
        metadata.uuid, metadata.chunk_id, metadata.n_chunks = uuid.encode(), number, last + 1
        self._accounts.chunks[str(position)] = whole
        if number == last:
            due = self._now() + chance.choice(_DUE_MILLIS)
            expected = Expected(source, due, self._routes[source], {"deliverAt": str(due)}, b"".join(parts))
            whole.last = str(position)
            self._accounts.sent(f"{position}:{partition}:-1", expected)
            self.last_due = max(self.last_due, due)
            metadata.properties.add(key=b"deliverAt", value=str(due).encode())
        self._trace(f"published {position} to {name.rpartition('/')[2]}: chunk {number} of {uuid}")
        self._cluster.publish(name, raw_entry(metadata, parts[number]))
        if number < last:
            following = partial(self._publish_chunk, message, number + 1)
            self._scheduler.after(chance.choice(_BETWEEN_CHUNKS_SECONDS), following)

    def _expected(self, source: str, position: str, now: int, is_alone: bool) -> Expected:
        chance = self._random
        due = max(0, now + chance.choice(_DUE_MILLIS) + chance.randrange(200))
        self._n += 1
        payload = self._padded(b"%d" % self._n) if is_alone else b"%d" % self._n
        message = Expected(source, due, self._routes[source], {"deliverAt": str(due)}, payload)
        message.key = chance.choice(_KEYS)
        partition = int(position.split(":")[2])
        if partition >= 0 and message.key:  # as producers do: what has one key is in one partition
            message.key = _KEYS[-1 - partition]  # those that are added later have none
        [kind] = chance.choices([*self._kinds], [*self._kinds.values()])
        if message.key:
            self._bring_together(message, now)
        since_first = self._scheduler.now - self.keys_from[source]
        is_first = 0 <= since_first < _FIRST_KEYS_SECONDS and "keyed" in self._kinds
        if self.keys_from[source] and is_first and self._own("first keys").random() < 0.5:
            kind = "keyed"
        match kind:
            case "keyed" if self._scheduler.now >= self.keys_from[source]:
                set_schedule_key(message, chance, now, _of_partition(partition))
            case "recurring" if is_alone:
                self._set_rule(message, now)
            case "bad":
                message.properties |= chance.choice(_BAD)
                message.rejected_for = next(reversed(message.properties))
            case "requested":
                message.properties["requestId"] = f"m{self._n}"
                self._requested[source, partition].append((message, position))
            case "again" if self._requested[source, partition]:
                return self._again(source, partition, due)
            case _ if chance.random() < 0.1:
                message.ends_at = message.due + chance.choice(_ENDS_MILLIS)
                message.properties["expireAt"] = str(message.ends_at)
        return message

    def _own(self, what: str) -> random.Random:
        """What is drawn of this for the message changes nothing else of it."""
        return random.Random(f"{self._name} {what} {self._n}")

    def _bring_together(self, message: Expected, now: int) -> None:
        """May let a message be due with the one before of its key."""
        chance, named = self._own("together"), (message.topic, message.key)
        before = self._due_of_key.get(named, 0)
        if before > now and chance.random() < _TOGETHER:
            message.due = before + chance.choice(_TOGETHER_MILLIS)
            message.properties["deliverAt"] = str(message.due)
        self._due_of_key[named] = message.due

    def _set_rule(self, message: Expected, now: int) -> None:
        chance = self._random
        seconds, times = chance.choice(_INTERVALS_SECONDS), chance.randint(1, 5)
        match chance.choice(["every", "cron", "rrule"]):
            case "every":
                first = max(message.due, now + 300)
                message.properties = {"repeat": f"@every {seconds}s", "deliverAt": str(first)}
            case "cron":
                first = (now // 1_000 // seconds + 1) * seconds * 1_000
                message.properties = {"repeat": f"*/{seconds} * * * * *"}
            case _:
                first = (max(message.due, now) // 1_000 + 1) * 1_000
                message.properties = {"repeat": f"FREQ=SECONDLY;INTERVAL={seconds}", "deliverAt": str(first)}
        message.properties |= {"repeatTimes": str(times), "misfire": chance.choice(["once", "all", "skip"])}
        message.repeat = Repeat(first, seconds * 1_000, times)
        message.due = first + times * seconds * 1_000

    def _again(self, source: str, partition: int, due: int) -> Expected:
        """Returns a message whose request id has come before, with the same content or another."""
        first, position = self._random.choice(self._requested[source, partition][-8:])
        message = Expected(
            source, first.due, self._routes[source], dict(first.properties), first.payload, key=first.key
        )
        message.rejected_for = f"a repetition of {position}: requestId"
        change = self._random.choice(["", "", "payload", "deliverAt"])
        if change == "payload":
            message.payload += b" or not"
        elif change == "deliverAt":
            message.properties["deliverAt"] = str(due)
        if change == "payload" or message.properties != first.properties:
            message.rejected_for = f"another message, {position}, has had the requestId"
        return message


def _of_partition(partition: int) -> Sequence[str]:
    """Returns the schedule keys whose messages are in a partition; -1: all. Each that was added has one of its own."""
    if partition < 0:
        return SCHEDULE_KEYS
    return SCHEDULE_KEYS[partition::2] if partition < 2 else (f"k{partition + 2}",)


def set_schedule_key(message: Expected, chance: random.Random, now: int, names: Sequence[str] = SCHEDULE_KEYS) -> None:
    """Gives a message that is published now, ms since the epoch, a schedule key of any mode."""
    mode = chance.choice(["replace", "replace", "keep", "debounce"])
    limit = chance.choice(_DEBOUNCE_MILLIS) if mode == "debounce" and chance.random() < 0.7 else 0
    message.schedule_key = ScheduleKey(chance.choice(names), mode, limit)
    message.properties |= {"scheduleKey": message.schedule_key.name, "scheduleMode": mode}
    if limit:
        message.properties["debounceMax"] = str(limit)
        message.due = min(message.due, now + limit)


def outgoing(number: int, message: Expected) -> OutgoingMessage:
    """Returns a message as its producer sends it."""
    properties = [encoded_property(name, value) for name, value in message.properties.items()]
    return OutgoingMessage(number, message.payload, properties, message.key.encode() or None)
