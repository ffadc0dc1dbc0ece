"""`delaylake import TOPIC --from SYSTEM`: what waits in other systems, on real servers, is delivered once, on time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

import pika
import psycopg
import pulsar
import pytest
import redis
from pika.spec import BasicProperties

from broker.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from recovery.other_systems.item import SourceError
from recovery.other_systems.rabbitmq import RabbitMQ
from tests.conftest import PROGRAM, run_here
from tests.harness import Collector, Job, check_exactly_once, now, wait_until
from tests.other_servers import RABBITMQ, postgres_server, rabbitmq_server, redis_server, url_of
from warehouse.audit.accounts import run_audit

N_SIDEKIQ = 3_000


def run_import(job: Job, system: str, url: str, *options: str) -> dict[str, Any]:
    topic = job.settings.routes[0].source
    done = run_here(
        *("--config", str(job.file), "import", topic, "--from", system, "--url", url, *options, "--output", "json")
    )
    assert done.returncode == 0, done.stderr
    counts: dict[str, Any] = json.loads(done.stdout)
    return counts


def fill_redis(server: redis.Redis, due: dict[str, int], begin: int) -> None:
    """Writes jobs as Sidekiq, BullMQ, RQ and Celery do, and what each must leave or can't take.

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
    seconds = begin // 1000 + 2
    server.zadd("rq:scheduled:mail", {"5d1e": seconds})
    server.hset("rq:job:5d1e", mapping={"data": zlib.compress(b"serialized"), "origin": "mail"})
    due["serialized"] = seconds * 1000
    for key, id, eta in (("celery", "a", "2027-01-15T08:00:00+00:00"), ("celery\x06\x163", "b", None)):
        message = {"body": id, "headers": {"task": "add", "id": id, "eta": eta}, "properties": {}}
        server.lpush(key, json.dumps(message))
    taken = {"body": "eta", "headers": {"task": "add", "id": "c", "eta": "2020-01-01T00:00:00"}, "properties": {}}
    server.hset("unacked", "tag", json.dumps([taken, "", "celery"]))
    due["eta"] = 1_577_836_800_000


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
    with redis_server(tmp_path) as server:
        url = url_of(server)
        fill_redis(server, due, now() + 60_000)
        before = server.execute_command("DEBUG", "DIGEST")
        found = run_import(job, "sidekiq", url, "--queue", "mail", "--dry-run")
        assert (found["items"], found["rejected"], found["left"]) == (N_SIDEKIQ + 1, 1, {"of other queues": 1})
        assert (found["first_due"], found["last_due"]) == (min(due[t] for t in due if "Mail" in t), max(due.values()))
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
        for system, counts in {"bullmq": (6, 1, {}), "rq": (1, 0, {}), "celery": (2, 0, {"without an eta": 1})}.items():
            done = run_import(job, system, url, "--discard-checkpoint")
            assert (done["messages"], done["rejected"], done["left"]) == counts
        assert server.execute_command("DEBUG", "DIGEST") == before

        with postgres_server(tmp_path) as postgres:
            fill_postgres(postgres, due, now() + 60_000)
            done = run_import(job, "oban", postgres, "--discard-checkpoint")
            assert (done["messages"], done["rejected"], done["already_there"]) == (1_500, 0, 0)
            again = run_import(job, "oban", postgres, "--dry-run")
            assert (again["items"], again["already_there"]) == (0, 1_500)

        later = 1_800_000_000_000  # of Celery's first task, which is not waited for here
        job.start()
        try:
            received = collector.collect(f"{topic}-a").received[f"{topic}-a"]
            wait_until(lambda: len(received) >= len(due), 90, f"{len(due)} messages")
            check_exactly_once(due, received)
            of_rq = next(message for message in received if message.payload == b"serialized")
            assert (of_rq.properties["queue"], of_rq.properties["jobId"]) == ("mail", "5d1e")
        finally:
            job.terminate()
            job.stop()

        repeated = run_import(job, "sidekiq", url, "--queue", "mail", "--discard-checkpoint")
        assert (repeated["messages"], repeated["already_there"], repeated["pending"]) == (0, N_SIDEKIQ + 1, 1)
        pending = job.rows("delayed_index", "SELECT payload FROM {table} WHERE deliver_at = " + str(later))
        assert [row["payload"] for row in pending] == [b"a"]
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


@pytest.mark.skipif(not RABBITMQ.exists(), reason="rabbitmq-server is not installed: apt-get install rabbitmq-server")
def test_messages_of_rabbitmq_are_read_and_put_back_and_known_again(tmp_path: Path) -> None:
    with rabbitmq_server(tmp_path) as url:
        check_rabbitmq(url)


def check_rabbitmq(url: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_declare("waits", durable=True)
        stamped = BasicProperties(expiration="3600000", timestamp=1_800_000_000)
        for body, about in [
            (b"delayed", BasicProperties(headers={"x-delay": 500})),
            (b"twice", stamped),
            (b"twice", stamped),
            (b"ready", BasicProperties()),
        ]:
            channel.basic_publish("", "waits", body, about)
        while channel.queue_declare("waits", passive=True).method.message_count < 4:
            time.sleep(0.05)
    source = RabbitMQ(url, ["waits"])
    first, *twice = source.items()
    assert source.left == {"without x-delay and expiration": 1}
    assert first.payload == b"delayed"
    assert [(found.payload, found.due) for found in twice] == [(b"twice", 1_800_003_600_000)] * 2
    ids = {first.id, *(found.id for found in twice)}
    assert len(ids) == 3
    assert {found.id for found in RabbitMQ(url, ["waits"]).items()} == ids
    with pytest.raises(SourceError, match="no queue 'other'"):
        list(RabbitMQ(url, ["other"]).items())
