"""Measures what a message costs from the socket to packed shard input, beside pulsar-client's receiving alone.

usage: intake.py [MESSAGES]

An embedded broker has MESSAGES (300,000) of 100 bytes with a key and two properties in one topic, and as many in 40
partitions. Of each: the job's receivers take all of them in, and pack them for two shards, 20,000 at most at a time;
then consumers of pulsar-client receive all, and read payload, key, properties, times and id of each: no row is made.
CPU is that of this process, microseconds a message. Prints one JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
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
from streaming.batch_schema import InputKind, input_rows
from streaming.source.receiving.receiver import Limits, Receiver, TopicAccess
from streaming.source.receiving.unreadable_messages import Acceptance
from tracker.messages import concat

BODY = b"x" * 100
PARTITIONS = (1, 40)
BATCH_MESSAGES = 20_000


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


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder))
        try:
            broker.start(port=0, http_port=0)
            found = {f"partitions_{partitions}": measure(broker, partitions, n) for partitions in PARTITIONS}
        finally:
            broker.kill()
    print(json.dumps({"messages": n, "bytes": len(BODY), **found}))


if __name__ == "__main__":
    main()
