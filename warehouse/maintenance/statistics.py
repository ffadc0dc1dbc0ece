"""Adds statistics to a table's log that older files lack: those of columns that STATISTICS names today."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from warehouse.delta.parquet import column_statistics
from warehouse.delta.tables import Tables
from warehouse.maintenance.table_files import TableFiles
from warehouse.schemas import STATISTICS

_COLUMNS = "delta.dataSkippingStatsColumns"

# The number of files in a commit, which then has half a megabyte.
_FILES_A_COMMIT = 500


def complete_statistics(tables: Tables, files: TableFiles, on_files: Callable[[int], None] = lambda n: None) -> int:
    """Completes the log's statistics of files, by adding them once more with the statistics in their footers.

    Args:
        on_files: called with the number of files of each commit.

    Returns:
        the number of files that got statistics.


    Raises:
        FencedError: somebody else has taken the warehouse over.
    """
    table, name = files.table, files.name
    if not set(STATISTICS[name].split(",")) <= {field.name for field in table.schema().fields}:
        return 0  # an earlier version made the table: the next start of the job adds the columns
    wanted = {_COLUMNS: STATISTICS[name]}
    if not wanted.items() <= table.metadata().configuration.items():
        # The reader of the log shows statistics of these columns only.
        tables.commit(table, lambda properties: table.alter.set_table_properties(wanted, commit_properties=properties))
    completed = 0
    found = _incomplete(files)
    for start in range(0, len(found), _FILES_A_COMMIT):
        added = [action for file in found[start : start + _FILES_A_COMMIT] if (action := _completed(files, file))]
        if added and files.add_again(added):
            completed += len(added)
            on_files(len(added))
    return completed


def _incomplete(files: TableFiles) -> list[dict[str, Any]]:
    """Returns the files whose null counts the log lacks: path, size_bytes and modification_time."""
    actions = pa.table(files.table.get_add_actions(flatten=True))
    names = [f"null_count.{column}" for column in STATISTICS[files.name].split(",")]
    if not set(names) <= set(actions.column_names):
        is_complete = np.zeros(actions.num_rows, np.bool_)
    else:
        is_complete = np.logical_and.reduce([actions[n].is_valid().to_numpy(zero_copy_only=False) for n in names])
    columns = actions.select(["path", "size_bytes", "modification_time"])
    found: list[dict[str, Any]] = columns.filter(pa.array(~is_complete)).to_pylist()
    return found


def _completed(files: TableFiles, file: dict[str, Any]) -> AddAction | None:
    """Returns the action that adds a file with its statistics; None: its footer lacks some."""
    with files.folder.open(file["path"]) as parquet:
        statistics = _statistics(parquet.metadata, files.name)
    if len(statistics["nullCount"]) < len(STATISTICS[files.name].split(",")):
        return None
    return AddAction(file["path"], file["size_bytes"], {}, file["modification_time"], False, json.dumps(statistics))


def _statistics(footer: pq.FileMetaData, name: str) -> dict[str, Any]:
    columns = STATISTICS[name].split(",")
    known = column_statistics(footer, columns)
    found: dict[str, Any] = {"numRecords": footer.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    for column in columns:
        if column not in known:  # the column is newer than the file
            found["nullCount"][column] = footer.num_rows
            continue
        chunks = [chunk for chunk in known[column] if chunk is not None and chunk.has_null_count]
        if len(chunks) < len(known[column]):
            continue
        found["nullCount"][column] = sum(chunk.null_count for chunk in chunks)
        bounds = [chunk for chunk in chunks if chunk.has_min_max]
        has_all = all(chunk.has_min_max or chunk.num_values == 0 for chunk in chunks)
        if bounds and has_all:
            found["minValues"][column] = min(chunk.min for chunk in bounds)
            found["maxValues"][column] = max(chunk.max for chunk in bounds)
    return found
