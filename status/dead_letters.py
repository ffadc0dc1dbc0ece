"""Telling dead letters from other retries by where they were sent.

They go to the topic of the subscription's destination whose name has `-dlq` behind it. The destination's own name may
end so, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from conf.settings import dead_letter_topic

_END = dead_letter_topic("")
_PARTITION = "-partition-[0-9]+$"

# By source topic and subscription the topic to which its messages go, or went last.
Destinations = Mapping[tuple[str, str], str]


def destinations_of(routes: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Returns the destinations of all subscriptions that there are, or were.

    Args:
        routes: the known ones, as `JobStatus.routes` has them.
    """
    return {
        (topic, name): destination
        for topic, route in routes.items()
        for name, _, destination, *_ in route["subscriptions"]
    }


def is_dead_letter(sent_to: str, destination: str | None) -> bool:
    """Tells whether a retry was a dead letter.

    Args:
        sent_to: the topic, or partition, to which it was sent.
        destination: of its subscription; None: not known.
    """
    topic = re.sub(_PARTITION, "", sent_to)
    return topic.endswith(_END) and topic != destination


def is_dead_letter_sql(sent_to: str, destination: str) -> str:
    """Returns the SQL expression of `is_dead_letter`, of expressions; null where the first one is."""
    topic = f"regexp_replace({sent_to}, '{_PARTITION}', '')"
    return f"({topic} LIKE '%{_END}' AND coalesce({topic} <> {destination}, TRUE))"


def count_dead_letters(retries: pa.Table, destinations: Destinations) -> int:
    """Counts the dead letters among retries, rows of the table `deliveries`."""
    columns = ["topic", "subscription", "destination"]
    return sum(
        row["count_all"]
        for row in retries.group_by(columns).aggregate([([], "count_all")]).to_pylist()
        if is_dead_letter(row["destination"], destinations.get((row["topic"], row["subscription"])))
    )
