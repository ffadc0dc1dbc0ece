"""A backlog of large messages in many partitions, at a real broker: how many bytes all receivers together hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pulsar
import pytest

from broker.position import START, SourceTopic
from broker.protocol.brokers import Brokers
from broker.protocol.consumer import EntryConsumer
from broker.protocol.flow import FetchBudget
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.topic_questions import TopicQuestions
from broker.standalone import EmbeddedBroker
from streaming.source.receiving.receiver import Limits, Receiver
from streaming.source.receiving.room import Room
from tests.support.service.harness import wait_until

pytestmark = pytest.mark.long

PARTITIONS, SMALL_PARTITIONS = 200, 5
MESSAGES = 2  # of each partition
BYTES = 800_000
MIB = 1 << 20


class Held:
    """Looks all the time how many bytes the receivers hold, and keeps the most."""

    def __init__(self, room: Room, consumers: list[EntryConsumer]) -> None:
        self._room, self._consumers = room, consumers
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.002):
            fetched = sum(consumer._flow.waiting_bytes for consumer in list(self._consumers))
            self.most = max(self.most, fetched + self._room.total_bytes)

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.most


def test_all_partitions_together_stay_within_the_budget_and_each_has_its_turn(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str
) -> None:
    with AdminClient(broker.settings) as admin:
        admin.create_partitioned_topic(topic, PARTITIONS)
    names = [f"{topic}-partition-{i}" for i in range(PARTITIONS)]
    brokers, admin = Brokers(broker.settings), AdminClient(broker.settings)
    for i, name in enumerate(names):
        brokers.subscribe(name, "job", budget=FetchBudget(1), max_messages=1).close()
        producer = pulsar_client.create_producer(name, batching_enabled=False)
        for n in range(MESSAGES):
            producer.send(bytes([n]) * (100 if i < SMALL_PARTITIONS else BYTES))
        producer.close()
    room, budget = Room(8 * MIB), FetchBudget(4 * MIB, 4 * MIB)
    consumers: list[EntryConsumer] = []

    def opener(name: str) -> Callable[[], EntryConsumer]:
        def opened() -> EntryConsumer:
            consumers.append(consumer := brokers.subscribe(name, "job", budget=budget, max_messages=20_000))
            return consumer

        return opened

    questions: Any = TopicQuestions(admin, "job")
    receivers = [
        Receiver(
            SourceTopic(name, topic, i),
            opener(name),
            after=START,
            limits=Limits(0, 5_000_000, 10_000, 32 * MIB, room),
            broker=questions,
            details=None,
            on_received=lambda: None,
        )
        for i, name in enumerate(names)
    ]
    held = Held(room, consumers)
    try:
        for receiver in receivers:
            receiver.start()
        wait_until(lambda: room.total_bytes > 7 * MIB, 60, "the room is full")
        assert sum(receiver.waiting for receiver in receivers) < PARTITIONS, "the room is full"
        came = [0] * PARTITIONS

        def take() -> bool:
            for i, receiver in enumerate(receivers):
                end, n, _ = receiver.take_into_batch(10_000, 64 * MIB)
                came[i] += n
                if n:
                    receiver.forget(end)
            return sum(came) == PARTITIONS * MESSAGES

        wait_until(take, 120, "all messages")
        assert came == [MESSAGES] * PARTITIONS
    finally:
        most = held.end()
        for receiver in receivers:
            receiver.stop()
        brokers.close()
        admin.close()
    backlog = PARTITIONS * MESSAGES * BYTES
    assert 8 * MIB < most < 64 * MIB < backlog // 4, "room, budget, and what partitions of unknown size have sent"
