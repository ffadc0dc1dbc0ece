"""Queries by SQL over fixed versions of the warehouse's tables."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder
from deltalake.fs import DeltaStorageHandler

from warehouse.delta.opening import open_table, reading_files
from warehouse.named_queries import NamedQueries, Sql, identifier, listed
from warehouse.schemas import SCHEMAS

# The SQL names of the types of columns that have been added to tables.
_TYPES = {
    pa.string(): Sql("VARCHAR"),
    pa.int64(): Sql("BIGINT"),
    pa.int32(): Sql("INT"),
    pa.bool_(): Sql("BOOLEAN"),
    pa.binary(): Sql("BYTEA"),
}

_SQL = NamedQueries(__file__)


class Snapshot:
    """One version of each of some tables, so that several queries see the same rows.

    Args:
        versions: the version to read of each table, by name; None: the newest. Tables are opened in this order.

    Raises:
        TableNotFoundError: there is no such table.
        DeltaError: a table does not have that version any more.
        UnreadableWarehouseError: a table exists and can't be read.
    """

    def __init__(self, warehouse: str, versions: Mapping[str, int | None]) -> None:
        self.warehouse = warehouse
        self._tables = {name: open_table(warehouse, name, version) for name, version in versions.items()}
        self._builder = query_builder(self._tables)
        self._known_files: dict[str, pa.Table] = {}
        self._folders: dict[str, pa.fs.PyFileSystem] = {}

    @property
    def versions(self) -> dict[str, int]:
        """The versions that are read, by table."""
        return {name: int(table.version()) for name, table in self._tables.items()}

    def written_at(self, name: str) -> int:
        """Returns when the version of a table was written, ms since the epoch."""
        return int(self._tables[name].history(1)[0]["timestamp"])

    def largest(self, name: str, column: str) -> int | None:
        """Returns the largest value of a column of integers from the log's statistics; None: the table has no files."""
        files = self.files(name)
        return pc.max(files[f"max.{column}"]).as_py() if files.num_rows else None

    def spans(self, name: str, column: str) -> pa.Table:
        """Returns the log's statistics of a column of integers.

        Returns:
            a row for each file, all int64: its least and greatest value, `first` and `last` (null: unknown), and its
            number of `rows`.
        """
        known = self.known(name, {"first": f"min.{column}", "last": f"max.{column}", "rows": "num_records"})
        return known.cast(pa.schema([(own, pa.int64()) for own in known.column_names]))

    def known(self, name: str, columns: Mapping[str, str]) -> pa.Table:
        """Returns columns of `files` under other names; null if the log has no such column.

        Args:
            columns: the columns' names in `files`, by their names in the result.
        """
        files = self.files(name)
        unknown = pa.nulls(files.num_rows)
        return pa.table({own: files[of] if of in files.column_names else unknown for own, of in columns.items()})

    def files(self, name: str) -> pa.Table:
        """Returns the log's rows about a table's files: path, num_records, and min, max and null_count by column."""
        if name not in self._known_files:
            self._known_files[name] = pa.table(self._tables[name].get_add_actions(flatten=True))
        return self._known_files[name]

    def open(self, name: str, path: str) -> pq.ParquetFile:
        """Opens a file of a table.

        Raises:
            OSError: the file has been removed.
        """
        if name not in self._folders:
            self._folders[name] = pa.fs.PyFileSystem(DeltaStorageHandler(self._tables[name].table_uri))
        return pq.ParquetFile(self._folders[name].open_input_file(path))

    def sql(self, sql: str) -> pa.Table:
        """Runs a query over the tables, and over those that earlier queries created, and returns the rows.

        Raises:
            UnreadableWarehouseError: a file of the tables can't be read, or has been removed.
        """
        with reading_files(self.warehouse):
            return pa.table(self._builder.execute(sql).read_all())


def query_builder(tables: Mapping[str, DeltaTable], has_large_joins: bool = False) -> QueryBuilder:
    """Makes a QueryBuilder that runs SQL over versions of tables; columns that a version lacks are null.

    Args:
        tables: the tables by the names that queries call them.
        has_large_joins: whether every join partitions its sides, however small: for queries that join whole tables.
    """
    builder = QueryBuilder()
    if has_large_joins:
        # By default a join collects one whole side, and copies its texts many times: 17 GB for 1.7 million messages.
        for option in ("hash_join_single_partition_threshold", "hash_join_single_partition_threshold_rows"):
            builder.execute(f"SET datafusion.optimizer.{option} = 0").read_all()
    for name, table in tables.items():
        known = {field.name for field in table.schema().fields}
        new = [f for f in SCHEMAS.get(name, ()) if f.name not in known and f.type in _TYPES]
        written = f"{name}_before" if new else name
        builder.register(written, table)
        if new:
            nulls = listed(_SQL("null_column", type=_TYPES[f.type], column=identifier(f.name)) for f in new)
            view = _SQL("create_completed", name=identifier(name), nulls=nulls, written=identifier(written))
            builder.execute(view).read_all()
    return builder


def run_sql(builder: QueryBuilder, sql: str) -> pa.Table:
    """Runs a query and returns its rows, without the view types that Arrow can't filter or compare with strings."""
    return without_views(pa.table(builder.execute(sql).read_all()))


def without_views(rows: pa.Table) -> pa.Table:
    """Returns rows without the view types of Arrow: as strings and bytes."""
    views = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    return rows.cast(pa.schema([field.with_type(views.get(field.type, field.type)) for field in rows.schema]))
