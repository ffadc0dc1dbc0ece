"""Dead letters are sent back by a filter, each once, also where the process was killed on its way."""

from __future__ import annotations

import json
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
from broker.protocol.brokers import Brokers
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from conf.settings import Settings
from tests.support.service.harness import Job, wait_until
from warehouse.message_schemas import MessageSchema, producer_with_schema, registered, version_number

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
            properties = {
                "n": str(i % 5),
                "delaylake.source": topic,
                "delaylake.messageId": f"7:{i}:-1:-1",
                "delaylake.deliverAt": "1000",
                "delaylake.attempt": "6",
                "delaylake.reasons": f'["first", "no {i % 2}"]',
                "delaylake.subscription": "a" if i % 10 else "b",
            }
            producer.send_async(
                f"letter {i}".encode(), lambda *_: None, properties=properties, partition_key=f"k{i % 3}"
            )
        producer.flush()
        producer.close()

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

    counts = {"matched": len(meant), "redriven": len(meant), "alreadyRedriven": 0, "refused": 0}
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
        registered(admin, letters.client, letters.topic, schema)
    # The topic of dead letters has got to know them in another order.
    expected = []
    for i, (schema, version) in enumerate([(second, 1), (first, 0)] * 2):
        info = registered(admin, letters.client, f"{letters.topic}-d-dlq", schema)
        producer = producer_with_schema(letters.client, f"{letters.topic}-d-dlq", info)
        given = {
            "delaylake.source": letters.topic,
            "delaylake.messageId": f"8:{i}:-1:-1",
            "delaylake.subscription": "a",
        }
        expected.append((b"\x02" if version == 0 else b"\x02\x02x", version))
        given |= {"delaylake.attempt": "6", "delaylake.reasons": '["typed"]'}
        producer.send(expected[-1][0], properties=given)
        producer.close()
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

    def killed(self: Redrive, broker: Any, consumer: Any, chunk: list[Any]) -> None:
        nonlocal n
        n += 1
        if n == 2:  # the broker has them, and they are not acknowledged
            settle(self, broker, consumer, [])
            raise pulsar.Timeout("killed")
        settle(self, broker, consumer, chunk)

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
    consumer = dead_letter_subscription.subscribe(letters.client, f"{letters.topic}-d-dlq", 0)
    with pytest.raises(RedriveBusyError, match="another re-drive"):
        letters.redrive().run()
    consumer.close()
    wait_until(lambda: letters.redrive().dry_run()["matched"] == len(expected(lambda _: True)), 30, "all of them")


def test_without_a_topic_of_dead_letters_there_is_nothing(letters: DeadLetters) -> None:
    routes = [{"source": letters.topic, "subscriptions": [{"name": "a", "destination": f"{letters.topic}-none"}]}]
    letters.settings = Settings.model_validate(letters.settings.model_dump(exclude={"routes"}) | {"routes": routes})
    assert letters.redrive().run()["matched"] == 0
