"""Measures lateness and throughput of the job and of Pulsar's own delayed delivery.

usage: on_time.py [RATE [SECONDS]] [--from RATE] [--busy N] [--topics N] [--alone]

Both have the same broker, load and consumer, one after the other: RATE (3,000) messages a second for SECONDS (60), 100
bytes each, due 5 to 10 seconds after they are sent. Lateness is taken at the consumer, after the first 20 seconds. With
--from another rate comes before for 20 seconds, so that the step is measured; with --busy N processes that do nothing
but use a core each run beside it (0); with --topics the job has N source topics (1), which get a message in turn;
--alone leaves Pulsar's own out. The job's CPU seconds are those of all its processes from
the first message on. Of the job `handed_over_late_millis` is how late its senders gave messages to the broker: what
`late_millis` has beyond it comes from broker and consumer. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pulsar

from benchmarks.start import cpu_seconds
from broker.client import connect
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings
from tests.support.service.harness import Job
from tracker.messages import int64
from warehouse.delta.tables import Tables

WARM_UP_SECONDS = 20
NAMESPACE = "persistent://public/default"


class Pace(NamedTuple):
    """So many messages a second, for so long."""

    rate: int
    seconds: float

    @property
    def n(self) -> int:
        return int(self.rate * self.seconds)


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


def produce(settings: PulsarSettings, topics: str | Sequence[str], paces: Sequence[Pace], is_native: bool) -> None:
    client = connect(settings)
    producers = [
        client.create_producer(
            topic, batching_enabled=not is_native, block_if_queue_full=True, max_pending_messages=20_000
        )
        for topic in ([topics] if isinstance(topics, str) else topics)
    ]
    body = b"x" * 86
    for i in itertools.chain.from_iterable(paced(pace.rate, pace.n) for pace in paces):
        producer = producers[i % len(producers)]
        due = int((time.time() + random.uniform(5, 10)) * 1000)
        payload = str(due).encode() + b" " + body
        if is_native:
            producer.send_async(payload, None, deliver_at=due)
        else:
            producer.send_async(payload, None, properties={"deliverAt": str(due)})
    for producer in producers:
        producer.flush()
    client.close()


def consume(settings: PulsarSettings, topics: str | Sequence[str], n: int, until: float, results: Any) -> None:
    client = connect(settings)
    consumer = client.subscribe(
        topics if isinstance(topics, str) else list(topics), "bench", consumer_type=pulsar.ConsumerType.Shared,
        receiver_queue_size=20_000,
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
    settings: PulsarSettings,
    source: str | Sequence[str],
    destination: str | Sequence[str],
    paces: Sequence[Pace],
    native: bool,
) -> dict[str, Any]:
    results: Any = multiprocessing.Queue()
    n, seconds = sum(pace.n for pace in paces), sum(pace.seconds for pace in paces)
    consumer = multiprocessing.Process(
        target=consume, args=(settings, destination, n, time.time() + seconds * 2 + 60, results)
    )
    consumer.start()
    results.get()
    begin = time.time()
    producer = multiprocessing.Process(target=produce, args=(settings, source, paces, native))
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
    """Returns how late messages came after the first WARM_UP_SECONDS, or the first third of a short run, ms.

    Args:
        late: how late each message came, float64 [messages], ms.
        at: when it came, float64 [messages], ms since the epoch.
        begin: when the first one was sent, seconds since the epoch.
    """
    warm_up = min(WARM_UP_SECONDS, (at.max() / 1000 - begin) / 3)
    steady = late[at > (begin + warm_up) * 1000]
    p50, p99, p999 = np.percentile(steady, [50, 99, 99.9])
    return {"p50": round(p50, 1), "p99": round(p99, 1), "p99.9": round(p999, 1), "max": round(steady.max())}


def handed_over_late_millis(job: Job) -> dict[str, float]:
    """Returns how late the senders handed messages over that were sent after the same warm-up, ms."""
    rows = Tables(job.settings.warehouse).query("deliveries", "SELECT deliver_at, sent_at FROM deliveries")
    due, at = int64(rows, "deliver_at"), int64(rows, "sent_at")
    return late_millis((at - due).astype(float), at.astype(float), at.min() / 1000)


def median_of(job: Job, name: str, seconds: float) -> float:
    """Returns the median of a value of the job's reports, one a second, after the warm-up."""
    warm_up = int(min(WARM_UP_SECONDS, seconds / 3))
    return float(np.median([report[name] for report in job.progress[warm_up : max(int(seconds), warm_up + 1)]]))


@contextmanager
def busy(n: int) -> Iterator[None]:
    """Within it n processes use a core each, as far as there are so many."""
    processes = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(n)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _spin() -> None:
    for _ in itertools.count():
        pass


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rate", type=int, nargs="?", default=3_000)
    parser.add_argument("seconds", type=float, nargs="?", default=60)
    parser.add_argument("--from", type=int, dest="before", metavar="RATE")
    parser.add_argument("--busy", type=int, default=0, metavar="N")
    parser.add_argument("--topics", type=int, default=1, metavar="N")
    parser.add_argument("--alone", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    rate, seconds = options.rate, options.seconds
    found: dict[str, Any] = {"benchmark": "on_time", "rate": rate, "seconds": seconds, "busy": options.busy}
    found |= {"topics": options.topics, "from": options.before}
    paces = [Pace(rate, seconds)]
    if options.before:
        paces.insert(0, Pace(options.before, WARM_UP_SECONDS))
    with tempfile.TemporaryDirectory() as folder, busy(options.busy):
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        sources = [f"{NAMESPACE}/bench{i}" for i in range(options.topics)]
        routes = [{"source": source, "subscriptions": [{"name": "a"}]} for source in sources]
        job = Job(Path(folder), broker.settings, routes)
        try:
            job.start()
            before = cpu_seconds(job)
            ours = run(broker.settings, sources, [f"{source}-a" for source in sources], paces, native=False)
            used = {name: round(seconds - before.get(name, 0), 1) for name, seconds in cpu_seconds(job).items()}
            ours["job_cpu_seconds"] = round(sum(used.values()), 1)
            ours["job_cpu_seconds_by_process"] = used
            for name in ("batch_millis_p50", "taken_per_second", "lookahead_millis"):
                ours[f"{name.removesuffix('_p50')}_p50"] = median_of(job, name, sum(pace.seconds for pace in paces))
            job.terminate()
            ours["handed_over_late_millis"] = handed_over_late_millis(job)
            found["delaylake"] = ours
            if not options.alone:
                own = run(broker.settings, f"{NAMESPACE}/own", f"{NAMESPACE}/own", paces, native=True)
                ratio = ours["late_millis"]["p99"] / own["late_millis"]["p99"]
                found |= {"pulsar": own, "p99_ratio": round(ratio, 3)}
        finally:
            job.stop()
            broker.kill()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
