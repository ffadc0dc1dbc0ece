"""Messages larger than an entry come whole and once, whatever ends between their chunks; also over a second route."""

from __future__ import annotations

import base64
import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest

from broker.client import connect
from broker.position import START
from broker.protocol.brokers import Brokers
from broker.protocol.entries import Envelope
from broker.protocol.reading import read_entries
from broker.standalone import EmbeddedBroker
from streaming.release.producer_names import read_generations
from tests.support.clients import java_client
from tests.support.servers.small_entries import LARGEST, SLOW, broker_of_small_entries
from tests.support.service.harness import Job, http, now, wait_until
from warehouse.audit.accounts import run_audit

pytestmark = pytest.mark.long

LARGE = 2_500_000
SOURCE = "persistent://public/default/large"
FIRST, SECOND = f"persistent://{SLOW}/first", "persistent://public/default/second"


@pytest.fixture
def broker(tmp_path: Path, broker: EmbeddedBroker) -> Iterator[EmbeddedBroker]:
    with broker_of_small_entries(tmp_path / "broker", broker) as made:
        admin = f"{made.settings.admin_url}/admin/v2/namespaces/public"
        for namespace in ("slow", "default"):
            retention = {"retentionTimeInMinutes": 60, "retentionSizeInMB": -1}
            http.post(f"{admin}/{namespace}/retention", json=retention).raise_for_status()
        yield made


# What the checkpoint is lost with.
REBUILT: dict[str, dict[str, Any]] = {
    "large": {"size": 2_000_000, "chunk": 100_000, "key": ""},
    "large, bytes key": {"size": 1_500_000, "chunk": 50_000, "key_bytes": ""},
    "small": {"payload": base64.b64encode(b"small").decode(), "key": ""},
    "small, bytes key": {"payload": base64.b64encode(b"small").decode(), "key_bytes": ""},
}


def as_rebuilt(when: str, due: int) -> list[dict[str, Any]]:
    """Returns messages for Java's producer, one for each of REBUILT."""
    return [
        {"topic": SOURCE, "name": f"{when}, {kind}", "properties": {"deliverAt": str(due), "name": f"{when}, {kind}"}}
        | of
        for kind, of in REBUILT.items()
    ]


def payload_of(name: str) -> bytes:
    if not name.startswith("large"):
        return name.encode()
    return (hashlib.sha256(name.encode()).digest() * (LARGE // 32 + 1))[:LARGE]


def produce(client: pulsar.Client, names: list[str], due: int) -> None:
    """Sends messages that are due one millisecond after another; large ones in chunks."""
    producers = {
        is_large: client.create_producer(SOURCE, chunking_enabled=is_large, batching_enabled=not is_large)
        for is_large in (False, True)
    }
    for i, name in enumerate(names):
        properties = {"deliverAt": str(due + i), "name": name}
        key = f"k{i % 3}" if i % 2 else None
        producers[name.startswith("large")].send(payload_of(name), properties, partition_key=key)
    for producer in producers.values():
        producer.close()


def is_between_chunks(broker: EmbeddedBroker, topic: str, since: int = 0, seconds: float = 60) -> bool:
    """Waits until the last entry of a topic is a chunk, and not the last one of its message, published since a time.

    Returns:
        whether that was seen in time; on a slow machine all chunks may come between two looks.
    """
    brokers, last = Brokers(broker.settings), START
    deadline = time.monotonic() + seconds
    is_between = False
    while not is_between and time.monotonic() < deadline:
        for one in read_entries(brokers, topic, last):
            assert isinstance(one.envelope, Envelope)
            metadata, last = one.envelope.metadata, one.position
            is_between = one.envelope.is_chunk and metadata.chunk_id < metadata.n_chunks - 4
            is_between = is_between and metadata.publish_time >= since
    brokers.close()
    return is_between


def restart(broker: EmbeddedBroker) -> None:
    status = broker.status()
    port, http_port = (int(url.rsplit(":", 1)[1]) for url in (status.service_url or "", status.admin_url or ""))
    broker.kill()
    broker.start(port=port, http_port=http_port)


def seen_by_java(broker: EmbeddedBroker, topic: str, n: int) -> Counter[tuple[str, str]]:
    seen = java_client.consume(broker.settings.service_url, [{"topic": topic, "n": n}])
    return Counter((one["properties"]["name"], one["sha256"]) for one in seen)


def seen_by_python(broker: EmbeddedBroker, topic: str, n: int) -> Counter[tuple[str, str]]:
    client = connect(broker.settings)
    consumer = client.subscribe(topic, "python", initial_position=pulsar.InitialPosition.Earliest)
    found: Counter[tuple[str, str]] = Counter()
    try:
        while True:
            message = consumer.receive(30_000 if found.total() < n else 3_000)
            found[message.properties()["name"], hashlib.sha256(message.data()).hexdigest()] += 1
    except pulsar.Timeout:
        return found
    finally:
        client.close()


def test_nothing_is_lost_or_doubled_when_job_broker_or_both_end_between_chunks(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    routes = [
        {"source": SOURCE, "subscriptions": [{"name": "a", "destination": FIRST}]},
        {"source": FIRST, "subscriptions": [{"name": "b", "type": "Shared", "destination": SECOND}]},
    ]
    urls = {"service_url": broker.settings.service_url, "admin_url": broker.settings.admin_url}
    pulsar_settings = {**urls, "max_message_size_bytes": LARGEST, "max_chunked_message_bytes": 4_000_000}
    tracker = {"max_seal_interval_millis": 1000, "load_ahead_millis": 5000}
    job = Job(tmp_path, broker.settings, routes, pulsar=pulsar_settings, tracker=tracker)
    client = connect(broker.settings)
    names = [f"{'large' if i % 4 == 1 else 'small'}{i}" for i in range(24)]
    expected = Counter({(name, hashlib.sha256(payload_of(name)).hexdigest()): 1 for name in names})
    try:
        job.start()
        for kill in ("job", "broker", "both"):
            begin = {"job": 0, "broker": 8, "both": 16}[kill]
            produce(client, names[begin : begin + 8], now() + 4_000)
            assert is_between_chunks(broker, FIRST)
            if kill != "broker":
                job.kill9()
            if kill != "job":
                restart(broker)
            if kill != "broker":
                job.start()
            wait_until(
                lambda n=begin + 8: len(job.rows("deliveries")) >= 2 * n,  # type: ignore[misc]
                120,
                f"all deliveries, after {kill}\n{job.log}",
            )
            print(kill, sorted(read_generations(tmp_path / "checkpoint")), flush=True)
        for topic in (FIRST, SECOND):
            assert seen_by_java(broker, topic, len(names)) == expected, topic
            assert seen_by_python(broker, topic, len(names)) == expected, topic
        audit = wait_until(lambda: (a := run_audit(job.settings)).taken_in == 2 * len(names) and a, 60, "the entries")
        assert audit.is_clean, audit.findings
        assert job.rows("rejects") == []
        assert "somebody else" not in (tmp_path / "job.log").read_text()

        # What was sent and not written down when the checkpoint is lost is found at the destinations. What waits, and
        # what comes in again, is as it was.
        later = now() + int(100_000 * job.pace)
        again = as_rebuilt("later", later)
        java_client.produce(broker.settings.service_url, again)
        waiting = f"SELECT count(*) AS n FROM {{table}} WHERE deliver_at = {later}"  # without what is parked, or was
        wait_until(lambda: job.rows("delayed_index", waiting)[0]["n"] == len(REBUILT), 30, f"sealed\n{job.log}")
        for attempt in range(5):
            begin = now()
            again += (sent := as_rebuilt(f"sent {attempt}", begin + 3_000))
            java_client.produce(broker.settings.service_url, sent)
            if is_between_chunks(broker, FIRST, begin, 20):
                break
        else:
            raise AssertionError("all chunks came between two looks")
        job.kill9()
        job.rebuild()
        job.start()
        n = len(names) + len(again)
        wait_until(lambda: len(job.rows("deliveries")) >= 2 * n, 150 * job.pace, f"all deliveries\n{job.log}")
        time.sleep(2)
        for topic in (FIRST, SECOND):
            seen = java_client.consume(broker.settings.service_url, [{"topic": topic, "n": n}])
            assert len(seen) == n, topic
            found = {one["properties"]["name"]: one for one in seen}
            for spec in again:
                one = found[spec["name"]]
                assert one["size"] == spec.get("size", 5), spec
                assert (one["key"], one["key_is_base64"]) == ("", "key_bytes" in spec), spec
        assert job.rows("rejects") == []
    finally:
        job.stop()
        client.close()
