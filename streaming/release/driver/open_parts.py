"""Open parts of releases: what a release has for an unwritable destination."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streaming.release.naming import Target
from tracker.subscriptions import without_dead_letters

if TYPE_CHECKING:
    from streaming.release.driver.job import Job

_ROWS_AT_ONCE = 20_000  # the most rows of releases that are sent together, because one task has them all in memory

Release = tuple[int, int]  # tick, kind


@dataclass(frozen=True)
class OpenPart:
    """An open part: the messages of a release for one target that have not arrived."""

    job: Job
    target: Target
    done: frozenset[tuple[int, str, str]] = frozenset()  # messages that have arrived before, as `SendReport.done`
    # `FailedProducer.arrived_to` of producers with messages that have not arrived, by topic and producer's name.
    arrived_to: dict[tuple[str, str], int] = field(default_factory=dict)
    is_resumed: bool = False  # of an earlier run: some messages may have arrived, and be written down
    is_untouched: bool = False  # none of its messages was given to a producer, in any run

    @property
    def release(self) -> Release:
        """The release (tick, kind) of the part."""
        return self.job.release

    @property
    def is_recalled(self) -> bool:
        """Whether the shards are to hold its messages back, because nothing of it was sent."""
        return self.is_untouched and is_held_back(self.target) and self.target[0] not in self.job.passed


@dataclass(frozen=True)
class PartsSent:
    """The result of an attempt to send open parts of one target."""

    reason: str = ""  # why some messages have not arrived; empty: all have
    is_slow: bool = False  # the destination is only slow
    messages: int = 0  # the number of messages, where all have arrived


def is_held_back(target: Target) -> bool:
    """Whether what comes due for a target is held back while it is unwritable: not dead letters and rejects."""
    return bool(target[1]) and not without_dead_letters(target[1])[1]


def oldest(parts: Iterable[OpenPart]) -> list[OpenPart]:
    """Returns the parts to send together: all, or those of the oldest ticks where all have too many rows.

    Args:
        parts: ascending by release.
    """
    chosen: list[OpenPart] = []
    rows = 0
    for _, of_tick in itertools.groupby(parts, lambda part: part.job.tick):
        added = list(of_tick)
        rows += sum(part.job.rows for part in added)
        if chosen and rows > _ROWS_AT_ONCE:
            break
        chosen += added
    return chosen
