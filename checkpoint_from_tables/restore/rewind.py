"""Rewinds the job's subscriptions to the end of a backup, because the job has acknowledged more than the backup has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from broker.client import NoAnswerError
from broker.clusters.new_cluster import NewClusterError, check_topics
from broker.position import START, Position
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.answers import TopicLedgers
from checkpoint_from_tables.rebuild.delivered import CLOCKS_MILLIS
from conf.errors import DelayLakeError
from conf.partitions import partition_name
from conf.settings import Settings
from tracker.messages import FIRST_IMPORTED_LEDGER
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries

# The chunks of a message come within a minute and a half, with other entries in between.
CHUNKS_MILLIS = 2 * 60_000

_SQL = NamedQueries(__file__, first_imported_ledger=FIRST_IMPORTED_LEDGER, chunks_millis=CHUNKS_MILLIS)

_SEE = "if it was replicated to this broker, see --another-broker"


class ConnectedError(DelayLakeError):
    """A job still reads the source topics. The message is one line."""


def check_alone(settings: Settings) -> None:
    """Checks that no job reads the source topics, because it would go on beside the restored warehouse.

    Raises:
        ConnectedError: a job reads them.
        PulsarError: the broker does not answer.
    """
    with AdminClient(settings.pulsar) as admin:
        for _, _, name, _ in _subscribed(settings, admin):
            if admin.connections(name, settings.pulsar.subscription):
                raise ConnectedError(f"{name}: a job still reads it, on the warehouse that was backed up: stop it")


def check_broker(settings: Settings, tables: Tables, durable: Mapping[str, Position]) -> bool:
    """Checks that the broker is the one whose messages a backup has.

    Args:
        tables: of the backup.
        durable: the backup's last entry of each topic partition.

    Returns:
        whether that is certain: a topic partition with entries in the backup still has entries at the broker.

    Raises:
        NewClusterError: the broker never had the backup's entries, or has others with their ids.
        PulsarError: the broker does not answer.
    """
    with AdminClient(settings.pulsar) as admin:
        try:
            check_topics(admin, {name: str(position) for name, position in durable.items()})
        except NewClusterError as error:
            raise NewClusterError(f"{error}; {_SEE}") from None
        for name, last in durable.items():
            if _is_another(admin, tables, name, last):
                raise NewClusterError(f"{name}: entry {last} is another message than in the backup; {_SEE}")
        return any(name in durable and stats.ledgers for _, _, name, stats in _subscribed(settings, admin))


def _is_another(admin: AdminClient, tables: Tables, name: str, last: Position) -> bool:
    """Whether the broker has for certain another entry with an id than the tables."""
    try:
        entry = admin.entry_metadata(name, *last)
    except NoAnswerError:
        return False
    if entry is None or entry.publish_time is None:
        return False
    known = tables.query("entries", _SQL("is_entry", ledger=last.ledger_id, entry=last.entry_id)).to_pylist()
    # For a chunked message it may be the time of another chunk.
    return any(
        row["producer_name"] != entry.producer_name or abs(row["publish_time"] - entry.publish_time) > CHUNKS_MILLIS
        for row in known
    )


def rewind(settings: Settings, tables: Tables, durable: Mapping[str, Position], made_at: int) -> None:
    """Rewinds the job's subscriptions to source topics and control topic to the time when a backup was made.

    Entries that come again and are in the tables are dropped; a repeated command is answered as before.

    Args:
        tables: of the restored warehouse.
        durable: the backup's last entry of each topic partition.
        made_at: when the backup was made, ms since the epoch.

    Raises:
        PulsarError: the broker does not answer.
    """
    subscription = settings.pulsar.subscription
    with AdminClient(settings.pulsar) as admin:
        for topic, partition, name, stats in _subscribed(settings, admin):
            acknowledged = Position(*stats.acknowledged[subscription])
            if topic == settings.control.topic:
                since = max(0, made_at - CLOCKS_MILLIS)
                if (_published_at(admin, name, stats, acknowledged) or 0) >= since:
                    admin.reset_to_time(name, subscription, since)
                continue
            first = read_from(tables, topic, partition, durable.get(name, START))
            if first == START:
                admin.reset_to_time(name, subscription, 0)
            elif acknowledged > first:
                admin.reset_to_entry(name, subscription, first.ledger_id, first.entry_id)


def read_from(tables: Tables, topic: str, partition: int, last: Position) -> Position:
    """Returns the entry after which a topic partition has to be read again; START: from its beginning.

    The entry is well before the last one of the backup, because an incomplete chunked message may begin before that.

    Args:
        tables: of the restored warehouse.
        topic: the source topic.
        partition: its partition; -1: it is not partitioned.
        last: the backup's last entry of the partition; START: it has none.
    """
    sql = _SQL("well_before", topic=topic, partition=partition, ledger=last.ledger_id, entry=last.entry_id)
    found = tables.query("entries", sql).to_pylist()
    return Position(**found[0]) if found else START


def _published_at(admin: AdminClient, name: str, stats: TopicLedgers, last: Position) -> int | None:
    """Returns the publish time of an entry, or of the last one in the ledgers before it, ms; None: there is none."""
    if last.entry_id < 0:
        earlier = [ledger for ledger, n in stats.ledgers.items() if n and ledger < last.ledger_id]
        if not earlier:
            return None
        last = Position(max(earlier), stats.ledgers[max(earlier)] - 1)
    entry = admin.entry_metadata(name, last.ledger_id, last.entry_id)
    return None if entry is None else entry.publish_time


def _subscribed(settings: Settings, admin: AdminClient) -> Iterator[tuple[str, int, str, TopicLedgers]]:
    """Yields (topic, partition, name, ledgers) of each topic partition that has the job's subscription.

    The partition is -1 where the topic is not partitioned.
    """
    for topic in (settings.control.topic, *(route.source for route in settings.routes)):
        number = admin.partitions(topic)
        for partition in range(number) if number else [-1]:
            name = partition_name(topic, partition)
            stats = admin.internal_stats(name)
            if stats is not None and settings.pulsar.subscription in stats.acknowledged:
                yield topic, partition, name, stats
