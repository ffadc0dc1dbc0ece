"""Reschedules, restores and pauses on the running job, across a lost checkpoint and crashes."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pulsar
import pytest
import yaml

from broker.entries.message_ids import MessageRef
from broker.standalone import EmbeddedBroker
from tests.conftest import PROGRAM, RUN_SECONDS
from tests.support.service.harness import Collector, Job, now, wait_until
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
        return self.results(self.ask(subscriptions, messages, **operation))

    def ask(self, subscriptions: str, messages: list[MessageRef], **operation: Any) -> tuple[str, int]:
        """Sends a command; returns its request id, and how many outcomes it has."""
        request = uuid.uuid4().hex
        entries = [SkipEntry(ledger_id=m.ledger_id, entry_id=m.entry_id) for m in messages]
        for body in operation.values():
            if messages:
                body.entries.extend(entries)
        command = ControlCommand(request_id=request, topic=self._topic, subscriptions=list(subscriptions), **operation)
        self._control.send(command.SerializeToString())
        return request, len(subscriptions) * max(1, len(messages))

    def results(self, asked: tuple[str, int]) -> set[str]:
        """Waits for the outcomes of a command."""
        found = wait_until(lambda: self._outcomes(*asked), 20, f"answers\n{self._job.log}")
        return {row["result"] for row in found}

    def reschedule(self, subscriptions: str, delay_seconds: float, *messages: MessageRef) -> set[str]:
        return self.results(self.ask_reschedule(subscriptions, delay_seconds, *messages))

    def ask_reschedule(self, subscriptions: str, delay_seconds: float, *messages: MessageRef) -> tuple[str, int]:
        due = now() + int(delay_seconds * 1000 * self._job.pace)
        return self.ask(subscriptions, list(messages), reschedule=RescheduleMessages(deliver_at=due))

    def skip(self, subscriptions: str, *messages: MessageRef) -> set[str]:
        return self.command(subscriptions, list(messages), skip=SkipMessages())

    def _outcomes(self, request: str, n: int) -> list[dict[str, Any]]:
        rows = self._job.rows("outcomes", f"SELECT * FROM {{table}} WHERE request_id = '{request}'")
        return rows if len(rows) >= n else []


@pytest.mark.chaos  # tests/simulation has such crashes in each run
def test_messages_come_when_they_were_moved_to_across_a_lost_checkpoint_and_kills(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    routes: list[dict[str, Any]] = [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b"}]}]
    # While a source topic can't be read, nothing is known to be missing: commands for messages that come later wait.
    namespace = f"public/{uuid.uuid4().hex}"
    routes.append({"source": f"persistent://{namespace}/unread", "subscriptions": [{"name": "x"}]})
    job = Job(tmp_path, broker.settings, routes, tracker={"max_seal_interval_millis": 1500, "load_ahead_millis": 9000})
    for subscription in "ab":
        collector.collect(f"{topic}-{subscription}")
    try:
        job.start()
        desk = Desk(pulsar_client, job, topic)
        later, earlier, at_once = desk.send("later", 25), desk.send("earlier", 3600), desk.send("at once", 3600)
        one, restored, gone = desk.send("one of two", 3600), desk.send("restored", 60), desk.send("gone", 60)
        soon, held = desk.send("soon", 18), desk.send("held", 30)
        again, back = desk.send("again", 3600), desk.send("back", 3600)
        # All but the soonest.
        wait_until(lambda: len(job.rows("delayed_index")) >= 9, 20, f"what is far ahead is sealed\n{job.log}")

        began, pace = now(), job.pace
        asked = [
            desk.ask_reschedule("ab", 52, soon),
            desk.ask_reschedule("ab", 60, later),
            desk.ask_reschedule("ab", 300, earlier),
            desk.ask_reschedule("ab", 54, earlier),
            desk.ask_reschedule("ab", 0, at_once),
            desk.ask_reschedule("a", 50, one),
            desk.ask_reschedule("ab", 300, again),
            desk.ask("ab", [restored, gone, one, back], skip=SkipMessages()),
            desk.ask("ab", [restored], restore=RestoreMessages()),
            desk.ask("a", [one], restore=RestoreMessages()),
        ]
        assert [desk.results(of_one) for of_one in asked] == [{"APPLIED"}] * len(asked)
        refused = [desk.ask_reschedule("a", 60, gone), desk.ask_reschedule("a", 60, at_once)]
        assert [desk.results(of_one) for of_one in refused] == [{"INVALID"}, {"TOO_LATE"}]
        assert desk.command("b", [], pause=PauseSubscriptions()) == {"APPLIED"}
        to_skip, to_move = (MessageRef(back.ledger_id, back.entry_id + n) for n in (1, 2))
        assert desk.skip("ab", to_skip) == {"WAITING"}
        assert desk.reschedule("ab", 56, to_move) == {"WAITING"}

        job.stop()
        # Another number of shards is refused by the checkpoint, and taken by a new one.
        changed = yaml.safe_load(job.file.read_text())
        changed["tracker"]["shards"] = 3
        job.file.write_text(yaml.safe_dump(changed))
        command = [str(PROGRAM), "--config", str(job.file), "run"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)
        assert (done.returncode, "the checkpoint is of 2 shards" in done.stderr) == (1, True)
        httpx.put(f"{broker.settings.admin_url}/admin/v2/namespaces/{namespace}").raise_for_status()
        job.rebuild()
        assert (desk.send("skipped", 5), desk.send("moved", 3600)) == (to_skip, to_move)
        job.start()
        # On what a rebuild found, and then a kill.
        asked = [
            desk.ask_reschedule("ab", 15, again),
            desk.ask("ab", [back], restore=RestoreMessages()),
            desk.ask_reschedule("ab", 12, back),
        ]
        assert [desk.results(of_one) for of_one in asked] == [{"APPLIED"}] * 3
        job.kill9()
        changed["tracker"]["shards"] = "auto"  # as the checkpoint has it
        job.file.write_text(yaml.safe_dump(changed))
        job.start()
        come = {"later", "earlier", "at once", "one of two", "restored", "soon", "held", "again", "back", "moved"}
        expected = {"a": come, "b": {"at once"}}

        def arrived(subscription: str) -> Counter[str]:
            return Counter(m.payload.decode() for m in collector.received[f"{topic}-{subscription}"])

        wait_until(lambda: set(arrived("a")) >= expected["a"], 90 * pace, f"all of a\n{job.log}")
        time.sleep(2)
        assert {s: arrived(s) for s in "ab"} == {s: Counter(expected[s]) for s in "ab"}
        times = {m.payload.decode(): m.received_at - began for m in collector.received[f"{topic}-a"]}
        for text, seconds in {"later": 60, "earlier": 54, "one of two": 50, "soon": 52, "moved": 56}.items():
            assert times[text] >= seconds * 1000 * pace, text
        positions = {m.payload.decode(): m.properties["delaylake.messageId"] for m in collector.received[f"{topic}-a"]}
        assert positions["earlier"] == f"{earlier.ledger_id}:{earlier.entry_id}:-1:-1"

        told = job.rows(
            "outcomes", f"SELECT * FROM {{table}} WHERE entry_id IN ({to_skip.entry_id}, {to_move.entry_id})"
        )
        assert Counter((row["entry_id"], row["result"]) for row in told) == {
            (ref.entry_id, result): 2 for ref in (to_skip, to_move) for result in ("WAITING", "APPLIED")
        }

        # What was held back comes when it is rescheduled, and the rest when b is resumed, whatever happens then.
        assert desk.reschedule("b", 1, soon) == {"APPLIED"}
        assert desk.reschedule("b", 3600, held) == {"APPLIED"}
        time.sleep(2)
        assert arrived("b") == Counter({"at once"})
        assert desk.command("b", [], resume=ResumeSubscriptions()) == {"APPLIED"}
        job.kill9()
        job.start()
        assert desk.reschedule("b", 0, held) == {"APPLIED"}
        wait_until(lambda: len(arrived("b")) == 9, 30, f"what was held back\n{job.log}")
        time.sleep(2)
        assert arrived("b") == Counter(come - {"one of two"})
        audit = wait_until(lambda: (a := run_audit(job.settings)).taken_in == 12 and a, 30, "all entries")
        assert audit.is_clean, audit.findings
        assert job.terminate() == 0
    finally:
        job.stop()
