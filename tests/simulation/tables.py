"""Delta tables in memory, as delta-rs has them: what `warehouse.delta` is built on, and no more.

It promises what Delta's PROTOCOL.md does: a version is committed once, by whoever puts its file first ("put if absent",
under "Delta Log Entries"), and a commit carries the numbers of transactions ("Transaction Identifiers"). And what
fsync(2) does: versions that were not forced to the disk may be lost with the power, the last ones first, since the log
is read up to its first gap. Queries run in DuckDB on the rows of a version; where its SQL has another meaning than
DataFusion's, `_sql` translates. `test_fakes.py` compares with the real thing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import Schema
from deltalake.exceptions import CommitFailedError, DeltaError

from tests.simulation.conditions import answer
from tracker.messages import concat

# Called with the name of a side effect before it, and after it: a fault may fall there.
Point = Callable[[str], None]


@dataclass(frozen=True)
class Transaction:
    """Stands in for delta-rs' class, whose fields Python can't read."""

    app_id: str
    version: int


@dataclass(frozen=True)
class CommitProperties:
    """Likewise."""

    app_transactions: list[Transaction] = field(default_factory=list)
    max_commit_retries: int = 0


@dataclass
class Commit:
    """A version of a table.

    Attributes:
        rows: that it appends; None: none.
        replaces: its rows are all that the table has.
    """

    rows: pa.Table | None
    transactions: dict[str, int]
    is_forced: bool = False
    replaces: bool = False


@dataclass
class Log:
    """A table on the disk. Version 0 makes it."""

    name: str
    schema: pa.Schema
    commits: list[Commit] = field(default_factory=list)
    forced_to: int = 0  # the last version that no loss of power takes
    on_forced: Callable[[str, pa.Table], None] = lambda name, rows: None

    def __post_init__(self) -> None:
        self.commits = [Commit(None, {}, is_forced=True)]
        self.first = 0  # the first version that is there: who vacuums removes old ones
        self._rows: dict[int, pa.Table] = {}

    @property
    def newest(self) -> int:
        return len(self.commits) - 1

    def rows(self, version: int) -> pa.Table:
        """The rows of a version, of all columns."""
        if version not in self._rows:
            before = max((v for v in self._rows if v < version), default=-1)
            new = self.commits[before + 1 : version + 1]
            last = max((i for i, commit in enumerate(new) if commit.replaces), default=-1)
            parts = [commit.rows for commit in new[max(last, 0) :] if commit.rows is not None]
            known = [self._rows[before]] if before >= 0 and last < 0 else []
            together = pa.concat_tables([*known, *parts]) if known or parts else self.schema.empty_table()
            self._rows[version] = together.combine_chunks()
            if len(self._rows) > 8:
                self._rows.pop(min(self._rows))
        return self._rows[version]

    def transaction(self, app: str, version: int) -> int | None:
        return next((c.transactions[app] for c in reversed(self.commits[: version + 1]) if app in c.transactions), None)

    def transactions(self, version: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for commit in self.commits[: version + 1]:
            found |= commit.transactions
        return found

    def force(self, version: int) -> None:
        """A version is on the disk."""
        if version < len(self.commits):
            self.commits[version].is_forced = True
        while self.forced_to < self.newest and self.commits[self.forced_to + 1].is_forced:
            self.forced_to += 1
            commit = self.commits[self.forced_to]
            if commit.rows is not None:
                rows = self._added(self.forced_to) if commit.replaces else commit.rows
                self.on_forced(self.name, rows)

    def _added(self, version: int) -> pa.Table:
        """The rows that a version has and the one before does not have."""
        before = Counter(map(repr, self.rows(version - 1).to_pylist()))
        is_new = []
        for row in map(repr, self.rows(version).to_pylist()):
            is_new.append(not before[row])
            before[row] -= before[row] > 0
        return self.rows(version).filter(pa.array(is_new, pa.bool_()))

    def lose(self, kept: int) -> None:
        """Loses the versions after one."""
        del self.commits[kept + 1 :]
        self._rows = {version: rows for version, rows in self._rows.items() if version <= kept}


class Table:
    """Stands in for `deltalake.DeltaTable`: a version of a table, as some process has it.

    Args:
        log: of the table.
        point: called before and after each commit.
    """

    def __init__(self, log: Log, point: Point, version: int | None = None) -> None:
        self._log = log
        self._point = point
        self._version = log.newest if version is None else version
        if self._version < log.first:
            raise DeltaError(f"{log.name} has no version {self._version} any more")
        self.table_uri = log.name

    def version(self) -> int:
        return self._version

    def update_incremental(self) -> None:
        self._version = self._log.newest

    def transaction_version(self, app: str) -> int | None:
        return self._log.transaction(app, self._version)

    def transactions(self) -> dict[str, int]:
        return self._log.transactions(self._version)

    def schema(self) -> Schema:
        return Schema.from_arrow(self._log.schema)

    def rows(self) -> pa.Table:
        return self._log.rows(self._version)

    def create_write_transaction(
        self, actions: list[Any], mode: str, schema: Any, commit_properties: CommitProperties
    ) -> None:
        self.put(None, commit_properties)

    def put(self, rows: pa.Table | None, properties: CommitProperties) -> None:
        """Commits the version after this one, if nobody has."""
        name = self._log.name
        self._point(f"commit {name}: before")
        if self._log.newest != self._version:
            raise CommitFailedError(f"{name} has version {self._version + 1} already")
        typed = None if rows is None else rows.select(self._log.schema.names).cast(self._log.schema)
        numbers = {one.app_id: one.version for one in properties.app_transactions}
        self._log.commits.append(Commit(typed, numbers))
        self._version += 1
        self._point(f"commit {name}: not forced")

    def force(self, version: int) -> None:
        self._log.force(version)
        self._point(f"commit {self._log.name}: after")


def write_deltalake(
    table: Table, rows: pa.Table, *, mode: str, commit_properties: CommitProperties, writer_properties: Any = None
) -> None:
    """Stands in for `deltalake.write_deltalake`, as `warehouse.delta.tables` appends with it."""
    assert mode == "append"
    table.put(rows, commit_properties)


def query_builder(tables: Mapping[str, Table]) -> Mapping[str, Table]:
    """Stands in for `warehouse.delta.snapshot.query_builder`."""
    return tables


_connection: list[duckdb.DuckDBPyConnection] = []


def run_sql(tables: Mapping[str, Table], sql: str) -> pa.Table:
    """Stands in for `warehouse.delta.snapshot.run_sql`."""
    asked = {name: table.rows() for name, table in tables.items()}
    if len(asked) == 1:
        [(name, rows)] = asked.items()
        for answering in (_of_time, answer):
            if (found := answering(rows, sql)) is not None:
                return found
        if not rows.num_rows:
            return _ask_nothing(name, rows, sql)
    return _ask(asked, sql)


def _ask(tables: Mapping[str, pa.Table], sql: str) -> pa.Table:
    if not _connection:
        _connection.append(duckdb.connect(config={"threads": 1}))
    [connection] = _connection
    for name, rows in tables.items():
        connection.register(name, rows)
    found = pa.table(connection.sql(_sql(sql)).to_arrow_table())
    # Of integers DataFusion's sums are integers, DuckDB's are 128 bits wide, which Arrow has as decimals.
    for i, column in enumerate(found.schema):
        if pa.types.is_decimal(column.type) and column.type.scale == 0:
            found = found.set_column(i, column.name, found[i].cast(pa.int64()))
    return found


# DuckDB takes milliseconds to understand a question. Of no rows the answer is always the same, whatever numbers and
# texts the condition has.
_nothing: dict[tuple[str, str, str], pa.Table] = {}
_LITERAL = re.compile(r"'(?:[^']|'')*'|\b\d+\b")


def _ask_nothing(name: str, rows: pa.Table, sql: str) -> pa.Table:
    """Answers a question about a table without rows."""
    before, where, condition = sql.partition(" WHERE ")
    key = name, before, _LITERAL.sub("?", where + condition)
    if key not in _nothing:
        _nothing[key] = _ask({name: rows}, sql)
    return _nothing[key]


# What is asked most: rows of the delayed index that are due in a span of time.
_SPAN = r"deliver_at >= (-?\d+) AND deliver_at < (-?\d+) AND operation = 'DELAY'"
_SLOTS = re.compile(
    rf"SELECT deliver_at / (\d+) AS slot, count\(\*\) AS n\s+FROM delayed_index WHERE {_SPAN}\s+GROUP BY 1 ORDER BY 1"
)
_ROWS = re.compile(rf"SELECT \* FROM delayed_index WHERE {_SPAN}")


def _of_time(rows: pa.Table, sql: str) -> pa.Table | None:
    """Answers what is asked of a span of time; None: something else is asked."""
    slots, whole = _SLOTS.fullmatch(sql.strip()), _ROWS.fullmatch(sql.strip())
    if slots is None and whole is None:
        return None
    start, end = map(int, slots.groups()[1:] if slots else whole.groups())  # type: ignore[union-attr]
    due = rows["deliver_at"]
    within = pc.and_(pc.greater_equal(due, start), pc.less(due, end))
    rows = rows.filter(pc.and_(within, pc.equal(rows["operation"], "DELAY")))
    if slots is None:
        return rows
    numbers, counts = np.unique(rows["deliver_at"].to_numpy() // int(slots[1]), return_counts=True)
    return pa.table({"slot": pa.array(numbers, pa.int64()), "n": pa.array(counts, pa.int64())})


# Of integers DataFusion's division is whole.
_DIVISION = re.compile(r"(\w+) / (\d+)")


def _sql(sql: str) -> str:
    sql = sql.replace("octet_length(encode(payload, 'hex'))", "octet_length(payload) * 2")
    sql = sql.replace("octet_length(array_to_string(", "strlen(array_to_string(")
    sql = sql.replace("LEFT ANTI JOIN", "ANTI JOIN")
    return _DIVISION.sub(r"\1 // \2", sql)


def all_rows(log: Log) -> pa.Table:
    """The rows that no loss of power takes."""
    return concat([log.rows(log.forced_to)])
