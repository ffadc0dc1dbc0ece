"""The log's statistics of a table's files, of the columns that STATISTICS names today: older files have fewer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from warehouse.delta.footers import column_statistics
from warehouse.delta.tables import Tables
from warehouse.maintenance.table_files import TableFiles
from warehouse.schemas import STATISTICS

_COLUMNS = "delta.dataSkippingStatsColumns"

# So many files get their statistics in one commit, of half a megabyte.
_FILES_A_COMMIT = 500


def complete_statistics(tables: Tables, files: TableFiles, on_files: Callable[[int], None] = lambda n: None) -> int:
    """Gives files the statistics that the log does not have of them; it adds them once more, with what footers say.

    Args:
        on_files: called with the number of files of each commit.

    Returns:
        how many files got some.

    Raises:
        FencedError: somebody else has taken the warehouse over.
    """
    table, name = files.table, files.name
    if not set(STATISTICS[name].split(",")) <= {field.name for field in table.schema().fields}:
        return 0  # an earlier version made the table: the next start of the job adds the columns
    wanted = {_COLUMNS: STATISTICS[name]}
    if not wanted.items() <= table.metadata().configuration.items():
        # Of other columns the log's reader shows no statistics.
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
    """The files of which the log does not tell the nulls of a column: path, size_bytes and modification_time."""
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
    """The action that adds a file with its statistics; None: its footer does not have all of them."""
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
        if column not in known:  # it was added after the file
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
