"""A job whose disk becomes full: it says so before, reads no further, and goes on when there is room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Collector, Job, check_exactly_once, now, wait_until
from tests.support.service.small_disk import small_disk
from warehouse.audit.accounts import run_audit

LEAST = 32 << 20


@pytest.mark.long
def test_a_full_disk_loses_doubles_and_hurries_nothing(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    """Warehouse, checkpoint and the job's temporary files are on a disk of 256 MiB.

    Its log is on another: the test counts in it.
    """
    with small_disk(tmp_path / "disk", 256 << 20) as disk:
        job = Job(
            disk.folder,
            broker.settings,
            [{"source": topic, "subscriptions": [{"name": "a"}]}],
            ingest={"min_free_bytes": LEAST},
            tracker={"max_seal_interval_millis": 1500, "load_ahead_millis": 6000},
        )
        (disk.folder / "tmp").mkdir()
        (disk.folder / "job.log").symlink_to(tmp_path / "job.log")
        producer = pulsar_client.create_producer(topic, batching_enabled=False)
        collector.collect(f"{topic}-a")
        sent: dict[str, int] = {}

        def send(n: int, seconds: float) -> None:
            for _ in range(n):
                text = f"m{len(sent)}"
                sent[text] = now() + int(1000 * seconds)
                producer.send_async(text.encode(), None, properties={"deliverAt": str(sent[text])})
            producer.flush()

        def status() -> dict[str, Any]:
            found: dict[str, Any] = json.loads((disk.folder / "warehouse" / "_job_status.json").read_text())
            return found

        def alerts() -> dict[str, str]:
            return {t["name"]: t["text"] for t in status()["troubles"] if t["kind"] == "disk"}

        def arrived() -> int:
            return len({m.payload for m in collector.received[f"{topic}-a"]})

        try:
            job.start(("env", f"TMPDIR={disk.folder}/tmp", *_program()))
            assert not alerts()
            send(300, 1)
            wait_until(lambda: arrived() == len(sent), 30, "the first messages")

            disk.fill(int(1.6 * LEAST))
            wait_until(alerts, 10, "that the disk is short of room")
            assert f"with less than {LEAST:,} the source topics are not read" in str(alerts())
            send(300, 60)  # these come due while the disk is full
            send(300, 15)  # and these while the source topics are not read
            send(300, 1)
            wait_until(lambda: arrived() == 600, 30, "what comes while there is some room")

            disk.fill(LEAST // 2)
            wait_until(lambda: "are not read until there is room" in str(alerts()), 10, "that nothing is read")
            taken = status()["taken"]
            send(300, 1)
            wait_until(lambda: arrived() == 900, 60, "what was taken in before")
            assert status()["taken"] == taken
            assert status()["pending"] == 300
            assert job.command("status").returncode == 1

            def failures() -> int:
                """Of batches. Each leaves temporary files that the next start removes: the disk is filled again."""
                disk.fill()
                return _log(job).count("a disk is full, the job goes on when there is room")

            wait_until(lambda: failures() >= 1, 90, "a failed batch")
            send(300, 1)
            wait_until(lambda: failures() >= 3, 90, "that it fails again")
            assert job.process is not None
            assert job.process.poll() is None

            disk.make_room()
            wait_until(lambda: arrived() == len(sent), 90, f"all messages\n{job.log}")
            wait_until(lambda: not alerts(), 30, "no trouble any more")
            audit = wait_until(lambda: (a := run_audit(job.settings)).taken_in == len(sent) and a, 60, "all entries")
            assert audit.is_clean, audit.findings
            check_exactly_once(sent, collector.received[f"{topic}-a"])
            assert job.terminate() == 0, job.log
        finally:
            job.stop()


def _program() -> tuple[str, ...]:
    from tests.conftest import PROGRAM

    return (str(PROGRAM),)


def _log(job: Job) -> str:
    return (job.folder / "job.log").read_text(errors="replace")
