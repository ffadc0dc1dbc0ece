"""Spark's Python processes keep nothing that nobody needs, and those end that nobody needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from conf.settings import Settings, SparkSettings
from streaming.session import create_session, end_planners
from tests.support.service.harness import wait_until


class OneRow(DataSource):
    @classmethod
    def name(cls) -> str:
        return "one_row"

    def schema(self) -> str:
        return "n int"

    def reader(self, schema: object) -> DataSourceReader:
        return OneRowReader()


class OneRowReader(DataSourceReader):
    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield (7,)


@contextmanager
def session(**conf: str) -> Iterator[SparkSession]:
    spark = create_session(Settings(spark=SparkSettings(conf=dict(conf))), "python processes")
    try:
        yield spark
    finally:
        spark.stop()


def planners(spark: SparkSession) -> tuple[int, int]:
    """How many daemons Spark has for planning, and how many workers these have forked."""
    jvm = psutil.Process(spark.sparkContext._gateway.proc.pid)  # type: ignore[union-attr]
    daemons = workers = 0
    for process in jvm.children():
        with suppress(psutil.NoSuchProcess):
            if "pyspark.sql.worker." in " ".join(process.cmdline()):
                daemons, workers = daemons + 1, workers + len(process.children())
    return daemons, workers


def test_spark_plans_again_when_what_has_planned_has_ended() -> None:
    with session() as spark:
        spark.dataSource.register(OneRow)
        for _ in range(3):
            assert [row.n for row in spark.read.format("one_row").load().collect()] == [7]
            before = planners(spark)
            assert before[1] > 0
            end_planners(spark)
            wait_until(lambda: planners(spark)[1] == 0, 30, "ended workers")
            assert planners(spark)[0] == before[0]


def test_spark_plans_again_when_daemons_have_ended_that_had_no_workers_left() -> None:
    with session(**{"spark.python.worker.reuse": "false"}) as spark:  # workers end at once, not after a minute
        spark.dataSource.register(OneRow)
        for _ in range(3):
            assert [row.n for row in spark.read.format("one_row").load().collect()] == [7]
            assert planners(spark)[0] > 0
            wait_until(lambda: planners(spark)[1] == 0, 30, "ended workers")
            end_planners(spark)
            wait_until(lambda: planners(spark) == (0, 0), 30, "ended daemons")


def test_no_worker_keeps_the_list_of_a_jars_files() -> None:
    with session() as spark:
        one = spark.sparkContext.parallelize([0], 1)
        [paths] = one.mapPartitions(lambda _: [[*sys.path, *sys.path_importer_cache]]).collect()
    assert paths
    assert [path for path in paths if ".jar" in path] == []
