"""What the broker's deduplication does with the chunks of a message that is sent again, and what consumers do.

The project's producer sends chunks so that none of this loses a message, or lets it come twice: see
`broker/protocol/sending.py` and tests/integration/broker/test_sending_in_chunks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from typing import Any

import pulsar
import pytest

from broker.protocol.brokers import Brokers
from broker.protocol.entries import Envelope
from broker.protocol.reading import read_entries
from broker.standalone import EmbeddedBroker
from tests.support.clients import java_client
from tests.support.clients.raw_producer import RawProducer, entry, metadata
from tests.support.service.harness import http, now, wait_until

pytestmark = pytest.mark.long

CHUNKS = 3


@pytest.fixture
def brokers(broker: EmbeddedBroker) -> Iterator[Brokers]:
    made = Brokers(broker.settings)
    yield made
    made.close()


def send(
    broker: EmbeddedBroker, topic: str, sequence_id: int, *chunks: int, attempt: bytes = b"", **fields: Any
) -> None:
    """Sends these chunks of a message, with a producer that has always the same name.

    Args:
        attempt: makes the message's UUID another one; by default it is always the same, as with Pulsar's clients.
        fields: of the chunks' metadata, beside those of chunks.
    """
    producer = RawProducer(broker.settings.service_url, topic, "p")
    for chunk in chunks:
        of_message = {
            "uuid": b"p-%d%b" % (sequence_id, attempt),
            "n_chunks": CHUNKS,
            "chunk_id": chunk,
            "chunked_size": CHUNKS,
        }
        part = metadata(sequence_id, now(), **{**of_message, **fields, "producer_name": b"p"})
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


def test_a_broker_that_loads_a_topic_takes_each_chunk_for_the_whole_message(
    broker: EmbeddedBroker, brokers: Brokers, topic: str
) -> None:
    send(broker, topic, 5, 0, 1, 2)
    send(broker, topic, 6, 0)
    assert last_sequence_id(brokers, topic) == 5
    url = f"{broker.settings.admin_url}/admin/v2/{topic.replace('://', '/')}/unload"
    http.put(url).raise_for_status()
    wait_until(lambda: last_sequence_id(brokers, topic) == 6, 20, "the topic is loaded")
    send(broker, topic, 6, 0, 1, 2)
    assert stored(brokers, topic)[3:] == [(6, 0), (6, 0), (6, 1)]


@pytest.mark.parametrize("has_own_uuid", [False, True])
def test_pulsars_python_client_loses_a_message_of_which_a_chunk_comes_again_under_the_same_uuid(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, has_own_uuid: bool
) -> None:
    send(broker, topic, 5, 0, 1)
    send(broker, topic, 5, 0, 1, 2, attempt=b"again" if has_own_uuid else b"")
    send(broker, topic, 6, 0, 1, 2)
    consumer = pulsar_client.subscribe(topic, "s", initial_position=pulsar.InitialPosition.Earliest)
    found = [consumer.receive(20_000).data()]
    with suppress(pulsar.Timeout):
        while True:
            found.append(consumer.receive(3_000).data())
    consumer.close()
    assert found == [b"012"] * (2 if has_own_uuid else 1)


def test_a_compacted_topic_has_the_last_chunk_alone_of_a_key(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str
) -> None:
    """So readers of the compacted topic do not get the message: docs/messages.md says so."""
    send(broker, topic, 5, 0, 1, 2, partition_key=b"k")
    producer = pulsar_client.create_producer(topic)
    producer.send(b"small", partition_key="other")
    producer.close()
    url = f"{broker.settings.admin_url}/admin/v2/{topic.replace('://', '/')}/compaction"
    http.put(url).raise_for_status()
    wait_until(lambda: http.get(url).json()["status"] == "SUCCESS", 30, "the topic is compacted")
    consumer = pulsar_client.subscribe(
        topic, "s", is_read_compacted=True, initial_position=pulsar.InitialPosition.Earliest
    )
    assert consumer.receive(20_000).data() == b"small"
    consumer.close()


def last_sequence_id(brokers: Brokers, topic: str) -> int:
    producer = brokers.produce(topic, "p")
    producer.close()(5)
    return producer.last_sequence_id
