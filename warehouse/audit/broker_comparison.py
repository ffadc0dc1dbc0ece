"""Compares the entries of the broker with those of the tables: the part of an audit that needs the broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from broker.client import PulsarError
from broker.entries.continuity import Continuity, Gap
from broker.position import START, Position, SourceTopic
from broker.protocol.brokers import Brokers
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.answers import TopicLedgers
from conf.partitions import partition_name
from conf.settings import Settings
from tracker.messages import FIRST_IMPORTED_LEDGER, int64
from warehouse.named_queries import NamedQueries, Sql
from warehouse.unseen_entries import GONE, NotSeen, find_not_seen

_SQL = NamedQueries(__file__, first_imported_ledger=FIRST_IMPORTED_LEDGER)

_MAX_GAPS = 5_000  # of a topic partition: the broker is asked about the last ones only
_ASKED_AT_ONCE = 4
_TIMEOUT_SECONDS = 10.0
_SEEN_COLUMNS = ["position", "reason", "publish_time"]


class Query(Protocol):
    """Runs SQL over one version of each table, and yields the rows some at a time."""

    def __call__(self, sql: str) -> Iterator[pa.Table]: ...


@dataclass(frozen=True)
class ComparedTopic:
    """The numbers of a topic partition's entries, counted from the first one that the tables still have.

    Attributes:
        topic: the source topic, as the route names it.
        partition: number of the partition; -1: the topic is not partitioned.
        entries: entries that the broker has stored.
        durable: of these, entries that the table `entries` has.
        not_durable: entries after the durable ones, which are not read or not recorded yet.
        no_message: markers, entries of aborted transactions, and chunks of chunked messages but for their last one.
        not_seen: entries that were not ingested, although acknowledged or between durable ones.
        not_known: entries missing both in the tables and in the broker, or that the broker was not asked about; a gap
            that it was not asked about counts as one entry.
        trimmed: durable entries that the broker no longer has.
    """

    topic: str
    partition: int
    entries: int = 0
    durable: int = 0
    not_durable: int = 0
    no_message: int = 0
    not_seen: int = 0
    not_known: int = 0
    trimmed: int = 0


@dataclass(frozen=True)
class Comparison:
    """The tables and the broker, side by side.

    Attributes:
        problem: why they could not be compared; None: they were compared.
        topics: the topic partitions of the settings' routes.
        not_seen: (topic, position) of each entry that was not ingested.
    """

    problem: str | None = None
    topics: list[ComparedTopic] = field(default_factory=list)
    not_seen: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class BrokerState:
    """The topic partitions of the settings' routes as the broker has them; `problem` says why it could not be asked."""

    topics: dict[SourceTopic, TopicLedgers]
    problem: str | None = None


def read_broker(settings: Settings) -> BrokerState:
    """Asks the broker which entries it has; a PulsarError becomes the state's `problem`.

    Call this before the tables are opened, so that these have all entries that were acknowledged.
    """
    try:
        return BrokerState(_read_broker(settings))
    except PulsarError as error:
        return BrokerState({}, str(error))


def compare(settings: Settings, broker: BrokerState, query: Query) -> Comparison:
    """Compares the tables with the entries that the broker had before the tables were read.

    Args:
        broker: the state that `read_broker` returned.
        query: runs SQL over the tables.

    Returns:
        the comparison; its `problem` is set if the broker does not answer.
    """
    if broker.problem is not None:
        return Comparison(broker.problem)
    horizon = time.time_ns() // 1_000_000 - settings.retention.entries_millis
    found = Comparison()
    try:
        with AdminClient(settings.pulsar, _TIMEOUT_SECONDS) as admin, closing(Brokers(settings.pulsar)) as brokers:
            missing = partial(find_not_seen, admin, index_of=lambda position: None, brokers=brokers)
            for source, ledgers in broker.topics.items():
                topic, positions = _compare(missing, source, ledgers, settings.pulsar.subscription, horizon, query)
                found.topics.append(topic)
                found.not_seen.extend((source.topic, position) for position in positions)
    except PulsarError as error:
        return Comparison(str(error))
    return found


def _read_broker(settings: Settings) -> dict[SourceTopic, TopicLedgers]:
    found = {}
    with AdminClient(settings.pulsar, _TIMEOUT_SECONDS) as admin:
        for route in settings.routes:
            n = admin.partitions(route.source)
            for partition in range(n) if n else [-1]:
                name = partition_name(route.source, partition)
                if (ledgers := admin.internal_stats(name)) is not None:
                    found[SourceTopic(name, route.source, partition)] = ledgers
    return found


def _compare(
    missing: Callable[[SourceTopic, Gap], NotSeen],
    source: SourceTopic,
    broker: TopicLedgers,
    subscription: str,
    horizon: int,
    query: Query,
) -> tuple[ComparedTopic, list[str]]:
    durable = _Durable(source, horizon, query)
    acknowledged = Position(*broker.acknowledged.get(subscription, START))
    if durable.last == START:
        # The tables have nothing, so the acknowledged entries were acknowledged before the tables began.
        n = _entries(broker.ledgers, acknowledged)
        return ComparedTopic(source.topic, source.partition, entries=n, not_durable=n), []
    gaps = durable.gaps
    if acknowledged > durable.last:
        gaps.append(Gap(durable.last, Position(acknowledged.ledger_id, acknowledged.entry_id + 1)))
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        found = list(pool.map(partial(missing, source), gaps[-_MAX_GAPS:]))
    rows = [row for one in found for row in one.rows.select(_SEEN_COLUMNS).to_pylist()]
    # Entries older than the horizon may be missing because retention has removed them.
    not_seen = [r for r in rows if not r["reason"].endswith(GONE) and r["publish_time"] >= horizon]
    n_in_broker = sum(n for ledger, n in durable.by_ledger.items() if ledger in broker.ledgers)
    not_durable = _entries(broker.ledgers, max(durable.last, acknowledged))
    compared = ComparedTopic(
        source.topic,
        source.partition,
        # The tables may have entries that came after the broker was asked.
        entries=max(_entries(broker.ledgers, durable.before), n_in_broker + not_durable),
        durable=n_in_broker,
        not_durable=not_durable,
        no_message=sum(one.passed for one in found),
        not_seen=len(not_seen),
        not_known=len(rows) - len(not_seen) + max(0, len(gaps) - _MAX_GAPS),
        trimmed=sum(durable.by_ledger.values()) - n_in_broker,
    )
    return compared, [row["position"] for row in not_seen]


class _Durable:
    """The entries of a topic partition in the table `entries`, from the first one that retention can't have removed.

    Attributes:
        before: position of the entry before the first one.
        last: position of the last one; START: there is none.
        by_ledger: the number of entries of each ledger.
        gaps: the gaps between them.
    """

    def __init__(self, source: SourceTopic, horizon: int, query: Query) -> None:
        topic, partition = source.topic, source.partition
        self.before = _position(query, _SQL("last_before", topic=topic, partition=partition, horizon=horizon))
        if self.before == START:
            first = _position(query, _SQL("first", topic=topic, partition=partition))
            self.before = START if first == START else Position(first.ledger_id, first.entry_id - 1)
        self.last = self.before
        self.by_ledger: dict[int, int] = {}
        self.gaps: list[Gap] = []
        continuity = Continuity(self.before)
        ledger, entry = self.before
        for rows in query(_SQL("entries_after", topic=topic, partition=partition, ledger=ledger, entry=entry)):
            if rows.num_rows:
                self.gaps += continuity.gaps(rows)
                ledgers, counts = np.unique(int64(rows, "ledger_id"), return_counts=True)
                for ledger, n in zip(ledgers.tolist(), counts.tolist(), strict=True):
                    self.by_ledger[ledger] = self.by_ledger.get(ledger, 0) + n
                self.last = Position(int(ledgers[-1]), int(int64(rows, "entry_id")[-1]))


def _position(query: Query, sql: Sql) -> Position:
    """Returns the position that a query finds; START: none."""
    rows: list[dict[str, Any]] = [row for some in query(sql) for row in some.to_pylist()]
    return Position(rows[0]["ledger_id"], rows[0]["entry_id"]) if rows else START


def _entries(ledgers: Mapping[int, int], after: Position) -> int:
    """Counts the entries that the broker has after a position; `ledgers`: how many each ledger has."""
    return sum(
        n if ledger > after.ledger_id else max(0, n - 1 - after.entry_id)
        for ledger, n in ledgers.items()
        if ledger >= after.ledger_id
    )
