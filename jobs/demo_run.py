"""Runs the demo: a broker, the job, producers, consumers and commands."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pulsar
import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table

from conf.errors import DelayLakeError
from conf.settings import Settings, load_settings
from jobs.audit import run_audit
from jobs.broker import EmbeddedBroker
from jobs.demo_plan import BATCHED, PARTITIONED, PARTITIONS, TOPICS, Fate, Message, Received, plan, verify
from proto.delaylake_pb2 import CancelDelayedMessage, ControlCommand, ControlOutcome, Result, SkipEntry, SkipMessages
from streaming.pulsar_client import AdminClient, connect

_TAKEN_BACK = 0.05  # of the messages that wait long enough
_TAKE_BACK_AHEAD_SECONDS = 6
_PATIENCE_SECONDS = 45


class DemoError(DelayLakeError):
    """The demo can't go on."""


class DemoRun:
    """One run in a folder. A context manager: leaving it ends all processes."""

    def __init__(self, folder: Path, n: int, seconds: int, shows_progress: bool) -> None:
        self._folder = folder
        self._console = Console(stderr=True)
        self._shows_progress = shows_progress
        self._messages = plan(n, seconds)
        self._broker = EmbeddedBroker(folder / "broker")
        self._job: subprocess.Popen[str] | None = None
        self._received: list[Received] = []
        self._outcomes: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._produced = 0
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=5)
        if self._job is not None and self._job.poll() is None:
            self._job.kill()
            self._job.wait()
        self._broker.stop()

    def run(self) -> dict[str, Any]:
        """Runs it all; returns the summary."""
        with self._step("starting a broker"):
            self._broker.start(port=0, http_port=0)
            settings = self._write_settings()
            with AdminClient(settings.pulsar) as admin:
                admin.create_partitioned_topic(PARTITIONED, PARTITIONS)
        with self._step("starting the delivery job (Spark takes a while)"):
            self._start_job()
        client = connect(settings.pulsar)
        try:
            self._consume(client, settings)
            with self._progress():
                self._produce(client)
                asked = self._take_back(client, settings)
                self._wait_for_all(asked)
            with self._step("waiting until all is written down, and checking"):
                audit = self._audit_when_booked(settings)
                status = self._stop_job()
        finally:
            self._stopping.set()
            for thread in self._threads:
                thread.join(timeout=5)
            client.close()
        return self._summary(audit, asked, status)

    def _write_settings(self) -> Settings:
        pulsar_settings = self._broker.settings
        file = self._folder / "settings.yaml"
        routes = [
            {"source": topic, "subscriptions": [{"name": name, "type": kind} for name, kind in subscriptions]}
            for topic, subscriptions in TOPICS.items()
        ]
        content = {
            "pulsar": {"service_url": pulsar_settings.service_url, "admin_url": pulsar_settings.admin_url},
            "warehouse": f"file:{self._folder}/warehouse",
            "checkpoint": f"file:{self._folder}/checkpoint",
            "routes": routes,
        }
        file.write_text(yaml.safe_dump(content))
        return load_settings(file)

    def _start_job(self) -> None:
        program = Path(sys.executable).parent / "delaylake"
        log = open(self._folder / "job.log", "w")  # noqa: SIM115
        self._job = subprocess.Popen(
            [str(program), "--config", str(self._folder / "settings.yaml"), "run"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        assert self._job.stdout is not None
        if self._job.stdout.readline().strip() != "ready":
            last = (self._folder / "job.log").read_text().strip().splitlines()[-1:]
            raise DemoError(f"the job did not start: {''.join(last)}")

    def _stop_job(self) -> int:
        assert self._job is not None
        self._job.terminate()
        return self._job.wait(timeout=30)

    def _consume(self, client: pulsar.Client, settings: Settings) -> None:
        for route in settings.routes:
            targets = [(s.destination, s.name) for s in route.subscriptions]
            for destination, subscription in [*targets, (route.rejects_topic, None)]:
                consumer = client.subscribe(
                    destination, "demo", initial_position=pulsar.InitialPosition.Earliest, receiver_queue_size=2_000
                )
                self._thread(self._collect, consumer, route.source, subscription)

    def _collect(self, consumer: pulsar.Consumer, topic: str, subscription: str | None) -> None:
        while not self._stopping.is_set():
            try:
                message = consumer.receive(500)
            except pulsar.Timeout:
                continue
            now = time.time_ns() // 1_000_000
            self._received.append(
                Received(
                    int(message.properties().get("n", -1)),
                    topic,
                    subscription,
                    message.data(),
                    message.partition_key() or None,
                    message.properties(),
                    message.publish_timestamp(),
                    now,
                )
            )
            consumer.acknowledge_cumulative(message)

    def _produce(self, client: pulsar.Client) -> None:
        producers = {
            topic: client.create_producer(
                topic,
                batching_enabled=topic == BATCHED,
                batching_max_messages=20,
                block_if_queue_full=True,
                message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution,
            )
            for topic in TOPICS
        }
        for message in self._messages:
            now = time.time_ns() // 1_000_000
            properties = dict(message.properties)
            if message.bad_time is not None:
                properties["deliverAt"] = message.bad_time
            elif message.delay:
                message.deliver_at = now + int(message.delay * 1000)
                if message.uses_deliver_after:
                    # From the publish time, which is taken a little later than `now`.
                    properties["deliverAfter"] = str(int(message.delay * 1000))
                else:
                    properties["deliverAt"] = str(message.deliver_at)
            producers[message.topic].send_async(
                message.payload, _remember(message), properties=properties, partition_key=message.key
            )
            self._produced += 1
            if self._produced % 200 == 0:
                time.sleep(0.05)  # 4,000 a second: to be watched
        for producer in producers.values():
            producer.flush()
            producer.close()

    def _take_back(self, client: pulsar.Client, settings: Settings) -> int:
        """Cancels and skips some of the messages that wait; returns how many outcomes are to come."""
        consumer = client.subscribe(
            settings.control.outcome_topic, "demo", initial_position=pulsar.InitialPosition.Earliest
        )
        self._thread(self._collect_outcomes, consumer)
        producer = client.create_producer(settings.control.topic, block_if_queue_full=True)
        soonest = time.time_ns() // 1_000_000 + _TAKE_BACK_AHEAD_SECONDS * 1000
        asked = 0
        waiting = [
            m
            for m in self._messages
            if m.fate is Fate.DELIVERED and m.deliver_at > soonest and m.message_id is not None
        ]
        for message in waiting[:: int(1 / _TAKEN_BACK)]:
            command = _command(message)
            message.taken_back = set(command.subscriptions)
            asked += len(message.taken_back)
            producer.send_async(command.SerializeToString(), None)
        producer.flush()
        return asked

    def _collect_outcomes(self, consumer: pulsar.Consumer) -> None:
        while not self._stopping.is_set():
            try:
                message = consumer.receive(500)
            except pulsar.Timeout:
                continue
            self._outcomes[Result.Name(ControlOutcome.FromString(message.data()).result)] += 1
            consumer.acknowledge_cumulative(message)

    @property
    def _expected(self) -> int:
        return sum(1 if m.fate is Fate.REJECTED else len(m.wanted) for m in self._messages)

    def _wait_for_all(self, asked: int) -> None:
        last_due = max((m.deliver_at for m in self._messages if m.fate is Fate.DELIVERED), default=0)
        deadline = last_due / 1000 + _PATIENCE_SECONDS
        while time.time() < deadline and self._is_running():
            if len(self._received) >= self._expected and self._outcomes.total() >= asked:
                return
            time.sleep(0.2)

    def _is_running(self) -> bool:
        return self._job is not None and self._job.poll() is None

    def _audit_when_booked(self, settings: Settings) -> Any:
        """Audits when the tables have all entries, which is some seconds after the last delivery."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            audit = run_audit(settings)
            if audit.taken_in >= len(self._messages) or time.monotonic() > deadline or not self._is_running():
                return audit
            time.sleep(1)

    def _summary(self, audit: Any, asked: int, status: int) -> dict[str, Any]:
        by_number = {m.number: m for m in self._messages}
        problems = verify(self._messages, self._received)
        if status != 0:
            problems.append(f"the job ended with exit status {status}")
        if audit.taken_in != len(self._messages):
            problems.append(f"the audit knows {audit.taken_in} messages of {len(self._messages)}")
        problems += [f"audit: {kind}: {found['count']}" for kind, found in audit.findings.items()]
        pending = sum(len(m.subscriptions) for m in self._messages if m.fate is Fate.PENDING)
        if sum(row["pending"] for row in audit.counts) != pending:
            problems.append(f"pending in delayed_index: {[row['pending'] for row in audit.counts]}, planned {pending}")
        if self._outcomes["APPLIED"] != asked:
            problems.append(f"{asked} cancels and skips, outcomes {dict(self._outcomes)}")
        planned = [r for r in self._received if r.subscription and by_number[r.number].delay > 5]
        late = np.array([r.received_at - by_number[r.number].deliver_at for r in planned] or [0])
        p50, p99, worst = (float(p) for p in np.percentile(late, [50, 99, 100]))
        return {
            "ok": not problems,
            "scheduled": len(self._messages),
            "topics": len(TOPICS),
            "delivered": sum(1 for r in self._received if r.subscription),
            "taken_back": asked,
            "pending": sum(1 for m in self._messages if m.fate is Fate.PENDING),
            "rejected": sum(1 for r in self._received if r.subscription is None),
            "early": sum(1 for problem in problems if problem.endswith("early")),
            "late_millis": {"p50": p50, "p99": p99, "max": worst},
            "audit": "all accounted for" if audit.is_clean else "NOT all accounted for",
            "problems": problems,
        }

    def _thread(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        if not self._shows_progress:
            yield
        elif self._console.is_terminal:
            with self._console.status(what):
                yield
        else:
            self._console.print(f"{what} ...")
            yield

    @contextmanager
    def _progress(self) -> Iterator[None]:
        """Shows how it goes, in place on a terminal, else a line every five seconds."""
        if not self._shows_progress:
            yield
            return
        done = threading.Event()

        def show() -> None:
            if self._console.is_terminal:
                with Live(self._state(), console=self._console, refresh_per_second=4) as live:
                    while not done.wait(0.25):
                        live.update(self._state())
                    live.update(self._state())
            else:
                while not done.wait(5):
                    self._console.print(" ".join(f"{name} {value}" for name, value in self._numbers().items()))

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=2)

    def _numbers(self) -> dict[str, str]:
        received = self._received[:]
        by_number = self._messages
        late = [
            r.received_at - by_number[r.number].deliver_at
            for r in received[-3000:]
            if r.subscription and by_number[r.number].delay > 5
        ]
        p50, p99 = np.percentile(late, [50, 99]) if late else (0, 0)
        return {
            "scheduled": f"{self._produced:,}",
            "delivered": f"{sum(1 for r in received if r.subscription):,}",
            "rejected": f"{sum(1 for r in received if not r.subscription):,}",
            "taken back": f"{self._outcomes['APPLIED']:,}",
            "to come": f"{max(0, self._expected - len(received)):,}",
            "late p50": f"{p50:.0f} ms",
            "late p99": f"{p99:.0f} ms",
        }

    def _state(self) -> Table:
        table = Table(title="delaylake", show_header=True)
        numbers = self._numbers()
        for name in numbers:
            table.add_column(name, justify="right", min_width=9)
        table.add_row(*numbers.values())
        return table


def _remember(message: Message) -> Any:
    def sent(result: Any, message_id: Any) -> None:
        if message_id is not None:
            message.message_id = (
                message_id.ledger_id(),
                message_id.entry_id(),
                message_id.partition(),
                message_id.batch_index(),
            )

    return sent


def _command(message: Message) -> ControlCommand:
    """A cancel of a message alone in its entry; a skip of one in a batch, or of one subscription's copy."""
    assert message.message_id is not None
    ledger, entry, partition, batch_index = message.message_id
    command = ControlCommand(
        request_id=uuid.uuid4().hex, topic=message.topic, issued_at=time.time_ns() // 1_000_000, issued_by="demo"
    )
    if batch_index < 0:
        command.subscriptions.extend(message.subscriptions)
        command.cancel.CopyFrom(CancelDelayedMessage(ledger_id=ledger, entry_id=entry, deliver_at=message.deliver_at))
    else:
        command.subscriptions.append(message.subscriptions[message.number % len(message.subscriptions)])
        skipped = SkipEntry(ledger_id=ledger, entry_id=entry, batch_indexes=[batch_index])
        if partition >= 0:
            skipped.partition = partition
        command.skip.CopyFrom(SkipMessages(entries=[skipped]))
    return command
