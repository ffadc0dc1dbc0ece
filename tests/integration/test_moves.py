"""Reschedules, restores and pauses on the running job, across crashes and a lost checkpoint."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pulsar
import pytest
import yaml

from broker.message_ids import MessageRef
from broker.standalone import EmbeddedBroker
from tests.conftest import PROGRAM, RUN_SECONDS
from tests.harness import Collector, Job, now, wait_until
from tracker.wire.delaylake_pb2 import (
    ControlCommand,
    PauseSubscriptions,
    RescheduleMessages,
    RestoreMessages,
    ResumeSubscriptions,
    SkipEntry,
    SkipMessages,
)
from warehouse.audit.accounts import run_audit


class Desk:
    """Sends messages and commands, and reads what became of them in the tables."""

    def __init__(self, client: pulsar.Client, job: Job, topic: str) -> None:
        self._job = job
        self._topic = topic
        self._messages = client.create_producer(topic)
        self._control = client.create_producer(job.settings.control.topic)

    def send(self, text: str, delay_seconds: float) -> MessageRef:
        due = str(now() + int(delay_seconds * 1000 * self._job.pace))
        message_id = self._messages.send(text.encode(), properties={"deliverAt": due})
        return MessageRef(message_id.ledger_id(), message_id.entry_id())

    def command(self, subscriptions: str, messages: list[MessageRef], **operation: Any) -> set[str]:
        """Sends a command and waits for its outcomes; returns their results."""
        request = uuid.uuid4().hex
        entries = [SkipEntry(ledger_id=m.ledger_id, entry_id=m.entry_id) for m in messages]
        for body in operation.values():
            if messages:
                body.entries.extend(entries)
        command = ControlCommand(request_id=request, topic=self._topic, subscriptions=list(subscriptions), **operation)
        self._control.send(command.SerializeToString())
        n = len(subscriptions) * max(1, len(messages))
        return {
            row["result"] for row in wait_until(lambda: self._outcomes(request, n), 20, f"answers\n{self._job.log}")
        }

    def reschedule(self, subscriptions: str, delay_seconds: float, *messages: MessageRef) -> set[str]:
        due = now() + int(delay_seconds * 1000 * self._job.pace)
        return self.command(subscriptions, list(messages), reschedule=RescheduleMessages(deliver_at=due))

    def skip(self, subscriptions: str, *messages: MessageRef) -> set[str]:
        return self.command(subscriptions, list(messages), skip=SkipMessages())

    def restore(self, subscriptions: str, *messages: MessageRef) -> set[str]:
        return self.command(subscriptions, list(messages), restore=RestoreMessages())

    def _outcomes(self, request: str, n: int) -> list[dict[str, Any]]:
        rows = self._job.rows("outcomes", f"SELECT * FROM {{table}} WHERE request_id = '{request}'")
        return rows if len(rows) >= n else []


@pytest.mark.parametrize("crash", ["kill", "lost checkpoint"])
def test_messages_come_when_they_were_moved_to(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector, crash: str
) -> None:
    routes = [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b"}]}]
    job = Job(tmp_path, broker.settings, routes, tracker={"max_seal_interval_millis": 1500, "load_ahead_millis": 9000})
    for subscription in "ab":
        collector.collect(f"{topic}-{subscription}")
    try:
        job.start()
        desk = Desk(pulsar_client, job, topic)
        later, earlier, at_once = desk.send("later", 25), desk.send("earlier", 3600), desk.send("at once", 3600)
        one, restored, gone = desk.send("one of two", 3600), desk.send("restored", 45), desk.send("gone", 45)
        soon, held = desk.send("soon", 12), desk.send("held", 30)
        time.sleep(4)  # sealed by now, all but the soonest

        began, pace = now(), job.pace
        assert desk.reschedule("ab", 38, soon) == {"APPLIED"}
        assert desk.reschedule("ab", 50, later) == {"APPLIED"}
        assert desk.reschedule("ab", 300, earlier) == {"APPLIED"}
        assert desk.reschedule("ab", 40, earlier) == {"APPLIED"}
        assert desk.reschedule("ab", 0, at_once) == {"APPLIED"}
        assert desk.reschedule("a", 35, one) == {"APPLIED"}
        assert desk.skip("ab", restored, gone, one) == {"APPLIED"}
        assert desk.restore("ab", restored) == {"APPLIED"}
        assert desk.restore("a", one) == {"APPLIED"}
        assert desk.reschedule("a", 60, gone) == {"INVALID"}
        assert desk.reschedule("a", 60, at_once) == {"TOO_LATE"}
        assert desk.command("b", [], pause=PauseSubscriptions()) == {"APPLIED"}
        if crash == "kill":
            job.kill9()
            job.start()
        else:
            job.stop()
            # Another number of shards is refused by the checkpoint, and taken by a new one.
            changed = yaml.safe_load(job.file.read_text())
            changed["tracker"]["shards"] = 3
            job.file.write_text(yaml.safe_dump(changed))
            command = [str(PROGRAM), "--config", str(job.file), "run"]
            refused = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)
            assert (refused.returncode, "the checkpoint is of 2 shards" in refused.stderr) == (1, True)
            job.rebuild()
            job.start()
        expected = {"a": {"later", "earlier", "at once", "one of two", "restored", "soon", "held"}, "b": {"at once"}}

        def arrived(subscription: str) -> Counter[str]:
            return Counter(m.payload.decode() for m in collector.received[f"{topic}-{subscription}"])

        wait_until(lambda: set(arrived("a")) >= expected["a"], 90, f"all of a\n{job.log}")
        time.sleep(2)
        assert {s: arrived(s) for s in "ab"} == {s: Counter(expected[s]) for s in "ab"}
        times = {m.payload.decode(): m.received_at - began for m in collector.received[f"{topic}-a"]}
        for text, seconds in {"later": 50, "earlier": 40, "one of two": 35, "soon": 38}.items():
            assert times[text] >= seconds * 1000 * pace, text
        positions = {m.payload.decode(): m.properties["delaylake.messageId"] for m in collector.received[f"{topic}-a"]}
        assert positions["earlier"] == f"{earlier.ledger_id}:{earlier.entry_id}:-1:-1"

        # What was held back comes when it is rescheduled, and the rest when b is resumed, whatever happens then.
        assert desk.reschedule("b", 1, soon) == {"APPLIED"}
        assert desk.reschedule("b", 3600, held) == {"APPLIED"}
        time.sleep(2)
        assert arrived("b") == Counter({"at once"})
        assert desk.command("b", [], resume=ResumeSubscriptions()) == {"APPLIED"}
        if crash == "kill":
            job.kill9()
            job.start()
        assert desk.reschedule("b", 0, held) == {"APPLIED"}
        wait_until(lambda: len(arrived("b")) == 6, 30, f"what was held back\n{job.log}")
        time.sleep(2)
        assert arrived("b") == Counter({"at once", "later", "earlier", "soon", "restored", "held"})
        audit = wait_until(lambda: (a := run_audit(job.settings)).taken_in == 8 and a, 30, "all entries")
        assert audit.is_clean, audit.findings
        assert job.terminate() == 0
    finally:
        job.stop()
