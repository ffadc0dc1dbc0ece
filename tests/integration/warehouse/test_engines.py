"""What is done on Spark has the same result as in one process, also where an executor is lost meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.maintain import bucket
from conf.settings import Settings, SparkSettings
from streaming.spark_engine import EngineError, SparkEngine, as_engine_errors
from tests.conftest import run_here
from tests.support.service.harness import wait_until
from tests.support.warehouse.random_warehouse import copied, done_by, random_warehouse
from tests.support.warehouse.tables import NOW, make
from tests.unit.test_docs import tables_of_docs
from warehouse.audit.accounts import run_audit
from warehouse.delta.engine import LOCAL
from warehouse.delta.fencing import FencedError
from warehouse.delta.tables import Tables
from warehouse.maintenance.compaction import merge
from warehouse.maintenance.table_files import TableFiles


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkEngine]:
    """Two executors of one core each, on this machine."""
    conf: dict[str, str | int | float | bool] = {"spark.local.dir": str(tmp_path_factory.mktemp("spark"))}
    conf["spark.executor.extraJavaOptions"] = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
    # For tables as small as these.
    conf |= {"spark.sql.shuffle.partitions": 2, "spark.databricks.delta.snapshotPartitions": 1}
    made = Settings(spark=SparkSettings(master="local-cluster[2,1,1024]", conf=conf))
    with SparkEngine(made) as engine:
        application = engine.session.sparkContext.applicationId
        yield engine
    # Spark's local cluster keeps its executors' logs where Spark is.
    shutil.rmtree(Path(os.environ["SPARK_HOME"]) / "work" / application, ignore_errors=True)


def executors() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends just now
            if any("CoarseGrainedExecutorBackend" in one for one in process.cmdline()):
                found.append(process)
    return found


def with_one_killed(is_under_way: Callable[[], bool], work: Callable[[], Any]) -> Any:
    """Does work, and kills one of the executors in the middle."""
    result: list[Any] = []
    working = threading.Thread(target=lambda: result.append(work()))
    wait_until(lambda: len(executors()) == 2, 300, "two executors")
    working.start()
    wait_until(is_under_way, 600, "the work to begin")
    executors()[0].kill()
    assert not result
    working.join()
    return result[0]


def test_random_tables_are_audited_and_maintained_alike(spark: SparkEngine, tmp_path: Path) -> None:
    made = random_warehouse(tmp_path / "a", seed=1)
    other = copied(made, tmp_path / "b")
    audit = run_audit(made, NOW)
    assert len(audit.findings) >= 5
    session = spark.session
    tracker = session.sparkContext.statusTracker()

    def is_joining() -> bool:
        return session.catalog.tableExists("messages") and bool(tracker.getActiveStageIds())

    assert with_one_killed(is_joining, lambda: run_audit(made, NOW, spark)) == audit

    local = done_by(LOCAL, made)
    merged, deleted = (sum(count[i] for count in local[0]) for i in (1, 2))
    assert (merged > 0, deleted > 0) == (True, True)
    assert done_by(spark, other) == local


def test_files_are_merged_alike_where_an_executor_is_lost(spark: SparkEngine, tmp_path: Path) -> None:
    made, tables = make(tmp_path / "a")
    chance = np.random.default_rng(3)
    for number in range(8):
        tables.append("delayed_index", bucket(number, 150_000, chance), {"test": number})
    other = copied(made, tmp_path / "b")
    folder = tmp_path / "b" / "warehouse" / "delayed_index"
    local = done_by(LOCAL, made)
    assert len(local[1]["delayed_index"]) >= 3
    is_written = lambda: any(folder.glob("run-*"))  # noqa: E731
    assert with_one_killed(is_written, lambda: done_by(spark, other)) == local
    a_catalog_finds_the_table(spark, made)
    who_was_overtaken_commits_nothing_but_by_delta_spark(spark, made)


def a_catalog_finds_the_table(engine: SparkEngine, made: Settings) -> None:
    location = f"{made.warehouse.removeprefix('file:')}/delayed_index"
    engine.session.sql(f"CREATE TABLE default.delayed_index USING delta LOCATION '{location}'")
    counted = engine.session.sql("SELECT count(*) AS n, count(attempt) AS tried FROM default.delayed_index").first()
    assert counted is not None
    assert (counted["n"], counted["tried"]) == (8 * 150_000, 0)


def who_was_overtaken_commits_nothing_but_by_delta_spark(engine: SparkEngine, made: Settings) -> None:
    """Why maintenance does not leave commits to delta-spark."""
    tables, later = Tables(made.warehouse), Tables(made.warehouse)
    for number in range(2):
        tables.append("delayed_index", bucket(number, 10, np.random.default_rng(1)), {})
    tables.join()
    later.take_over(later.newest_epoch() + 1)
    table = TableFiles(tables, "delayed_index")
    before = table.all()
    with pytest.raises(FencedError):
        merge(table, [file for file in before if not file.is_part], engine=engine)
    assert TableFiles(later, "delayed_index").all() == before
    engine.session.sql("OPTIMIZE default.delayed_index")
    assert TableFiles(later, "delayed_index").all() != before
    with pytest.raises(EngineError, match="DELTA_UNSUPPORTED_SUBQUERY"), as_engine_errors():
        engine.session.sql("DELETE FROM default.delayed_index WHERE ledger_id NOT IN (SELECT 1)")


def test_the_command_line_has_it_done_on_spark(spark: SparkEngine, tmp_path: Path) -> None:
    """The last one here: the command takes the session that there is, and ends it."""
    context = spark.session.sparkContext
    tables_of_docs(tmp_path, "persistent://public/default/orders")
    audit = ("--config", str(tmp_path / "settings.yaml"), "audit", "--output", "json", "--engine")
    local = run_here(*audit, "local")
    assert (local.returncode, local.stderr) == (0, "")
    done = run_here(*audit, "spark")
    assert (done.returncode, done.stdout) == (0, local.stdout)
    assert context._jsc is None, "it was not done on Spark"
