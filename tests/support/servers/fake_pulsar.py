"""A topic partition, its broker and its consumer without Pulsar, as far as `Receiver` sees them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pulsar

from broker.client import PulsarError
from broker.position import START, Position
from broker.pulsar_admin.topic_questions import Cursor
from tracker.wire.message_id_pb2 import MessageIdData


@dataclass(frozen=True)
class FakeId:
    ledger: int
    entry: int
    index: int = -1
    size: int = 1
    first_chunk: Position | None = None

    def ledger_id(self) -> int:
        return self.ledger

    def entry_id(self) -> int:
        return self.entry

    def batch_index(self) -> int:
        return self.index

    def serialize(self) -> bytes:
        data = MessageIdData(ledgerId=self.ledger, entryId=self.entry)
        if self.index >= 0:
            data.batch_index, data.batch_size = self.index, self.size
        if self.first_chunk is not None:
            data.first_chunk_message_id.CopyFrom(
                MessageIdData(ledgerId=self.first_chunk.ledger_id, entryId=self.first_chunk.entry_id)
            )
        return data.SerializeToString()


class NoUtf8:
    """In place of a value: its getter raises as pulsar-client's does."""


@dataclass
class FakeMessage:
    id: FakeId
    payload: bytes | None = b"x"
    key: Any = ""
    ordering: Any = ""
    props: Any = field(default_factory=dict)
    published: int = 1_000
    happened: int = 0
    producer: Any = "p"
    version: bytes = b""

    def message_id(self) -> FakeId:
        return self.id

    def data(self) -> bytes:
        return self.payload or b""

    def has_null_value(self) -> bool:
        return self.payload is None

    def partition_key(self) -> str:
        return _text(self.key)

    def ordering_key(self) -> str:
        return _text(self.ordering)

    def properties(self) -> dict[str, str]:
        return _text(self.props)

    def schema_version(self) -> str:
        return self.version.decode()

    def producer_name(self) -> str:
        return _text(self.producer)

    def publish_timestamp(self) -> int:
        return self.published

    def event_timestamp(self) -> int:
        return self.happened


def _text(value: Any) -> Any:
    if value is NoUtf8:
        return b"\xff".decode()
    return value


def one(entry: int, ledger: int = 5, **fields: Any) -> list[FakeMessage]:
    """An entry that is one message."""
    return [FakeMessage(FakeId(ledger, entry), **fields)]


def batch(entry: int, size: int, ledger: int = 5, **fields: Any) -> list[FakeMessage]:
    """An entry that is a batch."""
    return [FakeMessage(FakeId(ledger, entry, i, size), **fields) for i in range(size)]


class FakeConsumer:
    """Gives messages and raises exceptions in the order of a script; then nothing comes."""

    def __init__(self, script: Sequence[FakeMessage | Exception], end: Position = START) -> None:
        self.script = deque(script)
        self.last = end
        self.acknowledged: list[Position] = []

    def receive(self, timeout_millis: int) -> FakeMessage:
        if not self.script:
            raise pulsar.Timeout
        item = self.script.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def is_connected(self) -> bool:
        return True

    def get_last_message_id(self) -> FakeId:
        return FakeId(*self.last)

    def acknowledge_cumulative(self, message_id: pulsar.MessageId) -> None:
        self.acknowledged.append(Position(message_id.ledger_id(), message_id.entry_id()))

    def close(self) -> None:
        pass


class FakeBroker:
    """What `TopicQuestions` answers. `chunks` are first chunks; an attribute may be set while it is used."""

    def __init__(self) -> None:
        self.cursor_of: Callable[[], Cursor] = lambda: Cursor(START, START, START, {})
        self.chunks: set[Position] = set()
        self.address: str | None = "here"
        self.is_down = False
        self.questions: list[Position] = []

    def last_index(self, topic: str, position: Position) -> int | None:
        return None

    def is_first_chunk(self, topic: str, position: Position) -> bool:
        self._answer()
        self.questions.append(position)
        return position in self.chunks

    def cursor(self, topic: str) -> Cursor:
        self._answer()
        return self.cursor_of()

    def connection(self, topic: str) -> str | None:
        self._answer()
        return self.address

    def _answer(self) -> None:
        if self.is_down:
            raise PulsarError("no answer")
