"""The simulator's stand-ins do as the real things do: the same scripts, by a seed, on both."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pulsar
import pytest

import warehouse.delta.commits
import warehouse.delta.tables
from broker.client import PulsarError, connect
from broker.position import START
from broker.protocol.brokers import Brokers
from broker.protocol.building import OutgoingEntry, OutgoingMessage, batch_entry, single_entry
from broker.protocol.wire.pulsar_pb2 import MessageMetadata
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from streaming.sinks.outcomes import _PRODUCER_OPTIONS
from tests.simulation import tables as fake_tables
from tests.simulation.broker import FORGETS_SECONDS, SNAPSHOT_ENTRIES, Admin, Client, SimulatedBrokers
from tests.simulation.faults import Faults
from tests.simulation.load import Producers
from tests.simulation.scheduler import Process
from tests.simulation.spark import ConcurrentUpdateError, Query, StateDamagedError
from tests.simulation.spark_script import KEYS, POINTS, Script, ScriptOperator, ScriptReader, sink_of
from tests.simulation.world import Plan, World, in_simulation
from tests.support.clients.raw_producer import entry as raw_entry
from tests.support.servers.running_broker import running_broker
from tests.support.service.harness import http, wait_until
from tests.support.tracker.messages import messages
from warehouse.delta.fencing import EPOCH, FencedError
from warehouse.delta.tables import Tables
from warehouse.queries.index_rows import large_due, large_rule, read_segment, rows_due, to_index
from warehouse.schemas import FENCED


def _table_script(tables: list[Tables], chance: random.Random) -> list[Any]:
    """What two writers are told who append, ask and take over."""
    told: list[Any] = []
    for step in range(40):
        one = chance.choice(tables)
        what = chance.choice(["append", "append", "append", "take over", "written", "rows", "check"])
        try:
            if what == "append":
                due = [(1, 10 * step + i, chance.randrange(20_000)) for i in range(chance.randrange(1, 4))]
                rows = to_index(messages(due, payload=b"x" * chance.choice([1, 100_000])), step)
                app = {} if chance.random() < 0.2 else {chance.choice("ab"): chance.randrange(12)}
                told.append(one.append("delayed_index", rows, app))
            elif what == "take over":
                one.take_over(one.newest_epoch() + 1)
            elif what == "written":
                told.append([one.written("delayed_index", app) for app in "ab"])
            elif what == "check":
                one.check_epoch()
            else:
                version = one.version("delayed_index")
                start, end = sorted(chance.sample(range(20_000), 2))
                rule = large_rule(one, 65_536, [], version, start, end)
                found = read_segment(one, version, start, end)
                entries = sorted(zip(found["entry_id"].to_pylist(), found["deliver_at"].to_pylist(), strict=True))
                told.append([version, rows_due(one, version, start, end), entries])
                told.append(large_due(one, version, rule, (start, -1, -1), end))
        except FencedError as error:
            told.append(str(error).partition("(")[2])
    return told


@pytest.mark.parametrize("seed", range(3))
def test_tables_in_memory_do_as_those_of_delta_rs(tmp_path: Path, seed: int) -> None:
    Tables(f"file:{tmp_path}").create()
    real = _table_script([Tables(f"file:{tmp_path}") for _ in range(2)], random.Random(seed))
    logs = {name: fake_tables.Log(name, schema) for name, schema in FENCED.items()}
    names: dict[Any, dict[str, Any]] = {
        warehouse.delta.tables: {
            "open_table": lambda _, name, version=None: fake_tables.Table(logs[name], lambda what: None, version),
            "write_deltalake": fake_tables.write_deltalake,
            "query_builder": fake_tables.query_builder,
            "run_sql": fake_tables.run_sql,
            "appended": lambda *_: None,
        },
        warehouse.delta.commits: {
            "CommitProperties": fake_tables.CommitProperties,
            "Transaction": fake_tables.Transaction,
            "_sync_version": lambda name, version: logs[name].force(version),
        },
    }
    with pytest.MonkeyPatch.context() as patched:
        for module, of_module in names.items():
            for name, stand_in in of_module.items():
                patched.setattr(module, name, stand_in)
        fake = _table_script([Tables("file:/nowhere") for _ in range(2)], random.Random(seed))
    assert fake == real
    assert logs["delayed_index"].forced_to == logs["delayed_index"].newest
    assert len([one for one in real if one is True]) > 3
    assert any(isinstance(one, str) for one in real) or seed


@pytest.mark.parametrize("seed", range(6))
def test_a_paused_job_has_lost_its_disk_or_its_lock_or_another_one_has_a_copy_before_that_starts(seed: int) -> None:
    world = World(Plan(seed, rates={}))
    with in_simulation(world):
        world.start()
        world.scheduler.run(lambda: world.scheduler.now > 2.0)
        [first, folder] = [world.job, world.checkpoint]
        assert first is not None
        offsets = folder / "query" / "offsets"
        assert list(offsets.iterdir())
        world.pause(first)
        if world.job is first:  # it has kept the lock
            world.scheduler.run(lambda: world.scheduler.now > 5.0)
            assert world.starts == 1
        else:
            world.scheduler.run(lambda: world.starts == 2)
            assert list((world.checkpoint / "query" / "offsets").iterdir())
            assert folder.is_file() or offsets.is_dir(), "the first one's writes fail, or change nobody else's files"
            assert world.checkpoint == folder or not world.may_refuse, "nor may a start refuse what it left"
        world.scheduler.kill(first)
    world.disk.remove()


def test_a_rebuild_finds_what_the_tables_in_memory_have_and_nobody_it_has_overtaken_commits_after_it() -> None:
    world = World(Plan(1, seconds=20.0, rates={}))
    with in_simulation(world):
        Producers(world.scheduler, world.cluster, world.oracle, world.settings, 12.0, 5.0, world.trace)
        world.start()
        world.scheduler.run(lambda: world.scheduler.now > 14.0)
        first = world.job
        assert first is not None
        world.lose_checkpoint()
        world.scheduler.run(lambda: world.oracle.accounts.n_rebuilds == 1)
        for name, log in world.logs.items():
            copied = [log.rows(version).num_rows for version, one in enumerate(log.commits) if one.replaces]
            assert not copied or copied[-1] == log.rows(log.newest).num_rows, name
        assert any(commit.replaces for log in world.logs.values() for commit in log.commits)
        [old, *_] = [log.transaction(EPOCH, 1) or 0 for log in world.logs.values()]
        late = Tables("file:/nowhere")
        late.join(old)
        with pytest.raises(FencedError):
            late.note("entries", {"late": 1})
        assert not world.broken
        if world.job is not None:
            world.scheduler.kill(world.job)
    world.disk.remove()


def test_no_query_writes_over_the_offset_of_another_one(tmp_path: Path) -> None:
    nothing: Any = None
    query = Query(tmp_path, nothing, nothing, [], nothing, lambda _: None, nothing)
    query._write("offsets", "0", b"one")
    with pytest.raises(ConcurrentUpdateError):
        query._write("offsets", "0", b"other")
    assert (tmp_path / "offsets" / "0").read_bytes() == b"one"


def _broker_script(brokers: list[Brokers], topic: str, chance: random.Random, wait: Any) -> list[Any]:
    """What producers and consumers are told, of two connections, who send, repeat, take over and acknowledge."""
    told: list[Any] = []
    producers: dict[str, Any] = {}
    sent = 0
    for _ in range(25):
        name = chance.choice(["p", "q"])
        if name not in producers:
            try:
                producers[name] = chance.choice(brokers).produce(topic, name)
                told.append([name, producers[name].last_sequence_id])
            except PulsarError as error:
                told.append(str(error).partition(":")[0])
                continue
        producer, what = producers[name], chance.choice(["send", "batch", "again", "close"])
        if what == "close":
            producers.pop(name).close()(5.0)
            continue
        first = max(1, sent - chance.randrange(6)) if what == "again" else sent + 1
        n = 3 if what == "batch" else 1
        sent = max(sent, first + n - 1)
        built = [OutgoingMessage(first + i, b"%d" % (first + i)) for i in range(n)]
        entry = batch_entry(built, name.encode(), 1_000) if n > 1 else single_entry(built[0], name.encode(), 1_000)
        producer.send(entry)
        producer.flush()
        wait(lambda one=producer: one.has_arrived)
        told.append([name, first, producer.repeated_to, producer.last_sequence_id])
    for producer in producers.values():
        producer.close()(5.0)
    return [*told, *_consumer_script(brokers, topic, chance)]


def _consumer_script(brokers: list[Brokers], topic: str, chance: random.Random) -> list[Any]:
    told: list[Any] = []
    for i in range(4):
        consumer = brokers[i % 2].subscribe(topic, "s", max_bytes=1 << 20, max_messages=1_000)
        try:
            with pytest.raises(PulsarError) as busy:
                brokers[1 - i % 2].subscribe(topic, "s", max_bytes=1 << 20, max_messages=1_000)
            told.append(str(busy.value).partition(":")[0])
            end = consumer.last_entry()
            came = []
            while (entry := consumer.receive(1.2)) is not None:
                came.append(entry.position)
            told.append([[position.entry_id for position in came], [e.entry_id for e in [end]]])
            if came:
                consumer.acknowledge(chance.choice(came))
        finally:
            consumer.close()
    return told


def _told_in_memory(seed: int, script: Callable[[World, Process], list[Any]]) -> list[Any]:
    """What a script is told that runs in a process of a simulated world, where no faults fall."""
    world, process = World(Plan(seed, rates={})), Process("script")
    told: list[Any] = []
    with in_simulation(world):
        world.scheduler.start(process, "script", lambda: told.extend(script(world, process)))
        world.scheduler.run(lambda: False)
    world.disk.remove()
    return told


@pytest.mark.parametrize("seed", range(2))
def test_the_cluster_in_memory_does_as_pulsar_does(broker: EmbeddedBroker, topic: str, seed: int) -> None:
    connections = [Brokers(broker.settings) for _ in range(2)]
    try:
        real = _broker_script(
            connections, topic, random.Random(seed), lambda holds: wait_until(holds, 20, "it arrives")
        )
    finally:
        for one in connections:
            one.close()

    def script(world: World, process: Process) -> list[Any]:
        def wait(holds: Any) -> None:
            while not holds():
                world.scheduler.wait(0.01)

        simulated: list[Any] = [SimulatedBrokers(world.cluster, process) for _ in range(2)]
        return _broker_script(simulated, topic, random.Random(seed), wait)

    fake = _told_in_memory(seed, script)
    assert fake == real
    assert any(isinstance(one, list) and len(one) == 4 and one[2] >= 0 for one in real), "something was repeated"


def _reset_script(brokers: Brokers, admin: Any, topic: str, chance: random.Random) -> list[Any]:
    """What the admin API tells of a subscription that is acknowledged, and reset to entries and times."""
    told: list[Any] = []
    producer = brokers.produce(topic, "p")
    for i in range(12):
        producer.send(single_entry(OutgoingMessage(i + 1, b"%d" % i), b"p", 1_000 * (i + 1)))
    producer.flush()
    producer.close()(5.0)
    first = None
    for _ in range(8):
        consumer = brokers.subscribe(topic, "delaylake", max_bytes=1 << 20, max_messages=1_000)
        told.append(len(admin.connections(topic, "delaylake")))
        came = []
        while (entry := consumer.receive(1.2)) is not None:
            came.append(entry.position)
        first = first or came[0]
        told.append([position.entry_id for position in came])
        if came:
            consumer.acknowledge(chance.choice(came))
        if chance.random() < 0.7:
            consumer.close()
        if chance.random() < 0.5:
            admin.reset_to_entry(topic, "delaylake", first.ledger_id, chance.randrange(12))
        else:
            admin.reset_to_time(topic, "delaylake", chance.choice([0, 1_000 * chance.randrange(15) + 500, 3_000]))
        with contextlib.suppress(PulsarError):  # the broker has ended it
            consumer.close()
        stats = admin.internal_stats(topic)
        told.append([stats.acknowledged["delaylake"][1], len(admin.connections(topic, "delaylake"))])
        entry = admin.entry_metadata(topic, first.ledger_id, chance.randrange(12))
        told.append([entry.publish_time, entry.producer_name, entry.batch_size])
    return told


@pytest.mark.parametrize("seed", range(2))
def test_subscriptions_are_reset_in_memory_as_by_pulsar(broker: EmbeddedBroker, topic: str, seed: int) -> None:
    brokers, chance = Brokers(broker.settings), random.Random(seed)
    with AdminClient(broker.settings) as admin:
        real = _reset_script(brokers, admin, topic, chance)
    brokers.close()

    def script(world: World, process: Process) -> list[Any]:
        simulated: Any = SimulatedBrokers(world.cluster, process)
        return _reset_script(simulated, Admin(world.cluster), topic, random.Random(seed))

    assert _told_in_memory(seed, script) == real


def _load_script(brokers: Brokers, topic: str, chance: random.Random, act: Any) -> list[Any]:
    """What a producer is told that sends messages, and some chunks of others, when a broker has loaded its topic."""
    told: list[Any] = []
    sent = 0
    for step in range(24):
        if chance.random() < 0.4 and step:
            act.unload(topic)
        producer = act.opened(lambda: brokers.produce(topic, "p"))
        told.append(producer.last_sequence_id)
        sequence_id = max(1, sent + chance.choice([0, 1, 1]))
        sent = max(sent, sequence_id)
        last = chance.choice([0, 2])  # the number of its last chunk
        for number in range(chance.randrange(last + 1) + 1):
            metadata = MessageMetadata(producer_name=b"p", sequence_id=sequence_id, publish_time=1_000)
            if last:
                metadata.uuid, metadata.chunk_id, metadata.n_chunks = b"%d" % step, number, last + 1
            data = raw_entry(metadata, b"x")
            producer.send(OutgoingEntry(sequence_id, sequence_id, 1, data, is_chunk=last > 0))
            producer.flush()
            act.wait(lambda one=producer: one.has_arrived)
            told.append([sequence_id, number, last, producer.repeated_to])
        producer.close()(5.0)
    return told


class _OnPulsar:
    """What scripts do beside producers: on a real broker."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker

    def wait(self, holds: Callable[[], bool]) -> None:
        wait_until(holds, 20, "it arrives")

    def opened(self, open_it: Callable[[], Any]) -> Any:
        found: list[Any] = []

        def is_open() -> bool:
            with contextlib.suppress(PulsarError):
                found.append(open_it())
            return bool(found)

        self.wait(is_open)
        return found[0]

    def unload(self, topic: str) -> None:
        self._ask("PUT", topic, "/unload")

    def _ask(self, method: str, topic: str, path: str) -> None:
        url = f"{self._broker.settings.admin_url}/admin/v2/{topic.replace('://', '/')}"
        http.request(method, url + path, timeout=30).raise_for_status()


class _InMemory(_OnPulsar):
    """The same in a simulated world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def wait(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._world.scheduler.wait(0.01)

    def unload(self, topic: str) -> None:
        self._world.cluster.unload(self._world.cluster.topic(topic))


def _told_by_both(
    script: Callable[[Brokers, str, random.Random, Any], list[Any]],
    on_pulsar: Any,
    in_memory: Callable[[World], Any],
    broker: EmbeddedBroker,
    topic: str,
    seed: int,
) -> list[Any]:
    """Runs a script on a real broker and in memory, checks that both tell the same, and returns it."""
    with contextlib.closing(Brokers(broker.settings)) as brokers:
        real = script(brokers, topic, random.Random(seed), on_pulsar)

    def simulated(world: World, process: Process) -> list[Any]:
        return script(SimulatedBrokers(world.cluster, process), topic, random.Random(seed), in_memory(world))

    assert _told_in_memory(seed, simulated) == real
    return real


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker whose deduplication takes a snapshot as often as that of a simulated cluster."""
    conf = {"brokerDeduplicationEntriesInterval": f"{SNAPSHOT_ENTRIES}"}
    with running_broker(tmp_path_factory.mktemp("snapshots"), conf) as made:
        yield made


@pytest.mark.parametrize("seed", range(4))
def test_a_topic_that_is_loaded_again_knows_in_memory_what_it_knows_on_pulsar(
    snapshots: EmbeddedBroker, topic: str, seed: int
) -> None:
    real = _told_by_both(_load_script, _OnPulsar(snapshots), _InMemory, snapshots, topic, seed)
    ids = [one for one in real if isinstance(one, int)]
    assert len({*ids}) > 5
    assert any(one[3] >= 0 for one in real if isinstance(one, list)), "something was repeated"


def _changed_topic_script(brokers: Brokers, topic: str, chance: random.Random, act: Any) -> list[Any]:
    """What a consumer gets, and the admin API tells, of a topic that is skipped, truncated, terminated, and deleted."""
    told: list[Any] = []
    ledgers: list[int] = []  # in the order in which they were told of

    def subscribe() -> Any:
        return brokers.subscribe(topic, "delaylake", max_bytes=1 << 20, max_messages=1_000)

    def change(what: str) -> None:
        if what == "send":
            try:
                producer = brokers.produce(topic)
            except PulsarError as error:
                told.append(str(error).partition(":")[0])
                return
            for number in range(chance.randint(1, 4)):
                producer.send(single_entry(OutgoingMessage(number + 1, b"x"), b"p", 1_000))
            producer.flush()
            act.wait(lambda: producer.has_arrived)
            producer.close()(5.0)
        else:
            act.change(topic, what, chance.randint(1, 5))

    def receive(consumer: Any) -> None:
        came = []
        while (entry := consumer.receive(1.2)) is not None:
            came.append(entry)
            if entry.position.ledger_id not in ledgers:
                ledgers.append(entry.position.ledger_id)
        told.append([(ledgers.index(e.position.ledger_id), e.position.entry_id, e.envelope.last_index) for e in came])
        if came and chance.random() < 0.7:
            last = chance.choice(came).position
            told.append(act.admin.message_index(topic, *last))
            consumer.acknowledge(last)

    subscribe().close()
    for _ in range(10):
        for _ in range(2):
            change(chance.choice(["send", "send", "send", "send", "skip", "clear", "truncate", "terminate"]))
        consumer = act.opened(subscribe)
        receive(consumer)
        if chance.random() < 0.3:
            change("delete")
            with pytest.raises(PulsarError):
                consumer.receive(5.0)
            consumer = act.opened(subscribe)
            change("send")
            receive(consumer)
        consumer.close()
        act.trim(topic)
        kept = act.admin.internal_stats(topic).ledgers
        told.append([[n for _, n in sorted(kept.items()) if n], act.admin.backlog(topic, "delaylake")])
    return told


class _AdminOfPulsar(_OnPulsar):
    """Who changes topics on a real broker."""

    def __init__(self, broker: EmbeddedBroker, admin: Any) -> None:
        super().__init__(broker)
        self.admin = admin

    def change(self, topic: str, what: str, n: int) -> None:
        method, path = {
            "skip": ("POST", f"/subscription/delaylake/skip/{n}"),
            "clear": ("POST", "/subscription/delaylake/skip_all"),
            "truncate": ("DELETE", "/truncate"),
            "terminate": ("POST", "/terminate"),
            "delete": ("DELETE", "?force=true"),
        }[what]
        self._ask(method, topic, path)

    def trim(self, topic: str) -> None:
        def is_trimmed() -> bool:
            self._ask("POST", topic, "/trim")  # at a rollover or acknowledgement the broker does so, but not at each
            stats = self.admin.internal_stats(topic)
            ledger, entry = stats.acknowledged["delaylake"]
            closed = [(one, n - 1) for one, n in stats.ledgers.items() if one != max(stats.ledgers)]
            return all(last > (ledger, entry) for last in closed)

        self.wait(is_trimmed)


class _AdminInMemory(_InMemory):
    """The same in a simulated world."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.admin = Admin(world.cluster)

    def change(self, topic: str, what: str, n: int) -> None:
        cluster = self._world.cluster
        of = cluster.topic(topic)
        match what:
            case "skip":
                cluster.skip(of, min(of.n_acknowledged + n, len(of.entries)))
            case "clear":
                cluster.skip(of, len(of.entries))
            case _:
                getattr(cluster, what)(of)

    def trim(self, topic: str) -> None:
        self._world.cluster.trim(self._world.cluster.topic(topic))


@pytest.fixture(scope="module")
def small_ledgers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker whose ledgers have four entries, and are kept for no deduplication."""
    conf = {
        "managedLedgerMaxEntriesPerLedger": "4",
        "managedLedgerMinLedgerRolloverTimeMinutes": "0",
        "brokerDeduplicationEnabled": "false",
    }
    with running_broker(tmp_path_factory.mktemp("ledgers"), conf) as made:
        yield made


@pytest.mark.parametrize("seed", range(3))
def test_a_topic_that_admins_change_does_in_memory_as_on_pulsar(
    small_ledgers: EmbeddedBroker, topic: str, seed: int
) -> None:
    def in_memory(world: World) -> _AdminInMemory:
        world.cluster.most_in_ledger[topic] = 4
        return _AdminInMemory(world)

    with AdminClient(small_ledgers.settings) as admin:
        on_pulsar = _AdminOfPulsar(small_ledgers, admin)
        real = _told_by_both(_changed_topic_script, on_pulsar, in_memory, small_ledgers, topic, seed)
    assert any(isinstance(one, str) for one in real) or seed, "it was terminated"
    assert any(isinstance(one, list) and one for one in real)


def _partitions_script(brokers: Brokers, topic: str, chance: random.Random, act: Any) -> list[Any]:
    """What is told of a topic with two partitions, of one without, and of one that nobody has made; what they have."""
    act.make(topic, 2)
    plain, missing = f"{topic}_plain", f"{topic}_missing"
    names = brokers.partition_names(topic)
    for name in [plain, *names, *(chance.choice([plain, *names]) for _ in range(12))]:
        producer = brokers.produce(name)
        producer.send(single_entry(OutgoingMessage(1, b"x"), b"p", 1_000))
        producer.flush()
        act.wait(lambda of=producer: of.has_arrived)
        producer.close()(5.0)
    told: list[Any] = [
        [brokers.partitions(name), act.admin.partitions(name), act.client.get_topic_partitions(name)]
        for name in (topic, *names, plain)
    ]
    told.append([act.admin.partitions(missing), act.admin.internal_stats(missing), act.admin.internal_stats(topic)])
    ledgers = set()
    consumers = {
        name: brokers.subscribe(name, "delaylake", max_bytes=1 << 20, max_messages=1_000) for name in (plain, *names)
    }
    for name, consumer in consumers.items():
        end = consumer.last_entry()
        ledgers.add(end.ledger_id)
        came: list[int] = []
        while not came or came[-1] < end.entry_id:
            entry = consumer.receive(1.0)
            if entry is not None:
                assert entry.position.ledger_id == end.ledger_id
                came.append(entry.position.entry_id)
        told.append([came, act.admin.internal_stats(name).end == end])
        consumer.acknowledge(end)
        act.wait(lambda of=name: act.admin.backlog(of, "delaylake") == 0)
        told.append([act.admin.backlog(of, "delaylake") for of in consumers])
    return [*told, len(ledgers)]


class _PartitionsOnPulsar(_OnPulsar):
    """Who makes partitioned topics on a real broker."""

    def __init__(self, broker: EmbeddedBroker, admin: Any, client: Any) -> None:
        super().__init__(broker)
        self.admin, self.client = admin, client

    def make(self, topic: str, n: int) -> None:
        self.admin.create_partitioned_topic(topic, n)


class _PartitionsInMemory(_InMemory):
    """The same in a simulated world."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.admin, self.client = Admin(world.cluster), Client(world.new_brokers())

    def make(self, topic: str, n: int) -> None:
        self._world.cluster.partitions[topic] = n


def test_partitions_are_in_memory_as_on_pulsar(broker: EmbeddedBroker, topic: str) -> None:
    with AdminClient(broker.settings) as admin, contextlib.closing(connect(broker.settings)) as client:
        on_pulsar = _PartitionsOnPulsar(broker, admin, client)
        real = _told_by_both(_partitions_script, on_pulsar, _PartitionsInMemory, broker, topic, 0)
    assert real[0] == [2, 2, [f"{topic}-partition-0", f"{topic}-partition-1"]]
    assert real[-1] == 3, "ledgers"


def _throttled_script(brokers: Brokers, other: Brokers, topic: str, act: Any) -> list[Any]:
    """What two connections are told of a topic that takes ten messages a second when one of them has sent more.

    Returns:
        whether the other connection is told of the last entry at once; of which entry the sender's own is told.
    """
    producer = brokers.produce(topic, "p")
    act.limit(topic)
    beside, elsewhere = (one.read(topic, START, max_bytes=1 << 20, max_messages=1_000) for one in (brokers, other))
    for number in range(30):
        producer.send(single_entry(OutgoingMessage(number + 1, b"x"), b"p", 1_000))
    producer.flush()
    is_there = elsewhere.last_entry().entry_id == 29
    told = [is_there, beside.last_entry().entry_id]
    act.wait(lambda: producer.has_arrived)
    return told


class _ThrottlesOnPulsar(_OnPulsar):
    """Gives a topic a publish rate on a real broker."""

    def limit(self, topic: str) -> None:
        url = f"{self._broker.settings.admin_url}/admin/v2/{topic.replace('://', '/')}/publishRate"
        rate = {"publishThrottlingRateInMsg": 10, "publishThrottlingRateInByte": -1}
        http.post(url, json=rate).raise_for_status()
        self.wait(lambda: "10," in http.get(url).text)


class _ThrottlesInMemory(_InMemory):
    """The same in a simulated world."""

    def limit(self, topic: str) -> None:
        self._world.cluster.limit(self._world.cluster.topic(topic), 10.0, 1_000.0)


def test_what_comes_after_too_much_for_a_topic_waits_on_its_connection_in_memory_and_on_pulsar(
    broker: EmbeddedBroker, topic: str
) -> None:
    with contextlib.closing(Brokers(broker.settings)) as one, contextlib.closing(Brokers(broker.settings)) as other:
        real = _throttled_script(one, other, topic, _ThrottlesOnPulsar(broker))

    def script(world: World, process: Process) -> list[Any]:
        one, other = (SimulatedBrokers(world.cluster, process) for _ in range(2))
        return _throttled_script(one, other, topic, _ThrottlesInMemory(world))

    assert _told_in_memory(0, script) == real == [False, 29]


def _forgetful_script(brokers: Brokers, topic: str, chance: random.Random, act: Any) -> list[Any]:
    """What producers are told of whom some are closed for so long that the broker forgets them, and some are not."""
    told: list[Any] = []
    producers: dict[str, Any] = {}
    sent = Counter[str]()

    def send(name: str, n: int) -> None:
        producer = producers.get(name) or act.opened(lambda: brokers.produce(topic, name))
        producers[name] = producer
        first = max(1, sent[name] + chance.choice([0, 1, 1]))
        for sequence_id in range(first, first + n):
            producer.send(single_entry(OutgoingMessage(sequence_id, b"x"), name.encode(), 1_000))
        producer.flush()
        act.wait(lambda: producer.has_arrived)
        sent[name] = max(sent[name], first + n - 1)
        told.append([name, first, n, producer.repeated_to, producer.last_sequence_id])

    def look(unload: bool) -> None:
        for one in producers.values():
            one.close()(5.0)
        producers.clear()
        if unload:
            act.unload(topic)
        for name in names:
            producers[name] = act.opened(lambda of=name: brokers.produce(topic, of))
            told.append([name, producers[name].last_sequence_id])

    names = "pqrst"
    for _ in range(6):  # more than one snapshot, and some after it
        for name in names:
            send(name, chance.randrange(1, 4))
    unused = [name for name in names if chance.random() < 0.6] or ["p"]
    for name in unused:
        producers.pop(name).close()(5.0)
    for name in act.probes:
        send(name, 1)
        producers.pop(name).close()(5.0)
    # What was closed before a name that is forgotten is forgotten, too. Whoever is asked for is in use again.
    act.wait_until_forgotten(lambda name: act.opened(lambda: brokers.produce(topic, name)))
    for name in names:
        if name not in unused:
            send(name, 1)
    look(unload=False)
    look(unload=chance.random() < 0.7)
    for name in names:
        send(name, 2)
    look(unload=True)
    return told


_PROBES = tuple(f"probe {i}" for i in range(30))  # names that are closed after the others


class _Forgetful(_OnPulsar):
    """A real broker that forgets producers after a minute."""

    probes = _PROBES

    def wait_until_forgotten(self, open_it: Callable[[str], Any]) -> None:
        for name in self.probes:
            time.sleep(10)
            producer = open_it(name)
            producer.close()(5.0)
            if producer.last_sequence_id < 0:
                return
        raise AssertionError("no producer is forgotten")


class _ForgetfulInMemory(_InMemory):
    """The same in a simulated world."""

    probes = _PROBES

    def wait_until_forgotten(self, open_it: Callable[[str], Any]) -> None:
        self._world.scheduler.wait(FORGETS_SECONDS + 60)
        producer = open_it(self.probes[0])
        assert producer.last_sequence_id < 0
        producer.close()(5.0)


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    conf = {
        "brokerDeduplicationProducerInactivityTimeoutMinutes": "1",
        "brokerDeduplicationEntriesInterval": f"{SNAPSHOT_ENTRIES}",
        "brokerDeduplicationSnapshotFrequencyInSeconds": "0",
    }
    with running_broker(tmp_path_factory.mktemp("forgetful"), conf) as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_producers_that_nobody_uses_are_forgotten_in_memory_as_by_pulsar(
    forgetful: EmbeddedBroker, topic: str, seed: int
) -> None:
    real = _told_by_both(_forgetful_script, _Forgetful(forgetful), _ForgetfulInMemory, forgetful, topic, seed)
    assert any(one[1:] == [-1] for one in real), "some were forgotten"
    assert any(len(one) == 2 and one[1] > 0 for one in real), "and others not"


def _client_script(clients: list[Any], topic: str, chance: random.Random) -> list[Any]:
    """What producers of Pulsar's own client are told, who send batches, send some again, and take names of others."""
    told: list[Any] = []
    producers: dict[str, Any] = {}
    batches = [[1]]  # the sequence ids of each batch so far
    for _ in range(40):
        name, client = chance.choice("pq"), chance.choice(clients)
        what = chance.choice(["send", "again", "again", "close", "take"])
        if name not in producers or what == "take":
            try:
                found = client.create_producer(topic, producer_name=name, batching_enabled=True, **_PRODUCER_OPTIONS)
                producers[name] = found
                told.append([name, found.last_sequence_id()])
            except pulsar.ProducerBusy:
                told.append([name, "busy"])
            continue
        if what == "close":
            producers.pop(name).close()
            continue
        first = batches[-1][-1] + chance.choice([1, 4])
        new = [list(range(first, first + 3)), list(range(first + 3, first + 3 + chance.randrange(1, 4)))]
        repeated = batches[-chance.randrange(1, 4) :]
        sent = repeated + new[: chance.randrange(2)] if what == "again" else new
        batches += [batch for batch in sent if batch not in batches]
        results: list[Any] = []
        for batch in sent:
            for number in batch:
                last = partial(_note_answer, results) if number == sent[-1][-1] else None
                producers[name].send_async(b"%d" % number, last, partition_key="k", sequence_id=number)
            producers[name]._producer.flush_async(lambda *_: None)
        producers[name].flush()
        told.append([name, sent, producers[name].last_sequence_id(), results])
    for producer in producers.values():
        producer.close()
    return told


def _note_answer(results: list[Any], result: Any, position: Any) -> None:
    results.append([str(result), position.ledger_id() < 0])


@pytest.mark.parametrize("seed", range(3))
def test_producers_of_pulsars_client_are_told_the_same_in_memory(broker: EmbeddedBroker, topic: str, seed: int) -> None:
    clients = [connect(broker.settings) for _ in range(2)]
    try:
        real = _client_script(clients, topic, random.Random(seed))
    finally:
        for one in clients:
            one.close()

    def script(world: World, process: Process) -> list[Any]:
        simulated = [Client(SimulatedBrokers(world.cluster, process)) for _ in range(2)]
        return _client_script(simulated, topic, random.Random(seed))

    fake = _told_in_memory(seed, script)
    assert fake == real
    dropped = [is_dropped for one in real if isinstance(one[-1], list) for _, is_dropped in one[-1]]
    assert {*dropped} == {True, False}, "some were repeated, and others new"


class _CrashedError(BaseException):
    """The process has ended: nothing of it catches this."""


ROOT = Path(__file__).parents[2]
_BATCHES = 30


def _crashes(chance: random.Random) -> list[tuple[str, int]]:
    """Points at which runs of a query end, one after another; the last run ends by itself."""
    number, found = 0, []
    for point in chance.sample(POINTS, 3):
        number += chance.randrange(1, 5)
        found.append((point, number))
    return [*found, ("none", -1)]


def _run_on_spark(folder: Path, n: int, crash: tuple[str, int]) -> bool:
    """Runs the script until it stands still or has done all batches, and kills it; returns whether it failed."""
    stands = folder / "stands"
    stands.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.simulation.spark_script", str(folder), str(n), crash[0], str(crash[1])]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    is_done = folder / "query" / "commits" / str(n - 1)
    try:
        wait_until(lambda: stands.exists() or is_done.exists() or process.poll() is not None, 900, "the script's end")
        return process.poll() is not None
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        process.kill()
        process.wait()


def _run_on_stand_in(folder: Path, n: int, crash: tuple[str, int]) -> bool:
    """Does the same with what stands in for Spark."""

    def end() -> None:
        raise _CrashedError

    script = Script(folder, n, crash, end)
    reader: Any = ScriptReader(script)
    operator: Any = partial(ScriptOperator, script)
    query = Query(folder / "query", reader, operator, KEYS, sink_of(script), lambda _: None, Faults(0, {}))
    try:
        query.run()
    except _CrashedError:
        return False
    except StateDamagedError:
        return True
    return False


@pytest.mark.long
def test_batches_offsets_and_state_in_memory_are_as_those_of_spark(tmp_path: Path) -> None:
    real, fake = tmp_path / "real", tmp_path / "fake"
    real.mkdir()
    fake.mkdir()

    def run(n: int, crash: tuple[str, int]) -> list[bool]:
        return [_run_on_spark(real, n, crash), _run_on_stand_in(fake, n, crash)]

    def same(name: str) -> list[str]:
        """Checks that a folder has the same files in both."""
        of_real, of_fake = (
            sorted((file.name for file in (one / "query" / name).iterdir() if file.name.isdigit()), key=int)
            for one in (real, fake)
        )
        assert of_real == of_fake
        return of_real

    for crash in _crashes(random.Random(1)):
        assert run(_BATCHES, crash) == [False, False], (real / "log").read_text()[-5_000:]
        assert (fake / "told").read_text() == (real / "told").read_text(), crash
        assert same("offsets")[0] == same("commits")[0]
    assert (fake / "told").read_text().count("sink") > _BATCHES, "some batch has run twice"

    # Of the state the newest snapshot is enough, and what came after it. In memory each version is a snapshot.
    partition = real / "query" / "state" / "0" / "0"
    snapshot = max(int(file.stem) for file in partition.glob("*.zip"))
    assert snapshot > 1
    for file in [file for file in partition.iterdir() if file.stem.isdigit() and int(file.stem) < snapshot]:
        file.unlink()
    for file in [file for file in (fake / "query" / "state").iterdir() if int(file.name.partition("-")[0]) < snapshot]:
        file.unlink()
    assert run(_BATCHES + 2, ("none", -1)) == [False, False], (real / "log").read_text()[-5_000:]
    assert (fake / "told").read_text() == (real / "told").read_text()

    told = (real / "told").read_text()
    for file in partition.glob(f"{_BATCHES + 2}.*"):  # Spark counts versions from 1 on
        file.unlink()
    (fake / "query" / "state" / f"{_BATCHES + 1}-{KEYS[0]}").unlink()
    assert run(_BATCHES + 4, ("none", -1)) == [True, True], "both say that the state is damaged"
    assert "sink" not in (real / "told").read_text().removeprefix(told)
    assert "sink" not in (fake / "told").read_text().removeprefix(told)
