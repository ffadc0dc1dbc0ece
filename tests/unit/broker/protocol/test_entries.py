"""Entries are read as their producers wrote them; one that is damaged says why, and no other exception is raised."""

from __future__ import annotations

import os
import random
import struct
import zlib

import google_crc32c
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from broker.client import PulsarError
from broker.protocol.encryption import Decryptor
from broker.protocol.entries import (
    NOT_DECRYPTED,
    EntryError,
    Message,
    ack_set_of,
    decompressed,
    decrypted,
    is_acknowledged,
    is_batch,
    messages_of,
    open_envelope,
)
from broker.protocol.wire.pulsar_pb2 import (
    LZ4,
    SNAPPY,
    ZLIB,
    ZSTD,
    BatchedMetadata,
    BrokerEntryMetadata,
    MessageMetadata,
)

MAX = 1 << 20


def entry(metadata: MessageMetadata, payload: bytes, index: int | None = None, checksum: int | None = None) -> bytes:
    data = metadata.SerializeToString()
    body = struct.pack(">I", len(data)) + data + payload
    body = b"\x0e\x01" + struct.pack(">I", google_crc32c.value(body) if checksum is None else checksum) + body
    if index is None:
        return body
    broker = BrokerEntryMetadata(index=index).SerializeToString()
    return b"\x0e\x02" + struct.pack(">I", len(broker)) + broker + body


def batched(*messages: tuple[BatchedMetadata, bytes]) -> bytes:
    parts = []
    for metadata, payload in messages:
        metadata.payload_size = len(payload)
        data = metadata.SerializeToString()
        parts += [struct.pack(">I", len(data)), data, payload]
    return b"".join(parts)


def test_an_entry_is_taken_apart_with_and_without_checksum_and_the_brokers_metadata() -> None:
    metadata = MessageMetadata(producer_name=b"p", publish_time=7, deliver_at_time=9)
    checked, indexed = entry(metadata, b"body"), entry(metadata, b"body", 41)
    for data, index in ((checked, None), (indexed, 41), (checked[6:], None)):
        envelope = open_envelope(data)
        assert (envelope.payload, envelope.last_index, envelope.metadata.deliver_at_time) == (b"body", index, 9)
        assert not is_batch(envelope.metadata)


def test_a_message_has_what_its_producer_gave_it_and_an_empty_key_is_not_an_absent_one() -> None:
    metadata = MessageMetadata(partition_key=b"", ordering_key=b"\xff", event_time=5)
    metadata.properties.add(key=b"a", value=b"\xff")
    assert messages_of(metadata, b"body") == [Message(-1, b"", False, b"\xff", [(b"a", b"\xff")], b"body", 5)]
    [absent] = messages_of(MessageMetadata(is_null_value=True), b"")
    assert (absent.key, absent.ordering_key, absent.payload) == (None, None, None)
    [null] = messages_of(MessageMetadata(partition_key=b"k", is_key_null=True), b"")
    assert (null.key, null.payload) == (None, b"")


def test_a_batch_is_taken_apart_and_one_of_one_message_stays_a_batch() -> None:
    payload = batched(
        (BatchedMetadata(partition_key=b"k", is_key_base64=True), b"one"), (BatchedMetadata(event_time=3), b"")
    )
    first, second = messages_of(MessageMetadata(n_messages=2), payload)
    assert (first.batch_index, first.key, first.is_key_base64, first.payload) == (0, b"k", True, b"one")
    assert (second.batch_index, second.key, second.payload, second.event_time) == (1, None, b"", 3)
    [only] = messages_of(MessageMetadata(n_messages=1), batched((BatchedMetadata(), b"x")))
    assert only.batch_index == 0


@pytest.mark.parametrize("compression", [LZ4, ZLIB, ZSTD, SNAPPY])
def test_every_compression_is_undone_and_a_wrong_size_is_named(compression: int) -> None:
    body = b"delay" * 1_000
    names: dict[int, str] = {LZ4: "lz4_raw", ZSTD: "zstd", SNAPPY: "snappy"}
    packed = zlib.compress(body) if compression == ZLIB else pa.compress(body, names[compression], asbytes=True)
    metadata = MessageMetadata(compression=compression, uncompressed_size=len(body))
    assert decompressed(metadata, packed, MAX) == body
    for damaged, size, why in (
        (packed[: len(packed) // 2], len(body), "decompressed"),
        (b"\0" * 20, len(body), "decompressed"),
        (packed, len(body) - 1, "decompressed"),
        (packed, len(body) + 1, "decompressed"),  # no byte of the process's memory
        (packed, 2 * len(body), "decompressed"),
        (packed, 2**31, "the most are 1048576"),
    ):
        with pytest.raises(EntryError, match=why):
            decompressed(MessageMetadata(compression=compression, uncompressed_size=size), damaged, MAX)


def test_a_zlib_stream_without_an_end_is_read_as_the_java_client_sends_it() -> None:
    stream = zlib.compressobj()
    packed = stream.compress(b"body") + stream.flush(zlib.Z_SYNC_FLUSH)
    assert decompressed(MessageMetadata(compression=ZLIB, uncompressed_size=4), packed, MAX) == b"body"
    assert decompressed(MessageMetadata(compression=ZLIB, uncompressed_size=0), b"", MAX) == b""


def test_a_compression_that_is_not_known_is_named() -> None:
    with pytest.raises(EntryError, match="its compression 9 is unknown"):
        decompressed(MessageMetadata(compression=9, uncompressed_size=1), b"x", MAX)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "cut off"),
        (b"\x0e\x01\0\0", "cut off"),
        (b"\x0e\x02\0\0\0\x7fxx", "cut off"),
        (entry(MessageMetadata(), b"x", checksum=1), "its checksum is wrong"),
        (struct.pack(">I", 2) + b"\xff\xff", "its metadata can't be read"),
    ],
)
def test_a_damaged_entry_says_why(data: bytes, why: str) -> None:
    with pytest.raises(EntryError, match=why):
        open_envelope(data)


@pytest.mark.parametrize(
    ("n", "payload", "why"),
    [
        (0, b"", "a batch of 0 messages"),
        (-3, b"", "a batch of -3 messages"),
        (2**31 - 1, b"", "a batch of 2147483647 messages"),
        (2, batched((BatchedMetadata(), b"x")), "cut off"),
        (1, b"\0\0\0\2\x18\x7fxx", "cut off"),
        (1, struct.pack(">I", 2) + b"\xff\xff", "the metadata of its message 0 can't be read"),
        (1, batched((BatchedMetadata(), b"x"))[:-1], "cut off"),
    ],
)
def test_a_damaged_batch_says_why(n: int, payload: bytes, why: str) -> None:
    with pytest.raises(EntryError, match=why):
        messages_of(MessageMetadata(n_messages=n), payload)


def test_a_batch_with_more_metadata_than_fits_into_an_entry_is_named() -> None:
    large = BatchedMetadata()
    large.properties.add(key=b"k", value=b"x" * (3 << 20))
    payload = batched((large, b""), (large, b""))
    with pytest.raises(EntryError, match="more than 5242880 bytes of metadata"):
        messages_of(MessageMetadata(n_messages=2), payload)
    many = MessageMetadata()
    for _ in range(100_001):
        many.properties.add(key=b"", value=b"")
    with pytest.raises(EntryError, match="100001 properties"):
        messages_of(many, b"")


def test_an_ack_set_has_a_bit_for_each_message_that_is_left() -> None:
    assert [is_acknowledged(i, ()) for i in range(3)] == [False] * 3
    assert [is_acknowledged(i, (0b101,)) for i in range(4)] == [False, True, False, True]
    assert [is_acknowledged(i, (-1, 1)) for i in (0, 63, 64, 65, 128)] == [False, False, False, True, True]


@given(st.sets(st.integers(0, 200), min_size=1))
def test_of_an_ack_set_those_are_left_of_which_it_was_made(left: set[int]) -> None:
    ack_set = ack_set_of(left)
    assert all(-(2**63) <= word < 2**63 for word in ack_set)
    assert {i for i in range(300) if not is_acknowledged(i, ack_set)} == left


def keys() -> tuple[rsa.RSAPrivateKey, bytes]:
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key, pem


@pytest.mark.slow
def test_an_entry_is_decrypted_with_the_key_that_is_for_it_and_else_says_so() -> None:
    (mine, pem), (theirs, _) = keys(), keys()
    data_key, nonce = os.urandom(32), os.urandom(12)
    oaep = padding.OAEP(padding.MGF1(hashes.SHA1()), hashes.SHA1(), None)
    metadata = MessageMetadata(encryption_param=nonce)
    metadata.encryption_keys.add(name=b"theirs", value=theirs.public_key().encrypt(os.urandom(32), oaep))
    metadata.encryption_keys.add(name=b"mine", value=mine.public_key().encrypt(data_key, oaep))
    envelope = open_envelope(entry(metadata, AESGCM(data_key).encrypt(nonce, b"secret", None)))
    decryptor = Decryptor(pem)
    assert decrypted(envelope, decryptor) == b"secret"
    assert decrypted(envelope, decryptor) == b"secret", "the data key is remembered"
    for one, other in ((envelope, None), (envelope._replace(payload=b"damaged" * 9), decryptor)):
        with pytest.raises(EntryError) as error:
            decrypted(one, other)
        assert str(error.value) == NOT_DECRYPTED


def test_a_file_without_an_rsa_key_is_named() -> None:
    with pytest.raises(PulsarError, match="has no private key as PEM"):
        Decryptor(b"no key")


@pytest.mark.slow
def test_mutated_entries_are_read_or_named_and_raise_nothing_else() -> None:
    chance = random.Random(11)
    metadata = MessageMetadata(producer_name=b"p", n_messages=3, compression=ZLIB)
    payload = batched(*((BatchedMetadata(partition_key=b"k"), b"body") for _ in range(3)))
    metadata.uncompressed_size = len(payload)
    good = entry(metadata, zlib.compress(payload), 7)
    plain = entry(MessageMetadata(n_messages=3), payload)
    for _ in range(20_000):
        data = bytearray(chance.choice((good[:2] + good[2:], plain[6:])))
        for _ in range(chance.randint(1, 5)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            envelope = open_envelope(bytes(data[: chance.randint(0, len(data))]))
            found = messages_of(envelope.metadata, decompressed(envelope.metadata, decrypted(envelope, None), MAX))
        except EntryError:
            continue
        assert len(found) <= 100_000
