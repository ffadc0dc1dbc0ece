"""A delayed index for the clock, whose answers are a test's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tracker.buckets.large_rows import NONE_LARGE, LargeKey, LargeRule


@dataclass(frozen=True)
class FakeIndex:
    """No row is large.

    Attributes:
        due: as `DelayedIndex.rows_due`.
        newest: the newest version.
    """

    due: Callable[[int, int, int], list[tuple[int, int]]] = lambda *_: []
    newest: int = 0

    def version(self) -> int:
        return self.newest

    def rows_due(self, version: int, start: int, end: int) -> list[tuple[int, int]]:
        return self.due(version, start, end)

    def large_rule(self, version: int, start: int, end: int) -> LargeRule:
        return NONE_LARGE

    def large_due(self, version: int, rule: LargeRule, after: LargeKey, end: int) -> list[tuple[LargeKey, int]]:
        return []
