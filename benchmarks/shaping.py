"""Measures a rate: many messages due at one instant, how many come in any second, until when, and how late others are.

usage: shaping.py [MESSAGES [RATE]]

MESSAGES (1,000,000) of 100 bytes are due at one instant for a subscription with RATE (2,000) a second and a burst of a
second. Another topic has 200 messages a second, due 5 seconds after they are sent, without a rate; its lateness is told
for the time before that instant and from then on. Times are those at which the broker got the messages. Prints one JSON
object.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pulsar

from benchmarks.on_time import NAMESPACE, paced
from broker.client import connect
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings
from tests.support.service.harness import Job

SHAPED, OTHER = f"{NAMESPACE}/bench", f"{NAMESPACE}/bench_other"
TAKEN_IN_A_SECOND = 6_000  # at which the messages are sure to be taken in before they are due
OTHER_RATE, OTHER_DELAY_MILLIS = 200, 5_000


def produce(settings: PulsarSettings, n: int, due: int) -> None:
    client = connect(settings)
    producer = client.create_producer(SHAPED, block_if_queue_full=True, max_pending_messages=20_000)
    body = str(due).encode() + b" " + b"x" * 86
    for _ in paced(2 * TAKEN_IN_A_SECOND, n):
        producer.send_async(body, None, properties={"deliverAt": str(due)})
    producer.flush()
    client.close()


def produce_other(settings: PulsarSettings, seconds: float) -> None:
    client = connect(settings)
    producer = client.create_producer(OTHER, block_if_queue_full=True)
    for _ in paced(OTHER_RATE, int(OTHER_RATE * seconds)):
        due = int(time.time() * 1000) + OTHER_DELAY_MILLIS
        producer.send_async(b"%d " % due + b"x" * 86, None, properties={"deliverAt": str(due)})
    producer.flush()
    client.close()


def consume(settings: PulsarSettings, topic: str, n: int, until: float, results: Any) -> None:
    """Consumes n messages, or until a time, s; puts "ready", then (due, published), int64, (n, 2), on `results`."""
    client = connect(settings)
    consumer = client.subscribe(topic, "bench", initial_position=pulsar.InitialPosition.Earliest)
    results.put("ready")
    found = np.zeros((n, 2), np.int64)
    count = 0
    while count < n and time.time() < until:
        try:
            message = consumer.receive(1_000)
        except pulsar.Timeout:
            continue
        found[count] = int(message.data().split(b" ", 1)[0]), message.publish_timestamp()
        count += 1
        if count % 1_000 == 0 or count == n:
            consumer.acknowledge_cumulative(message)
    results.put(found[:count])
    client.close()


def lateness(found: Any) -> dict[str, float]:
    late = found[:, 1] - found[:, 0]
    p50, p99 = np.percentile(late, [50, 99]) if len(late) else (0, 0)
    return {"p50_millis": round(float(p50)), "p99_millis": round(float(p99)), "most_millis": int(late.max(initial=0))}


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    rate = int(sys.argv[2]) if len(sys.argv) > 2 else 2_000
    sending = n / TAKEN_IN_A_SECOND + 30
    seconds = sending + n / rate + 20
    routes = [
        {"source": SHAPED, "subscriptions": [{"name": "a", "rate": {"messages_per_second": rate}}]},
        {"source": OTHER, "subscriptions": [{"name": "a"}]},
    ]
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        job = Job(Path(folder), broker.settings, routes)
        try:
            job.start()
            ends = time.time() + seconds + 120
            queues: list[Any] = [multiprocessing.Queue(), multiprocessing.Queue()]
            counts = n, int(OTHER_RATE * seconds)
            for topic, count, results in zip((SHAPED, OTHER), counts, queues, strict=True):
                arguments = (broker.settings, f"{topic}-a", count, ends, results)
                multiprocessing.Process(target=consume, args=arguments, daemon=True).start()
                results.get()
            multiprocessing.Process(target=produce_other, args=(broker.settings, seconds), daemon=True).start()
            due = int((time.time() + sending) * 1000)
            produce(broker.settings, n, due)
            if time.time() * 1000 > due:
                raise SystemExit("sending took longer than the delay")
            shaped, other = (results.get() for results in queues)
        finally:
            job.stop()
            broker.kill()
    times = np.sort(shaped[:, 1])
    within = np.searchsorted(times, times + 1_000) - np.arange(len(times))
    before = other[:, 0] < due
    result = {
        "benchmark": "shaping",
        "messages": n,
        "rate": rate,
        "received": len(shaped),
        "most_in_a_second": int(within.max(initial=0)),
        "done_after_seconds": round((int(times.max(initial=due)) - due) / 1000, 1),
        "earliest_millis": int(due - times.min(initial=due)),
        "others_before": lateness(other[before]),
        "others_after": lateness(other[~before]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
