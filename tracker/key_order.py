"""Order per key: for a subscription with `order: key` the messages of one key come in the order of their times.

Such messages are handed out in releases of their own, so that one that waits for another holds up no other messages.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.in_flight import IN_ORDER, PLANNED, SUBSCRIPTION_MASK
from tracker.messages import BoolArray, concat, in_order, int64, is_rejected, where, with_columns
from tracker.subscriptions import Subscriptions, by_topic


def order_keys(rows: pa.Table) -> pa.ChunkedArray:
    """Returns each message's order key: its ordering key, else its partition key.

    Args:
        rows: as MESSAGES.

    Returns:
        binary, (rows,); null: the message has no key, and comes in any order.
    """
    keys = [rows[name].cast(pa.binary()) for name in ("ordering_key", "ordering_key_bytes", "key")]
    return pc.coalesce(*keys)


class KeyOrder:
    """Takes messages that have to come in order out of a tick's releases, and makes releases of their own.

    Messages due by the last tick's cutoff go into one release, on short notice, those due later into another, planned.
    So all messages of the first, in every shard, come before all messages of the second.

    Args:
        subscriptions: the subscriptions of each source topic.
    """

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions
        self._taken: list[pa.Table] = []

    def take(self, rows: pa.Table) -> pa.Table:
        """Takes the messages that have to come in order out of a release.

        Args:
            rows: as `Release.rows`.

        Returns:
            the other rows; `subscription_mask` has the subscriptions for which a row was not taken.
        """
        of = self._subscriptions.in_order
        if not of or not rows.num_rows:
            return rows
        masks = int64(rows, SUBSCRIPTION_MASK)
        has_key: BoolArray = pc.is_valid(order_keys(rows)).to_numpy()
        taken = np.where(has_key & ~is_rejected(rows), masks & by_topic(rows, lambda topic: of.get(topic, 0)), 0)
        if not taken.any():
            return rows
        self._taken.append(where(with_columns(rows, **{SUBSCRIPTION_MASK: pa.array(taken)}), taken != 0))
        left = with_columns(rows, **{SUBSCRIPTION_MASK: pa.array(masks & ~taken)})
        return where(left, (masks & ~taken != 0) | is_rejected(rows))

    def releases(self, last_cutoff: int) -> Iterator[tuple[int, pa.Table]]:
        """Yields the kind and the rows of each release made of the messages taken, in order of time.

        Args:
            last_cutoff: cutoff of the previous tick, the same in all shards, ms since the epoch.
        """
        if not self._taken:
            return
        rows, self._taken = in_order(concat(self._taken, self._taken[0].schema)), []
        is_short = int64(rows, "deliver_at") <= last_cutoff
        for kind, chosen in ((IN_ORDER, is_short), (IN_ORDER | PLANNED, ~is_short)):
            if chosen.any():
                yield kind, where(rows, chosen)
