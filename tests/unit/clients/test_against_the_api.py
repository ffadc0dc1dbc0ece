"""The Python client's calls are read by the API as they are meant."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from delaylake import AsyncClient, DelayLakeError, NotFound, TooLate, commands
from delaylake.control import ControlRequest
from delaylake.message_ids import Outcome
from delaylake.wire.delaylake_pb2 import ControlCommand, ControlOutcome, Result

from admin.app import create_app
from conf.settings import Settings

pytestmark = pytest.mark.slow

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
NOON_MILLIS = 1_896_091_200_000
TOPIC = "persistent://public/default/orders"

MINUTE = timedelta(minutes=1)


class FakeControl:
    """In place of the control topic: answers each command for each of its subscriptions with one result."""

    def __init__(self, result: Result) -> None:
        self.commands: list[ControlCommand] = []
        self._result = result

    def partitions(self, topic: str) -> list[str] | None:
        return None

    async def send(self, requests: Iterable[ControlRequest], _: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for request in requests:
            self.commands.append(request.command)
            for name in request.command.subscriptions:
                published = ControlOutcome(subscription=name, ledger_id=7, batch_index=-1, result=self._result)
                outcomes += request.take(published)
        return outcomes


def ask(
    folder: Path, call: Callable[[AsyncClient], Awaitable[Any]], result: Result = Result.APPLIED, path: str = ""
) -> tuple[Any, ControlCommand]:
    async def run() -> Any:
        app = create_app(settings)
        app.state.control = control
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            return await call(AsyncClient(f"http://127.0.0.1{path}", http=http, timeout_seconds=1))

    routes = [{"source": TOPIC, "subscriptions": [{"name": "a"}, {"name": "b%c"}]}]
    settings = Settings.model_validate({"warehouse": f"file:{folder}", "routes": routes})
    control = FakeControl(result)
    return asyncio.run(run()), control.commands[-1]


def test_a_cancel(tmp_path: Path) -> None:
    found, command = ask(tmp_path, lambda lake: lake.cancel("orders", "7:0", deliver_at=NOON, request_id="mine"))
    assert (command.request_id, command.topic, list(command.subscriptions)) == ("mine", TOPIC, ["*"])
    cancel = command.cancel
    assert (cancel.ledger_id, cancel.entry_id, cancel.deliver_at) == (7, 0, NOON_MILLIS)
    assert [(one.subscription, one.result) for one in found] == [("*", "APPLIED")]
    waiting, _ = ask(tmp_path, lambda lake: lake.cancel("orders", "7:0", deliver_at=NOON), Result.WAITING)
    assert [one.result for one in waiting] == ["WAITING"]


def test_what_names_a_message_of_a_batch_of_a_partition(tmp_path: Path) -> None:
    there = ("orders", "7:1:2:3")
    for call, kind in (
        (lambda lake: lake.skip(*there, subscription="b%c"), "skip"),
        (lambda lake: lake.restore(*there, subscription="b%c"), "restore"),
        (lambda lake: lake.deliver_now(*there, subscription="b%c"), "reschedule"),
        (lambda lake: lake.postpone(*there, by=-MINUTE, subscription="b%c"), "postpone"),
        (lambda lake: lake.reschedule(*there, at=NOON, subscription="b%c"), "reschedule"),
    ):
        _, command = ask(tmp_path, call)
        assert (command.topic, list(command.subscriptions)) == (f"{TOPIC}-partition-2", ["b%c"])
        assert command.WhichOneof("operation") == kind
        [entry] = getattr(command, kind).entries
        assert (entry.ledger_id, entry.entry_id, list(entry.batch_indexes)) == (7, 1, [3])
        assert command.postpone.by_millis == (-60_000 if kind == "postpone" else 0)
    assert command.reschedule.deliver_at == NOON_MILLIS


def test_what_names_a_message_by_its_schedule_key(tmp_path: Path) -> None:
    key = "order/7 ü&?"
    found, command = ask(tmp_path, lambda lake: lake.cancel("orders", schedule_key=key, request_id="mine"))
    assert (command.request_id, command.topic, list(command.subscriptions)) == ("mine", TOPIC, ["*"])
    [cancelled] = command.cancels.messages
    assert (cancelled.schedule_key, cancelled.ledger_id, cancelled.entry_id) == (key, 0, 0)
    assert [(one.subscription, one.result) for one in found] == [("*", "APPLIED")]
    there: Any = {"schedule_key": key, "subscription": "b%c"}
    for call, kind in (
        (lambda lake: lake.skip("orders", **there), "skip"),
        (lambda lake: lake.deliver_now("orders", **there), "reschedule"),
        (lambda lake: lake.postpone("orders", by=MINUTE, **there), "postpone"),
        (lambda lake: lake.reschedule("orders", at=NOON, **there), "reschedule"),
    ):
        _, command = ask(tmp_path, call)
        assert (command.topic, list(command.subscriptions)) == (TOPIC, ["b%c"])
        assert command.WhichOneof("operation") == kind
        [entry] = getattr(command, kind).entries
        assert (entry.schedule_key, entry.ledger_id, entry.entry_id) == (key, 0, 0)
        assert command.postpone.by_millis == (60_000 if kind == "postpone" else 0)
    assert command.reschedule.deliver_at == NOON_MILLIS
    with pytest.raises(NotFound, match="NOT_FOUND"):
        ask(tmp_path, lambda lake: lake.cancel("orders", schedule_key=key), Result.NOT_FOUND)


@pytest.mark.parametrize(
    ("call", "kind"),
    [("skip_next", "skip_next"), ("pause_schedule", "pause_schedule"), ("resume_schedule", "resume_schedule")],
)
def test_a_next_occurrence_that_is_skipped_or_paused(tmp_path: Path, call: str, kind: str) -> None:
    there: Any = {"subscription": "a", "request_id": "mine"}
    _, command = ask(tmp_path, lambda lake: getattr(lake, call)("orders", "7:1:2:3", **there))
    assert command.WhichOneof("operation") == kind
    assert (command.request_id, command.topic, list(command.subscriptions)) == ("mine", f"{TOPIC}-partition-2", ["a"])
    [entry] = getattr(command, kind).entries
    assert (entry.ledger_id, entry.entry_id, list(entry.batch_indexes)) == (7, 1, [3])
    key = "order/7 ü&?"
    _, command = ask(tmp_path, lambda lake: getattr(lake, call)("orders", schedule_key=key, **there))
    assert (command.request_id, command.topic, list(command.subscriptions)) == ("mine", TOPIC, ["a"])
    [entry] = getattr(command, kind).entries
    assert (entry.schedule_key, entry.ledger_id, entry.entry_id) == (key, 0, 0)
    # A subscription that is added later has no next occurrence, and would never answer.
    everywhere, command = ask(tmp_path, lambda lake: getattr(lake, call)("orders", "7:0"))
    assert not command.subscriptions
    assert everywhere == []


def test_a_retry(tmp_path: Path) -> None:
    def ask_again(lake: AsyncClient) -> Awaitable[Any]:
        wait = timedelta(seconds=2)
        return lake.retry("orders", "7:1:2:3", subscription="b%c", reason="no", after=wait, request_id="mine")

    _, command = ask(tmp_path, ask_again)
    assert (command.request_id, command.topic) == ("mine", f"{TOPIC}-partition-2")
    assert (list(command.subscriptions), list(command.retry.entry.batch_indexes)) == (["b%c"], [3])
    assert (command.retry.reason, command.retry.after_millis) == ("no", 2_000)
    with pytest.raises(NotFound, match="NOT_FOUND"):
        ask(tmp_path, lambda lake: lake.retry("orders", "7:0", subscription="b%c"), Result.NOT_FOUND)
    for subscription, after in (("*", None), ("", None), ("a", timedelta(0)), ("a", timedelta(seconds=-1))):
        with pytest.raises(ValueError, match=r"^a retry|^after is negative"):
            commands.retry("orders", "7:0", subscription, "", after, None)


def test_errors_are_those_of_the_outcomes(tmp_path: Path) -> None:
    with pytest.raises(TooLate, match="TOO_LATE"):
        ask(tmp_path, lambda lake: lake.skip("orders", "7:0"), Result.TOO_LATE)
    with pytest.raises(NotFound, match="no such subscription"):
        ask(tmp_path, lambda lake: lake.skip("orders", "7:0", subscription="nobody"))
    with pytest.raises(NotFound, match="no such topic"):
        ask(tmp_path, lambda lake: lake.skip("nothing", "7:0"))


def test_a_wrong_path_is_no_missing_message(tmp_path: Path) -> None:
    with pytest.raises(DelayLakeError, match=r"http://127.0.0.1/api/admin/v2/.* no such path: .*delaylake's") as raised:
        ask(tmp_path, lambda lake: lake.skip("orders", "7:0"), path="/api")
    assert type(raised.value) is DelayLakeError
