"""Shaped release on the running job: a rate and windows, through kill -9 and a lost checkpoint; others are unharmed."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from broker.client import connect
from broker.standalone import EmbeddedBroker
from tests.support.naive.rates import most_within
from tests.support.service.harness import Collector, Job, Received, check_exactly_once, now, wait_until
from warehouse.audit.accounts import run_audit

TOPIC = "persistent://public/default/shaped"
RATE, BURST, N = 50, 50, 500


def window_of(start: datetime) -> dict[str, Any]:
    return {"from": f"{start:%H:%M}", "to": f"{start + timedelta(hours=1):%H:%M}", "days": [f"{start:%A}"]}


def test_never_above_rate_and_burst_whatever_is_killed(tmp_path: Path, broker: EmbeddedBroker) -> None:
    # It opens so late that all of it has come in by then, and is open for as long as a slow machine may take.
    opening = datetime.fromtimestamp((now() // 60_000 + 2) * 60, UTC)
    routes: list[dict[str, Any]] = [
        {
            "source": TOPIC,
            "subscriptions": [
                {"name": "slow", "rate": {"messages_per_second": RATE, "burst": BURST}},
                {"name": "all"},
                {"name": "window", "windows": [window_of(opening)]},
            ],
        }
    ]
    job = Job(tmp_path, broker.settings, routes)
    client = connect(broker.settings)
    collector = Collector(client)
    for name in ("slow", "all", "window"):
        collector.collect(f"{TOPIC}-{name}")

    def received(name: str) -> list[Received]:
        return collector.received[f"{TOPIC}-{name}"]

    try:
        job.start()
        producer = client.create_producer(TOPIC)
        due = now() + round(6_000 * job.pace)
        sent = {f"m{i}": due for i in range(N)}
        for payload in sent:
            producer.send_async(payload.encode(), None, properties={"deliverAt": str(due), "delaylake.shapedFrom": "7"})
        producer.flush()

        wait_until(lambda: len(received("slow")) > BURST + RATE, 60, f"the first ones\n{job.log}")
        wait_until(lambda: len(received("all")) == N, 30, f"the other subscription's\n{job.log}")
        page = json.loads(job.command("pending", TOPIC, "--subscription", "slow", "--output", "json").stdout)
        waiting = [message for message in page["messages"] if message["deliverAt"] > now()]
        assert all(message["shapedFrom"] == due for message in waiting), waiting[:3]
        job.kill9()
        job.start()
        wait_until(lambda: len(received("slow")) > N // 2, 60, f"half of them\n{job.log}")
        job.stop()
        job.rebuild()
        job.start()
        wait_until(lambda: len(received("slow")) == N and len(received("window")) == N, 200, f"all\n{job.log}")
        time.sleep(2)

        for name in ("slow", "all", "window"):
            check_exactly_once(sent, received(name))
        # They are sent at their places, or later, and no faster than the rate.
        places = [int(m.properties["delaylake.deliverAt"]) for m in received("slow")]
        late = [m.published_at - place for m, place in zip(received("slow"), places, strict=True)]
        assert min(late) >= 0
        published = [m.published_at for m in received("slow")]
        assert most_within(published, 1_000) <= RATE + BURST
        told = Counter(m.properties.get("delaylake.shapedFrom") for m in received("slow"))
        assert set(told) <= {None, str(due)}
        assert told[str(due)] >= N - BURST
        assert all("delaylake.shapedFrom" not in m.properties for m in received("all"))
        assert min(m.published_at for m in received("window")) >= opening.timestamp() * 1000
        wait_until(lambda: run_audit(job.settings).is_clean, 60, "an audit without findings")
    finally:
        collector.stop()
        job.stop()
        client.close()
