"""Measures what a message costs from a release's rows to receipts and rows of `deliveries`.

usage: sending.py [MESSAGES] [KEYED]

An embedded broker with deduplication; releases of 10,000 messages of 100 bytes with two properties are sent by the
task that the job runs, all due already, MESSAGES (200,000) in all; with KEYED (0 or 1) each has a key, and so an entry
of its own. CPU is that of this process, microseconds a message. Prints one JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from broker.standalone import EmbeddedBroker
from conf.settings import Settings
from streaming.release.attempt import Assignment, Attempt
from streaming.release.task.sender import send_releases
from tracker.in_flight import SENDING
from tracker.messages import MESSAGES
from tracker.packing import pack, unpack

TOPIC = "persistent://public/default/sending"
ROWS = 10_000
BODY = b"x" * 100


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def release(tick: int, due: int, is_keyed: bool) -> Assignment:
    given = {
        "topic": [TOPIC] * ROWS,
        "partition": [-1] * ROWS,
        "ledger_id": [7] * ROWS,
        "entry_id": [tick * ROWS + i for i in range(ROWS)],
        "batch_index": [-1] * ROWS,
        "batch_size": [1] * ROWS,
        "deliver_at": [due + i // 100 for i in range(ROWS)],
        "publish_time": [due] * ROWS,
        "properties": [[("deliverAt", str(due + i // 100)), ("region", "eu")] for i in range(ROWS)],
        "payload": [BODY] * ROWS,
    }
    if is_keyed:
        given["key"] = [f"customer-{i % 997}" for i in range(ROWS)]
    columns = [pa.array(given.get(field.name, [None] * ROWS), field.type) for field in MESSAGES]
    rows = pa.table(columns, schema=pa.schema([field.with_nullable(True) for field in MESSAGES]))
    rows = rows.append_column("subscription_mask", pa.array([1] * ROWS, pa.int64()))
    rows = rows.replace_schema_metadata({SENDING: json.dumps({"lanes": 1, "batch_millis": 5})})
    return Assignment("sending", 0, tick, 1, pack(rows))


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    is_keyed = len(sys.argv) > 2 and sys.argv[2] == "1"
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        try:
            broker.start(port=0, http_port=0)
            routes = [{"source": TOPIC, "subscriptions": [{"name": "a"}]}]
            settings = Settings.model_validate(
                {"warehouse": f"file:{folder}/w", "checkpoint": f"file:{folder}/c", "routes": routes}
            ).model_copy(update={"pulsar": broker.settings})
            text = settings.model_dump_json()
            due = time.time_ns() // 1_000_000 - 60_000
            list(send_releases(text, Attempt(), [release(1, due, is_keyed)]))
            releases = [release(2 + i, due, is_keyed) for i in range(max(n // ROWS, 1))]
            cpu, began = cpu_seconds(), time.perf_counter()
            for one in releases:
                [report] = send_releases(text, Attempt(is_first=True), [one])
                assert not report.failed, report.failed
                assert unpack(report.deliveries).num_rows == ROWS
            seconds, used, sent = time.perf_counter() - began, cpu_seconds() - cpu, ROWS * len(releases)
        finally:
            broker.kill()
    found = {"messages": sent, "bytes": len(BODY), "keyed": is_keyed, "cpu_us_a_message": round(used / sent * 1e6, 2)}
    print(json.dumps({**found, "messages_a_second": round(sent / seconds)}))


if __name__ == "__main__":
    main()
