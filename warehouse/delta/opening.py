"""Opens tables of the warehouse, and distinguishes missing tables from unreadable ones."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from conf.errors import UnreadableWarehouseError
from conf.settings import is_object_storage, local_path
from warehouse.delta.checkpoint_hint import opened_without_hint

# The beginning of an error's text if it is about a file, and not about the query or a value.
_OF_A_FILE = re.compile("(External error: )*(Arrow error: )?(Parquet|Object Store) ")


class _UnreachableError(UnreadableWarehouseError, OSError):
    """The system can't read the files now. Also an OSError, for callers that try again or go on without the table."""


class _DamagedError(UnreadableWarehouseError, DeltaError):
    """The files are there, but Delta can't make a table of them."""


def _unreadable(warehouse: str, error: Exception) -> UnreadableWarehouseError:
    """Returns the error for an unreadable warehouse; it is also an OSError or DeltaError if its cause is one."""
    if isinstance(error, OSError):
        return _UnreachableError(warehouse, error)
    return (_DamagedError if isinstance(error, DeltaError) else UnreadableWarehouseError)(warehouse, error)


def open_table(warehouse: str, name: str, version: int | None = None) -> DeltaTable:
    """Opens a table of the warehouse.

    Args:
        version: the version to open; None: the newest.

    Raises:
        TableNotFoundError: there is no such table.
        UnreadableWarehouseError: the table exists and can't be read.
        DeltaError: the table has no such version, or not any more.
    """
    path = f"{local_path(warehouse)}/{name}"
    with reading(warehouse):
        table = open_newest(path)
    if version is not None and version != table.version():
        try:
            table.load_as_version(version)
        except OSError as error:
            raise _unreadable(warehouse, error) from error
    return table


def open_newest(uri: str) -> DeltaTable:
    """Opens the newest version of a table, also if the hint in its log names a checkpoint that is not there.

    Args:
        uri: the table's folder or URI.

    Raises:
        TableNotFoundError: there is no such table.
        DeltaError, OSError: it can't be read.
    """
    try:
        return DeltaTable(uri)
    except TableNotFoundError:
        raise
    except DeltaError:
        with suppress(TableNotFoundError):  # commits are missing: the table is damaged, and not a missing one
            if (table := opened_without_hint(uri)) is not None:
                return table
        raise


@contextmanager
def reading(warehouse: str) -> Iterator[None]:
    """Turns errors of tables that are opened or updated in the block into UnreadableWarehouseError.

    Raises:
        TableNotFoundError: there is no such table.
        UnreadableWarehouseError: a table exists and can't be read.
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
    """Raises UnreadableWarehouseError if the warehouse is not a folder, or can't be listed."""
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
    """Turns errors of files that a query in the block can't read into UnreadableWarehouseError."""
    try:
        yield
    except Exception as error:  # deltalake has no class of its own for errors of a running query
        if isinstance(error, OSError) or _OF_A_FILE.match(str(error)):
            raise _unreadable(warehouse, error) from error
        raise


def is_gone(error: Exception) -> bool:
    """Whether an error of a query says that a file is not there, or not any more."""
    return "not found" in str(error).lower()
