"""Compares who merges and removes the rows of a delayed index: this program in one process, on Spark, and delta-spark.

Prints one JSON object for each: the seconds, those of CPU in all processes, and what `benchmarks/maintain.py` measures
afterwards: files, bytes a row, how many runs overlap, and the milliseconds to read the rows due in a window. The
environment variables ROWS (2,000,000), SEALS (40) and MASTER (local[2]) set the size and where Spark is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from deltalake import DeltaTable

from benchmarks.maintain import BEGIN, DAY, bucket, measure
from conf.settings import Route, Settings, SparkSettings
from streaming.spark_engine import SparkEngine
from warehouse.audit.accounts import run_audit
from warehouse.delta.engine import LOCAL, Engine
from warehouse.delta.tables import Tables
from warehouse.maintenance.compaction import merge
from warehouse.maintenance.table_files import TableFiles

ROWS = int(os.environ.get("ROWS", "2000000"))
SEALS = int(os.environ.get("SEALS", "40"))
OLD_FILES = 20_000
MASTER = os.environ.get("MASTER", "local[2]")
ROUTES = (Route(source="persistent://public/default/orders", subscriptions=({"name": "a"},)),)  # type: ignore[arg-type]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = Settings(warehouse=f"file:{folder}/made", checkpoint=f"file:{folder}/checkpoint")
        tables = Tables(made.warehouse)
        tables.create()
        chance = np.random.default_rng(1)
        for number in range(SEALS):
            tables.append("delayed_index", bucket(number, ROWS // SEALS, chance), {"job": number})
        _print("as sealed", 0, tables)
        own: dict[str, Any] = {"spark.sql.shuffle.partitions": 4, "spark.local.dir": f"{folder}/spark"}
        spark_settings = SparkSettings(master=MASTER, conf=own)
        with SparkEngine(Settings(spark=spark_settings)) as spark:
            began = time.monotonic()
            session = spark.session
            list(spark.each(abs, [1, 2]))
            print(json.dumps({"who": "the start of Spark", "seconds": round(time.monotonic() - began, 2)}), flush=True)
            session.conf.set("spark.databricks.delta.optimize.maxFileSize", str(128 << 20))
            session.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")

            def sql(text: str) -> Callable[[Settings, str], object]:
                return lambda _, path: session.sql(text.format(f"delta.`{path}`")).collect()

            works: list[tuple[str, Callable[[Settings, str], object]]] = [
                ("merge, in one process", _merge(LOCAL)),
                ("merge, on Spark", _merge(spark)),
                ("OPTIMIZE", sql("OPTIMIZE {}")),
                ("OPTIMIZE ZORDER", sql("OPTIMIZE {} ZORDER BY (deliver_at)")),
                ("audit, in one process", lambda settings, _: run_audit(settings)),
                ("audit, on Spark", lambda settings, _: run_audit(settings, engine=spark)),
                ("vacuum", lambda _, path: DeltaTable(path).vacuum(dry_run=False, full=True)),
                ("VACUUM", sql("VACUUM {}")),
            ]
            for who, work in works:
                _measure(who, work, made, f"{folder}/copy")
            half = BEGIN + DAY + DAY // 2
            _measure("DELETE", sql(f"DELETE FROM {{}} WHERE deliver_at < {half}"), made, f"{folder}/copy", merged=True)


def _merge(engine: Engine) -> Callable[[Settings, str], object]:
    def work(settings: Settings, path: str) -> bool:
        tables = Tables(settings.warehouse)
        tables.join()
        files = TableFiles(tables, "delayed_index")
        found = files.all()
        return merge(files, found, engine=engine)

    return work


def _measure(
    who: str, work: Callable[[Settings, str], object], made: Settings, copy: str, merged: bool = False
) -> None:
    """Measures work on a copy of the tables, and then whether what was overtaken can commit."""
    shutil.copytree(made.warehouse.removeprefix("file:"), copy)
    settings = made.model_copy(update={"warehouse": f"file:{copy}", "routes": ROUTES})
    tables = Tables(settings.warehouse)
    path = f"{copy}/delayed_index"
    for number in range(OLD_FILES if "vacuum" in who.lower() else 0):
        old = Path(f"{path}/old-{number}.parquet")
        old.touch()
        os.utime(old, (0, 0))
    try:
        if merged:
            _merge(LOCAL)(settings, path)
        began, used = time.monotonic(), _cpu_seconds()
        work(settings, path)
        _print(who, time.monotonic() - began, tables, _cpu_seconds() - used)
    finally:
        shutil.rmtree(copy)


def _cpu_seconds() -> float:
    """Returns the CPU seconds that this process and those that it started have used, but for ended ones."""
    used = 0.0
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def _print(who: str, seconds: float, tables: Tables, cpu_seconds: float = 0) -> None:
    found = measure(tables, np.random.default_rng(2))
    table = DeltaTable(tables.path("delayed_index"))
    protocol = table.protocol().min_reader_version, table.protocol().min_writer_version
    spent = {"seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds, 2)}
    print(json.dumps({"who": who, **spent, **found, "protocol": protocol}), flush=True)


if __name__ == "__main__":
    main()
