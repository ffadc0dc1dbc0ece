"""Reads from the history of a destination whether messages of a key came in the order of their times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Came:
    """A message at a destination."""

    key: bytes
    due: int  # its `delaylake.deliverAt`
    position: tuple[int, ...]  # of the message that it was made of
    tick: int  # in which it was handed out: `batch_id` in `deliveries`
    was_due: int | None = None  # where it was moved: when it was due before
    sequence: int = 0  # the same: that of the move
    since: int | None = None  # the tick in which it got this time; None: it is not known, `tick` at the latest
    attempt: int | None = None  # of a retry
    occurrence: int | None = None  # of a recurring message

    @property
    def rank(self) -> tuple[int, ...]:
        """Its place among those of its key."""
        return self.due, self.due if self.was_due is None else self.was_due, self.sequence, *self.position


def violations(history: Sequence[Came]) -> list[tuple[Came, Came]]:
    """Returns pairs of messages that came in the wrong order, as they came.

    The second one is due before the first one, and could have come before it: it had its time when the first one
    was handed out.

    Args:
        history: in the order of coming.
    """
    by_key: dict[bytes, list[Came]] = defaultdict(list)
    for one in history:
        by_key[one.key].append(one)
    return [
        (first, then)
        for of_key in by_key.values()
        for i, first in enumerate(of_key)
        for then in of_key[i + 1 :]
        if then.rank < first.rank and (then.tick if then.since is None else then.since) <= first.tick
    ]
