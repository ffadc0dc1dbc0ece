"""A job that slept while another took over, and a checkpoint that was put back: nothing lost, nothing twice."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from broker.client import connect
from broker.standalone import EmbeddedBroker
from streaming.checkpoint.checkpoint import Checkpoint
from tests.conftest import PROGRAM, RUN_SECONDS
from tests.support.service.harness import Collector, Job, check_exactly_once, http, now, wait_until
from warehouse.audit.accounts import run_audit
from warehouse.delta.tables import Tables

TOPIC = "persistent://public/default/fenced"


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """Takes clients that say nothing for dead after some seconds."""
    broker = EmbeddedBroker(tmp_path / "broker", {"keepAliveIntervalSeconds": "4"})
    broker.start(port=0, http_port=0)
    yield broker
    broker.kill()


@contextlib.contextmanager
def paused(job: Job) -> Iterator[None]:
    """All processes of a job stand still, as if their machine did."""
    assert job.process is not None
    processes = [psutil.Process(job.process.pid), *job.children()]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def last_tick(folder: Path) -> int:
    """The last tick of which deliveries are written down."""
    found = Tables(f"file:{folder}/warehouse").query("deliveries", "SELECT max(batch_id) AS tick FROM deliveries")
    return int(found["tick"][0].as_py())


def test_whoever_was_overtaken_ends_and_an_old_checkpoint_is_refused(
    own_broker: EmbeddedBroker, tmp_path: Path
) -> None:
    routes = [{"source": TOPIC, "subscriptions": [{"name": "a"}]}]
    jobs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        tracker = {"max_seal_interval_millis": 1500, "load_ahead_millis": 4000}
        warehouse = f"file:{tmp_path}/warehouse"
        jobs.append(Job(tmp_path / name, own_broker.settings, routes, warehouse=warehouse, tracker=tracker))
    first, second = jobs
    client = connect(own_broker.settings)
    collector = Collector(client).collect(f"{TOPIC}-a")
    came = collector.received[f"{TOPIC}-a"]
    sent: dict[str, int] = {}
    stopped = threading.Event()
    producer = client.create_producer(TOPIC, batching_enabled=False)

    def produce() -> None:
        chance = random.Random(3)
        while not stopped.wait(0.05):
            due = now() + chance.randrange(6_000)
            payload = f"m{len(sent)}"
            sent[payload] = due
            producer.send(payload.encode(), properties={"deliverAt": str(due)})

    producing = threading.Thread(target=produce, daemon=True)
    try:
        first.start()
        producing.start()
        wait_until(lambda: len(came) >= 40, 60, f"the first messages\n{first.log}")

        with paused(first):
            second.rebuild()
            second.start()
            before = len(came)
            wait_until(lambda: len(came) >= before + 100, 60, f"messages of the second job\n{second.log}")
        assert first.process is not None
        assert first.process.wait(RUN_SECONDS) == 1
        assert "has taken over the warehouse" in first.log.splitlines()[-1]

        with paused(second):  # so that the copy is of one moment
            shutil.copytree(tmp_path / "second" / "checkpoint", tmp_path / "copy")
        copied = Checkpoint(tmp_path / "copy").newest_offset()
        assert copied is not None
        wait_until(lambda: last_tick(tmp_path) > copied.tick + 3, 60, f"later ticks than the copy's\n{second.log}")
        second.kill9()
        second.stop()  # its JVM, too, which writes there as long as it lives
        shutil.rmtree(tmp_path / "second" / "checkpoint")
        shutil.copytree(tmp_path / "copy", tmp_path / "second" / "checkpoint")
        command = [str(PROGRAM), "--config", str(second.file), "run"]
        refused = subprocess.run(command, check=False, capture_output=True, text=True, timeout=RUN_SECONDS)
        assert refused.returncode == 1
        assert "went back" in refused.stderr
        assert "run `delaylake rebuild --discard-checkpoint`" in refused.stderr

        second.rebuild()
        second.start()
        before = len(came)
        wait_until(lambda: len(came) >= before + 50, 60, f"messages after the rebuild\n{second.log}")
        stopped.set()
        producing.join()
        wait_until(lambda: len(came) >= len(sent), 60, f"all messages\n{second.log}")
        check_exactly_once(sent, came)
        audit = wait_until(lambda: (a := run_audit(second.settings)).taken_in == len(sent) and a, 60, "all entries")
        assert audit.is_clean, audit.findings

        # The cluster is made anew while the job runs: what comes has positions that were read long ago.
        url = f"{own_broker.settings.admin_url}/admin/v2/{TOPIC.replace('://', '/')}/unload"
        for _ in range(10):  # so that it has got to ledgers that a new one does not have soon
            http.put(url).raise_for_status()
            producer.send(b"")
        wait_until(lambda: len(came) >= len(sent) + 10, 60, f"the last messages\n{second.log}")
        status = own_broker.status()
        own_broker.kill()
        shutil.rmtree(own_broker.data_dir)
        port, http_port = (int(str(u).rpartition(":")[2]) for u in (status.service_url, status.admin_url))
        own_broker.start(port, http_port)
        producer.send(b"in the new cluster")
        assert second.process is not None
        assert second.process.wait(RUN_SECONDS) == 1
        assert "the topic is of a new cluster" in second.log.splitlines()[-1]
    finally:
        stopped.set()
        collector.stop()
        for job in jobs:
            job.stop()
        client.close()
