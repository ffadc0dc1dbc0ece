"""Measures how long a rebuild of ROWS pending messages takes, one in a hundred of them cancelled, and its memory.

usage: rebuild.py [ROWS]

Beside the pending messages (10,000,000) there are a hundredth as many that have been delivered to two subscriptions.
The destinations are empty: how long reading them takes depends on the broker, and on the messages sent last. Prints one
JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pending import MONTH_MILLIS, ROWS_A_FILE, TOPIC, columns, write
from broker.standalone import EmbeddedBroker
from checkpoint_from_tables.rebuild.rebuild import rebuild
from conf.settings import Settings
from tracker.messages import MESSAGES, position_texts
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import to_index
from warehouse.schemas import DELIVERIES, SCHEMAS

SUBSCRIPTIONS = ["a", "b"]


def write_delivered(tables: Tables, now: int, n: int) -> None:
    """Writes n messages of one ledger that have been delivered, and are still in the delayed index."""
    due = np.sort(now - np.random.default_rng(2).integers(60_000, MONTH_MILLIS, n))
    same = {"topic": TOPIC, "partition": -1, "batch_index": -1, "ledger_id": 5, "entry_id": np.arange(n)}
    rows = columns(MESSAGES, n, **same, batch_size=1, deliver_at=due, publish_time=0, event_time=0, payload=b"x" * 100)
    tables.append("delayed_index", to_index(rows, 1), {})
    for name in SUBSCRIPTIONS:
        sent = {
            "subscription": name,
            "position": position_texts(rows),
            "deliver_at": due,
            "sent_at": due,
            "batch_id": 1,
        }
        tables.append("deliveries", columns(DELIVERIES, n, **same, **sent), {})


def run(settings: Settings, results: Any) -> None:
    begin = time.perf_counter()
    found = rebuild(settings, Tables(settings.warehouse), Path(settings.checkpoint))
    seconds = time.perf_counter() - begin
    results.put((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, found))


def main() -> None:
    files = (int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000) // ROWS_A_FILE
    n = files * ROWS_A_FILE
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        try:
            settings = Settings(
                warehouse=f"{folder}/warehouse",
                checkpoint=f"{folder}/checkpoint",
                pulsar=broker.settings,
                routes=[{"source": TOPIC, "subscriptions": [{"name": name} for name in SUBSCRIPTIONS]}],  # type: ignore[arg-type]
            )
            tables = Tables(settings.warehouse)
            tables.create()
            now = time.time_ns() // 1_000_000
            write(tables, now, files)
            write_delivered(tables, now, n // 100)
            last = {"topic": TOPIC, "partition": -1, "ledger_id": 10 + files, "entry_id": 0, "batch_size": 1}
            tables.append("entries", columns(SCHEMAS["entries"], 1, **last), {})
            context = multiprocessing.get_context("spawn")
            results = context.Queue()
            process = context.Process(target=run, args=(settings, results))
            process.start()
            seconds, peak, found = results.get()
            process.join()
        finally:
            broker.kill()
    if found["pending"] != n:
        raise SystemExit(f"{found['pending']:,} pending messages were found instead of {n:,}")
    result = {"benchmark": "rebuild", "rows": n, "seconds": round(seconds, 1), "peak_resident_mb": peak}
    print(json.dumps(result | {"rows_per_second": round(n / seconds), "found": found}))


if __name__ == "__main__":
    main()
