"""Reading topics to which anybody has published, at a real broker."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import httpx
import pulsar
import pytest

from broker.position import START, Position
from broker.protocol.brokers import Brokers
from broker.protocol.reading import before_time, read_entries, read_messages
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from checkpoint_from_tables.rebuild.destinations import first_not_durable
from tests.attack.entries import Sender
from tests.support.clients.raw_producer import RawProducer, entry, metadata
from tests.support.service.harness import PATIENCE


@pytest.fixture
def brokers(broker: EmbeddedBroker) -> Iterator[Brokers]:
    brokers = Brokers(broker.settings)
    yield brokers
    brokers.close()


def now() -> int:
    return time.time_ns() // 1_000_000


def test_chunks_that_lie_of_their_size_are_read_as_anything_else(
    broker: EmbeddedBroker, brokers: Brokers, pulsar_client: pulsar.Client, topic: str
) -> None:
    """Pulsar's C++ client writes beyond its memory: it makes room for as many bytes as the first chunk says."""
    honest = pulsar_client.create_producer(topic, batching_enabled=False)
    honest.send(b"first", properties={"n": "1"})
    raw = RawProducer(broker.settings.service_url, topic)
    for number in range(20):
        for which in range(2):
            lies = {"uuid": b"%d" % number, "n_chunks": 2, "chunk_id": which, "chunked_size": 1}
            sequence_id = 2 * number + which + 1
            raw.send(entry(metadata(sequence_id, now(), **lies), bytes(1 << 20)), sequence_id)
    raw.flush()
    raw.close()
    honest.send(b"last", properties={"n": "2"})
    # The last chunk stands for its message: what is missing shows no other.
    assert [one.properties for one in read_messages(brokers, topic)] == [{"n": "1"}, *[{}] * 20, {"n": "2"}]
    found = list(read_entries(brokers, topic))
    assert len(found) == 42
    published = first_not_durable(brokers, topic, {topic: found[0].position})
    assert published is not None
    assert abs(published - now()) < 60_000
    assert first_not_durable(brokers, topic, {topic: found[-1].position}) is None


def test_batches_that_lie_are_read_as_anything_else(
    broker: EmbeddedBroker, brokers: Brokers, pulsar_client: pulsar.Client, topic: str
) -> None:
    """Pulsar's C++ client ends its process (SIGSEGV) at a batch that has fewer messages than it says."""
    honest = pulsar_client.create_producer(topic, batching_enabled=False)
    honest.send(b"first", properties={"n": "1"})
    raw, sender = RawProducer(broker.settings.service_url, topic), Sender(random.Random(1))
    for sequence_id, make in enumerate(sender.kinds * 10, 1):
        data, n_messages = make()
        raw.send(data, sequence_id, n_messages)
    raw.flush()
    raw.close()
    honest.send(b"last", properties={"n": "2"})
    found = [one.properties["n"] for one in read_messages(brokers, topic) if "n" in one.properties]
    assert found == ["1", "2"]


def test_a_publish_time_that_lies_hides_no_other_message(broker: EmbeddedBroker, brokers: Brokers, topic: str) -> None:
    """A rebuild reads destinations from the least publish time on of what comes again."""
    raw = RawProducer(broker.settings.service_url, topic)
    for sequence_id, at in enumerate((2**64 - 1, 5_000, 4_000, 6_000), 1):
        raw.send(entry(metadata(sequence_id, at), b"x"), sequence_id)
    raw.flush()
    raw.close()
    ids = [one.position for one in read_entries(brokers, topic)]
    firsts = [first_not_durable(brokers, topic, {topic: after}) for after in (START, ids[2], ids[3])]
    assert firsts == [4_000, 6_000, None]


def test_a_topic_that_is_unloaded_is_read_on(
    broker: EmbeddedBroker, brokers: Brokers, pulsar_client: pulsar.Client, topic: str
) -> None:
    producer = pulsar_client.create_producer(topic, batching_enabled=False)
    for n in range(100):
        producer.send(b"x" * 300_000, properties={"n": f"{n}"})
    found = []
    for one in read_messages(brokers, topic):
        found.append(int(one.properties["n"]))
        if len(found) == 5:
            url = f"{broker.settings.admin_url}/admin/v2/{topic.replace('://', '/')}/unload"
            httpx.put(url, timeout=60).raise_for_status()
    assert found == list(range(100))


def test_a_topic_is_read_from_a_time_or_an_entry_on_and_no_subscription_stays(
    broker: EmbeddedBroker, brokers: Brokers, pulsar_client: pulsar.Client, topic: str
) -> None:
    producer = pulsar_client.create_producer(topic)
    for n in range(10):
        producer.send(b"x", properties={"n": f"{n}"})
        if n == 4:
            time.sleep(0.05)
            since = now()
            time.sleep(0.05)
    found = list(read_messages(brokers, topic))
    assert [one.properties["n"] for one in found] == [f"{n}" for n in range(10)]
    assert {one.producer for one in found} == {producer.producer_name()}
    after = found[6].position
    assert [one.properties["n"] for one in read_messages(brokers, topic, after)] == ["7", "8", "9"]
    with AdminClient(broker.settings) as admin:
        after = before_time(admin, topic, since)
        assert found[3].position < after < found[5].position
        assert before_time(admin, topic, now() + 60_000) < found[9].position.next
        assert before_time(admin, f"{topic}-none", since) == START
        stats = admin.internal_stats(topic)
        assert stats is not None
        assert stats.acknowledged.keys() <= {"pulsar.dedup"}, "the subscription has ended with its reader"


def test_an_empty_topic_and_one_whose_entries_are_gone_have_none(
    broker: EmbeddedBroker, brokers: Brokers, pulsar_client: pulsar.Client, topic: str
) -> None:
    begun = time.monotonic()
    assert list(read_entries(brokers, topic)) == []
    producer = pulsar_client.create_producer(topic)
    producer.send(b"x")
    with AdminClient(broker.settings) as admin:
        # An unload closes the ledger, and then nobody needs it any more.
        admin._admin.change("PUT", f"persistent/{topic.partition('://')[2]}/unload", None)
        producer.send(b"y")
        [last] = [one.position for one in read_entries(brokers, topic)][-1:]
        admin._admin.change("PUT", f"persistent/{topic.partition('://')[2]}/unload", None)
    assert list(read_entries(brokers, topic, last)) == []
    assert list(read_entries(brokers, topic, Position(1 << 40, 0))) == []
    assert time.monotonic() - begun < 30 * PATIENCE


def test_all_that_attackers_send_is_read(broker: EmbeddedBroker, brokers: Brokers, topic: str) -> None:
    """An entry may say that it has any number of messages, by which the broker counts what it may still send."""
    raw = RawProducer(broker.settings.service_url, topic)
    hostile = Sender(random.Random(7))
    n = 3_000
    for data, sequence_id, n_messages in itertools.islice(hostile.entries(), n):
        raw.send(data, sequence_id, n_messages)
    raw.flush()
    taken = n - raw.refused
    raw.close()
    assert taken > n // 2
    begun = time.monotonic()
    found = [one.position for one in read_entries(brokers, topic)]
    assert len(found) == len(set(found)) >= taken - n // 10, "but for markers, which the broker does not send"
    assert found == sorted(found)
    assert time.monotonic() - begun < 20 * PATIENCE
