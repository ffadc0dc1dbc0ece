"""Messages scheduled over HTTP come once, with the same id in each answer, whatever dies between call and answer."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pulsar
import pytest
from delaylake import Client, Invalid, NotFound

from broker.pulsar_admin.admin_rest import AdminClient
from broker.standalone import EmbeddedBroker
from tests.conftest import RUN_SECONDS
from tests.support.service.harness import Api, Collector, Job, now, wait_until

PLACE = "public/default/scheduled"
ORDERS = f"persistent://{PLACE}"
PARTED = "persistent://public/default/scheduled-parted"
TYPED = "persistent://public/default/scheduled-typed"
RECORD = {"type": "record", "name": "Order", "fields": [{"name": "n", "type": "int"}]}
DUE_SECONDS = 3_600


class Service:
    """The job and two processes of the API."""

    def __init__(self, broker: EmbeddedBroker, client: pulsar.Client, folder: Path) -> None:
        with AdminClient(broker.settings) as admin:
            admin.create_partitioned_topic(PARTED, 3)
            admin.register_schema(TYPED, "JSON", json.dumps(RECORD), {})
        routes = [{"source": topic, "subscriptions": [{"name": "a"}]} for topic in (ORDERS, PARTED, TYPED)]
        self.collector = Collector(client).collect(f"{ORDERS}-a").collect(f"{PARTED}-a").collect(f"{TYPED}-a")
        # Two shards: repetitions come to others than their first messages.
        tracker = {"shards": 2, "max_seal_interval_millis": 1_500, "max_delay_millis": 30 * 24 * 3_600_000}
        self.job = Job(folder, broker.settings, routes, tracker=tracker).start()
        self.apis = [Api(self.job.file), Api(self.job.file)]
        for api in self.apis:
            self.wait_ready(api)

    def wait_ready(self, api: Api) -> None:
        def is_ready() -> bool:
            try:
                return httpx.get(f"{api.url}/readyz", timeout=90).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_ready, 20, f"the API\n{api.log}")

    def post(self, content: Any, key: str = "", topic: str = ORDERS, api: int = 0) -> httpx.Response:
        headers = {"Idempotency-Key": key} if key else {}
        url = f"{self.apis[api].url}/admin/v2/{topic.replace('://', '/')}/delayed"
        return httpx.post(url, json=content, headers=headers, timeout=120)

    def scheduled(self, content: Any, key: str = "", topic: str = ORDERS, api: int = 0) -> dict[str, Any]:
        response = self.post(content, key, topic, api)
        assert response.status_code == 201, response.text
        answer: dict[str, Any] = response.json()
        assert answer.keys() == {"messageId", "deliverAt"}
        return answer

    def arrived(self, payload: str, topic: str = ORDERS) -> list[Any]:
        return [one for one in self.collector.received[f"{topic}-a"] if one.payload == payload.encode()]

    def rejects(self, payload: str) -> list[str]:
        rows = self.job.rows("rejects")
        return [row["reason"] for row in rows if row["payload"] == payload.encode()]

    def restart_api(self, number: int) -> None:
        self.apis[number] = Api(self.job.file)
        self.wait_ready(self.apis[number])

    def stop(self) -> None:
        self.collector.stop()
        for api in self.apis:
            api.kill()
        self.job.stop()


@pytest.fixture(scope="module")
def service(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    service = Service(broker, pulsar_client, tmp_path_factory.mktemp("scheduling"))
    yield service
    service.stop()


def test_a_message_arrives_as_it_was_given(service: Service) -> None:
    due = now() + 3_000
    given = {
        "payload": {"order": 7, "name": "Zoë", "n": 2**60},
        "key": "customer",
        "orderingKey": "line",
        "properties": {"region": "eu"},
        "eventTime": 1_700_000_000_123,
        "deliverAt": due,
    }
    answer = service.scheduled(given)
    assert answer["deliverAt"] == due
    expected = '{"order":7,"name":"Zoë","n":1152921504606846976}'
    wait_until(lambda: service.arrived(expected), 20, "the message")
    [one] = service.arrived(expected)
    assert one.properties["delaylake.messageId"] == answer["messageId"]
    assert one.properties["delaylake.deliverAt"] == str(due)
    assert (one.properties["region"], one.key) == ("eu", "customer")
    raw = base64.b64encode(b"\x00\xff").decode()
    several = [{"payloadBase64": raw}, {"payload": "x", "deliverAt": -1}, {"payload": "now", "deliverAfter": "1s"}]
    response = service.post(several)
    assert response.status_code == 200
    first, wrong, last = response.json()
    assert first.keys() == last.keys() == {"status", "messageId", "deliverAt"}
    assert (first["status"], last["status"]) == (201, 201)
    assert wrong.keys() == {"status", "reason"}
    assert wrong["status"] == 422
    wait_until(lambda: service.arrived("now"), 20, "the last one")


def test_what_the_job_would_reject_is_refused(service: Service) -> None:
    assert service.post({"payload": "far", "deliverAfter": "31d"}).status_code == 422
    assert service.post({"payload": "x"}, topic="persistent://public/default/unknown").status_code == 404
    assert service.post({"payload": "x", "repeat": "@every 1ms"}).status_code == 422
    assert service.post({"payload": "x"}, key="two words").status_code == 400


def test_a_message_has_the_topics_newest_schema_where_it_names_its_type(service: Service) -> None:
    service.scheduled({"payload": {"n": 7}, "schema": "JSON", "deliverAfter": 2_000}, topic=TYPED)
    wait_until(lambda: service.arrived('{"n":7}', TYPED), 20, "the message")
    kept = {(row["topic"], row["type"], json.loads(row["definition"])["name"]) for row in service.job.rows("schemas")}
    assert kept == {(TYPED, "JSON", "Order")}
    other = service.post({"payload": "x", "schema": "AVRO"}, topic=TYPED)
    assert (other.status_code, "the topic's newest is JSON" in other.text) == (422, True)
    none = service.post({"payload": "x", "schema": "AVRO"}, topic=ORDERS)
    assert (none.status_code, "the topic has none" in none.text) == (422, True)


@pytest.mark.parametrize("topic", [ORDERS, PARTED])
def test_a_repeated_call_gets_the_first_ones_answer_and_the_message_comes_once(service: Service, topic: str) -> None:
    key = f"repeated-{topic[-6:]}"
    given = {"payload": key, "deliverAfter": 4_000}
    first = service.scheduled(given, key, topic)
    assert [service.scheduled(given, key, topic, api) for api in (0, 1, 0)] == [first] * 3
    other = service.post(given | {"payload": "another"}, key, topic)
    assert other.status_code == 422
    assert first["messageId"] in other.json()["reason"]
    wait_until(lambda: service.arrived(key, topic), 20, "the message")
    wait_until(lambda: len(service.rejects(key)) == 3, 20, "rejected repetitions")
    assert set(service.rejects(key)) == {f"a repetition of {first['messageId']}: requestId {key}"}
    # After its delivery, too.
    assert service.scheduled(given, key, topic) == first
    assert len(service.arrived(key, topic)) == 1


def test_calls_at_once_under_one_key_at_two_processes_have_one_answer(service: Service) -> None:
    def call(number: int) -> tuple[str, int]:
        answer = service.scheduled({"payload": "once", "deliverAfter": 5_000}, "once", api=number % 2)
        return answer["messageId"], answer["deliverAt"]

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        answers = set(pool.map(call, range(10)))
    assert len(answers) == 1
    wait_until(lambda: service.arrived("once"), 20, "the message")
    wait_until(lambda: len(service.rejects("once")) == 9, 20, "the others among the rejects")
    assert len(service.arrived("once")) == 1


def test_a_producer_that_sets_a_request_id_has_the_same(service: Service, pulsar_client: pulsar.Client) -> None:
    producer = pulsar_client.create_producer(ORDERS)
    for _ in range(3):
        due = str(now() + 2_000)
        producer.send(b"by hand", properties={"requestId": "by hand", "deliverAt": due})
    producer.send(b"by hand", properties={"requestId": "by hand, too", "deliverAt": due})
    wait_until(lambda: len(service.arrived("by hand")) == 2, 20, "two messages")
    # Those with another time are others.
    wait_until(lambda: len(service.rejects("by hand")) == 2, 20, "two rejects")
    assert {one.properties["requestId"] for one in service.arrived("by hand")} == {"by hand", "by hand, too"}
    producer.close()


def test_the_client_schedules_over_http_or_the_broker_and_knows_what_has_no_route(service: Service) -> None:
    minute = timedelta(minutes=1)
    with Client(service.apis[0].url) as lake:
        once = lake.schedule(ORDERS, b"by the client", after=60 * minute, request_id="client")
        assert lake.schedule(ORDERS, b"by the client", after=60 * minute, request_id="client") == once
        with pytest.raises(Invalid, match="another message"):
            lake.schedule(ORDERS, b"another", after=60 * minute, request_id="client")
        with pytest.raises(NotFound):
            lake.schedule(f"{ORDERS}-unknown", b"x", after=minute)
    settings = service.job.settings
    topics = {"control_topic": settings.control.topic, "outcome_topic": settings.control.outcome_topic}
    with Client(broker=settings.pulsar.service_url, **topics) as lake:  # type: ignore[arg-type]
        lake.schedule(ORDERS, b"by the client", after=60 * minute, request_id="client")
        with pytest.raises(NotFound, match="no route has the topic"):
            lake.schedule(f"{ORDERS}-unknown", b"x", after=minute)
    wait_until(lambda: len(service.rejects("by the client")) == 2, 20, "both repetitions")


DOC = Path(__file__).parents[3] / "docs" / "scheduling-over-http.md"

# By language: the file of its example, and how it is run.
RUNNERS: dict[str, tuple[str, list[str]]] = {
    "sh": ("schedule.sh", ["sh", "schedule.sh"]),
    "python": ("schedule.py", [sys.executable, "schedule.py"]),
    "js": ("schedule.mjs", ["node", "schedule.mjs"]),
    "java": ("Schedule.java", ["java", "Schedule.java"]),
    "go": ("schedule.go", ["go", "run", "schedule.go"]),
    "csharp": ("schedule.cs", ["dotnet", "run", "schedule.cs"]),
    "php": ("schedule.php", ["php", "schedule.php"]),
}


@pytest.mark.parametrize("language", RUNNERS)
def test_the_example_of_each_language_schedules_once(service: Service, tmp_path: Path, language: str) -> None:
    name, command = RUNNERS[language]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    [example] = re.findall(rf"```{language}\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert "order-7-" in example
    local = example.replace("http://127.0.0.1:8081", service.apis[0].url).replace("/public/default/orders", f"/{PLACE}")
    (tmp_path / name).write_text(local.replace('schedule("orders"', f'schedule("{ORDERS}"'))
    environment = os.environ | {"GOCACHE": str(tmp_path / "go"), "GOFLAGS": "-mod=mod"}
    printed = []
    for _ in range(2):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    first, again = printed
    assert first == again
    [scheduled] = re.findall(r"[0-9]+:[0-9]+:-1:-1", first)
    wait_until(lambda: is_listed(service, {scheduled}), 20, "the message among those that wait")


def kill_between_publish_and_answer(service: Service, client: pulsar.Client, name: str) -> tuple[str, dict[str, Any]]:
    """Kills an API process whose call the broker has, and the job has not answered; returns the key and the content."""
    reader = client.create_reader(ORDERS, pulsar.MessageId.latest)
    content = {"payload": name, "deliverAfter": 1_000 * DUE_SECONDS}
    assert service.job.process is not None
    os.killpg(service.job.process.pid, signal.SIGSTOP)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            call = pool.submit(service.post, content, name)
            wait_until(lambda: reader.has_message_available(), 20, "the published message")
            assert not call.done()
            service.apis[0].kill()
            with pytest.raises(httpx.TransportError):
                call.result()
    finally:
        os.killpg(service.job.process.pid, signal.SIGCONT)
        reader.close()
    return name, content


def killed_often(service: Service, client: pulsar.Client, n: int) -> None:
    answers: dict[str, dict[str, Any]] = {}
    for number in range(n):
        key, content = kill_between_publish_and_answer(service, client, f"killed-{n}-{number}")
        service.restart_api(0)
        answers[key] = service.scheduled(content, key)
        assert service.scheduled(content, key, api=1) == answers[key]
    wait_until(lambda: all(len(service.rejects(key)) == 2 for key in answers), 20, "the repetitions")
    ids = {answer["messageId"] for answer in answers.values()}
    assert len(ids) == n
    listed = wait_until(lambda: is_listed(service, ids), 20, "the messages")
    waiting = Counter(listed)
    assert all(waiting[one] == 1 for one in ids)


def is_listed(service: Service, ids: set[str]) -> list[str]:
    """All pending messages of the topic, once these are among them."""
    url = f"{service.apis[1].url}/admin/v2/{ORDERS.replace('://', '/')}/delayed?limit=1000"
    page = httpx.get(url, timeout=90).json()
    found = [f"{message['ledgerId']}:{message['entryId']}:-1:-1" for message in page["messages"]]
    return found if ids <= set(found) else []


def test_an_api_that_is_killed_between_publish_and_answer(service: Service, pulsar_client: pulsar.Client) -> None:
    killed_often(service, pulsar_client, 3)


@pytest.mark.chaos
def test_an_api_that_is_killed_a_hundred_times(service: Service, pulsar_client: pulsar.Client) -> None:
    killed_often(service, pulsar_client, 100)


def test_keys_are_remembered_after_kill_9_and_with_a_lost_checkpoint(service: Service) -> None:
    given = {"payload": "kept", "deliverAfter": 1_000 * DUE_SECONDS}
    first = service.scheduled(given, "kept")
    service.job.kill9()
    service.job.start()
    assert service.scheduled(given, "kept") == first
    # Nothing of this one is durable yet.
    fresh = service.scheduled(given | {"payload": "fresh"}, "fresh")
    service.job.kill9()
    service.job.stop()
    shutil.rmtree(service.job.folder / "checkpoint")
    service.job.rebuild()
    service.job.start()
    assert service.scheduled(given, "kept", api=1) == first
    assert service.scheduled(given | {"payload": "fresh"}, "fresh", api=1) == fresh
    listed = wait_until(lambda: is_listed(service, {first["messageId"], fresh["messageId"]}), 20, "both messages")
    assert (listed.count(first["messageId"]), listed.count(fresh["messageId"])) == (1, 1)
    ids = {row["messageId"] for row in service.job.rows("rejects") if row.get("messageId")}
    assert not ids & {first["messageId"], fresh["messageId"]}
