"""The tracker's state store: small named tables of packed values.

A call may cost a round trip to another process, so the number of values matters more than their size.
"""

from __future__ import annotations

from typing import Protocol

from conf.errors import DelayLakeError

Key = tuple[int, int]


class Store(Protocol):
    """Named tables that map a pair of integers to bytes."""

    def get(self, table: str, key: Key) -> bytes | None:
        """Returns the value of a key; None: the table lacks it."""

    def put(self, table: str, key: Key, value: bytes) -> None:
        """Sets the value of a key."""

    def remove(self, table: str, key: Key) -> None:
        """Removes a key, if the table has it."""


class StateLostError(DelayLakeError):
    """The store lacks a value that the tracker has put into it."""


def get_present(store: Store, table: str, key: Key) -> bytes:
    """Returns the value of a key that was put and has not been removed since.

    Raises:
        StateLostError: the store has no value for it.
    """
    data = store.get(table, key)
    if data is None:
        raise StateLostError(f"the tracker's state has lost the value {key[0]}, {key[1]} of the table {table!r}")
    return data


class MemoryStore:
    """A store in memory: the dictionary `values`, by table and key."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, Key], bytes] = {}

    def get(self, table: str, key: Key) -> bytes | None:
        """Returns the value of a key; None: the table lacks it."""
        return self.values.get((table, key))

    def put(self, table: str, key: Key, value: bytes) -> None:
        """Sets the value of a key."""
        self.values[table, key] = value

    def remove(self, table: str, key: Key) -> None:
        """Removes a key, if the table has it."""
        self.values.pop((table, key), None)
