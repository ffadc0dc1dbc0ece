"""What recurring messages cost the running job: schedules of a minute, compared with as many messages a minute.

usage: schedules.py [SCHEDULES [MINUTES]]

First SCHEDULES (100,000) messages that recur `@every 60s`, sent within a minute, then as many messages a minute that
come once, due 30 seconds after they are sent: each with a job and a warehouse of its own, on the same broker, with the
same consumer. CPU seconds of the job's processes and of the broker are counted for MINUTES (2) once all is under way,
and divided by the minutes. What the job does anyway is in both. `ratio` is of job and broker together: a schedule's
message is not published again. Prints one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pulsar

from benchmarks.cost import broker_seconds
from benchmarks.on_time import NAMESPACE, paced
from benchmarks.start import cpu_seconds, memory_mib
from broker.client import connect
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings
from tests.support.service.harness import Job

AHEAD_SECONDS = 30
SETTLING_SECONDS = 15  # until those that were sent last come, too


def produce(settings: PulsarSettings, topic: str, properties: dict[str, str], rate: float, n: int) -> None:
    client = connect(settings)
    producer = client.create_producer(topic, block_if_queue_full=True, max_pending_messages=20_000)
    for _ in paced(rate, n):
        due = int((time.time() + AHEAD_SECONDS) * 1000)
        producer.send_async(b"x" * 100, None, properties={"deliverAt": str(due), **properties})
    producer.flush()
    client.close()


def consume(settings: PulsarSettings, topic: str, n_received: Synchronized[int]) -> None:
    """Counts what comes until it is killed."""
    consumer = connect(settings).subscribe(
        topic, "bench", consumer_type=pulsar.ConsumerType.Shared, receiver_queue_size=20_000
    )
    while True:
        consumer.acknowledge(consumer.receive())
        n_received.value += 1


def measure(broker: EmbeddedBroker, folder: Path, n: int, minutes: float, recurs: bool) -> dict[str, Any]:
    """Returns the CPU seconds of a minute, by kind of process, and how many messages came in it."""
    source = f"{NAMESPACE}/{folder.name}"
    folder.mkdir()
    job = Job(folder, broker.settings, [{"source": source, "subscriptions": [{"name": "a"}]}])
    properties = {"repeat": "@every 60s"} if recurs else {}
    n_sent = n if recurs else int(n * (minutes + (60 + AHEAD_SECONDS + SETTLING_SECONDS) / 60))
    n_received = multiprocessing.Value("q", 0)
    consumer = multiprocessing.Process(target=consume, args=(broker.settings, f"{source}-a", n_received))
    producer = multiprocessing.Process(target=produce, args=(broker.settings, source, properties, n / 60, n_sent))
    try:
        job.start()
        consumer.start()
        producer.start()
        time.sleep(60 + AHEAD_SECONDS + SETTLING_SECONDS)
        of_job, of_broker, received = cpu_seconds(job), broker_seconds(broker), n_received.value
        time.sleep(minutes * 60)
        used = {name: (seconds - of_job.get(name, 0)) / minutes for name, seconds in cpu_seconds(job).items()}
        return {
            "cpu_seconds_a_minute": round(sum(used.values()), 1),
            "by_process": {name: round(seconds, 1) for name, seconds in used.items() if seconds >= 0.05},
            "broker_cpu_seconds_a_minute": round((broker_seconds(broker) - of_broker) / minutes, 1),
            "received_a_minute": round((n_received.value - received) / minutes),
            "pss_mib": sum(memory_mib(job).values()),
            "batch_millis_p50": job.progress[-1]["batch_millis_p50"],
        }
    finally:
        job.stop()
        for process in (producer, consumer):
            process.kill()


def main() -> None:
    """Measures both, one after the other."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    minutes = float(sys.argv[2]) if len(sys.argv) > 2 else 2
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        try:
            recurring = measure(broker, Path(folder) / "recurring", n, minutes, recurs=True)
            once = measure(broker, Path(folder) / "once", n, minutes, recurs=False)
        finally:
            broker.kill()
    job, of_broker = (
        [found[name] for found in (recurring, once)] for name in ("cpu_seconds_a_minute", "broker_cpu_seconds_a_minute")
    )
    result = {
        "benchmark": "schedules",
        "schedules": n,
        "recurring": recurring,
        "once": once,
        "job_ratio": round(job[0] / job[1], 2),
        "ratio": round((job[0] + of_broker[0]) / (job[1] + of_broker[1]), 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
