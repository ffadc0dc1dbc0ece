"""Large messages on the running job, with a small heap: they get through, and hold up no other topic."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from streaming.checkpoint.checkpoint import Checkpoint
from tests.support.service.harness import Collector, Job, now, wait_until
from warehouse.audit.accounts import run_audit

SIZE = 400_000
AT_ONCE = 400
BACKLOGS, EACH = 12, 12


def send(client: pulsar.Client, topic: str, n: int, due: int, size: int) -> set[bytes]:
    """Sends messages that begin with their topic and number; returns these beginnings."""
    producer = client.create_producer(topic, batching_enabled=False, block_if_queue_full=True, max_pending_messages=20)
    noise = os.urandom(size)
    names = [b"%s-%d " % (topic.rpartition("/")[2].encode(), i) for i in range(n)]
    for name in names:
        producer.send_async((name + noise)[: max(size, len(name))], None, properties={"deliverAt": str(due)})
    producer.flush()
    assert producer.last_sequence_id() == n - 1, f"{topic}: a message was not sent"
    producer.close()
    return set(names)


def test_payloads_in_files_arrive_as_they_were_over_a_kill_a_reschedule_and_a_lost_checkpoint(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    """Due soon (in the state alone), due later (sealed), and moved; some are in flight when the job is killed."""
    destination, rejects = f"{topic}-a", f"{topic}-rejects"
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    folder = Checkpoint(tmp_path / "checkpoint").payload_folder
    for one in (destination, rejects):
        collector.collect(one)
    sent: dict[int, bytes] = {}
    producer = pulsar_client.create_producer(topic, batching_enabled=False)

    def send_at(due: int | str, n: int, size: int = 200_000) -> list[pulsar.MessageId]:
        ids = []
        for _ in range(n):
            number = len(sent)
            sent[number] = os.urandom(size)
            properties = {"deliverAt": str(due), "number": str(number)}
            ids.append(producer.send(sent[number], properties=properties))
        return ids

    def came(name: str) -> dict[int, bytes]:
        return {int(m.properties["number"]): m.payload for m in list(collector.received[name])}

    try:
        job.start()
        assert "receiving/receiver.py" in job.report(), "what stands still can be seen"
        soon = now() + round(12_000 * job.pace)
        send_at(soon, 6)
        send_at("not a time", 1)
        later = soon + round(60_000 * job.pace)
        ids = send_at(later, 6)
        wait_until(lambda: list(folder.glob("*")), 30, f"payloads in files\n{job.log}")
        wait_until(lambda: sum(e["in_flight"] for e in job.progress[-1:]) > 0 or now() > soon, 60, "some in flight")
        job.kill9()
        job.stop()
        job.start()
        wait_until(lambda: len(came(destination)) >= 6 and came(rejects), 120, f"those due soon\n{job.log}")

        entry = f"{ids[0].ledger_id()}:{ids[0].entry_id()}"
        moved = job.command(
            "topics", "reschedule", topic, "-s", "a", "--messageId-triplet", entry, "--deliver-after=5s"
        )
        assert moved.returncode == 0, moved.stderr
        wait_until(lambda: len(came(destination)) >= 7, 60, f"the moved one\n{job.log}")
        job.kill9()
        job.stop()
        job.rebuild()
        job.start()
        wait_until(lambda: len(came(destination)) >= 12, 180, f"all\n{job.log}")
        assert came(destination) | came(rejects) == sent
        assert len(collector.received[destination]) == 12, "each once"
        assert len(collector.received[rejects]) == 1

        def are_files_gone() -> bool:
            producer.send(b"makes a batch", properties={"deliverAt": str(now()), "number": "0"})
            return not list(folder.glob("*"))

        wait_until(are_files_gone, 60, "no file stays")
        wait_until(lambda: run_audit(job.settings).is_clean, 60, "an audit without findings")
        assert job.terminate() == 0
    finally:
        job.stop()


@pytest.mark.long
def test_more_than_the_heap_due_at_one_instant_and_a_backlog_of_many_topics_get_through(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    small, at_once = f"{topic}_small", f"{topic}_at_once"
    backlogs = [f"{topic}_backlog{i}" for i in range(BACKLOGS)]
    routes = [{"source": source, "subscriptions": [{"name": "a"}]} for source in (small, at_once, *backlogs)]
    # All that is due at the instant, and each of its several copies in Spark's JVM, is as much as its heap.
    job = Job(tmp_path, broker.settings, routes, spark={"conf": {"spark.driver.memory": "520m"}})
    sent = set()
    for backlog in backlogs:
        sent |= send(pulsar_client, backlog, EACH, now() - 1_000, SIZE)
    for source in (small, at_once, *backlogs):
        collector.collect(f"{source}-a")

    def came() -> list[tuple[bytes, int]]:
        assert job.is_running, job.report()
        received = [m for of_topic in list(collector.received.values()) for m in list(of_topic)]
        return [(re.match(rb"[^ ]+ ", m.payload)[0], m.received_at) for m in received]  # type: ignore[index]

    try:
        job.start()
        wait_until(lambda: len({name for name, _ in came()}) >= len(sent), 180, "the backlogs")
        due = now() + round(25_000 * job.pace)
        sent |= send(pulsar_client, at_once, AT_ONCE, due, SIZE)
        assert now() < due, "the machine is too slow for this test"
        sent |= send(pulsar_client, small, 50, due + 100, 100)
        wait_until(lambda: len(collector.received[f"{at_once}-a"]) >= AT_ONCE // 4, 180, "a part of them")
        job.kill9()
        job.stop()
        job.start()
        wait_until(lambda: len({name for name, _ in came()}) >= len(sent), 240, "all messages")
        assert Counter(name for name, _ in came()) == Counter(sent), "each once"
        first, last = (
            {source: pick(m.received_at for m in collector.received[f"{source}-a"]) for source in (small, at_once)}
            for pick in (min, max)
        )
        assert min(first.values()) >= due, "none early"
        assert last[small] < last[at_once], "small messages do not wait until all large ones have come"
        assert not any("OutOfMemory" in file.read_text(errors="replace") for file in tmp_path.rglob("spark.log"))
        wait_until(lambda: run_audit(job.settings).is_clean, 60, "an audit without findings")
        assert job.terminate() == 0
    finally:
        job.stop()


@pytest.mark.long
def test_one_command_moves_more_than_the_heap(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    n, size = 400, 1_300_000
    routes = [{"source": topic, "subscriptions": [{"name": "a"}]}]
    job = Job(tmp_path, broker.settings, routes, spark={"conf": {"spark.driver.memory": "480m"}})
    collector.collect(f"{topic}-a")
    try:
        job.start()
        sent = send(pulsar_client, topic, n, now() + 3_600_000, size)
        count = "SELECT count(*) AS n FROM {table}"
        wait_until(lambda: job.rows("delayed_index", count)[0]["n"] >= n, 120, "all are sealed")
        entries = job.rows("delayed_index", "SELECT ledger_id, entry_id FROM {table}")
        ids = [f"--messageId-triplet={row['ledger_id']}:{row['entry_id']}" for row in entries]
        asked = now()
        moved = job.command("topics", "reschedule", topic, "-s", "a", *ids, "--deliver-after=20s", "--timeout=90")
        assert moved.returncode == 0, moved.stderr
        wait_until(lambda: len(collector.received[f"{topic}-a"]) >= n, 240, "all have come")
        received = collector.received[f"{topic}-a"]
        assert Counter(m.payload.partition(b" ")[0] + b" " for m in received) == Counter(sent), "each once"
        assert {len(m.payload) for m in received} == {size}
        assert min(m.received_at for m in received) >= asked + 20_000
        assert not any("OutOfMemory" in file.read_text(errors="replace") for file in tmp_path.rglob("spark.log"))
        assert job.terminate() == 0
    finally:
        job.stop()
