"""The delivery state of messages for a subscription: cancelled, handed out, moved to another time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tracker.commands.message_state.remaining import Remaining
from tracker.commands.moment import Moment, is_out_ahead
from tracker.messages import BoolArray, Int64Array, message_ids


class DeliveryState(NamedTuple):
    """The delivery state of n messages for a subscription.

    Attributes:
        cancelled: bool, (n,): the message is cancelled.
        is_late: bool, (n,): the message has been handed out.
        moves: int64, (n,): the sequence of the message's last move; 0: none.
        moved_to: int64, (n,), ms since the epoch: the time to which that move moved it; 0: none.
    """

    cancelled: BoolArray
    is_late: BoolArray
    moves: Int64Array
    moved_to: Int64Array


def delivery_state(
    remaining: Remaining, subscription: int, rows: pa.Table, is_released: BoolArray, moment: Moment
) -> DeliveryState:
    """Returns the delivery state of messages for a subscription.

    Args:
        remaining: knows to which subscriptions each message still goes.
        subscription: its number.
        rows: with the columns of KNOWN, except the topic.
        is_released: bool, (rows,): the message has been handed out, assuming that it was not moved.
        moment: of this tick.
    """
    at = message_ids(rows)
    moves, moved_to, _ = remaining.moved.find(subscription, *at)
    is_out = (moved_to <= moment.released) | is_out_ahead(rows, moved_to, moves, moment)
    is_late = np.where(moves > 0, is_out, is_released) | remaining.delivered.contains(subscription, *at)
    return DeliveryState(remaining.cancelled.contains(subscription, *at), is_late, moves, moved_to)
