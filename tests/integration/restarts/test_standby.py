"""A second `delaylake run` that waits to take over: after a kill, and from a job that is told to stop."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pulsar

from broker.standalone import EmbeddedBroker
from status.job_status import read_status
from tests.conftest import PROGRAM, RUN_SECONDS
from tests.support.service.harness import Collector, Job, check_exactly_once, now, wait_until
from warehouse.audit.accounts import run_audit


def test_a_standby_takes_over_from_a_killed_job_and_from_one_that_is_told_to_stop(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    routes = [{"source": topic, "subscriptions": [{"name": "a"}]}]
    first, second, third, idle = jobs = [
        Job(tmp_path, broker.settings, routes, tracker={"max_seal_interval_millis": 1500}) for _ in range(4)
    ]
    collector.collect(f"{topic}-a")
    producer = pulsar_client.create_producer(topic)
    sent: dict[str, int] = {}
    stopped = threading.Event()

    def produce() -> None:
        while not stopped.wait(0.05):
            payload, due = f"m{len(sent)}", now() + 500 + len(sent) % 7 * 500
            producer.send(payload.encode(), properties={"deliverAt": str(due)})
            sent[payload] = due

    def delivers(job: Job) -> bool:
        """Whether a job has written down messages that were sent since now."""
        begin = now()
        wait_until(job.ready.is_set, 30, f"taken over\n{job.log}")
        wait_until(lambda: any(m.published_at > begin for m in collector.received[f"{topic}-a"]), 30, job.log)
        assert job.process is not None
        status = read_status(job.settings.warehouse)
        return status is not None and (status.state, status.process_id) == ("running", job.process.pid)

    producing = threading.Thread(target=produce, daemon=True)
    try:
        first.start()
        producing.start()
        second.start(is_standby=True)
        assert not second.ready.is_set()
        # Whoever is not a standby is refused, and harms nobody.
        command = [str(PROGRAM), "--config", str(first.file), "run"]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "another job runs on the checkpoint" in refused.stderr
        assert delivers(first)

        first.kill9()
        wait_until(lambda: delivers(second), 10, "the second one's status")
        third.start(is_standby=True)
        assert second.terminate() == 0
        wait_until(lambda: delivers(third), 10, "the third one's status")
        idle.start(is_standby=True)
        assert idle.terminate() == 0
        assert delivers(third)
        stopped.set()
        producing.join()
        wait_until(lambda: len(collector.received[f"{topic}-a"]) >= len(sent), 60, f"all\n{third.log}")
        time.sleep(1)
        check_exactly_once(sent, collector.received[f"{topic}-a"])
        wait_until(lambda: (audit := run_audit(third.settings)).is_clean and audit.taken_in == len(sent), 30, "clean")
        assert third.terminate() == 0
    finally:
        stopped.set()
        for job in jobs:
            job.stop()
