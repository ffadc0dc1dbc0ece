"""A destination that can't be written holds up no other, is named, and gets its messages when it is back."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pulsar
import pytest

from broker.standalone import EmbeddedBroker
from tests.support.service.destinations import (
    Destination,
    send_numbered,
    wait_until_named,
    wait_until_well,
    wait_until_written,
)
from tests.support.service.harness import PATIENCE, Collector, Job, check_exactly_once, http, now, wait_until
from warehouse.audit.accounts import run_audit
from warehouse.queries.held_rejects import ROUND_BYTES

MESSAGES = 700
BEFORE = 100  # messages that may be handed out before a destination is known to be unwritable


def test_one_terminated_destination_holds_up_no_other_and_gets_its_messages_once_and_in_order_when_it_is_there_again(
    broker: EmbeddedBroker,
    pulsar_client: pulsar.Client,
    topic: str,
    tmp_path: Path,
    collector: Collector,
) -> None:
    stuck, well = f"{topic}_stuck", f"{topic}_well"
    stuck_to, well_to = f"{stuck}-a", f"{well}-a"
    routes = [{"source": source, "subscriptions": [{"name": "a"}]} for source in (stuck, well)]
    job = Job(
        tmp_path,
        broker.settings,
        routes,
        tracker={"shards": 2},
        release={"max_in_flight_messages": 200, "retry_max_millis": 2_000},
    )
    destination = Destination(broker, stuck_to)
    destination.terminate()
    collector.collect(well_to)

    try:
        job.start()
        begin = now() + 3_000
        dues = [begin + i * 10 for i in range(MESSAGES)]
        for source in (stuck, well):
            sent = send_numbered(pulsar_client.create_producer(source, block_if_queue_full=True), dues)

        last = begin + MESSAGES * 10
        wait_until(lambda: len(collector.received[well_to]) >= MESSAGES, (last - now()) / 1000 / PATIENCE + 6, job.log)
        check_exactly_once(sent, collector.received[well_to])
        late = sorted(m.published_at - sent[m.payload.decode()] for m in collector.received[well_to])
        assert late[len(late) * 9 // 10] < 5_000 * job.pace, late[-20:]
        wait_until_named(job, stuck_to, well_to)

        # What is kept for it outlives the job.
        job.kill9()
        job.start()
        wait_until_named(job, stuck_to, well_to)
        destination.delete()
        collector.collect(stuck_to)
        wait_until(lambda: collector.received[stuck_to], 20, job.log)
        job.kill9()
        job.start()
        wait_until(lambda: len(collector.received[stuck_to]) >= MESSAGES, 20, job.log)
        check_exactly_once(sent, collector.received[stuck_to])
        wait_until_well(job)
        wait_until_written(job, 2 * MESSAGES)
        assert job.terminate() == 0
    finally:
        job.stop()
    found = run_audit(job.settings)
    assert found.is_clean, found.findings
    in_order = [int(m.payload) for m in collector.received[stuck_to]]
    assert in_order == sorted(in_order)


def test_an_offline_partition_holds_up_no_other_destination_and_gets_its_messages_once_and_in_order_when_it_is_back(
    broker: EmbeddedBroker,
    pulsar_client: pulsar.Client,
    topic: str,
    tmp_path: Path,
    collector: Collector,
) -> None:
    offline_to, well_to = f"{topic}-a", f"{topic}-b"
    job = Job(
        tmp_path,
        broker.settings,
        [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b"}]}],
        release={"retry_max_millis": 2_000},
    )
    destination = Destination(broker, offline_to, partitions=2)
    collector.collect(well_to)

    def is_offline() -> bool:
        # Without the bookies that its policy asks for, a partition can't be loaded.
        http.put(f"{destination.url}-partition-1/unload")
        return not http.get(f"{destination.url}-partition-1/stats").is_success

    try:
        job.start()
        policy = {f"bookkeeper{name}": 3 for name in ("Ensemble", "WriteQuorum", "AckQuorum")}
        policy["managedLedgerMaxMarkDeleteRate"] = 0
        http.post(f"{destination.url}/persistence", json=policy).raise_for_status()
        wait_until(is_offline, 20, "the policy holds")
        producer = pulsar_client.create_producer(topic)
        begin = now() + 3_000
        sent = send_numbered(producer, [begin + i * 20 for i in range(BEFORE)])
        wait_until(lambda: len(collector.received[well_to]) >= BEFORE, 6, job.log)
        wait_until_named(job, offline_to, well_to)
        begin = now() + 3_000
        sent |= send_numbered(producer, [begin + i * 20 for i in range(MESSAGES - BEFORE)], BEFORE)

        last = max(sent.values())
        wait_until(lambda: len(collector.received[well_to]) >= MESSAGES, (last - now()) / 1000 / PATIENCE + 6, job.log)
        check_exactly_once(sent, collector.received[well_to])
        late = sorted(m.published_at - sent[m.payload.decode()] for m in collector.received[well_to])
        assert late[len(late) // 2] < 5_000 * job.pace, late[-20:]
        wait_until_named(job, offline_to, well_to)

        http.delete(f"{destination.url}/persistence").raise_for_status()
        collector.collect(offline_to)
        wait_until(lambda: len(collector.received[offline_to]) >= MESSAGES, 20, job.log)
        check_exactly_once(sent, collector.received[offline_to])
        wait_until_well(job)
        wait_until_written(job, 2 * MESSAGES)
        assert job.terminate() == 0
    finally:
        job.stop()
    found = run_audit(job.settings)
    assert found.is_clean, found.findings
    for partition in range(2):
        of_partition = [m for m in collector.received[offline_to] if m.topic.endswith(f"-partition-{partition}")]
        numbers = [int(m.payload) for m in of_partition]
        in_order = sorted(number for number in numbers if number >= BEFORE)
        assert in_order
        assert numbers[-len(in_order) :] == in_order


def test_what_is_due_for_a_destination_that_stays_unwritable_is_rejected_once_also_where_rejects_can_not_be_written(
    broker: EmbeddedBroker,
    pulsar_client: pulsar.Client,
    topic: str,
    tmp_path: Path,
    collector: Collector,
) -> None:
    job = Job(
        tmp_path,
        broker.settings,
        [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b"}]}],
        release={"unwritable": "reject", "unwritable_after_millis": 4_000, "retry_max_millis": 1_000},
    )
    rejects = Destination(broker, f"{topic}-rejects")
    for destination in (Destination(broker, f"{topic}-a"), rejects):
        destination.terminate()
    collector.collect(f"{topic}-b")
    try:
        job.start()
        producer = pulsar_client.create_producer(topic)
        begin = now() + 2_000
        sent = send_numbered(producer, [begin + i * 20 for i in range(300)])
        wait_until(lambda: len(collector.received[f"{topic}-b"]) >= 300, 20, job.log)
        job.kill9()
        job.start()
        # Until then the table alone has what is rejected.
        rejects.delete()
        collector.collect(f"{topic}-rejects")
        for name in ("b", "rejects"):
            wait_until(lambda name=name: len(collector.received[f"{topic}-{name}"]) >= 300, 20, f"{name}\n{job.log}")  # type: ignore[misc]
            check_exactly_once(sent, collector.received[f"{topic}-{name}"])
        reasons = {m.properties["delaylake.reason"] for m in collector.received[f"{topic}-rejects"]}
        assert len(reasons) == 1
        assert reasons.pop().startswith(f"not delivered to a: {topic}-a can't be written: TopicTerminated")
        assert job.terminate() == 0
    finally:
        job.stop()
    found = run_audit(job.settings)
    assert found.is_clean, found
    counts = {row["subscription"]: row for row in found.counts}
    assert (counts["a"]["taken_back"], counts["a"]["delivered"], counts["b"]["delivered"]) == (300, 0, 300)
    assert len(job.rows("rejects")) == 300


@pytest.mark.long
def test_large_rejects_that_their_topic_lacks_come_to_it_in_rounds_each_once_also_over_a_kill(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}], tracker={"shards": 2})
    rejects = Destination(broker, f"{topic}-rejects")
    rejects.terminate()
    n, n_bytes = 400, 250_000
    newest: dict[str, list[int]] = {}  # by offset that has been seen, how far the rounds were

    def look() -> None:
        for file in (tmp_path / "checkpoint" / "query" / "offsets").glob("[0-9]*"):
            offset = json.loads(file.read_text().splitlines()[-1])
            newest[file.name] = offset.get("rejects_to", {}).get(topic, [])

    def received() -> int:
        look()
        return len(collector.received[f"{topic}-rejects"])

    try:
        job.start()
        producer = pulsar_client.create_producer(topic, batching_enabled=False, block_if_queue_full=True)
        for i in range(n):
            padding = bytes([i % 256]) * n_bytes
            producer.send_async(b"%06d" % i + padding, None, properties={"deliverAt": "soon"})
        producer.flush()
        count = "SELECT count(*) AS n FROM {table}"
        wait_until(lambda: job.rows("rejects", count)[0]["n"] == n, 60, job.log)
        rejects.delete()
        collector.collect(f"{topic}-rejects")
        wait_until(received, 30, job.log)
        job.kill9()
        job.start()
        # What is rejected meanwhile comes, too.
        producer.send(b"%06d" % n, properties={"deliverAt": "soon"})
        wait_until(lambda: received() > n, 60, job.log)
        wait_until_well(job)
        assert job.terminate() == 0
    finally:
        job.stop()
    assert Counter(int(m.payload[:6]) for m in collector.received[f"{topic}-rejects"]) == dict.fromkeys(range(n + 1), 1)
    rounds = {tuple(to) for to in newest.values() if to}
    assert len(rounds) >= n * n_bytes // ROUND_BYTES - 1, newest
