"""What a destination says of how far the job has sent is believed unless the messages there are somebody else's."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.client import PulsarError
from broker.position import Position
from broker.protocol.building import Chunks, OutgoingMessage, encoded_property, large_message, single_entry
from broker.protocol.consumer import ReceivedEntry
from broker.protocol.entries import open_envelope
from broker.pulsar_admin.answers import TopicLedgers
from conf.settings import Settings
from streaming.checkpoint.offset import Offset
from streaming.release import last_sent
from streaming.release.last_sent import ProducerLookup
from streaming.release.sequence_ids import sequence_id_of
from tests.support.servers.fake_destinations import FakeBrokers, FakeProducer, FakeReading
from warehouse.routes.known_routes import known_routes

SOURCE, DESTINATION, OWN = "persistent://p/d/orders", "persistent://p/d/orders-a", "app-a-planned0"
NEWEST, MOST = 6, 1_000
PROPERTIES = {"delaylake.source": SOURCE, "delaylake.messageId": "7:1:-1:-1", "delaylake.deliverAt": "1"}


@dataclass
class Destination:
    """The broker's side of a topic, for client and admin API."""

    messages: list[tuple[str, int, bytes]] = field(default_factory=list)  # producer, sequence id, entry
    trimmed: int = 0  # so many of the first ones are gone
    is_silent: bool = False
    read_entries: int = 0
    brokers: FakeBrokers = field(default_factory=FakeBrokers)

    def send(
        self,
        tick: int,
        producer: str = OWN,
        properties: dict[str, str] | None = None,
        place: int = 0,
        payload: bytes = b"",
        key: str = "",
    ) -> None:
        encoded = [encoded_property(*one) for one in (PROPERTIES if properties is None else properties).items()]
        sequence_id = sequence_id_of(tick, place)
        entry = single_entry(OutgoingMessage(sequence_id, payload, encoded, key.encode()), producer.encode(), 1)
        self.messages.append((producer, sequence_id, entry.data))

    def produce(self, topic: str, name: str) -> Any:
        return FakeProducer(self.brokers, topic, name.encode(), max(self._ids(name), default=-1))

    def _ids(self, name: str) -> list[int]:
        return [sequence_id for producer, sequence_id, _ in self.messages if producer == name]

    def read(self, topic: str, start: Position, **_: Any) -> FakeReading:
        if self.is_silent:
            raise PulsarError("no answer")
        after = start.entry_id if start.ledger_id == 5 else -1
        left = deque(
            ReceivedEntry(Position(5, entry), open_envelope(data), (), 1, len(data))
            for entry, (*_, data) in enumerate(self.messages)
            if entry >= self.trimmed and entry > after
        )
        self.read_entries = len(left)
        return FakeReading(left)

    def close(self) -> None:
        pass

    def internal_stats(self, topic: str) -> TopicLedgers | None:
        return TopicLedgers({5: len(self.messages)}, {}, {}, (5, len(self.messages) - 1))


def last_tick(destination: Any) -> int:
    names = ProducerLookup(DESTINATION, ((OWN, SOURCE),), {}, NEWEST, MOST, time.monotonic() + 60)
    return names.last_tick(destination, destination)


def test_what_the_job_has_sent_of_a_later_tick_counts() -> None:
    destination = Destination()
    for tick in (5, 6, 7):
        destination.send(tick)
    assert last_tick(destination) == 7


def test_what_the_job_has_sent_of_a_later_tick_counts_though_some_chunks_alone_came() -> None:
    destination = Destination()
    destination.send(6)
    sequence_id, encoded = sequence_id_of(8, 0), [encoded_property(*one) for one in PROPERTIES.items()]
    message = large_message(OutgoingMessage(sequence_id, bytes(10_000), encoded), OWN.encode(), 1)
    destination.messages.append((OWN, sequence_id, Chunks(message, OWN.encode(), 4_000).next_entry().data))
    assert last_tick(destination) == 8


@pytest.mark.parametrize(
    "properties",
    [{}, PROPERTIES | {"delaylake.source": "other"}, PROPERTIES | {"delaylake.messageId": "x"}],
    ids=["none", "source", "position"],
)
def test_what_somebody_else_has_published_under_the_name_does_not(properties: dict[str, str]) -> None:
    destination = Destination()
    destination.send(6)
    destination.send(9, properties=properties)
    destination.send(99, "another", {})
    assert last_tick(destination) == -1, "of the next name, of which there is nothing"
    destination.send(6, f"{OWN}-1")
    assert last_tick(destination) == 6
    # Nor does it hide what the job has sent of a later tick.
    destination.send(7, f"{OWN}-1")
    destination.send(8, f"{OWN}-1", properties)
    assert last_tick(destination) == 8


def test_without_the_message_it_is_believed() -> None:
    destination = Destination()
    destination.send(6)
    destination.send(9, properties={})
    destination.trimmed = 2
    assert last_tick(destination) == 9
    destination.trimmed, destination.is_silent = 0, True
    assert last_tick(destination) == 9


def test_of_a_long_topic_the_end_is_looked_at() -> None:
    destination = Destination()
    for i in range(3_000):
        destination.send(5, place=i)
    destination.send(9, properties={})
    assert last_tick(destination) == -1
    assert destination.read_entries <= 1_001


@pytest.mark.parametrize("partitions", [0, 2])
def test_topics_of_dead_letters_are_asked_too(monkeypatch: pytest.MonkeyPatch, partitions: int) -> None:
    settings = Settings.model_validate({"routes": [{"source": SOURCE, "subscriptions": [{"name": "a"}]}]})
    offset = Offset(tick=NEWEST, routes=known_routes(settings).to_json())
    asked = last_sent._producers(settings, "app", offset)
    assert asked.keys() == {f"{SOURCE}-rejects", DESTINATION, f"{DESTINATION}-dlq"}
    assert asked[f"{DESTINATION}-dlq"] == asked[DESTINATION]

    dead = f"{DESTINATION}-dlq"
    there = {f"{dead}-partition-{i}" for i in range(partitions)} or {dead}

    class Admin:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Admin:
            return self

        def __exit__(self, *_: object) -> None: ...

        def internal_stats(self, topic: str) -> TopicLedgers | None:
            return TopicLedgers({}, {}, {}, (-1, -1)) if topic in there else None

        def partitions(self, topic: str) -> int | None:
            return {dead: partitions}.get(topic)

    destination: Any = Destination()
    destination.send(NEWEST - 1)
    monkeypatch.setattr(last_sent, "AdminClient", Admin)
    names = ProducerLookup(dead, ((OWN, SOURCE),), {}, NEWEST, MOST, time.monotonic() + 60)
    assert last_sent._ask(settings, destination, names) == NEWEST - 1
    nowhere = ProducerLookup(f"{DESTINATION}-none", ((OWN, SOURCE),), {}, NEWEST, MOST, time.monotonic() + 60)
    assert last_sent._ask(settings, destination, nowhere) == -1


def test_connections_are_closed_when_no_look_up_uses_them_any_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers, closed = threading.Event(), threading.Event()
    used_when_closed: list[bool] = []

    class Connections:
        def close(self) -> None:
            used_when_closed.append(not answers.is_set())
            closed.set()

    def ask(*_: Any) -> int:
        answers.wait(30)
        return -1

    monkeypatch.setattr(last_sent, "Brokers", lambda *_, **__: Connections())
    monkeypatch.setattr(last_sent, "_ask", ask)
    monkeypatch.setattr(last_sent, "_producers", lambda *_: {DESTINATION: [(OWN, SOURCE)]})
    monkeypatch.setattr(last_sent, "read_generations", lambda _: {})
    checkpoint: Any = SimpleNamespace(folder=tmp_path, app_id="app")
    assert last_sent.last_sent(Settings(), checkpoint, Offset(), seconds=0.01) == {}
    assert not closed.wait(0.1)
    answers.set()
    assert closed.wait(30)
    assert used_when_closed == [False]
