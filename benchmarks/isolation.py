"""Measures how late messages of nine destinations are while a tenth is unwritable or slow, and when it is not.

usage: isolation.py [RATE [SECONDS [PAIRS [LIMIT]]]]

RATE (1,000) messages a second over ten routes, 100 bytes each, are due 5 to 10 seconds after they are sent. After 30
seconds to warm up come PAIRS (6) times a window of SECONDS (60) with all ten destinations, and one with the tenth
terminated, on the same job: what the machine does in one minute and not in the next is in both. At the end of such a
window that destination is made anew, and gets the messages that it missed. With a LIMIT the tenth is not terminated: in
these windows it has a publish rate limit of so many messages a second. Lateness is taken at the consumer of the
other nine, of what is due after the first quarter of a window, ten seconds at most: until then the job goes over from
one to the other. Prints one JSON object.
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
from tests.support.service.harness import Job

SOURCES = [f"{NAMESPACE}/bench{i}" for i in range(10)]
DEAD, *WELL = [f"{source}-a" for source in SOURCES]
MOST_DELAY_SECONDS = 10
GOING_OVER_SECONDS = 10  # at most

# After the tenth destination was terminated its consumer reads on for so long.
READ_ON_SECONDS = 5


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
    results.put(np.array(found, np.float64).reshape(-1, 3))


class Consumer:
    """A process that consumes n messages, or until a time, s since the epoch."""

    def __init__(self, settings: PulsarSettings, topics: list[str], n: int, until: float) -> None:
        self._results: Any = multiprocessing.Queue()
        args = (settings, topics, n, until, self._results)
        multiprocessing.Process(target=consume, args=args, daemon=True).start()
        self._results.get()

    def found(self) -> Any:
        """Waits for the end; returns the array of `consume`."""
        return self._results.get()


class Tenth:
    """The destination that can be terminated and made anew, and what its consumers have found each time."""

    def __init__(self, settings: PulsarSettings, n: int, until: float) -> None:
        self._settings = settings
        self._admin = httpx.Client(base_url=f"{settings.admin_url}/admin/v2/", timeout=60)
        self._path = DEAD.replace("://", "/")
        self._left = n
        self._consumer = Consumer(settings, [DEAD], n, until + READ_ON_SECONDS)
        self.found: list[Any] = []
        self.back_at = 0.0  # s since the epoch: when it was made anew the last time

    def terminate(self) -> None:
        """Terminates it, and reads what it has; to be called at the time until which it is consumed."""
        self._admin.post(f"{self._path}/terminate").raise_for_status()
        self.read()

    def limit(self, rate: int) -> None:
        """Limits the rate at which it may be published to, messages a second; 0: lifts the limit."""
        if rate:
            body = {"publishThrottlingRateInMsg": rate, "publishThrottlingRateInByte": -1}
            self._admin.post(f"{self._path}/publishRate", json=body).raise_for_status()
        else:
            self._admin.delete(f"{self._path}/publishRate").raise_for_status()
            self.back_at = time.time()

    def make_anew(self, until: float) -> None:
        """Makes it anew, and has it consumed until a time, s since the epoch, or until all of it is there."""
        self._admin.delete(self._path, params={"force": "true"}).raise_for_status()
        self.back_at = time.time()
        self._consumer = Consumer(self._settings, [DEAD], self._left, until + READ_ON_SECONDS)

    def read(self) -> None:
        """Waits until its consumer has ended."""
        self.found.append(self._consumer.found())
        self._left -= len(self.found[-1])


def lateness(found: Any, windows: list[tuple[float, float]]) -> dict[str, float]:
    """Returns the lateness, ms, of the messages due within some windows, seconds since the epoch.

    Args:
        found: as `consume` puts it.
        windows: each with its begin, and its end, which is not in it.
    """
    due, at, _ = found.T
    chosen = np.zeros(len(due), np.bool_)
    for begin, end in windows:
        chosen |= (due >= begin * 1000) & (due < end * 1000)
    late = (at - due)[chosen]
    p50, p99 = np.percentile(late, [50, 99])
    return {"messages": len(late), "p50": round(p50, 1), "p99": round(p99, 1), "max": round(late.max(), 1)}


def out_of_order(found: Any) -> float:
    """Returns by how much a message came after one that was due later, ms at most; `found` is as `consume` puts it."""
    due = found[:, 0]
    return float((np.maximum.accumulate(due) - due).max(initial=0))


def report(found: Any, tenth: list[Any], begin: float, seconds: float, pairs: int) -> dict[str, Any]:
    """Returns what is printed of lateness, and of what the tenth destination has got.

    Args:
        found: by the consumer of the nine others, as `consume` puts it.
        tenth: the same of each of the tenth's consumers.
        begin: of the first window, seconds since the epoch.
        seconds: that a window takes.
        pairs: of windows.
    """
    going_over = min(GOING_OVER_SECONDS, seconds / 4)
    windows = [(begin + i * seconds + going_over, begin + (i + 1) * seconds) for i in range(2 * pairs)]
    alive, dead = lateness(found, windows[::2]), lateness(found, windows[1::2])
    numbers = np.concatenate(tenth)[:, 2]
    n_distinct = len(set(numbers.tolist()))
    return {
        "late_millis": {"all_alive": alive, "with_one_dead": dead},
        "p50_ratio": round(dead["p50"] / alive["p50"], 3),
        "p99_ratio": round(dead["p99"] / alive["p99"], 3),
        # How much windows of one kind differ says what the ratio is worth.
        "p99_of_windows": {
            "all_alive": [lateness(found, [window])["p99"] for window in windows[::2]],
            "with_one_dead": [lateness(found, [window])["p99"] for window in windows[1::2]],
        },
        "dead": {
            "received": n_distinct,
            "doubled": len(numbers) - n_distinct,
            "out_of_order_by_millis": round(max(out_of_order(one) for one in tenth)),
        },
    }


def main() -> None:
    rate = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60
    pairs = int(sys.argv[3]) if len(sys.argv) > 3 else 6
    limit = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    total = MOST_DELAY_SECONDS + WARM_UP_SECONDS + 2 * pairs * seconds
    n = int(rate * total)
    n_well = sum(i % 10 > 0 for i in range(n))
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        routes = [{"source": source, "subscriptions": [{"name": "a"}]} for source in SOURCES]
        job = Job(Path(folder), broker.settings, routes)
        try:
            job.start()
            begin = time.time() + MOST_DELAY_SECONDS + WARM_UP_SECONDS
            end = begin + 2 * pairs * seconds
            well = Consumer(broker.settings, WELL, n_well, end + total + 60)
            tenth = Tenth(broker.settings, n - n_well, end + total if limit else begin + seconds)
            producer = multiprocessing.Process(target=produce, args=(broker.settings, rate, total))
            producer.start()
            for pair in range(pairs):
                dies_at, back_at = begin + (2 * pair + 1) * seconds, begin + (2 * pair + 2) * seconds
                time.sleep(max(0, dies_at - time.time()))
                tenth.limit(limit) if limit else tenth.terminate()
                time.sleep(max(0, back_at - time.time()))
                if limit:
                    tenth.limit(0)
                else:
                    tenth.make_anew(back_at + seconds if pair + 1 < pairs else end + total)
            producer.join()
            tenth.read()
            found = well.found()
            job.terminate()
        finally:
            job.stop()
            broker.kill()
    said = report(found, tenth.found, begin, seconds, pairs)
    said["dead"] |= {
        "lost": n - n_well - said["dead"]["received"],
        "all_there_after_seconds": round(tenth.found[-1][:, 1].max() / 1000 - tenth.back_at, 1),
    }
    print(
        json.dumps(
            {
                "benchmark": "isolation",
                "rate": rate,
                "seconds": seconds,
                "pairs": pairs,
                "limit": limit,
                **said,
                "lost_of_others": n_well - len(found),
            }
        )
    )


if __name__ == "__main__":
    main()
