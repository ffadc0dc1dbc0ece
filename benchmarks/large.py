"""Measures whether large messages get through with the default heap, and how late others are meanwhile.

usage: large.py instant [--messages N] [--bytes N] [--kills N]
       large.py backlog [--partitions N] [--messages N] [--bytes N] [--kills N]

`instant`: N messages (3,000) of --bytes (1,000,000) are due at one instant. `backlog`: each of --partitions (60) has N
messages (50) of --bytes that are overdue when the job starts. In both, another topic has --rate (50) messages a second
of 100 bytes, due 5 to 10 seconds after they are sent. With --kills the job's driver is killed so many times while the
large messages come, and started again. Prints one JSON object: messages lost, doubled and early; seconds from the
instant (or the start) until the last large one came; how late the other topic's were, at the consumer; the most
memory of all processes of the job together (PSS), looked at each half second; and their CPU time from the instant on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pulsar

from benchmarks.on_time import NAMESPACE, paced, received
from broker.client import connect
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings
from tests.support.service.harness import Job

LARGE, SMALL = f"{NAMESPACE}/large", f"{NAMESPACE}/small"
QUIET_SECONDS = 20  # of the small topic before the instant or the kills, and after the last large message
MIB = 2**20


def produce_large(settings: PulsarSettings, topics: list[str], n: int, n_bytes: int, due: int) -> None:
    """Sends n messages to each topic. A payload begins with its number and when it is due, ms since the epoch."""
    client = connect(settings)
    noise = os.urandom(n_bytes)
    for t, topic in enumerate(topics):
        producer = client.create_producer(
            topic, batching_enabled=False, block_if_queue_full=True, max_pending_messages=20
        )
        for i in range(n):
            payload = b"%d %d " % (t * n + i, due) + noise
            producer.send_async(payload[:n_bytes], None, properties={"deliverAt": str(due)})
        producer.flush()
    client.close()


def produce_small(settings: PulsarSettings, rate: float, stop: Any, sent: Any) -> None:
    client = connect(settings)
    producer = client.create_producer(SMALL, block_if_queue_full=True)
    for i in paced(rate, 10**9):
        due = int((time.time() + random.uniform(5, 10)) * 1000)
        producer.send_async(b"%d %d " % (i, due) + b"x" * 80, None, properties={"deliverAt": str(due)})
        sent.value = i + 1
        if stop.is_set():
            break
    producer.flush()
    client.close()


def consume(settings: PulsarSettings, topics: list[str], stop: Any, came: Any, results: Any) -> None:
    """Consumes until `stop` is set; puts (number, when it was due, when it came, ms since the epoch) of each."""
    client = connect(settings)
    consumer = client.subscribe(
        topics, "bench", receiver_queue_size=20, initial_position=pulsar.InitialPosition.Earliest
    )
    results.put("ready")
    found = []
    while not stop.is_set():
        for payload, now in received(consumer, 10**9, time.time() + 1):
            number, due, _ = payload[:60].split(b" ", 2)
            found.append((int(number), int(due), now))
            came.value = len(found)
    client.close()
    results.put(np.array(found, np.float64).reshape(-1, 3))


class Consumer:
    """A process that consumes topics until `found` is called."""

    def __init__(self, settings: PulsarSettings, topics: list[str]) -> None:
        self._results: Any = multiprocessing.Queue()
        self._stop = multiprocessing.Event()
        self.came: Any = multiprocessing.Value("q", 0)
        args = (settings, topics, self._stop, self.came, self._results)
        multiprocessing.Process(target=consume, args=args, daemon=True).start()
        self._results.get()

    def found(self) -> Any:
        self._stop.set()
        return self._results.get()


class Memory:
    """Looks at the PSS of all processes of the job, together and by kind, bytes; keeps the most."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.most = 0
        self.of_most: dict[str, int] = {}
        self.of_now: Counter[str] = Counter()
        self._cpu: dict[tuple[int, str], float] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            found: Counter[str] = Counter()
            try:
                processes = [psutil.Process(self._job.process.pid), *self._job.children()]  # type: ignore[union-attr]
            except (psutil.Error, AssertionError, AttributeError):
                processes = []
            for process in processes:
                with contextlib.suppress(psutil.Error):  # it has ended
                    name = "java" if "java" in process.name() else " ".join(process.cmdline()[-2:])[-40:]
                    found[name] += process.memory_full_info().pss
                    self._cpu[process.pid, name] = sum(process.cpu_times()[:2])
            self.of_now = found
            if (total := sum(found.values())) > self.most:
                self.most, self.of_most = total, dict(found)
            time.sleep(0.5)

    def cpu_seconds(self) -> dict[str, float]:
        """Returns the CPU time of all processes that were looked at, by kind, seconds."""
        total: dict[str, float] = {}
        for (_, name), seconds in list(self._cpu.items()):
            total[name] = total.get(name, 0.0) + seconds
        return total


def late(found: Any, since: float) -> dict[str, float]:
    """Returns how late messages came that were due from a time on, ms since the epoch."""
    chosen = found[found[:, 1] >= since]
    lateness = chosen[:, 2] - chosen[:, 1]
    p50, p99 = np.percentile(lateness, [50, 99])
    return {"messages": len(chosen), "p50": round(p50, 1), "p99": round(p99, 1), "max": round(lateness.max(), 1)}


def checked(found: Any, n: int) -> dict[str, int]:
    counts = Counter(found[:, 0].astype(int).tolist())
    return {
        "sent": n,
        "lost": n - len(counts),
        "doubled": sum(counts.values()) - len(counts),
        "early": int((found[:, 2] < found[:, 1]).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=["instant", "backlog"])
    parser.add_argument("--messages", type=int, default=None)
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=60)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--patience", type=float, default=900, help="seconds until the last large message has come")
    arguments = parser.parse_args()
    is_instant = arguments.scenario == "instant"
    per_topic = arguments.messages or (3_000 if is_instant else 50)
    topics = [LARGE] if is_instant else [f"{LARGE}{i}" for i in range(arguments.partitions)]
    n = per_topic * len(topics)
    said: dict[str, Any] = {"benchmark": "large", **vars(arguments), "messages": n}
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        routes = [{"source": source, "subscriptions": [{"name": "a"}]} for source in [*topics, SMALL]]
        job = Job(Path(folder), broker.settings, routes)
        memory = Memory(job)
        stop, sent = multiprocessing.Event(), multiprocessing.Value("q", 0)
        small_sender = multiprocessing.Process(
            target=produce_small, args=(broker.settings, arguments.rate, stop, sent), daemon=True
        )
        try:
            begun = time.time()
            if is_instant:
                job.start()
                due = int((time.time() + QUIET_SECONDS + 20 + n * arguments.bytes / 30e6) * 1000)
            else:
                due = int(begun * 1000) + 1
            produce_large(broker.settings, topics, per_topic, arguments.bytes, due)
            said["produced_seconds"] = round(time.time() - begun, 1)
            small = Consumer(broker.settings, [f"{SMALL}-a"])
            large = Consumer(broker.settings, [f"{topic}-a" for topic in topics])
            small_sender.start()
            if is_instant:
                time.sleep(max(0, due / 1000 - 5 - time.time()))
                since = due - 5_000.0
            else:
                job.start()
                since = time.time() * 1000 + 5_000
            begin = due / 1000 if is_instant else time.time()
            kills = [n * (k + 1) // (arguments.kills + 1) for k in range(arguments.kills)]
            starts = 0
            cpu_before = memory.cpu_seconds()
            until = time.time() + arguments.patience
            looked = 0.0
            while large.came.value < n and time.time() < until:
                time.sleep(0.3)
                if time.time() > looked + 2:
                    looked = time.time()
                    mib = {name: round(of / MIB) for name, of in memory.of_now.items()}
                    counts = f"large {large.came.value} small {small.came.value} of {sent.value}"
                    print(f"{looked - begin:6.1f} s {counts} {job.progress[-1:]} {mib}", file=sys.stderr, flush=True)
                is_dead = job.process is None or job.process.poll() is not None
                if kills and large.came.value >= kills[0]:
                    kills.pop(0)
                    job.kill9()
                    is_dead = True
                if is_dead:
                    starts += 1
                    job.stop()
                    said.setdefault("log", []).append(job.log[-600:]) if len(said.get("log", ())) < 3 else None
                    job.start()
            said["starts_again"] = starts
            said["large_seconds"] = round(time.time() - begin, 1)
            cpu = memory.cpu_seconds().items()
            said["cpu_seconds"] = {name: round(seconds - cpu_before.get(name, 0.0), 1) for name, seconds in cpu}
            time.sleep(QUIET_SECONDS)
            stop.set()
            small_sender.join()
            wait_for = time.time() + 60
            while small.came.value < sent.value and time.time() < wait_for:
                time.sleep(0.3)
            found = large.found()
            of_small = small.found()
            said["large"] = checked(found, n)
            said["large_mib_a_second"] = round(len(found) * arguments.bytes / MIB / said["large_seconds"], 1)
            said["small"] = checked(of_small, sent.value)
            said["small_late_millis"] = late(of_small, since)
            said["pss_mib"] = round(memory.most / MIB)
            said["pss_mib_by_process"] = {name: round(of / MIB) for name, of in memory.of_most.items()}
        finally:
            job.stop()
            broker.kill()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
