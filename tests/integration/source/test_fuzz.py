"""Random messages of Java and Python producers, with topics unloaded meanwhile: each arrives once, as it was."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest

from broker.client import connect
from broker.protocol.entries import NOT_DECRYPTED
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from status.alerts import NOT_SEEN_REASON
from tests.support.fuzzing.fuzz import OWN, Fuzz, Producers, unload
from tests.support.fuzzing.fuzz_check import Topics, check
from tests.support.service.harness import PATIENCE, Job, wait_until

SPAN_MILLIS = 20_000
UNLOAD_SECONDS = 3
QUIET_SECONDS = 25  # what was not seen is asked for every ten seconds


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """One with transactions."""
    broker = EmbeddedBroker(tmp_path / "broker", {"transactionCoordinatorEnabled": "true"})
    try:
        broker.start(port=0, http_port=0)
        yield broker
    finally:
        broker.kill()


def fuzz_with_some_seed(broker: EmbeddedBroker, topic: str, folder: Path, n: int, seed: int | None = None) -> None:
    seed = int(os.environ.get("SEED") or (random.randrange(2**32) if seed is None else seed))
    client = connect(broker.settings)
    try:
        run(Fuzz(seed, n, SPAN_MILLIS, topic, folder), broker, client)
    except Exception as error:
        raise AssertionError(f"SEED={seed} runs it again: {error}") from error
    finally:
        client.close()


def run(fuzz: Fuzz, broker: EmbeddedBroker, client: pulsar.Client) -> None:
    job = Job(
        fuzz.folder,
        broker.settings,
        [{"source": source, "subscriptions": [{"name": "a"}]} for source in fuzz.topics],
        tracker={"load_ahead_millis": 2_000, "max_seal_interval_millis": 2_000},
        pulsar={
            "service_url": broker.settings.service_url,
            "admin_url": broker.settings.admin_url,
            "crypto_private_key_file": str(fuzz.key_files[OWN]),
        },
    )
    admin = AdminClient(broker.settings)
    admin.create_partitioned_topic(fuzz.partitioned, 2)
    for source in fuzz.topics:  # so that the broker keeps what has been acknowledged
        for kept in (source, f"{source}-a"):
            client.subscribe(kept, "keep", initial_position=pulsar.InitialPosition.Earliest).close()
    job.start()
    try:
        for source in fuzz.plain:  # what comes before the first message that can be read is not known to be missing
            for partition in client.get_topic_partitions(source):
                client.create_producer(partition).send(b"first")
        producers = Producers(fuzz, broker.settings.service_url, client)
        chance = random.Random(fuzz.seed)
        started = time.monotonic()
        while producers.are_busy:
            assert time.monotonic() - started < PATIENCE * (60 + fuzz.n / 500), f"{len(producers.sent)} sent"
            time.sleep(UNLOAD_SECONDS)
            unload(broker.settings.admin_url, chance.choice(fuzz.topics) + chance.choice(["", "-a"]))
        producers.wait(300)
        took = time.monotonic() - started
        n_readable = len(producers.sent) - len(producers.unreadable)
        n_unreadable = len(producers.unreadable)

        last: tuple[int, ...] = ()
        since = 0.0

        def done() -> bool:
            """All that was sent is durable, what is durable has been delivered or rejected, and no more comes to it."""
            nonlocal last, since
            count = f"SELECT count(*) AS n, count(*) FILTER (WHERE reason LIKE '{NOT_SEEN_REASON}%') AS not_seen, "
            count += f"count(*) FILTER (WHERE reason = '{NOT_DECRYPTED}') AS encrypted "
            [rejected] = job.rows("rejects", count + "FROM {table}")
            [taken_in] = job.rows("entries", "SELECT coalesce(sum(batch_size), 0) AS n FROM {table}")
            [delivered] = job.rows("deliveries", "SELECT count(*) AS n FROM {table}")
            counts = (*rejected.values(), taken_in["n"], delivered["n"])
            if counts != last:
                last, since = counts, time.monotonic()
            is_all = delivered["n"] + rejected["n"] - rejected["not_seen"] >= taken_in["n"] >= n_readable
            is_all = is_all and rejected["encrypted"] >= n_unreadable
            return bool(is_all and time.monotonic() - since > QUIET_SECONDS)

        wait_until(done, SPAN_MILLIS / 1000 + 60 + fuzz.n / 1_000, f"all came\n{job.log}")
        rejects = {
            row["position"]: row["reason"] for row in job.rows("rejects", "SELECT position, reason FROM {table}")
        }
        assert job.terminate() == 0
        found = check(fuzz, producers, Topics(client, admin), rejects)
        found |= {"aborted": producers.aborted, "refused by the client": len(producers.refused)}
        print(f"{fuzz.seed}: {found}, sent within {took:.0f} s", producers.refused[:3])
        assert found["delivered"] > 0.9 * n_readable
        assert found["unreadable"] == len(producers.unreadable) > 0
        assert found["aborted"] > 0
    finally:
        job.stop()
        admin.close()


def test_four_thousand_messages(broker: EmbeddedBroker, topic: str, tmp_path: Path) -> None:
    fuzz_with_some_seed(broker, topic, tmp_path, 4_000, seed=6)


@pytest.mark.chaos
def test_a_million_messages(broker: EmbeddedBroker, topic: str, tmp_path: Path) -> None:
    fuzz_with_some_seed(broker, topic, tmp_path, int(os.environ.get("MESSAGES") or 1_000_000))
