"""What the broker's deduplication does with the chunks of a message that is sent again."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import pytest

from broker.protocol.brokers import Brokers
from broker.protocol.entries import Envelope
from broker.protocol.reading import read_entries
from broker.standalone import EmbeddedBroker
from tests.support.clients import java_client
from tests.support.clients.raw_producer import RawProducer, entry, metadata
from tests.support.service.harness import now

pytestmark = pytest.mark.long

CHUNKS = 3


@pytest.fixture
def brokers(broker: EmbeddedBroker) -> Iterator[Brokers]:
    made = Brokers(broker.settings)
    yield made
    made.close()


def send(broker: EmbeddedBroker, topic: str, sequence_id: int, *chunks: int) -> None:
    """Sends these chunks of a message, with a producer that has always the same name."""
    producer = RawProducer(broker.settings.service_url, topic, "p")
    for chunk in chunks:
        of_message = {"uuid": b"p-%d" % sequence_id, "n_chunks": CHUNKS, "chunk_id": chunk, "chunked_size": CHUNKS}
        part = metadata(sequence_id, now(), **{**of_message, "producer_name": b"p"})
        producer.send(entry(part, b"%d" % chunk), sequence_id, is_chunk=True)
    producer.flush()
    producer.close()


def stored(brokers: Brokers, topic: str) -> list[tuple[int, int]]:
    """(sequence id, number of the chunk) of each entry that the topic has."""
    found = []
    for one in read_entries(brokers, topic):
        assert isinstance(one.envelope, Envelope)
        found.append((one.envelope.metadata.sequence_id, one.envelope.metadata.chunk_id))
    return found


def test_of_a_message_that_is_sent_again_the_last_chunk_alone_is_dropped_and_it_comes_once(
    broker: EmbeddedBroker, brokers: Brokers, topic: str
) -> None:
    send(broker, topic, 5, 0, 1, 2)
    send(broker, topic, 5, 0, 1, 2)
    assert stored(brokers, topic) == [(5, 0), (5, 1), (5, 2), (5, 0), (5, 1)]
    send(broker, topic, 6, 0, 1)
    send(broker, topic, 6, 0, 1, 2)
    assert stored(brokers, topic)[5:] == [(6, 0), (6, 1), (6, 0), (6, 1), (6, 2)]
    seen = java_client.consume(broker.settings.service_url, [{"topic": topic, "n": 2}])
    assert [(message["size"], message["sha256"]) for message in seen] == [(CHUNKS, sha256(b"012").hexdigest())] * 2


def test_a_message_that_was_sent_in_part_is_lost_where_a_later_one_has_come(
    broker: EmbeddedBroker, brokers: Brokers, topic: str
) -> None:
    send(broker, topic, 7, 0)
    send(broker, topic, 8, 0, 1, 2)
    send(broker, topic, 7, 0, 1, 2)
    assert stored(brokers, topic) == [(7, 0), (8, 0), (8, 1), (8, 2), (7, 0), (7, 1)]
    seen = java_client.consume(broker.settings.service_url, [{"topic": topic, "n": 1}])
    assert len(seen) == 1
