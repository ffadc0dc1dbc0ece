"""A shard's state as Spark keeps it."""

from __future__ import annotations

from typing import Any

from tracker import Key


class SparkStore:
    """A shard's tables in one map of Spark's state. What has been read in a batch is not read again."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._seen: dict[tuple[str, int, int], bytes | None] = {}

    def get(self, table: str, key: Key) -> bytes | None:
        """The value of a key in a table; None: there is none."""
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
