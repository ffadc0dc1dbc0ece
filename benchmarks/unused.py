"""Measures what shaping, retries, order per key, schedule keys and recurring messages cost who does not use them.

usage: unused.py [RATE [SECONDS]]

Three jobs, one after the other, each with a topic without any of them, that gets RATE (3,000) messages a second for
SECONDS (60), due 5 to 10 seconds after they are sent: `without` has no other topic; `beside` has one with a rate,
windows and order per key, to which nothing is sent; `used` has that one, too, and it gets 100 a second with keys and
schedule keys, and 100 messages that recur every ten seconds. Lateness is that of the first topic, taken at its consumer
after the first 20 seconds; `batch_millis_p50` is how long the job's batches took. Prints one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.on_time import NAMESPACE, Pace, median_of, paced, run
from broker.client import connect
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings
from tests.support.service.harness import Job

PLAIN, OTHER = f"{NAMESPACE}/bench", f"{NAMESPACE}/bench_other"
OTHER_RATE, OTHER_DELAY_MILLIS = 100, 5_000
SCHEDULES, SCHEDULE_SECONDS = 100, 10


def produce_other(settings: PulsarSettings, seconds: float) -> None:
    client = connect(settings)
    producer = client.create_producer(OTHER, block_if_queue_full=True)
    for i in range(SCHEDULES):
        recurs = {"repeat": f"@every {SCHEDULE_SECONDS}s", "scheduleKey": f"schedule {i}"}
        producer.send_async(b"x" * 100, None, properties=recurs, partition_key=f"s{i}")
    for i in paced(OTHER_RATE, int(OTHER_RATE * seconds)):
        due, key = str(int(time.time() * 1000) + OTHER_DELAY_MILLIS), f"k{i % 1_000}"
        producer.send_async(b"x" * 100, None, properties={"deliverAt": due, "scheduleKey": key}, partition_key=key)
    producer.flush()
    client.close()


def measure(broker: EmbeddedBroker, folder: Path, name: str, rate: int, seconds: float) -> dict[str, Any]:
    source = f"{PLAIN}_{name}"
    routes: list[dict[str, Any]] = [{"source": source, "subscriptions": [{"name": "a"}]}]
    if name != "without":
        uses = {
            "rate": {"messages_per_second": OTHER_RATE + SCHEDULES / SCHEDULE_SECONDS},
            "windows": [{}],
            "order": "key",
            "backoff": {"attempts": 3},
        }
        routes.append({"source": OTHER, "subscriptions": [{"name": "a", **uses}]})
    folder.mkdir()
    job = Job(folder, broker.settings, routes)
    try:
        job.start()
        if name == "used":
            multiprocessing.Process(target=produce_other, args=(broker.settings, seconds), daemon=True).start()
        found = run(broker.settings, source, f"{source}-a", [Pace(rate, seconds)], native=False)
        return found | {"batch_millis_p50": median_of(job, "batch_millis_p50", seconds)}
    finally:
        job.stop()


def main() -> None:
    rate = int(sys.argv[1]) if len(sys.argv) > 1 else 3_000
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        try:
            names = ("without", "beside", "used")
            found = {name: measure(broker, Path(folder) / name, name, rate, seconds) for name in names}
        finally:
            broker.kill()
    print(json.dumps({"benchmark": "unused", "rate": rate, "seconds": seconds, **found}))


if __name__ == "__main__":
    main()
