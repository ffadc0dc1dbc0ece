"""Which of the job's outcomes answers a call that schedules a message."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pulsar
import pyarrow as pa
import pytest
from delaylake.wire.delaylake_pb2 import ControlOutcome, Result

from admin.control.async_client import ControlUnavailableError, NoOutcomeError
from admin.control.scheduling import (
    MessageRefusedError,
    MessageTooLargeError,
    NewMessage,
    ScheduledMessage,
    Scheduler,
)
from conf.settings import Settings
from tests.support.tracker.messages import TOPIC
from tracker.requests import outcome_id
from warehouse.delta.tables import Tables
from warehouse.schemas import SCHEMAS

DUE = 5_000


class Control:
    """The connection: gives each sent message a position, and lets a test tell outcomes."""

    def __init__(self, entry: Callable[[int], tuple[int, int]] = lambda n: (7, n), result: str = "Ok") -> None:
        self.client = object()
        self.sent: list[dict[str, Any]] = []
        self._entry, self._result = entry, result
        self._hearing: defaultdict[str, list[asyncio.Queue[ControlOutcome]]] = defaultdict(list)
        self.is_connected = True

    async def connected(self) -> None:
        if not self.is_connected:
            raise ControlUnavailableError("no connection")

    def make_producer(self, topic: str, options: dict[str, Any]) -> Any:
        def send_async(payload: bytes, callback: Any, **more: Any) -> None:
            ledger, entry = self._entry(len(self.sent))
            self.sent.append({"payload": payload, **more})
            position = SimpleNamespace(
                ledger_id=lambda: ledger, entry_id=lambda: entry, partition=lambda: 2, batch_index=lambda: -1
            )
            callback(SimpleNamespace(name=self._result), position)

        if topic == "closed":
            raise pulsar.AuthorizationError
        return SimpleNamespace(send_async=send_async)

    @contextmanager
    def hearing(self, request_id: str) -> Iterator[asyncio.Queue[ControlOutcome]]:
        queue: asyncio.Queue[ControlOutcome] = asyncio.Queue()
        self._hearing[request_id].append(queue)
        yield queue
        self._hearing[request_id].remove(queue)

    def tell(self, entry: int, result: Any, first: str = "", due: int = DUE, reason: str = "") -> None:
        outcome = ControlOutcome(
            ledger_id=7,
            entry_id=entry,
            batch_index=-1,
            result=result,
            superseded_by=first,
            deliver_at=due,
            reason=reason,
            operation="SCHEDULE",
        )
        for queue in self._hearing[outcome_id(TOPIC, "r")]:
            queue.put_nowait(outcome)


def message(request_id: str = "r") -> NewMessage:
    return NewMessage(b"x", None, None, {"requestId": request_id}, 0, DUE, request_id)


def run(folder: Path, control: Control, test: Callable[[Scheduler], Any], timeout_millis: int = 20_000) -> Any:
    settings = Settings.model_validate({"api": {"answer_timeout_millis": timeout_millis}})
    return asyncio.run(test(Scheduler(settings, control, Tables(f"file:{folder}"))))  # type: ignore[arg-type]


def test_each_caller_has_the_answer_to_its_own_message(tmp_path: Path) -> None:
    control = Control()

    async def test(scheduler: Scheduler) -> list[Any]:
        calls = [asyncio.create_task(scheduler.schedule(TOPIC, TOPIC, message())) for _ in range(3)]
        async with asyncio.timeout(20):
            while len(control.sent) < 3:
                await asyncio.sleep(0.005)
        control.tell(9, Result.APPLIED)  # one that came from elsewhere
        control.tell(1, Result.APPLIED)
        control.tell(0, Result.ALREADY_APPLIED, "7:1:2:-1")
        control.tell(2, Result.INVALID, reason="another message, 7:1:2:-1, has had the requestId r")
        return await asyncio.gather(*calls, return_exceptions=True)

    first, again, other = run(tmp_path, control, test)
    assert first == again == ScheduledMessage("7:1:2:-1", DUE)
    assert isinstance(other, MessageRefusedError)
    assert str(other) == "another message, 7:1:2:-1, has had the requestId r"


def test_a_message_without_a_request_id_is_answered_by_the_broker(tmp_path: Path) -> None:
    control = Control()
    found = run(tmp_path, control, lambda scheduler: scheduler.schedule(TOPIC, TOPIC, message("")))
    assert found == ScheduledMessage("7:0:2:-1", DUE)


def test_where_the_broker_has_had_the_message_any_answer_under_the_id_counts(tmp_path: Path) -> None:
    control = Control(entry=lambda _: (-1, -1))

    async def test(scheduler: Scheduler) -> ScheduledMessage:
        call = asyncio.create_task(scheduler.schedule(TOPIC, TOPIC, message()))
        async with asyncio.timeout(20):
            while not control.sent:
                await asyncio.sleep(0.005)
        control.tell(5, Result.ALREADY_APPLIED, "7:1:2:-1")
        return await call

    assert run(tmp_path, control, test) == ScheduledMessage("7:1:2:-1", DUE)
    with pytest.raises(NoOutcomeError, match="not known"):
        run(tmp_path, control, lambda scheduler: scheduler.schedule(TOPIC, TOPIC, message("")))


def test_an_answer_that_was_not_heard_is_in_the_table(tmp_path: Path) -> None:
    tables = Tables(f"file:{tmp_path}")
    tables.create(SCHEMAS)
    row = {
        "request_id": outcome_id(TOPIC, "r"),
        "topic": TOPIC,
        "partition": 2,
        "ledger_id": 7,
        "entry_id": 0,
        "batch_index": -1,
        "result": "ALREADY_APPLIED",
        "reason": "a repetition",
        "operation": "SCHEDULE",
        "deliver_at": DUE,
        "superseded_by": "6:0:-1:-1",
        "applied_at": time.time_ns() // 1_000_000,
        "batch_id": 1,
    }
    tables.append("outcomes", pa.Table.from_pylist([row], schema=SCHEMAS["outcomes"]), {})

    def test(scheduler: Scheduler) -> Any:
        return scheduler.schedule(TOPIC, TOPIC, message())

    assert run(tmp_path, Control(), test, 2_000) == ScheduledMessage("6:0:-1:-1", DUE)


@pytest.mark.parametrize(
    ("result", "error", "why"),
    [
        ("MessageTooBig", MessageTooLargeError, "MessageTooBig"),
        ("Timeout", NoOutcomeError, r"repeat the call with the same key \(requestId r\)"),
        ("TopicTerminated", ControlUnavailableError, "TopicTerminated"),
    ],
)
def test_what_the_broker_does_not_take(tmp_path: Path, result: str, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        run(tmp_path, Control(result=result), lambda scheduler: scheduler.schedule(TOPIC, TOPIC, message()))


def test_who_does_not_get_an_answer_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoOutcomeError, match=r"does the job run.*same key"):
        run(tmp_path, Control(), lambda scheduler: scheduler.schedule(TOPIC, TOPIC, message()), 1_000)
    control = Control()
    control.is_connected = False
    with pytest.raises(ControlUnavailableError):
        run(tmp_path, control, lambda scheduler: scheduler.schedule(TOPIC, TOPIC, message()))
    with pytest.raises(ControlUnavailableError, match="AuthorizationError"):
        run(tmp_path, Control(), lambda scheduler: scheduler.schedule(TOPIC, "closed", message()))
