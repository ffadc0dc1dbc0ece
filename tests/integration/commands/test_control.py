"""Cancels and skips on the running job: exactly what they name is cancelled, and they say what they did."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest
from delaylake.commands import Ids
from delaylake.message_ids import Outcome

from admin.control.client import ControlClient
from admin.control.requests import request_factory
from broker.entries.message_ids import MessageRef
from broker.standalone import EmbeddedBroker
from tests.conftest import PROGRAM
from tests.support.service.harness import Collector, Job, now, wait_until
from tracker.commands.kinds import CANCEL, SKIP
from tracker.wire.delaylake_pb2 import (
    CancelDelayedMessage,
    ControlCommand,
    ControlOutcome,
    Result,
    SkipEntry,
    SkipMessages,
)
from warehouse.audit.accounts import run_audit

ANSWER_SECONDS = 90

TOPIC, BATCHED, TYPED = (f"persistent://public/default/control_{name}" for name in ("every", "batched", "typed"))


def ref(message_id: pulsar.MessageId) -> MessageRef:
    return MessageRef(message_id.ledger_id(), message_id.entry_id(), message_id.partition(), message_id.batch_index())


def send_due(client: pulsar.Client, topic: str, dues: list[int]) -> dict[int, tuple[MessageRef, int]]:
    """Sends a message for each due time, ms since the epoch: 0, 1, 2 ...; returns by number its id and that time."""
    ids: dict[int, tuple[MessageRef, int]] = {}
    producer = client.create_producer(topic, block_if_queue_full=True, max_pending_messages=5_000)

    def remember(i: int, due: int):  # type: ignore[no-untyped-def]
        return lambda _, message_id: ids.__setitem__(i, (ref(message_id), due))

    for i, due in enumerate(dues):
        producer.send_async(str(i).encode(), remember(i, due), properties={"deliverAt": str(due)})
    producer.flush()
    wait_until(lambda: len(ids) == len(dues), 60, "ids of all messages")
    producer.close()
    return ids


def cancel_or_skip(message: MessageRef, due: int, is_cancel: bool) -> ControlCommand:
    """A command for one message, without a topic: its cancel, or a skip that does not say when it is due."""
    if is_cancel:
        cancel = CancelDelayedMessage(ledger_id=message.ledger_id, entry_id=message.entry_id, deliver_at=due)
        return ControlCommand(cancel=cancel)
    entry = SkipEntry(ledger_id=message.ledger_id, entry_id=message.entry_id)
    return ControlCommand(skip=SkipMessages(entries=[entry]))


class Case:
    """Sends messages with one producer and remembers who is to get what."""

    def __init__(self, client: pulsar.Client, topic: str, subscriptions: list[str], pace: float) -> None:
        self._producer = client.create_producer(topic)
        self._topic = topic
        self._pace = pace
        self.subscriptions = subscriptions
        self.wanted: dict[str, set[str]] = {}

    def send(self, text: str, delay_seconds: float) -> tuple[MessageRef, int]:
        due = now() + int(delay_seconds * 1000 * self._pace)
        self.wanted[text] = set(self.subscriptions)
        return ref(self._producer.send(text.encode(), properties={"deliverAt": str(due)})), due

    def cancelled(self, text: str, *subscriptions: str) -> None:
        self.wanted[text] -= set(subscriptions or self.subscriptions)


def results(outcomes: Iterator[Outcome]) -> dict[str, str]:
    return {outcome.subscription: outcome.result for outcome in outcomes}


@pytest.fixture(scope="module")
def job(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One for the tests that leave it as it is."""
    shared = [{"name": "a"}, {"name": "b"}]
    routes = [
        {"source": TOPIC, "subscriptions": [*shared, {"name": "x", "type": "Exclusive"}]},
        {"source": BATCHED, "subscriptions": [{"name": "a"}]},
        {"source": TYPED, "subscriptions": shared},
    ]
    tracker = {"max_seal_interval_millis": 1500, "load_ahead_millis": 14_000}
    release = {"lookahead_millis": 4000, "min_lookahead_millis": 4000}
    job = Job(tmp_path_factory.mktemp("job"), broker.settings, routes, tracker=tracker, release=release)
    try:
        yield job.start()
        assert job.terminate() == 0
    finally:
        job.stop()


def test_every_kind_of_command_on_every_kind_of_message(
    pulsar_client: pulsar.Client, job: Job, collector: Collector
) -> None:
    topic, batched = TOPIC, BATCHED
    for subscription in "abx":
        collector.collect(f"{topic}-{subscription}")
    collector.collect(f"{batched}-a")
    client = ControlClient(job.settings, "tester")
    case = Case(pulsar_client, topic, ["a", "b", "x"], job.pace)

    def cancel(message: MessageRef, due: int, *names: str) -> dict[str, str]:
        return results(client.send(topic, CANCEL, Ids([message], [due]), names, ANSWER_SECONDS))

    def skip(message: MessageRef, *names: str) -> dict[str, str]:
        return results(client.send(topic, SKIP, Ids([message]), names, ANSWER_SECONDS))

    # A topic's first message may take longer than commands wait: its schema and its index are asked for.
    case.send("first", 0)
    wait_until(lambda: collector.received[f"{topic}-a"], 30, "the first message")

    kept, kept_due = case.send("kept", 3600)

    message, due = case.send("mutable", 20)
    assert cancel(message, due) == dict.fromkeys("abx", "APPLIED")
    case.cancelled("mutable")
    assert cancel(message, due) == dict.fromkeys("abx", "ALREADY_APPLIED")

    message, due = case.send("one of three", 20)
    assert cancel(message, due, "b") == {"b": "APPLIED"}
    case.cancelled("one of three", "b")
    assert cancel(message, due) == {"a": "APPLIED", "b": "ALREADY_APPLIED", "x": "APPLIED"}
    case.cancelled("one of three")

    message, due = case.send("wrong time", 20)
    assert cancel(message, due + 3_600_000) == dict.fromkeys("abx", "APPLIED")
    case.cancelled("wrong time")

    message, due = case.send("short", 1)
    assert cancel(message, due)["a"] in ("APPLIED", "TOO_LATE")
    del case.wanted["short"]  # whichever came first

    # In advance: the next entry of the same ledger.
    last, _ = case.send("last", 20)
    coming = MessageRef(last.ledger_id, last.entry_id + 1)
    assert cancel(coming, now() + 60_000, "a", "b") == {"a": "WAITING", "b": "WAITING"}
    came, _ = case.send("in advance", 20)
    assert (came.ledger_id, came.entry_id) == (coming.ledger_id, coming.entry_id)
    case.cancelled("in advance", "a", "b")

    nowhere = MessageRef(last.ledger_id, 4_000_000)
    assert cancel(nowhere, now() - 60_000) == dict.fromkeys("abx", "TOO_LATE")
    assert skip(nowhere, "a") == {"a": "NOT_FOUND"}
    assert skip(MessageRef(9_000_000, 0), "b") == {"b": "NOT_FOUND"}
    assert skip(kept, "nobody") == {"nobody": "NOT_FOUND"}
    assert results(client.send("persistent://public/default/none", SKIP, Ids([kept]), [], ANSWER_SECONDS)) == {
        "": "NOT_FOUND"
    }
    assert results(client.send(batched, SKIP, Ids([kept]), ["a"], ANSWER_SECONDS)) == {"a": "NOT_FOUND"}

    assert skip(kept, "x") == {"x": "NOT_ALLOWED"}
    assert skip(kept) == {"a": "APPLIED", "b": "APPLIED", "x": "NOT_ALLOWED"}
    case.cancelled("kept", "a", "b")
    assert cancel(kept, kept_due, "x") == {"x": "APPLIED"}
    case.cancelled("kept", "x")

    # Of a batch: some, one beyond it, then the rest one by one, which is the whole entry.
    producer = pulsar_client.create_producer(
        batched, batching_enabled=True, batching_max_messages=6, batching_max_publish_delay_ms=2_000
    )
    ids: list[MessageRef] = []
    due = now() + int(20_000 * job.pace)
    for i in range(12):
        producer.send_async(f"b{i}".encode(), lambda _, m: ids.append(ref(m)), properties={"deliverAt": str(due)})
    producer.flush()
    wait_until(lambda: len(ids) == 12, 10, "ids of a batch")
    first = [m for m in ids if m.entry_id == ids[0].entry_id]
    assert [m.batch_index for m in first] == list(range(6))
    assert results(client.send(batched, SKIP, Ids([first[2]]), ["a"], ANSWER_SECONDS)) == {"a": "APPLIED"}
    beyond = MessageRef(first[0].ledger_id, first[0].entry_id, -1, 6)
    assert results(client.send(batched, SKIP, Ids([beyond]), ["a"], ANSWER_SECONDS)) == {"a": "INVALID"}
    rest = list(client.send(batched, SKIP, Ids([m for m in first if m.batch_index != 2]), ["a"], ANSWER_SECONDS))
    assert Counter(o.result for o in rest) == {"APPLIED": 5}
    entry = MessageRef(first[0].ledger_id, first[0].entry_id)
    assert results(client.send(batched, SKIP, Ids([entry]), ["a"], ANSWER_SECONDS)) == {"a": "ALREADY_APPLIED"}

    # What is no command is kept, answered where it can be, and stops nothing.
    raw = pulsar_client.create_producer(job.settings.control.topic)
    invalid = ControlCommand(
        request_id="negative", topic=topic, cancel=CancelDelayedMessage(ledger_id=-1, entry_id=2, deliver_at=3)
    ).SerializeToString()
    empty = ControlCommand(request_id="empty", topic=topic).SerializeToString()
    unknown = ControlCommand(request_id="unknown", topic=topic).SerializeToString() + b"\xc2\x0c\x02\x08\x01"
    for data in (b"\xff\xfe garbage", b"", invalid, empty, unknown):
        raw.send(data)
    wait_until(lambda: len(job.rows("rejects")) == 5, 20, f"five rejects\n{job.log}")
    answered = {r["request_id"]: r["result"] for r in job.rows("outcomes")}
    assert [answered[r] for r in ("negative", "empty", "unknown")] == ["INVALID"] * 3

    # A request id counts once: it is answered as the first time, and another command under it is refused.
    def ask(request_id: str, message: MessageRef, due: int) -> dict[str, str]:
        request = next(request_factory(job.settings, "tester", topic).make(CANCEL, Ids([message], [due])))
        request.command.request_id = request_id
        return results(client._exchange([request], ANSWER_SECONDS))

    one, one_due = case.send("one request", 20)
    other, other_due = case.send("other", 20)
    late = now() - 60_000
    for _ in range(2):
        assert ask("once", one, one_due) == dict.fromkeys("abx", "APPLIED")
        assert ask("late", nowhere, late) == dict.fromkeys("abx", "TOO_LATE")
        assert ask("once", other, other_due) == dict.fromkeys("abx", "INVALID")
    case.cancelled("one request")
    assert cancel(one, one_due) == dict.fromkeys("abx", "ALREADY_APPLIED")
    # Also where they come together.
    twice, due = case.send("twice", 20)
    for message in (twice, twice, other):
        command = ControlCommand(request_id="twice", topic=topic, issued_at=now())
        command.cancel.CopyFrom(
            CancelDelayedMessage(ledger_id=message.ledger_id, entry_id=message.entry_id, deliver_at=due)
        )
        raw.send_async(command.SerializeToString(), None)
    raw.flush()
    case.cancelled("twice")
    assert cancel(twice, due) == dict.fromkeys("abx", "ALREADY_APPLIED")

    # Far ahead: sealed, and out of the state when it is cancelled; and loaded from there again.
    sealed, sealed_due = case.send("sealed", 40)
    loaded, loaded_due = case.send("loaded", 24)
    in_bucket = f"SELECT * FROM {{table}} WHERE topic = '{topic}' AND operation = 'DELAY'"
    far = {(m.ledger_id, m.entry_id) for m in (sealed, loaded)}
    wait_until(
        lambda: far <= {(r["ledger_id"], r["entry_id"]) for r in job.rows("delayed_index", in_bucket)}, 10, "a bucket"
    )
    assert cancel(sealed, sealed_due, "a", "b") == {"a": "APPLIED", "b": "APPLIED"}
    case.cancelled("sealed", "a", "b")
    # Long enough before it is handed out, at 4 s, for the command to come in time.
    wait_until(lambda: now() > loaded_due - 11_000, 45 * job.pace, "the segment of a message")
    assert cancel(loaded, loaded_due, "b") == {"b": "APPLIED"}
    case.cancelled("loaded", "b")

    # In flight: handed out already, and it comes.
    message, due = case.send("in flight", 8)
    while now() < due - 150:
        time.sleep(0.01)
    assert cancel(message, due) == dict.fromkeys("abx", "TOO_LATE")

    expected = {s: {text for text, wanted in case.wanted.items() if s in wanted} for s in "abx"}
    arrived = lambda s: {m.payload.decode() for m in collector.received[f"{topic}-{s}"]} - {"short"}  # noqa: E731
    wait_until(lambda: all(expected[s] <= arrived(s) for s in "abx"), 90, f"what nobody took back\n{job.log}")
    wait_until(lambda: len(collector.received[f"{batched}-a"]) >= 6, 20, "the other batch")
    time.sleep(3)
    for s in "abx":
        assert arrived(s) == expected[s]
        assert max(Counter(m.payload for m in collector.received[f"{topic}-{s}"]).values()) == 1
    assert {m.payload for m in collector.received[f"{batched}-a"]} == {f"b{i}".encode() for i in range(6, 12)}
    assert cancel(other, other_due) == dict.fromkeys("abx", "TOO_LATE")

    # What was told again is in the table once.
    again = [("once", 1, one), ("late", 3, nowhere), ("twice", 1, twice)]
    _outcome_topic_and_table_agree(
        pulsar_client,
        job,
        Counter(
            (request, name, at.ledger_id, at.entry_id, -1, Result.Name(result))
            for request, result, at in again
            for name in "abx"
        ),
    )
    client.__exit__()


def _outcome_topic_and_table_agree(
    client: pulsar.Client, job: Job, again: Counter[tuple[str, str, int, int, int, str]]
) -> None:
    reader = client.create_reader(job.settings.control.outcome_topic, pulsar.MessageId.earliest)
    published: Counter[Any] = Counter()
    while reader.has_message_available():
        o = ControlOutcome.FromString(reader.read_next(60_000).data())
        published[o.request_id, o.subscription, o.ledger_id, o.entry_id, o.batch_index, Result.Name(o.result)] += 1
    reader.close()

    def written() -> Counter[tuple[object, ...]]:
        return Counter(
            (r["request_id"], r["subscription"] or "", r["ledger_id"], r["entry_id"], r["batch_index"], r["result"])
            for r in job.rows("outcomes")
        )

    # An outcome is told before it is written.
    wait_until(lambda: published.total() <= (written() + again).total(), 20, "the last outcomes in the table")
    assert published == written() + again


@pytest.mark.long
def test_commands_read_long_before_their_messages_hold(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    n, n_commands = 10_000, 1_000
    routes = [{"source": topic, "subscriptions": [{"name": "a"}]}]
    job = Job(tmp_path, broker.settings, routes, ingest={"max_messages_per_batch": 2_000})
    collector.collect(f"{topic}-a")
    # As a job leaves it that has ended.
    for subscribed in (topic, job.settings.control.topic):
        pulsar_client.subscribe(subscribed, "delaylake", initial_position=pulsar.InitialPosition.Earliest).close()
    try:
        chance = random.Random(3)
        delays = (chance.choice([chance.uniform(1, 10), chance.uniform(10, 40)]) for _ in range(n))
        ids = send_due(pulsar_client, topic, [now() + int(delay * 1000) for delay in delays])
        control = pulsar_client.create_producer(job.settings.control.topic, block_if_queue_full=True)
        cancelled = set(chance.sample(range(n), n_commands))
        for i in cancelled:
            command = cancel_or_skip(*ids[i], is_cancel=i % 2 > 0)
            command.MergeFrom(ControlCommand(request_id=f"r{i}", topic=topic, issued_at=now()))
            control.send_async(command.SerializeToString(), None)
        control.flush()
        first_due = min(due for _, due in ids.values())
        wait_until(lambda: first_due < now(), 10, "the first to be due")

        job.start()
        wait_until(lambda: len(collector.received[f"{topic}-a"]) >= n - n_commands, 150, f"the others\n{job.log}")
        time.sleep(3)
        counts = Counter(int(m.payload) for m in collector.received[f"{topic}-a"])
        assert set(counts) == set(range(n)) - cancelled
        assert max(counts.values()) == 1
        last: dict[Any, Any] = {}
        for row in job.rows("outcomes"):
            last.setdefault(row["request_id"], set()).add(row["result"])
        assert len(last) == n_commands
        assert all("APPLIED" in of_request for of_request in last.values())
        assert job.terminate() == 0
    finally:
        job.stop()


def test_the_commands_of_the_command_line(pulsar_client: pulsar.Client, job: Job) -> None:
    topic = TYPED

    def topics(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return job.command("topics", *arguments, stdin=stdin)

    case = Case(pulsar_client, topic, ["a", "b"], job.pace)
    far = [case.send(f"far {i}", 3600) for i in range(40)]
    (m0, due0), (m1, _), (m2, _) = far[:3]
    position = ["--ledgerId", str(m0.ledger_id), "-e", str(m0.entry_id)]

    done = topics("cancel-delayed-message", topic, *position, "-t", str(due0), "-s", "a", "--output", "json")
    assert done.returncode == 0, done.stderr
    assert [(o["subscription"], o["result"]) for o in json.loads(done.stdout)] == [("a", "APPLIED")]
    again = topics("acknowledgeMessage", topic, *position)
    assert again.returncode == 0, again.stderr
    assert "a ALREADY_APPLIED" in again.stdout
    assert "b APPLIED" in again.stdout
    assert topics("acknowledge-message", topic, *position, "--subscriptionNames", "a,b").returncode == 0

    triplets = ["--messageId-triplet", f"{m1.ledger_id}:{m1.entry_id}", "--messageId-triplet", str(m2)]
    assert topics("skip-messages", topic, "-s", "a", *triplets).returncode == 0
    many = "\n".join(str(m) for m, _ in far[3:])
    skipped = topics("skip-messages", topic, "--subscription", "b", "--from-file", "-", stdin=many)
    assert skipped.returncode == 0, skipped.stderr
    assert "37 of 37 done" in skipped.stdout

    missing = topics("skip-messages", topic, "-s", "a", "--messageId-triplet", "987654321:0")
    assert missing.returncode == 1
    assert missing.stderr.strip() == "error: not done: 987654321:0 a NOT_FOUND the topic has no such message"
    assert topics("skip-messages", topic, "-s", "a").returncode == 2
    assert topics("skip-messages", topic, "-s", "a", "--messageId-triplet", "x").returncode == 2


@pytest.mark.chaos
def test_random_commands_and_crashes_and_a_lost_checkpoint_leave_the_exact_complement(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    n, n_commands, kills = 100_000, 30_000, int(os.environ.get("KILLS", "10"))
    chance = random.Random(int(os.environ.get("SEED", "5")))
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "b"}]}])
    try:
        job.start()
        begin = now() + (60 + 30 * kills) * 1000
        ids = send_due(pulsar_client, topic, [begin + int(chance.uniform(0, 60_000)) for _ in range(n)])
        for subscription in "ab":
            collector.collect(f"{topic}-{subscription}")
        control = pulsar_client.create_producer(job.settings.control.topic, block_if_queue_full=True)
        cancelled: dict[str, set[int]] = defaultdict(set)
        commands = [(chance.randrange(n), chance.choice([["a"], ["b"], ["a", "b"]])) for _ in range(n_commands)]
        for part in range(kills):
            for number, (i, names) in enumerate(commands[part::kills]):
                command = cancel_or_skip(*ids[i], is_cancel=number % 2 > 0)
                command.MergeFrom(ControlCommand(request_id=f"r{part}-{number}", topic=topic, subscriptions=names))
                control.send_async(command.SerializeToString(), None)
                for name in names:
                    cancelled[name].add(i)
            control.flush()
            time.sleep(chance.uniform(0, 4))
            job.kill9()
            if part == kills - 1:
                rebuilt = subprocess.run(
                    [str(PROGRAM), "--config", str(job.file), "rebuild", "--discard-checkpoint"],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert rebuilt.returncode == 0, rebuilt.stderr
                print(rebuilt.stdout)
            job.start()
        print(f"all commands sent {(begin - now()) / 1000:.0f} s before the first is due")
        expected = {s: set(range(n)) - cancelled[s] for s in "ab"}
        wait_until(
            lambda: all(len(collector.received[f"{topic}-{s}"]) >= len(expected[s]) for s in "ab"),
            240,
            f"the complement\n{job.log}",
        )
        time.sleep(3)
        for s in "ab":
            counts = Counter(int(m.payload) for m in collector.received[f"{topic}-{s}"])
            assert set(counts) == expected[s]
            assert max(counts.values()) == 1
        audit = wait_until(lambda: (a := run_audit(job.settings)).taken_in == n and a, 60, f"{n} entries")
        assert audit.is_clean, audit.findings
    finally:
        job.stop()
