"""Has the source topics read again from where a backup ends: the job has acknowledged more than the backup knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from broker.admin_rest import AdminClient
from broker.new_cluster import check_topics
from broker.position import START, Position
from conf.errors import DelayLakeError
from conf.settings import Settings
from recovery.delivered import CLOCKS_MILLIS, partition_name


class ConnectedError(DelayLakeError):
    """A job still reads the source topics. The message is one line."""


def check_alone(settings: Settings) -> None:
    """Makes sure that no job reads the source topics: one would go on beside the warehouse that is restored.

    Raises:
        ConnectedError: one does.
        PulsarError: the broker does not answer.
    """
    with AdminClient(settings.pulsar) as admin:
        for _, name in _partitions(settings, admin):
            if _is_subscribed(settings, admin, name) and admin.connections(name, settings.pulsar.subscription):
                raise ConnectedError(
                    f"{name}: a job still reads it, on the warehouse that was backed up: stop that job"
                )


def rewind(settings: Settings, durable: Mapping[str, Position], made_at: int) -> None:
    """Takes back what the job acknowledged of the source topics, and of the control topic, after a backup was made.

    Args:
        durable: by topic partition the last entry that the backup has.
        made_at: when it was made, ms since the epoch.

    Raises:
        NewClusterError: the broker never had these entries.
        PulsarError: the broker does not answer.
    """
    subscription = settings.pulsar.subscription
    with AdminClient(settings.pulsar) as admin:
        check_topics(admin, {name: str(position) for name, position in durable.items()})
        for topic, name in _partitions(settings, admin):
            if not _is_subscribed(settings, admin, name):
                continue
            if topic == settings.control.topic:
                # Commands that the tables know are answered as before. Clocks may differ.
                admin.reset_to_time(name, subscription, max(0, made_at - CLOCKS_MILLIS))
            elif (last := durable.get(name, START)) == START:
                admin.reset_to_time(name, subscription, 0)
            else:
                admin.reset_to_entry(name, subscription, last.ledger_id, last.entry_id)


def _partitions(settings: Settings, admin: AdminClient) -> Iterator[tuple[str, str]]:
    """Yields the topics that the job reads, each with the names of its partitions."""
    for topic in (settings.control.topic, *(route.source for route in settings.routes)):
        number = admin.partitions(topic)
        for partition in range(number) if number else [-1]:
            yield topic, partition_name(topic, partition)


def _is_subscribed(settings: Settings, admin: AdminClient, name: str) -> bool:
    stats = admin.internal_stats(name)
    return stats is not None and settings.pulsar.subscription in stats.acknowledged
