"""`delaylake import TOPIC --from SYSTEM`: what waits in other systems, on real servers, is delivered once, on time."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kombu
import pika
import psycopg
import pulsar
import pytest
import redis
import rq
from celery import Celery
from celery.signals import before_task_publish
from pika.spec import BasicProperties

from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from checkpoint_from_tables.other_systems.item import SourceError
from checkpoint_from_tables.other_systems.rabbitmq import RabbitMQ
from tests.conftest import PROGRAM, run_here
from tests.support.servers.postgres_server import postgres_server
from tests.support.servers.rabbitmq_server import need_rabbitmq, rabbitmq_server
from tests.support.servers.redis_server import redis_server, url_of
from tests.support.service.harness import Collector, Job, check_exactly_once, now, wait_until
from warehouse.audit.accounts import run_audit

N_SIDEKIQ = 3_000
STAMPED_DUE = 1_900_003_600_000  # of RabbitMQ's messages with a timestamp
FAR_ETA = 1_800_000_000_000  # of a task of Celery's, ms since the epoch


def run_import(job: Job, system: str, url: str, *options: str) -> dict[str, Any]:
    topic = job.settings.routes[0].source
    done = run_here(
        *("--config", str(job.file), "import", topic, "--from", system, "--url", url, *options, "--output", "json")
    )
    assert done.returncode == 0, done.stderr
    counts: dict[str, Any] = json.loads(done.stdout)
    return counts


def fill_redis(server: redis.Redis, due: dict[str, int], begin: int) -> None:
    """Writes jobs as Sidekiq and BullMQ do, which are not Python, and what each must leave or can't take.

    Args:
        due: gets the payloads of those that are to be delivered, and when.
        begin: ms since the epoch: when the first is due.
    """
    for i in range(N_SIDEKIQ):
        at = begin + 3 * i
        text = json.dumps({"class": "Mail", "args": [i], "jid": f"{i:024x}", "queue": "mail", "created_at": 1.5})
        server.zadd("retry" if i % 10 == 0 else "schedule", {text: at / 1000})
        due[text] = at
    server.zadd("schedule", {'{"class": "Other", "jid": "f", "queue": "other"}': 2e9, "no JSON": 2e9})
    for i in range(5):
        at = begin + 1_000 + i
        server.zadd("bull:video:delayed", {str(i): at * 4096 + i})
        server.hset(f"bull:video:{i}", mapping={"name": "encode", "data": f'{{"video": {i}}}', "timestamp": begin - 9})
        due[f'{{"video": {i}}}'] = at
    server.zadd("bull:video:delayed", {"gone": 1})


def schedule_with_rq(server: redis.Redis, due: dict[str, int], begin: int) -> str:
    """Schedules a job as an application that has RQ does; returns its id."""
    queue = rq.Queue("mail", connection=server, serializer=rq.serializers.JSONSerializer)
    seconds = begin // 1000 + 2
    job = queue.enqueue_at(datetime.fromtimestamp(seconds, UTC), "mail.send", 5, to="them")
    due[job.data.decode()] = seconds * 1000
    return str(job.id)


@contextmanager
def tasks_of_celery(url: str, due: dict[str, int]) -> Iterator[None]:
    """Sends tasks as an application that has Celery does; one of them a worker has taken, and keeps until the end.

    Args:
        due: gets the body of each that has an ETA, and its ETA.
    """

    def note(body: Any, headers: dict[str, Any], **_: Any) -> None:
        if headers["eta"] is not None:
            at = math.ceil(round(datetime.fromisoformat(headers["eta"]).timestamp() * 1000, 3))
            due[kombu.serialization.dumps(body, "json")[2]] = at

    before_task_publish.connect(note)  # as long as `note` lives
    with Celery("shop", broker=url, set_as_current=False) as app, app.connection_for_read() as worker:
        app.send_task("add", (1, 2), eta=datetime(2020, 1, 1, tzinfo=UTC))
        worker.SimpleQueue("celery").get(timeout=60)
        app.send_task("add", (3, 4), eta=datetime.fromtimestamp(FAR_ETA / 1000, UTC))
        app.send_task("add", (5, 6), countdown=60, priority=3)
        app.send_task("add", (7, 8))
        yield


def fill_postgres(url: str, due: dict[str, int], begin: int) -> None:
    """Writes jobs as Oban does, in the columns that the mapping has."""
    columns = "state text, queue text, worker text, args jsonb, attempt int, scheduled_at timestamp, meta jsonb"
    values = "'scheduled', 'mail', 'Mail', %s, 0, to_timestamp(%s / 1000.0) AT TIME ZONE 'UTC', '{}'"
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE TABLE oban_jobs (id bigserial PRIMARY KEY, {columns})")
        rows = [(f'{{"oban": {i}}}', begin + i) for i in range(1_500)]
        insert = f"INSERT INTO oban_jobs (state, queue, worker, args, attempt, scheduled_at, meta) VALUES ({values})"
        cursor.executemany(insert, rows)
    due.update(rows)


def test_each_system_is_brought_in_once_also_after_a_kill(
    tmp_path: Path, broker: EmbeddedBroker, pulsar_client: pulsar.Client, collector: Collector, topic: str
) -> None:
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    due: dict[str, int] = {}
    with redis_server(tmp_path) as server, tasks_of_celery(url := url_of(server), due):
        fill_redis(server, due, now() + 60_000)
        rq_id = schedule_with_rq(server, due, now() + 60_000)
        before = server.execute_command("DEBUG", "DIGEST")
        found = run_import(job, "sidekiq", url, "--queue", "mail", "--dry-run")
        assert (found["items"], found["rejected"], found["left"]) == (N_SIDEKIQ + 1, 1, {"of other queues": 1})
        mails = [at for text, at in due.items() if "Mail" in text]
        assert (found["first_due"], found["last_due"]) == (min(mails), max(mails))
        assert not (tmp_path / "warehouse").exists()

        # Killed as soon as the table `imported` has the items, or a little later.
        arguments = ["--config", str(job.file), "import", topic, "--from", "sidekiq", "--queue", "mail"]
        killed = subprocess.Popen(
            [str(PROGRAM), *arguments], env={**os.environ, "DELAYLAKE_IMPORT_URL": url}, stderr=subprocess.DEVNULL
        )
        log = tmp_path / "warehouse/imported/_delta_log"
        wait_until(lambda: len(list(log.glob("*.json"))) > 2 or killed.poll() is not None, 60, "items are imported")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert len(job.rows("imported")) == N_SIDEKIQ + 1

        again = run_import(job, "sidekiq", url, "--queue", "mail", "--discard-checkpoint")
        assert (again["messages"] + again["already_there"], again["pending"]) == (N_SIDEKIQ + 1, N_SIDEKIQ)
        for system, counts in {"bullmq": (6, 1, {}), "rq": (1, 0, {}), "celery": (3, 0, {"without an eta": 1})}.items():
            done = run_import(job, system, url, "--discard-checkpoint")
            assert (done["messages"], done["rejected"], done["left"]) == counts
        assert server.execute_command("DEBUG", "DIGEST") == before

        with postgres_server(tmp_path) as postgres:
            fill_postgres(postgres, due, now() + 60_000)
            done = run_import(job, "oban", postgres, "--discard-checkpoint")
            assert (done["messages"], done["rejected"], done["already_there"]) == (1_500, 0, 0)
            again = run_import(job, "oban", postgres, "--dry-run")
            assert (again["items"], again["already_there"]) == (0, 1_500)

        far = next(text for text in due if due[text] == FAR_ETA)
        del due[far]
        job.start()
        try:
            received = collector.collect(f"{topic}-a").received[f"{topic}-a"]
            wait_until(lambda: len(received) >= len(due), 90, f"{len(due)} messages")
            check_exactly_once(due, received)
            [of_rq] = [message.properties for message in received if b"mail.send" in message.payload]
            assert (of_rq["queue"], of_rq["jobId"]) == ("mail", rq_id)
            of_celery = [message for message in received if message.properties.get("task") == "add"]
            assert sorted(json.loads(message.payload)[0] for message in of_celery) == [[1, 2], [5, 6]]
        finally:
            job.terminate()
            job.stop()

        repeated = run_import(job, "sidekiq", url, "--queue", "mail", "--discard-checkpoint")
        assert (repeated["messages"], repeated["already_there"], repeated["pending"]) == (0, N_SIDEKIQ + 1, 1)
        pending = job.rows("delayed_index", "SELECT payload FROM {table} WHERE deliver_at = " + str(FAR_ETA))
        assert [row["payload"].decode() for row in pending] == [far]
    before_refused = len(list((tmp_path / "checkpoint").glob("query*")))
    nowhere = ["--from", "rq", "--url", "redis://:secret@127.0.0.1:1/0", "--discard-checkpoint"]
    refused = run_here("--config", str(job.file), "import", topic, *nowhere)
    assert (refused.returncode, len(refused.stderr.strip().splitlines())) == (1, 1)
    assert "secret" not in refused.stderr
    assert len(list((tmp_path / "checkpoint").glob("query*"))) == before_refused
    rejects = job.rows("rejects", "SELECT reason, payload FROM {table} ORDER BY reason")
    assert rejects == [
        {"reason": "its hash is not there, or has no data", "payload": None},
        {"reason": "no JSON object with a jid", "payload": b"no JSON"},
    ]
    assert run_audit(job.settings).findings == {}


def test_what_pulsar_itself_delays_for_a_subscription_moves_over(
    tmp_path: Path, broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str
) -> None:
    """What the subscription's consumer has done stays there, with nothing of it missed; the rest is acknowledged."""
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    old = f"{topic}-old"
    consumer = pulsar_client.subscribe(
        old, "worker", consumer_type=pulsar.ConsumerType.Shared, initial_position=pulsar.InitialPosition.Earliest
    )
    producer = pulsar_client.create_producer(old)
    due = {}
    for i in range(60):
        # Every third one is done before the move.
        due[f"{i}".encode()] = now() + 3_600_000 + 1_001 * i
        producer.send(f"{i}".encode(), deliver_at=None if i % 3 == 0 else due[f"{i}".encode()])
    for i in range(0, 60, 3):
        done = consumer.receive(60_000)
        assert done.data() == f"{i}".encode()
        del due[done.data()]
        consumer.acknowledge(done)

    def run(status: int = 0, subscription: str = "worker") -> Any:
        arguments = [topic, "--from-topic", old, "--subscription", subscription, "--discard-checkpoint"]
        command = run_here("--config", str(job.file), "import", *arguments, "--output", "json")
        assert command.returncode == status, command.stderr
        return command.stderr if status else json.loads(command.stdout)

    assert len(run(1).strip().splitlines()) == 1  # its consumer is there
    consumer.close()
    assert "has no subscription other" in run(1, "other")
    assert run() == {"messages": 40, "rejected": 0, "already_there": 0, "pending": 40, "warnings": []}
    rows = job.rows("delayed_index", "SELECT payload, deliver_at FROM {table}")
    assert {row["payload"]: row["deliver_at"] for row in rows} == due
    with AdminClient(broker.settings) as admin:
        wait_until(lambda: admin.backlog(old, "worker") == 0, 30, "all is acknowledged")
    again = run()
    assert (again["messages"], again["pending"]) == (0, 40)
    assert job.rows("rejects") == []


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_messages_of_rabbitmq_are_read_and_put_back_and_imported_once(
    tmp_path: Path, broker: EmbeddedBroker, topic: str, kind: str
) -> None:
    need_rabbitmq()
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}])
    (folder := tmp_path / "rabbitmq").mkdir()
    with rabbitmq_server(folder) as url:
        check_rabbitmq(url, kind)
        left = {"without x-delay and expiration": 1}
        found = run_import(job, "rabbitmq", url, "--queue", "waits", "--dry-run")
        assert (found["items"], found["rejected"], found["already_there"], found["left"]) == (3, 0, 0, left)
        assert found["last_due"] == STAMPED_DUE
        assert not (tmp_path / "warehouse").exists()
        done = run_import(job, "rabbitmq", url, "--queue", "waits")
        assert (done["messages"], done["rejected"], done["pending"], done["left"]) == (3, 0, 3, left)
        again = run_import(job, "rabbitmq", url, "--queue", "waits", "--discard-checkpoint")
        assert (again["messages"], again["already_there"], again["pending"]) == (0, 3, 3)
    rows = job.rows("delayed_index", "SELECT payload, deliver_at FROM {table} ORDER BY deliver_at")
    assert [row["payload"] for row in rows] == [b"delayed", b"twice", b"twice"]
    assert [row["deliver_at"] for row in rows[1:]] == [STAMPED_DUE] * 2


def check_rabbitmq(url: str, kind: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_declare("waits", durable=True, arguments={"x-queue-type": kind})
        stamped = BasicProperties(expiration="3600000", timestamp=STAMPED_DUE // 1000 - 3_600)
        for body, about in [
            (b"delayed", BasicProperties(headers={"x-delay": 500})),
            (b"twice", stamped),
            (b"twice", stamped),
            (b"ready", BasicProperties()),
        ]:
            channel.basic_publish("", "waits", body, about)
        while channel.queue_declare("waits", durable=True, passive=True).method.message_count < 4:
            time.sleep(0.05)
    source = RabbitMQ(url, ["waits"])
    first, *twice = source.items()
    assert source.left == {"without x-delay and expiration": 1}
    assert first.payload == b"delayed"
    assert [(found.payload, found.due) for found in twice] == [(b"twice", STAMPED_DUE)] * 2
    ids = {first.id, *(found.id for found in twice)}
    assert len(ids) == 3
    assert {found.id for found in RabbitMQ(url, ["waits"]).items()} == ids
    with pytest.raises(SourceError, match="no queue 'other'"):
        list(RabbitMQ(url, ["other"]).items())
