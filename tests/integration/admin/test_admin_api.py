"""The admin API over HTTP, with the job and a real broker behind it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pulsar
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.entries.message_ids import MessageRef
from broker.jvm.jars import jars
from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from tests.conftest import RUN_SECONDS
from tests.support.fuzzing.examples import examples
from tests.support.service.harness import Api, Collector, Job, http, now, wait_until

NAMESPACE = "public/admin_api"
TRIMMED_NAMESPACE = "public/admin_api_trimmed"
FAR_SECONDS = 3600


def ref(message_id: pulsar.MessageId) -> MessageRef:
    return MessageRef(message_id.ledger_id(), message_id.entry_id(), message_id.partition(), message_id.batch_index())


def path_of(topic: str, prefix: str = "/admin/v2") -> str:
    return f"{prefix}/{topic.replace('://', '/')}"


class Service:
    """Topics, the job and the API."""

    plain = f"persistent://{NAMESPACE}/plain"
    parted = f"persistent://{NAMESPACE}/parted"
    trimmed = f"persistent://{TRIMMED_NAMESPACE}/trimmed"
    indexed = f"persistent://{NAMESPACE}/indexed"
    empty = f"persistent://{NAMESPACE}/empty"

    def __init__(self, broker: EmbeddedBroker, client: pulsar.Client, folder: Path) -> None:
        self.client = client
        self.broker = httpx.Client(base_url=broker.settings.admin_url)
        for namespace in (NAMESPACE, TRIMMED_NAMESPACE):
            self._ok("PUT", f"/admin/v2/namespaces/{namespace}")
        with AdminClient(broker.settings) as admin:
            admin.create_partitioned_topic(self.parted, 2)
        self.broker.put(path_of(self.empty))
        self._trim_the_head(self.trimmed)
        # What the job has read stays, so that the broker can be asked about it.
        forever = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        for namespace in (NAMESPACE, TRIMMED_NAMESPACE):
            self._ok("POST", f"/admin/v2/namespaces/{namespace}/retention", json=forever)
        routes = [
            {"source": self.plain, "subscriptions": [{"name": "a"}, {"name": "b"}, {"name": "x", "type": "Exclusive"}]},
            {"source": self.parted, "subscriptions": [{"name": "a"}]},
            {"source": self.trimmed, "subscriptions": [{"name": "a"}]},
            {"source": self.indexed, "subscriptions": [{"name": "a"}]},
            {"source": self.empty, "subscriptions": [{"name": "a"}]},
        ]
        self.collector = Collector(client).collect(f"{self.plain}-a").collect(f"{self.plain}-b")
        self.job = Job(folder, broker.settings, routes, tracker={"max_seal_interval_millis": 1500}).start()
        self.api = Api(self.job.file)
        self.http = httpx.Client(base_url=self.api.url, timeout=90)
        self.producer = client.create_producer(self.plain)
        wait_until(lambda: self.http.get("/readyz").status_code == 200, 20, f"the API\n{self.api.log}")

    def send(self, delay_seconds: float = FAR_SECONDS, text: str = "far") -> tuple[MessageRef, int]:
        due = now() + int(delay_seconds * 1000)
        return ref(self.producer.send(text.encode(), properties={"deliverAt": str(due)})), due

    def send_batch(self, topic: str, n: int) -> list[pulsar.MessageId]:
        """One entry of n messages."""
        ids: list[pulsar.MessageId] = []
        producer = self.client.create_producer(
            topic, batching_enabled=True, batching_max_messages=n, batching_max_publish_delay_ms=5_000
        )
        due = str(now() + FAR_SECONDS * 1000)
        for i in range(n):
            producer.send_async(str(i).encode(), lambda _, id: ids.append(id), properties={"deliverAt": due})
        producer.flush()
        wait_until(lambda: len(ids) == n, 10, "ids of a batch")
        producer.close()
        return ids

    def post(self, topic: str, operation: str, prefix: str = "/admin/v2", **options: Any) -> httpx.Response:
        return self.http.post(f"{path_of(topic, prefix)}/{operation}", **options)

    def skip(self, content: Any, subscription: str = "a", topic: str = plain) -> httpx.Response:
        return self.post(topic, f"subscription/{subscription}/skipByMessageIds", json=content)

    def stop(self) -> None:
        self.collector.stop()
        self.http.close()
        self.broker.close()
        self.api.stop()
        self.job.stop()

    def roll_ledger(self, topic: str) -> None:
        self._ok("PUT", f"{path_of(topic)}/unload")

    def _trim_the_head(self, topic: str) -> None:
        # A cursor of the deduplication's would hold the head.
        self._ok("POST", f"/admin/v2/namespaces/{TRIMMED_NAMESPACE}/deduplication", json=False)
        producer = self.client.create_producer(topic)
        first = ref(producer.send(b"gone"))
        self.send_batch(topic, 3)
        self.roll_ledger(topic)
        assert ref(producer.send(b"stays")).ledger_id > first.ledger_id
        self._ok("POST", f"{path_of(topic)}/trim")
        wait_until(
            lambda: '"ledgerId":-1' in self.broker.get(f"{path_of(topic)}/getMessageIdByIndex?index=0").text,
            20,
            "a trimmed head",
        )

    def _ok(self, method: str, path: str, **options: Any) -> None:
        self.broker.request(method, path, **options).raise_for_status()


@pytest.fixture(scope="module")
def service(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    service = Service(broker, pulsar_client, tmp_path_factory.mktemp("admin_api"))
    yield service
    service.stop()


def reason(response: httpx.Response, code: int) -> str:
    assert response.status_code == code, response.text
    text: str = response.json()["reason"]
    return text


def done(response: httpx.Response) -> None:
    assert (response.status_code, response.content) == (204, b""), response.text


def test_cancel_and_acknowledge_take_messages_back_in_every_form(service: Service) -> None:
    forms: list[Any] = [
        lambda fields: {"params": fields},
        lambda fields: {"data": fields},
        lambda fields: {"json": fields},
        lambda fields: {"json": {name: str(value) for name, value in fields.items()}},
        lambda fields: {"params": {"ledgerId": fields.pop("ledgerId")}, "data": fields},
    ]
    due = 8.0
    for number, form in enumerate(forms):
        message, deliver_at = service.send(due, f"cancelled {number}")
        fields: dict[str, Any] = {"ledgerId": message.ledger_id, "entryId": message.entry_id}
        done(service.post(service.plain, "cancelDelayedMessage", **form(fields | {"deliverAt": deliver_at})))
        message, _ = service.send(due, f"acknowledged {number}")
        fields = {"ledgerId": message.ledger_id, "entryId": message.entry_id, "subscriptionNames": "a,b"}
        done(service.post(service.plain, "acknowledgeMessage", **form(fields)))

    v1 = service.plain.replace("public/", "public/standalone/")
    for prefix in ("/admin", "/admin/v1"):
        message, deliver_at = service.send(due, f"cancelled {prefix}")
        fields = {"ledgerId": message.ledger_id, "entryId": message.entry_id, "deliverAt": deliver_at}
        done(service.post(v1, "cancelDelayedMessage", prefix, params=fields))
        message, _ = service.send(due, f"acknowledged {prefix}")
        fields = {"ledgerId": message.ledger_id, "entryId": message.entry_id, "subscriptionNames": ["a", "b"]}
        done(service.post(v1, "acknowledgeMessage", prefix, params=fields))

    message, deliver_at = service.send(due, "of one only")
    fields = {"ledgerId": message.ledger_id, "entryId": message.entry_id, "deliverAt": deliver_at}
    done(service.post(service.plain, "cancelDelayedMessage", params=fields | {"subscriptionNames": "b"}))
    _, last = service.send(due, "last")

    arrived = lambda s: {m.payload.decode() for m in service.collector.received[f"{service.plain}-{s}"]}  # noqa: E731
    wait_until(lambda: "last" in arrived("a") & arrived("b"), (last - now()) / 1000 + 20, service.job.log)
    assert arrived("a") == {"of one only", "last"}
    assert arrived("b") == {"last"}


def test_what_can_not_be_cancelled_says_why(service: Service) -> None:
    message, deliver_at = service.send()
    fields = {"ledgerId": message.ledger_id, "entryId": message.entry_id, "deliverAt": deliver_at}
    cancel = lambda **other: service.post(service.plain, "cancelDelayedMessage", params=fields | other)  # noqa: E731
    acknowledge = lambda **other: service.post(service.plain, "acknowledgeMessage", params=fields | other)  # noqa: E731

    done(cancel(subscriptionNames="x"))
    refused = reason(acknowledge(), 412)
    assert "x NOT_ALLOWED" in refused
    assert "2 of 3 done" in refused
    done(cancel())
    done(acknowledge(subscriptionNames="a"))
    assert "x NOT_ALLOWED" in reason(service.skip([str(message)], "x"), 405)

    nowhere = {"entryId": 4_000_000}
    assert "NOT_FOUND" in reason(acknowledge(**nowhere, subscriptionNames="a"), 404)
    done(cancel(**nowhere))
    assert "TOO_LATE" in reason(cancel(entryId=4_000_001, deliverAt=now() - 60_000), 412)
    assert "NOT_FOUND" in reason(service.skip([f"{message.ledger_id}:4000002"]), 404)
    assert "INVALID" in reason(cancel(entryId=2**40), 412)
    assert "INVALID" in reason(service.skip([f"1:{2**40}"]), 400)
    reason(cancel(subscriptionNames="a,nobody"), 404)
    reason(service.skip(["1:2"], "nobody"), 404)

    past, past_due = service.send(0.5, "last")
    wait_until(lambda: now() > past_due + 1_000, 5, "its time")
    fields = {"ledgerId": past.ledger_id, "entryId": past.entry_id, "deliverAt": past_due}
    assert "TOO_LATE" in reason(cancel(), 412)
    assert "TOO_LATE" in reason(acknowledge(subscriptionNames="a"), 412)
    kept, _ = service.send()
    some = reason(service.skip([str(past), str(kept)]), 404)
    assert "a TOO_LATE" in some
    assert "1 of 2 done" in some

    # The outcomes, for who asks.
    service.http.headers["Prefer"] = "return=representation"
    try:
        answer = service.skip([str(kept)])
        assert answer.status_code == 200
        assert [(o["subscription"], o["result"]) for o in answer.json()["outcomes"]] == [("a", "ALREADY_APPLIED")]
        assert [o["result"] for o in service.skip([str(past)]).json()["outcomes"]] == ["TOO_LATE"]
    finally:
        del service.http.headers["Prefer"]


def test_skip_takes_every_form_of_ids(service: Service) -> None:
    ids = service.send_batch(service.plain, 6)
    batch = [ref(id) for id in ids]
    ledger, entry = batch[0].ledger_id, batch[0].entry_id
    assert [m.batch_index for m in batch] == list(range(6))
    encoded = [base64.b64encode(id.serialize()).decode() for id in ids]
    objects = [{"ledgerId": ledger, "entryId": str(entry), "batchIndex": 0}, None]
    done(service.skip({"type": "MessageId", "messageIds": objects}))
    done(service.skip({"type": "byteArray", "messageIds": encoded[1:2]}))
    done(service.skip({"messageIds": [encoded[2].rstrip("=")]}))
    done(service.skip([f"{ledger}:{entry}:3"]))
    assert "INVALID" in reason(service.skip([f"{ledger}:{entry}:6"]), 400)

    def cancelled() -> set[int]:
        rows = service.job.rows("outcomes")
        return {r["batch_index"] for r in rows if r["entry_id"] == entry and r["result"] == "APPLIED"}

    wait_until(lambda: cancelled() == {0, 1, 2, 3}, 10, "single messages")
    done(service.skip({str(ledger): entry}))
    wait_until(lambda: cancelled() == {-1, 0, 1, 2, 3}, 10, "the rest of the entry")

    message, _ = service.send()
    done(service.post(service.plain, "subscription/a/skip/0", json={str(message.ledger_id): str(message.entry_id)}))
    many = [service.send()[0] for _ in range(50)]
    done(service.skip([str(m) for m in many]))
    assert "1,000" in reason(service.skip([f"1:{i}" for i in range(1_001)]), 413)


def test_partitions_are_found_by_ledger_or_named(service: Service) -> None:
    producer = service.client.create_producer(service.parted)
    due = now() + FAR_SECONDS * 1000
    ids = [producer.send(b"x", properties={"deliverAt": str(due)}) for _ in range(6)]
    assert {id.partition() for id in ids} == {0, 1}
    for id in ids[:2]:
        fields = {"ledgerId": id.ledger_id(), "entryId": id.entry_id(), "deliverAt": due}
        done(service.post(service.parted, "cancelDelayedMessage", params=fields))
        own, other = (f"{service.parted}-partition-{p}" for p in (id.partition(), 1 - id.partition()))
        done(service.post(own, "acknowledgeMessage", params=fields))
        reason(service.post(other, "acknowledgeMessage", params=fields), 404)
    done(service.skip([base64.b64encode(id.serialize()).decode() for id in ids], topic=service.parted))
    wrong = f"{service.parted}-partition-{1 - ids[0].partition()}"
    encoded = base64.b64encode(ids[0].serialize()).decode()
    assert "partition" in reason(service.skip([encoded], topic=wrong), 400)
    # A cancel in advance would wait for a message that can't come.
    for nowhere in (f"{service.parted}-partition-2", f"{service.plain}-partition-0", f"{service.parted}-partition-00"):
        for operation in ("cancelDelayedMessage", "acknowledgeMessage"):
            assert "no such topic" in reason(service.post(nowhere, operation, params=fields), 404)
    assert "name a partition" in reason(service.post(service.parted, "subscription/a/skip/1"), 405)


def test_each_of_many_concurrent_calls_gets_its_own_answer(service: Service) -> None:
    n = 200
    messages = [service.send() for _ in range(n)]
    # Every fourth names a message that never was, and whose time is past.
    calls = [
        {"ledgerId": m.ledger_id, "entryId": m.entry_id + (i % 4 == 0) * 5_000_000, "deliverAt": due}
        | ({"deliverAt": now() - 60_000} if i % 4 == 0 else {})
        for i, (m, due) in enumerate(messages)
    ]

    async def all_at_once() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=n)
        async with httpx.AsyncClient(base_url=service.api.url, timeout=90, limits=limits) as client:
            url = f"{path_of(service.plain)}/cancelDelayedMessage"
            return await asyncio.gather(*(client.post(url, params=call) for call in calls))

    answers = asyncio.run(all_at_once())
    assert [a.status_code for a in answers] == [412 if i % 4 == 0 else 204 for i in range(n)]
    for call, answer in zip(calls, answers, strict=True):
        if answer.status_code == 412:
            assert f":{call['entryId']} " in answer.json()["reason"]


def test_an_index_gives_what_the_broker_gives(service: Service) -> None:
    compared = [service.trimmed, service.indexed, f"{service.parted}-partition-0"]
    for topic in compared:
        single = service.client.create_producer(topic)
        for n in (2, 4, 3):
            service.send_batch(topic, n)
            single.send(b"alone")
            service.roll_ledger(topic)
        service.send_batch(topic, 2)

    def of_broker(topic: str, index: int) -> httpx.Response:
        return service.broker.get(f"{path_of(topic)}/getMessageIdByIndex?index={index}")

    def of_api(topic: str, index: int) -> httpx.Response:
        return service.http.get(f"{path_of(topic)}/getMessageIdByIndex?index={index}")

    for topic in compared:
        n = next(i for i in range(1_000) if of_broker(topic, i).status_code == 404)
        assert n >= 14
        wait_until(lambda topic=topic, n=n: of_api(topic, n - 1).status_code == 200, 30, f"{topic}\n{service.job.log}")  # type: ignore[misc]
        ledgers = set()
        for index in range(-2, n + 3):
            ours, theirs = of_api(topic, index), of_broker(topic, index)
            if topic != service.trimmed and index == 0 and theirs.json()["ledgerId"] == -1:
                # Of a first entry that is a batch, the broker calls expired what is before its last index. PIP-415
                # gives the entry for each of its indexes.
                theirs = of_broker(topic, 1)
            assert ours.status_code == theirs.status_code, (topic, index, ours.text, theirs.text)
            if ours.status_code == 200:
                same = {name: theirs.json()[name] for name in ("ledgerId", "entryId", "partitionIndex")}
                assert ours.json() == same, (topic, index)
                ledgers.add(ours.json()["ledgerId"])
        assert len(ledgers) >= 4
        assert (-1 in ledgers) == (topic == service.trimmed)
    for topic, code in ((service.empty, 404), (service.parted, 405)):
        assert of_api(topic, 0).status_code == of_broker(topic, 0).status_code == code

    # Pulsar's own client, which its pulsar-admin is a shell of, can't tell the one from the other.
    asked = [service.trimmed, service.empty, service.parted]
    urls = [str(service.broker.base_url), str(service.api.url)]
    told = pulsars_admin(list(range(-1, n + 2)), list(itertools.product(urls, asked)))
    assert told[urls[0]] == told[urls[1]]

    command = ["get-message-id-by-index", "--index", "1", service.indexed]
    directly, over_rest = topics(service, *command), topics(service, *command, "--admin-url", service.api.url)
    found = of_broker(service.indexed, 1).json()
    assert directly.stdout == over_rest.stdout == f"{found['ledgerId']}:{found['entryId']}:-1:-1\n"


def pulsars_admin(indexes: list[int], asked: list[tuple[str, str]]) -> dict[str, list[list[str]]]:
    """By URL what Pulsar's own Java admin client is answered for some indexes of topics.

    Args:
        asked: URLs and topics.
    """
    program = ["java", "-XX:TieredStopAtLevel=1", "-cp", f"{jars('broker')}/*"]
    program.append(str(Path(__file__).with_name("MessageIds.java")))
    arguments = [*map(str, [len(indexes), *indexes]), *itertools.chain.from_iterable(asked)]
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=RUN_SECONDS, check=True)
    lines = iter(done.stdout.splitlines())
    told: dict[str, list[list[str]]] = {}
    for url, _ in asked:
        told.setdefault(url, []).append([next(lines) for _ in indexes])
    assert next(lines, None) is None
    return told


def topics(service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
    return service.job.command("topics", *arguments)


def test_the_command_line_says_the_same_over_rest(service: Service) -> None:
    (one, due), (two, _) = service.send(), service.send()
    position = ["-l", str(one.ledger_id), "-e", str(one.entry_id)]
    commands = [
        ["cancel-delayed-message", service.plain, *position, "-t", str(due), "-s", "a,b", "--output", "json"],
        ["acknowledgeMessage", service.plain, *position],
        ["skip-messages", service.plain, "-s", "a", "--messageId-triplet", str(two), "--messageId-triplet", str(one)],
        ["skip-messages", service.plain, "-s", "x", "--messageId-triplet", str(two)],
        ["skip-messages", service.plain, "-s", "a", "--messageId-triplet", "1:99999"],
    ]
    for command in commands:
        topics(service, *command)  # after which both find it done
        directly, over_rest = topics(service, *command), topics(service, *command, "--admin-url", service.api.url)
        assert (directly.returncode, directly.stdout, directly.stderr) == (
            over_rest.returncode,
            over_rest.stdout,
            over_rest.stderr,
        ), command
    assert directly.returncode == 1
    nowhere = topics(service, "acknowledgeMessage", f"{service.plain}-partition-0", *position)
    assert nowhere.returncode == 1
    assert nowhere.stderr == f"error: no such topic: {service.plain} has no partition 0\n"
    wrong = topics(service, *commands[0], "--admin-url", "http://127.0.0.1:1")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: no answer from http://127.0.0.1:1")
    assert wrong.stderr.count("\n") == 1


def test_a_schedule_is_shown_skipped_paused_and_ended(service: Service) -> None:
    far = {"repeat": "@every 1h", "deliverAt": str(now() + FAR_SECONDS * 1000)}
    message = ref(service.producer.send(b"every hour", properties=far))
    schedules = f"{path_of(service.plain)}/schedules"
    one = f"{schedules}/{message.ledger_id}:{message.entry_id}"

    def next_of(name: str) -> Any:
        found = service.http.get(one, params={"subscription": name, "next": 1})
        return found.json()["upcoming"][0]["occurrence"] if found.is_success and found.json()["upcoming"] else None

    wait_until(lambda: next_of("a") == 1, 30, "the schedule")
    assert service.http.post(f"{one}/skipNext", params={"subscriptionNames": "a,x"}).status_code == 204
    wait_until(lambda: next_of("a") == 2, 30, "what follows the skipped one")
    assert (next_of("b"), next_of("x")) == (1, 2)
    at = service.http.get(one, params={"subscription": "a"}).json()["nextDeliverAt"]
    assert at == int(far["deliverAt"]) + 3_600_000

    def states() -> dict[str, str]:
        return {row["subscription"]: row["state"] for row in service.http.get(one).json()["subscriptions"]}

    assert service.http.post(f"{one}/pause", params={"subscriptionNames": "a"}).status_code == 204
    wait_until(lambda: states() == {"a": "paused", "b": "waiting", "x": "waiting"}, 30, "the pause")
    assert service.http.get(one, params={"subscription": "a"}).json()["nextDeliverAt"] is None
    assert service.http.post(f"{one}/resume", params={"subscriptionNames": "a,b"}).status_code == 204
    wait_until(lambda: set(states().values()) == {"waiting"}, 30, "the end of the pause")
    assert service.http.get(one, params={"subscription": "a"}).json()["nextDeliverAt"] == at
    ended = service.http.delete(one, headers={"Prefer": "return=representation"})
    assert {o["subscription"]: o["result"] for o in ended.json()["outcomes"]} == dict.fromkeys("abx", "APPLIED")
    wait_until(lambda: str(message) not in service.http.get(schedules).text, 30, "the end")
    over = service.http.get(schedules, params={"withEnded": True}).json()["schedules"]
    assert [s["state"] for s in over if s["id"] == str(message)] == ["takenBack"]
    once, _ = service.send()
    refused = service.http.post(f"{schedules}/{once.ledger_id}:{once.entry_id}/skipNext")
    assert refused.status_code == 412
    assert "does not recur" in refused.json()["reason"]
    assert service.http.post(f"{schedules}/{once.ledger_id}:{once.entry_id}/pause").status_code == 412


def test_made_up_calls_are_answered_as_described(service: Service) -> None:
    schema = schemathesis.openapi.from_url(f"{service.api.url}/openapi.json")
    known = {
        "tenant": "public",
        "namespace": "admin_api",
        "topic": "plain",
        "subscription": "a",
        "n": "00",
        "id": "7:0",
    }
    codes = set()
    of_job = []
    for result in schema.get_all_operations():
        operation = result.ok()  # type: ignore[union-attr]

        @settings(max_examples=examples(40), database=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(), is_known=st.sampled_from([True, True, False]))
        def check(case: schemathesis.Case, is_known: bool) -> None:  # type: ignore[type-arg]
            if is_known:
                case.path_parameters = {name: known[name] for name in case.path_parameters or {}}
                case.query.pop("subscriptionNames", None)
            response = case.call(timeout=90)
            codes.add(response.status_code)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert list(response.json()) == ["reason"]
            if response.status_code == 204 or any(r in response.text for r in ("INVALID", "NOT_FOUND", "TOO_LATE")):
                of_job.append(response)

        check()
    assert {200, 400, 404, 412} <= codes
    assert of_job


def settings_file(folder: Path, **pulsar_settings: str) -> Path:
    topic = "persistent://public/default/nobody_answers"
    content = {
        "pulsar": pulsar_settings,
        "control": {"topic": f"{topic}_control", "outcome_topic": f"{topic}_outcomes"},
        "warehouse": f"file:{folder}/warehouse",
        "api": {"answer_timeout_millis": 700},
        "routes": [{"source": topic, "subscriptions": [{"name": "a"}]}],
    }
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


CALL = f"{path_of('persistent://public/default/nobody_answers')}/acknowledgeMessage?ledgerId=1&entryId=2"


def test_without_the_job_a_call_is_answered_504_with_its_request_id(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, tmp_path: Path
) -> None:
    file = settings_file(tmp_path, service_url=broker.settings.service_url)
    control = pulsar_client.create_reader(
        "persistent://public/default/nobody_answers_control", pulsar.MessageId.earliest
    )
    api = Api(file)
    try:
        wait_until(lambda: http.post(api.url + CALL).status_code == 504, 20, f"the broker\n{api.log}")
        before = time.monotonic()
        answer = http.post(api.url + CALL)
        assert time.monotonic() - before >= 0.7
        request_id = reason(answer, 504).rpartition(" ")[2]
        sent = []
        while control.has_message_available():
            sent.append(control.read_next(60_000).data())
        assert any(request_id.encode() in data for data in sent)
    finally:
        assert api.stop() == 0


def test_the_broker_may_come_later_and_go_and_come_again(tmp_path: Path) -> None:
    with contextlib.ExitStack() as sockets:
        port, http_port = (
            sockets.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)
        )
    broker = EmbeddedBroker(tmp_path / "broker")
    api = Api(settings_file(tmp_path, service_url=f"pulsar://127.0.0.1:{port}"))
    try:
        code = lambda: http.post(api.url + CALL).status_code  # noqa: E731
        assert "broker" in reason(http.post(api.url + CALL), 503)
        assert http.get(f"{api.url}/healthz").status_code == 200
        for _ in range(2):
            broker.start(port=port, http_port=http_port)
            wait_until(lambda: code() == 504, 30, f"a connection\n{api.log}")
            assert "tables" in reason(http.get(f"{api.url}/readyz"), 503)
            broker.kill()
            wait_until(lambda: code() == 503, 30, f"the end of the connection\n{api.log}")
    finally:
        status = api.stop()
        broker.kill()
    assert status == 0
    assert json.dumps(api.log).count("Traceback") == 0
