"""Measures what a release costs because it is a Spark job with producers of its own, and no process stays to send it.

usage: release_job.py [ROUNDS [RELEASES]]

A release has 1,800 rows, as 3,000 messages a second make with a batch every 0.6 s. ROUNDS (5) times, RELEASES (40) of
them are passed to a Spark job each, as the job does, and then as many to a process that stays. Both get the rows and
give a report of as many bytes, and send nothing. Beside them, with an embedded broker: 0, 1, 2 and 8 producers that are
opened side by side and closed for each release, on connections that are kept; and the settings, as a worker reads them
first and later. CPU and wall time are milliseconds a release, the medians of the rounds. What a process that stays and
keeps its producers would gain is reckoned in CPU seconds a million messages. Prints one JSON object.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.sending import release
from broker.protocol.brokers import Brokers
from broker.protocol.producer import EntryProducer
from broker.standalone import EmbeddedBroker
from conf.settings import Settings, settings_from_json
from streaming.release.attempt import Assignment, Attempt, SendReport
from streaming.session import SparkSession, create_session

ROWS = 1_800
REPORT_BYTES = 60_000
INTERVAL_SECONDS = 0.2
BATCH_SECONDS = 0.6
TOPIC = "persistent://public/default/release-job"


def send_nothing(settings_json: str, attempt: Attempt, assignments: Iterable[Assignment]) -> Iterator[SendReport]:
    """A task in place of `send_releases`."""
    settings_from_json(settings_json)
    if list(assignments):
        yield SendReport(b"x" * REPORT_BYTES, time.time_ns() // 1_000_000)


def stay(connection: Connection) -> None:
    """The process that stays: has the settings, and gets assignments and attempts."""
    settings_json = connection.recv()
    while task := connection.recv():
        assignments, attempt = task
        connection.send(list(send_nothing(settings_json, attempt, assignments)))


def seconds_of(processes: Iterable[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes)


class Kinds:
    """CPU seconds by kind of process."""

    def __init__(self, **processes: Callable[[], Iterable[psutil.Process]]) -> None:
        self._processes = processes

    def seconds(self) -> dict[str, float]:
        return {name: seconds_of(found()) for name, found in self._processes.items()}


def measure(kinds: Kinds, releases: int, run: Callable[[int], Any], interval: float) -> dict[str, float]:
    """Returns CPU by kind and wall time, milliseconds a release."""
    before, walls = kinds.seconds(), []
    for i in range(releases):
        began = time.monotonic()
        run(i)
        walls.append(time.monotonic() - began)
        time.sleep(max(0.0, interval - walls[-1]))
    after = kinds.seconds()
    found = {name: (after[name] - before[name]) / releases * 1e3 for name in after}
    return found | {"wall": statistics.median(walls) * 1e3}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 2) for name in rounds[0]}


def jobs(spark: SparkSession, settings_json: str, rounds: int, releases: int) -> dict[str, Any]:
    """Releases as Spark jobs, and in a process that stays."""
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", "release")
    due = time.time_ns() // 1_000_000
    one = release(1, ROWS, [due + i // 3 for i in range(ROWS)], [f"{TOPIC}0"] * ROWS)
    attempt = Attempt(is_first=True)

    def as_job(i: int) -> None:
        task = functools.partial(send_nothing, settings_json, attempt)
        [report] = spark.sparkContext.parallelize([one], 1).mapPartitions(task).collect()
        assert len(report.deliveries) == REPORT_BYTES

    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=stay, args=(there,), daemon=True)
    process.start()
    here.send(settings_json)

    def in_process(i: int) -> None:
        here.send(([one], attempt))
        [report] = here.recv()
        assert len(report.deliveries) == REPORT_BYTES

    jvm, stays = psutil.Process(spark.sparkContext._gateway.proc.pid), psutil.Process(process.pid)  # type: ignore[union-attr]
    kinds = Kinds(
        driver=lambda: [psutil.Process()],
        jvm=lambda: [jvm],
        workers=lambda: jvm.children(recursive=True),
        process=lambda: [stays],
    )
    for run in (as_job, in_process):
        measure(kinds, 50, run, 0.02)
    found: dict[str, list[dict[str, float]]] = {"job": [], "process": []}
    for _ in range(rounds):
        found["job"].append(measure(kinds, releases, as_job, INTERVAL_SECONDS))
        found["process"].append(measure(kinds, releases, in_process, INTERVAL_SECONDS))
    here.send(None)
    return {"body_bytes": len(one.body)} | {name: medians(of) for name, of in found.items()}


def producers(broker: EmbeddedBroker, settings: Settings, rounds: int, releases: int) -> dict[str, Any]:
    """Producers that are opened side by side and closed for each release, and a broker that has nothing to do."""
    brokers = Brokers(settings.pulsar)
    server = psutil.Process(broker.status().pid)
    kinds = Kinds(sender=lambda: [psutil.Process()], broker=lambda: [server])

    def open_and_close(n: int, i: int) -> None:
        opened, failed = threading.Semaphore(0), list[Exception]()

        def note(producer: EntryProducer, error: Exception | None) -> None:
            if error is not None:
                failed.append(error)
            opened.release()

        begun = [brokers.begin_producing(f"{TOPIC}{k}", f"planned-{k}", lambda: None, note) for k in range(n)]
        for _ in begun:
            opened.acquire()
        assert not failed, failed
        for wait in [one.close() for one in begun if one is not None]:
            wait(5)

    counts = (1, 2, 8)
    for k in range(max(counts)):
        brokers.produce(f"{TOPIC}{k}", "first").close()(5)
    found: dict[int, list[dict[str, float]]] = {n: [] for n in (0, *counts)}
    for n in counts:
        measure(kinds, 100, functools.partial(open_and_close, n), 0.02)
    for _ in range(rounds):
        for n in found:
            found[n].append(measure(kinds, releases, functools.partial(open_and_close, n), INTERVAL_SECONDS))
    brokers.close()
    return {str(n): medians(of) for n, of in found.items()}


def settings_millis(settings_json: str) -> dict[str, float]:
    def took(n: int) -> float:
        began = time.process_time()
        for _ in range(n):
            settings_from_json(settings_json)
        return round((time.process_time() - began) / n * 1e3, 4)

    settings_from_json.cache_clear()
    return {"first": took(1), "later": took(1_000)}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    releases = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    found: dict[str, Any] = {"benchmark": "release_job", "rounds": rounds, "releases": releases, "rows": ROWS}
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        routes = [{"source": f"{TOPIC}{i}", "subscriptions": [{"name": "a"}]} for i in range(8)]
        settings = Settings.model_validate({"warehouse": f"file:{folder}/w", "routes": routes})
        try:
            broker.start(port=0, http_port=0)
            settings = settings.model_copy(update={"pulsar": broker.settings})
            found["settings_cpu_millis"] = settings_millis(settings.model_dump_json())
            found["producers"] = producers(broker, settings, rounds, releases)
        finally:
            broker.kill()
        spark = create_session(settings, "release_job")
        found |= jobs(spark, settings.model_dump_json(), rounds, releases)
        spark.stop()
    job, process, opened = found["job"], found["process"], found["producers"]
    names = ("driver", "jvm", "workers", "process")
    gain = {"job": sum(job[name] - process[name] for name in names)}
    gain |= {
        f"{n}_producers": sum(opened[n][of] - opened["0"][of] for of in ("sender", "broker")) for n in ("1", "2", "8")
    }
    found["gain_cpu_millis_a_release"] = {name: round(millis, 2) for name, millis in gain.items()}
    found["gain_cpu_seconds_per_million"] = {
        rate: {name: round(millis * 1e3 / rate / BATCH_SECONDS, 1) for name, millis in gain.items()}
        for rate in (3_000, 10_000)
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
