"""Lists, reads and writes the data files of a Delta table, and replaces some by others in one commit."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction

from tracker.messages import typed
from warehouse.delta.opening import open_newest
from warehouse.delta.parquet import bloom_filters
from warehouse.delta.tables import Tables
from warehouse.schemas import SCHEMAS, STATISTICS, TIME

# App id of a transaction in every commit that merges files; its number is the time, ms since the epoch.
MERGES = "delaylake-maintain"

# The name of a file that maintenance has written has the name of its sorted run: files that do not overlap in time.
_PART_OF_RUN = re.compile(r"run-([0-9a-f]{12})-[0-9a-f]+\.parquet$")

# About the most bytes of a row group that is written: who reads one of its rows reads all of it.
_ROW_GROUP_BYTES = 16 << 20

# Columns with few different values in a file; the other columns of integers are delta-encoded.
_DICTIONARY = [
    "topic",
    "partition",
    "ledger_id",
    "batch_size",
    "operation",
    "subscription",
    "bucket_id",
    "batch_id",
    "event_time",
    "producer_name",
    "result",
    "reason",
    "issued_by",
    "destination",
]


@dataclass(frozen=True)
class DataFile:
    """A file of a table, as the Delta log describes it.

    Attributes:
        path: path in the table's folder.
        first, last: the least and greatest value of the table's time column (TIME), ms since the epoch; the bounds of
            int64 if the log does not have them.
    """

    path: str
    n_bytes: int
    rows: int
    first: int
    last: int

    @property
    def is_part(self) -> bool:
        """Whether maintenance has written the file, and not the job."""
        return _PART_OF_RUN.search(self.path) is not None

    @property
    def run(self) -> str:
        """The name of the file's sorted run; a file that the job has written is a run by itself."""
        match = _PART_OF_RUN.search(self.path)
        return match.group(1) if match else self.path


class TableFolder:
    """Reads and writes files of a table, of any version. It can be pickled.

    Args:
        uri: the table's URI.
        name: the table's name, one of SCHEMAS.
        row_group_rows: the number of rows in a row group of written files.
    """

    def __init__(self, uri: str, name: str, row_group_rows: int = 5_000) -> None:
        self.uri = uri
        self.name = name
        self.time = TIME[name]
        self._schema = SCHEMAS[name]
        self.columns: list[str] = self._schema.names
        self._row_group_rows = row_group_rows
        self._files = pa.fs.PyFileSystem(DeltaStorageHandler(uri))

    def __reduce__(self) -> tuple[Any, ...]:
        return TableFolder, (self.uri, self.name, self._row_group_rows)

    def read(self, path: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Reads a file's rows, in their order; None: with all columns."""
        with self.open(path) as file:
            return self.cast(file.read(columns=columns, use_threads=False))

    def open(self, path: str, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
        """Opens a file, and reads its metadata unless they are given."""
        return pq.ParquetFile(self._files.open_input_file(path), metadata=metadata)

    def cast(self, rows: pa.Table) -> pa.Table:
        """Casts rows to the types of the table's columns: a file may have equivalent ones."""
        return rows.cast(pa.schema([self._schema.field(name) for name in rows.column_names]))

    def complete(self, rows: pa.Table) -> pa.Table:
        """Returns a file's rows with all columns of the table: null in columns newer than the file."""
        return typed(rows, self._schema)

    def write(self, rows: pa.Table, run: str, changes_data: bool = False) -> AddAction:
        """Writes a file, which is in no version of the table until `TableFiles.replace`.

        Args:
            rows: rows with the table's columns, sorted by time.
            run: the name of the file's sorted run.
            changes_data: as for `TableFiles.replace`.

        Returns:
            the action by which `TableFiles.replace` adds the file.
        """
        row_group_rows = max(1, min(self._row_group_rows, _ROW_GROUP_BYTES * rows.num_rows // max(1, rows.nbytes)))
        path = f"run-{run}-{uuid.uuid4().hex[:12]}.parquet"
        integers = [f.name for f in self._schema if pa.types.is_integer(f.type) and f.name not in _DICTIONARY]
        with self._files.open_output_stream(path) as stream:
            pq.write_table(
                rows,
                stream,
                row_group_size=row_group_rows,
                compression="zstd",
                compression_level=3,
                use_dictionary=[name for name in _DICTIONARY if name in self._schema.names],
                column_encoding=dict.fromkeys(integers, "DELTA_BINARY_PACKED"),
                write_page_index=True,
                bloom_filter_options=bloom_filters(self.name, rows.num_rows, self._row_group_rows),
            )
        size = self._files.get_file_info(path).size
        return AddAction(path, size, {}, _now(), changes_data, json.dumps(self._statistics(rows)))

    def _statistics(self, rows: pa.Table) -> dict[str, Any]:
        names = STATISTICS[self.name].split(",")
        bounds = {name: pc.min_max(rows[name]).as_py() for name in names}
        known = {name: b for name, b in bounds.items() if b["min"] is not None}
        return {
            "numRecords": rows.num_rows,
            "minValues": {name: b["min"] for name, b in known.items()},
            "maxValues": {name: b["max"] for name, b in known.items()},
            "nullCount": {name: rows[name].null_count for name in names},
        }


class TableFiles:
    """The files of one version of a table: the newest at the constructor's call, or at the last call of `update`.

    Args:
        name: the table's name, one of SCHEMAS.
        row_group_rows: the number of rows in a row group of written files.
    """

    def __init__(self, tables: Tables, name: str, row_group_rows: int = 5_000) -> None:
        self._tables = tables
        self.name = name
        self._table = open_newest(tables.path(name))
        self.folder = TableFolder(self._table.table_uri, name, row_group_rows)

    @property
    def table(self) -> DeltaTable:
        """The Delta table at this version."""
        return self._table

    def update(self) -> None:
        """Goes to the newest version."""
        self._table.update_incremental()

    def all(self) -> list[DataFile]:
        """Returns the files of the version, sorted by `first`."""
        actions = pa.table(self._table.get_add_actions(flatten=True))
        names = [f"min.{self.folder.time}", f"max.{self.folder.time}"]
        bounds = [actions[n] if n in actions.column_names else pa.nulls(actions.num_rows, pa.int64()) for n in names]
        # Without statistics in the log, a file may have rows of any time.
        first = bounds[0].fill_null(np.iinfo(np.int64).min).to_pylist()
        last = bounds[1].fill_null(np.iinfo(np.int64).max).to_pylist()
        columns = (actions[c].to_pylist() for c in ("path", "size_bytes", "num_records"))
        files = [DataFile(p, b, r or 0, f, u) for p, b, r, f, u in zip(*columns, first, last, strict=True)]
        return sorted(files, key=lambda file: (file.first, file.path))

    def replace(self, removed: Iterable[DataFile], added: Sequence[AddAction], changes_data: bool = False) -> bool:
        """Replaces files by others in one commit; appends may come in between.

        Args:
            removed: the files to remove.
            added: the actions that `TableFolder.write` returned.
            changes_data: False if the rows stay the same, so that a reader of changes ignores the commit.

        Returns:
            whether it was done; False if somebody else has removed some of the files in the meantime.

        Raises:
            FencedError: somebody else has taken the warehouse over.
        """
        now = _now()
        gone = [RemoveAction(f.path, changes_data, now, f.n_bytes, {}) for f in removed]
        paths = {action.path for action in gone}
        return self._tables.commit(
            self._table,
            lambda properties: self._table.create_write_transaction(
                [*added, *gone], "append", SCHEMAS[self.name], commit_properties=properties
            ),
            {} if changes_data else {MERGES: now},
            lambda: paths <= {file.path for file in self.all()},
        )

    def add_again(self, added: Sequence[AddAction]) -> bool:
        """Commits actions that add files once more, with further statistics.

        Returns:
            whether it was done; False if some of the files have been removed in the meantime.

        Raises:
            FencedError: somebody else has taken the warehouse over.
        """
        paths = {action.path for action in added}
        return self._tables.commit(
            self._table,
            lambda properties: self._table.create_write_transaction(
                [*added], "append", SCHEMAS[self.name], commit_properties=properties
            ),
            is_wanted=lambda: paths <= {file.path for file in self.all()},
        )


def new_run() -> str:
    """Returns a name for a new sorted run."""
    return uuid.uuid4().hex[:12]


def _now() -> int:
    return time.time_ns() // 1_000_000
