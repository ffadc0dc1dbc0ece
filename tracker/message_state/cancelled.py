"""The messages that a cancel or skip has cancelled for a subscription, after PIP-423.

Roaring bitmaps: https://roaringbitmap.org
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyroaring import BitMap, BitMap64

from tracker.buckets.index_bits import among, by_ledger
from tracker.messages import BoolArray, Int64Array, MessageIds
from tracker.store import Store

# Number of the codec; bytes before compression; bytes of the bitmap of entries; number of entries and messages.
_HEADER = struct.Struct("<BIII")

_BATCH_BITS = 20

_STORED = "taken_back"  # the table's name in the store

_CODECS = ["NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY"]


@dataclass(frozen=True)
class Compression:
    """How bitmaps are compressed: the codec (NONE, LZ4, ZLIB, ZSTD, SNAPPY), and the size from which on it is used."""

    codec: str = "NONE"
    threshold_bytes: int = 16_384


@dataclass
class _Bits:
    whole: BitMap  # entry ids of entries cancelled as a whole
    part: BitMap64  # single messages of other entries: entry id << 20 | batch index


class CancelledMessages:
    """A set of cancelled messages: Roaring bitmaps of entries and of messages, for each ledger and subscription.

    The bitmaps of a ledger are dropped when the last of its cancelled messages is past. Their number has no limit. A
    call reads and writes only the bitmaps of the ledgers that it names.

    Args:
        store: where the bitmaps are kept.
        compression: how the bitmaps are compressed.
        table: name of the store's table.
    """

    def __init__(self, store: Store, compression: Compression | None = None, table: str = _STORED) -> None:
        self._store = store
        self._table, self._directory = table, f"{table}_ledgers"
        self._compression = compression or Compression()
        self._bits: dict[tuple[int, int], _Bits] = {}
        self._changed: set[tuple[int, int]] = set()
        # By ledger: the subscriptions as bits; when the last cancelled message is past (ms); `count`; `n_bytes`.
        data = store.get(self._directory, (0, 0)) or b""
        self._saved = data
        self._ledgers: dict[int, list[int]] = {
            row[0]: row[1:] for row in np.frombuffer(data, dtype=np.int64).reshape(-1, 5).tolist()
        }

    def __bool__(self) -> bool:
        """Whether anything has been cancelled."""
        return bool(self._ledgers)

    @property
    def count(self) -> int:
        """The number of cancelled messages and whole entries, summed over subscriptions, as of the last save."""
        return sum(entry[2] for entry in self._ledgers.values())

    @property
    def n_bytes(self) -> int:
        """The size of the bitmaps in the store, bytes, as of the last save."""
        return sum(entry[3] for entry in self._ledgers.values())

    def contains(self, subscription: int, ids: MessageIds) -> BoolArray:
        """Tells which of the messages are cancelled for a subscription.

        Args:
            subscription: its number.
            ids: of n messages.

        Returns:
            bool, (n,).
        """
        cancelled = np.zeros(len(ids.ledger_ids), dtype=np.bool_)
        if not self._ledgers:
            return cancelled
        for ledger, rows in by_ledger(ids.ledger_ids):
            entry = self._ledgers.get(ledger)
            if entry is None or not entry[0] >> subscription & 1:
                continue
            bits = self._load(ledger, subscription)
            cancelled[rows] = among(ids.entry_ids[rows].astype(np.uint32), bits.whole)
            if bits.part:
                cancelled[rows] |= among(
                    codes(ids.entry_ids[rows], ids.batch_indexes[rows]).astype(np.uint64), bits.part
                )
        return cancelled

    def add_entries(self, subscription: int, ledger_ids: Int64Array, entry_ids: Int64Array, until: Int64Array) -> None:
        """Cancels whole entries for a subscription.

        Args:
            subscription: its number.
            ledger_ids: int64, (n,).
            entry_ids: int64, (n,).
            until: int64, (n,), ms since the epoch: when the last row of the entry is past.
        """
        for ledger, rows in by_ledger(ledger_ids):
            bits = self._load(ledger, subscription)
            bits.whole.update(entry_ids[rows].astype(np.uint32))
            if bits.part:
                for entry in entry_ids[rows].tolist():
                    bits.part.remove_range(entry << _BATCH_BITS, (entry + 1) << _BATCH_BITS)
            self._touch(ledger, subscription, int(until[rows].max()))

    def add_messages(
        self,
        subscription: int,
        ids: MessageIds,
        batch_sizes: Int64Array,
        until: Int64Array,
    ) -> None:
        """Cancels messages of batches for a subscription; an entry is cancelled as a whole once all its messages are.

        Args:
            subscription: its number.
            ids: of n messages.
            batch_sizes: int64, (n,): the number of messages in the entry.
            until: int64, (n,), ms since the epoch: when the last row of the message is past.
        """
        for ledger, rows in by_ledger(ids.ledger_ids):
            bits = self._load(ledger, subscription)
            bits.part.update(codes(ids.entry_ids[rows], ids.batch_indexes[rows]))
            for entry, size in set(zip(ids.entry_ids[rows].tolist(), batch_sizes[rows].tolist(), strict=True)):
                first = entry << _BATCH_BITS
                if bits.part.range_cardinality(first, first + size) == size:
                    bits.part.remove_range(first, first + size)
                    bits.whole.add(entry)
            self._touch(ledger, subscription, int(until[rows].max()))

    def remove(
        self,
        subscription: int,
        ids: MessageIds,
        batch_sizes: Int64Array,
    ) -> None:
        """Restores messages for a subscription; the other messages of an entry cancelled as a whole stay cancelled.

        Args:
            subscription: its number.
            ids: of n messages.
            batch_sizes: int64, (n,): the number of messages in the entry.
        """
        for ledger, rows in by_ledger(ids.ledger_ids):
            bits = self._load(ledger, subscription)
            sizes = dict(zip(ids.entry_ids[rows].tolist(), batch_sizes[rows].tolist(), strict=True))
            for entry in sizes.keys() & set(bits.whole & BitMap(sizes)):
                bits.whole.discard(entry)
                bits.part.add_range(entry << _BATCH_BITS, (entry << _BATCH_BITS) + sizes[entry])
            bits.part.difference_update(BitMap64(codes(ids.entry_ids[rows], ids.batch_indexes[rows])))
            self._changed.add((ledger, subscription))

    def drop_expired(self, cutoff: int) -> None:
        """Drops the ledgers whose cancelled messages are all past at the cutoff, ms since the epoch."""
        for ledger in [ledger for ledger, entry in self._ledgers.items() if entry[1] <= cutoff]:
            for subscription in subscriptions_of(self._ledgers.pop(ledger)[0]):
                self._bits.pop((ledger, subscription), None)
                self._changed.discard((ledger, subscription))
                self._store.remove(self._table, (ledger, subscription))

    def save(self) -> None:
        """Writes the changes to the store."""
        for ledger in {ledger for ledger, _ in self._changed}:
            entry = self._ledgers[ledger]
            entry[2] = entry[3] = 0
            for subscription in subscriptions_of(entry[0]):
                if (ledger, subscription) in self._changed:
                    data = self._pack(self._load(ledger, subscription))
                    self._store.put(self._table, (ledger, subscription), data)
                else:
                    data = self._store.get(self._table, (ledger, subscription)) or b""
                entry[2] += _HEADER.unpack_from(data)[3]
                entry[3] += len(data)
        self._changed.clear()
        rows = [[ledger, *entry] for ledger, entry in self._ledgers.items()]
        data = np.array(rows, dtype=np.int64).tobytes()
        if data != self._saved:
            self._store.put(self._directory, (0, 0), data)
            self._saved = data

    def _touch(self, ledger: int, subscription: int, until: int) -> None:
        entry = self._ledgers.setdefault(ledger, [0, 0, 0, 0])
        entry[0] |= 1 << subscription
        entry[1] = max(entry[1], until)
        self._changed.add((ledger, subscription))

    def _load(self, ledger: int, subscription: int) -> _Bits:
        key = (ledger, subscription)
        if key not in self._bits:
            data = self._store.get(self._table, key)
            self._bits[key] = _unpack(data) if data else _Bits(BitMap(), BitMap64())
        return self._bits[key]

    def _pack(self, bits: _Bits) -> bytes:
        bits.whole.run_optimize()
        bits.part.run_optimize()
        whole, part = bits.whole.serialize(), bits.part.serialize() if bits.part else b""
        body = whole + part
        codec = self._compression.codec if len(body) > self._compression.threshold_bytes else "NONE"
        header = _HEADER.pack(_CODECS.index(codec), len(body), len(whole), len(bits.whole) + len(bits.part))
        return header + _compress(codec, body)


def _unpack(data: bytes) -> _Bits:
    codec, size, whole, _ = _HEADER.unpack_from(data)
    body = _decompress(_CODECS[codec], data[_HEADER.size :], size)
    part = body[whole:]
    return _Bits(BitMap.deserialize(body[:whole]), BitMap64.deserialize(part) if part else BitMap64())


def _compress(codec: str, body: bytes) -> bytes:
    if codec == "NONE":
        return body
    if codec == "ZLIB":
        return zlib.compress(body)
    return bytes(pa.Codec(_arrow_codec(codec)).compress(body))


def _decompress(codec: str, body: bytes, size: int) -> bytes:
    if codec == "NONE":
        return body
    if codec == "ZLIB":
        return zlib.decompress(body)
    return bytes(pa.Codec(_arrow_codec(codec)).decompress(body, size))


def _arrow_codec(codec: str) -> str:
    return {"LZ4": "lz4_raw", "ZSTD": "zstd", "SNAPPY": "snappy"}[codec]


def codes(entry_ids: Int64Array, batch_indexes: Int64Array) -> Int64Array:
    """Numbers the messages of a ledger: entry id << 20 | batch index. A batch index of -1 counts as 0.

    Args:
        entry_ids: int64, (n,).
        batch_indexes: int64, (n,); -1: the entry is one message.

    Returns:
        int64, (n,).
    """
    return (entry_ids << _BATCH_BITS) | np.maximum(batch_indexes, 0)


def subscriptions_of(mask: int) -> list[int]:
    """Returns the numbers of the bits that are set in a mask, in ascending order."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]
