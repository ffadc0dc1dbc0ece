"""Checks whether the broker has trimmed a destination, so that a rebuild can't see everything that was sent to it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from broker.client import PulsarError
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.answers import TopicLedgers
from warehouse.delta.tables import Tables, literal

# How far a sender's clock and the broker's may differ, with the time from a message's sending to its storing, ms.
_MARGIN_MILLIS = 60_000

# A topic's first ledger is made within this time after the topic, ms.
_FIRST_LEDGER_MILLIS = 5_000

_MEANS = "what was sent before then and not written down may come twice; give the namespace a retention"


def warn_of_trimmed(
    admin: AdminClient, tables: Tables, partitions: Iterable[str], since: int, topic: str, subscription: str
) -> str | None:
    """Returns a warning, one line, where the broker no longer has all that was sent to a destination since a time.

    Args:
        tables: `deliveries` says whether a destination had messages earlier than those that the broker still has.
        partitions: the topic partitions of the destination.
        since: the time at which the first message that is not written down may have been sent, ms since the epoch.
        topic: the source topic.
        subscription: whose destination it is.

    Returns:
        the warning; None: the broker has the destination from then on, or has trimmed nothing of it.
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
    """Returns the time from which on the broker still has every entry of a topic partition, ms since the epoch.

    That is when its first entry was published. Ledgers are trimmed as a whole, so where only the open one is left, it
    is when that was made. None: not known.
    """
    if not (closed := _closed(stats)):
        return stats.last_made_at
    entry = admin.entry_metadata(partition, closed[0], 0)
    return None if entry is None else entry.publish_time


def _closed(stats: TopicLedgers) -> list[int]:
    """Returns the ledgers before the open one that have entries, in order."""
    return [ledger for ledger, n in sorted(stats.ledgers.items())[:-1] if n]


def _is_later_ledger(admin: AdminClient, partition: str, stats: TopicLedgers) -> bool:
    """Whether only the open ledger is left, and it was not the topic's first.

    So it is after a restart of the broker where consumers had all that came before, and a new destination has not been
    written down yet.
    """
    if _closed(stats) or stats.last_made_at is None:
        return False
    made_at = admin.made_at(partition)
    return made_at is not None and stats.last_made_at > made_at + _FIRST_LEDGER_MILLIS


def _has_had(tables: Tables, partition: str, before: int, topic: str, subscription: str) -> bool:
    """Whether the job sent messages of a subscription to a destination before a time, ms since the epoch."""
    rows = tables.query(
        "deliveries",
        f"SELECT 1 AS one FROM deliveries WHERE topic = {literal(topic)} AND subscription = {literal(subscription)} "  # noqa: S608
        f"AND destination = {literal(partition)} AND sent_at < {before} LIMIT 1",
    )
    return bool(rows.num_rows)
