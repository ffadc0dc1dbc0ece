"""`delaylake import`: messages from files and from another topic, delivered as if they had come in."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pulsar
import pyarrow as pa
import pyarrow.parquet as pq

from broker.protocol.entries import NOT_DECRYPTED
from broker.standalone import EmbeddedBroker
from tests.conftest import PROGRAM, RUN_SECONDS
from tests.support.clients import java_client
from tests.support.clients.java_client import make_key
from tests.support.service.harness import Collector, Job, check_exactly_once, now, wait_until
from tracker.messages import FIRST_IMPORTED_LEDGER
from warehouse.audit.accounts import run_audit


def run_import(job: Job, *arguments: str, status: int = 0) -> dict[str, Any]:
    command = [str(PROGRAM), "--config", str(job.file), "import", *arguments, "--output", "json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == status, done.stderr
    if status:
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        return {}
    counts: dict[str, Any] = json.loads(done.stdout)
    return counts


def check_owner_alone(*folders: Path) -> None:
    """Checks that nobody but the owner may read what a run has written; a file may go while it is looked for."""
    modes: dict[str, int] = {}
    for folder in folders:
        for path, _, files in os.walk(folder):
            for found in (path, *(f"{path}/{name}" for name in files)):
                with contextlib.suppress(FileNotFoundError):
                    modes[found] = os.lstat(found).st_mode
    assert len(modes) > 50
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def test_files_and_a_topic_are_delivered_once_with_all_that_they_have(
    tmp_path: Path, broker: EmbeddedBroker, pulsar_client: pulsar.Client, collector: Collector, topic: str
) -> None:
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    old = f"{topic}-old"
    due = {f"file {i}": now() + 25_000 + 5 * i for i in range(2_000)} | {"overdue": now() - 60_000}
    file = tmp_path / "orders.parquet"
    rows = {
        "deliver_at": pa.array([*due.values(), -1], pa.timestamp("ms")),
        "payload": [*due, "never"],
        "key": ["k"] * len(due) + [None],
        "properties": pa.array([[("colour", "red")]] * len(due) + [None], pa.map_(pa.string(), pa.string())),
        "event_time": pa.array([77] * len(due) + [None], pa.int64()),
    }
    pq.write_table(pa.table(rows), file)
    producer = pulsar_client.create_producer(old, batching_enabled=True, batching_max_messages=7)
    make_key(tmp_path, "strangers")
    encrypted = {"topic": old, "encrypted": {"key": (tmp_path / "strangers.pem").as_uri()}}
    # What the import can't decrypt: the first ones, some in the middle, and the last.
    for part in range(3):
        java_client.produce(broker.settings.service_url, [{**encrypted, "name": f"encrypted {part}"}])
        for i in range(150 * part, min(150 * (part + 1), 300)):
            due[f"topic {i}"] = now() + 25_000
            producer.send_async(f"topic {i}".encode(), None, properties={"deliverAt": str(due[f"topic {i}"])})
        producer.flush()

    counts = {"messages": 2_305, "rejected": 4, "already_there": 0, "pending": 2_301, "warnings": []}
    assert run_import(job, topic, str(file), "--from-topic", old) == counts
    job.start()
    try:
        # A message of the source topic itself, which goes on where it is.
        due["own"] = now() + 3_000
        own = pulsar_client.create_producer(topic)
        own.send(b"own", properties={"deliverAt": str(due["own"])})
        received = collector.collect(f"{topic}-a").received[f"{topic}-a"]
        wait_until(lambda: len(received) >= len(due), 60, f"{len(due)} messages")
        check_exactly_once(due, received)
        of_file = next(message for message in received if message.payload == b"file 7")
        assert (of_file.key, of_file.event_time, of_file.properties["colour"]) == ("k", 77, "red")
        ledger = int(of_file.properties["delaylake.messageId"].split(":")[0])
        assert ledger >= FIRST_IMPORTED_LEDGER
        reasons = Counter(row["reason"] for row in job.rows("rejects", "SELECT reason FROM {table}"))
        assert reasons == {"deliver_at is negative": 1, NOT_DECRYPTED: 3}
        run_import(job, topic, str(file), status=1)  # the job runs
        wait_until(lambda: run_audit(job.settings).taken_in == 2_306, 20, "the own message is written down")
    finally:
        job.terminate()
        job.stop()

    # The same again does nothing, and what has come to the other topic meanwhile is added.
    producer.send(b"later", properties={"deliverAt": str(now() + 20_000)})
    run_import(job, topic, str(file), status=1)  # there is a checkpoint
    again = run_import(job, topic, str(file), "--from-topic", old, "--discard-checkpoint")
    assert again == {"messages": 1, "rejected": 0, "already_there": 2_002, "pending": 1, "warnings": []}
    audit = run_audit(job.settings)
    assert (audit.taken_in, audit.rejected, audit.findings) == (2_307, 4, {})


def test_rows_with_a_schedule_key_or_a_rule_go_on_as_messages_of_the_topic_do(
    tmp_path: Path, broker: EmbeddedBroker, pulsar_client: pulsar.Client, collector: Collector, topic: str
) -> None:
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    begin = now() + 25_000
    rows = {
        "keyed": (begin + 3_600_000, {"scheduleKey": "k"}),
        "keyed, too": (begin + 1, {"scheduleKey": "k", "scheduleMode": "keep"}),
        "recurs": (begin, {"repeat": "@every 1s", "repeatTimes": "3", "misfire": "all", "delaylake.source": "x"}),
        "sent back": (begin, {"retryOf": "1:2:-1:-1", "retrySubscription": "a"}),
    }
    table = {
        "deliver_at": [due for due, _ in rows.values()],
        "payload": list(rows),
        "properties": pa.array([list(given.items()) for _, given in rows.values()], pa.map_(pa.string(), pa.string())),
    }
    pq.write_table(pa.table(table), file := tmp_path / "rows.parquet")
    counts = {"messages": 4, "rejected": 2, "already_there": 0, "pending": 2, "warnings": []}
    assert run_import(job, topic, str(file)) == counts
    job.start()
    try:
        newer = {"scheduleKey": "k", "deliverAt": str(now() + 2_000)}
        pulsar_client.create_producer(topic).send(b"newer", properties=newer)
        received = collector.collect(f"{topic}-a").received[f"{topic}-a"]
        wait_until(lambda: len(received) >= 4, 90, "all of them")
        assert Counter(message.payload for message in received) == {b"newer": 1, b"recurs": 3}
        recurring = [message.properties for message in received if message.payload == b"recurs"]
        found = {given["delaylake.occurrence"]: int(given["delaylake.deliverAt"]) for given in recurring}
        assert found == {str(i + 1): begin + 1_000 * i for i in range(3)}
        assert {message.properties["delaylake.source"] for message in received} == {topic}
        wait_until(lambda: {row["result"] for row in job.rows("outcomes")} == {"SUPERSEDED"}, 60, "the outcome")
        reasons = job.rows("rejects", "SELECT reason FROM {table} ORDER BY reason")
        assert [row["reason"].split(":")[0] for row in reasons] == ["retryOf", "scheduleKey"]
        check_owner_alone(tmp_path / "warehouse", tmp_path / "checkpoint")
    finally:
        job.terminate()
        job.stop()
