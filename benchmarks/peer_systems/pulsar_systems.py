"""The job on an embedded broker, and that broker's own delayed delivery."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pulsar

from benchmarks import burst, on_time
from benchmarks.peer_systems import PENDING_FROM_MILLIS, PENDING_SPREAD_MILLIS, Peer, cpu_of
from benchmarks.pulsar_trackers import HEAP, heap, heap_mib, n_delayed, resident
from benchmarks.start import cpu_seconds
from broker.client import connect
from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Job, now, wait_until

TOPICS = ("paced", "burst", "pending")
WAIT_SECONDS = 120  # on an idle machine; a slow one gets some times as long


class PulsarsOwn(Peer):
    """Pulsar's delayed delivery, with the tracker that is the default."""

    is_native = True

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.broker = EmbeddedBroker(Path(self._folder.name) / "broker")
        with heap(HEAP):  # 434 MiB of it for 300,000 pending messages
            self.broker.start(port=0, http_port=0)

    def __exit__(self, *_: object) -> None:
        self.broker.kill()
        self._folder.cleanup()

    def source(self, name: str) -> str:
        return f"{on_time.NAMESPACE}/{name}"

    def destination(self, name: str) -> str:
        return self.source(name)

    def paced(self, rate: int, seconds: float) -> dict[str, Any]:
        source, destination = self.source("paced"), self.destination("paced")
        return on_time.run(self.broker.settings, source, destination, [on_time.Pace(rate, seconds)], self.is_native)

    def burst(self, n: int) -> dict[str, Any]:
        return burst.run(self.broker.settings, self.source("burst"), self.destination("burst"), n, self.is_native)

    def pend(self, n: int) -> None:
        topic, client = self.source("pending"), connect(self.broker.settings)
        try:
            client.subscribe(topic, "bench", consumer_type=pulsar.ConsumerType.Shared)
            self.send_pending(n)
            wait_until(lambda: n_delayed(self.broker, topic) == n, WAIT_SECONDS, "all are tracked")
        finally:
            client.close()

    def send_pending(self, n: int) -> None:
        due = now() + PENDING_FROM_MILLIS
        burst.produce(self.broker.settings, self.source("pending"), n, due, self.is_native, PENDING_SPREAD_MILLIS)

    def cpu_seconds(self) -> float:
        pid = self.broker.status().pid
        assert pid is not None
        return cpu_of(pid)

    def memory_mib(self) -> float:
        return heap_mib(self.broker)


class DelayLake(PulsarsOwn):
    """The job and its broker, together."""

    is_native = False

    def __init__(self) -> None:
        super().__init__()
        routes = [{"source": self.source(name), "subscriptions": [{"name": "a"}]} for name in TOPICS]
        self.job = Job(Path(self._folder.name), self.broker.settings, routes)
        self.job.start()

    def __exit__(self, *_: object) -> None:
        self.job.stop()
        super().__exit__()

    def destination(self, name: str) -> str:
        return f"{self.source(name)}-a"

    def pend(self, n: int) -> None:
        wait_until(lambda: self.job.progress[-1]["pending"] == 0, WAIT_SECONDS, "the burst is delivered")
        self.send_pending(n)
        wait_until(lambda: self.job.progress[-1]["pending"] == n, WAIT_SECONDS, "all are taken in")
        wait_until(lambda: self.job.progress[-1]["in_state"] == 0, WAIT_SECONDS, "all are in buckets")
        time.sleep(5)

    def cpu_seconds(self) -> float:
        return super().cpu_seconds() + sum(cpu_seconds(self.job).values())

    def memory_mib(self) -> float:
        return super().memory_mib() + resident(self.job)
