"""Where heavy work on the tables runs: in this process, or by an engine of `streaming/` on a Spark cluster.

Both run the same functions and the same SQL. In either case this process commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa
from deltalake import DeltaTable

from warehouse.delta.snapshot import query_builder

_T = TypeVar("_T")
_R = TypeVar("_R")


class Queries:
    """Runs SQL that joins whole tables, by DataFusion.

    Args:
        tables: the versions to read, by the names that queries call them.
    """

    def __init__(self, tables: Mapping[str, DeltaTable]) -> None:
        self._builder = query_builder(tables, has_large_joins=True)

    def numbers_below(self, n: str) -> str:
        """Returns SQL that makes of a row n rows, with the numbers from 0 to n - 1; `n` is SQL for a BIGINT."""
        return f"unnest(range(0, {n}))"

    def create(self, name: str, sql: str) -> None:
        """Makes a table of a query's rows, for later queries."""
        self._builder.execute(f"CREATE TABLE {name} AS {sql}").read_all()

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Returns the rows of a query."""
        found: list[dict[str, Any]] = pa.table(self._builder.execute(sql).read_all()).to_pylist()
        return found

    def stream(self, sql: str) -> Iterator[pa.Table]:
        """Yields the rows of a query over the tables, in parts. It runs in this process with every engine."""
        return (pa.Table.from_batches([pa.record_batch(batch)]) for batch in self._builder.execute(sql))


class Engine:
    """Does work in this process, one item after another."""

    def of(self, rows: int) -> Engine:
        """Returns the engine for work on this many rows: this one, or the local one if it is little work."""
        return self

    def each(self, function: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[_R]:
        """Calls a function for each item, and yields what it returns, in the order of the items.

        Args:
            function: must be picklable, with its items and results. It may be called again for an item if a process is
                lost; one of the results counts.
        """
        return map(function, items)

    def queries(self, tables: Mapping[str, DeltaTable]) -> Queries:
        """Returns the queries over versions of tables, by the names that queries call them."""
        return Queries(tables)


LOCAL = Engine()
