"""Leaves out entries that a subscription has acknowledged one by one: only the broker's admin API tells which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from broker.entries.continuity import Gap
from broker.position import Position


def not_acknowledged(gaps: Iterable[Gap], acknowledged: list[tuple[Position, Position]]) -> Iterator[Gap]:
    """Yields gaps without the entries that the subscription has acknowledged one by one.

    Args:
        gaps: of a topic partition.
        acknowledged: ranges of these entries, ascending: (position before the first entry, position of the last).
    """
    for gap in gaps:
        after = gap.after
        for before_first, last in acknowledged:
            if last > after and before_first < gap.before:
                if before_first > after:
                    yield Gap(after, before_first.next)
                after = last
        if after == gap.after:
            yield gap
        elif after < gap.before:
            yield Gap(after, gap.before)
