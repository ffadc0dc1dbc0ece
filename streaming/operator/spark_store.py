"""The store of a shard in Spark's state."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from tracker.packing import PART_BYTES
from tracker.store import Key

_Full = tuple[str, int, int]

# The value of this key says of how many parts each large value consists, and to which files with payloads values refer.
# It contains the values of SINGLE, too: a line of JSON, then the bytes of these. The line is
# [[[table, first, second, parts, [file, ...]], ...], [[table, bytes], ...]]; parts is 0 where the value is whole, and
# bytes is -1 where the table lacks the value.
_TOGETHER: _Full = ("together", 0, 0)

# What an earlier version had instead: the first list of the line.
_PARTED: _Full = ("parted", 0, 0)

# A tick asks most tables for the value of this key, and most of these are a few bytes or not there.
SINGLE: Key = (0, 0)

_SINGLE_BYTES = 4_096  # a larger one has a value of its own


class _Noted(NamedTuple):
    """What is noted of a value.

    Attributes:
        parts: of how many it consists; 0: it is whole.
        files: with payloads to which it refers; an earlier version noted none.
    """

    parts: int = 0
    files: tuple[str, ...] = ()


_NOTHING = _Noted()


class SparkStore:
    """The tables of a shard, all in one map of Spark's state. Made for one batch: it caches the values that it reads.

    Each call of Spark's state is a round trip between Python and the JVM. So the small values of SINGLE are one value
    of the map, which is read once, and written by `save` if it has changed. A value of more than PART_BYTES is stored
    in parts, because Spark's JVM holds several copies of a value at a time.

    Args:
        state: Spark's map state; it has the values of the key that Spark processes now.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._seen: dict[_Full, bytes | None] = {}
        self._noted: dict[_Full, _Noted] = {}
        self._singles: dict[str, bytes | None] = {}  # by table; an earlier version had each as a value of its own
        self._saved = self._read(_TOGETHER)
        if self._saved is not None:
            self._decode(self._saved)
        elif (parted := self._read(_PARTED)) is not None:
            self._add_noted(json.loads(parted))
            self._state.removeKey(_PARTED)

    @property
    def files(self) -> set[str]:
        """The names of the files with payloads to which the values refer."""
        return {file for noted in self._noted.values() for file in noted.files}

    def get(self, table: str, key: Key) -> bytes | None:
        """Returns the value of a key in a table; None: the table lacks the key."""
        if key == SINGLE and table in self._singles:
            return self._singles[table]
        full = (table, *key)
        if full not in self._seen:
            n = self._noted_of(full).parts
            value = b"".join(self._read(_part(full, i)) or b"" for i in range(n)) if n else self._read(full)
            self._seen[full] = value
            if key == SINGLE and value is None:
                self._singles[table] = None
        return self._seen[full]

    def put(self, table: str, key: Key, value: bytes, files: Collection[str] = ()) -> None:
        """Sets the value of a key in a table, and notes the files with payloads to which it refers."""
        full = (table, *key)
        if key == SINGLE and len(value) <= min(_SINGLE_BYTES, PART_BYTES):
            self._remove_own(full)
            self._singles[table] = value
            self._note(full, _Noted(0, tuple(sorted(files))))
            return
        self._seen[full] = value
        before, after = self._noted_of(full).parts, -(-len(value) // PART_BYTES) if len(value) > PART_BYTES else 0
        if key == SINGLE:
            self._singles.pop(table, None)
        if after and not before:
            self._state.removeKey(full)
        for i in range(after, before):
            self._state.removeKey(_part(full, i))
        for i in range(after):
            self._state.updateValue(_part(full, i), (value[i * PART_BYTES : (i + 1) * PART_BYTES],))
        if not after:
            self._state.updateValue(full, (value,))
        self._note(full, _Noted(after, tuple(sorted(files))))

    def remove(self, table: str, key: Key) -> None:
        """Removes a key from a table."""
        full = (table, *key)
        self._remove_own(full)
        if key == SINGLE:
            self._singles[table] = None
        self._note(full, _NOTHING)

    def save(self) -> None:
        """Writes what `put` and `remove` have kept back; the batch has no calls of them after it."""
        data = self._encode()
        if data != self._saved:
            self._state.updateValue(_TOGETHER, (data,))
            self._saved = data

    def _remove_own(self, full: _Full) -> None:
        """Removes the value that a key has of its own in Spark's map, if it may have one."""
        if full[1:] == SINGLE and full[0] in self._singles:
            return
        self._seen[full] = None
        n = self._noted_of(full).parts
        for i in range(n):
            self._state.removeKey(_part(full, i))
        if not n:
            self._state.removeKey(full)

    def _read(self, full: _Full) -> bytes | None:
        found = self._state.getValue(full)
        return None if found is None else bytes(found[0])

    def _noted_of(self, full: _Full) -> _Noted:
        return self._noted.get(full, _NOTHING)

    def _note(self, full: _Full, noted: _Noted) -> None:
        if noted == _NOTHING:
            self._noted.pop(full, None)
        else:
            self._noted[full] = noted

    def _add_noted(self, listed: list[list[Any]]) -> None:
        for table, first, second, n, *files in listed:
            self._noted[table, first, second] = _Noted(n, tuple(files[0] if files else ()))

    def _encode(self) -> bytes:
        noted = [[*key, one.parts, one.files] for key, one in self._noted.items()]
        sizes = [[table, -1 if value is None else len(value)] for table, value in self._singles.items()]
        line = json.dumps([noted, sizes], separators=(",", ":")).encode()
        return b"\n".join([line, b"".join(value for value in self._singles.values() if value)])

    def _decode(self, data: bytes) -> None:
        line, _, values = data.partition(b"\n")
        noted, sizes = json.loads(line)
        self._add_noted(noted)
        start = 0
        for table, size in sizes:
            self._singles[table] = None if size < 0 else values[start : start + size]
            start += max(size, 0)


def _part(full: _Full, i: int) -> _Full:
    table, first, second = full
    return f"{table}/{second}", first, i
