"""Measures what a message costs from a release's rows to receipts and rows of `deliveries`.

usage: sending.py [MESSAGES] [KEYED] [TOPICS]

An embedded broker with deduplication; releases of 10,000 messages of 100 bytes with two properties are sent by the
task that the job runs, all due already, MESSAGES (200,000) in all; with KEYED (0 or 1) each has a key, and so an entry
of its own. With TOPICS (1) there are so many source topics, a destination each: then a release has 600 messages, each
of any topic, which come due within 0.6 s, a second after it was made. CPU is that of this process, microseconds a
message. Prints one JSON object.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.standalone import EmbeddedBroker
from conf.settings import Settings
from streaming.release.attempt import Assignment, Attempt
from streaming.release.task.sender import send_releases
from tracker.in_flight import SENDING
from tracker.messages import MESSAGES
from tracker.packing import pack, unpack

TOPIC = "persistent://public/default/sending"
ROWS = 10_000
FEW_ROWS = 600
BODY = b"x" * 100


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def release(tick: int, rows: int, due: list[int], topics: list[str], is_keyed: bool = False) -> Assignment:
    """A release of messages with one topic and time each."""
    given = {
        "topic": topics,
        "partition": [-1] * rows,
        "ledger_id": [7] * rows,
        "entry_id": [tick * rows + i for i in range(rows)],
        "batch_index": [-1] * rows,
        "batch_size": [1] * rows,
        "deliver_at": due,
        "publish_time": due,
        "properties": [[("deliverAt", str(at)), ("region", "eu")] for at in due],
        "payload": [BODY] * rows,
    }
    if is_keyed:
        given["key"] = [f"customer-{i % 997}" for i in range(rows)]
    columns = [pa.array(given.get(field.name, [None] * rows), field.type) for field in MESSAGES]
    table = pa.table(columns, schema=pa.schema([field.with_nullable(True) for field in MESSAGES]))
    table = table.append_column("subscription_mask", pa.array([1] * rows, pa.int64()))
    table = table.replace_schema_metadata({SENDING: json.dumps({"lanes": 1, "batch_millis": 5})})
    return Assignment("sending", 0, tick, 1, pack(table))


def release_of_one(tick: int, is_keyed: bool) -> Assignment:
    """A release of one topic, all of it overdue."""
    due = time.time_ns() // 1_000_000 - 60_000
    return release(tick, ROWS, [due + i // 100 for i in range(ROWS)], [f"{TOPIC}0"] * ROWS, is_keyed)


def release_of_many(tick: int, topics: int) -> Assignment:
    """A release of few messages of many topics, which come due one after another."""
    due, chance = time.time_ns() // 1_000_000 + 1_000, random.Random(tick)
    names = [f"{TOPIC}{chance.randrange(topics)}" for _ in range(FEW_ROWS)]
    return release(tick, FEW_ROWS, [due + i for i in range(FEW_ROWS)], names)


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    is_keyed = len(sys.argv) > 2 and sys.argv[2] == "1"
    topics = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    rows = ROWS if topics == 1 else FEW_ROWS
    cpu = sent = 0.0
    late: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        try:
            broker.start(port=0, http_port=0)
            routes = [{"source": f"{TOPIC}{i}", "subscriptions": [{"name": "a"}]} for i in range(topics)]
            settings = Settings.model_validate(
                {"warehouse": f"file:{folder}/w", "checkpoint": f"file:{folder}/c", "routes": routes}
            ).model_copy(update={"pulsar": broker.settings})
            text = settings.model_dump_json()
            for tick in range(1, 2 + max(n // rows, 1)):
                one = release_of_one(tick, is_keyed) if topics == 1 else release_of_many(tick, topics)
                before, began = cpu_seconds(), time.perf_counter()
                [report] = send_releases(text, Attempt(is_first=True), [one])
                assert not report.failed, report.failed
                deliveries = unpack(report.deliveries)
                assert deliveries.num_rows == rows
                if tick > 1:  # the first one makes the topics
                    cpu, sent = cpu + cpu_seconds() - before, sent + time.perf_counter() - began
                    late += pc.subtract(deliveries["sent_at"], deliveries["deliver_at"]).to_pylist()
        finally:
            broker.kill()
    n = len(late)
    found: dict[str, Any] = {"messages": n, "bytes": len(BODY), "keyed": is_keyed, "topics": topics}
    found |= {"cpu_us_a_message": round(cpu / n * 1e6, 2), "messages_a_second": round(n / sent)}
    if topics > 1:
        found["late_millis_p99"] = float(np.percentile(late, 99))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
