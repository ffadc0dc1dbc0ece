"""A bucket of schedule keys: the hash and the last message of each key, in as few bytes as the numbers need."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tracker.messages import BoolArray, Int64Array
from tracker.properties.message_position import MessagePosition

KeyHash = tuple[int, int]

# Header of a packed bucket: _MAGIC, then the minimum and the width in bytes of each column of LastMessage. Earlier
# versions wrote rows of _OLD_ROW without a header.
_MAGIC = b"\0keys 2\0"
_HEADER = struct.Struct("<8s7q7B")
_HASH = struct.Struct("<qq")

_OLD_ROW = np.dtype(
    [
        *(("hash", "<i8"), ("check", "<i8"), ("ledger_id", "<i8"), ("entry_id", "<i8"), ("partition", "<i4")),
        *(("batch_index", "<i4"), ("batch_size", "<i4"), ("deliver_at", "<i8"), ("since", "<i8")),
    ]
)

# Rows of a bucket that are searched for a key. Larger buckets, whose keys somebody has chosen to be in one, have an
# index, and spare room below their least numbers.
_SEARCHED_ROWS = 2_048
_LEAST_SPARE, _MOST_SPARE, _LOWEST = 1 << 20, 1 << 48, -(1 << 63)


class LastMessage(NamedTuple):
    """The last message of a schedule key: the one that waits, or has just come due. Times are ms since the epoch."""

    ledger_id: int
    entry_id: int
    partition: int
    batch_index: int
    batch_size: int
    deliver_at: int  # the time with which it came, also if it was moved since
    since: int  # publish time of the first message since the key began anew

    @property
    def position(self) -> MessagePosition:
        """The message's position."""
        return MessagePosition(self.ledger_id, self.entry_id, self.partition, self.batch_index)


class PackedBucket:
    """A map from the hashes of keys to `LastMessage`.

    Its rows are bytes: the hash, and the difference of each number from its column's minimum.

    Args:
        data: as `pack` returns it, or as an earlier version wrote it; empty: no keys.
        n_old: initial value of the attribute.

    Attributes:
        n_old: the first `n_old` rows have not been put since the caller set this. `put` moves a row to the end.
    """

    def __init__(self, data: bytes = b"", n_old: int = 0) -> None:
        self.n_old = n_old
        # Of a large bucket: the number of each key's row, those of removed rows, and how many rows were old at first.
        self._places: dict[bytes, int] | None = None
        self._removed: set[int] = set()
        self._n_old_rows = 0
        self._least = [0] * len(LastMessage._fields)
        self._widths = [0] * len(LastMessage._fields)
        self._rows = bytearray()
        if data.startswith(_MAGIC):
            _, *numbers = _HEADER.unpack_from(data)
            self._least, self._widths = numbers[:7], numbers[7:]
            self._rows = bytearray(data[_HEADER.size :])
        elif data:
            old = np.frombuffer(data, _OLD_ROW)
            hashes = np.stack([old["hash"], old["check"]], axis=1)
            self._fill(hashes, np.stack([old[name].astype(np.int64) for name in LastMessage._fields], axis=1))

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._rows) // self._row_bytes - len(self._removed)

    @property
    def _row_bytes(self) -> int:
        return _HASH.size + sum(self._widths)

    def get(self, key: KeyHash) -> LastMessage | None:
        """Returns the last message of a key; None: it has none."""
        at = self._find(key)
        if at < 0:
            return None
        values, at = [], at + _HASH.size
        for least, width in zip(self._least, self._widths, strict=True):
            values.append(least + int.from_bytes(self._rows[at : at + width], "little"))
            at += width
        return LastMessage._make(values)

    def put(self, key: KeyHash, message: LastMessage) -> None:
        """Sets the last message of a key."""
        try:
            row = _HASH.pack(*key) + b"".join(
                (value - least).to_bytes(width, "little")
                for value, least, width in zip(message, self._least, self._widths, strict=True)
            )
        except OverflowError:
            self.remove(key)
            hashes, values = self._columns()
            self._fill(np.append(hashes, [key], axis=0), np.append(values, [message], axis=0))
            return
        self.remove(key)
        if self._places is not None:
            self._places[_HASH.pack(*key)] = len(self._rows) // len(row)
        self._rows += row

    def remove(self, key: KeyHash) -> bool:
        """Removes a key; returns whether it was there."""
        at = self._find(key)
        if at < 0:
            return False
        if self._places is not None:
            place = self._places.pop(_HASH.pack(*key))
            self._removed.add(place)
            self.n_old -= place < self._n_old_rows
        else:
            self.n_old -= at < self.n_old * self._row_bytes
            del self._rows[at : at + self._row_bytes]
        return True

    def positions(self) -> pa.Table:
        """Returns the messages with the columns of `LastMessage`, a row for each key."""
        return pa.table(dict(zip(LastMessage._fields, self._columns()[1].T.copy(), strict=True)))

    def hashes(self) -> Int64Array:
        """Returns the first half of each key's hash, int64, (keys,), in the order of `positions`."""
        return self._columns()[0][:, 0].copy()

    def remove_where(self, mask: BoolArray) -> None:
        """Removes the keys for which a mask is true: bool, (keys,), in the order of `positions`."""
        self.n_old -= int(mask[: self.n_old].sum())
        rows = self._as_rows()
        self._rows = bytearray(rows[~mask].tobytes())

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
        self._tidy()
        return _HEADER.pack(_MAGIC, *self._least, *self._widths) + self._rows

    def _find(self, key: KeyHash) -> int:
        """Returns the offset of a key's row in `_rows`; -1: there is none."""
        wanted, n = _HASH.pack(*key), self._row_bytes
        if self._places is None and len(self._rows) > _SEARCHED_ROWS * n:
            rows, self._n_old_rows = self._rows, self.n_old
            self._places = {bytes(rows[at : at + _HASH.size]): at // n for at in range(0, len(rows), n)}
        if self._places is not None:
            place = self._places.get(wanted)
            return -1 if place is None else place * n
        at = self._rows.find(wanted)
        while at > 0 and at % n:
            at = self._rows.find(wanted, at + 1)
        return at

    def _tidy(self) -> None:
        """Leaves removed rows out of `_rows`."""
        if self._removed:
            rows = np.frombuffer(bytes(self._rows), np.uint8).reshape(-1, self._row_bytes)
            self._rows = bytearray(np.delete(rows, sorted(self._removed), axis=0).tobytes())
        self._places, self._removed = None, set()

    def _as_rows(self) -> npt.NDArray[np.uint8]:
        self._tidy()
        return np.frombuffer(bytes(self._rows), np.uint8).reshape(-1, self._row_bytes)

    def _columns(self) -> tuple[Int64Array, Int64Array]:
        """Returns the hashes, int64, (keys, 2), and the numbers of `LastMessage`, int64, (keys, 7)."""
        rows = self._as_rows()
        hashes = np.ascontiguousarray(rows[:, : _HASH.size]).view("<i8")
        values = np.empty((len(rows), len(LastMessage._fields)), np.int64)
        at = _HASH.size
        for i, (least, width) in enumerate(zip(self._least, self._widths, strict=True)):
            wide = np.zeros((len(rows), 8), np.uint8)
            wide[:, :width] = rows[:, at : at + width]
            values[:, i] = wide.view("<i8")[:, 0] + least
            at += width
        return hashes, values

    def _fill(self, hashes: Int64Array, values: Int64Array) -> None:
        """Replaces all keys; the arguments are as `_columns` returns them."""
        self._places, self._removed = None, set()
        if not len(hashes):
            self._rows = bytearray()
            return
        least, most = values.min(axis=0), values.max(axis=0)
        if len(hashes) > _SEARCHED_ROWS:  # room below, or each number that is lower than all before would come here
            spread = np.minimum(most.astype(np.uint64) - least.astype(np.uint64), np.uint64(_MOST_SPARE))
            spare = np.maximum(spread.astype(np.int64), _LEAST_SPARE)
            least = np.minimum(least, np.maximum(least, _LOWEST + _MOST_SPARE) - spare)
        self._least = least.tolist()
        # The difference of two int64 fits into a uint64.
        above = values.astype(np.uint64) - least.astype(np.uint64)
        self._widths = [(int(most).bit_length() + 7) // 8 for most in above.max(axis=0)]
        parts = [np.ascontiguousarray(hashes, "<i8").view(np.uint8)]
        for i, width in enumerate(self._widths):
            parts.append(np.ascontiguousarray(above[:, i], "<u8").view(np.uint8).reshape(-1, 8)[:, :width])
        self._rows = bytearray(np.concatenate(parts, axis=1).tobytes())
