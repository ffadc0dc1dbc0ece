"""Measures how much of a core the job uses when nothing comes and nothing is due, and how late a first message is then.

usage: idle.py [SECONDS]

SECONDS (60) is how long the job is watched. Prints one JSON object. There is no peer: Pulsar's own delayed delivery is
a part of the broker.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pulsar

from benchmarks.on_time import NAMESPACE
from broker.client import connect
from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Job

SETTLING_SECONDS = 100  # a minute after the start tables are maintained for the first time


def cpu_seconds(job: Job, seen: dict[int, float]) -> float:
    """Returns the CPU seconds that all processes of the job have used so far.

    Args:
        job: it runs.
        seen: by process id the seconds at the last call; updated, so that processes that have ended still count.
    """
    assert job.process is not None
    for process in [psutil.Process(job.process.pid), *job.children()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seen[process.pid] = times.user + times.system
    return sum(seen.values())


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        source = f"{NAMESPACE}/bench"
        job = Job(Path(folder), broker.settings, [{"source": source, "subscriptions": [{"name": "a"}]}])
        client = connect(broker.settings)
        try:
            job.start()
            consumer = client.subscribe(f"{source}-a", "bench", initial_position=pulsar.InitialPosition.Earliest)
            time.sleep(SETTLING_SECONDS)
            seen: dict[int, float] = {}
            before, began = cpu_seconds(job, seen), time.monotonic()
            while time.monotonic() - began < seconds:
                time.sleep(1)
                used = cpu_seconds(job, seen) - before
            cores = used / (time.monotonic() - began)
            producer = client.create_producer(source)
            late = []
            for _ in range(5):
                due = int((time.time() + 0.001) * 1000)
                producer.send(b"", properties={"deliverAt": str(due)})
                message = consumer.receive(30_000)
                late.append(round(time.time() * 1000 - due))
                consumer.acknowledge(message)
                time.sleep(3)
            job.terminate()
        finally:
            client.close()
            job.stop()
            broker.kill()
    print(json.dumps({"benchmark": "idle", "cores": round(cores, 3), "first_message_late_millis": sorted(late)[2]}))


if __name__ == "__main__":
    main()
