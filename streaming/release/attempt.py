"""The input of a task that sends, its report, and the sum of several reports: what has arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from conf.settings import MOST_LANES
from streaming.release.naming import LANE_KINDS, Target
from streaming.release.sequence_ids import last_sequence_id


def lane_name(tick: int, kind: int, lanes: int, lane_set: int = 0) -> str:
    """Returns the name of a release's lane.

    Releases of one lane are sent one after another; of different lanes, side by side.

    Args:
        tick: the release's.
        kind: the release's.
        lanes: how many there are in a lane set.
        lane_set: the number of the lane set. Lane sets have lanes of their own, until there are MOST_LANES of a kind;
            then the first one's come again.
    """
    number = tick % lanes + lanes * (lane_set % (MOST_LANES // lanes))
    return f"{LANE_KINDS[kind]}{number}"


@dataclass(frozen=True)
class Assignment:
    """A shard's release, for a task to send.

    Attributes:
        app_id: the checkpoint's: the same for all its runs, and another for each checkpoint.
        shard: its number, from 0 on.
        tick: of the release.
        kind: of the release, as `tracker.in_flight.Release.kind`.
        body: its rows, packed.
    """

    app_id: str
    shard: int
    tick: int
    kind: int
    body: bytes

    def lane(self, lanes: int, lane_set: int = 0) -> str:
        """Returns the name of the release's lane: see `lane_name`."""
        return lane_name(self.tick, self.kind, lanes, lane_set)


@dataclass(frozen=True)
class Generation:
    """The name of a producer that had to take another one, because somebody else has published under its own."""

    number: int  # how many names it has had before; 0: it has its own
    tick: int  # messages of releases up to this tick may have been sent under earlier names

    def name(self, producer: str) -> str:
        """Returns the name to send under, by the producer's name in the plan."""
        return f"{producer}-{self.number}" if self.number else producer


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt to send assignments: which of their messages, and what is known of earlier attempts."""

    skipped: frozenset[Target] = frozenset()  # destinations that can't be written now: nothing is sent to them
    only: frozenset[Target] | None = None  # destinations to which alone something is sent; None: all but `skipped`
    done: frozenset[tuple[int, str, str]] = frozenset()  # messages that have arrived, as `Sent.done`
    # By topic and producer's name, where not all has arrived: up to which sequence id, as `Failed.arrived_to`.
    arrived_to: Mapping[tuple[str, str], int] = field(default_factory=dict)
    generations: Mapping[tuple[str, str], Generation] = field(default_factory=dict)  # by topic and producer's name
    is_first: bool = False  # nothing of it was sent before; a task that Spark repeats by itself finds that out
    sent_to: int = 0  # releases of the lane up to this tick may have been sent before, also later ones than these
    # By source topic and subscription's number: how much later than planned its messages are sent, ms.
    put_off: Mapping[tuple[str, int], int] = field(default_factory=dict)
    patience_seconds: float = 10.0  # how long a broker that does not answer is waited for
    pace_file: str = ""  # of the rates: see `Paces`; empty: this task is not kept to them, but by `put_off`
    turn_file: str = ""  # nothing is sent before this file is there: see `Turns`; empty: it is the job's turn


@dataclass(frozen=True)
class Failed:
    """A producer whose messages have not all arrived. Sending them again is safe."""

    topic: str  # the destination, or its partition
    producer: str
    target: Target
    reason: str
    is_refused: bool  # the broker has said no, rather than nothing
    foreign_id: int | None  # a sequence id published under this name that is not the job's; None: none was found
    # Its messages up to this sequence id have arrived; -1: none. The broker knows, too, unless the topic is made anew.
    arrived_to: int = -1
    is_behind: bool = False  # it waited for a message of another producer, which has failed


@dataclass(frozen=True)
class Sent:
    """A task's report of what it has sent."""

    deliveries: bytes  # rows of the table `deliveries`, packed
    ready_at: int  # when it could have sent the first row, ms since the epoch; 0: never
    done: tuple[tuple[int, str, str], ...] = ()  # (tick, topic, producer's name) whose messages have all arrived
    failed: tuple[Failed, ...] = ()
    skipped: frozenset[Target] = frozenset()  # those of `Attempt.skipped` for which the releases have messages
    # By release (tick, kind) the messages that the client does not take, packed, with the subscription and the
    # reason: they are not delivered.
    refused: Mapping[tuple[int, int], bytes] = field(default_factory=dict)


def note_arrived(arrived_to: dict[tuple[str, str], int], failed: Iterable[Failed]) -> None:
    """Notes up to which sequence id messages of producers that failed have arrived."""
    for one in failed:
        key = (one.topic, one.producer)
        arrived_to[key] = max(arrived_to.get(key, -1), one.arrived_to)


def note_done(arrived_to: dict[tuple[str, str], int], done: Iterable[tuple[int, str, str]]) -> None:
    """Notes producers whose messages of a tick have all arrived: up to the last sequence id that it can have."""
    for tick, topic, producer in done:
        arrived_to[topic, producer] = max(arrived_to.get((topic, producer), -1), last_sequence_id(tick))


def merged(arrived_to: Iterable[Mapping[tuple[str, str], int]]) -> dict[tuple[str, str], int]:
    """Returns by topic and producer's name the last of the sequence ids up to which messages have arrived."""
    found: dict[tuple[str, str], int] = {}
    for of_part in arrived_to:
        for key, sequence_id in of_part.items():
            found[key] = max(found.get(key, -1), sequence_id)
    return found
