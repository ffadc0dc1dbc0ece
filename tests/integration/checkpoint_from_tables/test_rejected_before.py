"""What was rejected shortly before a checkpoint was lost comes again from Pulsar, and is rejected once all the same."""

from __future__ import annotations

from pathlib import Path

import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Collector, Job, now, wait_until
from warehouse.audit.accounts import run_audit


@pytest.mark.chaos  # tests/simulation has such crashes in each run
def test_a_message_that_was_rejected_before_a_rebuild_is_in_table_and_topic_once(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    rejects = f"{topic}-rejects"
    # No entry is durable before the job is killed, so all come again.
    tracker = {"max_seal_interval_millis": 300_000}
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}], tracker=tracker)
    collector.collect(rejects).collect(f"{topic}-a")
    producer = pulsar_client.create_producer(topic, batching_enabled=False)

    def send(payload: bytes, due: str) -> None:
        producer.send(payload, properties={"deliverAt": due})

    def rejected() -> list[bytes]:
        return [m.payload for m in list(collector.received[rejects])]

    try:
        job.start()
        for n in range(3):
            send(b"bad %d" % n, "not a time")
        wait_until(lambda: len(rejected()) == 3 and len(job.rows("rejects")) == 3, 60, "rejects")
        job.kill9()
        job.stop()
        job.rebuild()
        job.start()
        send(b"bad 3", "not a time")
        send(b"good", str(now()))
        wait_until(lambda: len(rejected()) >= 4 and collector.received[f"{topic}-a"], 60, "what was sent last")
        assert rejected() == [b"bad %d" % n for n in range(4)]
        assert sorted(row["payload"] for row in job.rows("rejects")) == [b"bad %d" % n for n in range(4)]
        wait_until(lambda: run_audit(job.settings).is_clean, 60, "an audit without findings")
        assert job.terminate() == 0
    finally:
        job.stop()
