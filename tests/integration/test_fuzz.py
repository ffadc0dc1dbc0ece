"""Random messages of Java and Python producers, with topics unloaded meanwhile: each arrives once, as it was."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pulsar
import pytest

from jobs.broker import EmbeddedBroker
from streaming.pulsar_client import AdminClient
from tests.fuzz import Fuzz, Producers, check, unload
from tests.harness import PATIENCE, Job, wait_until

SPAN_MILLIS = 30_000
UNLOAD_SECONDS = 3


def run(broker: EmbeddedBroker, client: pulsar.Client, topic: str, folder: Path, n: int) -> None:
    seed = int(os.environ.get("SEED") or random.randrange(2**32))
    print(f"seed {seed}: SEED={seed} runs it again")
    routes = Fuzz(seed, n, SPAN_MILLIS, topic)
    job = Job(
        folder,
        broker.settings,
        [{"source": source, "subscriptions": [{"name": "a"}]} for source in routes.topics],
        tracker={"load_ahead_millis": 2_000, "max_seal_interval_millis": 2_000},
    )
    with AdminClient(broker.settings) as admin:
        admin.create_partitioned_topic(routes.partitioned, 2)
    for source in routes.topics:  # so that the broker keeps what has been acknowledged
        for kept in (source, f"{source}-a"):
            client.subscribe(kept, "keep", initial_position=pulsar.InitialPosition.Earliest).close()
    job.start()
    try:
        fuzz = Fuzz(seed, n, SPAN_MILLIS, topic)
        producers = Producers(fuzz, broker.settings.service_url, client)
        chance = random.Random(seed)
        started = time.monotonic()
        while producers.are_busy:
            assert time.monotonic() - started < PATIENCE * (60 + n / 500), f"{len(producers.sent)} sent"
            time.sleep(UNLOAD_SECONDS)
            unload(broker.settings.admin_url, chance.choice(fuzz.topics) + chance.choice(["", "-a"]))
        producers.wait(60)

        def done() -> bool:
            counts = [
                job.rows(table, "SELECT count(*) AS n FROM {table}")[0]["n"] for table in ("deliveries", "rejects")
            ]
            return sum(counts) >= len(producers.sent)

        wait_until(done, SPAN_MILLIS / 1000 + 60 + n / 1_000, f"all came\n{job.log}")
        rejects = {
            row["position"]: row["reason"] for row in job.rows("rejects", "SELECT position, reason FROM {table}")
        }
        assert job.terminate() == 0
        found = check(fuzz, client, producers.sent, rejects)
        print(found, "refused by the client:", len(producers.refused), producers.refused[:3])
        assert found["delivered"] > 0.9 * n
    finally:
        job.stop()


def test_ten_thousand_messages(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    run(broker, pulsar_client, topic, tmp_path, 10_000)


@pytest.mark.chaos
def test_a_million_messages(broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path) -> None:
    run(broker, pulsar_client, topic, tmp_path, int(os.environ.get("MESSAGES") or 1_000_000))
