"""Measures what a message costs from the socket to packed shard input, beside pulsar-client's receiving alone.

usage: intake.py [MESSAGES [TOPICS]]

An embedded broker has MESSAGES (300,000) of 100 bytes with a key and two properties in one topic, and as many in 40
partitions. Of each: the job's receivers take all of them in, and pack them for two shards, 20,000 at most at a time;
then consumers of pulsar-client receive all, and read payload, key, properties, times and id of each: no row is made.
Then TOPICS (500) topics get 1,000 messages a second, in turn, which the whole source takes into batches for 20 seconds:
`trickle`, and without messages `idle`. CPU is that of this process, microseconds a message or percent of a core. Prints
one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar

from broker.client import connect
from broker.position import START, SourceTopic
from broker.protocol.brokers import Brokers
from broker.protocol.byte_budget import ByteBudget
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.topic_questions import TopicQuestions
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings, Settings
from streaming.batch_schema import InputKind, input_rows
from streaming.source.reader import SourceReader, TickPart
from streaming.source.receiving.receiver import Limits, Receiver, TopicAccess
from streaming.source.receiving.unreadable_messages import Acceptance
from tracker.messages import concat
from warehouse.delta.tables import Tables

BODY = b"x" * 100
PARTITIONS = (1, 40)
BATCH_MESSAGES = 20_000
RATE, SECONDS = 1_000, 20  # of what trickles in
BATCH_SECONDS = 0.25  # that Spark takes for a batch


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(n: int, work: Callable[[], None]) -> dict[str, float]:
    cpu, began = cpu_seconds(), time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return {
        "cpu_us_a_message": round((cpu_seconds() - cpu) / n * 1e6, 2),
        "messages_a_second": round(n / seconds),
        "mb_a_second": round(n * len(BODY) / seconds / 1e6, 1),
    }


def produce(client: pulsar.Client, topic: str, n: int) -> None:
    producer = client.create_producer(
        topic,
        batching_enabled=True,
        batching_max_publish_delay_ms=5,
        block_if_queue_full=True,
        max_pending_messages=20_000,
    )
    for i in range(n):
        due = str(2_000_000_000_000 + i)
        producer.send_async(
            BODY, None, properties={"deliverAt": due, "region": "eu"}, partition_key=f"customer-{i % 997}"
        )
    producer.flush()
    producer.close()


def take_in(broker: EmbeddedBroker, admin: AdminClient, names: list[str], n: int) -> None:
    brokers = Brokers(broker.settings)
    receivers = []
    budget = ByteBudget(48 << 20, 32 << 20, 16 << 20)
    for name in names:
        share = budget.join()
        receiver = Receiver(
            SourceTopic(name, name, -1),
            TopicAccess(
                lambda name=name, share=share: brokers.subscribe(  # type: ignore[misc]
                    name, "job", max_bytes=16 << 20, max_messages=20_000, share=share
                ),
                TopicQuestions(admin, "job"),
            ),
            START,
            Limits(2 * BATCH_MESSAGES, 64 << 20, share),
            Acceptance(0, 5 << 20),
        )
        receiver.start()
        receivers.append(receiver)
    positions = dict.fromkeys(names, START)
    taken = 0
    while taken < n:
        tables = []
        for receiver in receivers:
            end, _, _ = receiver.take_into_batch(BATCH_MESSAGES // len(names), 16 << 20)
            tables.append(receiver.rows(positions[receiver.source.name], end))
            receiver.forget(end)
            positions[receiver.source.name] = end
        rows = concat(tables).combine_chunks()
        input_rows(InputKind.MESSAGES, rows, [0, 1])
        taken += rows.num_rows
        if rows.num_rows < BATCH_MESSAGES // 2:
            time.sleep(0.05)
    for receiver in receivers:
        receiver.stop()
    brokers.close()


def receive_by_client(client: pulsar.Client, names: list[str], n: int) -> None:
    consumers = [client.subscribe(name, "client", receiver_queue_size=2_000) for name in names]
    taken = 0
    while taken < n:
        for consumer in consumers:
            try:
                for _ in range(1_000):
                    message = consumer.receive(1)._message
                    message.data(), message.partition_key(), message.properties(), message.message_id()
                    message.publish_timestamp(), message.event_timestamp(), message.producer_name()
                    taken += 1
            except pulsar.Timeout:
                continue
    for consumer in consumers:
        consumer.close()


def measure(broker: EmbeddedBroker, partitions: int, n: int) -> dict[str, Any]:
    topic = f"persistent://public/default/intake-{partitions}"
    client = connect(broker.settings)
    with AdminClient(broker.settings) as admin:
        if partitions > 1:
            admin.create_partitioned_topic(topic, partitions)
        names = client.get_topic_partitions(topic)
        for name in names:
            for subscription in ("job", "client"):
                client.subscribe(name, subscription, initial_position=pulsar.InitialPosition.Earliest).close()
        produce(client, topic, n)
        own = measured(n, lambda: take_in(broker, admin, names, n))
        peer = measured(n, lambda: receive_by_client(client, names, n))
    client.close()
    return {
        "own": own,
        "pulsar_client": peer,
        "cpu_ratio": round(own["cpu_us_a_message"] / peer["cpu_us_a_message"], 2),
    }


def produce_slowly(settings: PulsarSettings, topics: list[str]) -> None:
    client = connect(settings)
    producers = [client.create_producer(topic, batching_enabled=False) for topic in topics]
    began = time.monotonic()
    for i in range(RATE * SECONDS):
        time.sleep(max(0.0, began + i / RATE - time.monotonic()))
        due = str(2_000_000_000_000 + i)
        producers[i % len(producers)].send_async(BODY, None, properties={"deliverAt": due}, partition_key="customer-1")
    for producer in producers:
        producer.flush()
    client.close()


def trickle(broker: EmbeddedBroker, folder: Path, n_topics: int) -> dict[str, Any]:
    """Runs the source as Spark does, with an empty feedback, and batches that take BATCH_SECONDS."""
    topics = [f"persistent://public/default/trickle-{i}" for i in range(n_topics)]
    settings = Settings(
        pulsar=broker.settings,
        warehouse=f"file:{folder}/warehouse",
        checkpoint=f"file:{folder}/checkpoint",
        routes=[{"source": topic, "subscriptions": [{"name": "a"}]} for topic in topics],  # type: ignore[arg-type]
    )
    Path(folder, "checkpoint").mkdir()
    Tables(settings.warehouse).create()
    source = SourceReader(
        {
            "settings": settings.model_dump_json(),
            "run": "benchmark",
            "epoch": "0",
            "shard_keys": "[0, 1]",
            "feedback": f"{folder}/feedback",
            "troubles": f"{folder}/troubles",
        }
    )
    offset = source.initial_offset()
    found: dict[str, Any] = {"topics": n_topics}

    def take_in(until: Callable[[], bool]) -> dict[str, float]:
        nonlocal offset
        cpu, began, n_batches, n_bytes = cpu_seconds(), time.monotonic(), 0, 0
        while not until():
            begin, offset = offset, json.loads(json.dumps(source.next_offset(offset)))
            parts = source.partitions(begin, offset)
            n_bytes += sum(len(row[2]) for part in parts if isinstance(part, TickPart) for row in part.rows)
            time.sleep(BATCH_SECONDS)
            source.commit(offset)
            n_batches += 1
        cpu, seconds = cpu_seconds() - cpu, time.monotonic() - began
        return {
            "cpu_us_a_message": round(cpu / (RATE * SECONDS) * 1e6, 1),
            "core_percent": round(100 * cpu / seconds, 1),
            "batches_a_second": round(n_batches / seconds, 2),
            "mb": round(n_bytes / 1e6, 1),
        }

    try:
        ends_at = time.monotonic() + SECONDS
        take_in(lambda: time.monotonic() > ends_at)
        idle_ends_at = time.monotonic() + SECONDS / 2
        found["idle"] = take_in(lambda: time.monotonic() > idle_ends_at)
        producer = multiprocessing.get_context("spawn").Process(target=produce_slowly, args=(broker.settings, topics))
        producer.start()
        found["trickle"] = take_in(lambda: not producer.is_alive())
        found["threads"] = threading.active_count()
    finally:
        source.stop()
    return found


def main() -> None:
    given = [int(argument) for argument in sys.argv[1:]]
    n, n_topics = given + [300_000, 500][len(given) :]
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder))
        try:
            broker.start(port=0, http_port=0)
            found = {f"partitions_{partitions}": measure(broker, partitions, n) for partitions in PARTITIONS if n}
            found |= trickle(broker, Path(folder), n_topics)
        finally:
            broker.kill()
    print(json.dumps({"messages": n, "bytes": len(BODY), **found}))


if __name__ == "__main__":
    main()
