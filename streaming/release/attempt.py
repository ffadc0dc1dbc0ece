"""What a task is given to send, and what it tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conf.settings import MOST_LANES
from streaming.release.naming import Target


@dataclass(frozen=True)
class Assignment:
    """A shard's release, for a task to send.

    `app_id` is the same for all runs on one checkpoint, and of no other.
    """

    app_id: str
    shard: int
    tick: int
    is_planned: bool
    body: bytes

    def lane(self, lanes: int, lane_set: int = 0) -> str:
        """Releases of one lane are sent one after another; of different lanes, side by side.

        Args:
            lane_set: another one has other lanes, as far as there are any left.
        """
        number = self.tick % lanes + lanes * (lane_set % (MOST_LANES // lanes))
        return f"{'planned' if self.is_planned else 'short'}{number}"


@dataclass(frozen=True)
class Generation:
    """A producer that had to take another name, because somebody else has published under its own."""

    number: int  # of the name
    tick: int  # the release of this tick was the first to be sent under it; earlier ones may have been under others

    def name(self, producer: str) -> str:
        """The name under which what the plan has for a producer is sent."""
        return f"{producer}-{self.number}" if self.number else producer


@dataclass(frozen=True)
class Attempt:
    """What of the assignments is to be sent this time."""

    skipped: frozenset[Target] = frozenset()  # destinations that can't be written now
    only: frozenset[Target] | None = None  # None: all others
    done: frozenset[tuple[int, str, str]] = frozenset()  # as `Sent.done`
    arrived_to: Mapping[tuple[str, str], int] = field(default_factory=dict)  # of others, as `Failed` has it
    generations: Mapping[tuple[str, str], Generation] = field(default_factory=dict)  # by topic and producer's name
    is_first: bool = False  # no attempt was made before, but by Spark itself
    sent_to: int = 0  # releases up to this tick may have been sent before, later ones of the same lane than this, too
    patience_seconds: float = 10.0  # for a broker that does not answer


@dataclass(frozen=True)
class Failed:
    """A producer whose messages have not all arrived. Sending them again is safe."""

    topic: str  # the destination, or its partition
    producer: str
    target: Target
    reason: str
    is_refused: bool  # the broker has said no, rather than nothing
    foreign_id: int | None  # a sequence id that is none of ours, published under this name
    # Its messages up to this sequence id have arrived. The broker knows, too, as long as the topic is not made anew.
    arrived_to: int = -1


@dataclass(frozen=True)
class Sent:
    """What a task has sent."""

    deliveries: bytes  # rows of the table `deliveries`, packed
    ready_at: int  # when it could have sent the first row, ms since the epoch; 0: never
    done: tuple[tuple[int, str, str], ...] = ()  # ticks, topics and producers' names whose messages have arrived
    failed: tuple[Failed, ...] = ()
    skipped: frozenset[Target] = frozenset()  # those of the attempt that have messages in the release
    # By release (tick, is planned) messages that the client does not take, packed, with the subscription and the
    # reason; they are not delivered.
    refused: Mapping[tuple[int, bool], bytes] = field(default_factory=dict)
