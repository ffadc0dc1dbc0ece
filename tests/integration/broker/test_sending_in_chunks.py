"""The project's producer sends what is larger than an entry in chunks: consumers get it whole and once."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable, Iterator

import pulsar
import pytest

from broker.client import connect
from broker.protocol.brokers import Brokers
from broker.protocol.building import OutgoingMessage, encoded_property, large_message, single_entry
from broker.protocol.entries import Envelope
from broker.protocol.producer import EntryProducer, EntryTooLargeError
from broker.protocol.reading import read_entries, read_messages
from broker.protocol.sending import PartlySentError
from broker.standalone import EmbeddedBroker
from tests.support.clients import java_client
from tests.support.servers.small_entries import LARGEST, SLOW, broker_of_small_entries
from tests.support.service.harness import http, now, wait_until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, broker: EmbeddedBroker) -> Iterator[EmbeddedBroker]:
    with broker_of_small_entries(tmp_path_factory.mktemp("small"), broker) as made:
        yield made


@pytest.fixture
def brokers(small: EmbeddedBroker) -> Iterator[Brokers]:
    made = Brokers(small.settings)
    yield made
    made.close()


@pytest.fixture
def client(small: EmbeddedBroker) -> Iterator[pulsar.Client]:
    made = connect(small.settings)
    yield made
    made.close()


def payload_of(n_bytes: int, seed: int = 0) -> bytes:
    return (hashlib.sha256(b"%d" % seed).digest() * (n_bytes // 32 + 1))[:n_bytes]


def send(producer: EntryProducer, sequence_id: int, n_bytes: int, **fields: object) -> None:
    message = OutgoingMessage(sequence_id, payload_of(n_bytes, sequence_id), **fields)  # type: ignore[arg-type]
    encoded = large_message if n_bytes > 1_000 else single_entry
    producer.send(encoded(message, producer.name, now()))


def answered(producer: EntryProducer) -> None:
    wait_until(lambda: not producer.n_pending or producer.error is not None, 60, "all is answered")
    assert producer.error is None


def some_chunks(producer: EntryProducer, n: int) -> None:
    wait_until(lambda: producer.n_answers >= n, 20, f"{n} answers")


def chunks_of(brokers: Brokers, topic: str) -> list[tuple[int, int]]:
    """(sequence id, number of the chunk, -1: it is none) of each entry of a topic."""
    found = []
    for one in read_entries(brokers, topic):
        assert isinstance(one.envelope, Envelope)
        metadata = one.envelope.metadata
        found.append((metadata.sequence_id, metadata.chunk_id if one.envelope.is_chunk else -1))
    return found


def received(client: pulsar.Client, topic: str, n: int) -> list[str]:
    """The hashes of a topic's messages, as pulsar-client sees them; no more come in two seconds."""
    consumer = client.subscribe(topic, f"s{os.urandom(4).hex()}", initial_position=pulsar.InitialPosition.Earliest)
    found: list[str] = []
    try:
        while True:
            message = consumer.receive(20_000 if len(found) < n else 2_000)
            found.append(hashlib.sha256(message.data()).hexdigest())
            consumer.acknowledge(message)
    except pulsar.Timeout:
        return found
    finally:
        consumer.close()


def expected(*sent: tuple[int, int]) -> list[str]:
    return [hashlib.sha256(payload_of(n_bytes, sequence_id)).hexdigest() for sequence_id, n_bytes in sent]


def test_java_python_and_own_reading_see_large_messages_whole_among_small_ones(
    small: EmbeddedBroker, brokers: Brokers, client: pulsar.Client, topic: str
) -> None:
    producer = brokers.produce(topic, "p")
    sizes = [(1, 5), (2, 1_000_000), (3, 7), (4, 130_000), (5, 100_000), (6, 2_000_000), (7, 9)]
    for sequence_id, n_bytes in sizes:
        fields = {"properties": [encoded_property("n", str(sequence_id))], "key": b"k%d" % sequence_id}
        send(producer, sequence_id, n_bytes, **fields, ordering_key=b"\xff\0", event_time=1_700_000_000_123)
    answered(producer)
    assert producer.last_sequence_id == 7
    producer.close()(5)
    seen = java_client.consume(small.settings.service_url, [{"topic": topic, "n": len(sizes)}])
    assert [(one["properties"]["n"], one["size"]) for one in seen] == [(str(i), n_bytes) for i, n_bytes in sizes]
    assert [one["sha256"] for one in seen] == expected(*sizes)
    for one, (i, _) in zip(seen, sizes, strict=True):
        assert (one["key"], one["event_time"], one["producer"]) == (f"k{i}", 1_700_000_000_123, "p")
        assert base64.b64decode(one["ordering_key"]) == b"\xff\0"
    assert received(client, topic, len(sizes)) == expected(*sizes)
    assert [one.properties["n"] for one in read_messages(brokers, topic)] == [str(i) for i, _ in sizes]
    stored = chunks_of(brokers, topic)
    assert sorted(stored) == stored
    assert max(one[1] for one in stored if one[0] == 6) >= 2_000_000 // LARGEST


def test_keys_and_properties_that_fill_an_entry_are_refused_before_it_is_sent(brokers: Brokers, topic: str) -> None:
    producer = brokers.produce(topic, "p")
    with pytest.raises(EntryTooLargeError, match="keys and properties"):
        send(producer, 1, 500_000, properties=[encoded_property("large", "x" * LARGEST)])
    send(producer, 2, 10)
    answered(producer)
    assert chunks_of(brokers, topic) == [(2, -1)]


def limited(small: EmbeddedBroker, topic: str, n_bytes: int) -> None:
    """The topic's policy takes entries of so many bytes."""
    url = f"{small.settings.admin_url}/admin/v2/{topic.replace('://', '/')}/maxMessageSize"
    http.post(url, json=n_bytes).raise_for_status()
    wait_until(lambda: http.get(f"{url}?applied=true").text == str(n_bytes), 20, "the policy")


def test_a_topics_policy_refuses_large_entries_and_not_what_comes_in_chunks(
    small: EmbeddedBroker, brokers: Brokers, client: pulsar.Client, topic: str
) -> None:
    brokers.produce(topic, "other").close()(5)
    limited(small, topic, 50_000)
    producer = brokers.produce(topic, "p")
    for sequence_id, n_bytes in [(1, 100_000), (2, 10), (3, 400_000)]:
        send(producer, sequence_id, n_bytes)
    answered(producer)
    assert [one.entry.sequence_id for one in producer.take_refused()] == [1]
    assert received(client, topic, 2) == expected((2, 10), (3, 400_000))


def test_what_has_arrived_is_not_stored_again_when_it_is_sent_again(
    small: EmbeddedBroker, brokers: Brokers, client: pulsar.Client, topic: str
) -> None:
    sizes = [(1, 300_000), (2, 10), (3, 400_000)]
    for _ in range(3):
        producer = brokers.produce(topic, "p")
        for sequence_id, n_bytes in sizes:
            send(producer, sequence_id, n_bytes)
        answered(producer)
        producer.close()(5)
    assert len(chunks_of(brokers, topic)) == 3 + 1 + 4
    assert received(client, topic, 3) == expected(*sizes)


def unload(small: EmbeddedBroker, topic: str) -> None:
    http.put(f"{small.settings.admin_url}/admin/v2/{topic.replace('://', '/')}/unload").raise_for_status()


def restart(small: EmbeddedBroker, topic: str) -> None:
    status = small.status()
    port, http_port = (int(url.rsplit(":", 1)[1]) for url in (status.service_url or "", status.admin_url or ""))
    small.kill()
    small.start(port=port, http_port=http_port)


def test_a_producer_that_is_closed_between_chunks_sends_all_again_the_next_time(
    small: EmbeddedBroker, brokers: Brokers, client: pulsar.Client, topic: str
) -> None:
    topic = topic.replace("public/default", SLOW)
    for n_chunks in (1, 5, 12):
        producer = brokers.produce(topic, "p")
        send(producer, 1, 4_000_000)
        send(producer, 2, 10)
        some_chunks(producer, n_chunks)
        producer.close()(5)
        assert producer.last_sequence_id == -1
    producer = brokers.produce(topic, "p")
    assert producer.last_sequence_id == -1
    send(producer, 1, 4_000_000)
    send(producer, 2, 10)
    answered(producer)
    assert received(client, topic, 2) == expected((1, 4_000_000), (2, 10))
    seen = java_client.consume(small.settings.service_url, [{"topic": topic, "n": 2}])
    assert [one["sha256"] for one in seen] == expected((1, 4_000_000), (2, 10))


@pytest.mark.parametrize("interrupt", [unload, restart])
def test_a_broker_that_loads_the_topic_between_chunks_ends_the_producer_which_says_why(
    small: EmbeddedBroker, client: pulsar.Client, topic: str, interrupt: Callable[[EmbeddedBroker, str], None]
) -> None:
    """It counts the message as published: whoever sends it again under the same name would lose it."""
    topic = topic.replace("public/default", SLOW)
    brokers = Brokers(small.settings)
    producer = brokers.produce(topic, "p")
    send(producer, 1, 10)
    send(producer, 2, 6_000_000)
    send(producer, 3, 20)
    some_chunks(producer, 6)
    interrupt(small, topic)
    wait_until(lambda: producer.error is not None or not producer.n_pending, 60, "it is open again")
    assert isinstance(producer.error, PartlySentError)
    assert producer.last_sequence_id == 1
    producer.close()(5)
    other = brokers.produce(topic, "p-1")
    send(other, 2, 6_000_000)
    send(other, 3, 20)
    answered(other)
    assert received(client, topic, 3) == expected((1, 10), (2, 6_000_000), (3, 20))
    again = brokers.produce(topic, "p")
    assert again.last_sequence_id == 2
    brokers.close()


def test_a_lost_connection_between_chunks_has_the_message_sent_again_at_once(
    small: EmbeddedBroker, brokers: Brokers, client: pulsar.Client, topic: str
) -> None:
    topic = topic.replace("public/default", SLOW)
    producer = brokers.produce(topic, "p")
    send(producer, 1, 10)
    send(producer, 2, 4_000_000)
    send(producer, 3, 20)
    for n in (4, 10):
        some_chunks(producer, n)
        connection = producer._link.connection  # type: ignore[union-attr]
        connection._socket.shutdown(2)
        wait_until(lambda c=connection: c.error is not None, 20, "it is lost")  # type: ignore[misc]
        time.sleep(0.1)
    answered(producer)
    assert received(client, topic, 3) == expected((1, 10), (2, 4_000_000), (3, 20))
    seen = java_client.consume(small.settings.service_url, [{"topic": topic, "n": 3}])
    assert [one["sha256"] for one in seen] == expected((1, 10), (2, 4_000_000), (3, 20))
