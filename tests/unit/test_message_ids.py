"""Message ids: every form that people give them in, and nothing else."""

from __future__ import annotations

import base64

import pulsar
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from admin.message_ids import MessageIdError, MessageRef, decode, parse

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
    ["", "1", "a:b", "1:2:3:4:5", "-1:2", "1:-2", "1.5:2", "\u0661:2", "1:2:3 ", "1 :2", "CAUQAA", "CAU=", "%%%"],
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


@given(st.binary(max_size=140))
@example(base64.b64decode("CAUQAA==") + b"\x00")
@example(base64.b64decode("CAUQAA==") * 2)
@example(b"\x08" + b"\xff" * 10 + b"\x01\x10\x00")
@example(bytes([0x08, 1, 0x10, 2, 0x20, 5, 0x30, 5]))
def test_bytes_are_a_message_id_or_an_error(data: bytes) -> None:
    try:
        message = decode(data)
    except MessageIdError:
        return
    assert message.ledger_id >= 0
    assert message.entry_id >= 0
    assert message.batch_index >= -1
    assert pulsar.MessageId.deserialize(data).entry_id() == message.entry_id
