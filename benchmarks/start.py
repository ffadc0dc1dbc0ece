"""Measures how long the job takes from its start until it is ready, and the CPU time and memory that it uses.

usage: start.py [PAIRS]

The first start has no archive of classes, and makes it. Then come PAIRS (3) times a start that may not use the archive,
and one that does. CPU seconds are those of all processes of the job until it is ready; memory is the sum of their
proportional set sizes (PSS) ten seconds later. Prints one JSON object. There is no peer: Pulsar's own delayed delivery
is a part of the broker.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from broker.jvm.jars import JarSet, jars
from broker.standalone import EmbeddedBroker
from streaming.session import _JVM_OPTIONS
from tests.support.service.harness import Job, wait_until

SETTLING_SECONDS = 10
ARCHIVE_SECONDS = 200


def processes(job: Job) -> list[psutil.Process]:
    assert job.process is not None
    return [psutil.Process(job.process.pid), *job.children()]


def kind(process: psutil.Process, job: Job) -> str:
    """Names the kind of a process of the job: driver, jvm, the Python module of a Spark worker, or other."""
    assert job.process is not None
    line = process.cmdline()
    if process.pid == job.process.pid:
        return "driver"
    if process.name() == "java":
        return "jvm"
    return next((word.removeprefix("pyspark.sql.") for word in line if "." in word and "/" not in word), "other")


def cpu_seconds(job: Job) -> dict[str, float]:
    """Returns CPU seconds by kind of process; those of ended children are listed by the process that started them."""
    used: dict[str, float] = defaultdict(float)
    for process in processes(job):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            name = kind(process, job)
            used[name] += times.user + times.system
            used[f"{name}, ended children"] += times.children_user + times.children_system
    return {name: round(seconds, 2) for name, seconds in used.items() if seconds >= 0.01}


def memory_mib(job: Job) -> dict[str, float]:
    """Returns the proportional set size by kind of process, MiB: shared pages are divided among their processes."""
    used: dict[str, float] = defaultdict(float)
    for process in processes(job):
        with contextlib.suppress(psutil.NoSuchProcess):
            used[kind(process, job)] += process.memory_full_info().pss / 2**20
    return {name: round(size) for name, size in used.items()}


def start(job: Job) -> dict[str, Any]:
    began = time.monotonic()
    job.start()
    wall, cpu = time.monotonic() - began, cpu_seconds(job)
    time.sleep(SETTLING_SECONDS)
    memory = memory_mib(job)
    job.terminate()
    return {
        "seconds": round(wall, 2),
        "cpu_seconds": round(sum(cpu.values()), 2),
        "cpu_seconds_by_process": cpu,
        "pss_mib": sum(memory.values()),
        "pss_mib_by_process": memory,
    }


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        jar_sets: tuple[JarSet, ...] = ("broker", "spark")
        for jar_set in jar_sets:  # the JARs are there, the archives are not
            found = jars(jar_set)
            (cache := Path(folder) / "cache").mkdir(exist_ok=True)
            (cache / found.name).symlink_to(found)
        os.environ["DELAYLAKE_CACHE"] = str(cache)
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)

        def measure(name: str, conf: dict[str, str]) -> None:
            number = sum(map(len, runs.values()))
            (own := Path(folder) / str(number)).mkdir()
            routes = [{"source": f"persistent://public/default/bench{number}", "subscriptions": [{"name": "a"}]}]
            job = Job(own, broker.settings, routes, spark={"conf": conf})
            try:
                runs[name].append(start(job))
            finally:
                job.stop()

        try:
            measure("cold", {})
            wait_until(lambda: not list(cache.glob("*.classes")), ARCHIVE_SECONDS, "archives")
            for _ in range(pairs):
                measure("without", {"spark.driver.extraJavaOptions": _JVM_OPTIONS})
                measure("with", {})
        finally:
            broker.kill()
    medians = {
        name: {
            key: round(statistics.median(run[key] for run in found), 2) for key in ("seconds", "cpu_seconds", "pss_mib")
        }
        for name, found in runs.items()
    }
    print(json.dumps({"benchmark": "start", **medians, "runs": runs}))


if __name__ == "__main__":
    main()
