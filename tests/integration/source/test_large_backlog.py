"""A backlog of large messages in many partitions, at a real broker: how much all receivers together hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pulsar
import pytest

from broker.position import START, Position
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from conf.settings import Settings
from status.alerts import Alerts
from streaming.checkpoint.offset import Offset
from streaming.source.receivers import Receivers
from streaming.source.receiving.receiver import Receiver
from streaming.source.watch import source_watch
from tests.support.service.harness import wait_until
from warehouse.delta.tables import Tables

pytestmark = pytest.mark.long

PARTITIONS = 60
MIB = 1 << 20
BYTES = 5_000_000
BATCH_BYTES = 6 * MIB  # three quarters of three of them have room for two entries
BUDGET = 5 * BATCH_BYTES  # three batches for all, and two as what each has of its own


class Backlog:
    """The receivers of a job with a small budget, of a topic with a large and a small message in each partition."""

    def __init__(self, broker: EmbeddedBroker, client: pulsar.Client, topic: str, folder: Path) -> None:
        self.topic, self.control = topic, f"{topic}_control"
        self.admin_url = broker.settings.admin_url
        with AdminClient(broker.settings) as admin:
            admin.create_partitioned_topic(topic, PARTITIONS)
        self.names = [f"{topic}-partition-{i}" for i in range(PARTITIONS)]
        settings = Settings(
            pulsar=broker.settings,
            warehouse=str(folder / "warehouse"),
            checkpoint=f"file:{folder}/checkpoint",
            control={"topic": self.control},  # type: ignore[arg-type]
            routes=[{"source": topic, "subscriptions": [{"name": "a"}]}],  # type: ignore[arg-type]
            ingest={"max_bytes_per_batch": BATCH_BYTES},  # type: ignore[arg-type]
        )
        for i, name in enumerate(self.names):
            client.subscribe(name, settings.pulsar.subscription).close()
            producer = client.create_producer(name, batching_enabled=False)
            producer.send(bytes([i]) * BYTES)
            producer.send(bytes([i]))
            producer.close()
        self.commands = client.create_producer(self.control)
        self.commands.send(b"first")
        tables = Tables(settings.warehouse)
        tables.create()
        self.alerts = Alerts()
        self.receivers = Receivers(settings, tables, self.alerts, lambda: None)
        self.came: dict[str, list[bytes]] = {name: [] for name in self.names}
        self._positions = dict.fromkeys([*self.names, self.control], START)
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking)

    def begin(self) -> None:
        self.receivers.begin(Offset())
        self._thread.start()
        wait_until(lambda: len(self.receivers.open) == PARTITIONS + 1, 60, "all partitions are found")

    def unload(self) -> None:
        url = f"{self.admin_url}/admin/v2/{self.topic.replace('://', '/')}/unload"
        httpx.put(url, timeout=60).raise_for_status()

    def _keep_looking(self) -> None:
        while not self._ended.wait(0.001):
            self.most = max(
                self.most, sum(_held(r) for r in list(self.receivers.open.values()) if r is not self.at_control)
            )

    @property
    def at_control(self) -> Receiver:
        return self.receivers.open[self.control]

    def take(self, receiver: Receiver) -> list[bytes]:
        """Does what a batch of one topic partition does, from its end to its commit."""
        name = receiver.source.name
        end, n, _ = receiver.take_into_batch(10_000, 64 * MIB)
        if not n:
            return []
        rows = receiver.rows(self._positions[name], end)
        self.receivers.forget({name: str(end)})
        receiver.acknowledge(end)
        self._positions[name] = end
        return [payload[:10] + payload[BYTES - 1 :] for payload in rows["payload"].to_pylist()]

    def command_comes(self, text: bytes) -> None:
        self.commands.send(text)
        wait_until(lambda: self.take(self.at_control) == [text], 5, "the command")

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self.receivers.stop()


def _held(receiver: Receiver) -> int:
    """The bytes that have come to a receiver and are in no committed batch, not as the budget counts."""
    consumer, chunks = receiver._consumer, receiver._received
    waiting = 0 if consumer is None else consumer._flow.waiting_bytes
    share = receiver._limits.share
    return waiting + chunks.kept_bytes + (0 if share is None else share.handed)


@pytest.fixture
def backlog(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Backlog]:
    monkeypatch.setattr(source_watch, "_LOOK_SECONDS", 2)
    monkeypatch.setattr(source_watch, "_LOOKS_A_SECOND", 200)
    backlog = Backlog(broker, pulsar_client, topic, tmp_path)
    yield backlog
    backlog.end()


def test_all_partitions_stay_within_the_budget_each_has_its_turn_and_commands_come_meanwhile(
    backlog: Backlog, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off: list[str] = []
    monkeypatch.setattr(Receiver, "connect_again", lambda receiver: cut_off.append(receiver.source.name))
    backlog.begin()
    sources = [backlog.receivers.open[name] for name in backlog.names]
    wait_until(lambda: backlog.take(backlog.at_control) == [b"first"], 30, "the command")
    wait_until(lambda: sum(r.waiting for r in sources) >= 2, 30, "what the budget allows has come")
    wait_until(lambda: sum(r.waits_for_turn for r in sources) > PARTITIONS // 2, 30, "the others wait")
    time.sleep(6)  # while nobody takes anything: the watch looks several times, and nothing more may come
    assert sum(r.waiting for r in sources) < 8
    backlog.command_comes(b"second")

    def take_all() -> bool:
        for receiver in sources:
            backlog.came[receiver.source.name] += backlog.take(receiver)
        return all(len(came) == 2 for came in backlog.came.values())

    wait_until(lambda: take_all() or sum(map(len, backlog.came.values())) > PARTITIONS // 2, 60, "some have come")
    backlog.unload()
    wait_until(take_all, 120, "all messages")
    backlog.command_comes(b"third")
    for i, name in enumerate(backlog.names):
        assert backlog.came[name] == [bytes([i]) * 11, bytes([i])]
    assert 8 * MIB < backlog.most <= BUDGET
    assert cut_off == []
    assert [alert.text for alert in backlog.alerts.current()] == []


def test_who_waits_for_an_entry_gets_it_while_others_have_all_that_there_is(backlog: Backlog) -> None:
    """As a batch does that is run again, whose entries have to come before any can be committed."""
    backlog.begin()
    sources = [backlog.receivers.open[name] for name in backlog.names]
    wait_until(lambda: sum(r.waits_for_turn for r in sources) > PARTITIONS // 2, 30, "others wait")
    last = next(receiver for receiver in reversed(sources) if receiver.waits_for_turn)
    end = last.topic_end()
    rows = last.rows(START, Position(end.ledger_id, end.entry_id), 20)
    assert [len(payload) for payload in rows["payload"].to_pylist()] == [BYTES, 1]
