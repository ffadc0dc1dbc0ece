"""kill -9 of each part in mid-run: nothing lost, nothing twice, nothing early."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.client import connect
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from conf.settings import local_path
from tests.support.clients import java_client
from tests.support.service.harness import Collector, Job, check_exactly_once, http, now, wait_until
from warehouse.audit.accounts import run_audit
from warehouse.delta.tables import Tables
from warehouse.maintenance.table_files import MERGES


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(tmp_path / "broker")
    broker.start(port=0, http_port=0)
    yield broker
    broker.kill()


def kill_driver(job: Job, broker: EmbeddedBroker) -> None:
    job.kill9()
    job.start()


def kill_worker(job: Job, broker: EmbeddedBroker) -> None:
    """One of Spark's Python workers, which may be sending."""
    workers = []
    for process in job.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "pyspark.worker" in " ".join(process.cmdline()) and not process.children():
                workers.append(process)
    with contextlib.suppress(psutil.NoSuchProcess):
        random.choice(workers).send_signal(signal.SIGKILL)


def kill_jvm(job: Job, broker: EmbeddedBroker) -> None:
    """Spark's JVM; without it the job ends, and whatever watches over it starts it again."""
    job.jvm().send_signal(signal.SIGKILL)
    assert job.process is not None
    wait_until(lambda: job.process is None or job.process.poll() is not None, 60, f"the job's end\n{job.log}")
    job.start()


def kill_broker(job: Job, broker: EmbeddedBroker) -> None:
    status = broker.status()
    port, http_port = (int(url.rsplit(":", 1)[1]) for url in (status.service_url or "", status.admin_url or ""))
    broker.kill()
    time.sleep(1)
    broker.start(port=port, http_port=http_port)


def lose_checkpoint(job: Job, broker: EmbeddedBroker) -> None:
    job.stop()
    job.rebuild()
    job.start()


def lose_power(job: Job, broker: EmbeddedBroker) -> None:
    """The last files in Spark's logs have their names, and no content: it does not force them to the disk."""
    job.kill9()
    query = Path(local_path(job.settings.checkpoint)) / "query"
    newest = max(int(file.name) for file in (query / "offsets").iterdir() if file.name.isdigit())
    for file in (query / "commits" / str(newest), query / "offsets" / str(newest + 1)):
        file.write_bytes(b"")
    job.start()


KILLS: dict[str, Callable[[Job, EmbeddedBroker], None]] = {
    "driver": kill_driver,
    "worker": kill_worker,
    "jvm": kill_jvm,
    "broker": kill_broker,
    "checkpoint": lose_checkpoint,
    "power": lose_power,
}

# As often as it can be, and so that much is removed while the test runs.
BUSY_MAINTENANCE: dict[str, Any] = {
    "maintain": {"interval_millis": 1000, "retention_interval_millis": 4000, "keep_versions_millis": 60_000},
    "retention": {"delayed_index_millis": 2000, "deliveries_millis": 1},
}


def crash_run(folder: Path, broker: EmbeddedBroker, kills: list[str], n: int, seed: int, pause: float) -> Job:
    """Messages to two subscriptions, one with a partitioned destination, while things are killed at random moments.

    Args:
        n: how many messages.
        pause: between two kills, at most, in seconds.

    Returns:
        the job, which has ended.
    """
    chance = random.Random(seed)
    topic, parts = "persistent://public/default/crash", "persistent://public/default/crash_parts"
    # What was sent and is not written down when the checkpoint is lost, is found as long as the broker has it: without
    # a retention it trims at its own restart what is consumed.
    retention = {"retentionTimeInMinutes": 60, "retentionSizeInMB": -1}
    http.post(
        f"{broker.settings.admin_url}/admin/v2/namespaces/public/default/retention", json=retention
    ).raise_for_status()
    with AdminClient(broker.settings) as admin:
        admin.create_partitioned_topic(parts, 3)
    routes = [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b", "destination": parts}]}]
    tracker = {"max_seal_interval_millis": 1000, "load_ahead_millis": 8000}
    job = Job(folder, broker.settings, routes, tracker=tracker, **BUSY_MAINTENANCE)
    client = connect(broker.settings)
    collector = Collector(client).collect(f"{topic}-a").collect(parts)
    sent: dict[str, int] = {}

    def produce() -> None:
        producer = client.create_producer(topic, batching_enabled=True, send_timeout_millis=0, block_if_queue_full=True)
        for i in range(n):
            delay = chance.choice([0, chance.uniform(0, 3), chance.uniform(3, 25)])
            due = now() + int(delay * 1000)
            sent[f"m{i}"] = due
            producer.send_async(
                f"m{i}".encode(), None, properties={"deliverAt": str(due)}, partition_key=f"{i % 9}" if i % 2 else None
            )
            if i % 50 == 0:
                time.sleep(0.2)
        producer.flush()

    try:
        job.start()
        producing = threading.Thread(target=produce, daemon=True)
        producing.start()
        tables = Tables(job.settings.warehouse)
        # Not each of them: on a slow machine rows may be removed before there are enough files to merge.
        merged = ("delayed_index", "deliveries")
        wait_until(lambda: any(tables.written(name, MERGES) > 0 for name in merged), 60, f"a merge\n{job.log}")
        for kill in kills:
            time.sleep(chance.uniform(1, pause))
            started = time.monotonic()
            KILLS[kill](job, broker)
            print(f"killed {kill}, on again after {time.monotonic() - started:.1f} s", flush=True)
        producing.join()
        wait_until(
            lambda: len(collector.received[f"{topic}-a"]) >= n and len(collector.received[parts]) >= n,
            120,
            f"all deliveries: { ({t: len(r) for t, r in collector.received.items()}) }\n{job.log}",
        )
        time.sleep(2)
        check_exactly_once(sent, collector.received[f"{topic}-a"])
        check_exactly_once(sent, collector.received[parts])
        audit = wait_until(lambda: (a := run_audit(job.settings)).taken_in == n and a, 60, f"{n} entries\n{job.log}")
        assert audit.is_clean, audit.findings
        assert max(Counter((r["subscription"], r["position"]) for r in job.rows("deliveries")).values()) == 1
        assert "maintenance of the tables failed" not in (folder / "job.log").read_text()
        assert job.terminate() == 0
        return job
    finally:
        collector.stop()
        job.stop()
        client.close()


def test_every_kind_of_crash_beside_maintenance_loses_doubles_and_hurries_nothing(
    own_broker: EmbeddedBroker, tmp_path: Path
) -> None:
    job = crash_run(tmp_path, own_broker, ["worker", "power", "broker", "jvm", "checkpoint"], 12_000, seed=7, pause=5)
    ended_at = now()
    done = job.command("maintain", "--output", "json")
    assert done.returncode == 0, done.stderr
    reports = {report["table"]: report for report in json.loads(done.stdout)}
    assert reports["deliveries"]["files_after"] < 40
    wait_until(lambda: now() > ended_at + BUSY_MAINTENANCE["retention"]["delayed_index_millis"], 10, "its retention")
    # The moves of what was held back while the broker was away go after what they moved.
    for _ in range(2):
        done = job.command("maintain")
        assert done.returncode == 0, done.stderr
    assert job.rows("delayed_index") == []
    assert run_audit(job.settings).is_clean


@pytest.mark.long
def test_what_is_cleared_at_a_crash_and_a_message_of_which_some_chunks_had_come(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    topic, chunked = "persistent://public/default/cleared", "persistent://public/slow/chunked"
    api = f"{broker.settings.admin_url}/admin/v2"
    http.put(f"{api}/namespaces/public/slow", json={}).raise_for_status()
    rate = {"publishThrottlingRateInMsg": 10, "publishThrottlingRateInByte": -1}
    http.post(f"{api}/namespaces/public/slow/publishRate", json=rate).raise_for_status()
    routes = [
        {"source": topic, "subscriptions": [{"name": "a"}]},
        {"source": chunked, "subscriptions": [{"name": "a", "destination": f"{topic}-chunked"}]},
    ]
    job = Job(tmp_path, broker.settings, routes, tracker={"max_seal_interval_millis": 1_000})
    client, admin = connect(broker.settings), AdminClient(broker.settings)
    collector = Collector(client).collect(f"{topic}-a").collect(f"{topic}-chunked")
    n, size = 1_000, 120_000
    spec = {"topic": chunked, "name": "chunked", "size": size, "chunk": 1_000}
    chunks = threading.Thread(target=java_client.produce, args=(broker.settings.service_url, [spec]))
    try:
        job.start()
        producer = client.create_producer(topic, batching_enabled=False, block_if_queue_full=True)
        received = collector.received[f"{topic}-a"]
        sent = {"m0": 0}
        producer.send(b"m0")
        wait_until(lambda: received, 60, "the first message: what is gone before it the job can't know of")
        chunks.start()
        wait_until(lambda: (found := admin.internal_stats(chunked)) and found.end[1] >= 20, 60, "some chunks")
        for i in range(1, n):
            if i == n // 2:
                producer.flush()
                job.kill9()
                assert chunks.is_alive(), "all chunks had come before the crash"
            sent[f"m{i}"] = due = now() + 20_000
            producer.send_async(f"m{i}".encode(), None, properties={"deliverAt": str(due)})
        producer.flush()
        http.post(f"{api}/{topic.replace('://', '/')}/subscription/delaylake/skip_all").raise_for_status()
        job.start()
        for i in range(n, n + 100):
            sent[f"m{i}"] = 0
            producer.send_async(f"m{i}".encode(), None)
        producer.flush()

        def lost() -> list[str]:
            rows = job.rows("rejects", "SELECT entry_id FROM {table} WHERE reason LIKE 'not seen%'")
            return [f"m{row['entry_id']}" for row in rows]

        wait_until(lambda: len(received) + len(lost()) >= len(sent), 90, f"all\n{len(received)} {job.log}")
        assert len(lost()) >= n // 2
        check_exactly_once({m: due for m, due in sent.items() if m not in set(lost())}, received)
        assert len(set(lost())) == len(lost())
        wait_until(lambda: collector.received[f"{topic}-chunked"], 60, f"the chunked message\n{job.log}")
        time.sleep(1)
        assert [len(m.payload) for m in collector.received[f"{topic}-chunked"]] == [size]
        wait_until(lambda: run_audit(job.settings).taken_in == len(received) + 1, 60, f"all is durable\n{job.log}")
        assert list(run_audit(job.settings).findings) == ["not_seen"]
        assert job.terminate() == 0
    finally:
        chunks.join(60)
        collector.stop()
        job.stop()
        admin.close()
        client.close()


@pytest.mark.long
def test_a_query_that_failed_does_not_begin_anew_where_the_checkpoint_was_removed(
    broker: EmbeddedBroker, topic: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    client = connect(broker.settings)
    collector = Collector(client).collect(f"{topic}-a")
    sent: dict[str, int] = {}
    try:
        job.start()
        producer = client.create_producer(topic)
        for i in range(50):
            sent[f"m{i}"] = due = now() + 200 * i
            producer.send(f"m{i}".encode(), properties={"deliverAt": str(due)})
        wait_until(lambda: len(collector.received[f"{topic}-a"]) > 10, 60, f"the first messages\n{job.log}")
        os.rename(local_path(job.settings.checkpoint), tmp_path / "removed")  # at once: the job goes on to write there
        # Spark notices nothing, and writes on: until its query fails.
        job.source_process().kill()
        assert job.process is not None
        wait_until(lambda: job.process is None or job.process.poll() is not None, 120, f"the job's end\n{job.log}")
        assert "was removed or replaced while the job ran" in job.log
        job.rebuild()
        job.start()
        wait_until(lambda: len(collector.received[f"{topic}-a"]) >= len(sent), 120, f"all messages\n{job.log}")
        time.sleep(2)
        check_exactly_once(sent, collector.received[f"{topic}-a"])
        assert job.terminate() == 0
    finally:
        collector.stop()
        job.stop()
        client.close()


@pytest.mark.chaos
def test_many_crashes(own_broker: EmbeddedBroker, tmp_path: Path) -> None:
    seed = int(os.environ.get("SEED", time.time()))
    kills = random.Random(seed).choices(list(KILLS), k=int(os.environ.get("KILLS", "10")))
    print(f"seed {seed}: {kills}")
    crash_run(tmp_path, own_broker, kills, 20_000 + 1_000 * len(kills), seed, pause=8)
