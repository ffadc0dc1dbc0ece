"""The pace at which messages that were held back go out, in the order in which they were due, over all shards."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tracker.messages import Int64Array

# PACE_ROWS messages of a subscription, over all shards, are a step. A step goes out each PACE_MILLIS, so that releases
# stay moderate.
PACE_ROWS = 1_000
PACE_MILLIS = 100

# By source topic and subscription: for each step except the first, when its first message was due, ms since the epoch.
Pace = dict[str, dict[str, list[int]]]


def pace(rows: pa.Table) -> Pace:
    """Divides messages that are held back into steps of PACE_ROWS, by when they were due.

    Args:
        rows: as MESSAGES, of all shards; each row is for one subscription. Those with `was_due` null come first.

    Returns:
        the steps of the subscriptions that need more than one.
    """
    steps: Pace = {}
    grouped = rows.group_by(["topic", "subscription"]).aggregate([("was_due", "list")])
    for topic, subscription, times in zip(*(grouped[name] for name in grouped.column_names), strict=True):
        due = np.sort(times.values.fill_null(0).to_numpy())
        if len(due) > PACE_ROWS:
            steps.setdefault(topic.as_py(), {})[subscription.as_py()] = due[PACE_ROWS::PACE_ROWS].tolist()
    return steps


def step_of(due: Int64Array, steps: list[int]) -> Int64Array:
    """Returns the number of the step in which each of a shard's messages goes out.

    Args:
        due: int64, (n,), ascending: when the messages were due, ms since the epoch; 0: not known.
        steps: the steps of the messages' subscription, as in `Pace`.

    Returns:
        int64, (n,), ascending, from 0. Messages due at the same time are spread over all steps of that time.
    """
    marks = np.array(steps, np.int64)
    first, last = np.searchsorted(marks, due, "left"), np.searchsorted(marks, due, "right")
    _, group, sizes = np.unique(due, return_inverse=True, return_counts=True)
    place = np.arange(len(due)) - (np.cumsum(sizes) - sizes)[group]
    found: Int64Array = first + place * (last - first + 1) // np.maximum(sizes, 1)[group]
    return found
