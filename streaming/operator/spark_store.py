"""The store of a shard in Spark's state."""

from __future__ import annotations

import json
from typing import Any

from tracker.packing import PART_BYTES
from tracker.store import Key

_Full = tuple[str, int, int]

# The value of this key says of how many parts each large value consists, as JSON: [[table, first, second, parts], ...].
_PARTED: _Full = ("parted", 0, 0)


class SparkStore:
    """The tables of a shard, all in one map of Spark's state. Made for one batch: it caches the values that it reads.

    A value of more than PART_BYTES is stored in parts, because Spark's JVM holds several copies of a value at a time.

    Args:
        state: Spark's map state; it has the values of the key that Spark processes now.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._seen: dict[_Full, bytes | None] = {}
        self._parted: dict[_Full, int] | None = None  # the number of parts of large values; None: not read yet

    def get(self, table: str, key: Key) -> bytes | None:
        """Returns the value of a key in a table; None: the table lacks the key."""
        full = (table, *key)
        if full not in self._seen:
            n = self._parts().get(full, 0)
            self._seen[full] = b"".join(self._read(_part(full, i)) or b"" for i in range(n)) if n else self._read(full)
        return self._seen[full]

    def put(self, table: str, key: Key, value: bytes) -> None:
        """Sets the value of a key in a table."""
        full = (table, *key)
        self._seen[full] = value
        before, after = self._parts().get(full, 0), -(-len(value) // PART_BYTES) if len(value) > PART_BYTES else 0
        if not before and not after:
            self._state.updateValue(full, (value,))
            return
        if not before:
            self._state.removeKey(full)
        for i in range(after, before):
            self._state.removeKey(_part(full, i))
        for i in range(after):
            self._state.updateValue(_part(full, i), (value[i * PART_BYTES : (i + 1) * PART_BYTES],))
        if not after:
            self._state.updateValue(full, (value,))
        self._note_parts(full, after)

    def remove(self, table: str, key: Key) -> None:
        """Removes a key from a table."""
        full = (table, *key)
        self._seen[full] = None
        if not (n := self._parts().get(full, 0)):
            self._state.removeKey(full)
            return
        for i in range(n):
            self._state.removeKey(_part(full, i))
        self._note_parts(full, 0)

    def _read(self, full: _Full) -> bytes | None:
        found = self._state.getValue(full)
        return None if found is None else bytes(found[0])

    def _parts(self) -> dict[_Full, int]:
        if self._parted is None:
            saved = self._read(_PARTED)
            listed = json.loads(saved) if saved else []
            self._parted = {(table, first, second): n for table, first, second, n in listed}
        return self._parted

    def _note_parts(self, full: _Full, n: int) -> None:
        parts = self._parts()
        if n == parts.get(full, 0):
            return
        if n:
            parts[full] = n
        else:
            del parts[full]
        if parts:
            self._state.updateValue(_PARTED, (json.dumps([[*key, n] for key, n in parts.items()]).encode(),))
        else:
            self._state.removeKey(_PARTED)


def _part(full: _Full, i: int) -> _Full:
    table, first, second = full
    return f"{table}/{second}", first, i
