"""A set of many messages that needs little memory."""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap64

from tracker.buckets.index_bits import among, by_ledger
from tracker.messages import BoolArray, Int64Array

_ENTRY_BITS = 32


class MessageSet:
    """A set of messages for each subscription, which is given by its number.

    It has a roaring bitmap for each subscription and ledger, with entry ids and batch indexes. A message that is an
    entry (batch index -1) counts as the first of a batch. All arrays are int64, shape (messages,).
    """

    def __init__(self) -> None:
        self._bits: dict[tuple[int, int], BitMap64] = {}

    @property
    def subscriptions(self) -> list[int]:
        """The numbers of the subscriptions that have messages here, ascending."""
        return sorted({subscription for subscription, _ in self._bits})

    def add(self, subscription: int, ledger_ids: Int64Array, entry_ids: Int64Array, batch_indexes: Int64Array) -> None:
        """Adds messages to a subscription's set."""
        codes = _codes(entry_ids, batch_indexes)
        for ledger, rows in by_ledger(ledger_ids):
            self._bits.setdefault((subscription, ledger), BitMap64()).update(codes[rows])

    def contains(
        self, subscription: int, ledger_ids: Int64Array, entry_ids: Int64Array, batch_indexes: Int64Array
    ) -> BoolArray:
        """Returns a mask of the messages that are in a subscription's set, bool, shape (messages,)."""
        found = np.zeros(len(ledger_ids), np.bool_)
        if not self._bits:
            return found
        codes = _codes(entry_ids, batch_indexes)
        for ledger, rows in by_ledger(ledger_ids):
            bits = self._bits.get((subscription, ledger))
            if bits:
                found[rows] = among(codes[rows], bits)
        return found


def _codes(entry_ids: Int64Array, batch_indexes: Int64Array) -> np.ndarray:
    return (np.maximum(batch_indexes, 0) << _ENTRY_BITS | entry_ids).astype(np.uint64)
