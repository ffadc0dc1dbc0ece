"""Tells dead letters from other retries, by the topic to which they were sent.

Dead letters go to the topic with the name of the subscription's destination and `-dlq` after it. The name of the
destination itself may end with `-dlq`, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from conf.partitions import PARTITION_SUFFIX, without_partition
from conf.settings import dead_letter_topic

_END = dead_letter_topic("")

# The topic to which a subscription's messages go, or went last, by source topic and subscription.
Destinations = Mapping[tuple[str, str], str]


def destinations_of(routes: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Returns the destinations of all subscriptions of the known routes.

    Args:
        routes: the known routes, as `JobStatus.routes`.
    """
    return {
        (topic, name): destination
        for topic, route in routes.items()
        for name, _, destination, *_ in route["subscriptions"]
    }


def is_dead_letter(sent_to: str, destination: str | None) -> bool:
    """Whether a retry was a dead letter.

    Args:
        sent_to: the topic, or topic partition, to which the retry was sent.
        destination: of the subscription; None: not known.
    """
    topic = without_partition(sent_to)
    return topic.endswith(_END) and topic != destination


def is_dead_letter_sql(sent_to: str, destination: str) -> str:
    """Returns `is_dead_letter` as an SQL expression; null where `sent_to` is null.

    Args:
        sent_to: an SQL expression.
        destination: an SQL expression.
    """
    topic = f"regexp_replace({sent_to}, '{PARTITION_SUFFIX}', '')"
    return f"({topic} LIKE '%{_END}' AND coalesce({topic} <> {destination}, TRUE))"


def count_dead_letters(retries: pa.Table, destinations: Destinations) -> int:
    """Counts the dead letters among retries.

    Args:
        retries: rows of the table `deliveries`.
        destinations: of the known routes.
    """
    columns = ["topic", "subscription", "destination"]
    return sum(
        row["count_all"]
        for row in retries.group_by(columns).aggregate([([], "count_all")]).to_pylist()
        if is_dead_letter(row["destination"], destinations.get((row["topic"], row["subscription"])))
    )
