"""The simulator's replicator does as Pulsar's: the same entries, in two clusters, by a seed, in memory and really."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from typing import Any, NamedTuple

import pytest

from broker.position import Position
from broker.protocol.brokers import Brokers
from broker.protocol.building import OutgoingMessage, batch_entry, encoded_property, single_entry
from broker.protocol.entries import SOURCE_POSITION, open_envelope
from broker.protocol.reading import read_entries
from broker.protocol.wire.pulsar_pb2 import MessageMetadata
from broker.standalone import EmbeddedBroker
from tests.simulation.broker import Cluster
from tests.simulation.faults import Faults
from tests.simulation.replicating import Replicator
from tests.simulation.scheduler import Scheduler
from tests.support.clients.raw_producer import RawProducer
from tests.support.clients.raw_producer import entry as raw_entry
from tests.support.servers.replicating_brokers import NAMES, NAMESPACE, replicating_brokers
from tests.support.service.harness import http, wait_until


class _Sent(NamedTuple):
    """An entry, and the cluster in which it is published."""

    where: str
    data: bytes
    sequence_id: int
    n: int
    is_chunk: bool


def _script(chance: random.Random) -> Iterator[_Sent]:
    """Single messages, batches and chunks, in both clusters."""
    for number in range(1, 40):
        where, sequence_id, published = chance.choice(NAMES), 3 * number, 1_800_000_000_000 + number
        name = f"user of {where}".encode()
        kind = chance.choice(["single", "single", "batch", "chunk"])
        built = [
            OutgoingMessage(sequence_id + i, b"%d" % i, [encoded_property("deliverAt", f"{number}")], b"k")
            for i in range(3)
        ]
        if kind == "chunk":
            metadata = MessageMetadata(producer_name=name, sequence_id=sequence_id, publish_time=published)
            metadata.uuid, metadata.n_chunks, metadata.chunked_size = b"%d" % number, 2, 8
            for part in range(2):
                metadata.chunk_id = part
                yield _Sent(where, raw_entry(metadata, b"half"), sequence_id, 1, is_chunk=True)
        elif kind == "batch":
            yield _Sent(where, batch_entry(built, name, published).data, sequence_id, 3, is_chunk=False)
        else:
            yield _Sent(where, single_entry(built[0], name, published).data, sequence_id, 1, is_chunk=False)


def _told(topics: Mapping[str, Iterable[tuple[Position, MessageMetadata, bytes]]]) -> dict[str, Any]:
    """What each cluster's topic has, by where it was published: there the order is given, and not between them."""
    found = {name: [*entries] for name, entries in topics.items()}
    told: dict[str, Any] = {name: {origin: [] for origin in NAMES} for name in NAMES}
    for name, entries in found.items():
        for _, metadata, payload in entries:
            origin, rest = metadata.replicated_from.decode() or name, MessageMetadata()
            rest.CopyFrom(metadata)
            del rest.properties[:]
            properties = {one.key.decode(): one.value.decode() for one in metadata.properties}
            at = properties.pop(SOURCE_POSITION, None)
            positions = [str(position) for position, of, _ in found[origin] if not of.replicated_from]
            number = None if at is None else positions.index(at)
            if number is not None and any(number == before for before, *_ in told[name][origin]):
                continue  # after an unload a real replicator brings entries again, sooner or later than in memory
            told[name][origin].append([number, properties, rest.SerializeToString(deterministic=True), payload])
    return told


def _on_pulsar(brokers: Mapping[str, EmbeddedBroker], topic: str, seed: int) -> dict[str, Any]:
    chance = random.Random(f"unloads {seed}")
    producers = {name: RawProducer(one.settings.service_url, topic, f"raw {name}") for name, one in brokers.items()}
    n = 0
    for sent in _script(random.Random(seed)):
        n += 1
        producers[sent.where].send(sent.data, sent.sequence_id, sent.n, is_chunk=sent.is_chunk)
        producers[sent.where].flush()
        if chance.random() < 0.1:
            where = chance.choice(NAMES)
            url = f"{brokers[where].settings.admin_url}/admin/v2/{topic.replace('://', '/')}/unload"
            http.put(url).raise_for_status()
            for name, one in brokers.items():
                with suppress(OSError):
                    producers[name].close()
                producers[name] = _opened(one.settings.service_url, topic, f"raw {name}")
    for producer in producers.values():
        producer.close()

    def read(name: str) -> list[tuple[Position, MessageMetadata, bytes]]:
        with closing(Brokers(brokers[name].settings)) as connections:
            entries = [*read_entries(connections, topic)]
        return [(one.position, one.envelope.metadata, one.envelope.payload) for one in entries]  # type: ignore[union-attr]

    wait_until(lambda: all(len(read(name)) >= n for name in NAMES), 90, "all is replicated")
    return _told({name: read(name) for name in NAMES})


def _opened(url: str, topic: str, name: str) -> RawProducer:
    found: list[RawProducer] = []

    def is_open() -> bool:
        with suppress(OSError):
            found.append(RawProducer(url, topic, name))
        return bool(found)

    wait_until(is_open, 30, "the topic is loaded")
    return found[0]


def _in_memory(seed: int) -> dict[str, Any]:
    scheduler = Scheduler(seed)
    faults = Faults(seed, {"replicator connects again": 0.3, "replication stands still": 0.1})
    clusters = {name: Cluster(scheduler, faults, name) for name in NAMES}
    east, west = clusters.values()
    replicators = [
        Replicator(one, other, "topic", True, lambda there, here: None) for one, other in ((east, west), (west, east))
    ]
    for number, sent in enumerate(_script(random.Random(seed))):

        def publish(sent: _Sent = sent) -> None:
            clusters[sent.where].publish("topic", sent.data, sent.n)

        scheduler.after(0.1 * number, publish)
    scheduler.run(lambda: scheduler.now > 60.0 and all(one.is_done for one in replicators))
    assert any(kind == "replicator connects again" for kind, _ in faults.fallen)

    def read(name: str) -> list[tuple[Position, MessageMetadata, bytes]]:
        entries = [(one.position, open_envelope(one.data)) for one in clusters[name].topic("topic").entries]
        return [(position, envelope.metadata, envelope.payload) for position, envelope in entries]

    return _told({name: read(name) for name in NAMES})


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EmbeddedBroker]]:
    with replicating_brokers(tmp_path_factory.mktemp("places")) as brokers:
        yield dict(zip(NAMES, brokers, strict=True))


@pytest.mark.parametrize("seed", range(2))
def test_entries_are_replicated_in_memory_as_by_pulsar(places: dict[str, EmbeddedBroker], seed: int) -> None:
    real = _on_pulsar(places, f"persistent://{NAMESPACE}/script_{seed}", seed)
    assert _in_memory(seed) == real
    replicated = real["east"]["west"]
    assert len(replicated) > 10
    assert [number for number, *_ in replicated] == sorted({number for number, *_ in replicated}), "in order, once each"
