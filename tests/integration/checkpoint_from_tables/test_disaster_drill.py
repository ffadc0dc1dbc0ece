"""A whole place is lost, broker and all: the job goes on from a backup, with a broker that has the replicated topic."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest

from broker.client import connect
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from tests.support.servers.replicating_brokers import NAMESPACE, replicating_brokers
from tests.support.service.harness import Collector, Job, Received, now, wait_until
from warehouse.audit.accounts import run_audit

TOPIC = f"persistent://{NAMESPACE}/orders"
DESTINATION = "persistent://public/default/orders_a"
HOUR = 3_600_000


@pytest.fixture
def places(tmp_path: Path) -> Iterator[list[EmbeddedBroker]]:
    with replicating_brokers(tmp_path) as brokers:
        yield brokers


def test_a_job_goes_on_from_a_backup_with_another_broker(
    places: list[EmbeddedBroker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = places
    monkeypatch.setattr(
        "checkpoint_from_tables.restore.another_broker.CHUNKS_MILLIS", 0
    )  # none is chunked: the test need not last so long
    routes = [{"source": TOPIC, "subscriptions": [{"name": "a", "destination": DESTINATION}]}]
    tracker = {"max_seal_interval_millis": 1_000, "load_ahead_millis": 3_000}
    topics = {"topic": f"{DESTINATION}_control", "outcome_topic": f"{DESTINATION}_outcomes"}
    (tmp_path / "lost").mkdir()
    (tmp_path / "there").mkdir()
    job = Job(tmp_path / "lost", east.settings, routes, tracker=tracker, control=topics, replicated="all")
    restored = Job(
        tmp_path / "there",
        west.settings,
        routes,
        tracker=tracker,
        control=topics,
        replicated="all",
        warehouse=f"file:{tmp_path}/copy",
    )
    clients = [connect(place.settings) for place in places]
    collectors = [Collector(client).collect(DESTINATION) for client in clients]
    here, there = (collector.received[DESTINATION] for collector in collectors)
    sent: dict[str, pulsar.MessageId] = {}

    n_entries_sent = 0

    def send(name: str, n: int, due: int, is_batched: bool = False) -> list[str]:
        nonlocal n_entries_sent
        n_entries_sent += 1 if is_batched else n
        producer = clients[0].create_producer(
            TOPIC, batching_enabled=is_batched, batching_max_publish_delay_ms=1_000, batching_max_messages=max(n, 2)
        )
        properties = {"deliverAt": str(due)}
        for i in range(n):
            producer.send_async(
                f"{name}{i}".encode(), lambda _, at, i=i: sent.update({f"{name}{i}": at}), properties=properties
            )
        producer.flush()
        producer.close()
        return [f"{name}{i}" for i in range(n)]

    def payloads(received: list[Received]) -> set[str]:
        return {message.payload.decode() for message in received}

    def skip(of: Job, ledger: int, entry: int) -> None:
        done = of.command("topics", "skip-messages", TOPIC, "-s", "a", "--messageId-triplet", f"{ledger}:{entry}")
        assert done.returncode == 0, done.stderr

    def waiting(of: Job) -> list[int]:
        listed = json.loads(of.command("pending", TOPIC, "--limit", "100", "--output", "json").stdout)["messages"]
        return [message["ledgerId"] for message in listed]

    def n_entries(admin: AdminClient) -> int:
        stats = admin.internal_stats(TOPIC)
        return 0 if stats is None else sum(stats.ledgers.values())

    try:
        job.start()
        delivered = send("delivered", 40, now()) + send("batched", 40, now(), is_batched=True)
        send("later", 10, now() + HOUR)
        send("later_batched", 10, now() + HOUR, is_batched=True)
        cancelled, to_cancel = sent["later0"], sent["later1"]
        skip(job, cancelled.ledger_id(), cancelled.entry_id())
        with AdminClient(west.settings) as admin:
            wait_until(lambda: n_entries(admin) == n_entries_sent, 60, "west has it")
        # From now on the same entries have other ids in west.
        elsewhere = clients[1].create_producer(TOPIC)
        elsewhere.send(b"west", properties={"deliverAt": str(now())}, disable_replication=True)
        meanwhile = send("meanwhile", 30, now() + HOUR // 2)
        meanwhile += send("end", 1, now() + HOUR // 2)
        wait_until(lambda: payloads(here) >= set(delivered), 30, f"delivered\n{job.log}")
        wait_until(lambda: run_audit(job.settings).taken_in == 131, 30, f"all is durable\n{job.log}")
        done = job.command("backup", f"file:{tmp_path}/copy")
        assert done.returncode == 0, done.stderr
        after = send("after", 20, now()) + send("after_batched", 20, now(), is_batched=True)
        wait_until(lambda: payloads(here) >= set(after), 30, f"what came after the backup\n{job.log}")
        last = send("last", 20, now() + HOUR // 2) + send("last_batched", 20, now() + HOUR // 2, is_batched=True)
        job.stop()
        with AdminClient(west.settings) as admin:
            wait_until(lambda: n_entries(admin) == n_entries_sent + 1, 60, "all is replicated")
        east.kill()
        shutil.rmtree(tmp_path / "lost")

        refused = restored.command("rebuild")
        assert (refused.returncode, "--another-broker" in refused.stderr) == (1, True), refused.stderr
        done = restored.command("rebuild", "--another-broker", "--output", "json")
        assert done.returncode == 0, done.stderr
        counts = json.loads(done.stdout)
        assert {name: n for name, n in counts.items() if name.startswith("entries_")} == {
            "entries_known": 41 + 11 + 31,
            "entries_new": 1 + 21 + 21,
            "entries_unclear": 0,
            "entries_not_replicated": 0,
        }
        restored.start()
        wait_until(
            lambda: len(waiting(restored)) == 19 + 31 + 40, 60, f"what waits {waiting(restored)}\n{restored.log}"
        )
        soon = ("--due-before", str(now() + HOUR * 3 // 4))
        done = restored.command("topics", "deliver-now-by-filter", TOPIC, "-s", "a", *soon, "--yes")
        assert done.returncode == 0, done.stderr
        wanted = {*meanwhile, *after, *last, "west"}
        wait_until(lambda: payloads(there) >= wanted, 60, f"what was not delivered\n{restored.log}")
        offset = counts["added_to_ledger_ids"]
        skip(restored, to_cancel.ledger_id() + offset, to_cancel.entry_id())
        wait_until(lambda: len(waiting(restored)) == 18, 30, f"what still waits {waiting(restored)}\n{restored.log}")
        assert {ledger >= offset for ledger in waiting(restored)} == {True, False}, "what is read again has west's ids"
        wait_until(lambda: run_audit(restored.settings).is_clean, 30, f"{run_audit(restored.settings)}\n{restored.log}")
        assert restored.terminate() == 0
        assert not [payload for payload, n in Counter(m.payload for m in there).items() if n > 1]
        twice = payloads(here) & payloads(there)
        assert twice == set(after), "what was delivered after the backup"
        assert payloads(here) | payloads(there) == {*delivered, *wanted}
    finally:
        job.stop()
        restored.stop()
        for collector in collectors:
            collector.stop()
        for client in clients:
            client.close()
