"""A long resume on the running job: rounds in order, with a kill -9, a pause and a cancel in the middle of it."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from tests.support.service.harness import Collector, Job, now, wait_until
from warehouse.audit.accounts import run_audit
from warehouse.queries.drained_rows import ROUND_BYTES

N, SIZE, KEYS = 300, 200_000, 4


@pytest.mark.long
def test_what_a_pause_has_held_back_goes_out_in_rounds_and_what_waits_can_be_cancelled(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    names = ("ordered", "other")
    subscriptions = [{"name": "ordered", "order": "key"}, {"name": "other"}]
    routes: list[dict[str, Any]] = [{"source": topic, "subscriptions": subscriptions}]
    job = Job(tmp_path, broker.settings, routes, spark={"conf": {"spark.driver.memory": "520m"}})
    for name in names:
        collector.collect(f"{topic}-{name}")
    noise = os.urandom(SIZE)
    ids: list[pulsar.MessageId] = []
    producer = pulsar_client.create_producer(topic, batching_enabled=False)

    def send(due: int) -> None:
        n = len(ids)
        properties = {"deliverAt": str(due), "n": str(n)}
        ids.append(producer.send(noise, partition_key=f"k{n % KEYS}", properties=properties))

    def came(name: str) -> list[tuple[str, int]]:
        return [(one.key, int(one.properties["n"])) for one in list(collector.received[f"{topic}-{name}"])]

    def command(*arguments: str) -> str:
        done = job.command("topics", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pause(*of: str, ends: bool = False) -> None:
        for name in of:
            command("resume" if ends else "pause", topic, "-s", name)

    def left(name: str) -> int:
        status = json.loads(job.command("status", "--output", "json").stdout)
        return int(status["resuming"].get(topic, {}).get(name, [0, 0])[0])

    try:
        job.start()
        pause(*names)
        due = now() + 1_000
        for i in range(N):
            send(due + i)
        where = f"deliver_at > {due + 10**11} AND operation = 'DELAY'"
        rows = f"SELECT count(*) AS n FROM {{table}} WHERE {where}"
        wait_until(lambda: job.rows("delayed_index", rows)[0]["n"] >= 2 * N, 120, f"all held back\n{job.log}")
        assert not came("ordered") + came("other")

        pause(*names, ends=True)
        wait_until(lambda: left("ordered") > 0, 60, "its progress")
        assert "that were held back for ordered are still to go out" in job.command("status").stdout
        wait_until(lambda: len(came("ordered")) >= N // 6, 120, f"a part\n{job.log}")
        job.kill9()
        job.stop()
        assert len(came("ordered")) < N, "the machine is too fast for this test"
        send(now() - 1)  # behind all others of its key
        job.start()
        pause("ordered")
        last = N - 1
        position = f"{ids[last].ledger_id()}:{ids[last].entry_id()}"
        assert (f"k{last % KEYS}", last) not in came("ordered")
        done = command("skip-messages", topic, "-s", "ordered", "--messageId-triplet", position)
        assert "APPLIED" in done, done
        so_far = len(came("ordered"))
        pause("ordered", ends=True)
        wait_until(lambda: len(came("ordered")) >= N and len(came("other")) >= N + 1, 240, f"all\n{job.log}")
        assert so_far < N
        assert Counter(came("other")) == Counter((f"k{n % KEYS}", n) for n in range(N + 1))
        assert Counter(came("ordered")) == Counter((f"k{n % KEYS}", n) for n in range(N + 1) if n != last)
        for key in range(KEYS):
            of_key = [n for k, n in came("ordered") if k == f"k{key}"]
            assert of_key == sorted(of_key)
        # The first round of one may be in the batch of the next round of another.
        sql = "SELECT batch_id, count(*) AS n FROM {table} GROUP BY batch_id"
        assert max(row["n"] for row in job.rows("deliveries", sql)) <= 2 * ROUND_BYTES // SIZE + 3
        wait_until(
            lambda: json.loads(job.command("status", "--output", "json").stdout)["resuming"] == {}, 30, "the end"
        )
        wait_until(lambda: run_audit(job.settings).is_clean, 60, "an audit without findings")
        assert job.terminate() == 0
    finally:
        job.stop()
