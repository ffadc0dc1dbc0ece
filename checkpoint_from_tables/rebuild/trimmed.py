"""Checks whether the broker has trimmed a destination, so that a rebuild can't see everything that was sent to it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from broker.client import PulsarError
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.answers import TopicLedgers
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries

_SQL = NamedQueries(__file__)

# The most by which a sender's clock and the broker's differ, together with the time from sending to storing, ms.
_MARGIN_MILLIS = 60_000

# A topic's first ledger is made within this time after the topic, ms.
_FIRST_LEDGER_MILLIS = 5_000

_MEANS = "what was sent before then and not written down may come twice; give the namespace a retention"


def warn_of_trimmed(
    admin: AdminClient, tables: Tables, partitions: Iterable[str], since: int, topic: str, subscription: str
) -> str | None:
    """Checks whether the broker still has all messages that were sent to a destination since a time.

    Args:
        admin: asks the broker.
        tables: of the warehouse; `deliveries` says whether the destination had earlier messages than the broker has.
        partitions: the topic partitions of the destination.
        since: the earliest time at which a message may have been sent and not recorded, ms since the epoch.
        topic: the source topic.
        subscription: the subscription of the destination.

    Returns:
        a warning, one line; None: the broker has all messages since then, or has trimmed none.
    """
    latest: tuple[int, str] | None = None
    for partition in partitions:
        try:
            stats = admin.internal_stats(partition)
            first = None if stats is None else _first_time(admin, partition, stats)
            if stats is None or first is None or first <= since:
                continue
            is_trimmed = stats.added > sum(stats.ledgers.values()) or _is_later_ledger(admin, partition, stats)
        except PulsarError as error:
            return f"{partition}: the broker does not say from when it still has it ({error}); {_MEANS}"
        if is_trimmed or _has_had(tables, partition, first - _MARGIN_MILLIS, topic, subscription):
            latest = max(latest or (first, partition), (first, partition))
    if latest is None:
        return None
    at, needed = (f"{datetime.fromtimestamp(t / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC" for t in (latest[0], since))
    return f"{latest[1]}: the broker still has it from {at}, and it is needed from {needed}: {_MEANS}"


def _first_time(admin: AdminClient, partition: str, stats: TopicLedgers) -> int | None:
    """Returns the time since which the broker has every entry of a topic partition, ms since the epoch.

    It is the publish time of the first entry. If only the open ledger is left, it is the time when that was made,
    because ledgers are trimmed as a whole. None: not known.
    """
    if not (closed := _closed(stats)):
        return stats.last_made_at
    entry = admin.entry_metadata(partition, closed[0], 0)
    return None if entry is None else entry.publish_time


def _closed(stats: TopicLedgers) -> list[int]:
    """Returns the closed ledgers with entries, in order."""
    return [ledger for ledger, n in sorted(stats.ledgers.items())[:-1] if n]


def _is_later_ledger(admin: AdminClient, partition: str, stats: TopicLedgers) -> bool:
    """Whether only the open ledger is left, and it is not the topic's first: then the broker has trimmed some.

    That happens when the broker restarts after consumers have acknowledged all messages. A new destination may have no
    rows in `deliveries` yet.
    """
    if _closed(stats) or stats.last_made_at is None:
        return False
    made_at = admin.made_at(partition)
    return made_at is not None and stats.last_made_at > made_at + _FIRST_LEDGER_MILLIS


def _has_had(tables: Tables, partition: str, before: int, topic: str, subscription: str) -> bool:
    """Whether `deliveries` has messages that were sent to a destination before a time, ms since the epoch."""
    sql = _SQL("one_sent_before", topic=topic, subscription=subscription, destination=partition, before=before)
    return bool(tables.query("deliveries", sql).num_rows)
