"""Plans the demo's messages with the fate of each, and checks that each has had it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

NAMESPACE = "persistent://public/default"

# The subscriptions, (name, type), of each source topic.
TOPICS: dict[str, tuple[tuple[str, str], ...]] = {
    f"{NAMESPACE}/orders": (("billing", "Shared"), ("audit", "Exclusive")),
    f"{NAMESPACE}/reminders": (("app", "Key_Shared"),),
    f"{NAMESPACE}/alerts": (("pager", "Shared"), ("mail", "Shared")),
}
PARTITIONED = f"{NAMESPACE}/reminders"
PARTITIONS = 3
BATCHED = f"{NAMESPACE}/alerts"

_OWN_PROPERTIES = "delaylake."
_PUBLISH_MILLIS = 2_000  # the longest time from handing a message to its producer to its publish time
_BATCH_MILLIS = 1_000  # the longest time from a batch's publish time, its first message's, to that of its last message
_REJECTED, _PENDING, _AT_ONCE, _DELIVER_AFTER = 0.01, 0.02, 0.1, 0.1  # shares of all messages

_BAD_TIMES = ["tomorrow", "-5", "1.5e12", "", "99999999999999999999"]
_KEYS = ["anna", "jürgen", "渡辺", "ключ", "🗝"]


class Fate(StrEnum):
    DELIVERED = "delivered"
    PENDING = "pending"
    REJECTED = "rejected"


@dataclass
class Message:
    """A message to be produced.

    `deliver_at` (ms since the epoch), `sent_properties` and `position` are set when it is produced. `cancelled` has the
    subscriptions for which it was cancelled or skipped.
    """

    number: int
    topic: str
    subscriptions: tuple[str, ...]
    payload: bytes
    key: str | None
    properties: dict[str, str]
    fate: Fate
    delay: float  # seconds; 0: the message has no time
    uses_deliver_after: bool = False
    bad_time: str | None = None
    deliver_at: int = 0
    sent_properties: dict[str, str] = field(default_factory=dict)
    position: str = ""  # ledger:entry:partition:batchIndex
    cancelled: set[str] = field(default_factory=set)

    @property
    def wanted(self) -> set[str]:
        """The subscriptions that should get the message during the demo."""
        return set(self.subscriptions) - self.cancelled if self.fate is Fate.DELIVERED else set()

    @property
    def delay_millis(self) -> int:
        return int(self.delay * 1000)

    def schedule(self, now: int) -> None:
        """Sets the time at which the message is due, from `now`, ms since the epoch, and its properties."""
        self.sent_properties = dict(self.properties)
        if self.bad_time is not None:
            self.sent_properties["deliverAt"] = self.bad_time
        elif self.delay:
            self.deliver_at = now + self.delay_millis
            if self.uses_deliver_after:
                self.sent_properties["deliverAfter"] = str(self.delay_millis)
            else:
                self.sent_properties["deliverAt"] = str(self.deliver_at)


@dataclass(frozen=True)
class Received:
    """A message received at the destination of a subscription (None: at the rejects topic).

    `number` is that of the `Message`; -1: the message has none. Times are ms since the epoch.
    """

    number: int
    topic: str
    subscription: str | None
    payload: bytes
    key: str | None
    properties: Mapping[str, str]
    published_at: int
    received_at: int


@dataclass(frozen=True)
class Stored:
    """The content of the Delta tables. Positions are ledger:entry:partition:batchIndex, times ms since the epoch."""

    indexed: set[str]  # DELAY rows of delayed_index
    delivered: Counter[tuple[str, str]]  # rows of deliveries by position and subscription
    rejected: set[str]
    due: Mapping[str, int]  # the due time of each message in deliveries or delayed_index, by position
    published: Mapping[str, int]  # the publish time of each entry, by ledger:entry:partition


def plan(n: int, seconds: int, seed: int = 1) -> list[Message]:
    """Returns `n` messages, the same for the same seed.

    Most are due within `seconds`, a tenth at once, one in fifty far ahead; one in a hundred is malformed.
    """
    chance = random.Random(seed)
    messages = []
    for number in range(n):
        topic = chance.choice(list(TOPICS))
        fate, delay, bad = Fate.DELIVERED, chance.uniform(0, seconds), None
        lot = chance.random()
        if lot < _REJECTED:
            fate, bad = Fate.REJECTED, chance.choice(_BAD_TIMES)
        elif lot < _REJECTED + _PENDING:
            fate, delay = Fate.PENDING, chance.uniform(3600, 30 * 86400)
        elif lot < _REJECTED + _PENDING + _AT_ONCE:
            delay = 0
        messages.append(
            Message(
                number,
                topic,
                tuple(name for name, _ in TOPICS[topic]),
                f"{number}:".encode() + chance.randbytes(chance.randrange(0, 300)),
                chance.choice(_KEYS) if chance.random() < 0.5 else None,
                {"n": str(number), "größe": str(chance.randrange(1000))},
                fate,
                delay,
                uses_deliver_after=lot > 1 - _DELIVER_AFTER,
                bad_time=bad,
            )
        )
    return messages


def verify(messages: Sequence[Message], received: Iterable[Received]) -> list[str]:
    """Returns a line for each difference between the plan and the received messages."""
    problems = []
    got: dict[tuple[int, str | None], list[Received]] = {}
    for r in received:
        got.setdefault((r.number, r.subscription), []).append(r)
    for message in messages:
        expected: set[str | None] = {None} if message.fate is Fate.REJECTED else set(message.wanted)
        for subscription in (*message.subscriptions, None):
            copies = got.pop((message.number, subscription), [])
            where = f"message {message.number} of {message.topic} for {subscription or 'rejects'}"
            if subscription not in expected:
                if copies:
                    problems.append(f"{where}: came, and should not have")
            elif not copies:
                problems.append(f"{where}: lost")
            else:
                if len(copies) > 1:
                    problems.append(f"{where}: doubled, came {len(copies)} times")
                problems += [f"{where}: {what}" for copy in copies for what in _wrong(message, copy)]
    problems += [f"message {number} came to {subscription or 'rejects'} from nowhere" for number, subscription in got]
    return problems


def verify_stored(messages: Sequence[Message], stored: Stored) -> list[str]:
    """Returns a line for each difference between the plan and the Delta tables."""
    problems = []
    delivered = Counter(stored.delivered)
    for message in messages:
        where = f"message {message.number} of {message.topic} at {message.position}"
        for subscription in message.subscriptions:
            times = delivered.pop((message.position, subscription), 0)
            wanted = int(subscription in message.wanted)
            if times != wanted:
                problems.append(f"{where}: in deliveries {times} times for {subscription} instead of {wanted}")
        if message.fate is Fate.PENDING and message.position not in stored.indexed:
            problems.append(f"{where}: pending, but not in delayed_index")
        if (message.fate is Fate.REJECTED) != (message.position in stored.rejected):
            problems.append(f"{where}: {'not ' if message.fate is Fate.REJECTED else ''}in rejects")
        if message.fate is Fate.REJECTED and message.position in stored.indexed:
            problems.append(f"{where}: rejected, but in delayed_index")
        due = message.deliver_at
        if message.uses_deliver_after:
            due = stored.published.get(message.position.rpartition(":")[0], 0) + message.delay_millis
        if message.delay and message.position in stored.due and stored.due[message.position] != due:
            problems.append(f"{where}: due at {stored.due[message.position]} instead of {due}")
    problems += [f"{position} in deliveries for {subscription} from nowhere" for position, subscription in delivered]
    return problems


def _wrong(message: Message, copy: Received) -> Iterator[str]:
    """Yields the differences between an expected message and a received copy of it."""
    if copy.topic != message.topic or copy.properties.get(f"{_OWN_PROPERTIES}source") != message.topic:
        yield "another source topic"
    if copy.properties.get(f"{_OWN_PROPERTIES}messageId") != message.position:
        yield "another message id"
    if copy.payload != message.payload:
        yield "altered payload"
    if copy.key != message.key:
        yield f"altered key {copy.key!r} instead of {message.key!r}"
    if _foreign(copy.properties) != message.sent_properties:
        yield "altered properties"
    if message.fate is Fate.REJECTED:
        if not copy.properties.get(f"{_OWN_PROPERTIES}reason"):
            yield "rejected without a reason"
    elif message.delay:
        yield from _wrong_time(message, copy)


def _wrong_time(message: Message, copy: Received) -> Iterator[str]:
    due = int(copy.properties.get(f"{_OWN_PROPERTIES}deliverAt", 0))
    earliest = latest = message.deliver_at
    if message.uses_deliver_after:  # counts from the publish time, not from the time of handing it over
        earliest -= _BATCH_MILLIS if message.topic == BATCHED else 0
        latest += _PUBLISH_MILLIS
    if not earliest <= due <= latest:
        yield f"due {due - message.deliver_at} ms from its time"
    if (at := min(copy.published_at, copy.received_at)) < (due := max(due, earliest)):
        yield f"early by {due - at} ms"


def _foreign(properties: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in properties.items() if not name.startswith(_OWN_PROPERTIES)}
