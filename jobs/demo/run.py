"""Runs the demo: a broker, the job, producers, consumers and commands."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pulsar
import yaml
from delaylake.commands import Ids, Position
from delaylake.message_ids import Outcome

from admin.control.client import ControlClient
from broker.client import connect
from broker.entries.message_ids import MessageRef, parse
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from conf.settings import Settings, load_settings
from jobs.child_service import ChildService
from jobs.demo.consumers import Consumers
from jobs.demo.plan import (
    BATCHED,
    PARTITIONED,
    PARTITIONS,
    TOPICS,
    Fate,
    Message,
    Received,
    Stored,
    plan,
    verify,
    verify_stored,
)
from jobs.demo.progress import Progress
from tracker.commands.kinds import CANCEL, SKIP
from tracker.properties import POSITION_SQL
from warehouse.audit.accounts import Audit, run_audit
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries, Sql

_SQL = NamedQueries(__file__, position=Sql(POSITION_SQL))

_BURST, _BURST_SECONDS = 200, 0.05  # 4,000 messages a second, slow enough to watch
_CANCELLED_EACH = 20  # one in so many of the messages that wait long enough is cancelled or skipped
_CANCEL_AHEAD_SECONDS = 6
_PATIENCE_SECONDS = 120

# A message with a shorter delay may be released when it comes in, so that its lateness is the time of a batch.
_PLANNED_SECONDS = 5


class DemoRun:
    """A run of the demo in a folder. A context manager that ends all processes at its end.

    Args:
        folder: folder for the broker's data, the tables, the checkpoint and logs.
        n: the number of messages.
        seconds: the longest delay of messages that the run waits for.
        progress: shows the run's progress.
    """

    def __init__(self, folder: Path, n: int, seconds: int, progress: Progress) -> None:
        self._progress = progress
        self._messages = plan(n, seconds)
        self._settings_file = folder / "settings.yaml"
        self._folder = folder
        self._broker = EmbeddedBroker(folder / "broker")
        self._job = ChildService(["run"], self._settings_file, folder / "job.log")
        self._produced = 0
        self._scheduled_copies = 0
        self._intake_ended_at = 0
        self._outcomes: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _uninterrupted():
            self._job.stop()
            self._broker.stop()

    def run(self) -> dict[str, Any]:
        """Runs the demo; returns the summary that `--output json` prints."""
        with self._progress.step("starting a broker"):
            self._broker.start(port=0, http_port=0)
            settings = self._write_settings()
            with AdminClient(settings.pulsar) as admin:
                admin.create_partitioned_topic(PARTITIONED, PARTITIONS)
        with self._progress.step("starting the delivery job (Spark takes a while)"):
            self._job.start()
            self._job.wait_until_ready()
        with Consumers(settings) as consumers:
            with self._progress.live(lambda: self._numbers(consumers)):
                self._produce(settings)
                self._cancel(settings)
                self._wait_for_all(consumers)
            with self._progress.step("waiting until all is written down, and checking"):
                self._wait_until_durable(settings)
                status = self._job.stop()
                # Messages that are delivered twice would come now.
                time.sleep(1)
        return self._summary(settings, consumers.received, status)

    def _write_settings(self) -> Settings:
        broker = self._broker.settings
        routes = [
            {"source": topic, "subscriptions": [{"name": name, "type": kind} for name, kind in subscriptions]}
            for topic, subscriptions in TOPICS.items()
        ]
        content = {
            "pulsar": {"service_url": broker.service_url, "admin_url": broker.admin_url},
            "warehouse": f"file:{self._folder}/warehouse",
            "checkpoint": f"file:{self._folder}/checkpoint",
            "routes": routes,
        }
        self._settings_file.write_text(yaml.safe_dump(content))
        return load_settings(self._settings_file)

    def _produce(self, settings: Settings) -> None:
        client = connect(settings.pulsar)
        try:
            producers = {topic: _producer(client, topic) for topic in TOPICS}
            for message in self._messages:
                message.schedule(time.time_ns() // 1_000_000)
                producers[message.topic].send_async(
                    message.payload,
                    _remember_position(message),
                    properties=message.sent_properties,
                    partition_key=message.key,
                )
                self._produced += 1
                if message.fate is not Fate.REJECTED:
                    self._scheduled_copies += len(message.subscriptions)
                if self._produced % _BURST == 0:
                    time.sleep(_BURST_SECONDS)
            for producer in producers.values():
                producer.flush()
        finally:
            client.close()
        self._intake_ended_at = time.time_ns() // 1_000_000

    def _cancel(self, settings: Settings) -> None:
        """Cancels and skips some of the messages that wait, each in a way that fits it."""
        chosen: dict[tuple[str, str | None], list[Message]] = {}
        for message in _waiting(self._messages)[::_CANCELLED_EACH]:
            chosen.setdefault((message.topic, _skipped_from(message)), []).append(message)
        with ControlClient(settings, "demo") as control:
            for (topic, subscription), messages in chosen.items():
                # The earlier commands took some time, so that some messages may not wait any more.
                by_entry = {_entry(parse(m.position)): m for m in _waiting(messages)}
                outcomes: Iterator[Outcome]
                if subscription is None:
                    refs = [MessageRef(*entry[:2]) for entry in by_entry]
                    cancelled = Ids(refs, [m.deliver_at for m in by_entry.values()])
                    outcomes = control.send(topic, CANCEL, cancelled, [], _PATIENCE_SECONDS)
                else:
                    skipped = Ids([parse(m.position) for m in by_entry.values()])
                    outcomes = control.send(topic, SKIP, skipped, [subscription], _PATIENCE_SECONDS)
                for outcome in outcomes:
                    self._outcomes[outcome.result] += 1
                    if outcome.is_done:
                        by_entry[_entry(outcome.message)].cancelled.add(outcome.subscription)

    def _wait_for_all(self, consumers: Consumers) -> None:
        last_due = max((m.deliver_at for m in self._messages if m.fate is Fate.DELIVERED), default=0)
        expected = sum(1 if m.fate is Fate.REJECTED else len(m.wanted) for m in self._messages)
        deadline = max(last_due / 1000, time.time()) + _PATIENCE_SECONDS
        while time.time() < deadline and self._job.is_running and len(consumers.received) < expected:
            time.sleep(0.2)

    def _wait_until_durable(self, settings: Settings) -> None:
        """Waits until the tables have all entries: some seconds after the last delivery."""
        tables = Tables(settings.warehouse)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._job.is_running and time.monotonic() < deadline:
            durable = tables.query("entries", "SELECT coalesce(sum(batch_size), 0) AS n FROM entries")["n"][0].as_py()
            if durable >= len(self._messages):
                return
            time.sleep(0.5)

    def _summary(self, settings: Settings, received: Sequence[Received], status: int) -> dict[str, Any]:
        audit = run_audit(settings)
        problems = verify(self._messages, received) + verify_stored(self._messages, _stored(settings))
        problems += [f"audit: {kind}: {found['count']}" for kind, found in audit.findings.items()]
        problems += self._wrong_counts(audit)
        if status != 0:
            problems.append(f"the job ended with exit status {status}")
        pending = [m for m in self._messages if m.fate is Fate.PENDING]
        return {
            "ok": not problems,
            "scheduled": len(self._messages),
            "topics": len(TOPICS),
            "delivered": sum(1 for r in received if r.subscription),
            "taken_back": sum(len(m.cancelled) for m in self._messages),
            "commands": dict(self._outcomes),
            "pending": len(pending),
            "pending_copies": sum(len(m.subscriptions) for m in pending),
            "rejected": sum(1 for r in received if r.subscription is None),
            "early": sum(1 for problem in problems if ": early by " in problem),
            "late_millis": self._lateness(received, 0),
            "late_millis_after_intake": self._lateness(received, self._intake_ended_at + _PLANNED_SECONDS * 1000),
            "audit": "all accounted for" if audit.is_clean else "NOT all accounted for",
            "problems": problems,
        }

    def _wrong_counts(self, audit: Audit) -> Iterator[str]:
        if audit.taken_in != len(self._messages):
            yield f"the audit knows {audit.taken_in} messages of {len(self._messages)}"
        pending = sum(len(m.subscriptions) for m in self._messages if m.fate is Fate.PENDING)
        if (found := sum(row["pending"] for row in audit.counts)) != pending:
            yield f"the audit knows {found} pending, planned {pending}"
        # On a slow machine a command may come too late; its message is then to be delivered.
        unexpected = {name: n for name, n in self._outcomes.items() if name not in ("APPLIED", "TOO_LATE")}
        if unexpected or not self._outcomes["APPLIED"]:
            yield f"cancels and skips were answered {dict(self._outcomes)}"

    def _lateness(self, received: Sequence[Received], due_from: int) -> dict[str, float | None]:
        """Returns the lateness, in ms, of messages due at `due_from` (ms since the epoch) or later: p50, p99 and max.

        Only messages with a delay above _PLANNED_SECONDS count; None: there are none.
        """
        late = [
            r.received_at - m.deliver_at
            for r in received
            if r.subscription and 0 <= r.number < len(self._messages)
            for m in [self._messages[r.number]]
            if m.delay > _PLANNED_SECONDS and m.deliver_at >= due_from
        ]
        if not late:
            return {"p50": None, "p99": None, "max": None}
        p50, p99, worst = (float(p) for p in np.percentile(late, [50, 99, 100]))
        return {"p50": p50, "p99": p99, "max": worst}

    def _numbers(self, consumers: Consumers) -> Mapping[str, str]:
        delivered = consumers.delivered
        cancelled = self._outcomes["APPLIED"]
        late = self._lateness(list(consumers.recent), 0)
        return {
            "scheduled": f"{self._produced:,}",
            "pending": f"{max(0, self._scheduled_copies - delivered - cancelled):,}",
            "delivered": f"{delivered:,}",
            "cancelled": f"{cancelled:,}",
            "rejected": f"{consumers.rejected:,}",
            "late p50": "-" if late["p50"] is None else f"{late['p50']:.0f} ms",
            "late p99": "-" if late["p99"] is None else f"{late['p99']:.0f} ms",
        }


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignores SIGINT and SIGTERM while the block runs, so that a second Ctrl-C does not leave processes running."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _producer(client: pulsar.Client, topic: str) -> pulsar.Producer:
    return client.create_producer(
        topic,
        batching_enabled=topic == BATCHED,
        batching_max_messages=20,
        block_if_queue_full=True,
        message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution,
    )


def _remember_position(message: Message) -> Any:
    def sent(result: Any, message_id: Any) -> None:
        # An exception in here would hang the client.
        if message_id is not None:
            message.position = str(MessageRef.of(message_id))

    return sent


def _waiting(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages that can still be cancelled."""
    soonest = time.time_ns() // 1_000_000 + _CANCEL_AHEAD_SECONDS * 1000
    return [m for m in messages if m.fate is Fate.DELIVERED and m.deliver_at > soonest and m.position]


def _skipped_from(message: Message) -> str | None:
    """Returns the subscription for which to skip a message; None: cancel it for all.

    A cancel is for a whole entry; messages of subscriptions that acknowledge cumulatively can't be skipped.
    """
    skippable = [name for name, kind in TOPICS[message.topic] if kind not in ("Exclusive", "Failover")]
    if message.topic == BATCHED or message.number % 2:
        return skippable[message.number % len(skippable)]
    return None


def _entry(message: Position) -> tuple[int, int, int]:
    """Returns ledger, entry and batch index, with 0 for -1: an outcome may name a single message either way."""
    return message.ledger_id, message.entry_id, max(message.batch_index, 0)


def _stored(settings: Settings) -> Stored:
    tables = Tables(settings.warehouse)
    indexed = tables.query("delayed_index", _SQL("indexed"))
    delivered = tables.query("deliveries", _SQL("delivered"))
    entries = tables.query("entries", _SQL("entries"))
    rejected = tables.query("rejects", _SQL("rejected"))
    return Stored(
        set(indexed["position"].to_pylist()),
        Counter(_pairs(delivered, "position", "subscription")),
        set(rejected["position"].to_pylist()),
        dict(_pairs(indexed, "position", "deliver_at")) | dict(_pairs(delivered, "position", "deliver_at")),
        dict(_pairs(entries, "entry", "publish_time")),
    )


def _pairs(rows: Any, *columns: str) -> Iterator[Any]:
    return zip(*(rows[column].to_pylist() for column in columns), strict=True)
