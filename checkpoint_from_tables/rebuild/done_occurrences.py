"""Keeps the occurrences of recurring messages that are done: delivered, or not to be delivered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tracker.messages import BoolArray, Int64Array

# (number of the subscription, ledger id, entry id, number in the entry).
Message = tuple[int, int, int, int]


class Done(NamedTuple):
    """An occurrence that is done. Times are ms since the epoch."""

    at: int  # the next occurrence is later than this
    sent_at: int  # 0: not known


class DoneOccurrences:
    """The occurrences that have been delivered, or must not be, by subscription and message.

    Attributes:
        topics: (source topic, partition) of each message.
    """

    def __init__(self) -> None:
        self._done: dict[Message, dict[int, Done]] = {}
        self.topics: dict[Message, tuple[str, int]] = {}

    def __iter__(self) -> Iterator[Message]:
        return iter(self._done)

    def of(self, message: Message) -> dict[int, Done]:
        """Returns a message's occurrences that are done, by their number."""
        return self._done.get(message, {})

    def add(self, rows: pa.Table, numbers: Int64Array) -> None:
        """Adds occurrences.

        Args:
            rows: with topic, partition, a position, occurrence, occurrence_at, deliver_at and sent_at.
            numbers: of each row's subscription, int64, shape (rows,).
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
        """Says which rows have an occurrence that is done for a subscription.

        Args:
            number: of the subscription.
            rows: with a position and `occurrence`; null: the message does not recur.

        Returns:
            a mask, bool, shape (rows,).
        """
        columns = (rows[name].to_pylist() for name in ("ledger_id", "entry_id", "batch_index", "occurrence"))
        return np.array(
            [
                occurrence in self.of((number, ledger, entry, max(index, 0)))
                for ledger, entry, index, occurrence in zip(*columns, strict=True)
            ],
            np.bool_,
        )
