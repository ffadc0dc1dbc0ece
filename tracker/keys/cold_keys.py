"""Schedule keys whose messages are in the delayed index alone: of each some bits of its hash, and about when it is due.

A hit must be looked up in the delayed index: there are a few false positives.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tracker.messages import BoolArray, Int64Array

# Of a key's hash these bits are known, those included that say which bucket of the map it is in.
PRINT_BITS = 38

# Keys whose messages are due in the same such time, ms, are a group: what is read of the index for a key.
GROUP_MILLIS = 1 << 19

# How many there are, bits that the bucket's number says, bits that are counted, bytes of the others and of the groups,
# and the first group.
_HEADER = struct.Struct("<IBBBBq")
_COUNTED_FROM = 256

_Time = TypeVar("_Time", int, Int64Array)


def group_of(time: _Time) -> _Time:
    """Returns the group of a message that is due at a time, ms since the epoch; or of each, int64, (n,)."""
    return time // GROUP_MILLIS


def times_of(groups: tuple[int, int]) -> tuple[int, int]:
    """Returns the first and the last time, ms since the epoch, of a range of groups, both included."""
    return groups[0] * GROUP_MILLIS, (groups[1] + 1) * GROUP_MILLIS - 1


class ColdKeys:
    """The cold keys of a bucket of the map: for each a print, the low PRINT_BITS of its hash, and its group.

    Sorted prints are packed without the bits that the bucket's number says, and with a count for each value of up to
    eight of the highest bits instead of these.

    Args:
        data: as `pack` returns it; empty: no keys. It is unpacked when it is needed.
        number: the bucket's.
    """

    def __init__(self, data: bytes = b"", number: int = 0) -> None:
        self._data, self._number = data, number
        self._n = _HEADER.unpack_from(data)[0] if data else 0
        self._prints = self._groups = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """The number of keys."""
        return self._n

    def groups_of(self, print_: int) -> list[int]:
        """Returns the groups that a key with a print may be in."""
        if not self._n:
            return []
        prints, groups = self._columns()
        found: list[int] = np.unique(groups[prints == print_]).tolist()
        return found

    def add(self, prints: Int64Array, groups: Int64Array) -> None:
        """Adds keys.

        Args:
            prints: int64, (n,): the low PRINT_BITS of their hashes.
            groups: int64, (n,): the groups of their messages, as `group_of` returns them.
        """
        old = self._columns()
        self._set(np.append(old[0], prints), np.append(old[1], groups))

    def remove(self, print_: int, group: int) -> None:
        """Removes one key of a print and group, which is here."""
        prints, groups = self._columns()
        at = np.flatnonzero((prints == print_) & (groups == group))[0]
        self._set(np.delete(prints, at), np.delete(groups, at))

    def drop_before(self, group: int) -> int:
        """Removes the keys of all groups before one, and returns how many there were."""
        prints, groups = self._columns()
        stays = groups >= group
        n = self._n - int(stays.sum())
        if n:
            self._set(prints[stays], groups[stays])
        return n

    def split(self, bit: int) -> ColdKeys:
        """Removes the keys whose hash has a bit set, and returns them."""
        other = ColdKeys()
        if self._n:
            prints, groups = self._columns()
            goes: BoolArray = prints >> bit & 1 > 0
            other._set(prints[goes], groups[goes])
            self._set(prints[~goes], groups[~goes])
        return other

    def pack(self, level: int) -> bytes:
        """Returns the keys as bytes.

        Args:
            level: how many low bits of their hashes the bucket's number says.
        """
        if self._data or not self._n:
            return self._data
        bits = PRINT_BITS - level
        counted = (bits - 1) % 8 + 1 if _COUNTED_FROM <= self._n < 1 << 16 else 0
        order = np.argsort(self._prints)
        rest, groups = self._prints[order] >> level, self._groups[order]
        least = int(groups.min())
        widths = -(-(bits - counted) // 8), (int(groups.max() - least).bit_length() + 7) // 8
        counts = np.bincount(rest >> bits - counted, minlength=1 << counted) if counted else np.zeros(0)
        return b"".join(
            [
                _HEADER.pack(self._n, level, counted, *widths, least),
                counts.astype("<u2").tobytes(),
                _narrow(rest & (1 << bits - counted) - 1, widths[0]),
                _narrow(groups - least, widths[1]),
            ]
        )

    def _columns(self) -> tuple[Int64Array, Int64Array]:
        if self._data:
            n, level, counted, *widths, least = _HEADER.unpack_from(self._data)
            values = np.frombuffer(self._data, np.uint8)
            at = _HEADER.size + (2 << counted if counted else 0)
            rest = _wide(values[at : at + n * widths[0]], n)
            if counted:
                counts = values[_HEADER.size : at].view("<u2")
                rest |= np.repeat(np.arange(1 << counted), counts) << PRINT_BITS - level - counted
            self._prints = rest << level | self._number & (1 << level) - 1
            self._groups = _wide(values[at + n * widths[0] :], n) + least
            self._data = b""
            # Unpacked once, it is packed anew where the bucket is written.
        return self._prints, self._groups

    def _set(self, prints: Int64Array, groups: Int64Array) -> None:
        self._data = b""
        self._prints, self._groups, self._n = prints, groups, len(prints)


def _narrow(values: Int64Array, width: int) -> bytes:
    """Returns numbers below 256^width as bytes, width each."""
    return np.ascontiguousarray(values, "<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()


def _wide(data: npt.NDArray[np.uint8], n: int) -> Int64Array:
    """Returns the n numbers of which `_narrow` has made bytes, int64, (n,)."""
    wide = np.zeros((n, 8), np.uint8)
    if len(data):
        wide[:, : len(data) // n] = data.reshape(n, -1)
    return wide.view("<i8")[:, 0].astype(np.int64)
