"""Measures the cost of pending messages for the job and for Pulsar's own trackers: memory, and time of a restart.

usage: pulsar_trackers.py [PENDING]        default: 1000000

PENDING messages of 20 bytes, due over a year, are sent to an embedded broker: for the job, for Pulsar's bucket tracker
and for its in-memory tracker, one after the other. Memory is how much they add: to the proportional set size of the
job's processes, and to a broker's heap after a full collection. Then all are killed with -9 and started again, and the
time is taken until a message comes that is sent after that. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pulsar
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.pending_load import YEAR_MILLIS
from benchmarks.resources import Memory
from benchmarks.scale import TOPIC, service
from broker.client import connect
from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Job, now, wait_until

TRACKERS = {"bucket": "BucketDelayedDeliveryTrackerFactory", "in_memory": "InMemoryDelayedDeliveryTrackerFactory"}
HEAP = "-Xmx8g"  # instead of the embedded broker's own, which is small


@contextmanager
def heap(option: str) -> Iterator[None]:
    """Within it a JVM that is started has this heap, whatever its command says."""
    os.environ["_JAVA_OPTIONS"] = option
    try:
        yield
    finally:
        del os.environ["_JAVA_OPTIONS"]


def heap_mib(broker: EmbeddedBroker) -> float:
    """Returns the size of the broker's heap after a full collection, MiB."""
    pid = broker.status().pid
    assert pid is not None
    return heap_of(pid)


def heap_of(pid: int) -> float:
    """Returns the size of a JVM's heap after a full collection, MiB."""
    subprocess.run(["jcmd", str(pid), "GC.run"], check=True, capture_output=True)
    shown = subprocess.run(["jcmd", str(pid), "GC.heap_info"], check=True, capture_output=True, text=True).stdout
    size, unit = re.search(r"(?:ZHeap|heap) .*?used (\d+)([KM])", shown).groups()  # type: ignore[union-attr]
    return float(size) / {"K": 1024, "M": 1}[unit]


def send(client: pulsar.Client, n: int, is_native: bool) -> float:
    """Sends messages due within a year, in any order; returns how many a second."""
    producer = client.create_producer(
        TOPIC, batching_enabled=False, block_if_queue_full=True, max_pending_messages=20_000
    )
    chance, begin = random.Random(1), now() + 30 * 60_000
    started = time.perf_counter()
    for _ in range(n):
        due = begin + chance.randrange(YEAR_MILLIS)
        if is_native:
            producer.send_async(b"x" * 20, None, deliver_at=due)
        else:
            producer.send_async(b"x" * 20, None, properties={"deliverAt": str(due)})
    producer.flush()
    producer.close()
    return n / (time.perf_counter() - started)


def metric(broker: EmbeddedBroker, name: str) -> float:
    """Returns the value of one of the broker's metrics for TOPIC."""
    text = httpx.get(f"{broker.settings.admin_url}/metrics/", follow_redirects=True, timeout=60).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and s.labels.get("topic") == TOPIC)


def n_delayed(broker: EmbeddedBroker, topic: str = TOPIC) -> int:
    path = topic.replace("://", "/")
    stats = httpx.get(f"{broker.settings.admin_url}/admin/v2/{path}/stats", timeout=60).json()
    return int(stats["subscriptions"]["bench"]["msgDelayed"])


def back_again(broker: EmbeddedBroker, job: Job | None, destination: str) -> float:
    """Kills the broker and the job, and returns the seconds from their new start until a new message has come."""
    port, http_port = [
        int(str(url).rsplit(":", 1)[1]) for url in (broker.status().service_url, broker.status().admin_url)
    ]
    if job:
        job.kill9()
        job.stop()
    broker.kill()
    began = time.perf_counter()
    broker.start(port, http_port)
    client = connect(broker.settings)
    consumer = client.subscribe(
        destination, "bench", consumer_type=pulsar.ConsumerType.Shared, initial_position=pulsar.InitialPosition.Earliest
    )
    producer = client.create_producer(TOPIC, batching_enabled=False)
    due = now() + 1_000
    if job:
        producer.send(b"first", properties={"deliverAt": str(due)})
        job.start()
    else:
        producer.send(b"first", deliver_at=due)
    assert consumer.receive(1_200_000).data() == b"first"
    client.close()
    return time.perf_counter() - began


def ours(pending: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, service(Path(name)) as (broker, job, client):
        job.start()
        empty_broker, empty_job = heap_mib(broker), resident(job)
        rate = send(client, pending, is_native=False)
        wait_until(lambda: job.progress[-1]["pending"] == pending, 600, "all are taken in")
        wait_until(lambda: job.progress[-1]["in_state"] == 0, 60, "all are in buckets")
        return {
            "sent_per_second": round(rate),
            "memory_mib": round(resident(job) - empty_job + heap_mib(broker) - empty_broker),
            "back_after_seconds": round(back_again(broker, job, f"{TOPIC}-a"), 1),
        }


def resident(job: Job) -> float:
    """Returns the memory of the job's processes, MiB, after half a minute in which it may settle."""
    memory = Memory(job)
    memory.start()
    time.sleep(30)
    return memory.stop()


def pulsars_own(tracker: str, pending: int) -> dict[str, Any]:
    factory = f"org.apache.pulsar.broker.delayed.{TRACKERS[tracker]}"
    with tempfile.TemporaryDirectory() as name:
        broker = EmbeddedBroker(Path(name) / "broker", {"delayedDeliveryTrackerFactoryClassName": factory})
        with heap(HEAP):
            broker.start(port=0, http_port=0)
        client = connect(broker.settings)
        try:
            empty = heap_mib(broker)
            client.subscribe(TOPIC, "bench", consumer_type=pulsar.ConsumerType.Shared)
            rate = send(client, pending, is_native=True)
            wait_until(lambda: n_delayed(broker) == pending, 600, "all are tracked")
            found = {
                "sent_per_second": round(rate),
                "memory_mib": round(heap_mib(broker) - empty),
                "index_mib": round(metric(broker, "pulsar_delayed_message_index_size_bytes") / 2**20, 1),
            }
            client.close()
            with heap(HEAP):
                return found | {"back_after_seconds": round(back_again(broker, None, TOPIC), 1)}
        finally:
            broker.kill()


def main() -> None:
    pending = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    found = {"delaylake": ours(pending), **{tracker: pulsars_own(tracker, pending) for tracker in TRACKERS}}
    ratios = {
        tracker: {
            name: round(found["delaylake"][name] / max(found[tracker][name], 1), 2)
            for name in ("memory_mib", "back_after_seconds")
        }
        for tracker in TRACKERS
    }
    print(json.dumps({"benchmark": "pulsar_trackers", "pending": pending, **found,
                      "ratio_to": ratios}))  # fmt: skip


if __name__ == "__main__":
    main()
