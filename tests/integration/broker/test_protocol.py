"""The project's own consumer at a real broker: TLS, tokens that end, unloads, and what is sent again."""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pulsar
import pytest

from broker.client import PulsarError, connect
from broker.jvm.jars import JarSet
from broker.position import Position
from broker.protocol.brokers import Brokers
from broker.protocol.building import OutgoingMessage, batch_entry, single_entry
from broker.protocol.consumer import EntryConsumer, ReceivedEntry
from broker.protocol.entries import Envelope, ack_set_of, is_acknowledged, messages_of
from broker.protocol.session import DisconnectedError
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings
from tests.support.clients.raw_producer import RawProducer, entry, metadata
from tests.support.clients.tokens import SECRET, certificate, token
from tests.support.service.harness import now, wait_until

TOPIC = "persistent://public/default/entries"


def payloads(entry: ReceivedEntry | None) -> list[bytes | None]:
    assert entry is not None
    assert isinstance(entry.envelope, Envelope), entry
    return [message.payload for message in messages_of(entry.envelope.metadata, entry.envelope.payload)]


@dataclass
class Secured:
    """A broker that wants TLS and a token."""

    settings: PulsarSettings
    token_file: Path
    admin_client: pulsar.Client


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, jar_set: JarSet) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    tls = certificate(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    broker = EmbeddedBroker(
        folder / "broker",
        {
            "brokerServicePortTls": str(port),
            "tlsCertificateFilePath": str(tls.tls_certificate_file),
            "tlsKeyFilePath": str(tls.tls_key_file),
            "authenticationEnabled": "true",
            "authorizationEnabled": "true",
            "authenticationProviders": "org.apache.pulsar.broker.authentication.AuthenticationProviderToken",
            "authenticationRefreshCheckSeconds": "1",
            "tokenSecretKey": f"data:;base64,{base64.b64encode(SECRET).decode()}",
            "superUserRoles": "admin",
            "acknowledgmentAtBatchIndexLevelEnabled": "true",
            "brokerClientAuthenticationPlugin": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
            "brokerClientAuthenticationParameters": f"token:{token('admin')}",
        },
        jar_set,
    )
    try:
        broker.start(port=0, http_port=0, wait=False)
        own, admins = folder / "own.token", folder / "admin.token"
        admins.write_text(token("admin"))
        own.write_text(token("admin"))
        headers = {"Authorization": f"Bearer {token('admin')}"}
        with httpx.Client(base_url=f"{broker.settings.admin_url}/admin/v2/", timeout=60, headers=headers) as admin:

            def is_ready() -> bool:
                try:
                    return admin.get("brokers/health").is_success and admin.get("namespaces/public/default").is_success
                except httpx.TransportError:
                    return False

            wait_until(is_ready, 60, "the broker is ready")
        client = connect(broker.settings.model_copy(update={"token_file": admins}))
        settings = PulsarSettings(
            service_url=f"pulsar+ssl://127.0.0.1:{port}",
            admin_url=broker.settings.admin_url,
            token_file=own,
            trust_certs_file=tls.tls_certificate_file,
        )
        yield Secured(settings, own, client)
        client.close()
    finally:
        broker.kill()


def opened(brokers: Brokers, topic: str = TOPIC) -> EntryConsumer:
    return brokers.subscribe(topic, "s", max_bytes=1 << 20, max_messages=1_000)


@pytest.mark.long
def test_with_tls_a_token_that_ends_is_renewed_and_the_consumer_goes_on(secured: Secured) -> None:
    secured.token_file.write_text(token("admin", exp=int(time.time()) + 4))
    brokers = Brokers(secured.settings)
    consumer = opened(brokers)
    producer = secured.admin_client.create_producer(TOPIC)
    producer.send(b"before")
    assert payloads(consumer.receive(20)) == [b"before"]
    secured.token_file.write_text(token("admin", exp=int(time.time()) + 600))
    time.sleep(8)  # the first token has ended, and the broker has asked for another
    producer.send(b"after")
    assert payloads(consumer.receive(20)) == [b"after"]
    brokers.close()


@pytest.mark.long
def test_single_messages_of_a_batch_stay_acknowledged(secured: Secured) -> None:
    brokers = Brokers(secured.settings)
    topic = f"{TOPIC}-batch"
    consumer = opened(brokers, topic)
    producer = brokers.produce(topic, "p")
    producer.send(batch_entry([OutgoingMessage(i + 1, b"%d" % i) for i in range(70)], b"p", now()))
    entry = consumer.receive(20)
    assert entry is not None
    left = set(range(70))
    for acknowledged in ({0, 2}, {64, 69}, {5}):
        left -= acknowledged
        consumer.acknowledge_each([(entry.position, ack_set_of(left))])
        consumer.close()
        consumer = opened(brokers, topic)
        entry = consumer.receive(20)
        assert entry is not None
        assert {i for i in range(70) if not is_acknowledged(i, entry.ack_set)} == left
    consumer.acknowledge_each([(entry.position, ())])
    consumer.close()
    assert opened(brokers, topic).receive(0.5) is None
    brokers.close()


@pytest.mark.long
def test_who_is_not_trusted_or_may_not_is_told_in_one_line(secured: Secured, tmp_path: Path) -> None:
    other = certificate(tmp_path).tls_certificate_file
    for change, why in (
        ({"trust_certs_file": other}, r"the certificate of 127\.0\.0\.1:\d+ is not trusted"),
        ({"token_file": None}, "AuthenticationError"),
        ({"service_url": secured.settings.service_url.replace("127.0.0.1", "localhost")}, "is not trusted"),
    ):
        brokers = Brokers(secured.settings.model_copy(update=change))
        with pytest.raises(PulsarError, match=why) as error:
            opened(brokers)
        assert "\n" not in str(error.value)
        brokers.close()
    nobody = tmp_path / "nobody.token"
    nobody.write_text(token("nobody"))
    brokers = Brokers(secured.settings.model_copy(update={"token_file": nobody}))
    with pytest.raises(PulsarError, match="AuthorizationError"):
        opened(brokers)
    brokers.close()


def test_single_entries_are_acknowledged_and_the_others_come_again(broker: EmbeddedBroker, topic: str) -> None:
    brokers = Brokers(broker.settings)
    consumer = opened(brokers, topic)
    producer = brokers.produce(topic, "p")
    for i in range(6):
        producer.send(single_entry(OutgoingMessage(i + 1, b"%d" % i), b"p", now()))
    found = [consumer.receive(20) for _ in range(6)]
    consumer.acknowledge_each([(one.position, ()) for one in found[1::2] if one is not None])
    consumer.close()
    again = opened(brokers, topic)
    assert [payloads(again.receive(20)) for _ in range(3)] == [[b"0"], [b"2"], [b"4"]]
    assert again.receive(0.1) is None
    brokers.close()


def test_what_was_not_acknowledged_comes_again_after_an_unload(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str
) -> None:
    brokers = Brokers(broker.settings)
    consumer = opened(brokers, topic)
    assert consumer.last_entry().entry_id == -1
    producer = pulsar_client.create_producer(topic, batching_enabled=False)
    sent = [producer.send(bytes([i])) for i in range(5)]
    found = [consumer.receive(20) for _ in range(5)]
    assert [payloads(entry) for entry in found] == [[bytes([i])] for i in range(5)]
    assert [entry and entry.position for entry in found] == [Position(i.ledger_id(), i.entry_id()) for i in sent]
    indexes = [entry.envelope.last_index for entry in found if entry and isinstance(entry.envelope, Envelope)]
    assert indexes == list(range(5))
    second = found[1]
    assert second is not None
    consumer.acknowledge(second.position)
    assert consumer.last_entry() == Position(sent[-1].ledger_id(), sent[-1].entry_id())
    with pytest.raises(PulsarError, match="ConsumerBusy"):
        opened(brokers, topic)
    url = f"{broker.settings.admin_url}/admin/v2/{topic.replace('://', '/')}/unload"
    httpx.put(url, timeout=60).raise_for_status()
    with pytest.raises(DisconnectedError, match="the broker has closed the consumer"):
        consumer.receive(20)
    again = opened(brokers, topic)
    assert [payloads(again.receive(20)) for _ in range(3)] == [[b"\2"], [b"\3"], [b"\4"]]
    assert again.receive(0.1) is None
    again.close()
    brokers.close()


@pytest.mark.parametrize(
    "claimed",
    [[2**31 - 1] * 3, [2**31 - 1, -(2**31)], [-(2**31)] * 3, [-1] * 40, [0] * 40, [1_000_000_000] * 5],
    ids=str,
)
def test_what_entries_claim_about_their_messages_stops_no_topic(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, claimed: list[int]
) -> None:
    """The broker takes a permit for each message that a producer says there is, and counts in 32 bits."""
    brokers = Brokers(broker.settings)
    consumer = opened(brokers, topic)
    raw = RawProducer(broker.settings.service_url, topic)
    for sequence_id, n in enumerate(claimed, 1):
        raw.send(entry(metadata(sequence_id, 1, n_messages=n), b"x"), sequence_id)
    raw.flush()
    raw.close()
    producer = pulsar_client.create_producer(topic, batching_enabled=False, block_if_queue_full=True)
    for i in range(3_000):
        producer.send_async(b"%d" % i, None)
    producer.flush()
    found: list[bytes | None] = []
    while len(found) < 3_000:
        try:
            received = consumer.receive(10)
        except DisconnectedError:
            consumer, found = opened(brokers, topic), []
            continue
        assert received is not None, f"{len(found)} have come"
        if isinstance(received.envelope, Envelope) and not received.envelope.metadata.HasField("n_messages"):
            found += payloads(received)
    assert found == [b"%d" % i for i in range(3_000)]
    consumer.close()
    brokers.close()


def test_a_backlog_of_large_messages_comes_in_pieces_of_the_budget(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str
) -> None:
    brokers = Brokers(broker.settings)
    opened(brokers, topic).close()
    producer = pulsar_client.create_producer(topic, batching_enabled=False)
    for i in range(60):
        producer.send(bytes([i]) * 500_000)
    consumer = brokers.subscribe(topic, "s", max_bytes=2 << 20, max_messages=1_000)
    most = 0
    for i in range(60):
        body = payloads(consumer.receive(20))
        assert body == [bytes([i]) * 500_000]
        most = max(most, consumer._flow.waiting_bytes)
    assert 500_000 < most < 10 << 20, "before the first message its size is not known"
    consumer.close()
    brokers.close()
