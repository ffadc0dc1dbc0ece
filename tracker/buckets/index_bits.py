"""The positions that the tracker knows: a Roaring bitmap of entry ids for each ledger.

As in Pulsar's BucketDelayedDeliveryTracker; Roaring bitmaps: https://roaringbitmap.org
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap, BitMap64

from tracker.messages import BoolArray, Int64Array
from tracker.store import Store

MAX_ENTRY_ID = 2**32 - 1  # as in Pulsar's bitmaps

_Bits = TypeVar("_Bits", BitMap, BitMap64)

_TABLE = "index_bits"
_LEDGERS = "ledgers"


class IndexBits:
    """The set of known positions. Those of a ledger are dropped together, after the last of its messages was due.

    A call reads and writes only the bitmaps of the ledgers that it names.

    Args:
        store: where the bitmaps are kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bits: dict[int, BitMap] = {}
        self._last_due: dict[int, int] | None = None

    def contains(self, ledger_ids: Int64Array, entry_ids: Int64Array) -> BoolArray:
        """Tells which of the positions are known: bool, (n,).

        Args:
            ledger_ids: int64, (n,).
            entry_ids: int64, (n,).
        """
        known = np.zeros(len(ledger_ids), dtype=np.bool_)
        for ledger, rows in by_ledger(ledger_ids):
            bits, entries = self._load(ledger), entry_ids[rows].astype(np.uint32)
            # Most new entries come after all known entries of their ledger.
            if not bits or entries.min() > bits.max():
                continue
            known[rows] = among(entries, bits)
        return known

    def add_entries(self, ledger_ids: Int64Array, entry_ids: Int64Array, deliver_at: Int64Array) -> None:
        """Adds positions.

        Args:
            ledger_ids: int64, (n,).
            entry_ids: int64, (n,).
            deliver_at: int64, (n,), ms since the epoch. A ledger is kept until its latest time.
        """
        last_due = self._ledgers()
        for ledger, rows in by_ledger(ledger_ids):
            bits = self._load(ledger)
            bits.update(entry_ids[rows].astype(np.uint32))
            bits.run_optimize()
            self._store.put(_TABLE, (ledger, 0), bits.serialize())
            last_due[ledger] = max(last_due.get(ledger, 0), int(deliver_at[rows].max()))
        self._put_ledgers(last_due)

    def drop_expired(self, cutoff: int) -> None:
        """Drops the ledgers whose last message was due at the cutoff, ms since the epoch, or before."""
        last_due = self._ledgers()
        expired = [ledger for ledger, due in last_due.items() if due <= cutoff]
        for ledger in expired:
            self._store.remove(_TABLE, (ledger, 0))
            self._bits.pop(ledger, None)
            del last_due[ledger]
        if expired:
            self._put_ledgers(last_due)

    def _load(self, ledger: int) -> BitMap:
        if ledger not in self._bits:
            data = self._store.get(_TABLE, (ledger, 0))
            self._bits[ledger] = BitMap.deserialize(data) if data else BitMap()
        return self._bits[ledger]

    def _ledgers(self) -> dict[int, int]:
        if self._last_due is None:
            data = self._store.get(_LEDGERS, (0, 0)) or b""
            pairs = np.frombuffer(data, dtype=np.int64).reshape(-1, 2)
            self._last_due = {ledger: due for ledger, due in pairs.tolist()}  # noqa: C416
        return self._last_due

    def _put_ledgers(self, last_due: dict[int, int]) -> None:
        self._last_due = last_due
        self._store.put(_LEDGERS, (0, 0), np.array(list(last_due.items()), dtype=np.int64).tobytes())


def by_ledger(ledger_ids: Int64Array) -> list[tuple[int, Int64Array]]:
    """Groups rows by ledger.

    Args:
        ledger_ids: int64, (n,).

    Returns:
        each ledger's id and the indexes of its rows, int64; ids and indexes are in ascending order.
    """
    if not len(ledger_ids):
        return []
    if (ledger_ids == ledger_ids[0]).all():
        return [(int(ledger_ids[0]), np.arange(len(ledger_ids)))]
    order = np.argsort(ledger_ids, kind="stable")
    ledgers = ledger_ids[order]
    starts = np.flatnonzero(ledgers[1:] != ledgers[:-1]) + 1
    return list(zip(ledgers[[0, *starts]].tolist(), np.split(order, starts), strict=True))


def among(values: npt.NDArray[Any], bits: _Bits) -> BoolArray:
    """Tells which of the values are in a bitmap: bool, (n,).

    Args:
        values: uint32 for a BitMap, uint64 for a BitMap64, (n,).
        bits: the bitmap.
    """
    found = bits & type(bits)(values)
    if not found:
        return np.zeros(len(values), np.bool_)
    # np.isin takes most of a millisecond however few the values are.
    ascending = np.array(found.to_array())
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    is_among: BoolArray = ascending[at] == values
    return is_among
