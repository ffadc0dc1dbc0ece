"""Dead letters as targets of their own: their topic may be writable while the subscription's destination is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa

from tracker.messages import Int64Array, attempts_of
from tracker.subscriptions import Subscriptions, by_topic

# Suffix of a subscription's name, or of a topic's in `tracker.in_flight.OpenReleases`, that stands for its dead letters
# alone. The names themselves have no space.
_SUFFIX = " dlq"


def dead_letters_of(name: str) -> str:
    """Returns the name that stands for the dead letters of a subscription, or of all subscriptions of a topic."""
    return name + _SUFFIX


def without_dead_letters(name: str) -> tuple[str, bool]:
    """Returns the name of the subscription, and whether the given name stands for its dead letters alone."""
    return name.removesuffix(_SUFFIX), name.endswith(_SUFFIX)


def dead_letters_in(rows: pa.Table, subscriptions: Subscriptions) -> Int64Array:
    """Returns the subscriptions for which each row is a dead letter by the settings, as bits, int64, (rows,).

    Args:
        rows: with the columns topic and attempt.
        subscriptions: the subscriptions of each source topic.
    """
    return dead_letter_masks(rows, subscriptions.max_count, subscriptions.most_retries)


def dead_letter_masks(rows: pa.Table, n_subscriptions: int, most_retries: Callable[[int, str], int]) -> Int64Array:
    """Returns the subscriptions for which each row is a dead letter, as bits, int64, (rows,).

    Args:
        rows: with the columns topic and attempt.
        n_subscriptions: the largest number of subscriptions that a topic has.
        most_retries: returns how many retries a message gets at most, by a subscription's number and its topic.
    """
    masks, attempts = np.zeros(rows.num_rows, np.int64), attempts_of(rows)
    for number in range(n_subscriptions if attempts.any() else 0):
        masks[attempts > by_topic(rows, partial(most_retries, number))] |= 1 << number
    return masks
