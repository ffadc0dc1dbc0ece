"""Opens tables of the warehouse, and tells those that are not there from those that can't be read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from conf.errors import UnreadableWarehouseError
from conf.settings import is_object_storage, local_path

# How an error begins that is of a table's file, and not of the query or a value.
_OF_A_FILE = re.compile("(External error: )*(Arrow error: )?(Parquet|Object Store) ")


class _UnreachableError(UnreadableWarehouseError, OSError):
    """The system does not let it be read, now: for those who then try again, or go on without."""


class _DamagedError(UnreadableWarehouseError, DeltaError):
    """Delta can't make a table of what is there."""


def _unreadable(warehouse: str, error: Exception) -> UnreadableWarehouseError:
    """Returns the error for what can't be read, which is still of the kind of its cause."""
    if isinstance(error, OSError):
        return _UnreachableError(warehouse, error)
    return (_DamagedError if isinstance(error, DeltaError) else UnreadableWarehouseError)(warehouse, error)


def open_table(warehouse: str, name: str, version: int | None = None) -> DeltaTable:
    """Opens a table of the warehouse.

    Args:
        version: None: the newest.

    Raises:
        TableNotFoundError: there is none.
        UnreadableWarehouseError: it is there and can't be read.
        DeltaError: it has no such version, or not any more.
    """
    path = f"{local_path(warehouse)}/{name}"
    with reading(warehouse):
        table = DeltaTable(path)
    if version is not None and version != table.version():
        try:
            table.load_as_version(version)
        except OSError as error:
            raise _unreadable(warehouse, error) from error
    return table


@contextmanager
def reading(warehouse: str) -> Iterator[None]:
    """Tells what can't be read as UnreadableWarehouseError, while tables are opened or updated in the block.

    Raises:
        TableNotFoundError: there is none.
        UnreadableWarehouseError: one is there and can't be read.
    """
    try:
        yield
    except TableNotFoundError:
        _check(warehouse)
        raise
    except UnreadableWarehouseError:
        raise
    except (DeltaError, OSError) as error:
        raise _unreadable(warehouse, error) from error


def _check(warehouse: str) -> None:
    """Raises UnreadableWarehouseError where the warehouse is no folder, or one that can't be listed."""
    if is_object_storage(warehouse):
        return
    try:
        os.scandir(local_path(warehouse)).close()
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unreadable(warehouse, error) from error


@contextmanager
def reading_files(warehouse: str) -> Iterator[None]:
    """Tells files of tables that can't be read as UnreadableWarehouseError, while a query runs in the block."""
    try:
        yield
    except Exception as error:  # deltalake has no class of its own for what fails while a query runs
        if isinstance(error, OSError) or _OF_A_FILE.match(str(error)):
            raise _unreadable(warehouse, error) from error
        raise
