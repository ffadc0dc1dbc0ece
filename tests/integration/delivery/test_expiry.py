"""Messages with an end on the running job: it is down over the end, paused, killed, and rebuilt."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import httpx
import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from status.job_status import read_status
from tests.support.service.harness import Collector, Job, now, wait_until
from warehouse.audit.accounts import run_audit

pytestmark = pytest.mark.long


def test_what_cannot_be_sent_by_its_end_expires_and_does_not_come(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    routes = [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b", "type": "Exclusive"}]}]
    job = Job(tmp_path, broker.settings, routes, tracker={"max_seal_interval_millis": 1500, "shards": 2})
    for subscription in "ab":
        collector.collect(f"{topic}-{subscription}")
    producer = pulsar_client.create_producer(topic, block_if_queue_full=True)
    ends: dict[str, int] = {}

    def send(name: str, n: int, after: int, **properties: object) -> None:
        given = {"deliverAfter": str(after), **{key: str(value) for key, value in properties.items()}}
        for i in range(n):
            ends[f"{name} {i}"] = now() + after + int(given["expireAfter"])
            producer.send(f"{name} {i}".encode(), properties=given)

    def arrived(subscription: str) -> Counter[str]:
        found = (m.payload.decode() for m in collector.received[f"{topic}-{subscription}"])
        return Counter(text.split()[0] for text in found)

    def expired(subscription: str) -> Counter[str]:
        sql = f"SELECT * FROM {{table}} WHERE result = 'EXPIRED' AND subscription = '{subscription}'"
        rows = job.rows("outcomes", sql)
        assert len({row["position"] for row in rows}) == len(rows)
        names = {row["position"]: row["entry_id"] for row in rows}
        found: Counter[str] = Counter()
        for row in rows:
            name = list(ends)[names[row["position"]]]
            found[name.split()[0]] += 1
            assert row["applied_at"] >= ends[name] - 1_000, "never before its end, but for what sending has taken"
        return found

    def is_sealed(n: int) -> bool:
        sql = "SELECT * FROM {table} WHERE operation = 'DELAY' AND subscription IS NULL AND expires_at IS NOT NULL"
        return len(job.rows("delayed_index", sql)) >= n

    job.start()
    try:
        assert job.command("topics", "pause", topic, "-s", "a").returncode == 0
        send("parked", 10, 2_000, expireAfter=8_000)
        wait_until(lambda: arrived("b")["parked"] == 10, 40, f"b gets it\n{job.log}")
        wait_until(lambda: expired("a")["parked"] == 10, 40, f"it expires while a is paused\n{job.log}")

        # Parked when the job is killed, and when its checkpoint is lost; and due while it is down.
        after = round(20_000 * job.pace)
        send("rebuilt", 10, 1_000, expireAfter=after)
        send("down", 10, after // 2, expireAfter=3_000)
        wait_until(lambda: arrived("b")["rebuilt"] == 10, 40, "b gets it")
        wait_until(lambda: is_sealed(10), 40, f"sealed\n{job.log}")
        listed = json.loads(job.command("pending", topic, "--output", "json").stdout)["messages"]
        assert {message["expiresAt"] - message["deliverAt"] for message in listed if message["deliverAt"]} >= {3_000}
        time.sleep(2)  # what is parked is sealed, too
        job.kill9()
        send("late", 5, 0, expireAfter=1_000)
        wait_until(lambda: now() > max(ends.values()) + 1_000, 90, "all have ended")
        job.rebuild()
        job.start()
        everything = Counter({"parked": 10, "rebuilt": 10, "down": 10, "late": 5})
        wait_until(lambda: expired("a") == everything, 60, f"all expire for a: {expired('a')}\n{job.log}")
        assert expired("b") == Counter({"down": 10, "late": 5})

        assert job.command("topics", "resume", topic, "-s", "a").returncode == 0
        send("in time", 5, 3_000, expireAfter=30_000)
        wait_until(lambda: arrived("a")["in"] == 5, 40, f"a gets what comes in time\n{job.log}")
        time.sleep(2)
        assert arrived("a") == Counter({"in": 5})
        assert arrived("b") == Counter({"parked": 10, "rebuilt": 10, "in": 5})
        status = read_status(job.settings.warehouse)
        assert status is not None
        assert status.expired >= 30, "counted since the job was started"
        wait_until(lambda: run_audit(job.settings).taken_in == 40, 60, "all entries")
        audit = run_audit(job.settings)
        assert audit.is_clean, audit.findings
        assert {row["subscription"]: row["expired"] for row in audit.counts} == {"a": 35, "b": 15}
        assert job.terminate() == 0
    finally:
        job.stop()


def test_the_admin_api_takes_an_end(broker: EmbeddedBroker, topic: str, tmp_path: Path, collector: Collector) -> None:
    from tests.support.service.harness import Api

    routes = [{"source": topic, "subscriptions": [{"name": "a", "expire_after": "2s"}]}]
    job = Job(tmp_path, broker.settings, routes, tracker={"max_seal_interval_millis": 1500})
    collector.collect(f"{topic}-a")
    job.start()
    api = Api(job.file)
    try:
        path = f"{api.url}/admin/v2/{topic.replace('://', '/')}"

        def post(**body: object) -> httpx.Response:
            return httpx.post(f"{path}/delayed", json={"payload": "x", **body}, timeout=30)

        assert post(deliverAt=2_000, expireAt=1_000).status_code == 422
        assert post(expireAfter="no").status_code == 422
        past = post(expireAt=now() - 1_000)
        assert past.status_code == 201, past.text
        coming = post(deliverAfter="3s", expireAfter="1h")
        assert coming.status_code == 201, coming.text
        wait_until(lambda: len(collector.received[f"{topic}-a"]) == 1, 40, f"it comes\n{job.log}")
        [gone] = wait_until(
            lambda: job.rows("outcomes", "SELECT * FROM {table} WHERE result = 'EXPIRED'"), 20, "it expires"
        )
        assert gone["position"] == past.json()["messageId"]
        [came] = collector.received[f"{topic}-a"]
        assert came.properties["delaylake.expiresAt"] == str(coming.json()["deliverAt"] + 3_600_000)
    finally:
        api.stop()
        job.stop()
