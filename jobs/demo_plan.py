"""The demo's messages, what is to become of each, and the check that it did."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

NAMESPACE = "persistent://public/default"


class Fate(StrEnum):
    DELIVERED = "delivered"
    PENDING = "pending"
    REJECTED = "rejected"


@dataclass
class Message:
    """A message to be produced.

    `deliver_at` is filled in when it is produced, from `delay` in seconds. `taken_back` are the subscriptions from
    which it is cancelled or skipped.
    """

    number: int
    topic: str
    subscriptions: tuple[str, ...]
    payload: bytes
    key: str | None
    properties: dict[str, str]
    fate: Fate
    delay: float
    uses_deliver_after: bool = False
    bad_time: str | None = None
    deliver_at: int = 0
    message_id: tuple[int, int, int, int] | None = None  # ledger, entry, partition, batch index
    taken_back: set[str] = field(default_factory=set)

    @property
    def wanted(self) -> set[str]:
        """The subscriptions that are to get it."""
        return set(self.subscriptions) - self.taken_back if self.fate is Fate.DELIVERED else set()


@dataclass(frozen=True)
class Received:
    """A message that came to a destination; subscription None: to the rejects topic."""

    number: int
    topic: str
    subscription: str | None
    payload: bytes
    key: str | None
    properties: Mapping[str, str]
    published_at: int
    received_at: int


# Topic -> its subscriptions, (name, type).
TOPICS: dict[str, tuple[tuple[str, str], ...]] = {
    f"{NAMESPACE}/orders": (("billing", "Shared"), ("audit", "Exclusive")),
    f"{NAMESPACE}/reminders": (("app", "Key_Shared"),),
    f"{NAMESPACE}/alerts": (("pager", "Shared"), ("mail", "Shared")),
}
PARTITIONED = f"{NAMESPACE}/reminders"
PARTITIONS = 3
BATCHED = f"{NAMESPACE}/alerts"

_PUBLISH_MILLIS = 2_000  # between handing a message to its producer and its publish time

_BAD_TIMES = ["tomorrow", "-5", "1.5e12", "", "99999999999999999999"]
_KEYS = ["anna", "jürgen", "渡辺", "ключ", "🗝"]


def plan(n: int, seconds: int, seed: int = 1) -> list[Message]:
    """`n` messages: most due within `seconds`, some at once, one in fifty far ahead, one in a hundred malformed."""
    chance = random.Random(seed)
    messages = []
    for number in range(n):
        topic = chance.choice(list(TOPICS))
        fate, delay, bad = Fate.DELIVERED, chance.uniform(0, seconds), None
        lot = chance.random()
        if lot < 0.01:
            fate, bad = Fate.REJECTED, chance.choice(_BAD_TIMES)
        elif lot < 0.03:
            fate, delay = Fate.PENDING, chance.uniform(3600, 30 * 86400)
        elif lot < 0.13:
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
                uses_deliver_after=lot > 0.9,
                bad_time=bad,
            )
        )
    return messages


def verify(messages: Sequence[Message], received: Iterable[Received]) -> list[str]:
    """What is wrong with what came to the destinations, a line each; nothing where all is as planned."""
    problems = []
    got: dict[tuple[int, str | None], list[Received]] = {}
    for r in received:
        got.setdefault((r.number, r.subscription), []).append(r)
    for message in messages:
        expected: set[str | None] = {None} if message.fate is Fate.REJECTED else set(message.wanted)
        for subscription in {*message.subscriptions, None}:
            copies = got.pop((message.number, subscription), [])
            where = f"message {message.number} of {message.topic} for {subscription or 'rejects'}"
            if subscription not in expected:
                if copies:
                    problems.append(f"{where}: came, and should not have")
            elif not copies:
                problems.append(f"{where}: lost")
            else:
                if len(copies) > 1:
                    problems.append(f"{where}: came {len(copies)} times")
                problems += [f"{where}: {what}" for copy in copies for what in _altered(message, copy)]
    problems += [f"message {number} came to {subscription} from nowhere" for number, subscription in got]
    return problems


def _altered(message: Message, copy: Received) -> Iterable[str]:
    if copy.payload != message.payload:
        yield "another payload"
    if copy.key != message.key:
        yield f"key {copy.key!r} instead of {message.key!r}"
    if any(copy.properties.get(name) != value for name, value in message.properties.items()):
        yield "another property"
    if copy.properties.get("delaylake.source") != message.topic:
        yield "no property delaylake.source"
    if message.fate is Fate.REJECTED:
        if not copy.properties.get("delaylake.reason"):
            yield "rejected without a reason"
    elif message.delay:
        due = message.deliver_at
        if message.uses_deliver_after:  # counts from the publish time, which only the service knows
            due = int(copy.properties.get("delaylake.deliverAt", 0))
            if abs(due - message.deliver_at) > _PUBLISH_MILLIS:
                yield f"due {due - message.deliver_at} ms from its time"
        if min(copy.published_at, copy.received_at) < due:
            yield f"{due - copy.published_at} ms early"
