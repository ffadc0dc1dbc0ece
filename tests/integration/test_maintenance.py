"""Maintenance beside the running job: again and again, through a crash and a lost checkpoint."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import pulsar

from broker.standalone import EmbeddedBroker
from tests.conftest import Run
from tests.harness import Collector, Job, check_exactly_once, now, wait_until
from warehouse.audit.accounts import run_audit
from warehouse.maintenance.table_files import MERGES
from warehouse.tables import Tables

N = 6_000


def test_maintenance_beside_the_job_loses_doubles_and_stalls_nothing(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, delaylake: Run
) -> None:
    job = Job(
        tmp_path,
        broker.settings,
        [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b"}]}],
        tracker={"max_seal_interval_millis": 500, "load_ahead_millis": 2000},
        maintain={"interval_millis": 1000, "retention_interval_millis": 4000, "keep_versions_millis": 60_000},
        retention={"delayed_index_millis": 2000, "deliveries_millis": 1},
    )
    collector = Collector(pulsar_client).collect(f"{topic}-a").collect(f"{topic}-b")
    chance = random.Random(11)
    sent: dict[str, int] = {}

    def produce() -> None:
        producer = pulsar_client.create_producer(topic, block_if_queue_full=True)
        for i in range(N):
            sent[f"m{i}"] = now() + int(chance.uniform(0, 45_000))
            producer.send_async(f"m{i}".encode(), None, properties={"deliverAt": str(sent[f"m{i}"])})
            if i % 20 == 0:
                time.sleep(0.1)
        producer.flush()

    try:
        job.start()
        producing = threading.Thread(target=produce)
        producing.start()
        tables = Tables(job.settings.warehouse)
        for name in ("delayed_index", "deliveries"):
            wait_until(lambda name=name: tables.written(name, MERGES) > 0, 60, f"{name} merged\n{job.log}")  # type: ignore[misc]
        job.kill9()
        job.start()
        producing.join()
        job.stop()
        rebuilt = delaylake("--config", str(job.file), "rebuild", "--discard-checkpoint")
        assert rebuilt.returncode == 0, rebuilt.stderr
        job.start()
        wait_until(
            lambda: all(len(collector.received[f"{topic}-{s}"]) >= N for s in "ab"), 150, f"all deliveries\n{job.log}"
        )
        time.sleep(2)
        for subscription in "ab":
            check_exactly_once(sent, collector.received[f"{topic}-{subscription}"])
        audit = wait_until(lambda: (a := run_audit(job.settings)).taken_in == N and a, 60, f"{N} entries\n{job.log}")
        assert audit.is_clean, audit.findings
        assert "failed" not in job.log
        assert job.terminate() == 0

        done = delaylake("--config", str(job.file), "maintain", "--output", "json")
        assert done.returncode == 0, done.stderr
        reports = {report["table"]: report for report in json.loads(done.stdout)}
        wait_until(lambda: now() > max(sent.values()) + 2000, 10, "all past its retention")
        done = delaylake("--config", str(job.file), "maintain")
        assert done.returncode == 0, done.stderr
        assert tables.sql("SELECT * FROM delayed_index").num_rows == 0
        assert reports["deliveries"]["files_after"] < 40
        assert run_audit(job.settings).is_clean
    finally:
        collector.stop()
        job.stop()
