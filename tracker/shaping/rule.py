"""The shaping rule of a subscription, rate and windows, as offsets record it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from conf.shaping import DAYS, Rate, Window, minutes


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
