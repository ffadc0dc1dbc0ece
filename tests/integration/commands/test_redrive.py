"""Dead letters are sent back by a filter, each once, also where the process was killed on its way."""

from __future__ import annotations

import base64
import json
import random
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar
import pytest

from admin.control.async_client import ControlUnavailableError
from admin.control.bulk import TooManyError
from admin.control.dead_letters import DeadLetterFilter
from admin.control.redrive import Redrive, RedriveBusyError
from broker import dead_letter_subscription
from broker.client import NoAnswerError
from broker.dead_letter_subscription import DeadLetterConsumer
from broker.protocol.brokers import Brokers
from broker.protocol.building import OutgoingMessage, batch_entry, encoded_property, large_message, single_entry
from broker.protocol.reading import plain_messages, read_entries
from broker.protocol.wire.pulsar_pb2 import ZLIB
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from conf.settings import Settings
from tests.attack.entries import Sender
from tests.support.clients.raw_producer import RawProducer, entry, metadata
from tests.support.service.harness import Job, now, wait_until
from warehouse.message_schemas import MessageSchema, on_the_wire, version_number

N = 250  # more than two chunks


class DeadLetters:
    """A topic of dead letters of two subscriptions, as the job sends them, and with one that somebody else sent."""

    def __init__(self, broker: EmbeddedBroker, client: pulsar.Client, topic: str, folder: Path) -> None:
        self.client, self.topic = client, topic
        routes = [{"source": topic, "subscriptions": [{"name": s, "destination": f"{topic}-d"} for s in "ab"]}]
        self.job = Job(folder, broker.settings, routes)  # never started
        self.settings = self.job.settings
        brokers = Brokers(broker.settings)
        dead_letter_subscription.ensure_subscription(brokers, f"{topic}-d-dlq")
        brokers.close()
        producer = client.create_producer(f"{topic}-d-dlq", producer_name="job")
        producer.send(b"somebody else's")
        for i in range(N):
            properties = self.properties(7, i) | {
                "n": str(i % 5),
                "delaylake.reasons": f'["first", "no {i % 2}"]',
                "delaylake.subscription": "a" if i % 10 else "b",
            }
            producer.send_async(
                f"letter {i}".encode(), lambda *_: None, properties=properties, partition_key=f"k{i % 3}"
            )
        producer.flush()
        producer.close()

    def properties(self, ledger_id: int, entry_id: int) -> dict[str, str]:
        """What the job gives a dead letter of subscription a."""
        return {
            "delaylake.source": self.topic,
            "delaylake.messageId": f"{ledger_id}:{entry_id}:-1:-1",
            "delaylake.deliverAt": "1000",
            "delaylake.attempt": "6",
            "delaylake.reasons": "[]",
            "delaylake.subscription": "a",
        }

    def redrive(self, request_id: str = "r", max_matched: int = 10_000, **wanted: Any) -> Redrive:
        asked = DeadLetterFilter(subscription="a", **wanted)
        return Redrive(self.settings, "tester", self.topic, asked, request_id, max_matched)

    def sent_back(self) -> list[pulsar.Message]:
        reader, found = self.client.create_reader(self.topic, pulsar.MessageId.earliest), []
        while reader.has_message_available():
            found.append(reader.read_next(60_000))
        reader.close()
        return found


@pytest.fixture
def letters(broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path) -> DeadLetters:
    return DeadLetters(broker, pulsar_client, topic, tmp_path)


def expected(is_meant: Callable[[int], bool]) -> list[str]:
    return [f"7:{i}:-1:-1" for i in range(N) if i % 10 and is_meant(i)]


def retry_of(messages: list[pulsar.Message]) -> list[str]:
    return [message.properties()["retryOf"] for message in messages]


def test_what_matches_goes_back_once_and_the_others_stay(letters: DeadLetters) -> None:
    found = letters.redrive(reason="no 1", properties={"n": "3"}).dry_run()
    meant = expected(lambda i: i % 2 == 1 and i % 5 == 3)
    assert [one["messageId"] for one in found["messages"]] == meant
    assert (found["matched"], found["messages"][0]["reasons"]) == (len(meant), ["first", "no 1"])
    with pytest.raises(TooManyError, match=f"{len(meant)} dead letters match, and at most 2 may"):
        letters.redrive(max_matched=2, reason="no 1", properties={"n": "3"}).run()
    assert letters.sent_back() == []

    counts = {"matched": len(meant), "redriven": len(meant), "alreadyRedriven": 0, "refused": 0, "unreadable": 0}
    assert letters.redrive(reason="no 1", properties={"n": "3"}).run() == counts | {"requestId": "r"}
    back = letters.sent_back()
    assert retry_of(back) == meant
    assert back[0].properties() == {
        "n": "3",
        "retryOf": meant[0],
        "retrySubscription": "a",
        "redriveRequest": "r",
        "redriveBy": "tester",
    }
    first = int(meant[0].split(":")[1])
    assert (back[0].data(), back[0].partition_key()) == (f"letter {first}".encode(), f"k{first % 3}")

    # What is left are those of the other keys, and of the other subscription.
    assert letters.redrive("r2", key="k1", message_ids=["7:1", "7:4:-1", "7:5", "7:10"]).run()["redriven"] == 2
    assert letters.redrive("r3").run()["redriven"] == len(expected(lambda _: True)) - len(meant) - 2
    assert sorted(retry_of(letters.sent_back())) == sorted(expected(lambda _: True))
    assert letters.redrive("r4").run()["matched"] == 0
    # Over the command line, for the other subscription.
    done = letters.job.command("topics", "redrive", letters.topic, "-s", "b", "--yes")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"{N // 10} dead letters matched"), done.stderr
    assert len(letters.sent_back()) == N


FIELDS = [{"name": "n", "type": "int"}, {"name": "text", "type": "string", "default": ""}]


@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
def test_each_goes_back_with_its_version_of_the_schema(letters: DeadLetters, kind: str) -> None:
    admin = AdminClient(letters.settings.pulsar)
    first, second = (
        MessageSchema(kind, json.dumps({"type": "record", "name": "Order", "fields": FIELDS[:n]}), {}) for n in (1, 2)
    )
    for schema in (first, second):
        admin.register_schema(letters.topic, schema.type, schema.definition, {})
    brokers = Brokers(letters.settings.pulsar)
    # The topic of dead letters has got to know them in another order.
    expected = []
    for i, (schema, version) in enumerate([(second, 1), (first, 0)] * 2):
        admin.register_schema(f"{letters.topic}-d-dlq", schema.type, schema.definition, {})
        producer = brokers.produce(f"{letters.topic}-d-dlq", f"typed {i}", on_the_wire(schema))
        expected.append((b"\x02" if version == 0 else b"\x02\x02x", version))
        given = letters.properties(8, i) | {"delaylake.reasons": '["typed"]'}
        sent = OutgoingMessage(1, expected[-1][0], [encoded_property(*one) for one in given.items()])
        producer.send(single_entry(sent, producer.name, now(), producer.schema_version))
        wait_until(lambda producer=producer: not producer.n_pending, 20, "it has arrived")  # type: ignore[misc]
        producer.close()(5)
    brokers.close()
    admin.close()
    assert letters.redrive(reason="typed").run()["redriven"] == 4
    back = letters.sent_back()
    # Each version has a producer of its own.
    versions = [version_number(bytes(m._message.schema_version(), "utf-8")) for m in back]
    assert sorted(zip((m.data() for m in back), versions, strict=True)) == sorted(expected)


@pytest.mark.parametrize("again", ["r", "another"])
def test_what_was_killed_on_its_way_is_gone_on_with(
    letters: DeadLetters, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    settle, n = Redrive._settle, 0

    def killed(self: Redrive, consumer: Any, pending: list[Any], counts: Any) -> None:
        nonlocal n
        n += 1
        if n == 2:  # the broker has them, and they are not acknowledged
            settle(self, consumer, [], counts)
            raise NoAnswerError("killed")
        settle(self, consumer, pending, counts)

    with monkeypatch.context() as patched:
        patched.setattr(Redrive, "_settle", killed)
        with pytest.raises(ControlUnavailableError, match="killed"):
            letters.redrive().run()
    assert len(letters.sent_back()) == 200
    counts = letters.redrive(again).run()
    back = retry_of(letters.sent_back())
    assert sorted(set(back)) == sorted(expected(lambda _: True)), "none is lost"
    if again == "r":
        assert len(back) == len(set(back))
        assert (counts["alreadyRedriven"], counts["redriven"]) == (100, len(back) - 200)
    else:
        assert len(back) == len(set(back)) + 100


def test_of_two_at_once_one_is_refused(letters: DeadLetters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("admin.control.redrive._BUSY_SECONDS", 0.2)
    brokers = Brokers(letters.settings.pulsar)
    with AdminClient(letters.settings.pulsar) as admin:
        consumer = DeadLetterConsumer(brokers, admin, f"{letters.topic}-d-dlq", 0)
        with pytest.raises(RedriveBusyError, match="another re-drive"):
            letters.redrive().run()
        consumer.close()
    brokers.close()
    wait_until(lambda: letters.redrive().dry_run()["matched"] == len(expected(lambda _: True)), 30, "all of them")


def test_without_a_topic_of_dead_letters_there_is_nothing(letters: DeadLetters) -> None:
    routes = [{"source": letters.topic, "subscriptions": [{"name": "a", "destination": f"{letters.topic}-none"}]}]
    letters.settings = Settings.model_validate(letters.settings.model_dump(exclude={"routes"}) | {"routes": routes})
    assert letters.redrive().run()["matched"] == 0


def test_what_lies_among_them_stays_and_stops_nothing(letters: DeadLetters) -> None:
    """Pulsar's C++ client ends its process at such entries, and it fetches what comes while it is at work."""
    is_over = threading.Event()
    raw = RawProducer(letters.settings.pulsar.service_url, f"{letters.topic}-d-dlq")
    kinds = Sender(random.Random(7)).kinds

    def attack() -> None:
        for make in kinds:
            data, n_messages = make()
            raw.send(data, next(ids), n_messages)
        uuid = b"%d" % next(ids)
        for which in range(2):
            number = next(ids)
            lies = {"uuid": uuid, "n_chunks": 2, "chunk_id": which, "chunked_size": 1}
            raw.send(entry(metadata(number, now(), **lies), bytes(1 << 20)), number)
        raw.flush()

    def go_on() -> None:
        for _ in range(10):
            if is_over.wait(0.3):
                break
            attack()

    ids = iter(range(1, 10**9))
    for _ in range(3):
        attack()
    with_key = letters.client.create_producer(f"{letters.topic}-d-dlq")
    with_key.send(b"last", properties=letters.properties(7, N + 1), partition_key="k")
    with_key.close()
    beside = threading.Thread(target=go_on)
    beside.start()
    try:
        counts = letters.redrive().run()
        again = letters.redrive().run()
    finally:
        is_over.set()
        beside.join()
        raw.close()
    meant = [*expected(lambda _: True), f"7:{N + 1}:-1:-1"]
    assert (counts["matched"], counts["redriven"], counts["refused"]) == (len(meant), len(meant), 0)
    assert counts["unreadable"] >= 9
    assert (again["matched"], again["redriven"]) == (0, 0)
    assert retry_of(letters.sent_back()) == meant


def test_what_can_not_go_back_stays_and_the_others_go(letters: DeadLetters, caplog: pytest.LogCaptureFixture) -> None:
    """Dead letters that somebody forged: of no partition, with a place in its batch that has no sequence id."""
    brokers = Brokers(letters.settings.pulsar)
    producer = brokers.produce(f"{letters.topic}-d-dlq", "forged")
    nowhere = letters.properties(9, 0) | {"delaylake.messageId": "9:0:2147483647:-1"}
    messages = [OutgoingMessage(i + 1, b"x") for i in range(1_500)]
    forged = [encoded_property(*one) for one in letters.properties(9, 1_200).items()]
    messages[1_200] = messages[1_200]._replace(properties=forged)
    encoded = [encoded_property(*one) for one in nowhere.items()]
    producer.send(batch_entry(messages, producer.name, now()))
    producer.send(single_entry(OutgoingMessage(2_000, b"x", encoded), producer.name, now()))
    wait_until(lambda: not producer.n_pending, 20, "they have arrived")
    producer.close()(5)
    brokers.close()
    counts = letters.redrive().run()
    meant = expected(lambda _: True)
    assert (counts["matched"], counts["redriven"], counts["refused"]) == (len(meant) + 2, len(meant), 2)
    assert retry_of(letters.sent_back()) == meant
    assert "has no partition 2147483647" in caplog.text
    assert "too large a number to be re-driven" in caplog.text
    # Those before it in its entry, too, are still there under the same request id.
    assert letters.redrive().run() == counts | {"matched": 2, "redriven": 0, "refused": 2}
    assert retry_of(letters.sent_back()) == meant


def test_one_that_an_entry_can_not_hold_goes_back_in_chunks_and_one_that_may_be_there_in_part_stays(
    letters: DeadLetters, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers = Brokers(letters.settings.pulsar)
    producer = brokers.produce(f"{letters.topic}-d-dlq", "large")
    payloads = [bytes([n]) * n_bytes for n, n_bytes in enumerate((6_000_000, 7_000_000, 100))]
    for n, payload in enumerate(payloads):
        own = letters.properties(8, n) | {"delaylake.reasons": '["large"]'}
        message = OutgoingMessage(n + 1, payload, [encoded_property(*one) for one in own.items()])
        producer.send(large_message(message, producer.name, now()))
    wait_until(lambda: not producer.n_pending, 20, "they have arrived")
    producer.close()(5)
    brokers.close()

    first = letters.redrive("first", reason="large", message_ids=["8:0"]).run()
    assert (first["matched"], first["redriven"], first["refused"]) == (1, 1, 0)
    with monkeypatch.context() as patched:
        patched.setattr(DeadLetterConsumer, "acknowledge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            letters.redrive("cut off", reason="large", message_ids=["8:1", "8:2"]).run()
    runs = [letters.redrive("cut off", reason="large", message_ids=["8:1", "8:2"]).run() for _ in range(3)]
    assert [run["refused"] for run in runs] == [1, 1, 1], "also when a later one is there"
    assert sum(run["redriven"] + run["alreadyRedriven"] for run in runs) == 1
    assert "may have some of them only" in caplog.text
    assert letters.redrive("left", reason="large").dry_run()["matched"] == 1
    assert [message.data() for message in letters.sent_back()] == payloads


ODD: dict[str, dict[str, Any]] = {
    "plain": {},
    "null": {"payload": None},
    "empty": {"payload": b""},
    "text key": {"key": "kü".encode()},
    "bytes key": {"key": base64.b64encode(b"\xff\0\xfe"), "is_key_base64": True},
    "ordering key": {"ordering_key": b"\xff\xfe\0"},
    "event time": {"event_time": 1_700_000_000_123},
}


def test_each_goes_back_as_it_was_alone_in_a_batch_and_in_chunks(letters: DeadLetters) -> None:
    brokers = Brokers(letters.settings.pulsar)
    producer = brokers.produce(f"{letters.topic}-d-dlq", "odd")

    def outgoing(name: str, number: int) -> OutgoingMessage:
        own = letters.properties(8, number) | {"name": name, "delaylake.reasons": '["odd"]'}
        encoded = [encoded_property(*one) for one in own.items()]
        return OutgoingMessage(number, **{"payload": name.encode(), "properties": encoded} | ODD[name])

    for i, name in enumerate(ODD, 1):
        producer.send(single_entry(outgoing(name, i), producer.name, now()))
    producer.send(batch_entry([outgoing(name, i) for i, name in enumerate(ODD, 101)], producer.name, now()))
    wait_until(lambda: not producer.n_pending, 20, "they have arrived")
    producer.close()(5)
    raw = RawProducer(letters.settings.pulsar.service_url, f"{letters.topic}-d-dlq")
    in_chunks = letters.properties(8, 201) | {"name": "chunks", "delaylake.reasons": '["odd"]'}
    pairs = [{"key": name.encode(), "value": value.encode()} for name, value in in_chunks.items()]
    whole = zlib.compress(b"chunks")
    for chunk_id in range(2):
        part = {"uuid": b"u", "n_chunks": 2, "chunk_id": chunk_id, "chunked_size": len(whole), "properties": pairs}
        described = metadata(chunk_id + 1, now(), compression=ZLIB, uncompressed_size=6, **part)
        raw.send(entry(described, whole[5 * chunk_id :][: 5 if chunk_id == 0 else None]), chunk_id + 1)
    raw.flush()
    raw.close()

    done = letters.redrive("all", reason="odd").run()
    n = 2 * len(ODD) + 1
    assert (done["matched"], done["redriven"], done["unreadable"]) == (n, n, 0)
    back = {}
    for received in read_entries(brokers, letters.topic):
        [message] = plain_messages(received)
        back[dict(message.properties)[b"retryOf"].decode()] = message
    brokers.close()
    sent = [(f"8:{first + i}:-1:-1", name) for first in (1, 101) for i, name in enumerate(ODD)]
    for ref, name in [*sent, ("8:201:-1:-1", "chunks")]:
        plain = {"payload": name.encode(), "key": None, "is_key_base64": False, "ordering_key": None, "event_time": 0}
        assert {field: getattr(back[ref], field) for field in plain} == plain | ODD.get(name, {})
        assert dict(back[ref].properties)[b"name"] == name.encode()
    assert letters.redrive("none", reason="odd").run()["matched"] == 0
