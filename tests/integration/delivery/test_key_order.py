"""Order per key on the running job: many keys, short notice, bursts, a kill -9 and a rebuild while they are sent."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from broker.client import connect
from broker.standalone import EmbeddedBroker
from tests.support.naive.key_order_history import Came, violations
from tests.support.service.harness import Collector, Job, Received, check_exactly_once, now, wait_until
from warehouse.audit.accounts import run_audit

TOPIC = "persistent://public/default/key_order"
KEYS, BURST, LAST_BURST = 300, 15_000, 6_000


def test_messages_of_a_key_come_in_the_order_of_their_times(tmp_path: Path, broker: EmbeddedBroker) -> None:
    routes: list[dict[str, Any]] = [
        {"source": TOPIC, "subscriptions": [{"name": "ordered", "order": "key"}, {"name": "other"}]}
    ]
    job = Job(tmp_path, broker.settings, routes, tracker={"max_seal_interval_millis": 3_000})
    client = connect(broker.settings)
    collector = Collector(client)
    for name in ("ordered", "other"):
        collector.collect(f"{TOPIC}-{name}")
    chosen = random.Random(19)
    sent: dict[str, int] = {}

    def received(name: str) -> list[Received]:
        return collector.received[f"{TOPIC}-{name}"]

    def send(due: int) -> None:
        payload, key = f"m{len(sent)}", f"k{chosen.randrange(KEYS)}"
        # The ordering key counts, where there is one.
        keys = {"partition_key": key} if chosen.random() < 0.5 else {"partition_key": payload, "ordering_key": key}
        sent[payload] = due
        producer.send_async(payload.encode(), None, properties={"deliverAt": str(due)}, **keys)

    def history(name: str) -> list[Came]:
        sql = f"SELECT position, batch_id FROM {{table}} WHERE subscription = '{name}'"
        ticks = {row["position"]: row["batch_id"] for row in job.rows("deliveries", sql)}
        came = []
        for one in received(name):
            position = one.properties["delaylake.messageId"]
            ids = tuple(int(n) for n in position.split(":"))
            key = (one.ordering_key or one.key).encode()
            due, was_due = int(one.properties["delaylake.deliverAt"]), sent[one.payload.decode()]
            if due == was_due:
                came.append(Came(key, due, ids, ticks[position]))
            else:  # parked, while the destination did not answer, as it may on a slow machine; the ids count no more
                came.append(Came(key, due, (), ticks[position], was_due))
        return came

    try:
        job.start()
        producer = client.create_producer(TOPIC, block_if_queue_full=True, batching_max_messages=50)
        for i in range(1_500):
            send(now() + chosen.choice([-200, 0, 100, 300, 800, 1_500, 3_000]) + chosen.randrange(200))
            if i % 30 == 0:
                time.sleep(0.1)
        burst_at, before = now() + 8_000, len(sent)
        for _ in range(BURST):
            send(burst_at + chosen.randrange(100))
        producer.flush()
        wait_until(lambda: len(received("ordered")) > before + 2_000, 60, f"the burst\n{job.log}")
        job.kill9()
        for _ in range(300):
            send(now() - chosen.randrange(2_000))
        producer.flush()
        job.start()
        for name in ("ordered", "other"):
            wait_until(lambda n=name: len(received(n)) >= len(sent), 120, f"all of {name}\n{job.log}")  # type: ignore[misc]
        sql = "SELECT count(*) AS n FROM {table}"
        wait_until(lambda: job.rows("deliveries", sql)[0]["n"] == 2 * len(sent), 60, "all of it written down")

        for name in ("ordered", "other"):
            check_exactly_once(sent, received(name))
        assert violations(history("ordered")) == []
        assert violations(history("other")), "the checker finds nothing, where shards are sent side by side"

        # What is durable does not come again after a rebuild: it keeps its order.
        burst_at, before = now() + round(25_000 * job.pace), len(sent)
        for _ in range(LAST_BURST):
            send(burst_at + chosen.randrange(100))
        producer.flush()
        taken_in = "SELECT coalesce(sum(batch_size), 0) AS n FROM {table}"
        wait_until(lambda: job.rows("entries", taken_in)[0]["n"] == len(sent), 25, "all of it durable")
        wait_until(lambda: len(received("ordered")) > before + 1_000, 60, f"the last burst\n{job.log}")
        job.kill9()
        job.rebuild()
        job.start()
        for name in ("ordered", "other"):
            wait_until(lambda n=name: len(received(n)) >= len(sent), 120, f"all of {name}\n{job.log}")  # type: ignore[misc]
        wait_until(lambda: job.rows("deliveries", sql)[0]["n"] == 2 * len(sent), 60, "all of it written down")
        for name in ("ordered", "other"):
            check_exactly_once(sent, received(name))
        assert violations(history("ordered")) == []
        wait_until(lambda: run_audit(job.settings).is_clean, 60, "an audit without findings")
    finally:
        collector.stop()
        job.stop()
        client.close()
