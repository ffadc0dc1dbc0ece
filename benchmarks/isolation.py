"""Measures how late messages of nine destinations are while a tenth is unwritable, and when that one has its own.

usage: isolation.py [RATE [SECONDS [OUTAGE]]]

RATE (1,000) messages a second over ten routes, 100 bytes each, are due 5 to 10 seconds after they are sent. After 30
seconds to warm up come SECONDS (120) with all ten destinations, and OUTAGE (as many) seconds with one of them
terminated; then that one is made anew, and gets the messages that it missed. Lateness is taken at the consumer of the
other nine. Prints one JSON object.
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

import httpx
import numpy as np
import pulsar

from benchmarks.on_time import NAMESPACE, WARM_UP_SECONDS, paced, received
from broker.client import connect
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings
from tests.harness import Job

SOURCES = [f"{NAMESPACE}/bench{i}" for i in range(10)]
DEAD, *WELL = [f"{source}-a" for source in SOURCES]
MOST_DELAY_SECONDS = 10


def produce(settings: PulsarSettings, rate: int, seconds: float) -> None:
    client = connect(settings)
    producers = [client.create_producer(source, block_if_queue_full=True) for source in SOURCES]
    body = b"x" * 80
    for i in paced(rate, int(rate * seconds)):
        due = int((time.time() + random.uniform(5, MOST_DELAY_SECONDS)) * 1000)
        producers[i % 10].send_async(b"%d %d " % (due, i) + body, None, properties={"deliverAt": str(due)})
    for producer in producers:
        producer.flush()
    client.close()


def consume(settings: PulsarSettings, topics: list[str], n: int, until: float, results: Any) -> None:
    """Consumes n messages, or until a time, s since the epoch.

    Puts on `results` "ready" when it has subscribed, and at the end an array, (messages, 3): when each message was due,
    when it came, both ms since the epoch, and its number.
    """
    client = connect(settings)
    consumer = client.subscribe(topics, "bench", initial_position=pulsar.InitialPosition.Earliest)
    results.put("ready")
    found = []
    for payload, now in received(consumer, n, until):
        due, number, _ = payload.split(b" ", 2)
        found.append((int(due), now, int(number)))
    client.close()
    results.put(np.array(found))


class Consumer:
    def __init__(self, settings: PulsarSettings, topics: list[str], n: int, seconds: float) -> None:
        self._results: Any = multiprocessing.Queue()
        multiprocessing.Process(
            target=consume, args=(settings, topics, n, time.time() + seconds, self._results), daemon=True
        ).start()
        self._results.get()

    def found(self) -> Any:
        return self._results.get()


def lateness(found: Any, begin: float, end: float) -> dict[str, float]:
    """Returns the lateness, ms, of the messages due from `begin` to before `end`, seconds since the epoch.

    Args:
        found: as `consume` puts it.
        begin: the first time.
        end: the time after the last.
    """
    due, at, _ = found.T
    late = (at - due)[(due >= begin * 1000) & (due < end * 1000)]
    p50, p99, p999 = np.percentile(late, [50, 99, 99.9])
    return {
        "messages": len(late),
        "p50": round(p50, 1),
        "p99": round(p99, 1),
        "p99.9": round(p999, 1),
        "max": round(late.max(), 1),
    }


def main() -> None:
    rate = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 120
    outage = float(sys.argv[3]) if len(sys.argv) > 3 else seconds
    total = MOST_DELAY_SECONDS + WARM_UP_SECONDS + seconds + outage
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        routes = [{"source": source, "subscriptions": [{"name": "a"}]} for source in SOURCES]
        job = Job(Path(folder), broker.settings, routes)
        admin = httpx.Client(base_url=f"{broker.settings.admin_url}/admin/v2/", timeout=60)
        path = DEAD.replace("://", "/")
        try:
            job.start()
            well = Consumer(broker.settings, WELL, int(rate * total * 0.9), 2 * total + 60)
            before = Consumer(broker.settings, [DEAD], int(rate * total), total - outage + 5)
            begin = time.time() + MOST_DELAY_SECONDS + WARM_UP_SECONDS
            producer = multiprocessing.Process(target=produce, args=(broker.settings, rate, total))
            producer.start()
            time.sleep(begin + seconds - time.time())
            died_at = time.time()
            admin.post(f"{path}/terminate").raise_for_status()
            earlier = before.found()
            producer.join()
            time.sleep(MOST_DELAY_SECONDS + 2)
            admin.delete(path, params={"force": "true"}).raise_for_status()
            back_at = time.time()
            late = Consumer(broker.settings, [DEAD], int(rate * total / 10) - len(earlier), total).found()
            found = well.found()
            job.terminate()
        finally:
            job.stop()
            broker.kill()
    numbers = np.concatenate([earlier, late])[:, 2]
    parts = [lateness(found, begin, died_at), lateness(found, died_at, died_at + outage)]
    print(
        json.dumps(
            {
                "benchmark": "isolation",
                "rate": rate,
                "seconds": seconds,
                "outage_seconds": outage,
                "late_millis": {"before": parts[0], "with_one_dead": parts[1]},
                "p99_ratio": round(parts[1]["p99"] / parts[0]["p99"], 3),
                "lost_of_others": int(rate * total * 0.9) - len(found),
                "dead": {
                    "missed": len(late),
                    "all_there_after_seconds": round(late[:, 1].max() / 1000 - back_at, 1),
                    "lost": int(rate * total / 10) - len(set(numbers.tolist())),
                    "doubled": len(numbers) - len(set(numbers.tolist())),
                    "out_of_order_by_millis": round(float((np.maximum.accumulate(late[:, 0]) - late[:, 0]).max())),
                },
            }
        )
    )


if __name__ == "__main__":
    main()
