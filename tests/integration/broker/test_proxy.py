"""Through Pulsar's own proxy, which knows the broker of each topic, with TLS and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pulsar
import pytest

from broker.client import connect
from broker.protocol.brokers import Brokers
from broker.protocol.building import OutgoingMessage, batch_entry
from broker.protocol.session import DisconnectedError
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings
from tests.integration.broker.test_protocol import opened, payloads
from tests.support.clients.tokens import certificate
from tests.support.servers.pulsar_proxy import proxy
from tests.support.service import main_path
from tests.support.service.harness import now, wait_until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def proxied(
    tmp_path_factory: pytest.TempPathFactory, broker: EmbeddedBroker
) -> Iterator[tuple[PulsarSettings, PulsarSettings]]:
    folder = tmp_path_factory.mktemp("proxy")
    with proxy(folder, broker.settings, certificate(folder)) as settings:
        yield settings


def unload(broker: EmbeddedBroker, topic: str) -> None:
    url = f"{broker.settings.admin_url}/admin/v2/{topic.replace('://', '/')}/unload"
    httpx.put(url, timeout=60).raise_for_status()


@pytest.mark.parametrize("with_tls", [True, False], ids=["TLS", "plain"])
def test_what_is_sent_and_received_goes_through_the_proxy(
    proxied: tuple[PulsarSettings, PulsarSettings],
    broker: EmbeddedBroker,
    pulsar_client: pulsar.Client,
    topic: str,
    with_tls: bool,
) -> None:
    settings = proxied[0 if with_tls else 1]
    brokers = Brokers(settings)
    consumer = opened(brokers, topic)
    address = consumer._connection.address
    assert f"{address}" in settings.service_url
    assert str(address.proxied_broker) in broker.settings.service_url
    own = brokers.produce(topic, "own")
    own.send(batch_entry([OutgoingMessage(i, b"%d" % i) for i in (1, 2)], own.name, now()))
    wait_until(lambda: not own.n_pending, 20, "the receipt")
    pulsar_client.create_producer(topic).send(b"3")
    assert [payloads(consumer.receive(20)) for _ in range(2)] == [[b"1", b"2"], [b"3"]]
    assert consumer.last_entry().entry_id == 1
    unload(broker, topic)
    with pytest.raises(DisconnectedError):
        consumer.receive(20)
    again = opened(brokers, topic)
    assert payloads(again.receive(20)) == [b"1", b"2"]
    own.send(batch_entry([OutgoingMessage(4, b"4")], own.name, now()))
    wait_until(lambda: not own.n_pending, 20, "the receipt after the unload")
    assert [payloads(again.receive(20)) for _ in range(2)] == [[b"3"], [b"4"]]
    own.close()(5)
    brokers.close()


def test_a_job_behind_the_proxy_delivers_each_message_once(
    proxied: tuple[PulsarSettings, PulsarSettings],
    broker: EmbeddedBroker,
    topic: str,
    tmp_path: Path,
) -> None:
    client = connect(proxied[0])
    main_path.delivers_once(tmp_path, proxied[0], client, topic, lambda name: unload(broker, name))
    client.close()
