"""A service in a simulated world: its starts, its ends, and what it runs on."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import deltalake
from deltalake.exceptions import CommitFailedError

import broker.protocol.building
import broker.protocol.byte_budget
import streaming.checkpoint.checkpoint
import streaming.crash_recovery
import streaming.free_memory
import streaming.release.driver.releaser
import streaming.release.last_sent
import streaming.release.task.process_clients
import streaming.release.task.producers
import streaming.release.task.send_on_time
import streaming.release.task.sender
import streaming.sinks.outcomes
import streaming.source.intake
import streaming.source.receivers
import streaming.source.watch.source_watch
import warehouse.delta.commits
import warehouse.delta.tables
import warehouse.durable
from broker.client import PulsarError
from broker.position import Position
from broker.protocol.entries import messages_of, open_envelope
from broker.protocol.session import DisconnectedError
from conf.errors import DelayLakeError
from conf.partitions import without_partition
from conf.settings import Settings, Subscription, local_path
from status.job_status import JobStatus
from streaming.crash_recovery import GivenUpError
from streaming.source.watch.source_watch import SourceWatch
from tests.simulation import scheduler as sim
from tests.simulation import tables as fake_tables
from tests.simulation.accounts import Accounts, BrokenGuaranteeError
from tests.simulation.added import ADDED
from tests.simulation.another_place import AnotherPlace
from tests.simulation.auditing import AuditRun, Audits, audit_names
from tests.simulation.backing_up import Backup, Backups, Restore, backup_names
from tests.simulation.broker import MAX_MESSAGE_BYTES, Admin, Client, Cluster, Entry, Link, SimulatedBrokers, Topic
from tests.simulation.chunked import ChunkedMessages
from tests.simulation.commands import Operators
from tests.simulation.disk import Disk
from tests.simulation.expected import Arrival
from tests.simulation.faults import USUAL_RATES, Fault, Faults
from tests.simulation.file_times import STRETCH
from tests.simulation.filtering import FilteredChange, Filters, filter_names
from tests.simulation.importing import TOPIC as IMPORTED_TOPIC
from tests.simulation.importing import Import, OtherSystem, as_imported, import_names
from tests.simulation.job_start import JobStart
from tests.simulation.live_tables import KEPT_MILLIS, LiveTables
from tests.simulation.load import IN_CHUNKS, KINDS, Producers
from tests.simulation.long_pause import HOURS, LongPause
from tests.simulation.oracle import Oracle
from tests.simulation.parcels import TOPIC as CHANGED_TOPIC
from tests.simulation.rebuilding import Rebuild, check_epoch, create_tables, empty_tables, rebuild_names
from tests.simulation.replicating import TAKEN_KINDS, Replication
from tests.simulation.retaining import Maintenance, maintenance_names
from tests.simulation.scheduler import EPOCH_SECONDS, Process, Scheduler, Task
from tests.simulation.source_topics import SourceTopics
from tests.simulation.spark import StateDamagedError
from tests.simulation.terminated import TerminatedDestinations
from tests.simulation.told_destinations import ToldDestinations
from tracker.wire.delaylake_pb2 import ControlOutcome
from warehouse.delta.commits import _sync_version as sync_version
from warehouse.delta.commits import last_transactions
from warehouse.delta.fencing import PAUSE_SECONDS, FencedError
from warehouse.delta.opening import open_table as real_open_table
from warehouse.delta.snapshot import query_builder, run_sql
from warehouse.delta.tables import Tables
from warehouse.durable import sync, write_durably
from warehouse.schemas import FENCED
from warehouse.unseen_entries import record

NAMESPACE = "persistent://public/default"
_PACKAGES = {"conf", "tracker", "status", "broker", "warehouse", "streaming", "checkpoint_from_tables"}
_BACKOFF = {"first": "1s", "factor": 2, "max": "8s", "attempts": 10}
_RATE = {"messages_per_second": 5, "burst": 5}  # more than come, but for what was missed
_HOUR = 8  # of the day in which a simulation begins
_FIRST_OWN = 1_000  # the first number of connections that their user closes
_TAKEN_OVER = 0.5  # how often a job that is paused is taken over by another machine
_JUMPS_SECONDS = (-20.0, -2.0, -0.3, 0.3, 2.0, 20.0)  # of a machine's clock
_EXECUTORS_AHEAD_SECONDS = (-3.0, -0.4, 0.0, 0.4, 3.0)  # their clocks
_STANDS_STILL = 0.4  # of the executors that are cut off, so many do so for a while
_LOCK_LOST_SECONDS = PAUSE_SECONDS + 0.5  # a file system that loses a lock sooner is none to use
_CUT_OFF_SECONDS = 2.0  # after its driver an executor ends: Spark's `CoarseGrainedExecutorBackend` hears of it
_WORKER_ENDS_SECONDS = 0.2  # after its driver a Python worker on the same machine does: its daemon's input ends
_KILLED_AFTER_SECONDS = (0.0, 0.1, 1.0, 3.0)  # workers of tasks
_CANCELLED_BEFORE_SECONDS = 3.0  # what comes next is cancelled before the first schedule key of its topic comes
_PARTITIONS = 2  # keys are shared between two
_MOST_PARTITIONS = 5
# After the last fault, and after all is due: then nothing may wait any more. A pause may go on for 100 s, and chunks
# that never make a message are given up 90 s later.
_QUIET_SECONDS = 200.0


# What a process does on real tables.
OnRealTables = Rebuild | Maintenance | Backup | Restore | Import | FilteredChange | AuditRun


@dataclass(frozen=True)
class Plan:
    """What is simulated.

    Attributes:
        seconds: for which users publish, and faults fall.
        more_seconds: for which faults go on falling.
        is_brief: what stands still mostly does so for a short time only: a job that does nothing meets no faults.
        per_second: entries that are published.
        commands_per_second: times at which somebody sends commands.
    """

    seed: int
    seconds: float = 60.0
    per_second: float = 3.0
    commands_per_second: float = 0.7
    rates: Mapping[str, float] = field(default_factory=lambda: USUAL_RATES)
    left_out: frozenset[Fault] = frozenset()
    more_seconds: float = 0.0
    is_brief: bool = False


@dataclass
class Result:
    """What came of a simulation.

    Attributes:
        broken: the guarantee that does not hold; empty: all hold.
        fallen: the faults.
        points: how often each side effect was reached.
        fallen_at: how often each kind of fault fell there, by side effect and kind.
        done: what users have done.
        history: what happened, a line each.
    """

    seed: int
    broken: str
    fallen: list[Fault]
    points: Counter[str]
    history: list[str]
    seconds: float
    messages: int
    starts: int
    rebuilds: int = 0
    fallen_at: Counter[tuple[str, str]] = field(default_factory=Counter)
    done: list[Fault] = field(default_factory=list)


def _windows(seed: int, hours: Sequence[int]) -> list[dict[str, str]]:
    """Returns windows of hours of the day: every other minute is open, the even ones for half of the seeds."""
    first = seed // 2 % 2
    return [{"from": f"{hour:02}:{m:02}", "to": f"{hour:02}:{m + 1:02}"} for hour in hours for m in range(first, 59, 2)]


def _minute(time_of_day: str) -> int:
    """Returns the minute of the day of a time, HH:MM."""
    hours, minutes = time_of_day.split(":")
    return 60 * int(hours) + int(minutes)


class World:
    """One simulation, from its seed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scheduler = Scheduler(plan.seed)
        self.faults = Faults(plan.seed, plan.rates, plan.left_out)
        self.history: list[str] = []
        self.points: Counter[str] = Counter()
        self.fallen_at: Counter[tuple[str, str]] = Counter()  # by side effect and kind of fault
        empty_tables()
        empty_tables(KEPT_MILLIS * STRETCH)
        self.disk = Disk(Path(tempfile.mkdtemp(prefix="delaylake-simulation-", dir="/dev/shm")))
        self.cluster = Cluster(self.scheduler, self.faults)
        self.cluster.on_stored, self.cluster.on_acknowledged = self._stored, self._acknowledged
        self.logs = {name: fake_tables.Log(name, schema) for name, schema in FENCED.items()}
        for log in self.logs.values():
            log.on_forced = self._stored_for_good
        self.another_place = AnotherPlace(self)
        self.long_pause = LongPause(self)
        self.replication = Replication(self)
        hours = (_HOUR, _HOUR + HOURS) if self.long_pause.is_made else (_HOUR,)
        self.settings = Settings(
            warehouse="file:/nowhere",
            checkpoint=f"file:{self.disk.folder}/machine 0",
            replicated="all" if self.replication.is_taken else "local-only",
            pulsar={"max_message_size_bytes": MAX_MESSAGE_BYTES},  # type: ignore[arg-type]
            # Batches that come more often meet more faults, those that come as the default says meet other ones.
            ingest={"batch_interval_millis": 600 if plan.seed % 2 else 300},  # type: ignore[arg-type]
            tracker={  # type: ignore[arg-type]
                "shards": 2,
                "max_seal_interval_millis": 1_500,
                "load_ahead_millis": 6_000,
                "schedule_key_idle_millis": 2_000,
            },
            release={"lanes": 2},  # type: ignore[arg-type]
            routes=[  # type: ignore[arg-type]
                {
                    "source": f"{NAMESPACE}/orders",
                    "subscriptions": [{"name": "a", "backoff": _BACKOFF}, {"name": "b", "order": "key"}],
                },
                {
                    "source": f"{NAMESPACE}/mails",
                    "subscriptions": [
                        {"name": "c", "type": "Exclusive", "rate": _RATE},
                        {"name": "w", "windows": _windows(plan.seed, hours)},
                    ],
                },
            ],
        )
        subscriptions = [s for route in self.settings.routes for s in route.subscriptions]
        self.oracle = Oracle(
            lambda: round((EPOCH_SECONDS + self.scheduler.now) * 1000),
            Accounts(
                frozenset(s.name for s in subscriptions if s.type.is_cumulative),
                frozenset(s.name for s in subscriptions if s.rate is not None or s.windows),
            ),
        )
        self.oracle.rates.most = {
            s.name: int(s.rate.messages_per_second) + s.rate.most_at_once for s in subscriptions if s.rate
        }
        self.oracle.windows.open = {
            s.name: [(_minute(window.start), _minute(window.end)) for window in s.windows]
            for s in subscriptions
            if s.windows
        }
        self.oracle.order.subscriptions = frozenset(s.name for s in subscriptions if s.order == "key")
        self.chunked = ChunkedMessages()
        self.destinations = {
            s.destination: (route.source, s.name) for route in self.settings.routes for s in route.subscriptions
        }
        route = self.settings.routes[0]
        self.oracle.accounts.left_out = frozenset({ADDED})
        self.oracle.added.topic = route.source
        self.oracle.imports.subscriptions = frozenset(s.name for s in self.settings.routes[1].subscriptions)
        self.destinations[f"{NAMESPACE}/{ADDED}"] = route.source, ADDED
        self.rejects_topics = {f"{route.source}-rejects" for route in self.settings.routes}
        self.job: Process | None = None
        self.others: list[Process] = []  # paused jobs, and tasks that go on
        self.drivers: dict[Process, Process] = {}  # of tasks that go on
        self._of_executors = random.Random(f"executors {plan.seed}")
        self.is_on_cluster = self._of_executors.random() < plan.rates.get("seeds with a cluster", 0.0)
        self.executors: dict[Process, None] = {}  # processes of single tasks; on a cluster each has a clock of its own
        self.task_attempts: dict[Task | None, int] = {}  # of a task, by its thread
        self._of_workers = random.Random(f"workers {plan.seed}")
        self.oracle.rates.are_several_machines = self.is_on_cluster
        self.starts = 0
        self.machines = 1  # that have had the disk with the checkpoint
        self.connections: dict[tuple[Process, int], SimulatedBrokers] = {}
        self._connection_numbers = itertools.count(_FIRST_OWN)
        self.names = itertools.count(1)  # of checkpoints that are made anew
        self.attempts = itertools.count()  # to send a message in chunks
        self.rebuilds: dict[Process, OnRealTables] = {}  # that run
        self.backups = Backups(self)
        self.other_system = OtherSystem(self)
        self.source_topics = SourceTopics(self)
        self.terminated = TerminatedDestinations(self)
        self._choose_partitions()
        self.told_destinations = ToldDestinations(self.destinations)
        self.oracle.accounts.takes_nothing = self._takes_nothing
        self.filters = Filters(self)
        self.audits = Audits(self)
        of_rates = random.Random(f"publish rates {plan.seed}")
        self.cluster.has_rates = of_rates.random() < plan.rates.get("seeds with publish rates", 0.0)
        self._live_tables: list[LiveTables] = []  # one for each warehouse; the last is that of now
        self._versions: list[tuple[float, dict[str, int]]] = []  # the newest of each table, by time, seconds
        # After a restore with another broker a rebuild goes by the clock of the restore (docs/another-place.md).
        self.clocks_jump = plan.seed % 4 == 3 and not self.another_place.is_made
        self.needs_rebuild = ""  # why
        self.has_begun = False  # the job has fenced off those before it
        self.may_refuse = False  # the checkpoint is not as a job has left it: a start may refuse it
        self.is_torn = False  # it lacks what was not forced to the disk: Spark may find its state damaged, no more
        self.kept: Path | None = None  # a copy of the checkpoint
        self.clock_ahead = 0.0  # the clock of the job's machine, seconds
        self.jobs: list[Process] = []  # of this warehouse, in the order of their starts
        self.failed: set[Process] = set()  # those that have ended by themselves
        self.stopped_at: dict[Process, float] = {}  # what stands still, or did, seconds
        self.ended_at: dict[Process, float] = {}
        self.broken: str = ""
        self.is_over = False
        self._looked_at = 0.0

    @property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint, where the next start finds it."""
        return Path(local_path(self.settings.checkpoint))

    def trace(self, what: str) -> None:
        self.history.append(f"{self.scheduler.now:9.3f}  {what.replace(f'{self.disk.folder}/', '')}")

    def break_off(self, why: str) -> None:
        if not self.broken:
            self.broken = why
            self.trace(f"BROKEN: {why}")

    def _choose_partitions(self) -> None:
        """In a share of the seeds the first source topic has partitions."""
        chance = random.Random(f"partitions {self.plan.seed}")
        is_chosen = chance.random() < self.plan.rates.get("seeds with partitions", 0.0)
        # Replicators copy one topic; what another system's items are, the accounts know by the topic's own positions.
        if is_chosen and not self.replication.is_made and not self.other_system.are_made:
            self.cluster.partitions[self.settings.routes[0].source] = _PARTITIONS
        chance = random.Random(f"partitioned destinations {self.plan.seed}")
        if chance.random() < self.plan.rates.get("seeds with partitioned destinations", 0.0):
            self.cluster.partitions[chance.choice(sorted(self.destinations))] = _PARTITIONS

    def _add_partition(self) -> None:
        """An admin adds one to a topic that has partitions; the broker gives it the others' subscriptions."""
        topic = self.cluster.chance.choice(sorted(self.cluster.partitions))
        n = self.cluster.partitions[topic] + 1
        if n <= _MOST_PARTITIONS:
            self.trace(f"{topic.rpartition('/')[2]} has {n} partitions now")
            self.cluster.partitions[topic] = n

    def destination_topics(self) -> list[str]:
        """The destinations, of a partitioned one its partitions."""
        return [name for one in sorted(self.destinations) for name in self.cluster.partition_names(one)]

    def subscription_of(self, topic: str) -> str:
        """The subscription whose messages come to a destination, or to a partition of one."""
        return self.destinations[without_partition(topic)][1]

    @contextlib.contextmanager
    def _judging(self) -> Iterator[None]:
        """Ends the simulation where the oracle finds what breaks a guarantee."""
        try:
            yield
        except BrokenGuaranteeError as error:
            self.break_off(str(error))

    # What the cluster says of topics.

    def _stored(self, topic: Topic, entry: Entry) -> None:
        is_told = topic.name == self.settings.control.outcome_topic
        is_put_aside = topic.name in self.rejects_topics
        source, name = self.destinations.get(without_partition(topic.name), ("", ""))
        if not name and not is_told and not is_put_aside:
            return
        envelope = open_envelope(entry.data)
        payload: bytes | None = envelope.payload
        with self._judging():
            if envelope.is_chunk:
                of = envelope.metadata
                self.trace(f"{topic.name.rpartition('/')[2]} gets chunk {of.chunk_id} of {of.uuid.decode()}")
                payload = self.chunked.whole(topic.name, envelope.metadata, envelope.payload, self.scheduler.now)
            for message in messages_of(envelope.metadata, payload) if payload is not None else ():
                if is_told:
                    self._told(ControlOutcome.FromString(message.payload or b""))
                    continue
                properties = {one.decode(): value.decode() for one, value in message.properties}
                position = self.another_place.known(properties["delaylake.messageId"])
                if is_put_aside:
                    self.trace(f"{position} is put aside: {properties['delaylake.reason']}")
                    if not self.oracle.added.is_given_up(position, properties["delaylake.reason"]):
                        self.oracle.rejected.put_aside(position, self.oracle.now())
                    continue
                self.trace(f"{name} gets {position} from {entry.producer} {entry.sequence_id >> 22}")
                due, occurrence, attempt = (
                    int(properties.get(f"delaylake.{one}", "0")) for one in ("deliverAt", "occurrence", "attempt")
                )
                self.oracle.arrived(
                    Arrival(
                        position,
                        name,
                        source,
                        due,
                        occurrence,
                        attempt,
                        message.payload or b"",
                        envelope.metadata.publish_time,
                        self._ahead_millis(entry.sender),
                    )
                )

    def _told(self, outcome: ControlOutcome) -> None:
        row = {field.name: getattr(outcome, field.name) for field in outcome.DESCRIPTOR.fields}
        self.oracle.told(self.another_place.known_row(row))

    def _ahead_millis(self, sender: Process | None) -> int:
        """By how much the clock of a sender is ahead that has one of its own, for good."""
        is_own = self.is_on_cluster and sender in self.executors
        return round(sender.ahead_seconds * 1000) if sender is not None and is_own else 0

    def _stored_for_good(self, table: str, rows: Any) -> None:
        if table == "outcomes":
            for row in rows.select(["request_id", "operation", "subscription", "position", "result"]).to_pylist():
                self.trace("answers " + " ".join(str(value) for value in row.values()))
        with self._judging():
            self.oracle.stored(table, self.another_place.known_rows(rows))

    def replaced(self, table: str, rows: Any) -> None:
        """A rebuild has written a table anew."""
        with self._judging():
            self.oracle.replaced(table, self.another_place.known_rows(rows))

    def _acknowledged(self, topic: Topic, position: Position) -> None:
        self.trace(f"{topic.name.rpartition('/')[2]} is acknowledged to {position}")
        is_imported = topic.name == IMPORTED_TOPIC
        if not is_imported and without_partition(topic.name) not in {route.source for route in self.settings.routes}:
            return
        with self._judging():
            new = [e.position for e in topic.entries[topic.n_acknowledged :] if e.position <= position]
            if is_imported:
                new = [as_imported(one) for one in new]
            self.oracle.acknowledged_to(self.another_place.known(str(one)) for one in new)

    # Faults of processes.

    def point(self, name: str) -> None:
        """A process is about to do something that others see, or has done it."""
        process = self.scheduler.process
        if process is None or process.is_dead:
            return
        self.points[name] += 1
        if self._falls("crash", name):
            self.trace(f"{process.name} is killed at: {name}")
            self.end(process)
        if self._falls("power loss", name):
            self.trace(f"the power is lost at: {name}")
            self.scheduler.after(0.0, self.lose_power)
            self.scheduler.wait(None)
        if self._falls("pause", name):
            self.trace(f"{process.name} is paused at: {name}")
            self.pause(process)
        if self._falls("slow", name):
            self.scheduler.wait(self._how_long([0.05, 0.5, 2.0, 6.0]))
        elif self.scheduler.current is not None and self.scheduler.current.greenlet is not None:
            self.scheduler.wait(self.scheduler.random.uniform(0.0, 0.002))

    def _falls(self, kind: str, point: str) -> bool:
        """Whether a fault of a kind falls at a side effect."""
        is_now = self.faults.is_now(kind)
        if is_now:
            self.fallen_at[point, kind] += 1
        return is_now

    def _how_long(self, seconds: Sequence[float]) -> float:
        """Chooses for how long something stands still, of times in ascending order."""
        if not self.plan.is_brief:
            return self.scheduler.random.choice(seconds)
        return self.scheduler.random.choices(seconds, [3.0**-i for i in range(len(seconds))])[0]

    def end(self, process: Process) -> None:
        """Kills a process; another start of the job follows after a while. Returns only to others."""
        for executor in [one for one, driver in self.drivers.items() if driver is process]:
            seconds = _CUT_OFF_SECONDS if self.is_on_cluster else _WORKER_ENDS_SECONDS
            self.scheduler.after(seconds, partial(self.end, executor))
            del self.drivers[executor]
        if process is self.job:
            # Another one may have its own copy of the checkpoint, and go on where this one did not fence it off.
            self.may_refuse |= self._is_overtaken()
            self.job = None
            self.scheduler.after(self._how_long([0.5, 3.0, 15.0]), self.start)
        elif process in self.others:
            self.others.remove(process)
        for (of, _), brokers in list(self.connections.items()):
            if of is process:
                del self.connections[of, _]
                for link in brokers.links:
                    link.leave()
        self.ended_at.setdefault(process, self.scheduler.now)
        self.scheduler.kill(process)

    def _is_overtaken(self) -> bool:
        """Whether an older job may still write, so that a checkpoint that was copied before is behind the tables."""
        return bool(self.others) and not self.has_begun

    def may_hang(self, offset: Path) -> None:
        """A job is about to rename a file to its offset: on a shared file system it may hang, and another one begins.

        It goes on when the other one has made its own offset of this number.
        """
        process = self.scheduler.process
        if process is None or process is not self.job or not self.faults.is_now("write hangs"):
            return
        self.trace(f"{process.name} hangs before offset {offset.name}")
        process.is_paused = True
        self.stopped_at[process] = self.scheduler.now
        self.others.append(process)
        self.job = None
        self.scheduler.after(_LOCK_LOST_SECONDS, self._start_on_the_same_volume)
        self._drop_later(process)
        self._go_on_after(process, offset, self.scheduler.now + 60.0)
        self.scheduler.wait(0.0)

    def _go_on_after(self, process: Process, offset: Path, ends_at: float) -> None:
        if not offset.exists() and self.scheduler.now < ends_at:
            self.scheduler.after(0.05, partial(self._go_on_after, process, offset, ends_at))
            return
        chance = self.scheduler.random
        seconds = chance.choice([0.0, 0.3, 1.0])
        self.scheduler.after(seconds, partial(self.scheduler.resume, process))
        if self.faults.is_now("crash after a late write"):
            self.scheduler.after(seconds + chance.choice([0.01, 0.3]), self._end_job)

    def pause(self, process: Process) -> None:
        """Stops a process; a job may be taken over meanwhile. It goes on later, and does not know.

        A job that is paused still has the lock of its checkpoint: no other one starts on this machine. Another machine
        starts one once it has the disk with the checkpoint; from then on the paused job has none.
        """
        process.is_paused = True
        chance = self.scheduler.random
        self.stopped_at[process] = self.scheduler.now
        if process is self.job and chance.random() < _TAKEN_OVER:
            self.others.append(process)
            self.job = None
            start = chance.choice([self._start_elsewhere, self._start_on_copy, self._start_on_the_same_volume])
            self.scheduler.after(chance.choice([0.5, 10.0]), start)
        self._drop_later(process)
        self.scheduler.after(self._how_long([1.0, 8.0, 40.0, 100.0]), partial(self.scheduler.resume, process))

    def _drop_later(self, process: Process) -> None:
        for link in [link for (of, _), brokers in self.connections.items() if of is process for link in brokers.links]:
            after = self.scheduler.random.uniform(30.0, 60.0)
            self.scheduler.after(after, partial(self._drop_silent, process, link))

    def _drop_silent(self, process: Process, link: Link) -> None:
        if process.is_paused and link.error is None:
            link.cut(DisconnectedError("the connection was silent"))

    def _processes(self) -> list[Process]:
        """All processes of the service, each once."""
        jobs = [self.job] if self.job else []
        return [*dict.fromkeys([*self.others, *jobs, *self.rebuilds, *self.executors])]

    def end_all(self) -> None:
        """Kills all processes of the service."""
        for process in self._processes():
            self.end(process)

    def lose_power(self) -> None:
        """All processes end, and what was not forced to the disk may be lost. The brokers are elsewhere."""
        chance = self.scheduler.random
        self.end_all()
        for log in self.logs.values():
            log.lose(chance.randint(log.forced_to, log.newest))
        if chance.random() < 0.5:
            for file in self.disk.lose_power(chance):
                self.trace(f"  lost or torn: {file}")
                self.is_torn = True

    def lose_checkpoint(self) -> None:
        """The job ends, and its checkpoint is gone."""
        self.trace("the checkpoint is removed")
        self._end_job()
        shutil.rmtree(self.checkpoint / "query", ignore_errors=True)
        self.may_refuse = True

    def put_checkpoint_back(self) -> None:
        """The job ends, and its checkpoint is as it was some time ago; else it is copied, to be put back later."""
        query = self.checkpoint / "query"
        if self.kept is None:
            if query.exists() and not self.needs_rebuild and not self.backups.is_lost:
                self.kept = self.disk.folder / "kept"
                shutil.rmtree(self.kept, ignore_errors=True)
                shutil.copytree(query, self.kept)
                self.disk.force_all(self.kept)
            return
        self.trace("an older copy of the checkpoint is put back")
        self.oracle.parcels.forget_read()
        self._end_job()
        shutil.rmtree(query, ignore_errors=True)
        query.parent.mkdir(exist_ok=True)  # a machine that was to rebuild it, and had not begun
        self.kept.rename(query)
        self.disk.force_all(query)
        self.kept, self.may_refuse = None, True

    def _end_job(self) -> None:
        if self.job is not None:
            self.end(self.job)

    def status(self) -> Any:
        """The job's status, which each job writes as long as it runs; None: there is none.

        Jobs of other machines that have ended are taken for those of this one: a rebuild does not wait for them.
        """

        def written_at(job: Process) -> float:
            if job.is_dead:
                return self.ended_at[job]
            return self.stopped_at[job] if job.is_paused else self.scheduler.now

        if not self.jobs:
            return None
        last = max(reversed(self.jobs), key=written_at)
        return SimpleNamespace(
            state="failed" if last in self.failed else "running",
            updated_at=round((EPOCH_SECONDS + written_at(last)) * 1000),
            host=socket.gethostname(),
            process_id=-1 if last.is_dead else os.getpid(),
            is_on_cluster=self.is_on_cluster,
        )

    def lose_warehouse(self) -> None:
        """The place of the job is gone, with all processes there, the tables and the checkpoint."""
        self.trace("the warehouse is lost")
        self._live_tables.append(LiveTables(self))
        self._versions.clear()
        self.backups.is_lost = True
        for process in [*self.others, *self.reading(), *self.executors]:
            self.end(process)
        self._end_job()
        self.needs_rebuild, self.kept = "", None
        self.jobs.clear()
        if self.another_place.is_made:
            self.trace("so is the broker")
            self.another_place.lose()
            self.producers.is_ended = True
        self.settings = self.settings.model_copy(update={"checkpoint": f"file:{self._new_machine()}"})

    def told(self, job: Process, status: JobStatus) -> None:
        """A job has made its status."""
        with self._judging():
            if self.source_topics.are_made:
                self.oracle.told_losses.told(job, status)
            self.told_destinations.told(job, status, self.cluster)

    def rebuild_of(self) -> OnRealTables:
        """What the running process does on real tables."""
        process = self.scheduler.process
        assert process is not None
        return self.rebuilds[process]

    def committed(self, uri: str) -> None:
        """What works on real tables has committed to one."""
        one = self.rebuild_of()
        (one if isinstance(one, Maintenance) else one.copy).committed(uri)

    def is_rebuilding(self) -> bool:
        """Whether the running process works on real tables."""
        return self.scheduler.process in self.rebuilds

    def is_written_anew(self) -> bool:
        """Whether somebody rebuilds, imports or restores, or the tables are lost."""
        return self.backups.is_lost or any(
            isinstance(one, Rebuild | Import | Restore) for one in self.rebuilds.values()
        )

    def live_tables(self) -> LiveTables:
        """The warehouse as real tables, which all read and maintain."""
        if not self._live_tables:
            self._live_tables.append(LiveTables(self))
        return self._live_tables[-1]

    def warehouses(self) -> list[LiveTables]:
        """Those that are real tables, the lost ones, too."""
        return self._live_tables

    def _takes_nothing(self, subscription: str) -> bool:
        """Whether nothing can be published for a subscription now."""
        return any(
            self.cluster.takes_nothing(name)
            for name in self.destination_topics()
            if self.subscription_of(name) == subscription
        )

    def forget_versions(self, name: str, seconds: float) -> None:
        """Removes the versions of a table in memory after which there was another one so long ago, and before."""
        before = [at for at, _ in self._versions if at <= self.scheduler.now - seconds]
        if before:
            kept = min(newest[name] for at, newest in self._versions if at >= before[-1])
            self.logs[name].first = max(self.logs[name].first, kept)

    def maintaining(self) -> list[Process]:
        """The processes that maintain the tables."""
        return [process for process, one in self.rebuilds.items() if isinstance(one, Maintenance)]

    def reading(self) -> list[Process]:
        """The processes that maintain the tables, audit them, or find in them what a filter names."""
        reading = Maintenance | FilteredChange | AuditRun
        return [process for process, one in self.rebuilds.items() if isinstance(one, reading)]

    def set_clock(self, ahead_seconds: float) -> None:
        """Sets the clock of the job's machine."""
        self.clock_ahead = ahead_seconds
        self.oracle.accounts.note_clock(round(ahead_seconds * 1000))
        if self.job is not None:
            self.job.ahead_seconds = ahead_seconds

    # The job.

    def start(self) -> None:
        """Starts the job, unless it runs."""
        if self.job is None and not self.is_over and not self.long_pause.is_now:
            self.starts += 1
            self.has_begun = False
            if self.faults.is_now("settings edited"):
                self._edit_settings()
            if self.faults.is_now("route edited") and not self.another_place.is_made:
                self._edit_route()
            for process in self.maintaining():
                self.end(process)  # as it ends with the job
            what, main = ("rebuild", self._rebuild) if self.needs_rebuild else ("job", self._main)
            if self.other_system.is_wanted:
                what, main = "import", self._import
            if self.backups.is_lost:
                what, main = "restore", self._restore
            self.job = process = Process(f"{what} {self.starts}", self.clock_ahead)
            self.trace(f"{process.name} starts")
            if what == "job":
                self.jobs.append(process)
            self.scheduler.start(process, "main", partial(main, process))

    def _edit_settings(self) -> None:
        """Changes what may be changed between two starts, but for routes."""
        chance, before = self.scheduler.random, self.settings
        edited = {
            "release": {"lanes": chance.choice([1, 2, 3])},
            "ingest": {"batch_interval_millis": chance.choice([300, 600, 1_200])},
            "tracker": {
                "max_seal_interval_millis": chance.choice([1_500, 4_000]),
                "load_ahead_millis": chance.choice([6_000, 15_000]),
            },
        }
        self.trace(f"the settings are edited: {edited}")
        parts = {name: getattr(before, name).model_copy(update=values) for name, values in edited.items()}
        self.settings = before.model_copy(update=parts)

    def _edit_route(self) -> None:
        """Adds a subscription to a route, or takes it out."""
        route, *others = self.settings.routes
        kept = [one for one in route.subscriptions if one.name != ADDED]
        is_added = len(kept) == len(route.subscriptions)
        self.trace(f"{ADDED} is {'added' if is_added else 'taken out'}")
        added = (Subscription(name=ADDED, destination=f"{NAMESPACE}/{ADDED}"),) if is_added else ()
        # Wherever in the list.
        edited = (*added, *kept) if self.starts % 2 else (*kept, *added)
        self.settings = self.settings.model_copy(
            update={"routes": (route.model_copy(update={"subscriptions": edited}), *others)}
        )

    def begun(self, settings: Settings) -> None:
        """A start has fenced off the jobs before it."""
        self.has_begun = True
        self.oracle.added.begun(_has_added(settings), round((EPOCH_SECONDS + self.scheduler.now) * 1000))

    def has_read(self, process: Process, rows: Mapping[int, list[Any]]) -> None:
        """A batch of a process, with this input, is done: its checkpoint has it, unless another one has begun."""
        if process is self.job and self.source_topics.are_made:
            self.source_topics.has_read(rows)

    def _start_on_the_same_volume(self) -> None:
        """Starts the job on another machine, whose file system has given it the lock of one that stands still."""
        self.trace("another machine gets the lock")
        self.may_refuse = True
        self.start()

    def _start_elsewhere(self) -> None:
        """Starts the job on another machine, which gets the checkpoint's disk."""
        if self.backups.is_lost:
            self.start()
        elif self.job is None and not self.is_over:
            folder = self._new_machine()
            self.trace(f"the disk is moved to {folder.name}")
            self.disk.move(self.checkpoint, folder)
            self._start_in(folder)

    def _start_on_copy(self) -> None:
        """Starts the job on another machine with a copy of the checkpoint; the paused one still has its own."""
        if self.backups.is_lost:
            self.start()
        elif self.job is None and not self.is_over:
            folder = self._new_machine()
            self.trace(f"the checkpoint is copied to {folder.name}")
            shutil.copytree(self.checkpoint, folder)
            self.disk.force_all(folder)
            self._start_in(folder)

    def _rebuild_elsewhere(self) -> None:
        """Somebody takes the job for dead and rebuilds its checkpoint on another machine: the job goes on meanwhile."""
        if self.job is not None and self.job not in self.rebuilds:
            self.others.append(self.job)
            self.job = None
            self.needs_rebuild = "its machine is not found"
            folder = self._new_machine()
            self.trace(f"a rebuild is begun on {folder.name}")
            self._start_in(folder)

    def _new_machine(self) -> Path:
        self.oracle.rates.are_several_machines = True
        self.machines += 1
        return self.disk.folder / f"machine {self.machines - 1}"

    def _start_in(self, checkpoint: Path) -> None:
        self.settings = self.settings.model_copy(update={"checkpoint": f"file:{checkpoint}"})
        self.start()

    def _main(self, process: Process) -> None:
        why = "it has ended by itself"
        try:
            JobStart(self, process).run()
        except FencedError as error:
            why = str(error)
        except (StateDamagedError, DelayLakeError) as error:
            why = str(error)
            if process is not self.job:
                pass  # another one has begun meanwhile
            elif self._may_need_rebuild(error):
                self.needs_rebuild = why
            elif not isinstance(error, GivenUpError) or "delaylake rebuild" in why:
                self.break_off(f"{process.name} can't go on: {error}")
        except AssertionError as error:
            self.break_off(str(error))
        except NotADirectoryError as error:
            why = str(error)
            if process not in self.others:
                self.break_off(f"{process.name} has lost its disk: {error}")
        except FileNotFoundError as error:
            why = str(error)
            if not self.others:  # else another one that writes the same volume has just put this file in its place
                self.break_off(f"{process.name} has lost a file: {error}")
        self.trace(f"{process.name} ends: {why}")
        self.failed.add(process)
        self.end(process)

    def _may_need_rebuild(self, error: Exception) -> bool:
        """Whether a start may refuse the checkpoint with this error."""
        if isinstance(error, StateDamagedError):
            return self.may_refuse or self.is_torn
        return "delaylake rebuild" in str(error) and (self.may_refuse or self._is_overtaken())

    def _begin_maintenance(self) -> None:
        """Maintains the tables beside the job, unless somebody does, or a rebuild."""
        is_forced = all(log.forced_to == log.newest for log in self.logs.values())
        is_alone = all(isinstance(one, Backup | FilteredChange | AuditRun) for one in self.rebuilds.values())
        if self.job is not None and is_alone and is_forced:
            process = Process("maintenance", self.clock_ahead)
            self.trace("maintenance starts")
            self.scheduler.start(process, "main", partial(self._maintain, process))

    def _maintain(self, process: Process) -> None:
        self.rebuilds[process] = maintenance = Maintenance(self)
        why = "it is done"
        try:
            self.trace(f"maintenance: {maintenance.run()} rows can go")
        except BrokenGuaranteeError as error:
            self.break_off(str(error))
        except DelayLakeError as error:
            why = str(error).replace(str(maintenance.copy.folder), "the copy")
        finally:
            del self.rebuilds[process]
        self.trace(f"maintenance ends: {why}")
        self.end(process)

    def _restore(self, process: Process) -> None:
        self.rebuilds[process] = restore = Restore(self)
        why = "it is done"
        try:
            restore.run()
            self.needs_rebuild, self.may_refuse, self.is_torn = "", False, False
            tables = {name: log.rows(log.newest) for name, log in self.logs.items()}
            if self.another_place.is_there:
                self.another_place.restored(tables)
                self.operators.move(self.cluster)
            else:
                self.oracle.restored(tables)
            self.oracle.added.rebuilt(_has_added(self.settings), self.oracle.now())
            self.other_system.is_wanted |= self.other_system.n_imports > 0  # it may not know what was imported
        except BrokenGuaranteeError as error:
            self.break_off(str(error))
        except (DelayLakeError, PulsarError, NotADirectoryError, FileNotFoundError, CommitFailedError) as error:
            why = str(error).replace(str(restore.copy.folder), "the backup")
        finally:
            del self.rebuilds[process]
        self.trace(f"{process.name} ends: {why}")
        self.end(process)

    def _import(self, process: Process) -> None:
        self._make_checkpoint(process, Import(self))

    def _rebuild(self, process: Process) -> None:
        self._make_checkpoint(process, Rebuild(self))

    def _make_checkpoint(self, process: Process, rebuild: Rebuild | Import) -> None:
        self.rebuilds[process] = rebuild
        self.kept = None
        why = "it is done"
        try:
            found = rebuild.run()
            self.trace(f"{process.name}: {found}")
            if isinstance(rebuild, Import):
                self.other_system.is_wanted = False
            if process is self.job:  # else it was taken for dead, and another machine has the checkpoint
                self.needs_rebuild, self.may_refuse, self.is_torn = "", False, False
            self.oracle.rebuilt()
        except (DelayLakeError, PulsarError, NotADirectoryError, FileNotFoundError) as error:
            why = str(error).replace(str(rebuild.copy.folder), "the copy")
        finally:
            if rebuild.copy.has_overtaken:  # and has perhaps written some tables, whether it is done or not
                self.oracle.added.rebuilt(_has_added(self.settings), self.oracle.now())
            del self.rebuilds[process]
            rebuild.copy.remove()
        self.trace(f"{process.name} ends: {why}")
        self.end(process)

    def brokers(self, number: int = 0) -> SimulatedBrokers:
        """The connections of a number of the running process."""
        process = self.scheduler.process
        assert process is not None
        key = process, number
        if key not in self.connections:
            self.connections[key] = SimulatedBrokers(self.cluster, process)
        return self.connections[key]

    def forget_brokers(self, number: int | None = None) -> None:
        # As the real one does: no connections that somebody else has made for himself, such as those of the source.
        process = self.scheduler.process
        kept = [key for key in self.connections if key[0] is process and key[1] < _FIRST_OWN]
        for key in [key for key in kept if number in (None, key[1])]:
            self.connections.pop(key).close()

    def new_brokers(self) -> SimulatedBrokers:
        process = self.scheduler.process
        assert process is not None
        brokers = SimulatedBrokers(self.cluster, process)
        self.connections[process, next(self._connection_numbers)] = brokers
        return brokers

    def begin_executor(self) -> Process:
        executor = Process("a lost task")
        self.others.append(executor)
        assert self.scheduler.process is not None
        self.drivers[executor] = self.scheduler.process
        return executor

    def begin_worker(self) -> Process:
        """Makes a process for a task on the job's machine, which is killed."""
        driver = self.scheduler.process
        assert driver is not None
        worker = Process("a worker", driver.ahead_seconds)
        self.executors[worker] = None
        self.drivers[worker] = driver
        seconds = self._of_workers.choice(_KILLED_AFTER_SECONDS)
        self.trace(f"a worker of {driver.name} is killed after {seconds} s")
        self.scheduler.after(seconds, partial(self.end, worker))
        return worker

    def begin_on_cluster(self, attempt: int, is_cut_off: bool) -> Process:
        """Makes an executor on another machine; one that is cut off does not hear of its driver's end.

        For ten minutes an executor does not mind that its driver does not answer (`spark.executor.heartbeat.*`).
        """
        chance = self._of_executors
        executor = Process(f"an executor, attempt {attempt}", chance.choice(_EXECUTORS_AHEAD_SECONDS))
        self.trace(f"{executor.name} begins, {executor.ahead_seconds} s ahead")
        self.executors[executor] = None
        assert self.scheduler.process is not None
        if not is_cut_off:
            self.drivers[executor] = self.scheduler.process
        elif chance.random() < _STANDS_STILL:
            self.scheduler.after(chance.uniform(0.0, 4.0), partial(self.pause, executor))
        return executor

    def task_context(self) -> Any:
        """What `TaskContext.get` returns to the running thread."""
        attempt = self.task_attempts.get(self.scheduler.current, 0)
        return SimpleNamespace(attemptNumber=lambda: attempt)

    def run(self) -> Result:
        """Runs the simulation to its end."""
        began = time.process_time()
        with in_simulation(self):
            try:
                self._run()
            except sim.TooManyEventsError as error:
                self.break_off(f"it goes on for ever: {error}")
            except Exception as error:  # of the simulator: a campaign goes on with the next seed
                self.break_off(f"the simulator: {type(error).__name__}: {error}")
                self.history += traceback.format_exc().splitlines()
            finally:
                self.is_over = True
                for process in self._processes():
                    self.scheduler.kill(process)
                self.backups.remove()
                self.other_system.remove()
                for one in self._live_tables:
                    one.remove()
                self.disk.remove()
        return Result(
            self.plan.seed,
            self.broken,
            self.faults.fallen,
            self.points,
            self.history,
            time.process_time() - began,
            len(self.oracle.expected),
            self.starts,
            self.oracle.accounts.n_rebuilds,
            self.fallen_at,
            self.faults.done,
        )

    def _run(self) -> None:
        plan, scheduler = self.plan, self.scheduler
        # The name that the checkpoint's job would choose at random is a part of what is simulated.
        write_durably(self.checkpoint / "query" / "application", f"delaylake-{plan.seed:012x}")
        per_second = plan.per_second * (1 - self.replication.share)
        settings = self.settings
        if self.source_topics.are_made:
            self.source_topics.begin()
        is_plain = self.another_place.is_made
        producers = self.producers = Producers(
            scheduler,
            self.cluster,
            self.oracle,
            settings,
            plan.seconds,
            per_second,
            self.trace,
            kinds=TAKEN_KINDS if is_plain else KINDS,
            in_chunks=0.0 if is_plain else IN_CHUNKS,
        )
        operators = self.operators = Operators(
            scheduler,
            self.cluster,
            self.oracle,
            settings,
            plan.seconds,
            plan.commands_per_second,
            self.trace,
        )
        producers.on_published = operators.published
        operators.share_elsewhere = self.replication.share_of_commands
        self.replication.begin()
        if self.filters.are_used:
            operators.by_filter, self.filters.send = self.filters.begin, operators.send_made
        for topic, at in producers.keys_from.items():
            if at:  # commands wait when its first message with a schedule key comes
                scheduler.after(at - _CANCELLED_BEFORE_SECONDS, partial(operators.cancel_next, topic))
        self.start()
        scheduler.after(1.0, self._each_second)
        ends_at = plan.seconds + plan.more_seconds
        scheduler.run(lambda: self._has_ended() or scheduler.now > max(ends_at, self.long_pause.faults_end_at))
        self.faults.are_over = True
        self.trace("no more faults")
        self.set_clock(0.0)
        last_due = max(producers.last_due, operators.last_due, self.replication.last_due, self.source_topics.last_due)
        ends_at = max(scheduler.now, last_due / 1000 - EPOCH_SECONDS) + _QUIET_SECONDS
        scheduler.run(lambda: self._has_ended() or self._is_done() or scheduler.now > ends_at)
        if not self._has_ended():
            with self._judging():
                self._check_end()
        if not self._has_ended():
            self.audits.audit_at_end()

    def _has_ended(self) -> bool:
        return bool(self.broken)

    def _n_acknowledged(self) -> int:
        if self.another_place.is_there:  # where not all have come that it counts
            sources = [self.cluster.topic(route.source) for route in self.settings.routes]
            return len(self.oracle.expected) if all(t.n_acknowledged == len(t.entries) for t in sources) else 0
        topics = {message.topic for message in self.oracle.expected.values()} - {CHANGED_TOPIC}
        names = [name for topic in topics for name in self.cluster.partition_names(topic)]
        return sum(self.cluster.topic(name).n_acknowledged for name in names)

    def _is_done(self) -> bool:
        if self.scheduler.now < self._looked_at + 1.0 or not self.replication.is_done:
            return False
        self._looked_at = self.scheduler.now
        with contextlib.suppress(BrokenGuaranteeError):
            self._check_end()
            return True
        return False

    def _check_end(self) -> None:
        self.oracle.check_end(self._n_acknowledged())
        if self.source_topics.are_made:
            self.source_topics.check_end()

    def _limit_destination(self) -> None:
        """An admin gives a destination a publish rate, for a while."""
        chance = self.cluster.chance
        name, rate, seconds = (
            chance.choice(self.destination_topics()),
            chance.choice([1.0, 4.0]),
            chance.choice([5.0, 20.0]),
        )
        self.trace(f"{name.rpartition('/')[2]} takes {rate} messages a second, for {seconds} s")
        self.cluster.limit(self.cluster.topic(name), rate, seconds)

    def _delete_destination(self, tries: int = 50) -> None:
        """Somebody deletes a destination as soon as the job is not behind for it, unless backups are restored."""
        found = [
            self.cluster.topics[name]
            for name in self.destination_topics()
            if name in self.cluster.topics and not self.cluster.is_offline(name)
            if self.subscription_of(name) != ADDED and not self.oracle.is_behind(self.subscription_of(name))
        ]
        if not self.backups.are_made and found:
            topic = self.cluster.chance.choice(found)
            self.trace(f"{topic.name.rpartition('/')[2]} is deleted")
            self.cluster.delete(topic)
        elif tries and not self.faults.are_over:
            self.scheduler.after(0.1, partial(self._delete_destination, tries - 1))

    def _each_second(self) -> None:
        self._versions.append((self.scheduler.now, {name: log.newest for name, log in self.logs.items()}))
        if self.long_pause.is_now:
            self.scheduler.at(self.long_pause.ends_at, self._each_second)
            return
        if self.faults.is_now("broker ends"):
            seconds = self._how_long([0.5, 5.0, 30.0])
            self.trace(f"the broker ends, for {seconds} s")
            self.cluster.crash(seconds)
        if self.cluster.topics and self.faults.is_now("topic offline"):
            topic = self.cluster.chance.choice([self.cluster.topics[name] for name in sorted(self.cluster.topics)])
            seconds = self.cluster.chance.choice([2.0, 10.0, 50.0])
            self.trace(f"no broker has {topic.name.rpartition('/')[2]}, for {seconds} s")
            self.cluster.take_offline(topic, seconds)
        if self.faults.is_now("quota exceeded"):
            name, seconds = (
                self.cluster.chance.choice(self.destination_topics()),
                self.cluster.chance.choice([2.0, 20.0]),
            )
            self.trace(f"{name.rpartition('/')[2]} is over its quota, for {seconds} s")
            self.cluster.fill(self.cluster.topic(name), seconds)
        if self.cluster.has_rates and self.faults.is_now("publish rate"):
            self._limit_destination()
        if self.terminated.are_made:
            self.terminated.each_second()
        if self.cluster.partitions and self.faults.is_now("partition added"):
            self._add_partition()
        if self.faults.is_now("destination deleted"):
            self._delete_destination()
        if self.faults.is_now("checkpoint lost"):
            self.lose_checkpoint()
        if not (self.other_system.are_made or self.backups.are_made) and self.faults.is_now("rebuilt elsewhere"):
            self._rebuild_elsewhere()
        if self.faults.is_now("maintenance") and not self.another_place.is_there:
            self._begin_maintenance()
        if self.other_system.are_made:
            self.other_system.each_second(round((EPOCH_SECONDS + self.scheduler.now) * 1000))
            if self.other_system.may_begin() and self.faults.is_now("import"):
                self.trace("somebody stops the job, and imports")
                self.other_system.is_wanted = True
                self.other_system.n_imports += 1
                self._end_job()
        if self.backups.are_made and not self.another_place.is_there:
            if self.faults.is_now("power loss of a backup"):
                self.backups.lose_power()
            if self.faults.is_now("backup"):
                self.backups.begin()
            may_be_lost = not self.backups.is_lost and self.another_place.may_be_lost
            if may_be_lost and self.backups.has_one() and self.faults.is_now("warehouse lost"):
                self.lose_warehouse()
        if self.source_topics.are_made:
            self.source_topics.each_second()
        if self.faults.is_now("checkpoint put back"):
            self.put_checkpoint_back()
        if self.clocks_jump and self.faults.is_now("clock jumps"):
            ahead = self.scheduler.random.choice([0.0, self.clock_ahead]) + self.scheduler.random.choice(_JUMPS_SECONDS)
            self.trace(f"the clock is {ahead} s ahead")
            self.set_clock(ahead)
        self.scheduler.after(1.0, self._each_second)


@contextlib.contextmanager
def in_simulation(world: World) -> Iterator[None]:
    """Gives the service the simulated world in place of the real one."""
    with contextlib.ExitStack() as stack:
        sim.activate(world.scheduler)
        stack.callback(sim.activate, None)
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, logging.NOTSET)
        for module, name, stand_in in _replaced_names():
            stack.enter_context(mock.patch.object(module, name, stand_in))
        for module, names in _world_names(world).items():
            for name, stand_in in names.items():
                stack.enter_context(mock.patch.object(module, name, stand_in, create=name == "set"))
        yield


_FUTURES = {
    futures.Future: sim.Future,
    futures.wait: sim.wait,
    futures.ThreadPoolExecutor: sim.ThreadPoolExecutor,
}


# Functions of the tables: those of delta-rs, and those that stand in for them.
_OF_TABLES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "CommitProperties": (deltalake.CommitProperties, fake_tables.CommitProperties),
    "Transaction": (deltalake.Transaction, fake_tables.Transaction),
    "write_deltalake": (deltalake.write_deltalake, fake_tables.write_deltalake),
    "query_builder": (query_builder, fake_tables.query_builder),
    "run_sql": (run_sql, fake_tables.run_sql),
    "last_transactions": (last_transactions, lambda table: table.transactions()),
}


def _replaced_names() -> list[tuple[ModuleType, str, Any]]:
    """Clocks, threads and queues of the service's modules."""
    found: list[tuple[ModuleType, str, Any]] = []
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] in _PACKAGES:
            for name, value in list(vars(module).items()):
                if isinstance(value, ModuleType) and value in sim.STAND_INS:
                    found.append((module, name, sim.STAND_INS[value]))
                elif isinstance(value, type) or callable(value):
                    with contextlib.suppress(TypeError):
                        if value in _FUTURES:
                            found.append((module, name, _FUTURES[value]))
    return found


def _world_names(world: World) -> dict[Any, dict[str, Any]]:
    """Everything else outside the process: brokers, tables, disk."""

    def open_table(where: str, name: str, version: int | None = None) -> Any:
        if world.is_rebuilding():
            return real_open_table(where, name, version)
        return fake_tables.Table(world.logs[name], world.point, version)

    def force_version(name: str, version: int) -> None:
        if world.is_rebuilding():
            if isinstance(world.rebuild_of(), Backup | Restore):
                sync_version(name, version)
            world.committed(name)
            return
        world.logs[name].force(version)
        world.point(f"commit {name}: forced")

    def force(path: Path) -> None:
        world.point("fsync")
        (world.backups.disk_of(path) or world.disk).force(path)

    def process_brokers(settings: Settings, number: int = 0) -> SimulatedBrokers:
        return world.brokers(number)

    def of_tables(name: str) -> Callable[..., Any]:
        """A function of the tables: of a rebuild the real one."""
        real, fake = _OF_TABLES[name]
        return lambda *args, **named: (real if world.is_rebuilding() else fake)(*args, **named)

    def create(tables: Tables, *schemas: Any, **named: Any) -> None:
        if not isinstance(world.rebuilds.get(world.scheduler.process), Rebuild | Import | None):  # type: ignore[arg-type]
            create_tables(tables, *schemas, **named)

    def check_epoch_of(tables: Tables, max_age_seconds: float = 0) -> None:
        one = world.rebuilds.get(world.scheduler.process)  # type: ignore[arg-type]
        if isinstance(one, Rebuild | Import):
            one.copy.check_epoch("entries")
        else:
            check_epoch(tables, max_age_seconds)

    def record_not_seen(*args: Any) -> int:
        n = record(*args)
        assert world.scheduler.process is not None
        world.oracle.told_losses.recorded(world.scheduler.process, n)
        return n

    def new_name() -> Any:
        return SimpleNamespace(hex=f"{world.plan.seed:08x}{next(world.names):04x}")

    admin: Callable[..., Admin] = lambda *_: Admin(world.cluster)  # noqa: E731
    new_brokers: Callable[..., SimulatedBrokers] = lambda *_, **__: world.new_brokers()  # noqa: E731
    return {
        **rebuild_names(world),
        **backup_names(world),
        **filter_names(world),
        **world.another_place.names(),
        **maintenance_names(world),
        broker.protocol.building: {"secrets": SimpleNamespace(token_hex=lambda _: f"{next(world.attempts):016x}")},
        **import_names(world),
        **audit_names(world),
        broker.protocol.byte_budget: {"set": sim.OrderedSet},
        streaming.checkpoint.checkpoint: {
            "sync": lambda files: sync(sorted(files)),
            "uuid": SimpleNamespace(uuid4=new_name),
        },
        streaming.crash_recovery: {
            "read_marker": lambda _: None,
            "drop_wrong_hint": lambda _: None,
            "AdminClient": admin,
        },
        streaming.free_memory: {"_resident_pages": lambda: 0},
        streaming.release.driver.releaser: {"AdminClient": admin},
        streaming.release.last_sent: {"AdminClient": admin, "Brokers": new_brokers, "read_schemas": lambda _: []},
        streaming.release.task.producers: {"AdminClient": admin},
        streaming.release.task.process_clients: {
            "brokers": process_brokers,
            "new_brokers": lambda settings: world.new_brokers(),
            "forget_brokers": world.forget_brokers,
        },
        streaming.release.task.sender: {"TaskContext": SimpleNamespace(get=world.task_context)},
        streaming.release.task.send_on_time: {"set": sim.OrderedSet},
        streaming.sinks.outcomes: {
            "connect": lambda _: Client(world.new_brokers()),
            "AdminClient": admin,
            "Brokers": new_brokers,
        },
        streaming.source.intake: {"DiskRoom": lambda *_: SimpleNamespace(why_short=lambda: None)},
        streaming.source.receivers: {
            "connect": lambda _: Client(world.new_brokers()),
            "AdminClient": admin,
            "Brokers": lambda _: world.new_brokers(),
            "SourceWatch": SourceWatch if world.source_topics.are_made else mock.Mock(),
        },
        streaming.source.watch.source_watch: {"AdminClient": admin, "record": record_not_seen},
        warehouse.delta.commits: {
            "CommitProperties": of_tables("CommitProperties"),
            "Transaction": of_tables("Transaction"),
            "_sync_version": force_version,
            "is_object_storage": world.backups.is_object_storage,
        },
        warehouse.delta.tables: {
            "open_table": open_table,
            "write_deltalake": of_tables("write_deltalake"),
            "query_builder": of_tables("query_builder"),
            "run_sql": of_tables("run_sql"),
            "appended": lambda *_: None,
            "last_transactions": of_tables("last_transactions"),
        },
        Tables: {"create": create, "check_epoch": check_epoch_of},
        warehouse.durable: {"_sync": force, "set": sim.OrderedSet},
    }


def _has_added(settings: Settings) -> bool:
    return any(one.name == ADDED for one in settings.routes[0].subscriptions)


def simulate(plan: Plan) -> Result:
    """Runs one simulation."""
    return World(plan).run()
