"""The rule by which a subscription's messages are shaped, and which releases it shapes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from conf.shaping import DAYS, Rate, Window, minutes
from tracker.in_flight import PLACE, SENDING, SUBSCRIPTION_MASK, Release
from tracker.messages import int64


@dataclass(frozen=True)
class OpenWindow:
    """A span of time, every week, in which messages may go out.

    Attributes:
        days: weekdays on which the window begins; Monday is 0.
        start: minutes from midnight.
        end: minutes from midnight of the day on which the window begins; more than `start`, perhaps on the next day.
        time_zone: IANA name.
    """

    days: tuple[int, ...]
    start: int
    end: int
    time_zone: str


@dataclass(frozen=True)
class ShapingRule:
    """How a subscription's messages are shaped.

    Attributes:
        rate: messages a second; None: no limit.
        burst: how many messages may go out at once after a pause.
        is_per_key: whether rate and burst are those of each key, or of the subscription as a whole.
        windows: when messages may go out; empty: always.
    """

    rate: float | None
    burst: int
    is_per_key: bool
    windows: tuple[OpenWindow, ...]

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_json(text: str) -> ShapingRule:
        """Reads a rule that `rule_of` wrote."""
        rule = json.loads(text)
        windows = tuple(OpenWindow(tuple(days), *others) for days, *others in rule.get("windows", ()))
        return ShapingRule(rule.get("rate"), rule.get("burst", 1), rule.get("per_key", False), windows)


def rule_of(rate: Rate | None, windows: Sequence[Window]) -> str | None:
    """Returns a subscription's shaping rule as JSON; None: its messages are not shaped.

    Args:
        rate: the subscription's setting; None: no rate.
        windows: the subscription's setting.
    """
    if rate is None and not windows:
        return None
    rule: dict[str, object] = {}
    if rate is not None:
        rule |= {"rate": rate.messages_per_second, "burst": rate.most_at_once, "per_key": rate.per == "key"}
    if windows:
        rule["windows"] = [_recorded(window) for window in windows]
    return json.dumps(rule)


def _recorded(window: Window) -> list[object]:
    start, end = minutes(window.start), minutes(window.end)
    days = sorted({DAYS.index(day) for day in window.days})
    return [days, start, end if end > start else end + 24 * 60, window.time_zone]


# Key in the JSON of `Tick.sending`: the subscriptions whose messages are shaped, their rates, and the tick's time.
SHAPED = "shaped"


def recorded(now: int, rules: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    """Returns the value to record under SHAPED with a tick's releases.

    Args:
        now: time of the tick, ms since the epoch.
        rules: by source topic and subscription number: the shaping rule, as `rule_of` returns it.
    """
    rates: dict[str, dict[str, list[Any]]] = {}
    for topic, topic_rules in rules.items():
        for number, text in topic_rules.items():
            rule = ShapingRule.from_json(text)
            if rule.rate is not None:
                rates.setdefault(topic, {})[str(number)] = [rule.rate, rule.burst, rule.is_per_key]
    numbers = {topic: sorted(topic_rules) for topic, topic_rules in rules.items()}
    return {"now": now, "subscriptions": numbers} | ({"rates": rates} if rates else {})


def spans(rows: pa.Table) -> dict[tuple[str, int], tuple[int, int]]:
    """Returns when the first and the last shaped message of each subscription is due.

    A message that was overdue when it was dispatched counts as due at that time.

    Args:
        rows: as `Release.rows`, with the metadata.

    Returns:
        by topic and subscription number: first and last time, ms since the epoch.
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
            dues = due[(indices == i) & (masks >> number & 1 > 0)]
            if len(dues):
                found[topic, number] = int(dues.min()), int(dues.max())
    return found


def first_due(releases: Iterable[Release]) -> dict[tuple[str, int], int]:
    """Returns when the first shaped message of each subscription is due that may not have been sent.

    Args:
        releases: those in flight. Open ones are not counted, because they wait for their destination.

    Returns:
        by topic and subscription number: ms since the epoch.
    """
    found: dict[tuple[str, int], int] = {}
    for release in releases:
        if PLACE not in release.rows.column_names:
            for target, (first, _) in spans(release.rows).items():
                found[target] = min(first, found.get(target, first))
    return found
