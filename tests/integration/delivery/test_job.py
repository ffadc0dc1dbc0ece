"""The job on a real broker: what comes in goes out, once, intact, on time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest

from broker.client import connect
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from conf.partitions import java_string_hash
from conf.settings import PulsarSettings
from jobs.commands.run import warn_of_namespaces
from status.alerts import NO_BROKER, QUERY_FAILED
from status.job_status import read_status
from tests.conftest import Run
from tests.support.servers import otlp
from tests.support.service.harness import Collector, Job, check_exactly_once, http, now, wait_until
from warehouse.audit.accounts import run_audit

MEGABYTE = 1024 * 1024


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[otlp.Received]:
    with otlp.collector(monkeypatch) as received:
        yield received


def test_mixed_messages_are_delivered_once_intact_and_on_time(
    broker: EmbeddedBroker,
    pulsar_client: pulsar.Client,
    topic: str,
    tmp_path: Path,
    collector: Collector,
    exported: otlp.Received,
    delaylake: Run,
) -> None:
    plain, parted = f"{topic}_plain", f"{topic}_parted"
    into_parts = f"{topic}_into_parts"
    with AdminClient(broker.settings) as admin:
        admin.create_partitioned_topic(parted, 3)
        admin.create_partitioned_topic(into_parts, 4)
    routes = [
        {"source": plain, "subscriptions": [{"name": "a"}, {"name": "b", "type": "Exclusive"}, {"name": "c"}]},
        {"source": parted, "subscriptions": [{"name": "a", "destination": into_parts}]},
        {"source": f"{topic}_held", "subscriptions": [{"name": "a"}]},
    ]
    job = Job(tmp_path, broker.settings, routes, tracker={"max_delay_millis": 10 * 86_400_000})
    for destination in (f"{plain}-a", f"{plain}-b", f"{plain}-c", f"{plain}-rejects", into_parts):
        collector.collect(destination)
    # Somebody else has the job's subscription of one topic: it stands, and the others go on.
    held = pulsar_client.subscribe(f"{topic}_held", "delaylake", pulsar.ConsumerType.Exclusive)
    pulsar_client.create_producer(f"{topic}_held").send(b"waits")
    try:
        job.start()
        single = pulsar_client.create_producer(plain)
        batched = pulsar_client.create_producer(plain, batching_enabled=True, batching_max_publish_delay_ms=50)
        to_parts = pulsar_client.create_producer(parted)

        sent: dict[str, int] = {}
        begin = now()
        for i in range(600):
            due = begin + 500 + i * 13
            sent[f"batched {i}"] = due
            batched.send_async(f"batched {i}".encode(), None, properties={"deliverAt": str(due), "i": str(i)})
        batched.flush()
        for i in range(100):
            sent[f"single {i}"] = due = begin + i * 80
            single.send(f"single {i}".encode(), properties={"deliverAt": str(due)}, partition_key=f"schlüssel {i % 5}")
        sent["at once"] = 0
        single.send(b"at once")
        sent["after"] = now() + 2_000
        single.send(b"after", properties={"deliverAfter": "2000"})
        due = now() + 3_000
        full_id = single.send(
            b"full",
            properties={"deliverAt": str(due), "größe": "12 €", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"},
            partition_key="🗝",
            ordering_key="order",
            event_timestamp=1_234_567_890_123,
        )
        sent["full"] = due
        large, in_chunks = b"5" * (5 * MEGABYTE - 4_096), b"t" * (5 * MEGABYTE - 500)
        single.send(large, properties={"deliverAt": str(now() + 1_000)})
        single.send(in_chunks, properties={"deliverAt": str(now() + 1_000)})
        single.send(b"", properties={"deliverAt": str(now() + 1_000), "what": "empty"})
        single.send(None, properties={"deliverAt": str(now() + 1_000), "what": "null"})
        bad = ["soon", "-1", "1.5", "", "9" * 25, str(now() + 11 * 86_400_000)]
        for text in bad:
            single.send(f"bad {text}".encode(), properties={"deliverAt": text})
        far = now() + 5 * 86_400_000
        for i in range(20):
            single.send(f"far {i}".encode(), properties={"deliverAt": str(far + i)})
        keyed = {}
        for i in range(120):
            due = now() + 1_000 + i * 20
            keyed[f"keyed {i}"] = due
            to_parts.send(f"keyed {i}".encode(), properties={"deliverAt": str(due)}, partition_key=f"k{i % 7}")

        # A partition that comes later is followed.
        path = parted.replace("://", "/")
        http.post(f"{broker.settings.admin_url}/admin/v2/{path}/partitions", json=4).raise_for_status()
        late = pulsar_client.create_producer(f"{parted}-partition-3")
        keyed["late partition"] = now() + 1_000
        late.send(b"late partition", properties={"deliverAt": str(keyed["late partition"])}, partition_key="k1")

        n = len(sent) + 4
        wait_until(
            lambda: (
                all(len(collector.received[f"{plain}-{s}"]) >= n for s in "abc")
                and len(collector.received[into_parts]) >= len(keyed)
                and len(collector.received[f"{plain}-rejects"]) >= len(bad)
            ),
            90,
            f"all deliveries: { ({t: len(r) for t, r in collector.received.items()}) }\n{job.log}",
        )

        for subscription in "abc":
            received = collector.received[f"{plain}-{subscription}"]
            special = [m for m in received if len(m.payload) > MEGABYTE or not m.payload]
            check_exactly_once(sent, [m for m in received if m not in special])
            assert Counter(len(m.payload) for m in special) == {len(large): 1, len(in_chunks): 1, 0: 2}
            assert {m.payload for m in special if m.payload} == {large, in_chunks}
            assert {(m.properties["what"], m.is_null) for m in special if not m.payload} == {
                ("empty", False),
                ("null", True),
            }
            by_payload = {m.payload.decode(): m for m in received if m not in special}
            full = by_payload["full"]
            assert (full.key, full.ordering_key, full.event_time) == ("🗝", "order", 1_234_567_890_123)
            assert full.properties["größe"] == "12 €"
            assert full.properties["delaylake.source"] == plain
            assert full.properties["delaylake.deliverAt"] == str(sent["full"])
            assert all(by_payload[f"single {i}"].key == f"schlüssel {i % 5}" for i in range(100))
            assert all(by_payload[f"batched {i}"].properties["i"] == str(i) for i in range(600))
        check_exactly_once(keyed, collector.received[into_parts])
        for message in collector.received[into_parts]:
            assert message.topic.endswith(f"-partition-{java_string_hash(message.key) % 4}")

        rejects = collector.received[f"{plain}-rejects"]
        assert sorted(m.payload.decode() for m in rejects) == sorted(f"bad {text}" for text in bad)
        assert all(m.properties["delaylake.reason"] for m in rejects)
        wait_until(lambda: len(job.rows("rejects")) == len(bad), 10, "rows of rejects")
        assert {r["reason"] for r in job.rows("rejects")} == {m.properties["delaylake.reason"] for m in rejects}

        # Everything is written down some seconds later, and the broker keeps nothing of what was read.
        taken_in = len(sent) + 4 + len(bad) + 20 + len(keyed)
        audit = wait_until(
            lambda: (a := run_audit(job.settings)).taken_in == taken_in and a, 60, f"{taken_in} entries\n{job.log}"
        )
        assert audit.is_clean, audit.findings
        pending = job.rows("delayed_index", f"SELECT * FROM {{table}} WHERE deliver_at >= {far}")
        assert sorted(row["payload"].decode() for row in pending) == sorted(f"far {i}" for i in range(20))
        deliveries = job.rows("deliveries")
        assert len(deliveries) == 3 * n + len(keyed)
        wait_until(lambda: len(exported.spans) >= 3, 30, "a span for each subscription")
        position = (full_id.ledger_id(), full_id.entry_id())
        sent_at = {
            row["destination"]: row["sent_at"] for row in deliveries if (row["ledger_id"], row["entry_id"]) == position
        }
        assert {span.name: span.end_time_unix_nano // 10**6 for span in exported.spans} == {
            f"deliver {destination}": at for destination, at in sent_at.items()
        }
        assert {span.parent_span_id.hex() for span in exported.spans} == {"cd" * 8}
        wait_until(
            lambda: exported.metric("delaylake_delivered_messages").sum.data_points[0].as_double == len(deliveries),
            30,
            "the number of deliveries as a metric",
        )
        assert all(row["sent_at"] >= row["deliver_at"] for row in deliveries)
        assert max(Counter((row["subscription"], row["position"]) for row in deliveries).values()) == 1
        with AdminClient(broker.settings) as admin:
            for entry in job.rows("entries", f"SELECT * FROM {{table}} WHERE topic = '{plain}'")[::97]:
                index = admin.message_index(plain, entry["ledger_id"], entry["entry_id"])
                assert index is not None
                assert entry["first_index"] == index - entry["batch_size"] + 1
        wait_until(lambda: _backlog(broker, plain) == 0, 40, "an empty backlog of the source topic")

        wait_until(
            lambda: (s := read_status(job.settings.warehouse)) and s.troubles, 90, f"a topic that stands\n{job.log}"
        )
        told = job.command("status")
        assert told.returncode == 1
        assert f"standing: {topic}_held: messages wait, and none was taken in: ConsumerBusy" in told.stdout
        assert job.command("status", "--liveness").returncode == 0

        def cancel(row: dict[str, Any]) -> None:
            """A command for a message that waits is applied, whatever else waits."""
            ids = ["-l", str(row["ledger_id"]), "-e", str(row["entry_id"]), "-t", str(row["deliver_at"])]
            told = job.command("topics", "cancel-delayed-message", plain, *ids, "-s", "a")
            assert told.returncode == 0, told

        cancel(pending[0])
        held.close()
        wait_until(
            lambda: not read_status(job.settings.warehouse).troubles,  # type: ignore[union-attr]
            40,
            f"no topic that stands\n{job.log}",
        )
        assert job.command("status").returncode == 0

        # A second job on the same checkpoint is refused; the first ends cleanly and goes on where it ended.
        second = delaylake("--config", str(job.file), "run")
        assert second.returncode == 1
        assert "another job runs on the checkpoint" in second.stderr.strip().splitlines()[-1]
        more = {f"more {i}": now() + 6_000 + i for i in range(200)}
        for payload, due in more.items():
            single.send_async(payload.encode(), None, properties={"deliverAt": str(due)})
        single.flush()
        time.sleep(1)
        assert job.terminate() == 0
        # What somebody clears for the job is not lost in silence: the audit knows it by the broker alone.
        not_seen = _send_and_clear(broker, to_parts, parted)
        pulsar_client.create_producer(job.settings.control.topic).send(b"a command")
        _clear(broker, job.settings.control.topic)
        audited = job.command("audit")
        assert audited.returncode == 1
        assert "\nnot seen: 3\n" in audited.stdout
        assert all(f"{parted} {position}\n" in audited.stdout for position in not_seen)
        job.start()
        wait_until(lambda: len(collector.received[f"{plain}-a"]) >= n + len(more), 60, "what was pending at the stop")

        def is_told() -> bool:
            """Of the partition: the control topic is told of, too, before or after it."""
            status = read_status(job.settings.warehouse)
            return status is not None and any("3 entries were not seen" in t.text for t in status.troubles)

        wait_until(is_told, 40, f"a trouble\n{job.log}")
        told = job.command("status")
        assert (told.returncode, "3 entries were not seen" in told.stderr) == (1, True), told
        assert parted in told.stdout
        cancel(pending[1])
        found = job.rows("rejects", f"SELECT * FROM {{table}} WHERE topic = '{parted}' ORDER BY entry_id")
        assert [(row["position"], row["payload"]) for row in found] == [
            (position, f"lost {i}".encode()) for i, position in enumerate(not_seen)
        ]
        # The three, and a command.
        wait_until(lambda: run_audit(job.settings).findings["not_seen"]["count"] == 4, 40, f"a fourth\n{job.log}")
        time.sleep(2)
        for subscription in "abc":
            rest = [m for m in collector.received[f"{plain}-{subscription}"] if m.payload.startswith(b"more")]
            check_exactly_once(more, rest)
    finally:
        job.stop()


def _send_and_clear(broker: EmbeddedBroker, producer: pulsar.Producer, topic: str) -> list[str]:
    """Sends three messages to a partition, and clears them for the job's subscription; returns their positions."""
    sent = [producer.send(f"lost {i}".encode(), partition_key="lost") for i in range(3)]
    _clear(broker, f"{topic}-partition-{sent[0].partition()}")
    return [f"{id.ledger_id()}:{id.entry_id()}:{id.partition()}:-1" for id in sent]


def _clear(broker: EmbeddedBroker, topic: str) -> None:
    """Acknowledges all of a topic partition for the job."""
    path = f"{topic.replace('://', '/')}/subscription/delaylake/skip_all"
    http.post(f"{broker.settings.admin_url}/admin/v2/{path}").raise_for_status()


def _backlog(broker: EmbeddedBroker, topic: str) -> int:
    path = topic.replace("://", "/")
    stats = http.get(f"{broker.settings.admin_url}/admin/v2/{path}/stats").raise_for_status().json()
    return int(stats["subscriptions"]["delaylake"]["msgBacklog"])


@pytest.mark.long
def test_while_the_senders_are_behind_what_comes_waits_in_pulsar(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    n = 1_500
    routes = [{"source": topic, "subscriptions": [{"name": "a"}]}]
    limits = {"ingest": {"max_messages_per_batch": 200}, "release": {"max_in_flight_messages": 100}}
    job = Job(tmp_path, broker.settings, routes, **limits)
    collector.collect(f"{topic}-a")
    try:
        job.start()
        producer = pulsar_client.create_producer(topic, batching_enabled=False, block_if_queue_full=True)
        sent = {}
        for i in range(n):
            sent[str(i)] = due = now() + 100
            producer.send_async(str(i).encode(), None, properties={"deliverAt": str(due)})
        producer.flush()
        wait_until(lambda: len(collector.received[f"{topic}-a"]) >= n, 120, f"all messages\n{job.log}")
        check_exactly_once(sent, collector.received[f"{topic}-a"])
        assert any(p["is_held_up"] for p in job.progress), job.progress
        # A batch that was on its way when the limit was reached comes on top.
        assert max(p["in_flight"] for p in job.progress) <= 100 + 2 * 200
        assert job.terminate() == 0
    finally:
        job.stop()


def test_a_job_without_its_checkpoint_asks_for_a_rebuild(
    broker: EmbeddedBroker, topic: str, tmp_path: Path, delaylake: Run
) -> None:
    empty = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    refused = delaylake("--config", str(empty.file), "rebuild")
    assert refused.returncode == 1
    assert "nothing to rebuild from" in refused.stderr


def test_a_namespace_without_deduplication_or_retention_is_named(
    broker: EmbeddedBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api = f"{broker.settings.admin_url}/admin/v2/namespaces/public"
    names = ("repeating", "trimming", "keeping")
    for name in names:
        http.put(f"{api}/{name}", json={}).raise_for_status()
    http.post(f"{api}/repeating/deduplication", json=False).raise_for_status()
    kept = {"retentionTimeInMinutes": 10, "retentionSizeInMB": -1}
    http.post(f"{api}/keeping/retention", json=kept).raise_for_status()
    subscriptions = [{"name": name, "destination": f"persistent://public/{name}/a"} for name in names]
    job = Job(tmp_path, broker.settings, [{"source": "persistent://public/default/s", "subscriptions": subscriptions}])
    warn_of_namespaces(job.settings)
    assert [r.getMessage() for r in caplog.records if r.name == "jobs.commands.run"] == [
        "delivery to public/repeating is at least once, not exactly once: its broker has no deduplication",
        "public/trimming has no retention: if the checkpoint is lost soon after a restart of its broker, what was sent "
        "just before comes twice; some minutes of retention are enough",
    ]


@pytest.mark.long
def test_a_query_that_failed_is_told_of_until_it_has_run_for_a_minute(
    broker: EmbeddedBroker, topic: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    client = connect(broker.settings)
    collector = Collector(client).collect(f"{topic}-a")

    def told() -> list[tuple[str, str]]:
        status = read_status(job.settings.warehouse)
        return [] if status is None else [(trouble.kind, trouble.text) for trouble in status.troubles]

    try:
        job.start()
        job.source_process().kill()
        [(kind, text)] = wait_until(told, 60, f"a trouble\n{job.log}")
        assert (kind, text[:34]) == (QUERY_FAILED, "the query failed, and starts again")
        client.create_producer(topic).send(b"after it", properties={"deliverAt": str(now())})
        wait_until(lambda: collector.received[f"{topic}-a"], 60, f"a message\n{job.log}")
        wait_until(lambda: told() == [], 120, f"the end of the trouble\n{job.log}")
        assert job.terminate() == 0
    finally:
        collector.stop()
        job.stop()
        client.close()


@pytest.mark.long
def test_a_start_without_a_broker_says_so_and_waits_for_it(tmp_path: Path) -> None:
    with contextlib.ExitStack() as sockets:
        port, http_port = (
            sockets.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)
        )
    settings = PulsarSettings(service_url=f"pulsar://127.0.0.1:{port}", admin_url=f"http://127.0.0.1:{http_port}")
    broker = EmbeddedBroker(tmp_path / "broker")
    source = "persistent://public/default/later"
    job = Job(tmp_path, settings, [{"source": source, "subscriptions": [{"name": "a"}]}])

    def told() -> list[tuple[str, str]]:
        status = read_status(job.settings.warehouse)
        return [] if status is None else [(trouble.kind, trouble.name) for trouble in status.troubles]

    starting = threading.Thread(target=job.start, daemon=True)
    try:
        starting.start()
        wait_until(lambda: told() == [(NO_BROKER, settings.service_url)], 60, "a trouble")
        assert job.process is not None
        assert not job.ready.is_set()
        first, said, *more = job.log.splitlines()
        assert " settings: /" in first
        assert said.endswith(f"no broker at {settings.service_url}, trying again")
        assert "deduplication" not in "".join(more)
        broker.start(port=port, http_port=http_port)
        starting.join()
        assert job.ready.is_set()
        wait_until(lambda: told() == [], 10, "the end of the trouble")
        assert "Traceback" not in job.log
        assert job.terminate() == 0
    finally:
        job.stop()
        broker.kill()
