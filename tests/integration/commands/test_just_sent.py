"""What has only just been sent is listed: on the command line, over HTTP and by both clients; and then it is not."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pulsar
import pytest
from delaylake import AsyncClient, Client

from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Api, Collector, Job, http, now, wait_until

pytestmark = pytest.mark.long


def test_what_is_due_in_ten_seconds_is_listed_until_it_is_delivered(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    routes = [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b"}]}]
    job = Job(tmp_path, broker.settings, routes)
    collector = Collector(pulsar_client).collect(f"{topic}-a").collect(f"{topic}-b")
    job.start()
    api = Api(job.file)
    try:
        path = f"{api.url}/admin/v2/{topic.replace('://', '/')}"

        def over_http(**query: str) -> list[dict[str, Any]]:
            answer = http.get(f"{path}/delayed", params={"dueFrom": str(now() - 60_000), **query})
            assert answer.status_code == 200, answer.text
            assert "note" not in answer.json()
            found: list[dict[str, Any]] = answer.json()["messages"]
            return found

        due = now() + round(30_000 * job.pace)
        sent = json.loads(
            job.command(
                "produce", topic, "-m", "soon", "--deliver-at", str(due), "--key", "k", "--output", "json"
            ).stdout
        )
        wait_until(lambda: len(over_http()) == 1, 5, "listed at once over HTTP")
        [found] = json.loads(job.command("pending", topic, "--output", "json").stdout)["messages"]
        assert (found["messageId"], found["deliverAt"], found["key"]) == (sent[0], due, "k")
        assert found["subscriptions"] == ["a", "b"]
        with Client(api.url) as lake:
            assert [str(m.id) for m in lake.pending(topic, key="k")] == sent
            assert not list(lake.pending(topic, key="another"))
            assert [str(m.id) for m in lake.pending(topic, subscription="b")] == sent
            state = lake.get(topic, sent[0])
            assert state.waiting_for

        async def asynchronously() -> list[str]:
            async with AsyncClient(api.url) as other:
                return [str(m.id) async for m in other.pending(topic)]

        assert asyncio.run(asynchronously()) == sent
        assert now() < due, "all of this was while it waits"
        arrived = lambda: sum(len(collector.received[f"{topic}-{name}"]) for name in "ab") == 2  # noqa: E731
        wait_until(arrived, 60, f"it comes\n{job.log}")
        wait_until(lambda: not over_http(), 3, f"it is not listed any more\n{job.log}")

        # Never in the delayed index, perhaps, and delivered ten seconds after.
        producer = pulsar_client.create_producer(topic)
        for i in range(5):
            properties = {"deliverAfter": str(round(10_000 * job.pace))}
            producer.send_async(str(i).encode(), lambda *_: None, properties=properties)
        producer.flush()
        time.sleep(1.5)  # the API gives what it has read again for a second
        first = over_http()
        assert len(first) == 5
        text = job.command("pending", topic).stdout
        assert all(message["messageId"] in text for message in first if message["deliverAt"] > now())
        wait_until(lambda: not over_http(), 60, f"all are delivered\n{job.log}")
        assert sum(len(collector.received[f"{topic}-{name}"]) for name in "ab") == 12

        # While the job is down, what comes in is listed, too; pages have each message once.
        assert job.terminate() == 0
        later = now() + 3_600_000
        for i in range(7):
            producer.send_async(b"x", lambda *_: None, properties={"deliverAt": str(later + i)})
        producer.flush()
        time.sleep(1.5)  # the API gives what it has read again for a second
        pages, cursor = [], None
        while True:
            page = http.get(f"{path}/delayed", params={"limit": 3, **({"cursor": cursor} if cursor else {})}).json()
            pages += [message["deliverAt"] for message in page["messages"]]
            if (cursor := page["nextCursor"]) is None:
                break
        assert pages == [later + i for i in range(7)]

        # A filter does not match it yet, and says so.
        for change in ("cancel", "deliverNow"):
            body = {"filter": {"dueFrom": later, "dueBefore": later + 6}, "dryRun": True}
            answer = http.post(f"{path}/subscription/a/{change}", json=body).json()
            assert answer["matched"] == 0
            assert answer["note"].startswith("6 more were sent within the last seconds")
        dry_run = ("topics", "cancel-by-filter", topic, "--due-after", str(later), "--dry-run")
        said = job.command(*dry_run)
        assert "note: 7 more were sent within the last seconds" in said.stderr
        assert said.stdout.splitlines()[0] == "0 messages match"
        assert json.loads(job.command(*dry_run, "--output", "json").stdout)["note"].startswith("7 more were sent")
    finally:
        collector.stop()
        api.stop()
        job.stop()
