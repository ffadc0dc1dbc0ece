"""The input of a task that sends releases, and its report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from conf.settings import MOST_LANES
from streaming.release.naming import LANE_KINDS, Recipient
from streaming.release.sequence_ids import last_sequence_id
from tracker.packing import unpack
from warehouse.delivery_key import Key


def lane_name(tick: int, kind: int, lanes: int, lane_set: int = 0) -> str:
    """Returns the name of a release's lane.

    Releases of one lane are sent one after another, releases of different lanes side by side.

    Args:
        tick: of the release.
        kind: of the release.
        lanes: the number of lanes in a lane set.
        lane_set: the number of the lane set. Each lane set has lanes of its own, until there are MOST_LANES of a kind;
            the next lane set uses the lanes of the first one again.
    """
    number = tick % lanes + lanes * (lane_set % (MOST_LANES // lanes))
    return f"{LANE_KINDS[kind]}{number}"


# The most connections of its own that a task makes for recipients that may be slow.
MOST_CONNECTIONS = 8


@dataclass(frozen=True)
class Assignment:
    """A shard's release, for a task to send.

    Attributes:
        app_id: of the checkpoint: the same in all its runs, another for each checkpoint.
        shard: the shard's number, from 0 on.
        tick: of the release.
        kind: of the release, as `tracker.in_flight.Release.kind`.
        body: the release's rows, packed; empty: `file` has them.
        file: a file with a large body, where all tasks can read it, so that it does not pass through Spark.
    """

    app_id: str
    shard: int
    tick: int
    kind: int
    body: bytes
    file: str = ""

    def rows(self) -> pa.Table:
        """Returns the release's rows."""
        return unpack(Path(self.file).read_bytes() if self.file else self.body)

    def lane(self, lanes: int, lane_set: int = 0) -> str:
        """Returns the name of the release's lane: see `lane_name`."""
        return lane_name(self.tick, self.kind, lanes, lane_set)


@dataclass(frozen=True)
class Generation:
    """The number in a producer's name, which rises when somebody else has published under the name."""

    number: int  # of earlier names; 0: the producer has its first name
    tick: int  # messages of releases up to this tick may have been sent under earlier names

    def name(self, producer: str) -> str:
        """Returns the name to send under, made from the producer's name in the plan."""
        return f"{producer}-{self.number}" if self.number else producer


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt to send assignments: the recipients to send to, and the results of earlier attempts."""

    skipped: frozenset[Recipient] = frozenset()  # recipients that are left out, because their destination is unwritable
    only: frozenset[Recipient] | None = None  # the only recipients to send to; None: all but `skipped`
    done: frozenset[tuple[int, str, str]] = frozenset()  # messages that have arrived, as `SendReport.done`
    # `FailedProducer.arrived_to` of producers with messages that have not arrived, by topic and producer's name.
    arrived_to: Mapping[tuple[str, str], int] = field(default_factory=dict)
    # Messages that have arrived by `deliveries`, which an earlier run of the job has written.
    recorded: frozenset[Key] = frozenset()
    generations: Mapping[tuple[str, str], Generation] = field(default_factory=dict)  # by topic and producer's name
    is_first: bool = False  # no attempt was made before; a task that Spark repeats by itself sets it to False
    sent_to: int = 0  # releases of the lane up to this tick may have been sent before, perhaps later ones than these
    # How much later than planned messages are sent, ms: by tick and kind of their release, and by source topic and
    # subscription's number.
    put_off: Mapping[tuple[int, int], Mapping[tuple[str, int], int]] = field(default_factory=dict)
    patience_seconds: float = 10.0  # how long the task waits for a broker that does not answer
    pace_file: str = ""  # the file with the rates' buckets, see `Paces`; empty: `put_off` alone slows the task down
    apart: frozenset[Recipient] = (
        frozenset()
    )  # recipients that do not share a connection with others, see `Connections`
    slow_after_seconds: float = 0.0  # a producer is slow when a message is not answered for so long; 0: none is
    most_seconds: float = 0.0  # then producers that have not sent all are ended as slow ones; 0: never
    order_signal: str = (
        ""  # the task sends nothing before this file exists, see `OrderSignals`; empty: it need not wait
    )


@dataclass(frozen=True)
class FailedProducer:
    """A producer with messages that have not arrived. It is safe to send them again."""

    topic: str  # the destination, or its partition
    producer: str  # the producer's name in the plan
    recipient: Recipient
    reason: str
    is_refused: bool  # the broker has refused, rather than not answered
    foreign_id: int | None  # a sequence id that somebody else has published under the producer's name; None: none
    # Messages up to this sequence id have arrived; -1: none. The broker knows it, too, unless the topic is made again.
    arrived_to: int = -1
    is_behind: bool = False  # a message had to wait for one of another producer, which has failed
    is_slow: bool = False  # the broker has answered, but too late
    is_alone: bool = False  # no other recipient shares its connection
    # The broker counts a message as published of which it has some chunks only: the name can't be used for it any more.
    is_partly_sent: bool = False
    is_untouched: bool = False  # none of its messages can be at the broker


@dataclass(frozen=True)
class SendReport:
    """The report of a task that has sent releases."""

    deliveries: bytes  # rows of the table `deliveries`, packed
    ready_at: int  # when the task could have sent its first row, ms since the epoch; 0: never
    done: tuple[tuple[int, str, str], ...] = ()  # (tick, topic, producer's name) with all messages arrived
    failed: tuple[FailedProducer, ...] = ()
    skipped: frozenset[Recipient] = frozenset()  # recipients of `Attempt.skipped` for which the releases have messages
    # Messages that the client does not take, packed, each with subscription and reason; by release (tick, kind).
    refused: Mapping[tuple[int, int], bytes] = field(default_factory=dict)


def note_arrived(arrived_to: dict[tuple[str, str], int], failed: Iterable[FailedProducer]) -> None:
    """Notes in `arrived_to` up to which sequence id the messages of failed producers have arrived."""
    for one in failed:
        key = (one.topic, one.producer)
        arrived_to[key] = max(arrived_to.get(key, -1), one.arrived_to)


def note_done(arrived_to: dict[tuple[str, str], int], done: Iterable[tuple[int, str, str]]) -> None:
    """Notes in `arrived_to` the last sequence id of a tick for producers whose messages of it have all arrived."""
    for tick, topic, producer in done:
        arrived_to[topic, producer] = max(arrived_to.get((topic, producer), -1), last_sequence_id(tick))


def merged(arrived_to: Iterable[Mapping[tuple[str, str], int]]) -> dict[tuple[str, str], int]:
    """Merges several `arrived_to`: the highest sequence id counts for each topic and producer's name."""
    found: dict[tuple[str, str], int] = {}
    for of_part in arrived_to:
        for key, sequence_id in of_part.items():
            found[key] = max(found.get(key, -1), sequence_id)
    return found
