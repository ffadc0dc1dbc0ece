"""Everything on the machine is lost but the broker: the job goes on from a backup, and each message comes once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pulsar

from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Collector, Job, check_exactly_once, now, wait_until
from warehouse.audit.accounts import run_audit


def test_a_job_goes_on_from_a_backup_where_warehouse_and_checkpoint_are_lost(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    routes = [{"source": topic, "subscriptions": [{"name": "a"}]}]
    tracker = {"max_seal_interval_millis": 1_000, "load_ahead_millis": 3_000}
    (tmp_path / "lost").mkdir()
    job = Job(tmp_path / "lost", broker.settings, routes, tracker=tracker)
    control = f"{topic}_control"
    restored = Job(
        tmp_path,
        broker.settings,
        routes,
        tracker=tracker,
        warehouse=f"file:{tmp_path}/copy",
        control={"topic": control, "outcome_topic": f"{control}_outcomes"},
    )
    received = collector.collect(f"{topic}-a").received[f"{topic}-a"]
    producer = pulsar_client.create_producer(topic)
    sent: dict[str, int] = {}

    def send(first: int, n: int, span: int) -> None:
        for i in range(first, first + n):
            sent[f"m{i}"] = due = now() + i % n * span // n
            producer.send_async(f"m{i}".encode(), None, properties={"deliverAt": str(due)})
        producer.flush()

    def send_for_later(name: str, n: int) -> list[str]:
        due = str(now() + 3_600_000)
        ids = [producer.send(f"{name}{i}".encode(), properties={"deliverAt": due}) for i in range(n)]
        return [f"{m.ledger_id()}:{m.entry_id()}" for m in ids]

    def cancel(message: str) -> None:
        skipped = job.command("topics", "skip-messages", topic, "-s", "a", "--messageId-triplet", message)
        assert skipped.returncode == 0, skipped.stderr

    def acknowledged() -> tuple[int, int]:
        stats = admin.internal_stats(topic)
        return stats.acknowledged["delaylake"] if stats else (-1, -1)

    with AdminClient(broker.settings) as admin:
        try:
            job.start()
            later = send_for_later("before", 10)
            send(0, 300, 6_000)
            cancel(later[0])
            wait_until(lambda: run_audit(job.settings).taken_in == 310, 30, f"all is durable\n{job.log}")
            done = job.command("backup", f"file:{tmp_path}/copy", "--output", "json")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["newest_entry_age_millis"] > 0

            last = send_for_later("after", 5)[-1]
            send(300, 300, 3_000)
            cancel(later[1])
            cancel(last)
            wait_until(lambda: len(received) >= 500, 30, f"most messages\n{job.log}")
            newest = tuple(int(part) for part in last.split(":"))
            wait_until(lambda: acknowledged() >= newest, 30, f"what the backup lacks is acknowledged\n{job.log}")
            refused = restored.command("rebuild")
            assert (refused.returncode, "a job still reads it" in refused.stderr) == (1, True), refused.stderr
            job.stop()
            shutil.rmtree(tmp_path / "lost")
            send(600, 50, 1_000)

            restored.rebuild()
            restored.start()
            wait_until(lambda: {m.payload.decode() for m in received} >= sent.keys(), 60, f"all\n{restored.log}")
            wait_until(lambda: run_audit(restored.settings).taken_in == 665, 30, f"all is durable\n{restored.log}")
            check_exactly_once(sent, received)
            audit = run_audit(restored.settings)
            assert audit.is_clean, audit.findings

            def waiting() -> list[str]:
                listed = restored.command("pending", topic, "--limit", "100", "--output", "json").stdout
                return sorted(f"{m['ledgerId']}:{m['entryId']}" for m in json.loads(listed)["messages"])

            kept = 8 + 4
            wait_until(lambda: len(waiting()) == kept, 30, f"what waits\n{restored.log}")
            assert not {later[0], later[1], last} & set(waiting())
            again = restored.command("backup", f"file:{tmp_path}/another")
            assert again.returncode == 0, again.stderr
            assert restored.terminate() == 0
        finally:
            job.stop()
            restored.stop()
