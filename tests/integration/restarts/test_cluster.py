"""The job on a Spark cluster of several hosts, one of which is lost."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pulsar
import pyspark
import pytest

import jobs
from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Collector, Job, check_exactly_once, now, wait_until
from tests.support.service.hosts import Host, Network, network
from warehouse.audit.accounts import run_audit

SPARK_HOME = Path(pyspark.__file__).parent
PROGRAM = Path(jobs.__file__).with_name("__main__.py")
ENTRY_POINT = PROGRAM.parents[1] / "conf" / "kubernetes" / "entrypoint.sh"


SECRET = "only-who-knows-this-word-may-join"
PROTECTION = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
}


class Cluster:
    """A Spark standalone master on this machine and a worker on each host, which let in only who knows their secret.

    Args:
        folder: for logs, and the workers' files.
        network: the hosts, beside this machine.

    Attributes:
        master: its URL.
        address: this machine's, for the hosts.
    """

    def __init__(self, folder: Path, network: Network) -> None:
        self._folder = folder
        self.address = network.address
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start("master", network.address, [], "--port", "0")
            self.master = self._told("master", r"Starting Spark master at (spark://\S+)")
            for number, host in enumerate(network.hosts):
                self._start_worker(f"worker{number}", host, SECRET)
            for number in range(len(network.hosts)):
                self._told(f"worker{number}", "(Successfully registered with master)")
        except BaseException:
            self.stop()
            raise

    def kill_worker(self, number: int) -> None:
        """Kills a worker with its executor and their Python workers, as if its machine were gone."""
        _kill_all(self._processes[1 + number].pid)

    def start_stranger(self, host: Host) -> str:
        """Starts a worker that does not know the secret; returns what it logs when it is turned away."""
        self._start_worker("worker9", host, "what-somebody-has-guessed-as-a-word")
        told = self._told("worker9", r"(New auth protocol failed.*)")
        assert "Successfully registered" not in (self._folder / "worker9.log").read_text()
        return told

    def stop(self) -> None:
        for process in self._processes:
            _kill_all(process.pid)
            process.wait()

    def _start_worker(self, name: str, host: Host, secret: str) -> None:
        work = ("--work-dir", str(self._folder / f"work-{name}"), "--cores", "12", "--memory", "1g")
        self._start(name, host.address, host.command(), *work, self.master, secret=secret)

    def _start(self, name: str, address: str, there: list[str], *arguments: str, secret: str = SECRET) -> None:
        role = name.rstrip("0123456789")
        main_class = f"org.apache.spark.deploy.{role}.{role.capitalize()}"
        protection = " ".join(f"-D{name}={value}" for name, value in PROTECTION.items())
        java = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {protection} -Dspark.authenticate.secret={secret}"
        options = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": java}
        with open(self._folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [
                    *there,
                    SPARK_HOME / "bin" / "spark-class",
                    main_class,
                    "--webui-port",
                    "0",
                    "--host",
                    address,
                    *arguments,
                ],
                env={**os.environ, **options, "SPARK_LOCAL_IP": address},
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
def hosts(broker: EmbeddedBroker) -> Iterator[Network]:
    """Two hosts that reach the broker as this machine does."""
    with network(2) as made:
        for url in (broker.settings.service_url, broker.settings.admin_url):
            made.forward(urlsplit(url).port or 0)
        yield made


@pytest.fixture
def cluster(hosts: Network, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, hosts)
    yield cluster
    cluster.stop()


class Eavesdropper:
    """Reads along what goes over a network, and counts where some words are in it."""

    def __init__(self, network: Network, words: bytes) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
        self._socket.bind((network.name, 0))
        self._socket.settimeout(0.2)
        self._words = words
        self.n_bytes = self.n_found = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(TimeoutError):
                frame = self._socket.recv(1 << 16)
                self.n_bytes += len(frame)
                self.n_found += self._words in frame


@pytest.mark.long
def test_executors_on_two_hosts_know_the_driver_and_nobody_reads_along(
    broker: EmbeddedBroker, cluster: Cluster, hosts: Network, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    eavesdropper = Eavesdropper(hosts, b"org.apache.spark.")  # in all of Spark's messages, where they are not encrypted
    job = job_on(cluster, broker, topic, tmp_path)
    collector = Collector(pulsar_client).collect(f"{topic}-a")
    producer = pulsar_client.create_producer(topic, batching_enabled=False)
    sent: dict[str, int] = {}
    try:
        job.start()
        for i in range(200):
            sent[f"m{i}"] = now() + 3_000 + 20 * i
            producer.send_async(b"m%d" % i, None, properties={"deliverAt": str(sent[f"m{i}"])})
        producer.flush()
        wait_until(lambda: len(collector.received[f"{topic}-a"]) >= len(sent), 60, f"all messages\n{job.log}")
        check_exactly_once(sent, collector.received[f"{topic}-a"])
        eavesdropper.stop()  # who has no secret speaks in the clear
        assert cluster.start_stranger(hosts.hosts[0])
        assert job.terminate() == 0
    finally:
        eavesdropper.stop()
        collector.stop()
        job.stop()
    assert eavesdropper.n_bytes > 100_000
    assert eavesdropper.n_found == 0


def job_on(cluster: Cluster, broker: EmbeddedBroker, topic: str, folder: Path) -> Job:
    spark: dict[str, Any] = {
        "master": cluster.master,
        "conf": {
            "spark.driver.host": cluster.address,
            "spark.driver.bindAddress": cluster.address,
            "spark.executor.memory": "512m",
            "spark.authenticate.secret": SECRET,
        },
    }
    routes = [{"source": topic, "subscriptions": [{"name": "a"}]}]
    tracker = {"max_seal_interval_millis": 1500, "load_ahead_millis": 6000}
    return Job(folder, broker.settings, routes, spark=spark, tracker=tracker, release={"lanes": 2})


@pytest.mark.chaos
def test_a_lost_worker_loses_doubles_and_hurries_nothing(
    broker: EmbeddedBroker, cluster: Cluster, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    """Then the job goes on from its checkpoint by spark-submit, as the image's entry point starts it."""
    job = job_on(cluster, broker, topic, tmp_path)
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
            "SPARK_DRIVER_BIND_ADDRESS": cluster.address,
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
