"""Measures the memory that a backlog of large messages in many partitions takes in the source process.

usage: many_partitions.py [PARTITIONS [MESSAGES [BYTES]]]

An embedded broker has MESSAGES (3) of BYTES (1,000,000) in each of PARTITIONS (1,000). The job's receivers take all of
them in; three times a second a batch takes what `ingest.max_bytes_per_batch` allows, and is committed before the next
one. Meanwhile a command a second is sent to the control topic. Prints one JSON object: seconds until all partitions are
subscribed, and until all messages are in batches; the most bytes that had come and were in no committed batch; the
process's memory (RSS) before, and the most; how late the last messages and the commands were.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pulsar

from broker.client import connect
from broker.position import START
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from conf.settings import Settings
from status.alerts import Alerts
from streaming.checkpoint.offset import Offset
from streaming.source.receivers import Receivers
from warehouse.delta.tables import Tables

TOPIC, CONTROL = "persistent://public/default/many", "persistent://public/default/many-control"
BATCH_SECONDS = 1 / 3
MIB = 1 << 20


def produce(client: pulsar.Client, settings: Settings, names: list[str], n: int, n_bytes: int) -> None:
    for name in names:
        client.subscribe(name, settings.pulsar.subscription, initial_position=pulsar.InitialPosition.Earliest).close()
        producer = client.create_producer(name, batching_enabled=False)
        for _ in range(n):
            producer.send(b"x" * n_bytes)
        producer.close()


class Looks:
    """Looks all the time how much is held, and how much memory the process has."""

    def __init__(self, receivers: Receivers) -> None:
        self._receivers = receivers
        self._process = psutil.Process()
        self.rss_before = self.rss = self._process.memory_info().rss
        self.held = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self.rss = max(self.rss, self._process.memory_info().rss)
            held = 0
            for receiver in list(self._receivers.open.values()):
                consumer, kept = receiver._consumer, getattr(receiver, "_received", None) or receiver._chunks  # type: ignore[attr-defined]
                held += kept.kept_bytes + (0 if consumer is None else consumer._flow.waiting_bytes)
            self.held = max(self.held, held)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


class Commands:
    """Sends a command a second."""

    def __init__(self, client: pulsar.Client) -> None:
        self._producer = client.create_producer(CONTROL)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(1):
            self._producer.send(str(time.time()).encode())

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def drain(receivers: Receivers, n: int, max_bytes: int) -> tuple[float, list[float]]:
    """Takes batches until all messages have come; returns (seconds, how late the commands were, in seconds)."""
    began, taken, late = time.monotonic(), 0, []
    positions: dict[str, str] = {}
    while taken < n:
        batch_ends, left = time.monotonic() + BATCH_SECONDS, max_bytes
        waiting = sorted(
            (r for r in list(receivers.open.values()) if r.waiting),
            key=lambda r: (not receivers.is_control(r), r.waiting),
        )
        for receiver in waiting:
            name = receiver.source.name
            end, n_messages, n_bytes = receiver.take_into_batch(20_000, left)
            rows = receiver.rows(START, end)
            if receivers.is_control(receiver):
                late += [time.time() - float(payload) for payload in rows["payload"].to_pylist()]
            else:
                taken, left = taken + n_messages, left - n_bytes
            positions[name] = str(end)
            if left <= 0:
                break
        time.sleep(max(0, batch_ends - time.monotonic()))
        receivers.forget(positions)
        receivers.acknowledge(dict(positions))
    return time.monotonic() - began, late


def main() -> None:
    given = [int(argument) for argument in sys.argv[1:]]
    partitions, n, n_bytes = given + [1_000, 3, 1_000_000][len(given) :]
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder))
        try:
            broker.start(port=0, http_port=0)
            settings = Settings(
                pulsar=broker.settings,
                warehouse=f"{folder}/warehouse",
                checkpoint=f"file:{folder}/checkpoint",
                control={"topic": CONTROL},  # type: ignore[arg-type]
                routes=[{"source": TOPIC, "subscriptions": [{"name": "a"}]}],  # type: ignore[arg-type]
            )
            with AdminClient(broker.settings) as admin:
                admin.create_partitioned_topic(TOPIC, partitions)
            client = connect(broker.settings)
            produce(client, settings, [f"{TOPIC}-partition-{i}" for i in range(partitions)], n, n_bytes)
            tables = Tables(settings.warehouse)
            tables.create()
            alerts = Alerts()
            receivers = Receivers(settings, tables, alerts, lambda: None)
            commands = Commands(client)
            commands.start()
            gc.collect()
            looks, began = Looks(receivers), time.monotonic()
            receivers.begin(Offset())
            subscribed = time.monotonic() - began
            seconds, late = drain(receivers, partitions * n, settings.ingest.max_bytes_per_batch)
            looks.end()
            commands.end()
            found = {
                "messages": partitions * n,
                "bytes": n_bytes,
                "begin_seconds": round(subscribed, 1),
                "seconds": round(seconds, 1),
                "mb_a_second": round(partitions * n * n_bytes / seconds / 1e6, 1),
                "held_mib": round(looks.held / MIB, 1),
                "rss_before_mib": round(looks.rss_before / MIB),
                "rss_mib": round(looks.rss / MIB),
                "command_seconds": round(max(late, default=0), 2),
                "alerts": [alert.text for alert in alerts.current()][:3],
            }
            receivers.stop()
            client.close()
        finally:
            broker.kill()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
