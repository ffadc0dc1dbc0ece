"""A bucket of schedule keys: for each its hash and its last message, in as few bytes as the numbers need."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tracker.messages import BoolArray, Int64Array
from tracker.properties.message_position import MessagePosition

KeyHash = tuple[int, int]

# A value begins with this, then with each number's least value and bytes. Earlier versions wrote _OLD_ROW alone.
_MAGIC = b"\0keys 2\0"
_HEADER = struct.Struct("<8s7q7B")
_HASH = struct.Struct("<qq")

_OLD_ROW = np.dtype(
    [
        *(("hash", "<i8"), ("check", "<i8"), ("ledger_id", "<i8"), ("entry_id", "<i8"), ("partition", "<i4")),
        *(("batch_index", "<i4"), ("batch_size", "<i4"), ("deliver_at", "<i8"), ("since", "<i8")),
    ]
)


class Live(NamedTuple):
    """The last message of a key: its position, and when it is due as it came, ms since the epoch."""

    ledger_id: int
    entry_id: int
    partition: int
    batch_index: int
    batch_size: int
    deliver_at: int
    since: int  # when the first message since the key began anew was published, ms since the epoch

    @property
    def position(self) -> MessagePosition:
        """The message's position."""
        return MessagePosition(self.ledger_id, self.entry_id, self.partition, self.batch_index)


class PackedBucket:
    """A map of keys' hashes to `Live`, as rows of bytes: the hash, and each number less the least one of its column.

    Args:
        data: as `pack` returns it, or as an earlier version has written it; empty: no keys.
        n_old: see below.

    Attributes:
        n_old: so many rows, the first ones, have not been put since this was set. A row that is put becomes the last.
    """

    def __init__(self, data: bytes = b"", n_old: int = 0) -> None:
        self.n_old = n_old
        self._least = [0] * len(Live._fields)
        self._widths = [0] * len(Live._fields)
        self._rows = bytearray()
        if data.startswith(_MAGIC):
            _, *numbers = _HEADER.unpack_from(data)
            self._least, self._widths = numbers[:7], numbers[7:]
            self._rows = bytearray(data[_HEADER.size :])
        elif data:
            old = np.frombuffer(data, _OLD_ROW)
            hashes = np.stack([old["hash"], old["check"]], axis=1)
            self._fill(hashes, np.stack([old[name].astype(np.int64) for name in Live._fields], axis=1))

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._rows) // self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return _HASH.size + sum(self._widths)

    def get(self, key: KeyHash) -> Live | None:
        """Returns the last message of a key; None: it has none."""
        at = self._find(key)
        if at < 0:
            return None
        values, at = [], at + _HASH.size
        for least, width in zip(self._least, self._widths, strict=True):
            values.append(least + int.from_bytes(self._rows[at : at + width], "little"))
            at += width
        return Live._make(values)

    def put(self, key: KeyHash, live: Live) -> None:
        """Sets the last message of a key."""
        try:
            row = _HASH.pack(*key) + b"".join(
                (value - least).to_bytes(width, "little")
                for value, least, width in zip(live, self._least, self._widths, strict=True)
            )
        except OverflowError:
            self.remove(key)
            hashes, values = self._columns()
            self._fill(np.append(hashes, [key], axis=0), np.append(values, [live], axis=0))
            return
        self.remove(key)
        self._rows += row

    def remove(self, key: KeyHash) -> bool:
        """Removes a key; tells whether it was there."""
        at = self._find(key)
        if at >= 0:
            self.n_old -= at < self.n_old * self._row_bytes
            del self._rows[at : at + self._row_bytes]
        return at >= 0

    def positions(self) -> pa.Table:
        """Returns the messages with the columns of `Live`, a row for each key."""
        return pa.table(dict(zip(Live._fields, self._columns()[1].T.copy(), strict=True)))

    def hashes(self) -> Int64Array:
        """Returns the first half of each key's hash, int64, (keys,), as `positions` has them."""
        return self._columns()[0][:, 0].copy()

    def remove_where(self, mask: BoolArray) -> None:
        """Removes keys by a bool array, (keys,), as `positions` has them."""
        self.n_old -= int(mask[: self.n_old].sum())
        self._rows = bytearray(self._as_rows()[~mask].tobytes())

    def split(self, bit: int) -> PackedBucket:
        """Removes the keys whose hash has a bit set, and returns them."""
        hashes, values = self._columns()
        goes = hashes[:, 0] >> bit & 1 > 0
        n_old = int(goes[: self.n_old].sum())
        other = PackedBucket(n_old=n_old)
        self.n_old -= n_old
        other._fill(hashes[goes], values[goes])
        self._fill(hashes[~goes], values[~goes])
        return other

    def pack(self) -> bytes:
        """Returns the bucket as bytes."""
        return _HEADER.pack(_MAGIC, *self._least, *self._widths) + self._rows

    def _find(self, key: KeyHash) -> int:
        """Returns where the row of a key begins; -1: there is none."""
        wanted, n = _HASH.pack(*key), self._row_bytes
        at = self._rows.find(wanted)
        while at > 0 and at % n:
            at = self._rows.find(wanted, at + 1)
        return at

    def _as_rows(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(bytes(self._rows), np.uint8).reshape(-1, self._row_bytes)

    def _columns(self) -> tuple[Int64Array, Int64Array]:
        """Returns the hashes, int64, (keys, 2), and the numbers of `Live`, int64, (keys, 7)."""
        rows = self._as_rows()
        hashes = np.ascontiguousarray(rows[:, : _HASH.size]).view("<i8")
        values = np.empty((len(rows), len(Live._fields)), np.int64)
        at = _HASH.size
        for i, (least, width) in enumerate(zip(self._least, self._widths, strict=True)):
            wide = np.zeros((len(rows), 8), np.uint8)
            wide[:, :width] = rows[:, at : at + width]
            values[:, i] = wide.view("<i8")[:, 0] + least
            at += width
        return hashes, values

    def _fill(self, hashes: Int64Array, values: Int64Array) -> None:
        """Takes other keys, as `_columns` returns them."""
        if not len(hashes):
            self._rows = bytearray()
            return
        self._least = values.min(axis=0).tolist()
        # Whatever the numbers are, what they have above the least one is below 2^64.
        above = values.astype(np.uint64) - values.min(axis=0).astype(np.uint64)
        self._widths = [(int(most).bit_length() + 7) // 8 for most in above.max(axis=0)]
        parts = [np.ascontiguousarray(hashes, "<i8").view(np.uint8)]
        for i, width in enumerate(self._widths):
            parts.append(np.ascontiguousarray(above[:, i], "<u8").view(np.uint8).reshape(-1, 8)[:, :width])
        self._rows = bytearray(np.concatenate(parts, axis=1).tobytes())
