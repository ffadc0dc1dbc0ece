"""Which resumed subscriptions get a round of what is parked for them, in the next tick."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.source.clock import MAX_LARGE_BYTES
from warehouse.queries.drained_rows import MAX_ROUNDS, ROUND_ROWS

Since = dict[str, dict[str, int]]  # by source topic and subscription, as `Limits.since`


def resumed_rounds(last: Offset, feedback: Feedback, most_in_flight: int) -> Since:
    """Returns the subscriptions that get a round after an offset, where there is room for it.

    Each tick has MAX_ROUNDS of them, in turn. A subscription whose earlier messages wait for places under its rate gets
    no more of them yet.

    Args:
        last: the last offset.
        feedback: of the driver.
        most_in_flight: as `release.max_in_flight_messages` in the settings.

    Returns:
        by source topic and subscription a time, ms since the epoch: nothing that is parked was due before.
    """
    tick, resuming = feedback.resuming
    is_full = (
        feedback.in_flight + ROUND_ROWS > max(most_in_flight, ROUND_ROWS)
        or feedback.in_flight_bytes + feedback.large_bytes > MAX_LARGE_BYTES
    )
    if tick != last.tick or is_full:  # the feedback after the next batch has these again
        return {}
    waiting = feedback.waiting[1]
    targets = [
        (topic, name)
        for topic, names in sorted(resuming.items())
        for name in sorted(names)
        if sum(n for n, _ in waiting.get(topic, {}).get(name, ())) < ROUND_ROWS
    ]
    start = last.tick * MAX_ROUNDS % max(1, len(targets)) if len(targets) > MAX_ROUNDS else 0
    found: Since = {}
    for topic, name in (targets[start:] + targets[:start])[:MAX_ROUNDS]:
        found.setdefault(topic, {})[name] = resuming[topic][name]
    return found


def without_unwritable(rounds: Since, unwritable: Mapping[str, Mapping[str, Any]]) -> Since:
    """Returns rounds without those of subscriptions whose due messages are parked.

    Args:
        rounds: as `resumed_rounds` returns them.
        unwritable: as `Offset.unwritable`. Where due messages are rejected what was parked goes on, to be rejected.
    """
    found: Since = {}
    for topic, names in rounds.items():
        for name, since in names.items():
            if "rejects" in unwritable.get(topic, {}).get(name, {"rejects": ""}):
                found.setdefault(topic, {})[name] = since
    return found
