"""A job under load, with a broker, an API and consumers of its own, that faults are done to."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pulsar
import yaml

from broker.client import FIRST_SEQUENCE_ID, connect
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from streaming.release.producer_names import NAMES_FILE
from tests.chaos.commands import Commander, Commands, follow_outcomes
from tests.chaos.keyed import Keyed
from tests.chaos.ledger import DELIVERED, ONCE, Ledger, Receivers, number_of, payload, which_of
from tests.chaos.unanswered import stored_messages
from tests.support.service.harness import Api, Job, now, wait_until
from tracker.wire.delaylake_pb2 import ControlCommand
from warehouse.audit.accounts import Audit, run_audit

SOURCE = "persistent://public/default/chaos"
PARTS = "persistent://public/default/chaos_parts"
SECOND = "persistent://public/default/second"
CONTROL = f"{SOURCE}_control"

# For which subscription a destination is; they are all the route's own but the partitioned one.
DESTINATIONS = {"a": f"{SOURCE}-a", "b": PARTS, "c": f"{SECOND}-c"}
OTHER_DESTINATION = f"{SOURCE}-other"  # that "a" may have for a while
_OF_SOURCE = {SOURCE: ["a", "b"], SECOND: ["c"]}

_TICK_SECONDS = 0.05
_BEHIND_SECONDS = 5
_MOST_BEHIND_SECONDS = 90  # messages wait 13 s in the mean, some go to two subscriptions, and each 14th is skipped
_TMPFS_BYTES = 3 << 30
_RETENTION = {"retentionTimeInMinutes": 600, "retentionSizeInMB": -1}

# Of the messages to SECOND each tenth has one of some schedule keys, and each hundredth recurs.
_KEYS = 40
_MODES = ("replace", "keep", "debounce")
_EVERY_SECONDS = 2
_OCCURRENCES = 4
_RETRIED = ("a", "c")  # what of them consumers fail on

T = TypeVar("T", int, str)


class World:
    """Messages to two partitioned sources at a steady rate, commands for some of them, and all that they lead to.

    Args:
        chance: draws times, keys and commands.
        rate: messages a second.
        size: how many messages there can be.
        master: Spark's; None: the default.
    """

    def __init__(self, folder: Path, chance: random.Random, rate: int, size: int, master: str | None = None) -> None:
        self.folder, self.chance, self.rate = folder, chance, rate
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.has_small_disk = _mount(self.disk)
        self.broker = EmbeddedBroker(folder / "broker")
        self.broker.start(port=0, http_port=0)
        self.admin = AdminClient(self.broker.settings, timeout_seconds=30)
        for topic, partitions in ((SOURCE, 2), (SECOND, 1), (PARTS, 3), (CONTROL, 2)):
            self.admin.create_partitioned_topic(topic, partitions)
        # A rebuild finds at the destinations what was sent and not written down, and the end of a run at the sources
        # what the broker has stored: it answers a message that it takes for a repetition of another as if it had.
        self.put("namespaces/public/default/retention", "POST", json=_RETENTION)
        self.job = Job(
            self.disk,
            self.broker.settings,
            [
                {"source": SOURCE, "subscriptions": [{"name": "a"}, {"name": "b", "destination": PARTS}]},
                {"source": SECOND, "subscriptions": [{"name": "c"}]},
            ],
            tracker={"max_seal_interval_millis": 1_500, "load_ahead_millis": 8_000},
            maintain={"interval_millis": 5_000, "min_small_files": 3, "retention_interval_millis": 30_000},
            **({"spark": {"master": master}} if master else {}),
        )
        self.client = connect(self.broker.settings)
        self.ledger = Ledger(DESTINATIONS, size)
        self.commands = Commands()
        self._stopped = threading.Event()
        self._stopped_sending = threading.Event()
        destinations = [*DESTINATIONS.items(), ("a", OTHER_DESTINATION)]
        self.commander = Commander(self.client, CONTROL, self.ledger, self.commands)
        self.keyed = Keyed("c")
        self._to_fail: set[int] = set()  # messages on which consumers fail, once
        self._receivers = Receivers(self.client, self.ledger, destinations, self._consume)
        follow_outcomes(self.client, f"{CONTROL}_outcomes", self.commands, self._stopped)
        self.api: Api | None = None  # until a fault wants one
        self.number = 0
        self._told_before = 0  # how often the runs before this one have told their progress
        self._size = size
        self._producing = threading.Thread(target=self._produce, daemon=True)
        self.problems: list[str] = []

    def start(self) -> None:
        self.job.start()
        self._producing.start()

    def finish_sending(self) -> None:
        self._stopped_sending.set()
        self._producing.join(timeout=120)

    def close(self) -> None:
        self._stopped_sending.set()
        self._stopped.set()
        self._receivers.stop()
        self.job.stop()
        shutil.copytree(self.disk, self.folder / "left", ignore=shutil.ignore_patterns("ballast"))  # the disk goes
        if self.api is not None:
            self.api.kill()
        self.client.close()
        self.admin.close()
        self.broker.kill()
        if self.has_small_disk:
            subprocess.run(["umount", "-l", str(self.disk)], check=False)

    # What faults use.

    def keep_running(self) -> None:
        """Starts the job again where it has ended, as whatever watches over it would."""
        process = self.job.process
        if process is None or process.poll() is not None:
            self.job.stop()  # its children
            self.start_job()

    def start_job(self) -> None:
        """Starts the job; a second time where something that was done to it makes the first one fail."""
        self._told_before = len(self.job.progress)
        try:
            self.job.start()
        except AssertionError:
            self.problems.append(f"the job did not start: {self.job.log[-400:]}")
            self.job.stop()
            self.job.start()

    def workers(self) -> list[psutil.Process]:
        """Spark's Python workers."""
        return [p for p in self._children() if "pyspark.worker" in _command(p) and not _has_children(p)]

    def jvm(self) -> psutil.Process | None:
        return next((p for p in self._children() if "java" in _command(p).partition(" ")[0]), None)

    def executors(self) -> list[psutil.Process]:
        """The JVMs of a cluster's executors."""
        return [p for p in self._children() if "CoarseGrainedExecutorBackend" in _command(p)]

    def maintenance(self) -> psutil.Process | None:
        return next((p for p in self._children() if "jobs.background_maintenance" in _command(p)), None)

    def driver(self) -> psutil.Process:
        assert self.job.process is not None
        return psutil.Process(self.job.process.pid)

    def broker_process(self) -> psutil.Process:
        pid = self.broker.status().pid
        assert pid is not None
        return psutil.Process(pid)

    def put(self, path: str, method: str = "PUT", **content: Any) -> int:
        """A call to the broker's admin API, tried again while the broker is busy; its status."""
        url = f"{self.admin.url}/admin/v2/{path}"
        for _ in range(20):
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.request(method, url, timeout=30, **content)
                if answer.status_code < 500:
                    return answer.status_code
            time.sleep(0.5)
        return 0

    def partitions(self, topic: str) -> int:
        return self.admin.partitions(topic) or 0

    def renamed(self) -> list[list[Any]]:
        """The job's producers that took another name, although nobody else publishes here."""
        file = self.disk / "checkpoint" / NAMES_FILE
        found: list[list[Any]] = json.loads(file.read_text()) if file.exists() else []
        return found

    def edit(self, change: Callable[[list[dict[str, Any]]], None]) -> None:
        """Changes the routes in the settings file."""
        content = yaml.safe_load(self.job.file.read_text())
        change(content["routes"])
        self.job.file.write_text(yaml.safe_dump(content))

    def is_behind(self) -> bool:
        """Whether the senders have more at hand than they send in some seconds, or the job has not said how much."""
        progress = self.job.progress[self._told_before :][-1:]
        return not progress or int(progress[0]["in_flight"]) > _BEHIND_SECONDS * self.rate

    def wait_until_consumed(self, topic: str) -> None:
        """Waits until the consumer has acknowledged all that a topic has."""
        path = topic.replace("://", "/")

        def is_consumed() -> bool:
            stats = httpx.get(f"{self.admin.url}/admin/v2/{path}/stats", timeout=30).json()
            return stats["subscriptions"]["chaos"]["msgBacklog"] == 0

        wait_until(is_consumed, 60, f"{topic} is consumed")

    def copy_checkpoint(self, to: Path) -> None:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.disk / "checkpoint", to)

    # The load.

    def _produce(self) -> None:
        sources = list(_OF_SOURCE)
        producers = {
            topic: self.client.create_producer(
                topic,
                producer_name=f"chaos-{i}",
                batching_enabled=bool(i),
                initial_sequence_id=FIRST_SEQUENCE_ID,
                send_timeout_millis=0,
                block_if_queue_full=True,
                max_pending_messages=20_000,
                max_pending_messages_across_partitions=100_000,
            )
            for i, topic in enumerate(sources)
        }
        began = time.monotonic()
        while not self._stopped_sending.is_set() and self.number < self._size:
            wanted = min(self._size, int((time.monotonic() - began) * self.rate))
            if (
                self.ledger.outstanding(self.number, self.rate) > _MOST_BEHIND_SECONDS * self.rate
            ):  # more would only make it slower
                wanted = self.number
                began = time.monotonic() - self.number / self.rate
            elif wanted - self.number > self.rate:  # after a stop the load goes on, it does not catch up
                began += (wanted - self.number) / self.rate
                wanted = self.number + 1
            while self.number < wanted:
                self._send_one(producers, self.number)
                self.number += 1
            time.sleep(_TICK_SECONDS)
        for producer in producers.values():
            producer.flush()
        self.commander.flush()

    def _send_one(self, producers: dict[str, pulsar.Producer], number: int) -> None:
        delay = self.chance.choice([0.0, self.chance.uniform(0, 3), self.chance.uniform(3, 25)])
        topic = SECOND if number % 5 == 0 else SOURCE
        names = _OF_SOURCE[topic]
        is_keyed, recurs = number % 50 == 5, number % 500 == 10
        is_plain = not (is_keyed or recurs)
        is_asked = is_plain and delay > 8 and number % 7 == 0
        if recurs:
            delay = max(delay, 5.0)  # it begins in time
        if is_plain and not is_asked and delay > 12 and number % 120 in (1, 20):
            self._to_fail.add(number)
        due = now() + int(delay * 1000)
        properties = {"deliverAt": str(due)}

        def sent(result: Any, message_id: Any) -> None:
            # In the client's own thread; an exception here would hang the process.
            with contextlib.suppress(Exception):
                if result != pulsar.Result.Ok:
                    self.problems.append(f"message {number} was not taken: {result}")
                    return
                self.ledger.acknowledge(number)
                if is_keyed:
                    self.keyed.stored(number, message_id)
                if is_asked and message_id.ledger_id() >= 0:
                    self.commander.change(topic, number, message_id, names[0])

        self.ledger.send(number, due, [] if recurs else names)
        if is_keyed:
            place = number // 50 % _KEYS
            mode = _MODES[place % len(_MODES)]
            properties |= {"scheduleKey": f"key-{place}", "scheduleMode": mode, "debounceMax": "1h"}
            self.keyed.send(number, properties["scheduleKey"])
        if recurs:
            properties |= {"repeat": f"@every {_EVERY_SECONDS}s", "repeatTimes": f"{_OCCURRENCES}", "misfire": "all"}
            for name in names:
                for i in range(_OCCURRENCES):
                    at = due + i * _EVERY_SECONDS * 1000
                    self.ledger.expect_further(name, number, (i + 1, 0), at, DELIVERED)
        key = f"{number % 9}" if number % 2 else None
        producers[topic].send_async(payload(number, due), sent, properties=properties, partition_key=key)

    def _consume(self, name: str, message: Any) -> None:
        """What a consumer does with a message that has come for the first time: it fails on some."""
        if name in _RETRIED and which_of(message) == ONCE and (number := number_of(message)) in self._to_fail:
            self.commander.retry(number, name, message)
            self._to_fail.discard(number)

    # The end.

    def settle(self, seconds: float) -> Audit:
        """Waits until all that must come has come; the audit of the tables."""

        def running(condition: Callable[[], bool]) -> bool:
            self.keep_running()
            return condition()

        def is_done() -> bool:
            self._settle()
            return not (self._to_fail or self.commands.unanswered() or self.ledger.missing(self.number))

        self.commander.end_pauses()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: running(lambda: not any(map(self.commander.is_paused, DESTINATIONS))), seconds, "pauses")
        self.problems += [f"{name} is paused" for name in DESTINATIONS if self.commander.is_paused(name)]
        with contextlib.suppress(AssertionError):
            wait_until(lambda: running(is_done), seconds, "answers and deliveries")
        if unanswered := self.commands.unanswered():
            self.commands.were_not_stored(unanswered - self._stored(unanswered, [CONTROL], _request_id))
        self.ledger.wrong += self._settle()
        if lost := self.ledger.lost(self.number):
            self.ledger.was_not_stored(lost - self._stored(lost, _OF_SOURCE, number_of))
        time.sleep(3)  # for what would come twice
        with contextlib.suppress(AssertionError):
            wait_until(lambda: run_audit(self.job.settings).taken_in >= self.ledger.sent, seconds / 2, "entries")
        return run_audit(self.job.settings)

    def _settle(self) -> list[str]:
        """Has the ledger expect what answers and outcomes say by now; returns what is wrong with the latter."""
        self.commands.settle(self.ledger)
        sql = "SELECT subscription, position, superseded_by FROM {table} WHERE result = 'SUPERSEDED'"
        return self.keyed.settle(self.ledger, self.job.rows("outcomes", sql))

    def _stored(self, ids: set[T], topics: Iterable[str], id_of: Callable[[pulsar.Message], T]) -> set[T]:
        """Those of some messages of topics that the broker has stored."""
        return {id_of(message) for topic in topics for message in stored_messages(self.client, topic)} & ids

    def _children(self) -> list[psutil.Process]:
        try:
            return self.job.children()
        except psutil.NoSuchProcess:
            return []


def _request_id(message: pulsar.Message) -> str:
    return ControlCommand.FromString(message.data()).request_id


def _mount(folder: Path) -> bool:
    """A small file system of the folder's own, to fill; False where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={_TMPFS_BYTES}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, check=False, capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _has_children(process: psutil.Process) -> bool:
    try:
        return bool(process.children())
    except psutil.Error:
        return True
