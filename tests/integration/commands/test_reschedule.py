"""Reschedule, deliver now, restore, pause and resume, over HTTP and on the command line."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pulsar

from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Api, Collector, Job, http, now, wait_until
from warehouse.audit.accounts import run_audit


def test_what_operators_ask_for_is_done_over_http_and_on_the_command_line(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    routes = [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b"}]}]
    job = Job(tmp_path, broker.settings, routes, tracker={"max_seal_interval_millis": 1500})
    for subscription in "ab":
        collector.collect(f"{topic}-{subscription}")
    api = Api(job.file)

    def post(operation: str, content: Any = None, subscription: str = "a") -> httpx.Response:
        path = f"{api.url}/admin/v2/{topic.replace('://', '/')}/subscription/{subscription}/{operation}"
        return http.post(path, json=content)

    def topics(*arguments: str) -> subprocess.CompletedProcess[str]:
        return job.command("topics", *arguments)

    def pending(*arguments: str) -> Any:
        return json.loads(job.command("pending", topic, *arguments, "--output", "json").stdout)

    def arrived(subscription: str) -> Counter[str]:
        return Counter(m.payload.decode() for m in collector.received[f"{topic}-{subscription}"])

    try:
        job.start()
        producer = pulsar_client.create_producer(topic)
        due = str(now() + 3_600_000)

        def send(text: str) -> str:
            message_id = producer.send(text.encode(), properties={"deliverAt": due})
            return f"{message_id.ledger_id()}:{message_id.entry_id()}"

        at_once, soon, by_hand, cancelled = send("at once"), send("soon"), send("by hand"), send("taken")
        batched = pulsar_client.create_producer(topic, batching_enabled=True, batching_max_publish_delay_ms=2_000)
        ids: list[pulsar.MessageId] = []
        for i in range(3):
            batched.send_async(f"batch {i}".encode(), lambda _, m: ids.append(m), properties={"deliverAt": due})
        batched.flush()
        wait_until(lambda: len(ids) == 3, 10, "ids of a batch")
        entry = f"{ids[0].ledger_id()}:{ids[0].entry_id()}"

        first = post("deliverNow", [at_once])
        assert first.status_code == 204, first.text
        assert post("reschedule", {"messageIds": [soon, f"{entry}:1"], "deliverAt": now() + 3_000}).status_code == 204
        moved = topics("reschedule", topic, "-s", "b", "--messageId-triplet", by_hand, "--deliver-after", "2s")
        assert moved.returncode == 0, moved.stderr
        wait_until(lambda: arrived("a") == Counter(["at once", "soon", "batch 1"]), 20, f"what was moved\n{job.log}")
        wait_until(lambda: arrived("b") == Counter(["by hand"]), 20, f"what was moved for b\n{job.log}")
        assert post("postpone", {"messageIds": [cancelled], "byMillis": 60_000}).status_code == 204
        later = ("--key", "none", "--dry-run", "--output", "json")
        assert json.loads(topics("postpone", topic, "-s", "a", "--by", "30m", *later).stdout)["matched"] == 0
        sooner = topics("postpone", topic, "-s", "a", "--by=-60s", "--messageId-triplet", cancelled, "--output", "json")
        assert [o["result"] for o in json.loads(sooner.stdout)] == ["APPLIED"], sooner.stderr
        by_filter = {"filter": {"dueFrom": int(due), "dueBefore": int(due) + 1}, "byMillis": 1_000, "dryRun": True}
        # That one, what was moved for b alone, and the rest of the batch.
        wait_until(lambda: post("postpone", by_filter).json()["matched"] == 4, 20, f"what is due in an hour\n{job.log}")
        assert post("postpone", by_filter | {"dryRun": False}).json() == {"matched": 4, "applied": 4, "tooLate": 0}
        late = post("reschedule", {"messageIds": [soon], "deliverAt": now() + 9_000})
        assert (late.status_code, "TOO_LATE" in late.json()["reason"]) == (412, True)

        # A whole entry of a batch is answered when each of its messages is: one of them has come already.
        part = post("deliverNow", [entry])
        assert (part.status_code, "(2 of 3 done)" in part.json()["reason"]) == (412, True)
        assert post("skipByMessageIds", [cancelled]).status_code == 204
        assert post("deliverNow", [cancelled]).status_code == 412
        restored = topics("restore", topic, "-s", "a", "--messageId-triplet", cancelled, "--output", "json")
        assert [o["result"] for o in json.loads(restored.stdout)] == ["APPLIED"]
        assert post("deliverNow", [cancelled]).status_code == 204

        assert post("pause", subscription="b").status_code == 204
        assert post("reschedule", {"messageIds": [soon], "deliverAt": now() + 1_000}, "b").status_code == 204
        wait_until(lambda: arrived("a").total() == 6, 20, f"the rest of the batch, and what was restored\n{job.log}")
        time.sleep(4)
        assert arrived("b") == Counter(["by hand"])
        held = wait_until(
            lambda: [r for r in job.rows("delayed_index") if r["operation"] == "DELAY" and r["sequence"]], 20, "held"
        )
        assert {(r["subscription"], r["payload"]) for r in held} >= {("b", b"soon")}
        listed = pending("--state", "held", "-s", "b")["messages"]
        ids = [f"{m['ledgerId']}:{m['entryId']}" for m in listed]
        assert (ids, [(m["isHeld"], m["deliverAt"]) for m in listed]) == ([soon], [(True, None)])
        stats = {s["subscription"]: s for s in pending("--stats")["subscriptions"]}
        assert {name: (s["isPaused"], s["held"]) for name, s in stats.items()} == {
            "a": (False, 0),
            "b": (True, 1),
        }
        told = job.command("status").stdout.splitlines()
        assert f"paused: {topic}: what is due for b is held back" in told
        resumed = topics("resume", topic, "-s", "b")
        assert resumed.returncode == 0, resumed.stderr
        wait_until(lambda: arrived("b") == Counter(["by hand", "soon"]), 20, f"what was held back\n{job.log}")

        for operation, content in (("reschedule", {"messageIds": []}), ("reschedule", [soon]), ("restore", "no")):
            assert post(operation, content).status_code == 400
        assert post("pause", subscription="nobody").status_code == 404
        assert topics("reschedule", topic, "-s", "a", "--messageId-triplet", soon).returncode == 2
        wait_until(lambda: run_audit(job.settings).taken_in == 7, 30, "all entries")
        audit = run_audit(job.settings)
        assert audit.is_clean, audit.findings
        assert job.terminate() == 0
    finally:
        api.stop()
        job.stop()
