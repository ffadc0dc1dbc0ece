"""Messages of pulsar-client without a broker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from broker.position import Position
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
