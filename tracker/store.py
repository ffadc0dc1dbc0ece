"""Where the tracker keeps its state: small named tables of packed values.

A call may cost a round trip to another process, so what is packed into one value matters more than its size.
"""

from __future__ import annotations

from typing import Protocol

Key = tuple[int, int]


class Store(Protocol):
    """Named tables of bytes by a pair of integers."""

    def get(self, table: str, key: Key) -> bytes | None: ...

    def put(self, table: str, key: Key, value: bytes) -> None: ...

    def remove(self, table: str, key: Key) -> None: ...


class MemoryStore:
    """A store in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, Key], bytes] = {}

    def get(self, table: str, key: Key) -> bytes | None:
        return self.values.get((table, key))

    def put(self, table: str, key: Key, value: bytes) -> None:
        self.values[table, key] = value

    def remove(self, table: str, key: Key) -> None:
        self.values.pop((table, key), None)
