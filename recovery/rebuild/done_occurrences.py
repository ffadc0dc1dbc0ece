"""The occurrences of recurring messages that subscriptions have had."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tracker.messages import BoolArray, Int64Array

# The number of a subscription, ledger, entry, number in the entry.
Message = tuple[int, int, int, int]


class Done(NamedTuple):
    """An occurrence that is done. Times are ms since the epoch."""

    at: int  # the next occurrence is later than this
    sent_at: int


class DoneOccurrences:
    """The occurrences that have been delivered, or are not to be, by subscription and message."""

    def __init__(self) -> None:
        self._done: dict[Message, dict[int, Done]] = {}
        self.topics: dict[Message, tuple[str, int]] = {}  # topic and partition of each message

    def __iter__(self) -> Iterator[Message]:
        return iter(self._done)

    def of(self, message: Message) -> dict[int, Done]:
        """Returns the occurrences that are done of a message, by their number."""
        return self._done.get(message, {})

    def add(self, rows: pa.Table, numbers: Int64Array) -> None:
        """Adds occurrences.

        Args:
            rows: with topic, partition, a position, occurrence, occurrence_at, deliver_at and sent_at.
            numbers: int64, (rows,): of the subscriptions.
        """
        names = ("topic", "partition", "ledger_id", "entry_id", "batch_index")
        columns = (rows[name].to_pylist() for name in (*names, "occurrence", "occurrence_at", "deliver_at", "sent_at"))
        for number, topic, partition, ledger, entry, index, occurrence, at, due, sent_at in zip(
            numbers.tolist(), *columns, strict=True
        ):
            message = number, ledger, entry, max(index, 0)
            self._done.setdefault(message, {})[occurrence] = Done(due if at is None else at, sent_at or 0)
            self.topics[message] = topic, partition

    def contains(self, number: int, rows: pa.Table) -> BoolArray:
        """Returns a mask of the rows whose occurrence a subscription has had: bool, (rows,).

        Args:
            number: the subscription's.
            rows: with a position and occurrence; null: the message does not recur.
        """
        columns = (rows[name].to_pylist() for name in ("ledger_id", "entry_id", "batch_index", "occurrence"))
        return np.array(
            [
                occurrence in self.of((number, ledger, entry, max(index, 0)))
                for ledger, entry, index, occurrence in zip(*columns, strict=True)
            ],
            np.bool_,
        )
