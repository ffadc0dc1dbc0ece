"""The project's own producer at a real broker: what it sends is read by Pulsar's clients, once, whatever happens."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pulsar
import pytest

from broker.client import PulsarError
from broker.protocol.brokers import Brokers
from broker.protocol.building import OutgoingEntry, OutgoingMessage, batch_entry, encoded_property, single_entry
from broker.protocol.producer import EntryProducer
from broker.protocol.sending import is_refusal
from broker.protocol.wire.pulsar_pb2 import Schema
from broker.standalone import EmbeddedBroker
from tests.support.clients import java_client
from tests.support.service.harness import http, now, wait_until

AVRO = (
    b'{"type":"record","name":"Order","fields":['
    b'{"name":"item","type":["null","string"]},{"name":"amount","type":"int"}]}'
)


@pytest.fixture
def brokers(broker: EmbeddedBroker) -> Iterator[Brokers]:
    made = Brokers(broker.settings)
    yield made
    made.close()


def url(broker: EmbeddedBroker, topic: str) -> str:
    return f"{broker.settings.admin_url}/admin/v2/{topic.replace('://', '/')}"


def batch(first: int, n: int, payload: bytes = b"%d") -> OutgoingEntry:
    messages = [OutgoingMessage(i, payload % i) for i in range(first, first + n)]
    return batch_entry(messages, b"p", now())


def answered(producer: EntryProducer) -> None:
    wait_until(lambda: not producer.n_pending, 20, "all is answered")


def numbers(client: pulsar.Client, topic: str) -> list[int]:
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    found = []
    while reader.has_message_available():
        found.append(int(reader.read_next(20_000).data()))
    reader.close()
    return found


MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "null": {"payload": None},
    "empty": {"payload": b""},
    "text key": {"key": "kü".encode()},
    "bytes key": {"key": base64.b64encode(b"\xff\0\xfe"), "is_key_base64": True},
    "empty key": {"key": b""},
    "ordering key": {"ordering_key": b"\xff\xfe\0"},
    "event time": {"event_time": 1_700_000_000_123},
    "properties": {"properties": [("ü", "é \U0001f552"), ("empty", ""), ("", "no name"), ("long", "x" * 3_000)]},
}


def outgoing(name: str, sequence_id: int) -> OutgoingMessage:
    given = {"payload": name.encode(), "properties": [], **MESSAGES[name]}
    properties = [("name", name), *given["properties"]]
    encoded = [encoded_property(key, value) for key, value in properties]
    return OutgoingMessage(sequence_id, **given | {"properties": encoded})


@pytest.mark.long
def test_pulsars_java_client_reads_what_was_sent_alone_and_in_a_batch(
    broker: EmbeddedBroker, brokers: Brokers, topic: str
) -> None:
    producer = brokers.produce(topic, "p")
    for i, name in enumerate(MESSAGES):
        producer.send(single_entry(outgoing(name, 1 + i), producer.name, now()))
    producer.send(batch_entry([outgoing(name, 101 + i) for i, name in enumerate(MESSAGES)], producer.name, now()))
    answered(producer)
    producer.close()(5)
    seen = java_client.consume(broker.settings.service_url, [{"topic": topic, "n": 2 * len(MESSAGES)}])
    assert [one["properties"]["name"] for one in seen] == 2 * list(MESSAGES)
    for one in seen:
        given = MESSAGES[one["properties"]["name"]]
        payload = given.get("payload", one["properties"]["name"].encode())
        assert one["payload"] == (None if payload is None else base64.b64encode(payload).decode()) or not payload
        assert one["is_null"] == (payload is None)
        assert one["key"] == (given["key"].decode() if "key" in given else None)
        assert one["key_is_base64"] == given.get("is_key_base64", False)
        if given.get("is_key_base64"):
            assert base64.b64decode(one["key_bytes"]) == b"\xff\0\xfe"
        ordering_key = given.get("ordering_key")
        assert one["ordering_key"] == (None if ordering_key is None else base64.b64encode(ordering_key).decode())
        assert one["event_time"] == given.get("event_time", 0)
        assert one["properties"] == {"name": one["properties"]["name"], **dict(given.get("properties", []))}
        assert one["producer"] == "p"


@pytest.mark.parametrize("first", ["own", "pulsar-client"])
def test_a_batch_that_either_client_has_sent_before_is_dropped_when_the_other_sends_it(
    broker: EmbeddedBroker, brokers: Brokers, pulsar_client: pulsar.Client, topic: str, first: str
) -> None:
    """An earlier version of the program may have sent it, with pulsar-client."""

    def by_pulsar_client(begin: int, n: int) -> int:
        producer = pulsar_client.create_producer(
            topic, "p", batching_enabled=True, batching_max_publish_delay_ms=60_000, batching_max_messages=1_000
        )
        for i in range(begin, begin + n):
            producer.send_async(b"%d" % i, None, sequence_id=i)
        producer.flush()
        last = producer.last_sequence_id()
        producer.close()
        return int(last)

    def by_own(begin: int, n: int) -> int:
        producer = brokers.produce(topic, "p")
        producer.send(batch(begin, n))
        answered(producer)
        producer.close()(5)
        return producer.last_sequence_id

    ways = (by_own, by_pulsar_client) if first == "own" else (by_pulsar_client, by_own)
    ways[0](1, 10)
    ways[0](11, 10)
    http.put(f"{url(broker, topic)}/unload").raise_for_status()  # the broker reads it from the ledger
    ways[1](1, 10)
    ways[1](11, 10)
    ways[1](21, 10)
    ways[0](21, 10)
    assert numbers(pulsar_client, topic) == list(range(1, 31))


def test_all_arrives_once_and_in_order_though_the_topic_is_unloaded_and_the_connection_lost(
    broker: EmbeddedBroker, brokers: Brokers, pulsar_client: pulsar.Client, topic: str
) -> None:
    # Of a topic without subscriptions the broker trims the ledgers that an unload closes.
    pulsar_client.subscribe(topic, "kept").close()
    producer = brokers.produce(topic, "p")
    ends_at, sent = time.monotonic() + 6, 0
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.wait(1):
            httpx.put(f"{url(broker, topic)}/unload", timeout=60)

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        while time.monotonic() < ends_at:
            producer.send(batch(sent + 1, 30))
            sent += 30
            if sent % 9_000 == 0:  # the connection's socket ends, too
                for connection in list(brokers._connections.values()):
                    with suppress(OSError):
                        connection._socket.shutdown(socket.SHUT_RDWR)
            time.sleep(0.01)
    finally:
        is_over.set()
        disturbing.join()
    answered(producer)
    assert producer.error is None
    assert producer.last_sequence_id == sent > 9_000
    assert numbers(pulsar_client, topic) == list(range(1, sent + 1))


def test_a_broker_that_refuses_says_why(broker: EmbeddedBroker, brokers: Brokers, topic: str) -> None:
    producer = brokers.produce(topic, "p")
    with pytest.raises(PulsarError, match=r"^ProducerBusy: .*'p' is already connected") as busy:
        brokers.produce(topic, "p")
    assert not is_refusal(busy.value)
    producer.send(batch(1, 3))
    answered(producer)
    http.post(f"{url(broker, topic)}/terminate").raise_for_status()
    producer.send(batch(4, 3))
    wait_until(lambda: producer.error is not None, 20, "it is refused")
    assert str(producer.error).startswith("TopicTerminatedError")
    with pytest.raises(PulsarError, match=r"^TopicTerminatedError: ") as ended:
        brokers.produce(topic, "q")
    assert is_refusal(ended.value)
    with pytest.raises(PulsarError, match=r"^TopicNotFound: Namespace not found"):
        brokers.produce("persistent://nobody/knows/it", "p")


def test_more_than_the_topic_may_get_comes_later(
    broker: EmbeddedBroker, brokers: Brokers, pulsar_client: pulsar.Client, topic: str
) -> None:
    http.put(url(broker, topic)).raise_for_status()
    rate = {"publishThrottlingRateInMsg": 100, "publishThrottlingRateInByte": -1}
    http.post(f"{url(broker, topic)}/publishRate", json=rate).raise_for_status()
    time.sleep(1)  # a policy comes to the topic some moments later
    producer = brokers.produce(topic, "p")
    began = time.monotonic()
    for first in range(1, 501, 10):
        producer.send(batch(first, 10))
    answered(producer)
    assert time.monotonic() - began > 1, "it was not throttled"
    assert numbers(pulsar_client, topic) == list(range(1, 501))


def encoded(order: str) -> bytes:
    """An Order in Avro: item, amount 7."""
    return bytes([2, 2 * len(order)]) + order.encode() + bytes([14])


SCHEMAS = {
    "AVRO": (Schema.AVRO, encoded("thing"), 'AVRO {"item": "thing", "amount": 7}'),
    "INT32": (Schema.INT32, (7).to_bytes(4, "big"), "INT32 7"),
    "BOOLEAN": (Schema.BOOLEAN, b"\1", "BOOLEAN true"),
    "STRING": (Schema.STRING, b"text", "STRING text"),
}


@pytest.mark.long
def test_a_schema_is_registered_and_its_version_is_in_the_messages(
    broker: EmbeddedBroker, brokers: Brokers, topic: str
) -> None:
    for kind, (number, payload, _) in SCHEMAS.items():
        schema = Schema(name="s", type=number, definition=AVRO if kind == "AVRO" else b"")
        producer = brokers.produce(f"{topic}_{kind}", "p", schema)
        assert producer.schema_version == bytes(8)
        producer.send(single_entry(OutgoingMessage(1, payload), b"p", now(), producer.schema_version))
        producer.send(batch_entry([OutgoingMessage(2, payload)], b"p", now(), producer.schema_version))
        answered(producer)
    seen = java_client.consume(broker.settings.service_url, [{"topic": f"{topic}_{kind}", "n": 2} for kind in SCHEMAS])
    assert [one["value"] for one in seen] == [value for _, _, value in SCHEMAS.values() for _ in range(2)]
    assert {one["schema_version"] for one in seen} == {"00" * 8}
    with pytest.raises(PulsarError, match=r"^IncompatibleSchema"):
        brokers.produce(f"{topic}_AVRO", "q", Schema(name="s", type=Schema.STRING, definition=b""))


def test_partitions_are_counted(broker: EmbeddedBroker, brokers: Brokers, topic: str) -> None:
    http.put(f"{url(broker, topic)}/partitions", json=3).raise_for_status()
    assert brokers.partitions(topic) == 3
    http.put(url(broker, f"{topic}_alone")).raise_for_status()
    assert brokers.partitions(f"{topic}_alone") == 0
