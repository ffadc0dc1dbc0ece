"""Spark's Python processes keep nothing that nobody needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from conf.settings import Settings
from streaming.session import create_session


@pytest.fixture
def spark() -> Iterator[SparkSession]:
    spark = create_session(Settings(), "python processes")
    yield spark
    spark.stop()


def test_no_worker_keeps_the_list_of_a_jars_files(spark: SparkSession) -> None:
    looked_up = spark.sparkContext.parallelize([0], 1).mapPartitions(lambda _: [[*sys.path, *sys.path_importer_cache]])
    [paths] = looked_up.collect()
    assert paths
    assert [path for path in paths if ".jar" in path] == []
