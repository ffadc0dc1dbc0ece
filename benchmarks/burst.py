"""Measures how fast messages due at one instant come, from the job and from Pulsar's own delayed delivery.

usage: burst.py [MESSAGES]

Both have the same broker and consumer, one after the other: MESSAGES (100,000) of 100 bytes, due at one instant after
the last one was sent. Prints one JSON object.
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

import numpy as np

from benchmarks.on_time import NAMESPACE, consume
from broker.client import connect
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings
from tests.support.service.harness import Job

SENDING_SECONDS = 30


def produce(settings: PulsarSettings, topic: str, n: int, due: int, is_native: bool, spread: int = 0) -> None:
    """Sends n messages that are due at one instant, or by chance within `spread` ms from then on."""
    client = connect(settings)
    producer = client.create_producer(
        topic, batching_enabled=not is_native, block_if_queue_full=True, max_pending_messages=20_000
    )
    for _ in range(n):
        at = due + random.randint(0, spread)
        payload = str(at).encode() + b" " + b"x" * 86
        if is_native:
            producer.send_async(payload, None, deliver_at=at)
        else:
            producer.send_async(payload, None, properties={"deliverAt": str(at)})
    producer.flush()
    client.close()


def run(settings: PulsarSettings, source: str, destination: str, n: int, native: bool) -> dict[str, Any]:
    results: Any = multiprocessing.Queue()
    consumer = multiprocessing.Process(target=consume, args=(settings, destination, n, time.time() + 180, results))
    consumer.start()
    results.get()
    due = int((time.time() + SENDING_SECONDS) * 1000)
    produce(settings, source, n, due, native)
    if time.time() * 1000 > due:
        raise RuntimeError("sending took longer than the delay")
    late, at = results.get()
    consumer.join()
    return drained(late, at, due)


def drained(late: np.ndarray, at: np.ndarray, due: int) -> dict[str, Any]:
    """Returns how fast messages came that were due at one instant.

    Args:
        late: how late each message came, float64 [messages], ms.
        at: when it came, float64 [messages], ms since the epoch.
        due: the instant, ms since the epoch.
    """
    drained_seconds = (at.max() - max(at.min(), due)) / 1000
    return {
        "received": len(late),
        "drained_per_second": round(len(late) / drained_seconds),
        "last_late_millis": round(late.max()),
        "earliest_millis": round(float(-late.min())),
    }


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        source = f"{NAMESPACE}/bench"
        job = Job(Path(folder), broker.settings, [{"source": source, "subscriptions": [{"name": "a"}]}])
        try:
            job.start()
            ours = run(broker.settings, source, f"{source}-a", n, native=False)
            job.terminate()
            pulsar_own = run(broker.settings, f"{NAMESPACE}/own", f"{NAMESPACE}/own", n, native=True)
        finally:
            job.stop()
            broker.kill()
    ratio = ours["drained_per_second"] / pulsar_own["drained_per_second"]
    result = {"benchmark": "burst", "messages": n, "delaylake": ours, "pulsar": pulsar_own, "ratio": round(ratio, 2)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
