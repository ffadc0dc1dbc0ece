"""What the client and the admin client say of a real broker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest

from broker.client import PulsarError, connect, token_reader
from broker.pulsar_admin.admin_rest import AdminClient, UnreadableEntryError
from broker.standalone import EmbeddedBroker
from conf.settings import PulsarSettings


@pytest.fixture
def admin(broker: EmbeddedBroker) -> Iterator[AdminClient]:
    with AdminClient(broker.settings) as admin:
        yield admin


def send_batch(client: pulsar.Client, topic: str, count: int) -> list[tuple[int, int, int]]:
    """The ids (ledger, entry, batch index) of `count` messages sent as one batch."""
    ids = []
    answered = threading.Semaphore(0)

    def record(_result: Any, message_id: Any) -> None:
        ids.append((message_id.ledger_id(), message_id.entry_id(), message_id.batch_index()))
        answered.release()

    producer = client.create_producer(topic, batching_enabled=True, batching_max_publish_delay_ms=60_000)
    for number in range(count):
        producer.send_async(b"%d" % number, record)
    producer.flush()
    for _ in range(count):
        assert answered.acquire(timeout=60)
    producer.close()
    return ids


def test_the_broker_is_healthy_and_drops_repeated_sends(admin: AdminClient) -> None:
    assert admin.health()
    assert "public/default" in admin.namespaces("public")
    assert admin.deduplication_enabled("public/default")
    assert admin.broker_configuration()["brokerDeduplicationEnabled"] == "true"


def test_a_topic_tells_its_partitions(admin: AdminClient, pulsar_client: pulsar.Client, topic: str) -> None:
    assert admin.partitions(topic) is None
    pulsar_client.create_producer(topic).close()
    assert admin.partitions(topic) == 0
    admin.create_partitioned_topic(f"{topic}-p", 3)
    assert admin.partitions(f"{topic}-p") == 3
    with pytest.raises(PulsarError, match="409"):
        admin.create_partitioned_topic(f"{topic}-p", 3)


def test_the_index_of_an_entry_counts_the_messages_before_it(
    admin: AdminClient, pulsar_client: pulsar.Client, topic: str
) -> None:
    producer = pulsar_client.create_producer(topic)
    ids = [producer.send(b"x") for _ in range(3)]
    assert [admin.message_index(topic, id.ledger_id(), id.entry_id()) for id in ids] == [0, 1, 2]


def test_the_index_of_a_batch_is_its_last_messages(
    admin: AdminClient, pulsar_client: pulsar.Client, topic: str
) -> None:
    first, second = send_batch(pulsar_client, topic, 5), send_batch(pulsar_client, topic, 3)
    assert [batch_index for _, _, batch_index in first] == [0, 1, 2, 3, 4]
    assert {entry for _, entry, _ in first} == {0}
    assert admin.message_index(topic, *first[0][:2]) == 4
    assert admin.message_index(topic, *second[0][:2]) == 7


def test_an_entry_that_is_not_there_is_refused(admin: AdminClient, pulsar_client: pulsar.Client, topic: str) -> None:
    pulsar_client.create_producer(topic).send(b"x")
    with pytest.raises(PulsarError, match="404"):
        admin.message_index(topic, 999_999, 0)


def test_what_the_broker_tells_nothing_of_is_not_taken_for_gone(
    admin: AdminClient, pulsar_client: pulsar.Client, topic: str
) -> None:
    producer = pulsar_client.create_producer(topic, batching_enabled=False)
    last = producer.send(b"x", properties={"large": "x" * 20_000})
    ledger_id, entry_id = last.ledger_id(), last.entry_id()
    for ask in (admin.entry, admin.entry_metadata):
        with pytest.raises(UnreadableEntryError):
            ask(topic, ledger_id, entry_id)
        assert ask(topic, ledger_id, entry_id + 1) is None


def test_a_broker_that_is_not_there_is_said_in_one_line() -> None:
    with AdminClient(PulsarSettings(admin_url="http://127.0.0.1:1")) as admin:
        assert not admin.health()
        with pytest.raises(PulsarError, match=r"^no answer from http://127.0.0.1:1 .*pulsar\.admin_url$"):
            admin.namespaces("public")


def test_a_topic_must_be_a_full_name(admin: AdminClient) -> None:
    for name in ("orders", "non-persistent://public/default/orders", "persistent://public/orders"):
        with pytest.raises(PulsarError, match="full name"):
            admin.partitions(name)


def test_a_token_is_read_anew_each_time(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    token = token_reader(file)
    file.write_text("second\n")
    assert token() == "second"
    file.unlink()
    assert token() == "second", "while the file is being replaced, the last one counts"


def test_a_token_or_certificates_that_are_not_there_are_said(tmp_path: Path) -> None:
    with pytest.raises(PulsarError, match=r"pulsar\.token_file"):
        connect(PulsarSettings(token_file=tmp_path / "nope"))
    with pytest.raises(PulsarError, match=r"pulsar\.trust_certs_file"):
        connect(PulsarSettings(trust_certs_file=tmp_path / "nope"))
    with pytest.raises(PulsarError, match=r"pulsar\.trust_certs_file"):
        AdminClient(PulsarSettings(trust_certs_file=tmp_path / "nope"))
