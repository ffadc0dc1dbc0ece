"""The Python client, the examples and what the docs show of it, with a running job, API and broker."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import subprocess
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import delayed_tasks
import fastapi_reminders
import httpx
import pulsar
import pytest
import yaml
from delaylake import (
    AsyncClient,
    Client,
    DelayLakeError,
    Invalid,
    MessageId,
    NotAllowed,
    NotFound,
    Outcome,
    Schedule,
    TooLate,
)
from delaylake.testing import FakeClient
from delaylake.times import moment
from pulsar.schema import Integer, JsonSchema, Record, StringSchema
from pydantic import BaseModel

from broker.standalone import EmbeddedBroker
from tests.conftest import RUN_SECONDS
from tests.support.clients import contract, java_package, node_client
from tests.support.clients.awaited_client import awaited
from tests.support.clients.java_package import compile_classes
from tests.support.clients.runtimes import need
from tests.support.clients.tokens import SECRET, encoded, token
from tests.support.service.harness import Api, Collector, Job, now, wait_until

ROOT = Path(__file__).parents[3]
SECONDS = 150.0  # for each call, on whatever machine
SUBSCRIPTIONS = [{"name": "billing"}, {"name": "audit", "type": "Failover"}]
# A message on which a consumer has failed is a dead letter.
STEPS_SUBSCRIPTIONS = [{"name": "billing", "backoff": {"attempts": 0}}, {"name": "audit", "type": "Failover"}]
ROUTES = (
    *("", "_reminders", "_tasks", "_java", "_fake", "_readme_node", "_readme_node_test", "_readme_java", "_typed"),
    *("_steps_sync", "_steps_async", "_steps_broker", "_steps_node", "_steps_java", "_steps_go"),
)
Kind = Literal["sync", "async"]


@dataclass(frozen=True)
class World:
    job: Job
    api: Api
    broker: str
    topic: str  # of it and of what begins so with an end of ROUTES there is a route

    def client(self, kind: Kind = "sync") -> Client:
        given: dict[str, Any] = {"broker": self.broker, "timeout_seconds": SECONDS}
        return awaited(AsyncClient(self.api.url, **given)) if kind == "async" else Client(self.api.url, **given)

    def client_without_api(self, kind: Kind = "sync") -> Client:
        control = self.job.settings.control
        topics = {"control_topic": control.topic, "outcome_topic": control.outcome_topic}
        given: dict[str, Any] = {"broker": self.broker, "timeout_seconds": SECONDS, **topics}
        return awaited(AsyncClient(**given)) if kind == "async" else Client(**given)


@pytest.fixture(scope="module")
def world(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    topic = f"persistent://public/default/clients_{uuid.uuid4().hex[:8]}"
    routes = [
        {"source": f"{topic}{use}", "subscriptions": STEPS_SUBSCRIPTIONS if "_steps" in use else SUBSCRIPTIONS}
        for use in ROUTES
    ]
    tracker = {"max_seal_interval_millis": 1500}
    job = Job(tmp_path_factory.mktemp("clients"), broker.settings, routes, tracker=tracker)
    api = Api(job.file)
    try:
        job.start()
        yield World(job, api, broker.settings.service_url, topic)
        assert job.terminate() == 0
    finally:
        api.stop()
        job.stop()


@pytest.fixture(scope="module")
def guarded(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API of the same job that wants tokens."""
    operations = ["schedule", "cancel", "skip", "deliver", "read", "admin"]
    roles = [{"role": "app", "operations": operations, "topics": [f"{world.topic}*"]}]
    auth = {"enabled": True, "token_secret_key": encoded(SECRET), "roles": roles}
    file = tmp_path_factory.mktemp("guarded") / "settings.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(world.job.file.read_text()), "auth": auth}))
    api = Api(file)
    yield api
    api.stop()


def shown(file: Path, world: World) -> list[str]:
    """The Python of a document, for this world's addresses and topic."""
    own = {
        '"http://127.0.0.1:8081"': repr(world.api.url),
        '"pulsar://localhost:6650"': f"{world.broker!r}, timeout_seconds={SECONDS}",
        '"orders"': repr(world.topic),
    }
    blocks = re.findall(r"```python\n(.*?)```", file.read_text(), re.S)
    blocks = [block for block in blocks if "from delaylake import" in block and "delaylake.testing" not in block]
    for there, here in own.items():
        assert all(there in block for block in blocks if "pulsar://" not in there or "broker=" in block), there
        blocks = [block.replace(there, here) for block in blocks]
    return blocks


def test_what_the_documents_show_is_done(world: World, collector: Collector) -> None:
    collector.collect(f"{world.topic}-billing")
    files = ("README.md", "docs/clients.md", "clients/python/README.md")
    blocks = [block for file in files for block in shown(ROOT / file, world)]
    assert len(blocks) == 4
    for block in blocks:
        exec(block, {})
    wait_until(lambda: collector.received[f"{world.topic}-billing"], 20, f"delivered\n{world.job.log}")
    [message] = collector.received[f"{world.topic}-billing"]
    assert (message.payload, message.key) == (b"ship it", "customer-7")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_each_command_over_http(world: World, collector: Collector, kind: Kind) -> None:
    later, at_last = datetime.now(UTC) + timedelta(hours=1), f"{world.topic}-audit"
    collector.collect(at_last)
    with world.client(kind) as lake:

        def send(text: str) -> MessageId:
            return lake.schedule(world.topic, text, at=later, key=kind, properties={"region": "eu"})

        ids = {text: send(text) for text in ("cancelled", "skipped", "moved", "restored", "at once")}
        both = Counter(["billing", "audit"])

        def done(outcomes: list[Any]) -> Counter[str]:
            assert {one.result for one in outcomes} <= {"APPLIED", "ALREADY_APPLIED"}, outcomes
            return Counter(one.subscription for one in outcomes if one.subscription != "*")

        key = uuid.uuid4().hex
        for _ in range(2):
            assert done(lake.cancel(world.topic, ids["cancelled"], request_id=key)) == both
        with pytest.raises(Invalid):
            lake.cancel(world.topic, ids["skipped"], request_id=key)
        with pytest.raises(NotAllowed) as refused:
            lake.skip(world.topic, ids["skipped"])
        results = {one.subscription: one.result for one in refused.value.outcomes}
        assert (results["billing"], results["audit"]) == ("APPLIED", "NOT_ALLOWED")
        assert done(lake.cancel(world.topic, str(ids["restored"]), deliver_at=later)) == both
        assert done(lake.restore(world.topic, ids["restored"], subscription="audit")) == Counter(["audit"])
        moved = later + timedelta(minutes=1)
        assert done(lake.reschedule(world.topic, ids["moved"], at=moved)) == both
        assert done(lake.deliver_now(world.topic, ids["at once"])) == both
        at_once = (b"at once", kind)
        wait_until(lambda: at_once in [(m.payload, m.key) for m in collector.received[at_last]], 20, world.job.log)
        with pytest.raises(TooLate):
            lake.cancel(world.topic, ids["at once"])
        with pytest.raises(NotFound):
            lake.skip(world.topic, "999999:0", subscription="billing")

        def state(text: str) -> tuple[set[str], set[str]] | None:
            try:
                found = lake.get(world.topic, ids[text])
            except NotFound:
                return None
            return set(found.waiting_for), set(found.cancelled_for)

        wait_until(lambda: state("restored") == ({"audit"}, {"billing"}), 20, "restored for one")
        assert state("cancelled") == (set(), {"billing", "audit"})
        assert state("skipped") == ({"audit"}, {"billing"})
        wait_until(lambda: lake.get(world.topic, ids["moved"]).message.deliver_at == _in_millis(moved), 20, "moved")

        def listed(**more: Any) -> set[MessageId]:
            return {one.id for one in lake.pending(world.topic, key=kind, properties={"region": "eu"}, **more)}

        assert listed(subscription="audit") == {ids["skipped"], ids["moved"], ids["restored"]}
        assert listed(due_from=moved - timedelta(seconds=1)) == {ids["moved"]}
        assert listed(state="cancelled", subscription="audit") == {ids["cancelled"]}


def _in_millis(time: datetime) -> datetime:
    rounded = -(-time.microsecond // 1000) * 1000
    return time.replace(microsecond=0) + timedelta(microseconds=rounded)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_commands_over_the_control_topic(world: World, kind: Kind) -> None:
    there: dict[str, Any] = {"subscription": "billing"}
    with world.client_without_api(kind) as lake:
        message = lake.schedule(world.topic, b"by hand", after=timedelta(hours=1))
        key = uuid.uuid4().hex
        for _ in range(2):
            [skipped] = lake.skip(world.topic, message, request_id=key, **there)
            assert (skipped.result, skipped.message) == ("APPLIED", message)
        with pytest.raises(Invalid):
            lake.deliver_now(world.topic, message, **there)
        assert [one.result for one in lake.restore(world.topic, message, **there)] == ["APPLIED"]
        assert lake.reschedule(world.topic, message, after=timedelta(hours=2), **there)
        assert lake.deliver_now(world.topic, message, **there)
        with pytest.raises(TooLate):
            lake.cancel(world.topic, message, **there)
        with pytest.raises(NotAllowed):
            lake.skip(world.topic, message, subscription="audit")
        assert [one.result for one in lake.cancel(world.topic, message, subscription="audit")] == ["APPLIED"]


def test_payloads_of_schemas_and_of_models(world: World, pulsar_client: pulsar.Client) -> None:
    topic, schema = f"{world.topic}_typed", JsonSchema(Order)
    consumer = pulsar_client.subscribe(
        f"{topic}-billing", "typed", schema=schema, initial_position=pulsar.InitialPosition.Earliest
    )
    soon = timedelta(seconds=1)
    with world.client() as over_broker, Client(world.api.url, timeout_seconds=SECONDS) as over_http:
        over_broker.schedule(topic, Order(n=1), after=soon, schema=schema)
        over_http.schedule(topic, Order(n=2), after=soon, schema=schema)
        over_http.schedule(topic, Model(n=3), after=soon, schema="JSON")
        got = [consumer.receive(int(SECONDS * 1000)).value().n for _ in range(3)]
        assert sorted(got) == [1, 2, 3]
        with pytest.raises(Invalid, match="newest is JSON"):
            over_http.schedule(topic, b"x", after=soon, schema="AVRO")
        with pytest.raises(ValueError, match="over a broker schema is one of"):
            over_broker.schedule(topic, b"x", after=soon, schema="JSON")
        with pytest.raises(Invalid, match="IncompatibleSchema"):
            over_broker.schedule(topic, "x", after=soon, schema=StringSchema())


class Order(Record):
    n = Integer(required=True)


class Model(BaseModel):
    n: int


@pytest.mark.parametrize("way", ["the API", "the control topic"])
def test_messages_by_schedule_key(world: World, way: str) -> None:
    key = f"order-7 over {way}"
    lake = world.client() if way == "the API" else world.client_without_api()
    later = datetime.now(UTC) + timedelta(hours=1)
    there: dict[str, Any] = {"subscription": "billing"}

    def is_seen(message: MessageId, waits: bool) -> bool:
        with world.client() as reader:
            listed = {one.id for one in reader.pending(world.topic, subscription="billing")}
        return (message in listed) == waits

    def result(outcomes: list[Outcome], message: MessageId) -> str:
        [one] = outcomes
        assert (one.subscription, one.message.ledger_id) == ("billing", message.ledger_id)
        assert one.message.entry_id == message.entry_id
        return one.result

    with lake:
        first = lake.schedule(world.topic, b"first", at=later, schedule_key=key)
        wait_until(lambda: is_seen(first, waits=True), 30, f"the first waits\n{world.job.log}")
        second = lake.schedule(world.topic, b"second", at=later, schedule_key=key)
        wait_until(lambda: is_seen(second, waits=True), 30, f"the second waits\n{world.job.log}")
        wait_until(lambda: is_seen(first, waits=False), 30, f"the first is superseded\n{world.job.log}")
        kept = lake.schedule(world.topic, b"kept out", at=later, schedule_key=key, schedule_mode="keep")
        limit = timedelta(hours=2)
        put_off: dict[str, Any] = {"schedule_key": f"{key} put off", "schedule_mode": "debounce", "debounce_max": limit}
        put = lake.schedule(world.topic, b"put off", at=later + timedelta(days=1), **put_off)
        wait_until(lambda: is_seen(put, waits=True), 30, f"the one that is put off waits\n{world.job.log}")
        with world.client() as reader:
            due = reader.get(world.topic, put).message.deliver_at
        assert due is not None
        assert due < datetime.now(UTC) + limit

        moved = later + timedelta(hours=1)
        assert result(lake.reschedule(world.topic, schedule_key=key, at=moved, **there), second) == "APPLIED"
        request_id = uuid.uuid4().hex
        for _ in range(2):
            by_key = lake.cancel(world.topic, schedule_key=key, request_id=request_id, **there)
            assert result(by_key, second) == "APPLIED"
        with pytest.raises(Invalid):
            lake.cancel(world.topic, schedule_key=f"{key} put off", request_id=request_id, **there)
        assert result(lake.restore(world.topic, second, **there), second) == "APPLIED"
        assert result(lake.skip(world.topic, schedule_key=key, **there), second) == "APPLIED"
        for command in (lake.cancel, lake.skip, lake.deliver_now):
            with pytest.raises(NotFound):
                command(world.topic, schedule_key=f"{key}, of nobody", **there)
        with pytest.raises(NotAllowed):
            lake.skip(world.topic, schedule_key=f"{key} put off", subscription="audit")

        last = lake.schedule(world.topic, b"last", at=later, schedule_key=key)
        wait_until(lambda: is_seen(last, waits=True), 30, f"the last waits\n{world.job.log}")
        assert not is_seen(kept, waits=True)
        assert result(lake.deliver_now(world.topic, schedule_key=key, **there), last) == "APPLIED"
        with pytest.raises(TooLate):
            lake.cancel(world.topic, last, **there)
        if way == "the API":
            everywhere = lake.cancel(world.topic, schedule_key=f"{key} put off")
            assert {one.subscription: one.result for one in everywhere} == dict.fromkeys(
                ("*", "billing", "audit"), "APPLIED"
            )


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_recurring_messages(world: World, kind: Kind) -> None:
    first_at, key = datetime.now(UTC) + timedelta(seconds=1), f"daily {kind}"
    with world.client(kind) as lake, world.client_without_api(kind) as direct:
        message = lake.schedule(world.topic, b"every day", at=first_at, repeat="@every 1d", schedule_key=key)

        def listed(**more: Any) -> Schedule | None:
            return next((one for one in lake.schedules(world.topic, **more) if one.id == message), None)

        def numbers() -> dict[str, int | None]:
            found = listed()
            return {one.subscription: one.next_occurrence for one in found.subscriptions} if found else {}

        wait_until(lambda: numbers() == {"billing": 2, "audit": 2}, 30, f"the schedule has begun\n{world.job.log}")
        request_id = uuid.uuid4().hex
        for _ in range(2):
            skipped = lake.skip_next(world.topic, message, request_id=request_id)
            assert {one.subscription: one.result for one in skipped} == {"billing": "APPLIED", "audit": "APPLIED"}
        assert [one.result for one in direct.skip_next(world.topic, message, subscription="billing")] == ["APPLIED"]
        everywhere = lake.skip_next(world.topic, message, subscription="*")
        assert {one.subscription: one.result for one in everywhere} == {"billing": "APPLIED", "audit": "APPLIED"}
        wait_until(lambda: numbers() == {"billing": 5, "audit": 4}, 30, f"some are skipped\n{world.job.log}")
        found = listed(subscription="billing")
        assert found is not None
        assert (found.repeat, found.schedule_key, found.state) == ("@every 1d", key, "waiting")
        assert found.first_deliver_at == _in_millis(first_at)
        assert found.next_deliver_at == found.first_deliver_at + timedelta(days=4)
        for call, state in ((lake.pause_schedule, "paused"), (lake.resume_schedule, "waiting")):
            told = call(world.topic, message, subscription="audit")
            assert [one.result for one in told] == ["APPLIED"]
            wait_until(lambda: (one := listed(subscription="audit")) and one.state == state, 30, state)  # noqa: B023
        # Who asks again is told the same, although the tables have moved on.
        once, again = uuid.uuid4().hex, uuid.uuid4().hex
        for request_id, result in ((once, "APPLIED"), (once, "APPLIED"), (again, "ALREADY_APPLIED")):
            ended = lake.end_schedule(world.topic, found.id, request_id=request_id)
            assert {one.subscription: one.result for one in ended} == {"billing": result, "audit": result}
            wait_until(lambda: listed() is None, 30, f"it has ended\n{world.job.log}")
        # No later subscription gets what has begun.
        cancelled = lake.cancel(world.topic, message, deliver_at=first_at)
        assert {one.subscription: one.result for one in cancelled} == dict.fromkeys(
            ("*", "billing", "audit"), "ALREADY_APPLIED"
        )
        over = listed(with_ended=True)
        assert over is not None
        assert over.state == "cancelled"
        with pytest.raises(Invalid):
            lake.skip_next(world.topic, message)


def test_the_reminders_of_the_example(
    world: World, monkeypatch: pytest.MonkeyPatch, pulsar_client: pulsar.Client
) -> None:
    monkeypatch.setattr(fastapi_reminders, "TOPIC", f"{world.topic}_reminders")
    monkeypatch.setenv("DELAYLAKE_URL", world.api.url)
    monkeypatch.setenv("PULSAR_URL", world.broker)
    app = fastapi_reminders.app
    later = {"at": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}

    async def use() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://x") as http,
        ):
            ids = []
            for text in ("call mother", "water the plants"):
                made = await http.post("/reminders", params={"text": text, **later})
                assert made.status_code == 201, made.text
                ids.append(made.json()["id"])
            assert (await http.delete(f"/reminders/{ids[0]}", params=later)).status_code == 204
            soon = {"at": datetime.now(UTC).isoformat()}
            assert (await http.put(f"/reminders/{ids[1]}", params=soon)).status_code == 200
            consumer = pulsar_client.subscribe(
                f"{world.topic}_reminders-billing", "phone", initial_position=pulsar.InitialPosition.Earliest
            )
            got = await asyncio.to_thread(consumer.receive, int(SECONDS * 1000))
            assert got.data() == b"water the plants"
            assert (await http.delete(f"/reminders/{ids[1]}", params=later)).status_code == 409
            assert (await http.delete("/reminders/nonsense", params=later)).status_code == 404
            assert (await http.delete(f"/reminders/{ids[1]}", params={"at": "2030-01-31T12:00"})).status_code == 422

    asyncio.run(use())


def test_the_tasks_of_the_example(world: World, pulsar_client: pulsar.Client) -> None:
    called = []
    with world.client() as lake:
        tasks = delayed_tasks.Tasks(lake, f"{world.topic}_tasks")

        @tasks.task
        def greet(name: str) -> None:
            called.append(name)

        revoked = greet.apply_async(("nobody",), countdown=3600)
        greet.apply_async(("world",), countdown=1)
        greet.apply_async(("past",), eta=datetime.now(UTC) - timedelta(days=1))
        revoked.revoke()
        consumer = pulsar_client.subscribe(
            f"{world.topic}_tasks-billing", "workers", initial_position=pulsar.InitialPosition.Earliest
        )
        for _ in range(2):
            tasks.work(consumer)
    assert sorted(called) == ["past", "world"]


def test_a_java_producer_changes_one_line(world: World, pulsar_client: pulsar.Client, tmp_path: Path) -> None:
    topic = f"{world.topic}_java"
    shared = pulsar_client.subscribe(topic, "shared", consumer_type=pulsar.ConsumerType.Shared)
    classes = compile_classes(tmp_path, "DeliverAtInterceptor")
    program = ROOT / "tests/java/Intercepted.java"
    before = now()
    due = before + int(SECONDS * 1000)
    command = [
        "java",
        "-XX:TieredStopAtLevel=1",
        "-cp",
        classes,
        str(program),
        world.broker,
        topic,
        str(due),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=RUN_SECONDS)

    # The broker would keep from a Shared subscription what it delays itself.
    got: dict[str, dict[str, str]] = {}
    for _ in range(6):
        message = shared.receive(int(SECONDS * 1000))
        got[message.data().decode()] = message.properties()
    assert got["at"] == {"region": "eu", "deliverAt": str(due)}
    assert before + 3_600_000 <= int(got["after"]["deliverAt"]) <= now() + 3_600_000
    assert (got["both"], got["none"]) == ({"deliverAt": str(due + 1)}, {})
    assert got["batched 1"] == got["batched 2"] == {"deliverAt": str(due)}
    assert "native" not in got
    with world.client() as lake:
        wait_until(
            lambda: {one.deliver_at for one in lake.pending(topic)} >= {moment(due), moment(due + 1)}, 20, "seen"
        )


def results(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a command is answered for each subscription, and the error that it raises."""
    try:
        outcomes, error = call(*arguments, **options), None
    except DelayLakeError as raised:
        outcomes, error = raised.outcomes, type(raised).__name__
    return sorted((o.subscription, o.result, o.is_done) for o in outcomes), error


def answers(
    lake: Client | FakeClient, topic: str, delivered: Callable[[int], None], expired: Callable[[int], None]
) -> Iterator[Any]:
    """Yields what commands of all kinds are answered, in all states of a message.

    Args:
        delivered: returns when so many deliveries have come.
        expired: returns when so many messages have expired.
    """
    hour = timedelta(hours=1)
    message = lake.schedule(topic, b"1", after=hour)
    one: dict[str, Any] = {"subscription": "billing"}
    # The first command finds the message, also where the job has still to read it.
    yield results(lake.postpone, topic, message, by=hour)
    yield results(lake.skip, topic, message)
    yield results(lake.skip, topic, message, **one)
    yield results(lake.reschedule, topic, message, after=hour, **one)
    yield results(lake.restore, topic, message, **one)
    yield results(lake.restore, topic, message)
    yield results(lake.cancel, topic, message, request_id="fake-1", **one)
    yield results(lake.cancel, topic, message, request_id="fake-1", **one)
    yield results(lake.restore, topic, message, request_id="fake-1", **one)
    yield results(lake.restore, topic, message, **one)
    changes: list[Callable[..., Any]] = [lake.skip_next, lake.pause_schedule, lake.resume_schedule]
    for change in changes:
        yield results(change, topic, message, **one)
    yield results(lake.retry, topic, message, **one)
    yield results(lake.deliver_now, topic, message)
    delivered(2)
    changes = [lake.cancel, lake.skip, lake.restore, lake.deliver_now]
    for change in changes:
        yield results(change, topic, message, **one)
    yield results(lake.postpone, topic, message, by=hour)
    yield results(lake.retry, topic, message, after=timedelta(seconds=5), **one)
    delivered(3)
    # One message of several under a request id.
    again = [lake.schedule(topic, b"once", after=hour, request_id="fake-2") for _ in range(2)]
    yield again[0] == again[1]
    yield results(lake.schedule, topic, b"another", after=hour, request_id="fake-2")
    # Names that there are not.
    yield results(lake.cancel, topic, message, subscription="nobody")
    yield results(lake.pause, topic, subscription="nobody")
    yield results(lake.reschedule, topic, schedule_key="none", after=hour)
    yield results(lake.cancel, f"{topic}_none", message)
    yield results(lake.cancel, topic, "999:0", deliver_at=lake_now(lake) + hour, **one)
    # A key.
    for i in range(3):
        lake.schedule(topic, str(i), after=hour, schedule_key="k", schedule_mode="keep" if i == 2 else None)
    yield results(lake.reschedule, topic, schedule_key="k", after=2 * hour)
    yield results(lake.deliver_now, topic, schedule_key="k")
    delivered(5)
    # A schedule.
    daily = lake.schedule(topic, b"daily", repeat="0 9 * * *")
    changes = [lake.skip_next, lake.pause_schedule, lake.pause_schedule]
    for change in changes:
        yield results(change, topic, daily, **one)
    yield results(lake.reschedule, topic, daily, after=hour, **one)
    yield results(lake.resume_schedule, topic, daily, **one)
    yield results(lake.resume_schedule, topic, daily)
    yield results(lake.retry, topic, daily, **one)
    yield results(lake.deliver_now, topic, daily, **one)
    delivered(6)
    yield results(lake.cancel, topic, daily, deliver_at=lake_now(lake) + hour, **one)
    # A pause.
    yield results(lake.pause, topic, **one)
    yield results(lake.pause, topic, **one)
    lake.schedule(topic, b"parked", after=timedelta(seconds=1))
    delivered(7)
    yield results(lake.resume, topic, **one)
    yield results(lake.resume, topic, **one)
    delivered(8)
    # What expires where it is parked; what can be sent in time comes.
    yield results(lake.pause, topic, **one)
    gone = lake.schedule(topic, b"gone", after=timedelta(seconds=1), expire_after=timedelta(seconds=3))
    delivered(9)
    expired(1)
    for change in (lake.cancel, lake.skip, lake.reschedule, lake.retry):
        given = one | ({"after": hour} if change == lake.reschedule else {})
        yield results(change, topic, gone, **given)
    yield results(lake.resume, topic, **one)
    end = lake_now(lake) + timedelta(seconds=60)
    lake.schedule(topic, b"in time", after=timedelta(seconds=1), expire_at=end)
    delivered(11)


@pytest.mark.parametrize("kind", ["sync", "async", "broker"])
def test_the_python_client_passes_the_steps_of_all_clients(world: World, guarded: Api, kind: str) -> None:
    topic, right = f"{world.topic}_steps_{kind}", token("app")
    with contextlib.ExitStack() as stack:

        def connect(wrong: str | None) -> Client:
            given: dict[str, Any] = {"token": wrong or right, "timeout_seconds": SECONDS}
            if kind == "broker":
                control = world.job.settings.control
                topics = {"control_topic": control.topic, "outcome_topic": control.outcome_topic}
                given |= {"broker": world.broker, **topics}
            made = awaited(AsyncClient(guarded.url, **given)) if kind == "async" else Client(guarded.url, **given)
            return stack.enter_context(made)

        by_token = functools.cache(connect)
        leaves_out = frozenset({"http"} if kind == "broker" else ())
        n = contract.check(by_token, topic, lambda: datetime.now(UTC), leaves_out)
    assert n > 40


def test_the_client_for_node_passes_the_steps_of_all_clients(world: World, guarded: Api) -> None:
    node_client.need_node()
    node_client.build()
    said = node_client.run(
        ["node", "--test", "--test-reporter", "tap", "test/contract.test.js"],
        environment=steps_environment(world, guarded, "node"),
    )
    assert "# pass 1" in said
    assert "# skipped 0" in said


def test_the_java_client_passes_the_steps_of_all_clients_and_its_application_works(
    world: World, guarded: Api, tmp_path: Path
) -> None:
    java_package.need_maven()
    java_package.verify(steps_environment(world, guarded, "java"))
    tested = java_package.tested("client")
    assert tested["delaylake.ContractTest"] == (1, 0)
    assert [skipped for _, skipped in tested.values()] == [0, 0]
    assert java_package.tested("spring-boot-example") == {"example.RemindersTest": (1, 0)}
    [block] = re.findall(r"```java\n(.*?)```", (java_package.FOLDER / "README.md").read_text(), re.S)
    topic = f"{world.topic}_readme_java"
    here = block.replace("http://127.0.0.1:8081", world.api.url).replace('"orders"', f'"{topic}"')
    java_package.run_example(here, tmp_path)
    wait_until_cancelled(world, topic)


def test_the_go_example_passes_the_steps_of_all_clients(world: World, guarded: Api) -> None:
    need("go", "Go 1.22+")
    environment = steps_environment(world, guarded, "go")
    done = subprocess.run(
        ["go", "test", "-v", "-count=1", "./..."],
        cwd=ROOT / "docs/examples/go",
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--- PASS: TestTheStepsThatAllClientsPass" in done.stdout


def steps_environment(world: World, api: Api, client: str) -> dict[str, str]:
    """What a client of another language is told of the service."""
    service = {"URL": api.url, "TOPIC": f"{world.topic}_steps_{client}", "TOKEN": token("app")}
    return {**os.environ, **{f"DELAYLAKE_{name}": value for name, value in service.items()}}


def test_what_the_readme_of_node_shows_is_done(world: World, tmp_path: Path) -> None:
    node_client.need_node()
    node_client.build()
    example, example_test = re.findall(r"```js\n(.*?)```", (node_client.FOLDER / "README.md").read_text(), re.S)
    modules = tmp_path / "node_modules"
    modules.mkdir()
    (modules / "delaylake-client").symlink_to(node_client.FOLDER)
    topic = f"{world.topic}_readme_node"
    here = example.replace("http://127.0.0.1:8081", world.api.url).replace('"orders"', f'"{topic}"')
    (tmp_path / "readme.mjs").write_text(here)
    node_client.run(["node", "readme.mjs"], tmp_path)
    wait_until_cancelled(world, topic)
    # The service that the example's test starts is this one.
    program = tmp_path / "delaylake"
    program.write_text(
        f"#!/bin/sh\necho '{json.dumps({'event': 'ready', 'api': world.api.url})}'\nexec sleep {RUN_SECONDS}\n"
    )
    program.chmod(0o755)
    here = example_test.replace("/path/to/delaylake/.venv/bin/delaylake", str(program))
    here = here.replace('"orders"', f'"{world.topic}_readme_node_test"')
    (tmp_path / "orders.test.mjs").write_text(here)
    node_client.run(["node", "--test", "orders.test.mjs"], tmp_path)


def wait_until_cancelled(world: World, topic: str) -> None:
    """Waits until the one message of a topic is listed as cancelled for both subscriptions, at whatever times."""

    def is_cancelled() -> bool:
        with world.client() as lake:
            listed = [*lake.pending(topic, state="cancelled")]
        names = sorted(name for one in listed for name in one.subscriptions)
        return len({one.id for one in listed}) == 1 and names == ["audit", "billing"]

    wait_until(is_cancelled, 20, f"what the example cancels\n{world.job.log}")


def lake_now(lake: Client | FakeClient) -> datetime:
    return lake.now if isinstance(lake, FakeClient) else datetime.now(UTC)


def test_the_service_in_memory_answers_and_delivers_as_the_service(world: World, collector: Collector) -> None:
    topic = f"{world.topic}_fake"
    fake = FakeClient({topic: {s["name"]: s.get("type", "Shared") for s in SUBSCRIPTIONS}})

    def has_expired(n: int) -> None:
        assert len(fake.expired) == n

    def wait_for_expired(n: int) -> None:
        sql = f"SELECT * FROM {{table}} WHERE result = 'EXPIRED' AND topic = '{topic}'"
        wait_until(lambda: len(world.job.rows("outcomes", sql)) == n, 30, f"{n} expired\n{world.job.log}")

    def advance(n: int) -> None:
        fake.advance(timedelta(seconds=10))
        assert len(fake.deliveries) == n

    places = {name: f"{topic}-{name}" for name in ("billing", "audit")}
    for place in places.values():
        collector.collect(place)

    def wait(n: int) -> None:
        wait_until(lambda: sum(len(collector.received[p]) for p in places.values()) >= n, 30, f"{n}\n{world.job.log}")

    with Client(world.api.url, timeout_seconds=SECONDS) as lake:
        real, in_memory = answers(lake, topic, wait, wait_for_expired), answers(fake, topic, advance, has_expired)
        answered = list(zip(real, in_memory, strict=True))
    differ = [f"{number}: {real}, in memory {ours}" for number, (real, ours) in enumerate(answered) if real != ours]
    assert not differ, "\n".join(differ)
    names = ("delaylake.occurrence", "delaylake.attempt")
    for name, place in places.items():
        came = [(m.payload, *map(m.properties.get, names)) for m in collector.received[place]]
        ours = [(d.payload, *map(d.properties.get, names)) for d in fake.deliveries if d.subscription == name]
        assert ours == came
