"""The job on a Spark cluster of several workers, one of which is lost."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pulsar
import pyspark
import pytest

import jobs
from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Collector, Job, check_exactly_once, now, wait_until
from warehouse.audit.accounts import run_audit

SPARK_HOME = Path(pyspark.__file__).parent
PROGRAM = Path(jobs.__file__).with_name("__main__.py")
ENTRY_POINT = PROGRAM.parents[1] / "conf" / "kubernetes" / "entrypoint.sh"


class Cluster:
    """A Spark standalone master and workers on this machine."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start("master", "--host", "127.0.0.1", "--port", "0")
            self.master = self._told("master", r"Starting Spark master at (spark://\S+)")
            for number in range(workers):
                work = ("--work-dir", str(folder / f"work{number}"), "--cores", "12", "--memory", "1g")
                self._start(f"worker{number}", "--host", "127.0.0.1", *work, self.master)
            for number in range(workers):
                self._told(f"worker{number}", "(Successfully registered with master)")
        except BaseException:
            self.stop()
            raise

    def kill_worker(self, number: int) -> None:
        """Kills a worker with its executor and their Python workers, as if its machine were gone."""
        _kill_all(self._processes[1 + number].pid)

    def stop(self) -> None:
        for process in self._processes:
            _kill_all(process.pid)
            process.wait()

    def _start(self, name: str, *arguments: str) -> None:
        role = name.rstrip("0123456789")
        main_class = f"org.apache.spark.deploy.{role}.{role.capitalize()}"
        options = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
        with open(self._folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [SPARK_HOME / "bin" / "spark-class", main_class, "--webui-port", "0", *arguments],
                env={**os.environ, **options, "SPARK_LOCAL_IP": "127.0.0.1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)

    def _told(self, name: str, pattern: str) -> str:
        log = self._folder / f"{name}.log"
        match = wait_until(lambda: re.search(pattern, log.read_text()), 60, f"{pattern} of {name}\n{log.read_text()}")
        return str(match[1])


def _kill_all(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, workers=2)
    yield cluster
    cluster.stop()


@pytest.mark.chaos
def test_a_lost_worker_loses_doubles_and_hurries_nothing(
    broker: EmbeddedBroker, cluster: Cluster, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    """Then the job goes on from its checkpoint by spark-submit, as the image's entry point starts it."""
    spark: dict[str, Any] = {
        "master": cluster.master,
        "conf": {"spark.driver.host": "127.0.0.1", "spark.executor.memory": "512m"},
    }
    routes = [{"source": topic, "subscriptions": [{"name": "a"}]}]
    tracker = {"max_seal_interval_millis": 1500, "load_ahead_millis": 6000}
    job = Job(tmp_path, broker.settings, routes, spark=spark, tracker=tracker, release={"lanes": 2})
    producer = pulsar_client.create_producer(topic, batching_enabled=False)
    collector = Collector(pulsar_client).collect(f"{topic}-a")
    sent: dict[str, int] = {}

    def produce(n: int, delay_seconds: int) -> None:
        for _ in range(n):
            text = f"m{len(sent)}"
            sent[text] = now() + hash(text) % (delay_seconds * 1000)
            producer.send_async(text.encode(), None, properties={"deliverAt": str(sent[text])})
            time.sleep(0.005)
        producer.flush()

    def all_arrived() -> bool:
        return len(collector.received[f"{topic}-a"]) >= len(sent)

    try:
        job.start()
        producing = threading.Thread(target=produce, args=(2_000, 12))
        producing.start()
        wait_until(lambda: job.progress and job.progress[-1]["in_flight"], 30, f"releases in flight\n{job.log}")
        cluster.kill_worker(0)
        producing.join()
        wait_until(all_arrived, 60, f"all messages\n{job.log}")
        assert job.terminate() == 0

        variables = {
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": SPARK_HOME,
            "SPARK_DRIVER_BIND_ADDRESS": "127.0.0.1",
        }
        environment = [f"{name}={value}" for name, value in variables.items()]
        program = "--class", "org.apache.spark.deploy.PythonRunner", f"local://{PROGRAM}"
        job.start(["env", *environment, str(ENTRY_POINT), "driver", "--master", cluster.master, *program])
        produce(200, 5)
        wait_until(all_arrived, 60, f"all messages\n{job.log}")
        audit = wait_until(lambda: (a := run_audit(job.settings)).taken_in == len(sent) and a, 30, "all entries")
        assert audit.is_clean, audit.findings
        assert job.terminate() == 0
        check_exactly_once(sent, collector.received[f"{topic}-a"])
    finally:
        collector.stop()
        job.stop()
