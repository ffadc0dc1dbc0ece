"""Finds source topics that stand still although they have messages."""

from __future__ import annotations

from dataclasses import dataclass

from broker.position import Position

STANDING_MILLIS = 60_000  # a topic stands still after so long without a message ingested


@dataclass(frozen=True)
class _Stand:
    position: Position  # the last entry that was ingested
    waits_since: int | None  # ms since the epoch; None: all that it has is ingested


class StalledTopics:
    """Remembers for each topic partition since when it has had messages and none was ingested.

    Args:
        after_millis: how long that lasts until the topic partition counts as standing still.
    """

    def __init__(self, after_millis: int = STANDING_MILLIS) -> None:
        self._after_millis = after_millis
        self._seen: dict[str, _Stand] = {}

    def look(self, name: str, position: Position, has_more: bool, now: int) -> int | None:
        """Notes how far a topic partition has been read.

        Args:
            name: of the topic partition.
            position: the last entry that was ingested.
            has_more: whether it has messages after `position`, or may have some.
            now: ms since the epoch.

        Returns:
            since when it stands still, ms since the epoch; None: it does not.
        """
        last = self._seen.get(name)
        since = last.waits_since if last is not None and last.position == position else None
        since = (now if since is None else since) if has_more else None
        self._seen[name] = _Stand(position, since)
        return since if since is not None and now - since >= self._after_millis else None
