"""Messages that are passed over are found and named: receivers and their watch on a real broker, without Spark."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pulsar
import pyarrow as pa
import pytest

from broker.client import connect
from broker.jvm.jars import jars
from broker.position import START, Position, SourceTopic
from broker.protocol.brokers import Brokers
from broker.protocol.consumer import EntryConsumer
from broker.protocol.encryption import Decryptor
from broker.protocol.entries import NOT_DECRYPTED
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.topic_questions import TopicQuestions
from broker.standalone import EmbeddedBroker
from conf.settings import Settings
from status.alerts import NO_ADMIN, NOT_SEEN, STANDING, SUBSCRIPTION_RESET, Alerts
from streaming.source.receiving.receiver import Limits, Receiver, ReceiverEvents, TopicAccess
from streaming.source.receiving.unreadable_messages import Acceptance
from streaming.source.watch.source_watch import SourceWatch
from streaming.source.watch.stalled_topics import STANDING_MILLIS
from tests.support.clients import go_client, java_client
from tests.support.clients.java_client import make_key
from tests.support.servers.running_broker import running_broker
from tests.support.service.harness import now, wait_until
from tracker.messages import position_texts
from warehouse.audit.accounts import Audit, run_audit
from warehouse.delta.tables import Tables
from warehouse.schemas import SCHEMAS

SUBSCRIPTION = "delaylake"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """One with transactions, and with ledgers that are short enough for a test to fill."""
    conf = {
        "transactionCoordinatorEnabled": "true",
        "managedLedgerMaxEntriesPerLedger": "5",
        "managedLedgerMinLedgerRolloverTimeMinutes": "0",
    }
    with running_broker(tmp_path_factory.mktemp("broker"), conf) as broker:
        yield broker


@pytest.fixture(scope="module")
def client(broker: EmbeddedBroker) -> Iterator[pulsar.Client]:
    client = connect(broker.settings)
    yield client
    client.close()


class Watched:
    """A source topic with its receiver and its watch, which looks when it is told to."""

    def __init__(
        self, broker: EmbeddedBroker, client: pulsar.Client, topic: str, folder: Path, is_there: bool = True
    ) -> None:
        self.topic = topic
        self.why: str | None = None
        self.troubles = Alerts()
        warehouse = str(folder / "warehouse")
        self.settings = Settings(
            pulsar=broker.settings,
            warehouse=warehouse,
            checkpoint=f"file:{folder}/checkpoint",
            control={"topic": f"{topic}_control"},  # type: ignore[arg-type]
            routes=[{"source": topic, "subscriptions": [{"name": "a"}]}],  # type: ignore[arg-type]
        )
        self.tables = Tables(warehouse)
        self.tables.create()
        self.receivers: list[Receiver] = []
        self.watch = SourceWatch(self.settings, self.troubles, lambda: self.receivers, lambda: self.why, self.tables)
        self.client = client
        self.brokers = Brokers(broker.settings)
        self.admin = AdminClient(broker.settings)
        self._producer: pulsar.Producer | None = None
        self.http = httpx.Client(base_url=f"{broker.settings.admin_url}/admin/v2/{topic.replace('://', '/')}/")
        if is_there:
            self.send()
            self.subscribe().close()

    def run_anew(self) -> None:
        """The job is started again, with the same checkpoint."""
        for receiver in self.receivers:
            receiver.stop()
            receiver._thread.join()
        self.watch.stop()
        self.troubles = Alerts()
        self.watch = SourceWatch(self.settings, self.troubles, lambda: self.receivers, lambda: self.why, self.tables)

    def subscribe(self) -> EntryConsumer:
        return self.brokers.subscribe(self.topic, SUBSCRIPTION, max_bytes=1 << 20, max_messages=1_000)

    def send(self, *texts: str) -> list[Position]:
        if self._producer is None:
            self._producer = self.client.create_producer(self.topic, batching_enabled=False)
        sent = [self._producer.send(text.encode()) for text in texts]
        return [Position(id.ledger_id(), id.entry_id()) for id in sent]

    def post(self, path: str) -> None:
        answer = self.http.post(f"subscription/{SUBSCRIPTION}/{path}")
        assert answer.status_code == 204, answer.text

    def receive(
        self,
        after: Position = START,
        subscribe: Callable[[], Any] | None = None,
        decryptor: Decryptor | None = None,
    ) -> Receiver:
        """Begins to receive, as the job does at its start."""
        source = SourceTopic(self.topic, self.topic, -1)
        follow, side = self.watch.follow(source, after), TopicQuestions(self.admin, SUBSCRIPTION)

        def open_consumer() -> EntryConsumer:
            self.watch.begin(source)
            consumer = (subscribe or self.subscribe)()
            self.watch.begin(source)
            return consumer

        receiver = Receiver(
            source,
            TopicAccess(open_consumer, side),
            after,
            Limits(10_000, 10_000_000),
            Acceptance(0, 5_000_000, decryptor=decryptor),
            ReceiverEvents(on_entries=follow, on_passed=partial(self.watch.passed, source)),
        )
        receiver.start()
        self.receivers = [receiver]
        return receiver

    def receive_to(self, end: Position, after: Position = START, decryptor: Decryptor | None = None) -> Receiver:
        receiver = self.receive(after, decryptor=decryptor)
        assert receiver.wait_for(end, 100)
        return receiver

    def book(self, receiver: Receiver, after: Position, last: Position) -> None:
        """Delivers and books entries, as the job does, and acknowledges them."""
        messages = receiver.rows(after, last)
        n = messages.num_rows
        own = {"subscription": ["a"] * n, "position": position_texts(messages), "sent_at": messages["deliver_at"]}
        for name in ("deliveries", "entries"):
            fields = [
                (f, own.get(f.name, messages[f.name] if f.name in messages.column_names else None))
                for f in SCHEMAS[name]
            ]
            columns = [
                pa.nulls(n, f.type) if c is None else pa.chunked_array([c], f.type) if isinstance(c, list) else c
                for f, c in fields
            ]
            self.tables.append(name, pa.table(columns, schema=SCHEMAS[name]), {})
        receiver.acknowledge(last)

    def audit(self) -> tuple[Audit, tuple[int, int, int, int, int]]:
        """The audit, and what it compared: entries of the broker, durable, not durable, no messages, not seen."""
        audit = run_audit(self.settings)
        assert audit.comparison.problem is None
        [t] = audit.comparison.topics
        assert t.not_known == t.trimmed == 0
        return audit, (t.entries, t.durable, t.not_durable, t.no_message, t.not_seen)

    def rejects(self) -> list[tuple[Position, str, bytes | None]]:
        rows = self.tables.query("rejects", "SELECT * FROM rejects ORDER BY ledger_id, entry_id").to_pylist()
        assert all(row["topic"] == self.topic and row["publish_time"] for row in rows)
        return [(Position(row["ledger_id"], row["entry_id"]), row["reason"], row["payload"]) for row in rows]

    def told(self, kind: str) -> list[str]:
        return [trouble.text for trouble in self.troubles.current() if trouble.kind == kind]

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.stop()
        self.watch.stop()
        self.admin.close()
        if self._producer is not None:
            self._producer.close()
        self.http.close()


@pytest.fixture
def watched(broker: EmbeddedBroker, client: pulsar.Client, topic: str, tmp_path: Path) -> Iterator[Watched]:
    made = Watched(broker, client, topic, tmp_path)
    yield made
    made.close()


def test_what_was_skipped_between_two_entries_is_in_rejects_once_over_ledgers_and_with_its_bytes(
    watched: Watched,
) -> None:
    sent = watched.send(*(f"m{i}" for i in range(14)))
    assert len({p.ledger_id for p in sent}) == 3
    watched.post("skip/9")
    watched.receive_to(sent[-1], after=sent[1])
    watched.watch.decide_gaps()
    found = watched.rejects()
    assert [(p, payload) for p, _, payload in found] == [(sent[i], f"m{i}".encode()) for i in range(2, 9)]
    assert all(reason.startswith("not seen: skipped, cleared or expired") for _, reason, _ in found)
    assert watched.told(NOT_SEEN)[0].startswith("7 entries were not seen, see rejects; the last one")
    assert [t.count for t in watched.troubles.current()] == [7]
    # A run that begins again before the gap finds the same, and writes nothing twice.
    watched.receivers[0].stop()
    watched.receivers[0]._thread.join()
    watched.receive_to(sent[-1], after=sent[1])
    watched.watch.decide_gaps()
    assert watched.rejects() == found


def test_what_was_cleared_at_the_end_is_found_by_looking_and_what_waits_is_not(watched: Watched) -> None:
    first = watched.send("taken in")
    receiver = watched.receive_to(first[-1])
    watched.watch.look(now())
    watched.watch.decide_gaps()
    assert watched.rejects() == []
    receiver.stop()
    receiver._thread.join()
    lost = watched.send("lost 1", "lost 2")
    watched.post("skip_all")
    receiver = watched.receive(after=first[-1])
    wait_until(lambda: receiver._consumer, 20, "the receiver is connected")
    for _ in range(2):
        watched.watch.look(now())
        watched.watch.decide_gaps()
    assert [(p, payload) for p, _, payload in watched.rejects()] == [(lost[0], b"lost 1"), (lost[1], b"lost 2")]
    # What comes then follows on a gap that is known already.
    last = watched.send("taken in, too")
    assert receiver.wait_for(last[0], 100)
    watched.watch.decide_gaps()
    assert len(watched.rejects()) == 2


def test_the_audit_is_of_what_the_broker_took(watched: Watched) -> None:
    sent = watched.send(*(f"m{i}" for i in range(7)))
    receiver = watched.receive_to(sent[-1])
    watched.book(receiver, START, sent[3])
    audit, counts = watched.audit()
    assert (audit.findings, counts) == ({}, (7, 4, 3, 0, 0))

    # Acknowledged by somebody else: by the broker alone it is known that the tables lack something.
    receiver.stop()
    receiver._thread.join()
    watched.post("skip_all")
    audit, counts = watched.audit()
    assert counts == (7, 4, 0, 0, 3)
    lost = [f"{p}:-1:-1" for p in sent[4:]]
    assert [e["position"] for e in audit.findings["not_seen"]["examples"]] == lost
    # The job finds the same three, and goes on; they are between durable entries then.
    receiver = watched.receive(after=sent[3])
    wait_until(lambda: receiver._consumer, 20, "the receiver is connected")
    watched.watch.look(now())
    watched.watch.decide_gaps()
    assert [f"{p}:-1:-1" for p, _, _ in watched.rejects()] == lost
    later = watched.send("later")
    assert receiver.wait_for(later[0], 100)
    wait_until(lambda: receiver.waiting, 5, "the message in a chunk")
    watched.book(receiver, sent[3], later[0])
    audit, counts = watched.audit()
    assert (counts, list(audit.findings)) == ((8, 5, 0, 0, 3), ["not_seen"])
    assert (audit.findings["not_seen"]["count"], audit.taken_in) == (3, 5)


def test_expired_messages_are_found(watched: Watched) -> None:
    first = watched.send("first")
    old = watched.send("old 1", "old 2")
    wait_until(lambda: time.time_ns() // 1_000_000 > now() - 1, 1, "the clock")
    deadline = time.monotonic() + 2.5
    wait_until(lambda: time.monotonic() > deadline, 5, "the messages' age")
    watched.post("expireMessages/2")
    wait_until(lambda: not watched.admin.backlog(watched.topic, SUBSCRIPTION), 20, "they have expired")
    last = watched.send("new")
    watched.receive_to(last[0], after=first[0])
    watched.watch.decide_gaps()
    assert [p for p, _, _ in watched.rejects()] == old


# Of 7 the broker has trimmed the first ones: ledgers have 5.
@pytest.mark.parametrize(
    ("comes_more", "n", "is_there"),
    [
        (False, 7, True),
        (True, 3, False),
        *(
            pytest.param(*others, marks=pytest.mark.chaos)  # simulations have them, too
            for others in itertools.product([False, True], [3, 7], [False, True])
            if others not in ((False, 7, True), (True, 3, False))
        ),
    ],
)
def test_what_expired_while_the_job_was_down_is_found_on_a_topic_that_was_empty_at_its_start(
    broker: EmbeddedBroker,
    client: pulsar.Client,
    topic: str,
    tmp_path: Path,
    is_there: bool,
    n: int,
    comes_more: bool,
) -> None:
    watched = Watched(broker, client, topic, tmp_path, is_there)
    if is_there:
        assert watched.http.delete(f"subscription/{SUBSCRIPTION}").status_code == 204
    try:
        receiver = watched.receive()
        wait_until(lambda: receiver._consumer, 20, "the receiver is connected")
        watched.run_anew()
        lost = watched.send(*(f"lost {i}" for i in range(n)))
        deadline = time.monotonic() + 1.5
        wait_until(lambda: time.monotonic() > deadline, 5, "the messages' age")
        watched.post("expireMessages/1")
        wait_until(lambda: not watched.admin.backlog(watched.topic, SUBSCRIPTION), 20, "they have expired")
        if n > 5:
            wait_until(lambda: lost[0].ledger_id not in _ledgers(watched), 30, "the broker trims a ledger")
        last = watched.send("new") if comes_more else []
        receiver = watched.receive_to(last[0]) if comes_more else watched.receive()
        wait_until(lambda: receiver._consumer, 20, "the receiver is connected")
        watched.watch.look(now())
        watched.watch.decide_gaps()
        found = watched.rejects()
        kept = [position for position in lost if position.ledger_id in _ledgers(watched)]
        counted = [reason for position, reason, _ in found if position not in kept]
        assert {position for position, _, _ in found} >= set(kept)
        if comes_more and len(kept) < n:
            assert [reason.split()[2] for reason in counted] == [f"{n - len(kept)}"], "those that are trimmed"
        assert len(watched.told(NOT_SEEN)) == 1
        if n == 3:
            assert [(p, payload) for p, _, payload in found] == [(p, f"lost {i}".encode()) for i, p in enumerate(lost)]
            assert watched.told(NOT_SEEN)[0].startswith("3 entries were not seen")
    finally:
        watched.close()


def _ledgers(watched: Watched) -> set[int]:
    stats = watched.admin.internal_stats(watched.topic)
    assert stats is not None
    return set(stats.ledgers)


def test_a_subscription_that_was_deleted_or_reset_is_a_trouble(watched: Watched) -> None:
    sent = watched.send("a", "b", "c")
    receiver = watched.receive_to(sent[-1])
    receiver.acknowledge(sent[1])
    wait_until(lambda: watched.admin.backlog(watched.topic, SUBSCRIPTION) == 1, 20, "the acknowledgement")
    began = now()
    for seconds in (0, 60, 120, 180):
        watched.watch.look(began + seconds * 1_000)
    assert watched.told(SUBSCRIPTION_RESET) == []
    watched.run_anew()
    assert watched.http.delete(f"subscription/{SUBSCRIPTION}").status_code == 204
    receiver = watched.receive(after=sent[-1])
    wait_until(lambda: receiver._consumer, 20, "the receiver is connected")
    watched.watch.look(began + 200_000)
    before = Position(sent[0].ledger_id, -1)
    assert watched.told(SUBSCRIPTION_RESET) == [
        f"the job's subscription delaylake went back from {sent[1]} to {before}: it was deleted or reset; 2 entries "
        "come again, and are not delivered again"
    ]
    # It is told once, and again after another reset.
    receiver.acknowledge(sent[-1])
    wait_until(lambda: not watched.admin.backlog(watched.topic, SUBSCRIPTION), 20, "the acknowledgement")
    for seconds in (300, 360, 420):
        watched.watch.look(began + seconds * 1_000)
    watched.post("resetcursor/0")
    watched.watch.look(began + 500_000)
    assert f"from {sent[-1]} to " in watched.told(SUBSCRIPTION_RESET)[0]
    assert "; 3 entries come again" in watched.told(SUBSCRIPTION_RESET)[0]


def test_markers_aborted_messages_and_parts_of_chunks_are_no_findings(broker: EmbeddedBroker, watched: Watched) -> None:
    program = [
        "java",
        "-XX:TieredStopAtLevel=1",
        "-cp",
        f"{jars('broker')}/*",
        str(Path(__file__).with_name("Transactions.java")),
    ]
    words = ["a", "-b", "c", "-d", "-e", "f", "+chunked"]
    first = watched.send("first")
    subprocess.run([*program, broker.settings.service_url, watched.topic, *words], check=True, timeout=120)
    last = watched.send("last")
    receiver = watched.receive_to(last[0], after=first[0])
    rows = receiver.rows(START, last[0])
    assert rows["payload"].to_pylist() == [b"a", b"c", b"f", b"+chunked", b"last"]
    assert watched.watch._gaps, "there is nothing to decide"
    watched.watch.decide_gaps()
    watched.watch.look(now())
    watched.watch.decide_gaps()
    assert (watched.rejects(), watched.troubles.current()) == ([], [])
    watched.book(receiver, START, last[0])
    audit, (entries, durable, not_durable, no_message, _) = watched.audit()
    # The first entry of all was not taken in by this receiver: the tables begin after it.
    assert (audit.findings, durable, not_durable) == ({}, 5, 0)
    assert no_message == entries - durable > 9


@pytest.mark.parametrize("of_client", [java_client, go_client])
def test_chunks_that_came_are_no_findings_also_where_the_broker_cannot_describe_them(
    broker: EmbeddedBroker, watched: Watched, tmp_path: Path, of_client: Any
) -> None:
    """Parts of what is compressed as a whole, or encrypted after that: the broker can't decompress one of them."""
    key = make_key(tmp_path, "own")
    own: Any = str(tmp_path / "own.pem")
    if of_client is go_client:
        go_client.skip_without_it()
    else:
        own = {"own": (tmp_path / "own.pem").as_uri()}
    specs: list[dict[str, Any]] = [
        {
            "topic": watched.topic,
            "size": 1_000_000,
            "chunk": 2_000,
            "compression": kind,
            "name": f"{kind} {key}",
            **more,
        }
        for kind in ("ZLIB", "ZSTD")
        for key, more in {"plain": {}, "encrypted": {"encrypted": own}}.items()
    ]
    first = watched.send("first")
    of_client.produce(broker.settings.service_url, specs)
    last = watched.send("last")
    receiver = watched.receive_to(last[0], first[0], decryptor=Decryptor(key.read_bytes()))
    rows = receiver.rows(first[0], last[0])
    assert rows["reason"].to_pylist() == [None] * 5
    assert not watched.watch._gaps, "the broker is to be asked about chunks"
    watched.watch.look(now())
    watched.watch.decide_gaps()
    assert (watched.rejects(), watched.troubles.current()) == ([], [])
    watched.book(receiver, first[0], last[0])
    audit, (_, durable, not_durable, no_message, not_seen) = watched.audit()
    assert (audit.findings, durable, not_durable, not_seen) == ({}, 5, 0, 0)
    assert no_message >= 4, "there were no chunks"


def test_what_is_encrypted_for_others_is_put_aside_and_holds_up_nothing(
    broker: EmbeddedBroker, watched: Watched, tmp_path: Path
) -> None:
    """In chunks, and in more batches than a consumer has room for."""
    make_key(tmp_path, "strangers")
    encrypted = {"topic": watched.topic, "encrypted": {"key": (tmp_path / "strangers.pem").as_uri()}}
    specs: list[dict[str, Any]] = [
        {**encrypted, "name": f"chunked {i}", "size": 60_000 + 1_000 * i, "chunk": 10_000 + 400 * i} for i in range(20)
    ]
    specs += [{**encrypted, "name": f"batched {i}", "payload": "c2VjcmV0", "batch": 400} for i in range(4_000)]
    watched.send("first")
    ids = java_client.produce(broker.settings.service_url, specs)
    entries = {tuple(map(int, message_id.split(":")[:2])) for message_id in ids.values()}
    last = watched.send("last")
    receiver = watched.receive_to(last[0])
    rows = receiver.rows(START, last[0]).to_pylist()
    found: dict[tuple[int, ...], dict[str, Any]] = {
        (row["ledger_id"], row["entry_id"]): row for row in rows if row["batch_index"] <= 0
    }
    assert sum(row["reason"] == NOT_DECRYPTED for row in rows) > 4_000 + 20, "each message, and each chunk"
    assert [row["payload"] for row in rows if row["reason"] is None] == [b"first", b"last"]
    assert found.keys() > entries
    for position in entries:
        assert found[position]["reason"] == NOT_DECRYPTED
        assert found[position]["payload"]
        assert b"secret" not in found[position]["payload"]
    watched.watch.look(now())
    watched.watch.decide_gaps()
    assert watched.rejects() == []


def test_a_topic_that_takes_nothing_in_stands_with_the_reason(watched: Watched) -> None:
    [end] = watched.send("waits")

    def broken() -> Any:
        raise pulsar.AuthorizationError

    receiver = watched.receive(subscribe=broken)
    wait_until(lambda: receiver.problem is not None, 20, "the problem")
    began = now()
    watched.watch.look(began)
    assert watched.troubles.current() == []
    watched.watch.look(began + STANDING_MILLIS)
    [told] = watched.told(STANDING)
    assert told.startswith("messages wait, and none was taken in: AuthorizationError")
    receiver.stop()

    # It comes in, but no batch takes it; then one does.
    receiver = watched.receive_to(end)
    watched.why = "the senders are behind, with 7 messages in flight"
    watched.watch.look(began + STANDING_MILLIS)
    assert watched.told(STANDING) == [f"messages wait, and none was taken in: {watched.why}"]
    wait_until(lambda: receiver.waiting, 5, "the message in a chunk")
    receiver.take_into_batch(10, 1_000)
    watched.watch.look(began + 2 * STANDING_MILLIS)
    assert watched.troubles.current() == []
    # Taken in, but not acknowledged: that takes until it is durable.
    watched.watch.look(began + 9 * STANDING_MILLIS)
    assert watched.troubles.current() == []


def test_without_an_answer_of_the_broker_a_gap_waits_and_that_is_told(watched: Watched) -> None:
    sent = watched.send("a", "b", "c")
    watched.post("skip/2")
    watched.receive_to(sent[-1], after=sent[0])
    url, watched.watch._admin = (
        watched.watch._admin,
        AdminClient(watched.settings.pulsar.model_copy(update={"admin_url": "http://127.0.0.1:9"})),
    )
    watched.watch.decide_gaps()
    watched.watch.look(now())
    assert "why is not known yet: no answer from" in watched.told(NOT_SEEN)[0]
    assert len(watched.told(NO_ADMIN)) == 1
    assert watched.rejects() == []
    watched.watch._admin.close()
    watched.watch._admin = url
    watched.watch.decide_gaps()
    watched.troubles.end(NO_ADMIN, "http://127.0.0.1:9")
    assert [p for p, _, _ in watched.rejects()] == [sent[1]]
    assert "1 entry was not seen" in watched.told(NOT_SEEN)[0]
