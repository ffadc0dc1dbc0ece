"""Frames are cut right wherever the bytes are cut, and what is no frame is one clear error."""

from __future__ import annotations

import random
import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.protocol.frames import Frame, FrameDecoder, ProtocolError, encode
from broker.protocol.wire.pulsar_pb2 import Command
from tests.support.fuzzing.examples import examples


def message(entry: bytes, consumer_id: int = 1) -> bytes:
    command = Command(type=Command.MESSAGE, message={"consumer_id": consumer_id}).SerializeToString()
    return struct.pack(">II", 4 + len(command) + len(entry), len(command)) + command + entry


def fed(data: bytes, cuts: list[int]) -> list[Frame]:
    decoder = FrameDecoder()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [frame for a, b in pairwise(edges) for frame in decoder.feed(data[a:b])]


@given(entries=st.lists(st.binary(max_size=300), max_size=8), cuts=st.lists(st.integers(0, 4_000), max_size=12))
@settings(max_examples=examples(200), deadline=None)
def test_frames_come_whole_and_in_order_wherever_the_bytes_are_cut(entries: list[bytes], cuts: list[int]) -> None:
    data = b"".join(message(entry, i) for i, entry in enumerate(entries)) + encode(Command.PING, ping={})
    found = fed(data, cuts)
    assert [frame.entry for frame in found] == [*entries, b""]
    assert [frame.command.message.consumer_id for frame in found[:-1]] == list(range(len(entries)))
    assert found[-1].command.type == Command.PING


def test_what_has_been_read_is_not_kept() -> None:
    decoder = FrameDecoder()
    half = message(b"x" * 100_000)
    for _ in range(100):
        list(decoder.feed(half))
    assert len(decoder._buffer) < 2_000_000


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack(">II", 6 << 20, 3), "a frame of 6291456 bytes; its largest has 5242880"),
        (struct.pack(">II", 10, 7), "a frame of 10 bytes with a command of 7"),
        (struct.pack(">II", 2, 0), "a frame of 2 bytes with a command of 0"),
        (struct.pack(">II", 6, 2) + b"\xff\xff", "a command that can't be read"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "its largest has"),
    ],
)
def test_what_is_no_frame_is_named(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        list(FrameDecoder().feed(data))


@pytest.mark.slow
def test_damaged_frames_are_an_error_or_other_frames_and_nothing_else() -> None:
    chance = random.Random(7)
    good = b"".join(message(chance.randbytes(chance.randint(0, 60)), i) for i in range(3))
    for _ in range(20_000):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        decoder = FrameDecoder()
        try:
            frames = list(decoder.feed(bytes(data)))
        except ProtocolError:
            continue
        assert sum(len(frame.entry) for frame in frames) <= len(data)
        assert len(decoder._buffer) <= len(data), "no more than came is kept"


def test_a_type_that_is_not_known_is_a_command_like_any_other() -> None:
    body = b"\x08\x63"  # type 99
    [frame] = FrameDecoder().feed(struct.pack(">II", 4 + len(body), len(body)) + body)
    assert frame.command.type == Command.UNKNOWN
