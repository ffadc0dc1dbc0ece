"""Whether the broker has trimmed what a destination got, so that a rebuild can't see all that was sent to it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from broker.admin_rest import AdminClient, TopicLedgers
from broker.client import PulsarError
from warehouse.tables import Tables, literal

# Between the clock of a sender and the broker's, and from a message's sending to its being stored, ms.
_MARGIN_MILLIS = 60_000

_MEANS = "what was sent before then and not written down may come twice; give the namespace a retention"


def warn_of_trimmed(
    admin: AdminClient, tables: Tables, partitions: Iterable[str], since: int, topic: str, subscription: str
) -> str | None:
    """What to say of a subscription's destination if it does not reach back far enough; None: it does.

    It does where the broker has trimmed nothing, too: of a topic that is new, or that has had no messages before.

    Args:
        tables: by `deliveries` it is known what a destination has had.
        partitions: of the destination.
        since: the time at which the first message that is not written down may have been sent, ms since the epoch.
        topic: of the route.
    """
    latest: tuple[int, str] | None = None
    for partition in partitions:
        try:
            stats = admin.internal_stats(partition)
            first = None if stats is None else _first_time(admin, partition, stats)
        except PulsarError as error:
            return f"{partition}: the broker does not say from when it still has it ({error}); {_MEANS}"
        if stats is None or first is None or first <= since:
            continue
        is_trimmed = stats.added > sum(stats.ledgers.values())
        if is_trimmed or _has_had(tables, partition, first - _MARGIN_MILLIS, topic, subscription):
            latest = max(latest or (first, partition), (first, partition))
    if latest is None:
        return None
    at, needed = (f"{datetime.fromtimestamp(t / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC" for t in (latest[0], since))
    return f"{latest[1]}: the broker still has it from {at}, and it is needed from {needed}: {_MEANS}"


def _first_time(admin: AdminClient, partition: str, stats: TopicLedgers) -> int | None:
    """When the first entry that the broker still has was published, or could have been, ms since the epoch.

    Ledgers are trimmed as a whole: of the one that is open nothing is missing since it was made. None: not known.
    """
    closed = [ledger for ledger, n in sorted(stats.ledgers.items())[:-1] if n]
    if not closed:
        return stats.last_made_at
    entry = admin.entry_metadata(partition, closed[0], 0)
    return None if entry is None else entry.publish_time


def _has_had(tables: Tables, partition: str, before: int, topic: str, subscription: str) -> bool:
    """Whether a destination had messages of the job before a time."""
    rows = tables.query(
        "deliveries",
        f"SELECT 1 AS one FROM deliveries WHERE topic = {literal(topic)} AND subscription = {literal(subscription)} "  # noqa: S608
        f"AND destination = {literal(partition)} AND sent_at < {before} LIMIT 1",
    )
    return bool(rows.num_rows)
