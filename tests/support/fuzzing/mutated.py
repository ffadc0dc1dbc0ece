"""Mutated frames and entries, through all that reads them, from a connection's bytes to rows.

A mutation changes bytes of a frame, of its command, or of its entry's metadata or payload before the compression. The
sizes and checksums around a part that was changed are right again in most cases: else nothing would get beyond them.
"""

from __future__ import annotations

import random
import resource
import signal
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import google_crc32c
import pyarrow as pa
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from google.protobuf.message import Message

from broker.client import PulsarError
from broker.position import Position, SourceTopic
from broker.protocol.chunks import ChunkAssembler
from broker.protocol.connection import Connection
from broker.protocol.consumer import EntryConsumer
from broker.protocol.encryption import Decryptor
from broker.protocol.frames import encode
from broker.protocol.session import DisconnectedError, Session, answered
from broker.protocol.unpacking import unpack
from broker.protocol.wire.pulsar_pb2 import (
    LZ4,
    NONE,
    SNAPPY,
    ZLIB,
    ZSTD,
    BatchedMetadata,
    BrokerEntryMetadata,
    Command,
    MessageMetadata,
)
from streaming.source.receiving.row_builder import RowBuilder
from streaming.source.receiving.unreadable_messages import Acceptance

MAX_MESSAGE_BYTES = 64 << 10  # what the broker has announced
# The most that reading a frame may take: its bytes when decompressed, and an object for each message and property.
MOST_BYTES = 24 << 20
_CPU_SECONDS = 20.0  # that a frame takes at most; it takes a fraction of a millisecond
_ROWS = 200  # that become a table together
_TRACED = 50  # of one frame in so many all memory is counted: that is slow
_MORE_MEMORY = 1 << 30  # of the process, beyond what it has at the beginning
_COMPRESSIONS = (NONE, NONE, LZ4, ZLIB, ZSTD, SNAPPY)
_NUMBERS = (0, 1, 2, 255, 1_000, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_SIZE = struct.Struct(">I")


class HungError(Exception):
    """A frame takes too long."""


@dataclass
class Figures:
    """What became of the frames.

    Attributes:
        outcomes: how many ended how.
        most_seconds: CPU time of the slowest frame.
        most_bytes: memory that one frame took at most, of those that were traced.
    """

    n: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    most_seconds: float = 0.0
    most_bytes: int = 0


class _NoBroker:
    """What a consumer needs of a connection, and nobody answers."""

    max_message_bytes = MAX_MESSAGE_BYTES

    def attach(self, consumer: object) -> int:
        return 1

    def detach(self, consumer_id: int) -> None:
        pass

    def send(self, kind: Command.Type, **fields: Any) -> None:
        pass

    def request(self, kind: Command.Type, name: str, **fields: Any) -> Any:
        pass


class Reader:
    """All that reads what a broker sends. After an error it has a new connection."""

    def __init__(self, decryptor: Decryptor) -> None:
        self._decryptor = decryptor
        self._chunks = ChunkAssembler(8 * MAX_MESSAGE_BYTES, 4 * MAX_MESSAGE_BYTES, max_messages=100)
        self._builder = _builder()
        self._connect()

    def read(self, data: bytes) -> str:
        """Reads bytes to their end, or until the connection would be closed; returns what became of them."""
        said = "waits for more"
        try:
            for frame in self._session.receive(data, 0.0):
                said = "answer" if answered(frame.command) is not None else "command"
                self._consumer.received(frame)
        except PulsarError as error:
            self._connect()
            return type(error).__name__
        said = self._entries(said)
        if said in ("waits for more", "too much"):
            self._connect()
        self._session.outgoing.clear()
        return said

    def _connect(self) -> None:
        self._session = Session(lambda: "token", None, 0.0)
        list(self._session.receive(encode(Command.CONNECTED, connected={"max_message_size": MAX_MESSAGE_BYTES}), 0.0))
        connection = cast(Connection, _NoBroker())
        self._consumer = EntryConsumer(connection, "t", "s", max_bytes=1 << 20, max_messages=1_000)

    def _entries(self, said: str) -> str:
        try:
            while (received := self._consumer.receive(0)) is not None:
                entry = unpack(received, self._decryptor, self._add_chunk, MAX_MESSAGE_BYTES)
                if entry is None:
                    said = "chunk"
                    continue
                said = "rejected" if entry.failure else "read"
                self._builder.add(entry, None)
        except DisconnectedError:
            said = "too much"
        self._chunks.given_up.clear()
        if len(self._builder) >= _ROWS:
            self._builder.build().validate()
            self._builder = _builder()
        return said

    def _add_chunk(self, position: Position, metadata: MessageMetadata, part: bytes) -> Any:
        return self._chunks.add(position, position, metadata, part, 0.0)


def _builder() -> RowBuilder:
    return RowBuilder(SourceTopic("t", "t", -1), Acceptance(0, MAX_MESSAGE_BYTES))


class Mutator:
    """Makes frames as a broker sends them, and changes them."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        private = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
        self.decryptor = Decryptor(
            private.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        oaep = padding.OAEP(padding.MGF1(hashes.SHA1()), hashes.SHA1(), None)
        self._data_key = AESGCM.generate_key(256)
        self._encrypted_key = private.public_key().encrypt(self._data_key, oaep)

    def frames(self) -> bytes:
        """Returns a frame, or two, that were changed somewhere."""
        chance = self._chance
        if chance.random() < 0.15:
            data = self._answer()
            return self._changed(data) if chance.random() < 0.7 else self._resized(data)
        metadata, payload = self._message()
        data = self._frame(metadata, payload)
        return self._changed(data) if chance.random() < 0.1 else data

    def _message(self) -> tuple[bytes, bytes]:
        """Returns an entry's metadata and payload, of which a part was changed."""
        chance = self._chance
        where = chance.choice(("metadata bytes", "fields", "fields", "payload", "compressed", "batched", "batched"))
        metadata = MessageMetadata(producer_name=b"p", sequence_id=1, publish_time=1_700_000_000_000)
        body = self._bytes(chance.choice((0, 20, 400)))
        if chance.random() < 0.5:
            self._give(metadata)
        if chance.random() < 0.6 or where == "batched":
            n = chance.choice((1, 2, 3, 20))
            metadata.n_messages = n
            body = self._batch(n, where == "batched")
        if where == "payload":
            body = self._changed(body)
        metadata.uncompressed_size = len(body)
        metadata.compression = chance.choice(_COMPRESSIONS)
        body = _compressed(body, metadata.compression)
        if where == "compressed":
            body = self._changed(body)
        if chance.random() < 0.1:
            metadata.encryption_param = chance.randbytes(12)
            metadata.encryption_keys.add(name=b"k", value=self._encrypted_key)
            body = AESGCM(self._data_key).encrypt(metadata.encryption_param, body, None)
        if chance.random() < 0.15:
            n_chunks = chance.choice((2, 3, 1_000))
            metadata.uuid, metadata.n_chunks = chance.choice((b"a", b"b", b"c")), n_chunks
            metadata.chunk_id, metadata.chunked_size = chance.randrange(3), len(body)
        if where == "fields":
            self._set_fields(metadata)
        data = metadata.SerializeToString()
        return (self._changed(data) if where == "metadata bytes" else data), body

    def _give(self, metadata: MessageMetadata | BatchedMetadata) -> None:
        chance = self._chance
        metadata.partition_key = chance.choice((b"", b"k", b"\xff\x00"))
        metadata.is_key_base64 = chance.random() < 0.3
        metadata.ordering_key = chance.choice((b"o", b"\xff"))
        for _ in range(chance.choice((0, 1, 3))):
            names = (b"deliverAt", b"deliverAfter", b"repeat", b"a", b"", b"\xff")
            metadata.properties.add(
                key=chance.choice(names), value=chance.choice((b"1700000000000", b"", b"\xff", b"x"))
            )
        if isinstance(metadata, MessageMetadata) and chance.random() < 0.3:
            metadata.deliver_at_time = 1_700_000_000_000

    def _batch(self, n: int, is_changed: bool) -> bytes:
        changed = self._chance.randrange(n) if is_changed else -1
        parts = []
        for i in range(n):
            metadata = BatchedMetadata(payload_size=5)
            self._give(metadata)
            if i == changed and self._chance.random() < 0.5:
                self._set_fields(metadata)
            data = metadata.SerializeToString()
            if i == changed and self._chance.random() < 0.5:
                data = self._changed(data)
            parts += [_SIZE.pack(len(data)), data, b"body "]
        return b"".join(parts)

    def _set_fields(self, message: Message) -> None:
        """Sets some of a message's fields to numbers at their limits, or to bytes."""
        fields: list[Any] = list(message.DESCRIPTOR.fields)
        for descriptor in self._chance.sample(fields, min(len(fields), 2)):
            try:
                if descriptor.type == descriptor.TYPE_BYTES:
                    setattr(message, descriptor.name, self._bytes(self._chance.choice((0, 1, 300))))
                elif descriptor.type != descriptor.TYPE_MESSAGE:
                    setattr(message, descriptor.name, self._chance.choice((*_NUMBERS, -1, -(2**31))))
            except (ValueError, TypeError, OverflowError, AttributeError):
                continue  # beyond the field's range, or a repeated one

    def _frame(self, metadata: bytes, payload: bytes) -> bytes:
        chance = self._chance
        body = _SIZE.pack(len(metadata)) + metadata + payload
        if chance.random() < 0.9:
            checksum = google_crc32c.value(body) if chance.random() < 0.95 else chance.getrandbits(32)
            body = b"\x0e\x01" + _SIZE.pack(checksum) + body
        if chance.random() < 0.5:
            broker = BrokerEntryMetadata(index=chance.choice(_NUMBERS)).SerializeToString()
            if chance.random() < 0.1:
                broker = self._changed(broker)
            body = b"\x0e\x02" + _SIZE.pack(len(broker)) + broker + body
        position = {"ledger_id": chance.choice(_NUMBERS[:9]), "entry_id": chance.choice(_NUMBERS[:9])}
        ack_set = [chance.getrandbits(63) for _ in range(chance.choice((0, 0, 0, 1, 5)))]
        message = {"consumer_id": 1, "id": position, "ack_set": ack_set}
        command = Command(type=Command.MESSAGE, message=message).SerializeToString()
        if chance.random() < 0.1:
            command = self._changed(command)
        return _SIZE.pack(4 + len(command) + len(body)) + _SIZE.pack(len(command)) + command + body

    def _answer(self) -> bytes:
        """Returns the frame of any other command, with all that its field has."""
        fields = [one for one in Command.DESCRIPTOR.fields if one.message_type is not None]
        chosen = self._chance.choice(fields)
        kind = chosen.number if chosen.number in Command.Type.values() else 2
        command = Command(type=cast(Command.Type, kind))
        self._set_fields(getattr(command, chosen.name))
        getattr(command, chosen.name).SetInParent()
        body = command.SerializeToString()
        return _SIZE.pack(4 + len(body)) + _SIZE.pack(len(body)) + body

    def _resized(self, frame: bytes) -> bytes:
        """Changes a frame's command, and gives it its right sizes."""
        body = self._changed(frame[8:])
        return _SIZE.pack(4 + len(body)) + _SIZE.pack(len(body)) + body

    def _changed(self, data: bytes) -> bytes:
        """Changes some bytes: others, fewer, more, a number at its limits, or a part again."""
        chance, changed = self._chance, bytearray(data)
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            at = chance.randrange(len(changed) + 1)
            kind = chance.randrange(6)
            if kind == 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            elif kind == 1 and at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            elif kind == 2:
                del changed[at : at + chance.choice((1, 4, 50))]
            elif kind == 3:
                changed[at:at] = chance.randbytes(chance.choice((1, 4, 50)))
            elif kind == 4:
                changed[at : at + 4] = _SIZE.pack(chance.choice(_NUMBERS) & 0xFFFFFFFF)
            else:
                begin = chance.randrange(len(changed) + 1)
                changed[at:at] = changed[begin : begin + chance.choice((4, 30))] * chance.choice((1, 50))
        return bytes(changed)

    def _bytes(self, n: int) -> bytes:
        return self._chance.choice((self._chance.randbytes(n), b"\x00" * n, b"ab" * (n // 2)))


def _compressed(data: bytes, compression: int) -> bytes:
    if compression == NONE:
        return data
    if compression == ZLIB:
        return zlib.compress(data, 1)
    names: dict[int, str] = {LZ4: "lz4_raw", ZSTD: "zstd", SNAPPY: "snappy"}
    name = names[compression]
    return bytes(pa.Codec(name).compress(data, asbytes=True))


@contextmanager
def limited() -> Iterator[None]:
    """Lets a frame that takes too long, or far too much memory, raise an error."""

    def hang_up(*_: object) -> None:
        raise HungError

    before = signal.signal(signal.SIGVTALRM, hang_up)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MORE_MEMORY, limits[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def run(seed: int, n: int, say: Callable[[Figures], None] = lambda figures: None) -> Figures:
    """Reads mutated frames.

    Args:
        seed: of the random numbers.
        n: how many.
        say: is told the figures after each 10,000.

    Raises:
        AssertionError: a frame raised another error than one of Pulsar's, took too long, or too much memory.
    """
    figures, mutator = Figures(), Mutator(seed)
    reader = Reader(mutator.decryptor)
    with limited():
        for i in range(n):
            data = mutator.frames()
            is_traced = i % _TRACED == 0
            if is_traced:
                tracemalloc.start()
            signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_SECONDS)
            begun = time.process_time()
            try:
                outcome = reader.read(data)
            except Exception as error:
                raise AssertionError(f"frame {i} of seed {seed}, {data.hex()}: {error!r}") from error
            figures.most_seconds = max(figures.most_seconds, time.process_time() - begun)
            if is_traced:
                taken = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                figures.most_bytes = max(figures.most_bytes, taken)
                assert taken <= MOST_BYTES, f"frame {i} of seed {seed} took {taken} bytes: {data.hex()}"
            figures.n += 1
            figures.outcomes[outcome] = figures.outcomes.get(outcome, 0) + 1
            if figures.n % 10_000 == 0:
                say(figures)
    return figures
