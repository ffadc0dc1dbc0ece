"""Message ids: every form that people give them in, and nothing else."""

from __future__ import annotations

import base64
import re
from random import Random

import pulsar
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.entries.message_ids import MessageIdError, MessageRef, decode, parse

IDS = st.integers(0, 2**62)
SMALL = st.integers(0, 1000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1:2", MessageRef(1, 2)),
        ("1:2:3", MessageRef(1, 2, -1, 3)),
        ("1:2:-1", MessageRef(1, 2)),
        ("1:2:3:4", MessageRef(1, 2, 3, 4)),
        ("1:2:-1:-1", MessageRef(1, 2)),
        ("CAUQAA==", MessageRef(5, 0)),
        ("CAYQACADMAU=", MessageRef(6, 0, -1, 3)),
    ],
)
def test_forms(text: str, expected: MessageRef) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "a:b",
        "1:2:3:4:5",
        "-1:2",
        "1:-2",
        "1.5:2",
        "\u0661:2",
        "1:2:3 ",
        "1 :2",
        "CAUQA",
        "CAUQAA=",
        "CAU=",
        "%%%",
    ],
)
def test_what_is_none(text: str) -> None:
    if text == "1:2:3 ":
        assert parse(text) == MessageRef(1, 2, -1, 3)  # space around it is not part of it
    else:
        with pytest.raises(MessageIdError) as error:
            parse(text)
        assert "\n" not in str(error.value)


@given(IDS, st.integers(0, 2**32 - 1), st.integers(-1, 1000), st.integers(-1, 1000))
def test_reads_what_the_client_writes(ledger: int, entry: int, partition: int, batch_index: int) -> None:
    data = pulsar.MessageId(partition, ledger, entry, batch_index).serialize()
    assert decode(data) == MessageRef(ledger, entry, partition, batch_index)


def varint(number: int, length: int = 0) -> bytes:
    """A number as protobuf writes it, in two's complement of 64 bits; longer than needed where `length` says so."""
    number &= 2**64 - 1
    data = bytearray()
    while number or len(data) < length or not data:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data[-1] &= 0x7F
    return bytes(data)


NUMBERS = st.one_of(
    SMALL, st.integers(-(2**65), 2**65), st.sampled_from([-1, -2, 2**31 - 1, 2**31, 2**32 + 5, 5 - 2**32])
)
VALUES = st.builds(varint, NUMBERS, st.integers(0, 10))


def tagged(field: int, kind: int, data: bytes) -> bytes:
    return bytes([field << 3 | kind]) + data


def with_length(field: int, data: bytes) -> bytes:
    return tagged(field, 2, varint(len(data)) + data)


FIELD = st.one_of(
    st.builds(tagged, st.integers(1, 8), st.just(0), VALUES),
    st.builds(tagged, st.integers(1, 8), st.integers(0, 5), st.binary(max_size=9)),
    st.builds(with_length, st.sampled_from([5, 7]), st.lists(VALUES, max_size=4).map(b"".join)),
    st.builds(with_length, st.just(7), st.builds(lambda a, b: b"\x08" + a + b"\x10" + b, VALUES, VALUES)),
)
ENTRY = b"\x08\x05\x10\x07"


@given(st.one_of(st.binary(max_size=140), st.lists(FIELD, max_size=6).map(lambda fields: ENTRY + b"".join(fields))))
@example(base64.b64decode("CAUQAA==") + b"\x00")
@example(base64.b64decode("CAUQAA==") * 2)
@example(b"\x08" + b"\xff" * 10 + b"\x01\x10\x00")
@example(ENTRY + tagged(4, 0, varint(5 - 2**32)))
@example(ENTRY + with_length(5, b"\x80"))
@example(ENTRY + with_length(7, b""))
@example(b"\x88\x80\x80\x80\x80\x00\x05\x10\x07")
def test_bytes_are_what_the_client_reads_in_them_or_an_error(data: bytes) -> None:
    try:
        message = decode(data)
    except MessageIdError:
        return
    client = pulsar.MessageId.deserialize(data)
    partition, batch_index = max(client.partition(), -1), max(client.batch_index(), -1)
    assert message == MessageRef(client.ledger_id(), client.entry_id(), partition, batch_index)


@given(IDS, IDS, st.integers(-1, 99), st.integers(0, 99), st.lists(NUMBERS, max_size=3), st.booleans(), st.randoms())
def test_a_whole_message_id_is_read_with_its_fields_in_any_order(
    ledger: int, entry: int, partition: int, batch_index: int, ack_set: list[int], is_packed: bool, random: Random
) -> None:
    numbers = [varint(number) for number in ack_set]
    fields = [tagged(field, 0, varint(value)) for field, value in
              ((1, ledger), (2, entry), (3, partition), (4, batch_index), (6, 100))]  # fmt: skip
    fields += [with_length(5, b"".join(numbers))] if is_packed else [tagged(5, 0, number) for number in numbers]
    random.shuffle(fields)
    data = b"".join(fields)
    assert decode(data) == MessageRef(ledger, entry, partition, batch_index)
    assert pulsar.MessageId.deserialize(data).batch_index() == batch_index


def test_a_message_in_chunks_is_the_entry_of_its_last() -> None:
    data = ENTRY + with_length(7, b"\x08\x05\x10\x06")
    assert decode(data) == MessageRef(5, 7)
    assert pulsar.MessageId.deserialize(data).entry_id() == 7


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "1 to 128 bytes, not 0"),
        (ENTRY + tagged(5, 0, b"\x01") * 63, "1 to 128 bytes, not 130"),
        (b"\x08\x05", "a ledger id and an entry id"),
        (ENTRY + b"\x10\x07", "entryId once"),
        (ENTRY + tagged(3, 0, varint(2**31)), "partition 2147483648 is out of range"),
        (ENTRY + tagged(4, 0, varint(5 - 2**32)), "batch_index -4294967291 is out of range"),
        (ENTRY + tagged(6, 0, varint(2**32 + 5)), "batch_size 4294967301 is out of range"),
        (ENTRY + tagged(4, 0, b"\x05") + tagged(6, 0, b"\x05"), "batch index 5 of a batch of 5"),
        (ENTRY + tagged(6, 0, varint(-1)), "batch index -1 of a batch of -1"),
        (ENTRY + tagged(1, 2, b"\x00"), "the bytes are no message id"),
        (ENTRY + tagged(7, 0, b"\x01"), "the bytes are no message id"),
        (ENTRY + tagged(8, 0, b"\x01"), "the bytes are no message id"),
        (ENTRY + tagged(5, 2, b"\x02\x01"), "ends too early"),
        (ENTRY + with_length(5, b"\x80"), "ends too early"),
        (ENTRY + tagged(5, 2, varint(-1)), "ends too early"),
        (ENTRY + with_length(7, b"\x08\x01"), "a ledger id and an entry id"),
        (ENTRY + with_length(7, ENTRY) + b"\x20\x00", "in no batch"),
        (ENTRY + b"\x20", "ends too early"),
        (ENTRY + b"\x00", "ends too early"),
        (ENTRY + b"\x00\x00", "the bytes are no message id"),
        (b"\x08" + b"\xff" * 10, "more than 64 bits"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "more than 64 bits"),
        (b"\x08" + varint(2**63) + b"\x10\x07", "must not be negative"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, reason: str) -> None:
    with pytest.raises(MessageIdError, match=re.escape(reason)):
        decode(data)


@given(st.text(max_size=60) | st.from_regex(r"-?[0-9]{1,21}(:-?[0-9]{1,21}){0,4}", fullmatch=True))
def test_any_text_is_a_message_id_or_an_error_of_one_line(text: str) -> None:
    try:
        message = parse(text)
    except MessageIdError as error:
        said = str(error)
    else:
        said = str(message)
        assert parse(said) == message
    assert "\n" not in said
