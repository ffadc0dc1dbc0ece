"""Schedule keys on the running job: replaced, kept and put off, by commands, after kill -9 and a lost checkpoint."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from status.job_status import read_status
from tests.support.service.harness import Api, Collector, Job, http, now, wait_until
from warehouse.audit.accounts import run_audit


@pytest.mark.chaos  # tests/simulation has such crashes in each run
def test_of_each_key_one_message_is_delivered_whatever_happens(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    routes = [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b", "type": "Exclusive"}]}]
    # Keys leave the state as soon as they can.
    tracker = {"max_seal_interval_millis": 1500, "shards": 2, "schedule_key_idle_millis": 0}
    job = Job(tmp_path, broker.settings, routes, tracker=tracker)
    for subscription in "ab":
        collector.collect(f"{topic}-{subscription}")
    producer = pulsar_client.create_producer(topic, block_if_queue_full=True)
    api = Api(job.file)

    def send(text: str, key: str, after: int, **properties: str) -> None:
        rule = {"scheduleKey": key, "deliverAfter": str(after), **properties}
        producer.send_async(text.encode(), lambda *_: None, properties=rule)

    def topics(*arguments: str) -> list[str]:
        run = job.command("topics", *arguments, "--output", "json")
        return sorted(outcome["result"] for outcome in json.loads(run.stdout))

    def arrived(subscription: str) -> Counter[str]:
        return Counter(m.payload.decode() for m in collector.received[f"{topic}-{subscription}"])

    def superseded() -> Counter[str]:
        rows = job.rows("outcomes", "SELECT * FROM {table} WHERE result = 'SUPERSEDED' AND subscription = 'a'")
        assert all(row["superseded_by"] for row in rows)
        return Counter(row["schedule_key"] for row in rows)

    def wait_until_cold(since: int) -> None:
        def are_cold() -> bool:
            status = read_status(job.settings.warehouse)
            return status is not None and status.started_at >= since and status.cold_schedule_keys == 5

        wait_until(are_cold, 60, f"all five keys have left the state\n{job.log}")

    try:
        job.start()
        hour = 3_600_000
        # Sealed, and replaced after the job was killed, and after its checkpoint was lost.
        for key in ("replaced", "kept", "put off", "cancelled", "moved"):
            send(f"{key} 1", key, hour)
        producer.flush()
        wait_until(
            lambda: len(job.rows("delayed_index", "SELECT * FROM {table} WHERE operation = 'DELAY'")) == 5, 40, "sealed"
        )
        wait_until_cold(0)
        job.kill9()
        send("replaced 2", "replaced", hour)
        send("put off 2", "put off", hour, scheduleMode="debounce", debounceMax="1d")
        producer.flush()
        job.start()
        wait_until(lambda: superseded() == Counter(["replaced", "put off"]), 60, f"two superseded\n{job.log}")
        job.kill9()
        job.rebuild()
        begun = now()
        job.start()
        wait_until_cold(begun)
        due = now() + round(90_000 * job.pace)
        for i in range(3_000):
            send(f"many {i}", "many", round(15_000 * job.pace))
        send("replaced 3", "replaced", due - now())
        send("kept 2", "kept", 5_000, scheduleMode="keep")
        send("put off 3", "put off", hour, scheduleMode="debounce", debounceMax="60s")
        producer.flush()
        wait_until(lambda: superseded()["many"] == 2_999, 60, f"all but one superseded\n{job.log}")
        wait_until(lambda: superseded()["put off"] == 2, 30, "put off")
        assert superseded() == Counter({"many": 2_999, "replaced": 2, "put off": 2, "kept": 1})

        assert topics("cancel-delayed-message", topic, "--schedule-key", "cancelled") == ["APPLIED", "APPLIED"]
        assert topics("cancel-delayed-message", topic, "--schedule-key", "nobody's") == ["NOT_FOUND", "NOT_FOUND"]
        path = f"{api.url}/admin/v2/{topic.replace('://', '/')}"
        for subscription in "ab":
            body = {"scheduleKeys": ["moved"], "deliverAt": due}
            moved = http.post(f"{path}/subscription/{subscription}/reschedule", json=body)
            assert moved.status_code == 204, moved.text
        assert topics("deliver-now", topic, "-s", "a", "--schedule-key", "kept") == ["APPLIED"]
        missing = http.post(f"{path}/cancelDelayedMessage", params={"scheduleKey": "nobody's"})
        assert missing.status_code == 404, missing.text
        wrong = http.post(f"{path}/acknowledgeMessage", params={"scheduleKey": "k", "ledgerId": 1})
        assert wrong.status_code == 412, wrong.text

        expected = Counter(["many 2999", "replaced 3", "put off 3", "moved 1"])
        wait_until(lambda: arrived("b") == expected, 120, f"what is due\n{job.log}")
        wait_until(lambda: arrived("a") == expected + Counter(["kept 1"]), 30, f"what is due\n{job.log}")
        time.sleep(3)
        assert arrived("b") == expected
        wait_until(lambda: run_audit(job.settings).taken_in == 3_010, 60, "all entries")
        audit = run_audit(job.settings)
        assert audit.is_clean, audit.findings
        assert {row["superseded"] for row in audit.counts} == {3_004}
        assert job.terminate() == 0
    finally:
        api.stop()
        job.stop()


def test_a_cancel_that_waits_meets_its_message_also_if_that_has_its_topics_first_key(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    """By its key the message goes to another shard than the one in which the cancel waits, for its id."""
    routes = [{"source": topic, "subscriptions": [{"name": "a"}]}]
    job = Job(tmp_path, broker.settings, routes, tracker={"shards": 2})
    collector.collect(f"{topic}-a")
    producer = pulsar_client.create_producer(topic, batching_enabled=False)
    due = now() + round(60_000 * job.pace)

    def results(*results: str) -> list[dict[str, object]]:
        named = ", ".join(f"'{result}'" for result in results)
        return job.rows("outcomes", f"SELECT * FROM {{table}} WHERE result IN ({named})")

    try:
        job.start()
        ledger = producer.send(b"without a key", properties={"deliverAt": str(due)}).ledger_id()
        named = "".join(f"{ledger}:{entry} {due}\n" for entry in range(1, 9))
        job.command("topics", "cancel-delayed-message", topic, "-s", "a", "--from-file", "-", stdin=named)
        wait_until(lambda: len(results("WAITING")) == 8, 60, f"eight that wait\n{job.log}")
        # Some of the keys are of another shard than the entries.
        for i in range(1, 9):
            producer.send(f"with key {i}".encode(), properties={"deliverAt": str(due), "scheduleKey": f"key {i}"})
        wait_until(lambda: len(results("APPLIED")) == 8, 60, f"all of them are applied\n{job.log}")
        arrived = collector.received[f"{topic}-a"]
        wait_until(lambda: arrived, 60 + (due - now()) / 1000, f"what was not cancelled\n{job.log}")
        time.sleep(2)
        assert [message.payload for message in arrived] == [b"without a key"]
        assert len(results("APPLIED", "NOT_FOUND", "TOO_LATE")) == 8
        audit = wait_until(lambda: (a := run_audit(job.settings)).taken_in == 9 and a, 60, "the entries")
        assert audit.is_clean, audit.findings
    finally:
        job.stop()
