"""Consumers that share a budget, each in a thread, on a broker that unloads topics: all that was published comes."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import Any, cast

import pytest

from broker.protocol.byte_budget import ByteBudget
from broker.protocol.connection import Connection
from broker.protocol.consumer import EntryConsumer
from broker.protocol.frames import Frame
from broker.protocol.session import DisconnectedError
from broker.protocol.wire.pulsar_pb2 import Command, LastMessageId
from tests.support.service.harness import wait_until

pytestmark = pytest.mark.slow

KIB = 1 << 10
AT_ONCE = 100  # entries that a broker sends for any number of permits that is not smaller


class Broker:
    """A connection to a broker with topics of entries of some sizes; one thread sends all of them."""

    max_message_bytes = 5 << 20

    def __init__(self, sizes: dict[str, list[int]]) -> None:
        self.sizes = sizes
        self.permits: dict[int, int] = {}
        self.consumers: dict[int, EntryConsumer] = {}
        self.topics: dict[int, str] = {}
        self.next: dict[int, int] = {}  # by consumer, the entry that comes next
        self.acknowledged = dict.fromkeys(sizes, 0)
        self.changed = threading.Condition()
        self.stopped = False
        self.thread = threading.Thread(target=self.run, daemon=True)

    def attach(self, consumer: EntryConsumer) -> int:
        with self.changed:
            number = len(self.topics)
            self.consumers[number], self.topics[number] = consumer, consumer.topic
            return number

    def detach(self, own_id: int) -> None:
        with self.changed:
            self.consumers.pop(own_id, None)

    def request(self, kind: Command.Type, name: str, **fields: Any) -> Any:
        number = fields["consumer_id"]
        topic = self.topics[number]
        with self.changed:
            if kind == Command.SUBSCRIBE:
                self.next[number] = self.acknowledged[topic]
                self.permits[number] = 0
            elif kind == Command.GET_LAST_MESSAGE_ID:
                last = (len(self.sizes[topic]) - 1) & ((1 << 64) - 1)
                read_to = (self.next[number] - 1) & ((1 << 64) - 1)
                place = {"ledger_id": 5, "entry_id": last}
                return LastMessageId(id=place, read_to={"ledger_id": 5, "entry_id": read_to})
        return None

    def send(self, kind: Command.Type, **fields: Any) -> None:
        flow = fields["flow"]
        with self.changed:
            self.permits[flow["consumer_id"]] += flow["permits"]
            self.changed.notify_all()

    def unload(self, topic: str) -> None:
        with self.changed:
            lost = [(n, one) for n, one in self.consumers.items() if one.topic == topic]
        for number, consumer in lost:
            close = Command(type=Command.CLOSE_CONSUMER, close_consumer={"consumer_id": number, "request_id": 1})
            consumer.received(Frame(close, b""))

    def run(self) -> None:
        while not self.stopped:
            with self.changed:
                due = [
                    (number, consumer)
                    for number, consumer in self.consumers.items()
                    if self.permits.get(number, 0) > 0 and self.next[number] < len(self.sizes[consumer.topic])
                ]
                if not due:
                    self.changed.wait(0.05)
                    continue
            for number, consumer in due:
                sizes = self.sizes[consumer.topic]
                for _ in range(min(self.permits[number], AT_ONCE)):
                    with self.changed:
                        if number not in self.consumers or self.next[number] >= len(sizes):
                            break
                        entry = self.next[number]
                        self.next[number] += 1
                        self.permits[number] -= 1
                    place = {"ledger_id": 5, "entry_id": entry}
                    message = Command(type=Command.MESSAGE, message={"consumer_id": number, "id": place})
                    consumer.received(Frame(message, b"x" * sizes[entry]))  # damaged, and an entry all the same


class Receiver:
    """Receives one topic in a thread, keeps what has come until a batch is committed, and connects again."""

    def __init__(self, broker: Broker, topic: str, budget: ByteBudget) -> None:
        self.broker, self.topic, self.share = broker, topic, budget.join()
        self.kept: list[tuple[int, int]] = []  # entry, bytes
        self.lock = threading.Lock()
        self.came = 0
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        while not self.broker.stopped:
            connection = cast(Connection, self.broker)
            consumer = EntryConsumer(
                connection, self.topic, "s", max_bytes=1_024 * KIB, max_messages=1_000, share=self.share
            )
            with suppress(DisconnectedError):
                while not self.broker.stopped:
                    self.receive(consumer)
            consumer.close()
            self.note_all()

    def receive(self, consumer: EntryConsumer) -> None:
        entry = consumer.receive(0.2)
        while entry is not None:
            if entry.position.entry_id >= self.came:
                assert entry.position.entry_id == self.came
                with self.lock:
                    self.came += 1
                    self.kept.append((entry.position.entry_id, entry.n_bytes))
            entry = consumer.receive(0)
        self.note_all()

    def note_all(self) -> None:
        with self.lock:
            self.share.note(handed=0, kept=sum(n for _, n in self.kept))
        self.share.budget.wake()

    def commit(self) -> None:
        with self.lock:
            kept, self.kept = self.kept, []
            self.broker.acknowledged[self.topic] += len(kept)
            self.share.note(kept=0)
        self.share.budget.wake()


@pytest.mark.parametrize("seed", range(6))
def test_all_comes_whatever_is_unloaded_and_however_large_it_is(seed: int) -> None:
    chance = random.Random(seed)
    kinds = [[400 * KIB], [3 * KIB], [1_500 * KIB], [100], [100, 400 * KIB], [3 * KIB, 4_000 * KIB]]
    sizes = {}
    for n in range(12):
        kind = chance.choice(kinds)
        few = 40 if max(kind) > 10 * KIB else 500
        sizes[f"t{n}"] = [chance.choice(kind) for _ in range(chance.choice([0, 1, few]))]
    broker, budget = Broker(sizes), ByteBudget(6_000 * KIB, 4_000 * KIB, 2_000 * KIB)
    receivers = [Receiver(broker, topic, budget) for topic in sizes]
    for thread in (broker.thread, *(receiver.thread for receiver in receivers)):
        thread.start()
    try:
        ends_at = time.monotonic() + 1.5
        while time.monotonic() < ends_at:
            time.sleep(chance.uniform(0, 0.05))
            broker.unload(chance.choice(list(sizes)))
            for receiver in chance.sample(receivers, 3):
                receiver.commit()

        def is_all_there() -> bool:
            for receiver in receivers:
                receiver.commit()
            return all(receiver.came == len(sizes[receiver.topic]) for receiver in receivers)

        wait_until(is_all_there, 4, "all of it")
        assert budget.held_bytes <= budget.share_bytes * len(receivers) + 6_000 * KIB
    finally:
        broker.stopped = True
        for receiver in receivers:
            receiver.thread.join(5)
        broker.thread.join(5)
