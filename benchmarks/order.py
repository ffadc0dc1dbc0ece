"""Measures what `order: key` costs: lateness of a steady load, and how quickly a burst is out, without and with it.

usage: order.py [RATE [SECONDS [KEYS]]]

A job has two subscriptions of one topic, one without and one with it, which get the same load at the same time: RATE
(1,000) messages a second for SECONDS (40), 100 bytes each, of KEYS (10,000) keys, due 5 to 10 seconds after they are
sent; then ten seconds' worth, due at one instant. Times are those at which the broker got the messages; the first ten
seconds do not count. Prints one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.on_time import NAMESPACE, paced
from benchmarks.shaping import consume, lateness
from broker.client import connect
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings
from tests.support.service.harness import Job

WARM_UP_SECONDS = 10
BURST_SECONDS = 10
BODY = b"x" * 86
TOPIC = f"{NAMESPACE}/bench_order"


def produce(settings: PulsarSettings, topic: str, rate: int, seconds: int, keys: int) -> int:
    """Sends the load; returns when the burst is due, ms since the epoch."""
    client = connect(settings)
    producer = client.create_producer(topic, block_if_queue_full=True, max_pending_messages=20_000)

    def send(due: int) -> None:
        key = f"key {random.randrange(keys)}"
        producer.send_async(b"%d " % due + BODY, None, partition_key=key, properties={"deliverAt": str(due)})

    for _ in paced(rate, rate * seconds):
        send(int((time.time() + random.uniform(5, 10)) * 1000))
    burst = int((time.time() + 25) * 1000)
    for _ in paced(2 * rate, rate * BURST_SECONDS):
        send(burst)
    producer.flush()
    client.close()
    return burst


def told(found: Any, begin: float, burst: int) -> dict[str, Any]:
    """Returns what came of the load to a subscription: `found` has (due, published) of each message, ms."""
    of_burst = found[found[:, 0] == burst]
    took = (int(of_burst[:, 1].max(initial=burst + 1)) - burst) / 1000
    return {
        "received": len(found),
        **lateness(found[(found[:, 0] < burst) & (found[:, 0] >= begin)]),
        "burst_messages": len(of_burst),
        "burst_seconds": round(took, 2),
        "burst_per_second": round(len(of_burst) / took),
    }


def main() -> None:
    rate, seconds, keys = (int(text) for text in [*sys.argv[1:], *["1000", "40", "10000"][len(sys.argv) - 1 :]])
    subscriptions = [{"name": order, "order": order} for order in ("none", "key")]
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        job = Job(Path(folder), broker.settings, [{"source": TOPIC, "subscriptions": subscriptions}])
        try:
            job.start()
            n, until = rate * (seconds + BURST_SECONDS), time.time() + seconds + 180
            queues: list[Any] = [multiprocessing.Queue() for _ in subscriptions]
            for subscription, results in zip(subscriptions, queues, strict=True):
                arguments = (broker.settings, f"{TOPIC}-{subscription['name']}", n, until, results)
                multiprocessing.Process(target=consume, args=arguments, daemon=True).start()
                results.get()
            begin = (time.time() + WARM_UP_SECONDS) * 1000
            burst = produce(broker.settings, TOPIC, rate, seconds, keys)
            off, on = (told(results.get(), begin, burst) for results in queues)
        finally:
            job.stop()
            broker.kill()
    result = {
        "benchmark": "order",
        "rate": rate,
        "seconds": seconds,
        "keys": keys,
        "without": off,
        "with": on,
        "p50_ratio": round(on["p50_millis"] / max(1, off["p50_millis"]), 2),
        "p99_ratio": round(on["p99_millis"] / max(1, off["p99_millis"]), 2),
        "burst_ratio": round(on["burst_per_second"] / max(1, off["burst_per_second"]), 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
