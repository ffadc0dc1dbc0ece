"""Which source topics stand still although they have messages."""

from __future__ import annotations

from dataclasses import dataclass

from broker.position import Position

STANDING_MILLIS = 60_000


@dataclass(frozen=True)
class _Stand:
    position: Position
    waits_since: int | None  # None: it has nothing that is not taken in


class Standing:
    """Looks at topic partitions again and again, and knows since when each stands still.

    Args:
        after_millis: so long with messages and without taking any in is to stand still.
    """

    def __init__(self, after_millis: int = STANDING_MILLIS) -> None:
        self._after_millis = after_millis
        self._seen: dict[str, _Stand] = {}

    def look(self, name: str, position: Position, has_more: bool, now: int) -> int | None:
        """Since when a topic partition has stood still, ms since the epoch; None: it does not.

        Args:
            position: the last entry that was taken in.
            has_more: whether it has messages after that, or may have: nobody knows.
            now: ms since the epoch.
        """
        last = self._seen.get(name)
        since = last.waits_since if last is not None and last.position == position else None
        since = (now if since is None else since) if has_more else None
        self._seen[name] = _Stand(position, since)
        return since if since is not None and now - since >= self._after_millis else None
