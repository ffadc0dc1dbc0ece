"""Schedule keys that are cold: their hashes in state, and the look-up of their messages in the delayed index."""

from __future__ import annotations

import struct
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tracker.messages import BoolArray, Int64Array

# A fingerprint is this many low bits of a key's hash. The lowest of them are the number of the key's bucket.
FINGERPRINT_BITS = 38

# Keys whose messages are due in the same span of this length, ms, are a group. A lookup reads a group's time range.
GROUP_MILLIS = 1 << 19

# The number of keys; how many low bits the bucket's number has; how many high bits are stored as counts; bytes of the
# other bits, and of a group; the first group.
_HEADER = struct.Struct("<IBBBBq")

_COUNTED_FROM = 256  # keys: fewer have no counts

_Time = TypeVar("_Time", int, Int64Array)


def group_of(time: _Time) -> _Time:
    """Returns the group of a message that is due at a time, ms since the epoch; or of n messages, int64, (n,)."""
    return time // GROUP_MILLIS


def times_of(groups: tuple[int, int]) -> tuple[int, int]:
    """Returns the first and the last time, ms since the epoch, of a range of groups, both included."""
    return groups[0] * GROUP_MILLIS, (groups[1] + 1) * GROUP_MILLIS - 1


class ColdKeys:
    """The cold keys of a bucket: the fingerprint and the group of each.

    Fingerprints are packed in order, without the low bits, which the bucket's number has. Up to eight of the highest
    bits are left out, too: instead there is a count of the fingerprints for each value of these bits.

    Args:
        data: as `pack` returns it; empty: no keys. It is unpacked when it is needed.
        number: the bucket's number.
    """

    def __init__(self, data: bytes = b"", number: int = 0) -> None:
        self._data, self._number = data, number
        self._n = _HEADER.unpack_from(data)[0] if data else 0
        self._fingerprints = self._groups = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """The number of keys."""
        return self._n

    def groups_of(self, fingerprint: int) -> list[int]:
        """Returns the groups of all keys with a fingerprint; ascending."""
        if not self._n:
            return []
        fingerprints, groups = self._columns()
        found: list[int] = np.unique(groups[fingerprints == fingerprint]).tolist()
        return found

    def add_keys(self, fingerprints: Int64Array, groups: Int64Array) -> None:
        """Adds keys.

        Args:
            fingerprints: int64, (n,).
            groups: int64, (n,), as `group_of` returns them.
        """
        old = self._columns()
        self._set(np.append(old[0], fingerprints), np.append(old[1], groups))

    def remove(self, fingerprint: int, group: int) -> None:
        """Removes one key with a fingerprint and a group. There has to be one."""
        fingerprints, groups = self._columns()
        at = np.flatnonzero((fingerprints == fingerprint) & (groups == group))[0]
        self._set(np.delete(fingerprints, at), np.delete(groups, at))

    def drop_before(self, group: int) -> int:
        """Removes the keys of all groups before a group, and returns how many there were."""
        fingerprints, groups = self._columns()
        stays = groups >= group
        n = self._n - int(stays.sum())
        if n:
            self._set(fingerprints[stays], groups[stays])
        return n

    def split(self, bit: int) -> ColdKeys:
        """Removes the keys whose hash has a bit set, and returns them."""
        other = ColdKeys()
        if self._n:
            fingerprints, groups = self._columns()
            goes: BoolArray = fingerprints >> bit & 1 > 0
            other._set(fingerprints[goes], groups[goes])
            self._set(fingerprints[~goes], groups[~goes])
        return other

    def pack(self, level: int) -> bytes:
        """Returns the keys as bytes.

        Args:
            level: how many low bits of the fingerprints are those of the bucket's number.
        """
        if self._data or not self._n:
            return self._data
        bits = FINGERPRINT_BITS - level
        counted = (bits - 1) % 8 + 1 if _COUNTED_FROM <= self._n < 1 << 16 else 0
        order = np.argsort(self._fingerprints)
        rest, groups = self._fingerprints[order] >> level, self._groups[order]
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
                rest |= np.repeat(np.arange(1 << counted), counts) << FINGERPRINT_BITS - level - counted
            self._fingerprints = rest << level | self._number & (1 << level) - 1
            self._groups = _wide(values[at + n * widths[0] :], n) + least
            self._data = b""
            # `pack` packs them again if the bucket is written.
        return self._fingerprints, self._groups

    def _set(self, fingerprints: Int64Array, groups: Int64Array) -> None:
        self._data = b""
        self._fingerprints, self._groups, self._n = fingerprints, groups, len(fingerprints)


def _narrow(values: Int64Array, width: int) -> bytes:
    """Returns numbers below 256^width as bytes, width each."""
    return np.ascontiguousarray(values, "<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()


def _wide(data: npt.NDArray[np.uint8], n: int) -> Int64Array:
    """Returns the n numbers that `_narrow` has packed, int64, (n,)."""
    wide = np.zeros((n, 8), np.uint8)
    if len(data):
        wide[:, : len(data) // n] = data.reshape(n, -1)
    return wide.view("<i8")[:, 0].astype(np.int64)
