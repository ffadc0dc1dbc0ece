"""The tracker's state store: small named tables of packed values.

A call may cost a round trip to another process, so the number of values matters more than their size.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import pyarrow as pa

from conf.errors import DelayLakeError
from tracker.packing import pack, unpack
from tracker.payload_refs import files_of

Key = tuple[int, int]


class Store(Protocol):
    """Named tables that map a pair of integers to bytes."""

    def get(self, table: str, key: Key) -> bytes | None:
        """Returns the value of a key; None: the table lacks it."""

    def put(self, table: str, key: Key, value: bytes, files: Collection[str] = ()) -> None:
        """Sets the value of a key.

        Args:
            files: the names of the files with payloads to which the value refers.
        """

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


def put_rows(store: Store, table: str, key: Key, rows: pa.Table) -> None:
    """Sets the value of a key to rows of any schema, packed."""
    store.put(table, key, pack(rows), files_of(rows))


def get_rows(store: Store, table: str, key: Key) -> pa.Table:
    """Returns rows that `put_rows` has put; raises as `get_present` does."""
    return unpack(get_present(store, table, key))


class MemoryStore:
    """A store in memory: the dictionaries `values` and `files`, by table and key."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, Key], bytes] = {}
        self.files: dict[tuple[str, Key], Collection[str]] = {}

    def get(self, table: str, key: Key) -> bytes | None:
        """Returns the value of a key; None: the table lacks it."""
        return self.values.get((table, key))

    def put(self, table: str, key: Key, value: bytes, files: Collection[str] = ()) -> None:
        """Sets the value of a key."""
        self.values[table, key] = value
        self.files[table, key] = files

    def remove(self, table: str, key: Key) -> None:
        """Removes a key, if the table has it."""
        self.values.pop((table, key), None)
        self.files.pop((table, key), None)
