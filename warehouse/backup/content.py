"""Lists the files of a version of a Delta table, and commits other files to a table."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from warehouse.delta.commits import commit_next

# The data files of a version by their paths, as `files_of` returns them.
Files = Mapping[str, AddAction]


def files_of(table: DeltaTable) -> dict[str, AddAction]:
    """Returns the data files of a table's version, by path, as actions that add them with their statistics."""
    found = pa.table(table.get_add_actions(flatten=False)).to_pylist()
    return {
        row["path"]: AddAction(
            row["path"], row["size_bytes"], {}, row["modification_time"], True, json.dumps(_statistics(row))
        )
        for row in found
    }


def change_to(table: DeltaTable, files: Files, transactions: Mapping[str, int]) -> bool:
    """Makes a table consist of these data files, in one commit: the very next version after the one that is open.

    Args:
        files: files that are in the table's folder already.
        transactions: the numbers of the transactions that the commit carries, by app id.

    Returns:
        whether there was anything to change; False: nothing was committed.

    Raises:
        CommitFailedError: somebody else has committed in the meantime.
    """
    version = table.version()
    present = files_of(table)
    new = [action for path, action in files.items() if path not in present]
    now = time.time_ns() // 1_000_000
    gone = [RemoveAction(path, True, now, action.size, {}) for path, action in present.items() if path not in files]
    if not new and not gone and all(table.transaction_version(app) == n for app, n in transactions.items()):
        return False

    def is_next(table: DeltaTable) -> bool:
        if table.version() != version:
            raise CommitFailedError(f"{table.table_uri} has a version after {version}")
        return True

    return commit_next(
        table,
        transactions,
        is_next,
        lambda properties: table.create_write_transaction(
            [*new, *gone], "append", table.schema(), commit_properties=properties
        ),
    )


def _statistics(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"numRecords": row["num_records"]}
    for name, column in (("minValues", "min"), ("maxValues", "max"), ("nullCount", "null_count")):
        found[name] = {key: value for key, value in (row.get(column) or {}).items() if value is not None}
    return found
