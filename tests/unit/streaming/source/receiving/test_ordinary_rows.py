"""Rows that are made many at once are those that are made one by one, whatever producers send."""

from __future__ import annotations

import random
import struct
import time
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streaming.source.receiving.row_builder
from broker.position import Position, SourceTopic
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.entries import SOURCE_POSITION, Envelope
from broker.protocol.unpacking import unpack
from broker.protocol.wire.pulsar_pb2 import BatchedMetadata, MessageMetadata
from streaming.source.receiving.row_builder import RowBuilder
from streaming.source.receiving.unreadable_messages import Acceptance
from tests.support.fuzzing.examples import examples
from tracker.due_time import MAX_TIME_MILLIS

SOURCE = SourceTopic("persistent://public/default/t-partition-3", "persistent://public/default/t", 3)
NOW = 1_790_000_000_000
MAX_SIZE, MAX_DELAY = 2_000, 10**12

_NAMES = "deliverAt deliverAt deliverAfter region € scheduleKey repeat retryOf requestId delaylake.messageId"
_NAMES += " delaylake.occurrence"
_TIMES = (NOW, NOW + MAX_DELAY, NOW + MAX_DELAY + 1, MAX_TIME_MILLIS + 1, 0, 10**15 - 1, 10**15, 10**19 - 1, 10**30)
_TEXTS = ("00012", "0x1F", "+5", "-0", "-5", " 5", "5 ", "٣", "", "soon", "1e3", "eu", "x" * 200, "@every 90s")
names = st.sampled_from([*_NAMES.split(), SOURCE_POSITION, "", "x" * 130]).map(str.encode) | st.sampled_from(
    [b"\xff", b"a\0\0\0\x08\x0a"]
)
values = st.sampled_from([*map(str, _TIMES), *_TEXTS]).map(str.encode) | st.sampled_from(
    [b"\xff\xfe", b"\0\0\0\x05\x0a\x03abc"]
)
payloads = st.sampled_from(
    [
        None,
        b"",
        b"x",
        b"x" * 100,
        b"x" * 1_990,
        b"x" * 4_001,
        b"\0" * 60,
        b"\0\0\0\x02\x18\x01y",
        b"\0\0\0\x04\x0a\x02\0\0" * 9,
    ]
)
keys = st.sampled_from([None, b"", b"customer-7", b"\xff", "é".encode(), b"\0\0\0\x02\x12\x00"])
numbers = st.sampled_from([0, 1, 127, 128, NOW, 2**63 - 1, 2**63, 2**64 - 1])
usual = st.fixed_dictionaries(
    {
        "properties": st.lists(
            st.tuples(st.sampled_from([b"deliverAt", b"region"]), st.just(b"1790000000000")), max_size=2
        ),
        "payload": st.just(b"x" * 100),
    }
)
any_message = st.fixed_dictionaries(
    {"properties": st.lists(st.tuples(names, values), max_size=5), "payload": payloads},
    optional={
        "partition_key": keys,
        "event_time": numbers,
        "is_key_base64": st.booleans(),
        "ordering_key": st.sampled_from([b"", b"o", b"\xff"]),
        "sequence_id": numbers,
        "is_key_null": st.booleans(),
    },
)
entries = st.fixed_dictionaries(
    {"messages": st.lists(usual | any_message, min_size=1, max_size=6), "is_batch": st.booleans()},
    optional={
        "publish_time": st.sampled_from([0, NOW, MAX_TIME_MILLIS, MAX_TIME_MILLIS + 1, 2**64 - 1]),
        "deliver_at_time": st.sampled_from([-5, 0, NOW, MAX_TIME_MILLIS, MAX_TIME_MILLIS + 1, 2**63 - 1]),
        "producer_name": st.sampled_from([b"p", b"", b"\xff", b"p" * 300]),
        "ack_set": st.sampled_from([(), (0b101,)]),
    },
)


def received(number: int, messages: list[dict[str, Any]], is_batch: bool, **fields: Any) -> ReceivedEntry:
    """An entry of the broker; where it is no batch, of the first message alone."""
    ack_set = fields.pop("ack_set", ())
    given_fields: dict[str, Any] = {"producer_name": b"p", "publish_time": NOW} | fields
    metadata = MessageMetadata(**given_fields)
    if is_batch:
        metadata.n_messages = len(messages)
        body = b""
        for message in messages:
            single = BatchedMetadata(payload_size=len(message["payload"] or b""))
            _fill(single, **message)
            data = single.SerializeToString()
            body += struct.pack(">I", len(data)) + data + (message["payload"] or b"")
    else:
        _fill(metadata, **messages[0])
        body = messages[0]["payload"] or b""
    envelope = Envelope(metadata, metadata.SerializeToString(), body, 100 * number)
    return ReceivedEntry(Position(5, number), envelope, ack_set, len(messages), len(body))


def _fill(metadata: Any, properties: list[tuple[bytes, bytes]], payload: bytes | None, **fields: Any) -> None:
    for key, text in properties:
        metadata.properties.add(key=key, value=text)
    for name, value in fields.items():
        if value is not None:
            setattr(metadata, name, value)
    metadata.is_null_value = payload is None


def rows_of(script: list[ReceivedEntry], few_messages: int) -> pa.Table:
    """The rows of entries; those of fewer messages are made one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming.source.receiving.row_builder, "_FEW_MESSAGES", few_messages)
        patch.setattr(time, "time_ns", lambda: NOW * 1_000_000)
        builder = RowBuilder(SOURCE, Acceptance(MAX_DELAY, MAX_SIZE))
        for entry in script:
            unpacked = unpack(entry, None, lambda *chunk: None, 5 << 20)
            assert unpacked is not None
            index = unpacked.last_index
            builder.add(unpacked, None if index is None else index - unpacked.n_messages + 1)
        rows = builder.build()
    assert rows.num_rows == len(builder)
    return rows


@given(st.lists(entries, min_size=1, max_size=6))
@settings(max_examples=examples(5_000), deadline=None)
def test_many_at_once_are_as_one_by_one(given_entries: list[dict[str, Any]]) -> None:
    script = [received(number, **entry) for number, entry in enumerate(given_entries)]
    expected = rows_of(script, 1_000_000)
    assert rows_of(script, 0).to_pylist() == expected.to_pylist()


def mutated(entry: ReceivedEntry, chance: random.Random) -> ReceivedEntry:
    """The entry with some of its payload's bytes changed, added or taken away."""
    assert isinstance(entry.envelope, Envelope)
    data = bytearray(entry.envelope.payload)
    for _ in range(chance.randint(0, 3)):
        if not data:
            break
        at = chance.randrange(len(data))
        kind = chance.randrange(3)
        if kind == 0:
            data[at] = chance.choice((0, 1, 2, 8, 10, 18, 24, 127, 128, 255, chance.randrange(256)))
        elif kind == 1:
            del data[at : at + chance.randint(1, 4)]
        else:
            data[at:at] = bytes(chance.choice((0, 10, 24, 255)) for _ in range(chance.randint(1, 4)))
    return entry._replace(envelope=entry.envelope._replace(payload=bytes(data)))


@given(st.lists(entries, min_size=1, max_size=4), st.integers(0, 2**32))
@settings(max_examples=examples(5_000), deadline=None)
def test_damaged_batches_are_read_or_named_as_one_by_one(given_entries: list[dict[str, Any]], seed: int) -> None:
    chance = random.Random(seed)
    script = [mutated(received(n, **entry | {"is_batch": True}), chance) for n, entry in enumerate(given_entries)]
    expected = rows_of(script, 1_000_000)
    assert rows_of(script, 0).to_pylist() == expected.to_pylist()


def test_ordinary_messages_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they cost four times as much."""
    usual_properties = [(b"deliverAt", str(NOW + 5).encode()), (b"region", b"eu")]
    message = {"properties": usual_properties, "payload": b"\0" * 9, "partition_key": b"k", "event_time": NOW}
    script = [received(n, [message] * 20, n % 2 == 0, deliver_at_time=NOW) for n in range(10)]
    expected = rows_of(script, 1_000_000)
    monkeypatch.setattr(RowBuilder, "_row", None)
    rows = rows_of(script, 0)
    assert rows.to_pylist() == expected.to_pylist()
    assert rows["reason"].null_count == rows.num_rows == 105
