"""Spark's Python workers keep nothing that nobody needs."""

from __future__ import annotations

import sys

from conf.settings import Settings
from streaming.session import create_session


def test_no_worker_keeps_the_list_of_a_jars_files() -> None:
    spark = create_session(Settings(), "python processes")
    try:
        one = spark.sparkContext.parallelize([0], 1)
        [paths] = one.mapPartitions(lambda _: [[*sys.path, *sys.path_importer_cache]]).collect()
    finally:
        spark.stop()
    assert paths
    assert [path for path in paths if ".jar" in path] == []
