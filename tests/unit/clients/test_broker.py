"""The Python client over Pulsar: what it publishes, and when a command is answered."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest
from delaylake import (
    AsyncClient,
    Client,
    DelayLakeError,
    Invalid,
    MessageId,
    NoAnswer,
    NotFound,
    Outcome,
    TooLate,
    Unavailable,
    broker,
)
from delaylake.broker import CONTROL_TOPIC, Broker
from delaylake.commands import cancel, command
from delaylake.scheduled import scheduled

from broker.client import FIRST_SEQUENCE_ID
from tests.support.clients.awaited_client import awaited
from tracker.wire.delaylake_pb2 import CancelDelayedMessage, ControlCommand, ControlOutcome, Result, SkipEntry

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
NOON_MILLIS = 1_896_091_200_000


class FakePulsar:
    """A Pulsar client whose producers answer with a result's name, and whose reader has what it is given."""

    def __init__(self, result: str = "Ok") -> None:
        self.sent: list[tuple[str, bytes, dict[str, Any]]] = []
        self.outcomes: list[ControlOutcome] = []
        self.missing = "missing"
        self._result = result

    def create_producer(self, topic: str, **_: Any) -> Any:
        if self.missing in topic:
            raise pulsar.TopicNotFound

        def send_async(payload: bytes, answered: Any, **more: Any) -> None:
            self.sent.append((topic, payload, more))
            if answered and self._result != "silence":
                answered(SimpleNamespace(name=self._result), pulsar.MessageId(2, 7, 5, -1))

        return SimpleNamespace(send_async=send_async)

    def create_reader(self, *_: Any) -> Any:
        def read_next(_: int) -> Any:
            if not self.outcomes:
                raise pulsar.Timeout
            outcome = self.outcomes.pop(0)
            return SimpleNamespace(partition_key=lambda: outcome.request_id, data=outcome.SerializeToString)

        return SimpleNamespace(read_next=read_next)

    def close(self) -> None: ...


class SilentPulsar(FakePulsar):
    """Connects only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.connects = threading.Event()
        self.asked: list[str] = []

    def create_producer(self, topic: str, **more: Any) -> Any:
        self.asked.append(topic)
        assert self.connects.wait(20)
        return super().create_producer(topic, **more)

    def close(self) -> None:
        self.connects.set()


def client_of(fake: Any, timeout: float = 5.0, kind: type[Any] = Client) -> Any:
    client = kind(broker="pulsar://127.0.0.1:1", timeout_seconds=20)
    client._broker._client = fake
    # What has a route; others are asked for.
    client._broker._asked_again = {f"persistent://public/default/{name}": math.inf for name in ("orders", "missing")}
    if not isinstance(fake, SilentPulsar):
        for topic in (CONTROL_TOPIC, "persistent://public/default/orders"):
            client._broker._producer(topic, time.monotonic() + 20)
    client._timeout_seconds = client._broker._timeout_seconds = timeout
    return client


def both(client: Any) -> Client:
    return awaited(client) if isinstance(client, AsyncClient) else client


def told(
    result: Result,
    subscription: str = "a",
    batch_index: int = -1,
    has_more: bool = False,
    ledger: int = 7,
    schedule_key: str = "",
) -> ControlOutcome:
    return ControlOutcome(
        request_id="mine",
        subscription=subscription,
        ledger_id=ledger,
        entry_id=0,
        batch_index=batch_index,
        has_more=has_more,
        result=result,
        schedule_key=schedule_key,
    )


def test_a_message_is_sent_with_its_time_and_its_id_knows_it() -> None:
    fake = FakePulsar()
    with client_of(fake) as lake:
        message = lake.schedule("orders", "ü", at=NOON, key="k", properties={"region": "eu"}, event_time=NOON)
    assert (message, message.deliver_at) == (MessageId(7, 5, 2), NOON)
    [(topic, payload, more)] = fake.sent
    assert (topic, payload) == ("persistent://public/default/orders", "ü".encode())
    assert more["properties"] == {"region": "eu", "deliverAt": str(NOON_MILLIS)}
    assert (more["partition_key"], more["event_timestamp"]) == ("k", NOON_MILLIS)


class AnsweringPulsar(FakePulsar):
    """A job answers each command: no route has the topic, or it has no such subscription."""

    def __init__(self) -> None:
        super().__init__()
        self.routes: set[str] = set()
        self.is_late = False  # whether answers wait for `answer_late`
        self._late: list[ControlOutcome] = []

    def answer_late(self) -> None:
        self.is_late = False
        self.outcomes += self._late

    def create_producer(self, topic: str, **more: Any) -> Any:
        producer = super().create_producer(topic, **more)
        if topic != CONTROL_TOPIC:
            return producer

        def send_async(payload: bytes, answered: Any, **_: Any) -> None:
            producer.send_async(payload, answered)
            asked = ControlCommand.FromString(payload)
            known = asked.topic in self.routes
            (self._late if self.is_late else self.outcomes).append(
                ControlOutcome(
                    request_id=asked.request_id,
                    topic=asked.topic,
                    subscription=asked.subscriptions[0] if known else "",
                    ledger_id=-1,
                    entry_id=-1,
                    batch_index=-1,
                    result=Result.NOT_FOUND,
                    schedule_key=asked.skip.entries[0].schedule_key,
                    reason="the topic has no such subscription" if known else f"no route has the topic {asked.topic!r}",
                )
            )

        return SimpleNamespace(send_async=send_async)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_topic_without_a_route_is_not_found_and_asked_for_once(kind: type[Any]) -> None:
    fake = AnsweringPulsar()
    other = "persistent://public/default/other"
    with both(client_of(fake, kind=kind)) as lake:
        with pytest.raises(NotFound, match=f"no route has the topic {other}"):
            lake.schedule("other", b"x", at=NOON)
        assert {topic for topic, _, _ in fake.sent} == {CONTROL_TOPIC}
        fake.routes.add(other)
        for _ in range(3):
            lake.schedule("other", b"x", at=NOON)
    assert [topic for topic, _, _ in fake.sent] == [CONTROL_TOPIC] * 2 + [other] * 3


def test_an_answer_that_comes_late_counts_for_later_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "_ROUTE_SECONDS", 0.05)
    fake = AnsweringPulsar()
    fake.is_late = True
    other = "persistent://public/default/other"
    with client_of(fake) as lake:
        lake.schedule("other", b"x", at=NOON)
        fake.answer_late()
        end = time.monotonic() + 20

        def send_until_it_fails() -> None:
            while time.monotonic() < end:
                lake.schedule("other", b"x", at=NOON)
                time.sleep(0.01)

        with pytest.raises(NotFound, match=f"no route has the topic {other}"):
            send_until_it_fails()
        # It has one by now, and is asked for no more.
        fake.routes.add(other)
        n = [topic for topic, _, _ in fake.sent].count(CONTROL_TOPIC)
        for _ in range(2):
            lake.schedule("other", b"x", at=NOON)
    assert [topic for topic, _, _ in fake.sent].count(CONTROL_TOPIC) == n + 1


def test_where_no_job_answers_a_message_is_sent_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "_ROUTE_SECONDS", 0.05)
    fake = FakePulsar()
    with client_of(fake) as lake:
        for _ in range(2):
            lake.schedule("other", b"x", at=NOON)
    other = "persistent://public/default/other"
    assert [topic for topic, _, _ in fake.sent] == [CONTROL_TOPIC, other, other]


def test_a_request_id_is_a_property_and_a_repeated_call_is_the_same_message() -> None:
    fake = FakePulsar()
    with client_of(fake) as lake:
        for _ in range(2):
            lake.schedule("orders", b"x", after=timedelta(seconds=5), request_id="mine")
    first, again = [more["properties"] for _, _, more in fake.sent]
    assert first == again == {"requestId": "mine", "deliverAfter": "5000"}
    with client_of(FakePulsar("Timeout")) as lake, pytest.raises(NoAnswer) as raised:
        lake.schedule("orders", b"x", at=NOON, request_id="mine")
    assert raised.value.request_id == "mine"


def test_producers_go_on_counting_when_a_partition_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which they do with an initial sequence id; Pulsar's client takes 0 for none."""
    made: list[Any] = []
    client: Any = object.__new__(pulsar.Client)
    client._client = SimpleNamespace(create_producer=lambda _, configuration: made.append(configuration))
    lake = Client(broker="pulsar://127.0.0.1:1")
    assert lake._broker is not None
    monkeypatch.setattr(lake._broker, "_client", client)
    lake._broker._connect("persistent://public/default/orders")
    client.create_producer("orders", initial_sequence_id=FIRST_SEQUENCE_ID)
    assert [configuration.initial_sequence_id() for configuration in made] == [1, 1]


@pytest.mark.parametrize(
    ("result", "error"),
    [
        ("Timeout", NoAnswer),
        ("MessageTooBig", Invalid),
        ("NotAllowedError", Invalid),
        ("ConnectError", Unavailable),
        ("silence", NoAnswer),
    ],
)
def test_a_message_that_is_not_taken(result: str, error: type[DelayLakeError]) -> None:
    with client_of(FakePulsar(result), 0.1 if result == "silence" else 20.0) as lake:
        with pytest.raises(DelayLakeError) as raised:
            lake.schedule("orders", b"", at=NOON)
        assert type(raised.value) is error


def test_the_time_of_a_call_is_for_connecting_and_its_answer_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    lake = Client(broker="pulsar://127.0.0.1:1", timeout_seconds=30)
    waited: list[float | None] = []

    def connect(self: Broker, *_: Any) -> Future[Any]:
        nonlocal clock
        clock += 29.75
        return _Unanswered(waited)

    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(Broker, "schedule", connect)
    monkeypatch.setattr(Broker, "send", connect)
    for call in (
        lambda: lake.schedule("orders", b"", at=NOON),
        lambda: lake.skip("orders", "7:0", subscription="a"),
    ):
        with pytest.raises(Unavailable):
            call()
    assert waited == [0.25, 0.25]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_who_waits_for_a_silent_broker_waits_no_longer_than_a_call_may(kind: type[Any]) -> None:
    """However many wait: the first one connects for all."""
    fake, calls = SilentPulsar(), 12
    command: dict[str, Any] = {"subscription": "a", "request_id": "mine"}

    async def ask() -> list[Any]:
        async with client_of(fake, 0.3, AsyncClient) as lake:
            asked = [lake.schedule("orders", b"", at=NOON) for _ in range(calls)]
            return await asyncio.gather(*asked, lake.skip("orders", "7:0", **command), return_exceptions=True)

    def ask_in_threads() -> list[Any]:
        with client_of(fake, 0.3) as lake, ThreadPoolExecutor(calls + 1) as pool:
            asked = [pool.submit(lake.schedule, "orders", b"", at=NOON) for _ in range(calls)]
            last = pool.submit(lake.skip, "orders", "7:0", **command)
            return [one.exception() for one in (*asked, last)]

    found = ask_in_threads() if kind is Client else asyncio.run(ask())
    assert {type(one) for one in found} == {Unavailable}
    assert {"pulsar://127.0.0.1:1 does not answer" in str(one) for one in found} == {True}
    assert found[-1].request_id == "mine"
    assert len(fake.asked) == len(set(fake.asked))


def test_nothing_is_sent_when_the_time_of_its_call_is_over() -> None:
    """Who called was told that it was not: a copy would be another message."""
    fake, before = FakePulsar(), time.monotonic() - 1
    with client_of(fake) as lake:
        for send in (
            lambda: lake._broker.schedule(scheduled("orders", b"", NOON, None, None, None, None, None), before),
            lambda: lake._broker.send(command("skip", "orders", "7:0", "a", "mine"), before),
        ):
            with pytest.raises(Unavailable):
                send()
    assert not fake.sent


@pytest.mark.slow
def test_a_program_that_ends_while_a_broker_does_not_answer_is_not_aborted() -> None:
    program = """
        import socket
        from datetime import timedelta
        from delaylake import Client, Unavailable

        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"pulsar://127.0.0.1:{server.getsockname()[1]}"
            lake = Client(broker=url, timeout_seconds=0.3, broker_options={"connection_timeout_ms": 30_000})
            try:
                lake.schedule("orders", b"", after=timedelta(1))
            except Unavailable as error:
                print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "does not answer" in done.stdout


def test_a_client_that_was_connected_before_a_fork_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the child it would wait for threads that only the parent has."""
    lake = Client(broker="pulsar://127.0.0.1:1")
    assert lake._broker is not None
    monkeypatch.setattr(lake._broker, "_process", os.getpid() + 1)
    with pytest.raises(RuntimeError, match="before a fork"):
        lake.schedule("orders", b"", at=NOON)
    lake.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_topic_that_could_not_be_connected_is_connected_by_the_next_call(kind: type[Any]) -> None:
    fake = FakePulsar()
    with both(client_of(fake, kind=kind)) as lake:
        for _ in range(2):
            with pytest.raises(NotFound, match=r"missing at pulsar://127\.0\.0\.1:1: TopicNotFound"):
                lake.schedule("missing", b"", at=NOON)
        fake.missing = "nothing"
        lake.schedule("missing", b"", at=NOON)
    assert len(fake.sent) == 1


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_what_is_sent_while_the_client_is_closed_may_be_sent(kind: type[Any]) -> None:
    """The broker has it, and has not told."""
    fake = FakePulsar("AlreadyClosed")
    with both(client_of(fake, kind=kind)) as lake, pytest.raises(NoAnswer):
        lake.schedule("orders", b"", at=NOON)
    lake = client_of(FakePulsar(), kind=kind)
    assert lake._broker is not None
    told = lake._broker.send(command("skip", "orders", "7:0", "a", "mine"), time.monotonic() + 20)
    lake._broker.close()
    with pytest.raises(NoAnswer, match="closed") as raised:
        told.result(0)
    assert raised.value.request_id == "mine"


class _Unanswered(Future[Any]):
    """Notes how long it is waited for, and has no answer."""

    def __init__(self, waited: list[float | None]) -> None:
        super().__init__()
        self._waited = waited

    def result(self, timeout: float | None = None) -> Any:
        self._waited.append(timeout)
        raise TimeoutError


def test_commands_are_those_of_the_control_topic() -> None:
    fake = FakePulsar("Timeout")
    with client_of(fake) as lake:
        there: Any = {"subscription": "a", "request_id": "mine"}
        for ask in (
            lambda: lake.cancel("orders", "7:0", deliver_at=NOON, **there),
            lambda: lake.skip("orders", "7:0:2:3", **there),
            lambda: lake.restore("orders", "7:0", **there),
            lambda: lake.reschedule("orders", "7:0", at=NOON, **there),
            lambda: lake.deliver_now("orders", "7:0", **there),
            lambda: lake.retry("orders", "7:0", reason="no", **there),
            lambda: lake.skip_next("orders", "7:0", **there),
            lambda: lake.pause_schedule("orders", "7:0", **there),
            lambda: lake.resume_schedule("orders", "7:0", **there),
            lambda: lake.postpone("orders", "7:0", by=timedelta(seconds=-2), **there),
        ):
            with pytest.raises(NoAnswer) as raised:
                ask()
            assert raised.value.request_id == "mine"
        assert lake._broker is not None
        assert not lake._broker._waiting
    sent = [ControlCommand.FromString(payload) for payload in dict.fromkeys(payload for _, payload, _ in fake.sent)]
    kinds = ["cancel", "skip", "restore", "reschedule", "reschedule", "retry", "skip_next"]
    kinds += ["pause_schedule", "resume_schedule", "postpone"]
    assert [one.WhichOneof("operation") for one in sent] == kinds
    assert {(one.request_id, *one.subscriptions) for one in sent} == {("mine", "a")}
    assert [one.topic.rpartition("/")[2] for one in sent] == ["orders", "orders-partition-2", *["orders"] * 8]
    assert sent[0].cancel.deliver_at == sent[3].reschedule.deliver_at == NOON_MILLIS
    assert (sent[-1].postpone.by_millis, len(sent[-1].postpone.entries)) == (-2_000, 1)
    assert (sent[5].retry.reason, sent[5].retry.after_millis) == ("no", 0)
    assert (list(sent[1].skip.entries[0].batch_indexes), sent[4].reschedule.deliver_at) == ([3], 0)


@pytest.mark.slow
def test_a_reschedule_after_some_time_without_an_answer_can_be_asked_again_as_it_was() -> None:
    fake = FakePulsar("Timeout")
    there: Any = {"subscription": "a"}

    async def ask() -> None:
        async with client_of(fake, kind=AsyncClient) as lake:
            await lake.reschedule("orders", "7:0", after=timedelta(hours=1), **there)

    with client_of(fake) as lake:
        for first in (
            lambda: asyncio.run(ask()),
            lambda: lake.reschedule("orders", "7:0", after=timedelta(hours=1), **there),
        ):
            fake.sent.clear()
            with pytest.raises(NoAnswer) as raised:
                first()
            error = raised.value
            with pytest.raises(NoAnswer):
                lake.reschedule("orders", "7:0", at=error.deliver_at, request_id=error.request_id, **there)
            assert len(fake.sent) == 2
            sent = [ControlCommand.FromString(payload) for _, payload, _ in fake.sent]
            assert {one.request_id for one in sent} == {error.request_id}
            assert len({one.reschedule.deliver_at for one in sent}) == 1


def test_commands_by_schedule_key_are_those_of_the_control_topic() -> None:
    fake = FakePulsar("Timeout")
    with client_of(fake) as lake:
        there: Any = {"schedule_key": "k", "subscription": "a", "request_id": "mine"}
        for ask in (
            lambda: lake.cancel("orders", **there),
            lambda: lake.skip("orders", **there),
            lambda: lake.reschedule("orders", at=NOON, **there),
            lambda: lake.deliver_now("orders", **there),
            lambda: lake.skip_next("orders", **there),
            lambda: lake.pause_schedule("orders", **there),
            lambda: lake.resume_schedule("orders", **there),
        ):
            with pytest.raises(NoAnswer):
                ask()
    sent = [ControlCommand.FromString(payload) for payload in dict.fromkeys(payload for _, payload, _ in fake.sent)]
    assert list(sent[0].cancels.messages) == [CancelDelayedMessage(schedule_key="k")]
    by_key = [SkipEntry(schedule_key="k")]
    assert list(sent[1].skip.entries) == list(sent[2].reschedule.entries) == list(sent[3].reschedule.entries) == by_key
    assert [one.reschedule.deliver_at for one in sent[2:4]] == [NOON_MILLIS, 0]
    assert list(sent[4].skip_next.entries) == by_key
    assert list(sent[5].pause_schedule.entries) == list(sent[6].resume_schedule.entries) == by_key
    assert {(one.topic, *one.subscriptions) for one in sent} == {("persistent://public/default/orders", "a")}


@pytest.mark.slow
def test_a_command_without_an_answer_is_sent_once_more() -> None:
    """The outcome was dropped with the topic, which the broker has unloaded: it is told again."""
    fake = FakePulsar()
    with client_of(fake, 1.0) as lake:
        assert lake._broker is not None
        future = lake._broker.send(command("skip", "orders", "7:0", "a", "mine"), time.monotonic() + 20)
        deadline = time.monotonic() + 10
        while len(fake.sent) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not future.done()
        fake.outcomes.append(told(Result.APPLIED))
        assert [one.result for one in future.result(10)] == ["APPLIED"]
    first, again = (payload for _, payload, _ in fake.sent)
    assert first == again


def answer(of: Any, *outcomes: ControlOutcome) -> Future[list[Outcome]]:
    """What a command is told after these outcomes, the last of which is its last."""
    fake: Any = FakePulsar()
    client = client_of(fake)
    assert client._broker is not None
    broker: Broker = client._broker
    future = broker.send(of, time.monotonic() + 20)
    fake.outcomes += outcomes
    future.exception(5)
    client.close()
    return future


@pytest.mark.slow
def test_a_command_is_answered_by_the_last_outcome_of_its_message() -> None:
    entry = command("skip", "orders", "7:0", "a", "mine")
    found = answer(
        entry,
        told(Result.APPLIED, "b"),
        told(Result.WAITING),
        told(Result.APPLIED, batch_index=0, has_more=True),
        told(Result.ALREADY_APPLIED, batch_index=1),
    )
    assert [(one.message.batch_index, one.result) for one in found.result()] == [(0, "APPLIED"), (1, "ALREADY_APPLIED")]
    one = command("skip", "orders", "7:0:1", "a", "mine")
    found = answer(one, told(Result.TOO_LATE, batch_index=1))
    assert isinstance(found.exception(), TooLate)
    whole = answer(one, told(Result.NOT_FOUND, "", ledger=-1))
    assert isinstance(whole.exception(), NotFound)
    waiting = answer(cancel("orders", "7:0", "a", "mine", NOON), told(Result.WAITING))
    assert [o.result for o in waiting.result()] == ["WAITING"]


@pytest.mark.slow
def test_a_command_by_schedule_key_is_answered_by_an_outcome_of_its_key() -> None:
    of_key = command("skip", "orders", None, "a", "mine", "k")
    found = answer(
        of_key,
        told(Result.NOT_FOUND, schedule_key="another"),
        told(Result.APPLIED, "b", schedule_key="k"),
        told(Result.APPLIED, batch_index=3, schedule_key="k"),
    )
    assert found.result() == [Outcome("a", MessageId(7, 0, -1, 3), "APPLIED")]
    assert isinstance(answer(of_key, told(Result.NOT_FOUND, ledger=-1, schedule_key="k")).exception(), NotFound)
    assert isinstance(answer(of_key, told(Result.INVALID, "", ledger=-1)).exception(), Invalid)
    cancelled = answer(cancel("orders", None, "a", "mine", None, "k"), told(Result.TOO_LATE, schedule_key="k"))
    assert isinstance(cancelled.exception(), TooLate)
