"""Dead letters as a destination of their own, beside that of their subscription: one can be written, the other not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa

from tracker.messages import Int64Array, attempts_of
from tracker.subscriptions import by_topic

# Ends the name of a subscription, or of a topic in `tracker.in_flight.OpenReleases`, where its dead letters alone are
# meant. Neither has a space in its name.
_SUFFIX = " dlq"


def dead_letters_of(name: str) -> str:
    """Returns what stands for the dead letters of a subscription, or of all subscriptions of a topic."""
    return name + _SUFFIX


def without_dead_letters(name: str) -> tuple[str, bool]:
    """Returns the name of the subscription, and whether its dead letters alone are meant."""
    return name.removesuffix(_SUFFIX), name.endswith(_SUFFIX)


def dead_letter_masks(rows: pa.Table, n_subscriptions: int, most_retries: Callable[[int, str], int]) -> Int64Array:
    """Returns the subscriptions for which rows are dead letters, as bits, int64, (rows,).

    Args:
        rows: with the columns topic and attempt.
        n_subscriptions: the largest number of subscriptions that a topic has.
        most_retries: tells how many retries a message gets, by a subscription's number and its topic.
    """
    masks, attempts = np.zeros(rows.num_rows, np.int64), attempts_of(rows)
    for number in range(n_subscriptions if attempts.any() else 0):
        masks[attempts > by_topic(rows, partial(most_retries, number))] |= 1 << number
    return masks
