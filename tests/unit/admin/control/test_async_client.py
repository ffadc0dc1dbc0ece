"""The API's connection to the broker: callers wait side by side for their outcomes; or there is no broker."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest
from delaylake.commands import Ids
from delaylake.control import ControlRequest
from delaylake.wire.delaylake_pb2 import ControlCommand, ControlOutcome, Result

from admin.control import async_client
from admin.control.async_client import AsyncControlClient, NoOutcomeError
from admin.control.requests import request_factory
from broker.entries.message_ids import MessageRef
from conf.settings import Settings
from tracker.commands.kinds import SKIP

TOPIC = "persistent://public/default/orders"
SETTINGS = Settings(routes=[{"source": TOPIC, "subscriptions": [{"name": "a"}]}])  # type: ignore[arg-type]

RUN = AsyncControlClient._run  # what it is where no fixture has replaced it


class FakePulsar:
    """In place of the producer and the reader."""

    def __init__(self) -> None:
        self.sent: list[ControlCommand] = []

    def is_connected(self) -> bool:
        return True

    def send_async(self, data: bytes, _: Any) -> None:
        self.sent.append(ControlCommand.FromString(data))


def skip(request_id: str) -> ControlRequest:
    factory = request_factory(SETTINGS, "tester", TOPIC, ["a"], request_id=request_id)
    return next(factory.make(SKIP, Ids([MessageRef(1, 2)])))


def outcome(request_id: str) -> bytes:
    return ControlOutcome(
        request_id=request_id, subscription="a", ledger_id=1, entry_id=2, batch_index=-1, result=Result.APPLIED
    ).SerializeToString()


def test_who_asks_again_and_who_asked_first_are_both_answered() -> None:
    async def ask() -> list[list[Any]]:
        async with AsyncControlClient(SETTINGS) as client:
            pulsar: Any = FakePulsar()
            client._reader = client._producer = pulsar
            first, again = (asyncio.create_task(client.send([skip("x")], 5)) for _ in range(2))
            while len(pulsar.sent) < 2:
                await asyncio.sleep(0)
            with pytest.raises(NoOutcomeError):  # whoever gives up leaves the others their answers
                await client.send([skip("x")], 0.01)
            client._take(outcome("x"))
            answers = [await first, await again]
            assert not client._waiting
            return answers

    assert [[o.result for o in answer] for answer in asyncio.run(ask())] == [["APPLIED"], ["APPLIED"]]


@pytest.mark.slow
def test_who_has_no_answer_after_half_the_time_asks_once_more() -> None:
    """The outcome was dropped with the topic, which the broker has unloaded: it is told again."""

    async def ask() -> tuple[list[Any], list[ControlCommand]]:
        async with AsyncControlClient(SETTINGS) as client:
            pulsar: Any = FakePulsar()
            client._reader = client._producer = pulsar
            asked = asyncio.create_task(client.send([skip("x")], 2))
            while len(pulsar.sent) < 2:
                await asyncio.sleep(0.01)
            assert not asked.done()
            client._take(outcome("x"))
            return await asked, pulsar.sent

    answers, sent = asyncio.run(ask())
    assert [o.result for o in answers] == ["APPLIED"]
    assert sent[0] == sent[1]


def test_a_call_that_comes_while_the_first_connection_is_made_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncControlClient, "_run", lambda self: None)
    monkeypatch.setattr(async_client, "_FIRST_CONNECTION_SECONDS", 300)

    async def ask() -> list[Any]:
        async with AsyncControlClient(SETTINGS) as client:
            pulsar: Any = FakePulsar()
            asked = asyncio.create_task(client.send([skip("x")], 300))
            await asyncio.sleep(0.05)
            assert not asked.done()
            client._reader = client._producer = pulsar
            client._has_tried = True
            while not pulsar.sent:
                await asyncio.sleep(0.01)
            client._take(outcome("x"))
            return await asked

    assert [one.result for one in asyncio.run(ask())] == ["APPLIED"]


def test_it_ends_at_once_while_it_waits_for_a_broker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncControlClient, "_run", RUN)
    monkeypatch.setattr(async_client, "_OPERATION_SECONDS", 300)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = Settings(pulsar={"service_url": f"pulsar://127.0.0.1:{silent.getsockname()[1]}"})  # type: ignore[arg-type]

        async def start_and_end() -> float:
            async with AsyncControlClient(settings) as client:
                connection, _ = await asyncio.to_thread(silent.accept)
                began = time.monotonic()
            took = time.monotonic() - began
            connection.close()
            assert not client._thread.is_alive()
            return took

        assert asyncio.run(start_and_end()) < 100
