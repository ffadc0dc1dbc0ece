"""Runs heavy work on the tables as a Spark application of its own, on the cluster of the settings."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import pyarrow as pa
from deltalake import DeltaTable
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit
from pyspark.sql.pandas.types import from_arrow_type

from broker.jvm.jars import jars
from conf.errors import DelayLakeError, one_line
from conf.settings import Settings, is_object_storage
from streaming.session import create_session
from warehouse.delta.engine import LOCAL, Engine, Queries
from warehouse.schemas import SCHEMAS

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_R = TypeVar("_R")

# The driver holds so many results at once; a killed driver loses no more work than theirs.
_ITEMS_A_JOB = 256

_EXECUTOR_SECONDS = 60.0


class EngineError(DelayLakeError):
    """The work can't be done on Spark. The message is one line."""


class SparkEngine(Engine):
    """Runs work in Spark tasks. A context manager, whose application starts with the first work that is large enough.

    Tasks run the same functions as the local engine, and commit nothing. Spark runs tasks of a lost executor again.

    Args:
        settings: of the job.
        min_rows: the local engine does work on fewer rows.
    """

    def __init__(self, settings: Settings, min_rows: int = 0) -> None:
        self._settings = settings
        self._min_rows = min_rows
        self._spark: SparkSession | None = None

    def __enter__(self) -> SparkEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._spark is not None:
            self._spark.stop()
            self._spark = None

    def of(self, rows: int) -> Engine:
        return self if rows >= self._min_rows else LOCAL

    def each(self, function: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[_R]:
        """Does the same as `Engine.each`.

        Raises:
            EngineError: Spark gave up, or has no executor.
        """
        for start in range(0, len(items), _ITEMS_A_JOB):
            some = items[start : start + _ITEMS_A_JOB]
            with as_engine_errors():
                found = self.session.sparkContext.parallelize(some, len(some)).map(function).collect()
            yield from found

    def queries(self, tables: Mapping[str, DeltaTable]) -> Queries:
        """Does the same as `Engine.queries`, with Delta's own reader for Spark.

        Tables on object storage are read by the local engine, if `min_rows` allows local work.

        Raises:
            EngineError: the tables are on object storage, and all work has to be on Spark.
        """
        if any(is_object_storage(table.table_uri) for table in tables.values()):
            if self._min_rows:
                return LOCAL.queries(tables)
            raise EngineError("Spark has no file system for the warehouse's object storage: use --engine local")
        with as_engine_errors():
            return SparkQueries(self.session, tables)

    @property
    def session(self) -> SparkSession:
        """The application's session, with Delta."""
        if self._spark is None:
            delta = sorted(jars("spark").glob("*.jar"))
            with as_engine_errors():
                self._spark = create_session(self._settings, "delaylake work", delta, delta=True, is_job=False)
            _wait_for_executor(self._spark)
            _log.info("the work runs on Spark, %s", self._spark.sparkContext.master)
        return self._spark


class SparkQueries(Queries):
    """Runs the SQL of `Queries` on Spark."""

    def __init__(self, spark: SparkSession, tables: Mapping[str, DeltaTable]) -> None:
        super().__init__(tables)
        self._spark = spark
        for name, table in tables.items():
            _read(spark, name, table).createOrReplaceTempView(name)

    def numbers_below(self, n: str) -> str:
        return f"explode(filter(sequence(CAST(0 AS BIGINT), {n}), i -> i < {n}))"

    def create(self, name: str, sql: str) -> None:
        # The executors keep the rows; Spark computes those of a lost executor again from the tables.
        with as_engine_errors():
            self._run(sql).persist().createOrReplaceTempView(name)

    def rows(self, sql: str) -> list[dict[str, Any]]:
        with as_engine_errors():
            found: list[dict[str, Any]] = self._run(sql).toArrow().to_pylist()
            return found

    def _run(self, sql: str) -> DataFrame:
        # DataFusion's SQL takes a backslash literally; only literals contain any.
        return self._spark.sql(sql.replace("\\", "\\\\"))


def _read(spark: SparkSession, name: str, table: DeltaTable) -> DataFrame:
    """Reads a version of a table. Columns that were added to the schema later are null."""
    rows = spark.read.format("delta").option("versionAsOf", table.version()).load(table.table_uri)
    new = [field for field in SCHEMAS[name] if field.name not in rows.columns and not pa.types.is_nested(field.type)]
    return rows.withColumns({field.name: lit(None).cast(from_arrow_type(field.type)) for field in new})


def _wait_for_executor(spark: SparkSession) -> None:
    context = spark.sparkContext
    if context._jsc.sc().isLocal():
        return
    deadline = time.monotonic() + _EXECUTOR_SECONDS
    while context._jsc.sc().getExecutorMemoryStatus().size() < 2:  # the driver counts, too
        if time.monotonic() > deadline:
            spark.stop()
            raise EngineError(
                f"{context.master} gave no executor within {_EXECUTOR_SECONDS:.0f} s: "
                "has the job all of its cores? See spark.cores.max in docs/maintenance.md"
            )
        time.sleep(0.1)


@contextmanager
def as_engine_errors() -> Iterator[None]:
    """Turns Spark's exceptions into an EngineError of one line."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        of_task = re.search(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)", str(error))
        raise EngineError(f"Spark could not do the work: {of_task[1] if of_task else one_line(error)[:500]}") from error
