"""From when to when the messages of a release that are shaped are to be sent, by subscription."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from tracker.in_flight import PLACE, SENDING, SUBSCRIPTION_MASK, Release
from tracker.messages import int64
from tracker.shaping.rule import ShapingRule

# Key of what is recorded of how releases are sent: which subscriptions' messages are shaped, and the tick's time.
SHAPED = "shaped"


def recorded(now: int, rules: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    """Returns what is recorded with a release under SHAPED.

    Args:
        now: of its tick, ms since the epoch.
        rules: by source topic and number those of the subscriptions whose messages are shaped, as `rule_of` made them.
    """
    rates: dict[str, dict[str, list[Any]]] = {}
    for topic, of_topic in rules.items():
        for number, text in of_topic.items():
            rule = ShapingRule.from_json(text)
            if rule.rate is not None:
                rates.setdefault(topic, {})[str(number)] = [rule.rate, rule.burst, rule.is_per_key]
    numbers = {topic: sorted(of_topic) for topic, of_topic in rules.items()}
    return {"now": now, "subscriptions": numbers} | ({"rates": rates} if rates else {})


def spans(rows: pa.Table) -> dict[tuple[str, int], tuple[int, int]]:
    """Returns by topic and subscription's number when the first and the last shaped message is due, ms.

    What was overdue when it was handed out counts as due then.

    Args:
        rows: as `Release.rows`, with the metadata.
    """
    sending = json.loads((rows.schema.metadata or {}).get(SENDING.encode(), b"{}"))
    found: dict[tuple[str, int], tuple[int, int]] = {}
    if SHAPED not in sending or not rows.num_rows:
        return found
    due = np.maximum(int64(rows, "deliver_at"), sending[SHAPED]["now"])
    masks = int64(rows, SUBSCRIPTION_MASK)
    topics = rows["topic"].combine_chunks().dictionary_encode()
    indices = topics.indices.to_numpy()
    for i, topic in enumerate(topics.dictionary.to_pylist()):
        for number in sending[SHAPED]["subscriptions"].get(topic, ()):
            of_target = due[(indices == i) & (masks >> number & 1 > 0)]
            if len(of_target):
                found[topic, number] = int(of_target.min()), int(of_target.max())
    return found


def first_due(releases: Iterable[Release]) -> dict[tuple[str, int], int]:
    """Returns by topic and subscription's number when the first shaped message is due that may not have been sent, ms.

    Args:
        releases: in flight; what is open is not counted, because it waits for its destination.
    """
    found: dict[tuple[str, int], int] = {}
    for release in releases:
        if PLACE not in release.rows.column_names:
            for target, (first, _) in spans(release.rows).items():
                found[target] = min(first, found.get(target, first))
    return found
