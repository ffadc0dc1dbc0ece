"""The store of a shard in Spark's state."""

from __future__ import annotations

from typing import Any

from tracker import Key


class SparkStore:
    """The tables of a shard, all in one map of Spark's state. Made for one batch: it caches the values that it reads.

    Args:
        state: Spark's map state; it has the values of the key that Spark processes now.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._seen: dict[tuple[str, int, int], bytes | None] = {}

    def get(self, table: str, key: Key) -> bytes | None:
        """Returns the value of a key in a table; None: the table lacks the key."""
        full = (table, *key)
        if full not in self._seen:
            found = self._state.getValue(full)
            self._seen[full] = None if found is None else bytes(found[0])
        return self._seen[full]

    def put(self, table: str, key: Key, value: bytes) -> None:
        """Sets the value of a key in a table."""
        full = (table, *key)
        self._seen[full] = value
        self._state.updateValue(full, (value,))

    def remove(self, table: str, key: Key) -> None:
        """Removes a key from a table."""
        full = (table, *key)
        self._seen[full] = None
        self._state.removeKey(full)
