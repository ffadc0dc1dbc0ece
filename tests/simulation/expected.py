"""A message that a user has published, as the accounts of a simulation know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ScheduleKey(NamedTuple):
    """The schedule key of a message, as docs/schedules.md has it.

    Attributes:
        mode: replace, keep or debounce.
        limit: `debounceMax`, ms; 0: none.
    """

    name: str
    mode: str
    limit: int


class Repeat(NamedTuple):
    """How a message recurs, as docs/schedules.md has it.

    Attributes:
        first: when the first occurrence is due, ms since the epoch.
        interval: from one to the next, ms.
        times: `repeatTimes`.
    """

    first: int
    interval: int
    times: int

    def due(self, number: int) -> int:
        """When an occurrence is due at the earliest, ms since the epoch: later where others were missed."""
        return self.first + (number - 1) * self.interval


@dataclass
class Expected:
    """A message that a source topic has.

    Attributes:
        due: when it is due by its sender, ms since the epoch.
        subscriptions: who gets it, unless it is rejected.
        ends_at: from then on it is not sent; 0: it has no end.
        key: the partition key; empty: it has none.
        rejected_for: what the reason says for which it is rejected; empty: it is not.
        is_left_out: another cluster's job delivers it. So the table of rejects has it, and no topic.
    """

    topic: str
    due: int
    subscriptions: frozenset[str]
    properties: dict[str, str]
    payload: bytes
    ends_at: int = 0
    rejected_for: str = ""
    is_left_out: bool = False
    schedule_key: ScheduleKey | None = None
    repeat: Repeat | None = None
    key: str = ""


@dataclass
class Chunked:
    """A message in chunks.

    Attributes:
        since: when its first chunk was published, ms since the epoch.
        last: the entry of its last chunk; empty: that has not been published.
    """

    since: int
    last: str = ""


class Arrival(NamedTuple):
    """A message at a destination.

    Attributes:
        position: as the property `delaylake.messageId` has it.
        topic: the source topic.
        deliver_at: `delaylake.deliverAt`, ms since the epoch.
        occurrence: `delaylake.occurrence`; 0: it does not recur.
        attempt: `delaylake.attempt`; 0: it is no retry.
        sent_at: the publish time, ms since the epoch.
        ahead_millis: by which the clock of the executor is ahead that has sent it.
    """

    position: str
    subscription: str
    topic: str
    deliver_at: int
    occurrence: int
    attempt: int
    payload: bytes
    sent_at: int
    ahead_millis: int = 0


def entry_of(position: str) -> str:
    """Returns the entry of a message's position: `ledger:entry`."""
    return ":".join(position.split(":")[:2])
