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


def violations(history: Sequence[Came]) -> list[tuple[Came, Came]]:
    """Returns pairs of messages that came in the wrong order, as they came.

    The second one is due before the first one, and could have come before it: it had been taken in when the first one
    was handed out, for else it would have been handed out in a later tick.

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
        if (then.due, then.position) < (first.due, first.position) and then.tick <= first.tick
    ]
