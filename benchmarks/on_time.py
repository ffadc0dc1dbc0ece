"""Measures lateness and throughput of the job and of Pulsar's own delayed delivery.

usage: on_time.py [RATE [SECONDS]]

Both have the same broker, load and consumer, one after the other: RATE (3,000) messages a second for SECONDS (60), 100
bytes each, due 5 to 10 seconds after they are sent. Lateness is taken at the consumer, after the first 20 seconds.
Prints one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pulsar

from broker.client import connect
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings
from tests.harness import Job

WARM_UP_SECONDS = 20
NAMESPACE = "persistent://public/default"


def paced(rate: float, n: int) -> Iterator[int]:
    """Yields 0 to n - 1, at most `rate` a second."""
    begin = time.time()
    for i in range(n):
        while time.time() < begin + i / rate:
            time.sleep(0.002)
        yield i


def received(consumer: pulsar.Consumer, n: int, until: float) -> Iterator[tuple[bytes, float]]:
    """Yields up to n payloads and when they came, ms since the epoch, until a time, seconds since the epoch."""
    while n > 0 and time.time() < until:
        try:
            message = consumer.receive(1_000)
        except pulsar.Timeout:
            continue
        now = time.time() * 1000
        consumer.acknowledge(message)
        n -= 1
        yield message.data(), now


def produce(settings: PulsarSettings, topic: str, rate: int, seconds: float, is_native: bool) -> None:
    client = connect(settings)
    producer = client.create_producer(
        topic, batching_enabled=not is_native, block_if_queue_full=True, max_pending_messages=20_000
    )
    body = b"x" * 86
    for _ in paced(rate, int(rate * seconds)):
        due = int((time.time() + random.uniform(5, 10)) * 1000)
        payload = str(due).encode() + b" " + body
        if is_native:
            producer.send_async(payload, None, deliver_at=due)
        else:
            producer.send_async(payload, None, properties={"deliverAt": str(due)})
    producer.flush()
    client.close()


def consume(settings: PulsarSettings, topic: str, n: int, until: float, results: Any) -> None:
    client = connect(settings)
    consumer = client.subscribe(
        topic, "bench", consumer_type=pulsar.ConsumerType.Shared, receiver_queue_size=20_000,
        initial_position=pulsar.InitialPosition.Earliest,
    )  # fmt: skip
    late, at = [], []
    results.put("ready")
    for payload, now in received(consumer, n, until):
        late.append(now - int(payload.split(b" ", 1)[0]))
        at.append(now)
    client.close()
    results.put((np.array(late), np.array(at)))


def run(
    settings: PulsarSettings, source: str, destination: str, rate: int, seconds: float, native: bool
) -> dict[str, Any]:
    results: Any = multiprocessing.Queue()
    n = int(rate * seconds)
    consumer = multiprocessing.Process(
        target=consume, args=(settings, destination, n, time.time() + seconds * 2 + 60, results)
    )
    consumer.start()
    results.get()
    begin = time.time()
    producer = multiprocessing.Process(target=produce, args=(settings, source, rate, seconds, native))
    producer.start()
    producer.join()
    produced = time.time() - begin
    late, at = results.get()
    consumer.join()
    return {
        "received": len(late),
        "produced_per_second": round(n / produced),
        "received_per_second": round(len(late) / ((at[-1] - at[0]) / 1000)),
        "late_millis": late_millis(late, at, begin),
        "earliest_millis": round(float(-late.min())),
    }


def late_millis(late: np.ndarray, at: np.ndarray, begin: float) -> dict[str, float]:
    """Returns how late messages came after the first WARM_UP_SECONDS, ms.

    Args:
        late: how late each message came, float64 [messages], ms.
        at: when it came, float64 [messages], ms since the epoch.
        begin: when the first one was sent, seconds since the epoch.
    """
    steady = late[at > (begin + WARM_UP_SECONDS) * 1000]
    p50, p99, p999 = np.percentile(steady, [50, 99, 99.9])
    return {"p50": round(p50, 1), "p99": round(p99, 1), "p99.9": round(p999, 1), "max": round(steady.max())}


def median_of(job: Job, name: str, seconds: float) -> float:
    """Returns the median of a value of the job's reports, one a second, after the first WARM_UP_SECONDS."""
    return float(np.median([report[name] for report in job.progress[WARM_UP_SECONDS : int(seconds)]]))


def main() -> None:
    rate = int(sys.argv[1]) if len(sys.argv) > 1 else 3_000
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        source = f"{NAMESPACE}/bench"
        job = Job(Path(folder), broker.settings, [{"source": source, "subscriptions": [{"name": "a"}]}])
        try:
            job.start()
            ours = run(broker.settings, source, f"{source}-a", rate, seconds, native=False)
            ours["batch_millis_p50"] = median_of(job, "batch_millis_p50", seconds)
            ours["taken_per_second_p50"] = median_of(job, "taken_per_second", seconds)
            job.terminate()
            pulsar_own = run(broker.settings, f"{NAMESPACE}/own", f"{NAMESPACE}/own", rate, seconds, native=True)
        finally:
            job.stop()
            broker.kill()
    print(
        json.dumps(
            {
                "benchmark": "on_time",
                "rate": rate,
                "seconds": seconds,
                "delaylake": ours,
                "pulsar": pulsar_own,
                "p99_ratio": round(ours["late_millis"]["p99"] / pulsar_own["late_millis"]["p99"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
