"""The store of a shard in Spark's state."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from tracker.packing import PART_BYTES
from tracker.store import Key

_Full = tuple[str, int, int]

# The value of this key says of how many parts each large value consists, and to which files with payloads values refer,
# as JSON: [[table, first, second, parts, [file, ...]], ...]; parts is 0 where the value is whole.
_PARTED: _Full = ("parted", 0, 0)


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

    A value of more than PART_BYTES is stored in parts, because Spark's JVM holds several copies of a value at a time.

    Args:
        state: Spark's map state; it has the values of the key that Spark processes now.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._seen: dict[_Full, bytes | None] = {}
        self._noted: dict[_Full, _Noted] | None = None  # None: not read yet

    @property
    def files(self) -> set[str]:
        """The names of the files with payloads to which the values refer."""
        return {file for noted in self._all_noted().values() for file in noted.files}

    def get(self, table: str, key: Key) -> bytes | None:
        """Returns the value of a key in a table; None: the table lacks the key."""
        full = (table, *key)
        if full not in self._seen:
            n = self._noted_of(full).parts
            self._seen[full] = b"".join(self._read(_part(full, i)) or b"" for i in range(n)) if n else self._read(full)
        return self._seen[full]

    def put(self, table: str, key: Key, value: bytes, files: Collection[str] = ()) -> None:
        """Sets the value of a key in a table, and notes the files with payloads to which it refers."""
        full = (table, *key)
        self._seen[full] = value
        before, after = self._noted_of(full).parts, -(-len(value) // PART_BYTES) if len(value) > PART_BYTES else 0
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
        self._seen[full] = None
        n = self._noted_of(full).parts
        for i in range(n):
            self._state.removeKey(_part(full, i))
        if not n:
            self._state.removeKey(full)
        self._note(full, _NOTHING)

    def _read(self, full: _Full) -> bytes | None:
        found = self._state.getValue(full)
        return None if found is None else bytes(found[0])

    def _noted_of(self, full: _Full) -> _Noted:
        return self._all_noted().get(full, _NOTHING)

    def _all_noted(self) -> dict[_Full, _Noted]:
        if self._noted is None:
            saved = self._read(_PARTED)
            listed = json.loads(saved) if saved else []
            self._noted = {
                (table, first, second): _Noted(n, tuple(files[0] if files else ()))
                for table, first, second, n, *files in listed
            }
        return self._noted

    def _note(self, full: _Full, noted: _Noted) -> None:
        all_noted = self._all_noted()
        if noted == all_noted.get(full, _NOTHING):
            return
        if noted == _NOTHING:
            del all_noted[full]
        else:
            all_noted[full] = noted
        if all_noted:
            listed = [[*key, one.parts, one.files] for key, one in all_noted.items()]
            self._state.updateValue(_PARTED, (json.dumps(listed).encode(),))
        else:
            self._state.removeKey(_PARTED)


def _part(full: _Full, i: int) -> _Full:
    table, first, second = full
    return f"{table}/{second}", first, i
