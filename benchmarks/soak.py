"""Runs the service for long, and tests whether anything of it grows: its slope over time against zero.

usage: python -m benchmarks.soak [--minutes 60] [--rate 2000] [--every 5] [--warm-up-minutes 20] [--days 24]

Two parts, either of which can be left out (--minutes 0, --days 0):

- The real job and broker for some minutes at a steady rate: most messages due within 10 s, the others up to ten minutes
  later; one in a hundred has a schedule key. Every few seconds: memory (PSS), descriptors and threads by kind of
  process; files, bytes and versions of the tables; files and bytes of the checkpoint, of Spark's state in it and of its
  log; messages in state; the lateness of what came since the last sample. Retention is set so short that all of it is
  steady after the warm-up.
- Days of a compressed clock: shard, clock, tables and maintenance, without Spark and Pulsar, a minute a tick
  (`tests/integration/delivery/test_two_days.py`); from the second day on.

Samples next to each other are alike, and what is compacted goes up and down: so the median of each of BLOCKS spans of
time counts as one sample. Of these come the slope by linear regression, and by Theil and Sen the median slope with its
confidence interval, which takes no distribution for granted. A measure grows where the interval, for all measures
together at 99 %, lies above zero, and in an hour (a day of the compressed clock) it grows by more than 1 % of its mean.

Prints one JSON object; the exit status is 1 where anything grows. There is no peer: nobody else publishes such a run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import psutil
import pulsar

from benchmarks.on_time import NAMESPACE, paced
from benchmarks.start import kind, processes
from broker.client import connect
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings, Settings
from tests.integration.delivery.test_two_days import HOUR, MINUTE, START, Service
from tests.support.service.harness import Job
from tests.support.tracker.messages import TOPIC
from warehouse.maintenance.maintain import maintain
from warehouse.schemas import SCHEMAS

BLOCKS = 20
CONFIDENCE = 0.99
LEAST_GROWTH = 0.01  # of the mean, in an hour or a day of the compressed clock
LATEST_SECONDS = 600.0
LATER_SHARE = 0.05
KEPT_SECONDS = 10  # versions of the simulation's tables, by the real clock: longer than its maintenance takes

Samples = Mapping[str, Sequence[float]]


def trend(times: Sequence[float], values: Sequence[float], measures: int) -> dict[str, Any]:
    """Tests whether a measure grows with time.

    Args:
        times: of the samples, in the unit of the slope, ascending.
        values: the samples.
        measures: how many are tested together: the more, the wider is each one's confidence interval.

    Returns:
        `mean`, `slope` (linear regression), `median_slope` and its `interval` (Theil and Sen), a unit of time, `first`
        and `last` (blocks), and whether it `grows`.
    """
    spans = [span for span in np.array_split(np.arange(len(times)), BLOCKS) if len(span)]
    t = np.array([np.mean(np.take(times, span)) for span in spans])
    v = np.array([np.median(np.take(values, span)) for span in spans])
    n = len(v)
    i, j = np.triu_indices(n, 1)
    slopes = np.sort((v[j] - v[i]) / (t[j] - t[i]))
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / measures)
    reach = z * np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low, high = round((len(slopes) - reach) / 2), round((len(slopes) + reach) / 2)
    interval = [slopes[low] if low >= 0 else -np.inf, slopes[high] if high < len(slopes) else np.inf]
    middle, mean = float(np.median(slopes)), float(np.mean(v))
    return {
        "mean": _short(mean),
        "slope": _short(float(np.polyfit(t, v, 1)[0])),
        "median_slope": _short(middle),
        "interval": [_short(float(bound)) for bound in interval],
        "first": _short(float(v[0])),
        "last": _short(float(v[-1])),
        "grows": bool(interval[0] > 0 and middle > LEAST_GROWTH * abs(mean)),
    }


def trends(times: Sequence[float], samples: Samples) -> dict[str, Any]:
    return {name: trend(times, values, len(samples)) for name, values in sorted(samples.items())}


def _short(value: float) -> float | str:
    return float(f"{value:.4g}") if np.isfinite(value) else str(value)


def produce(settings: PulsarSettings, topic: str, rate: int, seconds: float, latest_seconds: float) -> None:
    client = connect(settings)
    producer = client.create_producer(topic, block_if_queue_full=True, max_pending_messages=20_000)
    chance = random.Random(1)
    body = b" " + b"x" * 86
    for i in paced(rate, int(rate * seconds)):
        wait = chance.uniform(10, latest_seconds) if chance.random() < LATER_SHARE else chance.uniform(3, 10)
        due = int((time.time() + wait) * 1000)
        properties = {"deliverAt": str(due)} | ({"scheduleKey": str(i // 100 % 1_000)} if i % 100 == 0 else {})
        producer.send_async(str(due).encode() + body, None, properties=properties)
    producer.flush()
    client.close()


def consume(settings: PulsarSettings, topic: str, late: Any) -> None:
    """Puts the p99 of the lateness, ms, of what comes within each second into a queue, until it is ended."""
    client = connect(settings)
    consumer = client.subscribe(
        topic, "soak", consumer_type=pulsar.ConsumerType.Shared, receiver_queue_size=20_000,
        initial_position=pulsar.InitialPosition.Earliest,
    )  # fmt: skip
    late.put(None)
    of_second: list[float] = []
    until = time.time() + 1
    while True:
        with contextlib.suppress(pulsar.Timeout):
            message = consumer.receive(200)
            of_second.append(time.time() * 1000 - int(message.data().split(b" ", 1)[0]))
            consumer.acknowledge(message)
        if time.time() > until and of_second:
            late.put((float(np.percentile(of_second, 99)), len(of_second)))
            of_second, until = [], time.time() + 1


def _files(folder: Path) -> tuple[int, int]:
    """Returns how many files a folder has, and their bytes."""
    n = size = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if file.is_file():
                n, size = n + 1, size + file.stat().st_size
    return n, size


def sample(job: Job) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for process in processes(job):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = kind(process, job)
            if name == "other":  # maintenance, which comes and goes
                continue
            with process.oneshot():
                found[f"pss_mib {name}"] += process.memory_full_info().pss / 2**20
                found[f"descriptors {name}"] += process.num_fds()
                found[f"threads {name}"] += process.num_threads()
    warehouse, checkpoint = job.folder / "warehouse", job.folder / "checkpoint"
    for name in SCHEMAS:
        if (table := warehouse / name).exists():
            found[f"files {name}"], found[f"bytes {name}"] = _files(table)
            found[f"log_entries {name}"] = len(list((table / "_delta_log").glob("*.json")))
    found["files checkpoint"], found["bytes checkpoint"] = _files(checkpoint)
    found["files state"], found["bytes state"] = _files(checkpoint / "query" / "state")
    found["bytes spark.log"] = sum(file.stat().st_size for file in checkpoint.glob("spark.log*"))
    found["old queries"] = len(list(checkpoint.glob("query.*")))
    found["messages in state"] = job.progress[-1]["in_state"] if job.progress else 0
    return found


def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the job; returns the trends, an hour, of what was sampled after the warm-up."""
    kept = max(60_000, int(arguments.warm_up_minutes * MINUTE / 4))
    sections: dict[str, Any] = {
        "retention": {f"{name}_millis": kept for name in SCHEMAS},
        "maintain": {"retention_interval_millis": max(1_000, kept // 4), "keep_versions_millis": kept},
    }
    times, samples = list[float](), defaultdict[str, list[float]](list)
    received = 0
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        source = f"{NAMESPACE}/soak"
        routes = [{"source": source, "subscriptions": [{"name": "a"}]}]
        job = Job(Path(folder), broker.settings, routes, **sections)
        late: Any = multiprocessing.Queue()
        seconds = arguments.minutes * 60
        consumer = multiprocessing.Process(target=consume, args=(broker.settings, f"{source}-a", late), daemon=True)
        latest = min(LATEST_SECONDS, arguments.warm_up_minutes * 30 + 10)  # so that as many come as go out by then
        load = (broker.settings, source, arguments.rate, seconds, latest)
        producer = multiprocessing.Process(target=produce, args=load)
        try:
            job.start()
            consumer.start()
            late.get()
            producer.start()
            begin = time.monotonic()
            while (passed := time.monotonic() - begin) < seconds:
                time.sleep(arguments.every)
                lateness = []
                while not late.empty():
                    p99, n = late.get()
                    lateness.append(p99)
                    received += n
                if passed < arguments.warm_up_minutes * 60 or not lateness:
                    continue
                times.append(passed / 3600)
                for name, value in {**sample(job), "late_millis p99": float(np.median(lateness))}.items():
                    samples[name].append(value)
                print(f"{passed:.0f} s: {samples['late_millis p99'][-1]:.0f} ms late", file=sys.stderr, flush=True)
            producer.join()
            assert job.terminate() == 0, job.log
        finally:
            for process in (producer, consumer):
                if process.is_alive():
                    process.kill()
            job.stop()
            broker.kill()
    whole = {name: values for name, values in samples.items() if len(values) == len(times)}
    left_out = sorted(samples.keys() - whole.keys())
    return {"samples": len(times), "received": received, "left_out": left_out, "an_hour": trends(times, whole)}


def simulate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs days of a compressed clock; returns the trends, a day, of the days after the first."""
    times, samples = list[float](), defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            warehouse=f"{folder}/warehouse",
            checkpoint=f"{folder}/checkpoint",
            routes=({"source": TOPIC, "subscriptions": [{"name": "a"}]},),  # type: ignore[arg-type]
            retention={f"{name}_millis": 2 * HOUR for name in SCHEMAS},  # type: ignore[arg-type]
        )
        service = Service(settings, KEPT_SECONDS)
        for minute in range(int(arguments.days * 24 * 60)):
            now = START + minute * MINUTE
            service.minute(now)
            if minute % 20 == 19:
                maintain(settings, now=now)
            if minute % 20 == 19 and minute >= 24 * 60:
                times.append(minute / 24 / 60)
                for name, value in service.sizes():
                    samples[name].append(value)
    return {"samples": len(times), "delivered": len(service.delivered), "a_day": trends(times, samples)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests whether anything grows while the service runs for long.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=int, default=2_000, help="messages a second")
    parser.add_argument("--every", type=float, default=5, help="seconds between two samples")
    parser.add_argument("--warm-up-minutes", type=float, default=20)
    parser.add_argument("--days", type=float, default=24, help="of the compressed clock")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"benchmark": "soak", **vars(arguments)}
    if arguments.minutes:
        found["job"] = soak(arguments)
    if arguments.days:
        found["simulation"] = simulate(arguments)
    measured = {
        **found.get("job", {}).get("an_hour", {}),
        **{f"simulated {name}": one for name, one in found.get("simulation", {}).get("a_day", {}).items()},
    }
    found["grows"] = sorted(name for name, one in measured.items() if one["grows"])
    print(json.dumps(found))
    return 1 if found["grows"] else 0


if __name__ == "__main__":
    sys.exit(main())
