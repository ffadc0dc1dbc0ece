"""Entries are built so that every client reads what was given; the checksum is that of the bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.position import START, Position
from broker.protocol import building
from broker.protocol.building import (
    Chunks,
    OutgoingMessage,
    batch_entry,
    encoded_property,
    large_message,
    send_frame,
    single_entry,
)
from broker.protocol.chunks import ChunkAssembler
from broker.protocol.entries import Message, is_batch, messages_of, open_envelope
from broker.protocol.frames import FrameDecoder
from broker.protocol.wire.pulsar_pb2 import Command
from tests.support.fuzzing.examples import examples

TEXTS = st.one_of(st.binary(max_size=20), st.sampled_from([b"", b"x" * 127, b"x" * 128, b"x" * 20_000]))

WORDS = st.text(max_size=20) | st.sampled_from(["", "x" * 127, "ü" * 64, "x" * 20_000])

MESSAGES: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    payload=st.none() | TEXTS,
    properties=st.lists(st.tuples(WORDS, WORDS), max_size=4),
    key=st.none() | TEXTS,
    is_key_base64=st.booleans(),
    ordering_key=st.none() | TEXTS,
    event_time=st.sampled_from([0, 1, 127, 128, (1 << 63) - 1, (1 << 64) - 1]),
)


def outgoing(given: dict[str, Any], sequence_id: int) -> OutgoingMessage:
    properties = [encoded_property(*pair) for pair in given["properties"]]
    return OutgoingMessage(sequence_id, **{**given, "properties": properties})


def arrived(given: dict[str, Any], batch_index: int) -> Message:
    names = ("key", "is_key_base64", "ordering_key", "properties", "payload", "event_time")
    properties = [(name.encode(), value.encode()) for name, value in given["properties"]]
    values = given | {"properties": properties, "is_key_base64": given["is_key_base64"] and given["key"] is not None}
    return Message(batch_index, *(values[name] for name in names))


@given(message=MESSAGES, sequence_id=st.integers(0, (1 << 63) - 1), version=st.binary(max_size=9))
@settings(max_examples=examples(200), deadline=None)
def test_a_message_alone_is_read_as_it_was_given(message: dict[str, Any], sequence_id: int, version: bytes) -> None:
    entry = single_entry(outgoing(message, sequence_id), "prödücer".encode(), 1_700_000_000_123, version)
    envelope = open_envelope(entry.data)
    metadata = envelope.metadata
    assert messages_of(metadata, envelope.payload) == [arrived(message, -1)]
    assert (entry.sequence_id, entry.highest_sequence_id, entry.n_messages) == (sequence_id, sequence_id, 1)
    assert (metadata.sequence_id, metadata.publish_time) == (sequence_id, 1_700_000_000_123)
    assert metadata.producer_name.decode() == "prödücer"
    assert metadata.schema_version == version
    assert metadata.HasField("schema_version") == bool(version)
    assert metadata.HasField("event_time") == bool(message["event_time"])
    assert not is_batch(envelope.metadata)
    assert metadata.uncompressed_size == len(message["payload"] or b"")


@given(messages=st.lists(MESSAGES, min_size=1, max_size=5), first=st.integers(1, 1 << 62))
@settings(max_examples=examples(200), deadline=None)
def test_a_batch_is_read_as_it_was_given_with_first_and_highest_sequence_id(
    messages: list[dict[str, Any]], first: int
) -> None:
    entry = batch_entry([outgoing(one, first + 3 * i) for i, one in enumerate(messages)], b"p", 5, b"\0\1")
    envelope = open_envelope(entry.data)
    last = first + 3 * (len(messages) - 1)
    assert messages_of(envelope.metadata, envelope.payload) == [arrived(one, i) for i, one in enumerate(messages)]
    assert (entry.sequence_id, entry.highest_sequence_id, entry.n_messages) == (first, last, len(messages))
    assert (envelope.metadata.sequence_id, envelope.metadata.highest_sequence_id) == (first, last)
    assert is_batch(envelope.metadata)


@given(message=MESSAGES, size=st.integers(0, 40_000), max_bytes=st.integers(2_000, 30_000))
@settings(max_examples=examples(200), deadline=None)
def test_a_large_message_is_read_from_its_chunks_as_it_was_given(
    message: dict[str, Any], size: int, max_bytes: int
) -> None:
    payload = b"%d" % size * (size // 2)
    given = outgoing(message | {"payload": payload}, 7)
    large = large_message(given, b"p", 1_700_000_000_123, b"\1")
    if not large.can_be_sent(max_bytes) or large.is_one_entry(max_bytes):
        assert large.whole() == single_entry(given, b"p", 1_700_000_000_123, b"\1")
        assert len(large.whole().data) <= max_bytes or not large.can_be_sent(max_bytes)
        return
    chunks, assembler = Chunks(large, b"p", max_bytes), ChunkAssembler(1 << 20, 1 << 20)
    n, whole = 0, None
    while not chunks.is_last_sent:
        assert whole is None
        entry = chunks.next_entry()
        assert (entry.sequence_id, entry.highest_sequence_id, entry.n_messages, entry.is_chunk) == (7, 7, 1, True)
        assert len(entry.data) <= max_bytes
        envelope = open_envelope(entry.data)
        metadata = envelope.metadata
        assert (metadata.chunked_size, metadata.uncompressed_size) == (len(payload), len(payload))
        whole = assembler.add(Position(1, n), START, metadata, envelope.payload, 0.0)
        n += 1
    assert whole is not None
    assert (whole.payload, whole.metadata.n_chunks) == (payload, n)
    assert messages_of(whole.metadata, payload) == [arrived(message | {"payload": payload}, -1)]
    assert (whole.metadata.sequence_id, whole.metadata.producer_name) == (7, b"p")


def test_a_frame_says_which_producer_sends_and_with_which_ids() -> None:
    entry = batch_entry([OutgoingMessage(5, b"a"), OutgoingMessage(9, None)], b"p", 5)
    [frame] = FrameDecoder().feed(send_frame(3, entry))
    send = frame.command.send
    assert frame.command.type == Command.SEND
    assert (send.producer_id, send.sequence_id, send.highest_sequence_id, send.n_messages) == (3, 5, 9, 2)
    assert frame.entry == entry.data


@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_a_number_that_the_protocol_has_not_is_an_error(number: int) -> None:
    with pytest.raises(ValueError, match="negative or beyond 64 bits"):
        single_entry(OutgoingMessage(1, b"", event_time=number), b"p", 1)


def test_only_short_names_of_properties_are_remembered() -> None:
    """Whoever publishes chooses them."""
    building._named.cache_clear()
    for i in range(100):
        assert encoded_property(f"{i}" + "n" * 300, "value").endswith(b"nnn\x12\x05value")
    assert building._named.cache_info().currsize == 0
