"""The Delta tables of the warehouse: their columns, and appends that a replayed batch does not repeat."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, QueryBuilder, Schema, write_deltalake
from deltalake.exceptions import TableNotFoundError

from conf.errors import DelayLakeError
from conf.settings import local_path
from warehouse.delta.commits import commit_next, last_transactions, mend_log
from warehouse.delta.fencing import EPOCH, FencedError
from warehouse.delta.opening import open_table, reading, reading_files
from warehouse.delta.parquet import appended
from warehouse.delta.snapshot import query_builder, run_sql, without_views
from warehouse.schemas import FENCED, SCHEMAS, STATISTICS, VERSION, VERSION_OF

_log = logging.getLogger(__name__)

# Called with a table's name, the step that is under way there, and the number of rows processed so far.
OnProgress = Callable[[str, str, int], None]


class WarehouseError(DelayLakeError):
    """The warehouse can't be written. The message is one line."""


class Tables:
    """The warehouse's tables, to append to and to query. Safe in several threads.

    After `take_over` or `join`, commits to FENCED tables fail as soon as somebody else has taken the warehouse over.

    Args:
        warehouse: a folder or URI.
        segment_rows: the number of rows in a row group (a segment of a bucket), the least that is read at once.
    """

    def __init__(self, warehouse: str, segment_rows: int = 5_000) -> None:
        self._warehouse = warehouse
        self._segment_rows = segment_rows
        self._tables: dict[str, DeltaTable] = {}
        self._lock = threading.RLock()  # from looking at a version to the commit after it
        self._synced_to: dict[str, int] = {}  # as of `commit_next`
        self._fence: DeltaTable | None = None
        self._checked_at = (-float("inf"), -float("inf"))  # by the monotonic and the wall clock, seconds
        self._checking = threading.Lock()
        self._epoch: int | None = None
        self._is_fenced = False

    @property
    def warehouse(self) -> str:
        """The folder or URI of the warehouse."""
        return self._warehouse

    @property
    def epoch(self) -> int | None:
        """The epoch in which this object writes; None: it does not check the epoch."""
        return self._epoch

    @property
    def is_fenced(self) -> bool:
        """Whether a check has found that somebody else has taken the warehouse over."""
        return self._is_fenced

    def newest_epoch(self) -> int:
        """Returns the newest epoch of any table; 0: nobody has taken the warehouse over yet."""
        return max(max(self.written(name, EPOCH), 0) for name in SCHEMAS)

    def take_over(self, epoch: int) -> None:
        """Begins an epoch in each FENCED table: writers of earlier epochs can't commit there any more.

        Args:
            epoch: a number greater than `newest_epoch`.

        Raises:
            FencedError: somebody else has begun this epoch or a later one in the meantime.
        """
        for name in FENCED:
            self._begin(name, epoch)
        self._epoch = epoch

    def join(self, epoch: int | None = None) -> None:
        """Lets this object write only in an epoch that somebody else has begun.

        Args:
            epoch: the epoch; None: the newest.

        Raises:
            WarehouseError: a newer program has written the tables.
        """
        self._check_version(self._open(next(iter(SCHEMAS))))
        self._epoch = self.newest_epoch() if epoch is None else epoch

    def check_epoch(self, max_age_seconds: float = 0) -> None:
        """Checks that this process may still write and send; does nothing without an epoch.

        Args:
            max_age_seconds: the check is left out if the last one was less than this ago.

        Raises:
            FencedError: somebody else has taken the warehouse over.
        """
        with self._checking:
            now = time.monotonic(), time.time()
            age = max(new - old for new, old in zip(now, self._checked_at, strict=True))
            if self._epoch is None or age < max_age_seconds:
                return
            if self._fence is None:
                self._fence = open_table(self._warehouse, next(iter(SCHEMAS)))
            else:
                self._fence.update_incremental()
            self._check(self._fence)
            self._checked_at = now

    def commit(
        self,
        table: DeltaTable,
        write: Callable[[CommitProperties], object],
        versions: Mapping[str, int] | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Commits the very next version of a table, as long as nobody else has taken the warehouse over.

        Args:
            table: the table; it is updated to its newest version.
            write: commits with the given properties; called again if another commit came first.
            versions: the numbers of the transactions that the commit carries, by app id.
            is_wanted: called before each attempt with the table at its newest version; False: nothing is committed.

        Returns:
            whether it was wanted, and so committed.

        Raises:
            FencedError: somebody else has taken the warehouse over.
            CommitFailedError: others committed first again and again.
        """

        def may_write(table: DeltaTable) -> bool:
            self._check(table)
            return is_wanted()

        with self._lock:
            return commit_next(table, versions or {}, may_write, write, self._synced_to)

    def delete(self, name: str, condition: str) -> None:
        """Deletes the rows of a table for which a condition, in SQL, holds."""
        table = self._open(name)
        self.commit(table, lambda properties: table.delete(condition, commit_properties=properties))

    def replace(self, name: str, rows: pa.Table, condition: str) -> None:
        """Replaces the rows of a table for which a condition, in SQL, holds, in one commit.

        Raises:
            FencedError: somebody else has taken the warehouse over.
        """
        table = self._open(name)
        self.commit(
            table,
            lambda properties: write_deltalake(
                table, rows, mode="overwrite", predicate=condition, commit_properties=properties
            ),
        )

    def forget_replaced(self, name: str) -> None:
        """Deletes a table's files that its newest version does not need. Nobody may be reading an older version."""
        self._open(name).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)

    def _begin(self, name: str, epoch: int) -> None:
        def is_earlier(table: DeltaTable) -> bool:
            if (newest := _number(table, EPOCH)) >= epoch:
                raise FencedError(self._warehouse, epoch, newest)
            return True

        def write(properties: CommitProperties) -> None:
            table.create_write_transaction([], "append", FENCED[name], commit_properties=properties)

        with self._lock:
            table = self._open(name)
            commit_next(table, {EPOCH: epoch, VERSION_OF: VERSION}, is_earlier, write, self._synced_to)

    def _check_version(self, table: DeltaTable) -> None:
        version = max(_number(table, VERSION_OF), 1)
        if version > VERSION:
            raise WarehouseError(
                f"a newer delaylake has written the warehouse {self._warehouse} (version {version}, this one knows "
                f"{VERSION}): use that one; see Upgrade in docs/operations.md for the way back"
            )

    def _check(self, table: DeltaTable) -> None:
        newest = _number(table, EPOCH)
        if self._epoch is not None and newest > self._epoch:
            self._is_fenced = True
            raise FencedError(self._warehouse, self._epoch, newest)

    def path(self, name: str) -> str:
        """A table's folder or URI."""
        return f"{local_path(self._warehouse)}/{name}"

    def create(self, schemas: Mapping[str, pa.Schema] = FENCED, keep_versions_millis: int = 6 * 3600 * 1000) -> None:
        """Creates the missing tables, and adds missing columns and properties to existing ones.

        Removes torn commits and wrong hints first. Nobody may write meanwhile.

        Args:
            schemas: the tables' columns, by table name.
            keep_versions_millis: how long an old version can be read.

        Raises:
            WarehouseError: a newer program has written the tables; nothing was changed.
        """
        for name, schema in schemas.items():
            updated_properties = {
                "delta.logRetentionDuration": f"interval {keep_versions_millis} milliseconds",
                "delta.deletedFileRetentionDuration": f"interval {keep_versions_millis} milliseconds",
                "delta.dataSkippingStatsColumns": STATISTICS[name],
            }
            mend_log(self.path(name))
            table = DeltaTable.create(
                self.path(name),
                schema=schema,
                mode="ignore",
                configuration={
                    "delta.checkpointInterval": "100",
                    "delta.appendOnly": "false",
                    # An append must not remove old versions: a checkpoint may name one older than the retention.
                    "delta.enableExpiredLogCleanup": "false",
                    **updated_properties,
                },
            )
            self._check_version(table)
            known = {field.name for field in table.schema().fields}
            if new := [field for field in Schema.from_arrow(schema).fields if field.name not in known]:
                table.alter.add_columns(new)
                names = ", ".join(field.name for field in new)
                _log.info("%s: an earlier version made the table; it gets the columns %s", name, names)
            if not updated_properties.items() <= table.metadata().configuration.items():
                table.alter.set_table_properties(updated_properties)

    def append(self, name: str, rows: pa.Table, versions: dict[str, int]) -> bool:
        """Appends rows in one commit, unless they were written before.

        Args:
            name: the table.
            rows: in the table's columns.
            versions: the number of the write for each writer (app id), rising from write to write; empty: no replay
                can repeat these rows.

        Returns:
            whether the rows were written now; False if every writer has already written this number or a later one.

        Raises:
            FencedError: somebody else has taken the warehouse over.
        """
        return self._append(name, lambda: rows, (rows.num_rows, self._segment_rows), versions)

    def append_parts(
        self, name: str, parts: Sequence[Callable[[], pa.Table]], n_rows: int, versions: dict[str, int]
    ) -> bool:
        """Does what `append` does with rows that need not all be in memory.

        Args:
            name: the table.
            parts: each returns some of the rows, in the table's columns; called again if another commit comes first.
            n_rows: the number of all rows, about. A part's rows are a row group.
            versions: as of `append`.
        """
        failures: list[Exception] = []  # delta-rs makes texts of them

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                for part in parts:
                    yield from part().to_batches()
            except Exception as error:
                failures.append(error)
                raise

        def reader() -> pa.RecordBatchReader:
            return pa.RecordBatchReader.from_batches(FENCED[name], batches())

        row_group_rows = min(self._segment_rows, max(1, n_rows // len(parts)))
        try:
            return self._append(name, reader, (n_rows, row_group_rows), versions)
        except Exception as error:
            raise next(iter(failures), error) from None

    def _append(
        self,
        name: str,
        rows: Callable[[], pa.Table | pa.RecordBatchReader],
        n_rows: tuple[int, int],
        versions: dict[str, int],
    ) -> bool:
        """Appends rows, of which there are so many in all and in a row group: see `append`."""
        table = self._open(name)
        return self.commit(
            table,
            lambda properties: write_deltalake(
                table,
                rows(),
                mode="append",
                commit_properties=properties,
                writer_properties=appended(name, *n_rows),
            ),
            versions,
            lambda: not versions or any(_number(table, app) < version for app, version in versions.items()),
        )

    def note(self, name: str, versions: Mapping[str, int]) -> None:
        """Sets the numbers of writers' (app ids') last writes to a table, without writing rows.

        Raises:
            FencedError: somebody else has taken the warehouse over.
        """
        table = self._open(name)
        self.commit(
            table,
            lambda properties: table.create_write_transaction(
                [], "append", table.schema(), commit_properties=properties
            ),
            versions,
        )

    def written(self, name: str, app: str) -> int:
        """Returns the number of a writer's (an app id's) last write to a table; -1: none."""
        return _number(self._open(name), app)

    def transactions(self, name: str) -> dict[str, int]:
        """Returns the numbers of all writers' last writes to a table, by app id."""
        with reading(self._warehouse):
            return last_transactions(self._open(name))

    def version(self, name: str) -> int:
        """Returns a table's newest version."""
        return int(self._open(name).version())

    def query(self, name: str, sql: str, version: int | None = None) -> pa.Table:
        """Runs a query over one table, and returns the rows.

        Args:
            name: the table, also in the query.
            version: the version to read; None: the newest.
        """
        table = self._open(name) if version is None else self._open_version(name, version)
        with reading_files(self._warehouse):
            return run_sql(query_builder({name: table}), sql)

    def sql(self, sql: str) -> pa.Table:
        """Runs a query over the newest versions of the job's tables (SCHEMAS), and returns the rows."""
        with reading_files(self._warehouse):
            return run_sql(self._all(), sql)

    def stream(self, sql: str, rows: int = 500_000) -> Iterator[pa.Table]:
        """Runs a query as `sql` does, and yields its rows in parts, so that they need not all be in memory.

        Args:
            rows: the minimum number of rows in a part. The last part may have fewer, or none.
        """
        reader = self._all().execute(sql)
        schema = pa.schema(reader.schema)
        batches: list[pa.RecordBatch] = []
        n = 0
        for batch in reader:
            batches.append(pa.record_batch(batch))
            n += batch.num_rows
            if n >= rows:
                yield without_views(pa.Table.from_batches(batches, schema))
                batches, n = [], 0
        yield without_views(pa.Table.from_batches(batches, schema))

    def _all(self) -> QueryBuilder:
        return query_builder({name: self._open(name) for name in SCHEMAS})

    def _open(self, name: str) -> DeltaTable:
        with self._lock:
            table = self._tables.get(name)
            if table is None:
                table = self._tables[name] = open_table(self._warehouse, name)
                return table
            with reading(self._warehouse):
                table.update_incremental()
            return table

    def _open_version(self, name: str, version: int) -> DeltaTable:
        table = self._open(name)
        return table if table.version() == version else open_table(self._warehouse, name, version)


def _number(table: DeltaTable, app: str) -> int:
    """Returns the number of an app id's last transaction in a version of a table; -1: none."""
    number = table.transaction_version(app)
    return -1 if number is None else int(number)


def ranges_of(values: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Covers values by a few ranges, which leave out the widest gaps between them.

    Args:
        values: ascending.
        most: the maximum number of ranges, at least 1.

    Returns:
        (first, last) of each range, both inclusive, ascending.
    """
    gaps = heapq.nlargest(most - 1, range(1, len(values)), key=lambda i: values[i] - values[i - 1])
    ends = [0, *sorted(gaps), len(values)]
    return [(values[start], values[end - 1]) for start, end in itertools.pairwise(ends) if start < end]


def exists(warehouse: str, name: str) -> bool:
    """Whether a table of the warehouse has been created.

    Raises:
        UnreadableWarehouseError: the table exists and can't be read.
    """
    try:
        open_table(warehouse, name)
    except TableNotFoundError:
        return False
    return True
