"""A receiver that a test drives by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from broker.position import START, Position, SourceTopic
from broker.protocol.byte_budget import Share
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.session import DisconnectedError
from streaming.source.receiving.receiver import Limits, Receiver, TopicAccess
from streaming.source.receiving.recurring import Recurring
from streaming.source.receiving.unreadable_messages import Acceptance
from tests.support.servers.fake_pulsar import FakeBroker, FakeConsumer
from tracker.messages import concat

TOPIC = "persistent://public/default/t"
SOURCE = SourceTopic(TOPIC, TOPIC, -1)

Script = Sequence[ReceivedEntry | Exception | None]


class Harness:
    """A receiver that is driven by hand, and what is taken of it, batch after batch."""

    def __init__(
        self,
        after: Position = START,
        broker: FakeBroker | None = None,
        max_size: int = 1_000,
        details: Any = None,
        recurring: Recurring | None = None,
        takes_replicated: bool = True,
        share: Share | None = None,
    ) -> None:
        self.broker: Any = broker or FakeBroker()
        consumers: Any = FakeConsumer
        side: Any = self.broker
        self.receiver = Receiver(
            SOURCE,
            TopicAccess(consumers, side),
            after,
            Limits(1_000, 1 << 20, share),
            Acceptance(0, max_size, details, recurring, takes_replicated),
        )
        self.taken: list[pa.Table] = []
        self.position = after

    def receive(self, script: Script, end: Position = START) -> FakeConsumer:
        """Receives all of a script; an exception in it ends the connection, and what follows is of the next one."""
        consumer = FakeConsumer(script, end)
        self.receiver._consumer = consumer
        self.ended = False  # whether the connection has ended with the script
        while consumer.script:
            try:
                self.receiver.receive(consumer)
                self.ended = False
            except DisconnectedError:
                self.ended = True
        for _ in range(2):  # what is passed over has to be idle twice
            self.receiver.receive(consumer)
        return consumer

    def take(self, max_messages: int = 1_000_000) -> pa.Table:
        end, _, _ = self.receiver.take_into_batch(max_messages, 1 << 30)
        rows = self.receiver.rows(self.position, end, 0)
        self.receiver.forget(end)
        self.position = end
        self.taken.append(rows)
        return rows

    def ids(self) -> list[tuple[int, int, int]]:
        rows = concat(self.taken)
        return list(zip(*(rows[c].to_pylist() for c in ("ledger_id", "entry_id", "batch_index")), strict=True))


def rows_of(script: Script, max_size: int = 1_000) -> list[dict[str, Any]]:
    harness = Harness(max_size=max_size)
    harness.receive(script)
    rows: list[dict[str, Any]] = harness.take().to_pylist()
    return rows
