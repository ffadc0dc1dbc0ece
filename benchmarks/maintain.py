"""Measures `delaylake maintain` on a delayed index of sealed buckets.

Prints one JSON object: the seconds that it takes, and, before and after it, the bytes a row and the milliseconds to
read the rows due in a window. The environment variables ROWS (10,000,000) and SEALS (500) set the size.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from conf.settings import Settings
from warehouse.delta.tables import Tables
from warehouse.maintenance.compaction import Run, overlap
from warehouse.maintenance.maintain import maintain
from warehouse.maintenance.table_files import TableFiles
from warehouse.queries.index_rows import read_segment
from warehouse.schemas import DELAYED_INDEX

ROWS = int(os.environ.get("ROWS", "10000000"))
SEALS = int(os.environ.get("SEALS", "500"))
DAY = 24 * 3600 * 1000
BEGIN = 1_795_000_000_000
WINDOW_MILLIS = 1_000


def bucket(number: int, n: int, chance: np.random.Generator) -> pa.Table:
    """Returns a sealed bucket of n messages due within a day, without payload, key and properties."""
    arrival = np.arange(number * n, (number + 1) * n)
    due = BEGIN + DAY + chance.integers(0, DAY, n)
    order = np.argsort(due)
    columns = {
        "deliver_at": due[order],
        "ledger_id": 100 + arrival[order] // 50_000,
        "entry_id": arrival[order] % 50_000,
        "partition": np.full(n, -1),
        "batch_index": np.full(n, -1),
        "batch_size": np.ones(n),
        "bucket_id": np.full(n, number * 17),
        "event_time": np.zeros(n),
        "publish_time": BEGIN + arrival[order] // 20,
    }
    constant = {"topic": "persistent://public/default/orders", "operation": "DELAY", "producer_name": "standalone-0-7"}
    arrays = [
        pa.array(columns[f.name]).cast(f.type)
        if f.name in columns
        else pa.array([[]] * n, f.type)
        if f.name == "properties"
        else pa.repeat(pa.scalar(constant.get(f.name), f.type), n)
        for f in DELAYED_INDEX
    ]
    return pa.table(arrays, schema=DELAYED_INDEX)


def measure(tables: Tables, chance: np.random.Generator) -> dict[str, float]:
    files = TableFiles(tables, "delayed_index").all()
    version = tables.version("delayed_index")
    millis, rows = [], 0
    for _ in range(30):
        start = BEGIN + DAY + int(chance.integers(0, DAY - WINDOW_MILLIS))
        begin = time.perf_counter()
        rows += read_segment(tables, version, start, start + WINDOW_MILLIS).num_rows
        millis.append((time.perf_counter() - begin) * 1000)
    return {
        "files": len(files),
        "bytes_per_row": round(sum(f.n_bytes for f in files) / sum(f.rows for f in files), 2),
        "overlapping_buckets": overlap(
            Run(tuple(f for f in files if f.run == run)) for run in dict.fromkeys(f.run for f in files)
        ),
        "window_rows": round(rows / len(millis), 1),
        "window_millis_p50": round(float(np.percentile(millis, 50)), 1),
        "window_millis_max": round(max(millis), 1),
    }


def main() -> None:
    chance = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(warehouse=f"{folder}/warehouse", checkpoint=f"{folder}/checkpoint")
        tables = Tables(settings.warehouse)
        tables.create()
        begin = time.perf_counter()
        for number in range(SEALS):
            tables.append("delayed_index", bucket(number, ROWS // SEALS, chance), {"job": number + 1})
        result: dict[str, object] = {
            "rows": ROWS,
            "seals": SEALS,
            "append_seconds": round(time.perf_counter() - begin, 1),
            "before": measure(tables, chance),
        }
        report = maintain(settings, ["delayed_index"], now=BEGIN)[0]
        result["seconds"] = report.seconds
        result["rows_per_second"] = round(ROWS / report.seconds)
        result["after"] = measure(tables, chance)
        tables.append("delayed_index", bucket(SEALS, ROWS // SEALS, chance), {"job": SEALS + 1})
        report = maintain(settings, ["delayed_index"], now=BEGIN)[0]
        result["again_after_one_seal"] = {"files_merged": report.files_merged, "seconds": report.seconds}
        for number in range(SEALS + 1, SEALS + 9):
            tables.append("delayed_index", bucket(number, ROWS // SEALS, chance), {"job": number + 1})
        report = maintain(settings, ["delayed_index"], now=BEGIN)[0]
        result["again_after_eight_seals"] = {"files_merged": report.files_merged, "seconds": report.seconds}
        result["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        result["log_bytes"] = sum(f.stat().st_size for f in Path(tables.path("delayed_index"), "_delta_log").iterdir())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
