"""Consumers that fail: their messages come again, later each time, and at last as dead letters, through crashes."""

from __future__ import annotations

import json
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pulsar
import pytest
from delaylake import Client
from retrying_consumer import handle

from broker.standalone import EmbeddedBroker
from tests.conftest import RUN_SECONDS
from tests.support.clients.java_package import compile_classes
from tests.support.service.harness import Collector, Job, now, wait_until
from warehouse.audit.accounts import run_audit
from warehouse.views import Warehouse

ROOT = Path(__file__).parents[3]

BACKOFF = {"first": "1s", "factor": 2, "max": "3s", "jitter": 0.2, "attempts": 2}

# By payload of how many attempts a consumer fails.
FAILURES = {"fine": 0, "once": 1, "dead": 9, "batch 1": 1, "at once": 9}


@contextmanager
def failing_consumer(client: pulsar.Client, lake: Client, topic: str) -> Iterator[dict[str, list[int]]]:
    """Consumes a destination; yields, by payload, the attempts that have come."""
    consumer = client.subscribe(topic, "worker", initial_position=pulsar.InitialPosition.Earliest)
    come: dict[str, list[int]] = defaultdict(list)
    stopped = threading.Event()

    def work(message: pulsar.Message) -> None:
        text, attempt = message.data().decode(), int(message.properties().get("delaylake.attempt", "0"))
        come[text].append(attempt)
        if attempt < FAILURES.get(text, 0):
            raise RuntimeError(f"no {text} {attempt}")

    def run() -> None:
        while not stopped.is_set():
            try:
                message = consumer.receive(300)
            except pulsar.Timeout:
                continue
            handle(lake, client, consumer, message, "a", work)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield come
    finally:
        stopped.set()
        thread.join(timeout=60)
        consumer.close()


def has_come(come: dict[str, list[int]], text: str, *attempts: int) -> bool:
    return come[text] == list(attempts)


def n_sent_back(client: pulsar.Client, topic: str) -> int:
    """Counts the messages of a source topic that were sent back."""
    reader, n = client.create_reader(topic, pulsar.MessageId.earliest), 0
    while reader.has_message_available():
        n += "retryOf" in reader.read_next(60_000).properties()
    reader.close()
    return n


def check_java_consumer(
    broker: EmbeddedBroker, client: pulsar.Client, topic: str, collector: Collector, folder: Path
) -> None:
    """What the Java consumer, which the docs show, fails on comes again, at last as a dead letter, with its key."""
    producer = client.create_producer(topic)
    for text in ("fine", "once", "dead"):
        producer.send(text.encode(), partition_key=f"of {text}")
    program = str(ROOT / "tests/java/Retrying.java")
    classes = compile_classes(folder, "RetryingConsumer")
    done = subprocess.run(
        [
            "java",
            "-XX:TieredStopAtLevel=1",
            "-cp",
            classes,
            program,
            broker.settings.service_url,
            f"{topic}-a",
            "a",
            "6",
        ],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    got = sorted(line for line in done.stdout.splitlines() if line.startswith("GOT"))
    expected = [("fine", 0), ("once", 0), ("once", 1), ("dead", 0), ("dead", 1), ("dead", 2)]
    assert got == sorted(f"GOT {text} of {text} {attempt}" for text, attempt in expected)
    [dead] = wait_until(lambda: collector.received[f"{topic}-a-dlq"], 90, "the dead letter")
    assert (dead.payload, dead.properties["delaylake.attempt"]) == (b"dead", "3")
    assert json.loads(dead.properties["delaylake.reasons"]) == 3 * ["java.lang.IllegalStateException: no dead"]


@pytest.mark.chaos  # tests/simulation has such crashes in each run
def test_what_consumers_fail_on_comes_again_through_crashes(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    of_java = f"{topic}_java"
    routes: list[dict[str, Any]] = [
        {"source": topic, "subscriptions": [{"name": "a", "backoff": BACKOFF}, {"name": "b"}]},
        {"source": of_java, "subscriptions": [{"name": "a", "backoff": BACKOFF}]},
    ]
    tracker = {"max_seal_interval_millis": 500}
    job = Job(tmp_path, broker.settings, routes, tracker=tracker)
    collector.collect(f"{topic}-b").collect(f"{topic}-a-dlq").collect(f"{of_java}-a-dlq")
    control = f"{topic}_control"
    lake = Client(
        broker=broker.settings.service_url,
        control_topic=control,
        outcome_topic=f"{control}_outcomes",
        timeout_seconds=150,
    )

    def topics(*arguments: str) -> str:
        done = job.command("topics", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        job.start()
        with lake, failing_consumer(pulsar_client, lake, f"{topic}-a") as come:
            check_java_consumer(broker, pulsar_client, of_java, collector, tmp_path)
            due = {"deliverAt": str(now() + round(8_000 * job.pace))}
            producer = pulsar_client.create_producer(topic)
            ids = {}
            for text in ("fine", "once", "dead", "kill", "lost", "taken"):
                ids[text] = str(producer.send(text.encode(), properties=due))
            batched = pulsar_client.create_producer(topic, batching_enabled=True, batching_max_publish_delay_ms=2_000)
            for i in range(3):
                batched.send_async(f"batch {i}".encode(), lambda *_: None, properties=due)
            batched.flush()
            producer.send(b"at once", properties={"scheduleKey": "k"})
            ids["quick"] = str(producer.send(b"quick"))

            names = {text: ":".join(given.strip("()").split(",")[:2]) for text, given in ids.items()}
            wait_until(lambda: len(come) == 11 and come["dead"] == [0, 1, 2], 120, f"first deliveries\n{job.log}")
            # Also what was due at once is retried by its id.
            dead = wait_until(lambda: len(found := collector.received[f"{topic}-a-dlq"]) == 2 and found, 90, job.log)
            reasons = {m.payload.decode(): json.loads(m.properties["delaylake.reasons"]) for m in dead}
            assert reasons == {text: [f"RuntimeError: no {text} {i}" for i in range(3)] for text in ("dead", "at once")}
            assert {m.properties["delaylake.attempt"] for m in dead} == {"3"}
            wait_until(lambda: come["once"] == [0, 1] and come["batch 1"] == [0, 1], 60, f"retries\n{job.log}")
            # Retries that wait while the job is killed, and its checkpoint is lost.
            for text in ("kill", "lost", "taken"):
                after = f"{round(15 * job.pace)}s" if text == "kill" else "1h"
                topics(
                    "retry", topic, "-s", "a", "--messageId-triplet", names[text], "--reason", text, "--after", after
                )

            def waiting() -> dict[str, int]:
                listed = json.loads(job.command("pending", topic, "-s", "a", "--output", "json").stdout)["messages"]
                return {m["messageId"].rsplit(":", 2)[0]: m["attempt"] for m in listed}

            # A command is answered some ms before the tables have what it did.
            sent_back = {names[text]: 1 for text in ("kill", "lost", "taken")}
            wait_until(lambda: waiting() == sent_back, 30, "three retries")
            job.kill9()
            job.start()
            wait_until(lambda: come["kill"] == [0, 1], 90, f"a retry after a crash\n{job.log}")
            told = topics("retry", topic, "-s", "a", "--messageId-triplet", names["lost"], "--output", "json")
            assert [o["result"] for o in json.loads(told)] == ["ALREADY_APPLIED"]
            topics("skip-messages", topic, "-s", "a", "--messageId-triplet", names["taken"])
            last = producer.send(b"last")
            names["last"] = f"{last.ledger_id()}:{last.entry_id()}"
            wait_until(lambda: come["last"] == [0], 60, f"what comes before the crash\n{job.log}")
            job.kill9()
            job.rebuild()
            job.start()
            for text in ("quick", "last"):
                topics("retry", topic, "-s", "a", "--messageId-triplet", names[text], "--after", "100ms")
                wait_until(partial(has_come, come, text, 0, 1), 60, f"a retry of what was due at once\n{job.log}")
            topics("deliver-now", topic, "-s", "a", "--messageId-triplet", names["lost"])
            wait_until(lambda: come["lost"] == [0, 1], 120, f"a retry after a rebuild\n{job.log}")
            topics("retry", topic, "-s", "a", "--messageId-triplet", names["lost"], "--after", "100ms")
            wait_until(lambda: come["lost"] == [0, 1, 2], 60, f"one more retry\n{job.log}")

            assert n_sent_back(pulsar_client, topic) == 0
            # Each time that it was sent back it was another message.
            n_of_java = 3 + n_sent_back(pulsar_client, of_java)
            wait_until(lambda: run_audit(job.settings).taken_in == 12 + n_of_java, 60, f"entries\n{job.log}")
            expected = {text: [0] for text in ("fine", "taken", "batch 0", "batch 2")}
            expected |= {text: [0, 1, 2] for text in ("dead", "lost", "at once")}
            assert come == expected | {text: [0, 1] for text in ("once", "kill", "batch 1", "quick", "last")}
            # The other subscription has had each message once.
            assert sorted(m.payload.decode() for m in collector.received[f"{topic}-b"]) == sorted(come)
            assert len(collector.received[f"{topic}-a-dlq"]) == 2

            def are_written() -> bool:
                sql = "SELECT count(*) AS n FROM attempts WHERE sent_at IS NOT NULL AND retry_of IS NULL"
                return bool(Warehouse(job.settings).sql(sql)["n"][0].as_py() == 13)

            wait_until(are_written, 60, f"deliveries\n{job.log}")
            attempts = Warehouse(job.settings).sql(
                "SELECT attempt, reason, destination, sent_at >= deliver_at AS on_time FROM attempts "
                f"WHERE position LIKE '{names['dead']}:%' ORDER BY attempt"
            )
            assert attempts.to_pylist() == [
                {
                    "attempt": n,
                    "reason": f"RuntimeError: no dead {n - 1}",
                    "destination": f"{topic}-a" if n < 3 else f"{topic}-a-dlq",
                    "on_time": True,
                }
                for n in (1, 2, 3)
            ]
            # One of the dead letters is re-driven: its attempts begin anew. Then it is dead again.
            asked = ("redrive", topic, "-s", "a", "--reason", "no dead", "--output", "json")
            [listed] = json.loads(topics(*asked, "--dry-run"))["messages"]
            assert (listed["messageId"].rsplit(":", 2)[0], listed["attempt"]) == (names["dead"], 3)
            assert json.loads(topics(*asked, "--yes", "--request-id", "again"))["redriven"] == 1
            dead = wait_until(lambda: len(found := collector.received[f"{topic}-a-dlq"]) == 3 and found, 90, job.log)
            assert come["dead"] == [0, 1, 2, 0, 1, 2]
            assert dead[-1].properties["delaylake.attempt"] == "3"
            assert json.loads(topics(*asked, "--dry-run"))["matched"] == 1

            assert n_sent_back(pulsar_client, topic) == 1
            sql = (
                "SELECT attempt, is_dead_letter, request_id FROM attempts "
                f"WHERE topic = '{topic}' AND retry_of IS NOT NULL AND sent_at IS NOT NULL"
            )
            [told] = wait_until(lambda: Warehouse(job.settings).sql(sql).to_pylist(), 60, job.log)
            assert tuple(told.values()) == (0, False, "redrive-again")
            assert sorted(m.payload.decode() for m in collector.received[f"{topic}-b"]) == sorted(come)
            n_of_java = 3 + n_sent_back(pulsar_client, of_java)
            wait_until(lambda: run_audit(job.settings).taken_in == 13 + n_of_java, 60, f"entries\n{job.log}")
            audit = run_audit(job.settings)
            assert audit.is_clean, audit.findings
        assert job.terminate() == 0
    finally:
        job.stop()
