"""Reads what a topic partition has now, without a subscription that stays.

Anybody may have published there. Pulsar's C++ client is no way to read it: it makes room for a message's chunks as the
first one says, and writes what comes beyond that room.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

from broker.client import NoAnswerError, PulsarError
from broker.position import START, Position
from broker.protocol.brokers import Brokers
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.entries import EntryError, Message, messages_of
from broker.protocol.sending import is_refusal
from broker.protocol.session import DisconnectedError, RefusedError
from broker.protocol.wire.pulsar_pb2 import NONE
from broker.pulsar_admin.admin_rest import AdminClient

_MAX_BYTES = 16 << 20  # of entries on their way
_MAX_MESSAGES = 5_000
_SILENT_SECONDS = 30.0
_LOOK_SECONDS = 1.0  # without an entry, until it is asked whether there are more


class ReadMessage(NamedTuple):
    """A message as it is at a destination, without its payload.

    Attributes:
        topic: the topic partition.
        position: of its entry.
        published: ms since the epoch.
        producer: the producer's name.
        properties: by name.
    """

    topic: str
    position: Position
    published: int
    producer: str
    properties: dict[str, str]


def read_entries(
    brokers: Brokers, topic: str, after: Position = START, silent_seconds: float = _SILENT_SECONDS
) -> Generator[ReceivedEntry]:
    """Yields the entries that a topic partition has when it begins, in order.

    Args:
        brokers: connections to the brokers.
        topic: the topic partition; a missing one may be created.
        after: the entry before the first one.
        silent_seconds: how long to wait for an entry.

    Raises:
        PulsarError: no broker answers, or it refuses.
    """
    last, n_failures = after, 0
    while True:
        try:
            with closing(_read_once(brokers, topic, last, silent_seconds)) as entries:
                for entry in entries:
                    last, n_failures = entry.position, 0
                    yield entry
            return
        except (DisconnectedError, RefusedError) as error:  # the topic moves to another broker
            n_failures += 1
            if is_refusal(error) or n_failures * _LOOK_SECONDS >= silent_seconds:
                raise
            time.sleep(_LOOK_SECONDS)


def _read_once(brokers: Brokers, topic: str, after: Position, silent_seconds: float) -> Generator[ReceivedEntry]:
    """Does what `read_entries` does, by one consumer."""
    consumer = brokers.read(topic, after, max_bytes=_MAX_BYTES, max_messages=_MAX_MESSAGES)
    try:
        end, last, silent = consumer.has_more(), after, 0.0
        while end is not None and last < end:
            entry = consumer.receive(_LOOK_SECONDS)
            if entry is not None:
                silent = 0.0
                if entry.position > last:
                    last = entry.position
                    yield entry
                continue
            silent += _LOOK_SECONDS
            if last > after:
                consumer.acknowledge(last)
            if consumer.has_more() is None:
                return  # the last ones are markers, which the broker does not send
            if silent >= silent_seconds:
                raise NoAnswerError(f"{topic}: no entry after {last} comes, though {end} is there")
    finally:
        with suppress(PulsarError):
            consumer.close()


def read_messages(
    brokers: Brokers, topic: str, after: Position = START, silent_seconds: float = _SILENT_SECONDS
) -> Iterator[ReadMessage]:
    """Yields the messages that the service itself may have sent to a topic partition, among others.

    Arguments and errors are those of `read_entries`.
    """
    for entry in read_entries(brokers, topic, after, silent_seconds):
        yield from messages_in(topic, entry)


def messages_in(topic: str, entry: ReceivedEntry) -> Iterator[ReadMessage]:
    """Yields the messages of an entry that the service itself may have sent, without their payloads.

    A message in chunks is in the entry of the last one: the service sends that when the others have arrived.

    Args:
        topic: the topic partition.
    """
    if isinstance(entry.envelope, EntryError):
        return
    metadata = entry.envelope.metadata
    if entry.envelope.is_chunk and metadata.chunk_id != metadata.n_chunks - 1:
        return
    for message in plain_messages(entry):
        with suppress(UnicodeDecodeError):
            producer, properties = metadata.producer_name.decode(), texts_of(message)
            yield ReadMessage(topic, entry.position, metadata.publish_time, producer, properties)


def plain_messages(entry: ReceivedEntry) -> Sequence[Message]:
    """Returns the messages of an entry; none of what the service never sends.

    That is: what is compressed, encrypted, or damaged. A chunk stands for its message, of whose payload it has a part.
    """
    envelope = entry.envelope
    if isinstance(envelope, EntryError) or envelope.metadata.encryption_keys:
        return ()
    if envelope.metadata.compression != NONE:
        return ()
    try:
        return messages_of(envelope.metadata, envelope.payload)
    except EntryError:
        return ()


def texts_of(message: Message) -> dict[str, str]:
    """Returns the properties of a message.

    Raises:
        UnicodeDecodeError: one is no UTF-8, which the service never sends.
    """
    return {name.decode(): value.decode() for name, value in message.properties}


def before_time(admin: AdminClient, topic: str, time: int) -> Position:
    """Returns an entry of a topic partition after which all entries come that were published since a time.

    Args:
        admin: asked for it; where it does not answer all entries come after the result.
        topic: the topic partition.
        time: ms since the epoch.
    """
    found = None
    if time > 0:
        with suppress(PulsarError):
            found = admin.entry_published_at(topic, time)
    return START if found is None else Position(found[0], found[1] - 1)
