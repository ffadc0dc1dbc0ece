"""The Python client over HTTP: when it repeats a call, and which error it raises."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from delaylake import (
    AsyncClient,
    Client,
    DelayLakeError,
    Forbidden,
    Gone,
    Invalid,
    MessageId,
    NoAnswer,
    NotAllowed,
    NotFound,
    Redriven,
    ScheduleProgress,
    TooLate,
    Unavailable,
    rest,
)

URL = "http://api.example"
NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
NOON_MILLIS = 1_896_091_200_000

LISTINGS = ("pending", "schedules")

Answers = list[httpx.Response | Exception]


def outcome(result: str, subscription: str = "a") -> dict[str, Any]:
    return {
        "subscription": subscription,
        "ledgerId": 7,
        "entryId": 0,
        "batchIndex": -1,
        "result": result,
        "reason": "because",
    }


def done(*results: str, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json={"outcomes": [outcome(result) for result in results]})


class Api:
    """Answers one after another, and keeps what it was asked."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        # Of its own for each call: its content is read once.
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


Ask = Callable[..., tuple[Any, Api]]


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Calls a method of the client, or of the asynchronous one, with the answers that the API will give."""
    now = 0.0

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def pause_async(seconds: float) -> None:
        pause(seconds)

    # Time passes only between attempts: then what is expected depends on no machine.
    monkeypatch.setattr(rest, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(time, "sleep", pause)
    monkeypatch.setattr(asyncio, "sleep", pause_async)

    def call(answers: Answers, method: str, *arguments: Any, timeout: float = 300.0, **more: Any) -> tuple[Any, Api]:
        api = Api(answers)
        transport = httpx.MockTransport(api)

        async def call_async() -> Any:
            async with httpx.AsyncClient(transport=transport) as http:
                client = AsyncClient(URL, http=http, timeout_seconds=timeout, token="t")
                if method in LISTINGS:
                    return [one async for one in getattr(client, method)(*arguments, **more)]
                return await getattr(client, method)(*arguments, **more)

        if request.param == "async":
            return asyncio.run(call_async()), api
        with httpx.Client(transport=transport) as http:
            found = getattr(Client(URL, http=http, timeout_seconds=timeout, token="t"), method)(*arguments, **more)
            return (list(found) if method in LISTINGS else found), api

    return call


def test_a_command_that_fails_on_its_way_is_repeated_under_its_id(ask: Ask) -> None:
    answers: Answers = [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("cut"),
        httpx.DecodingError("garbled"),
        httpx.Response(503, json={"reason": "no broker"}),
        httpx.Response(502, text="<html>"),
        httpx.Response(504, json={"reason": "no answer"}),
        httpx.Response(429, json={"reason": "too often"}),
        done("APPLIED", "ALREADY_APPLIED"),
    ]
    found, api = ask(answers, "skip", "orders", "7:0")
    assert [one.result for one in found] == ["APPLIED", "ALREADY_APPLIED"]
    assert len(api.asked) == 9
    keys = {request.headers["Idempotency-Key"] for request in api.asked}
    assert (len(keys), len(keys.pop())) == (1, 32)
    assert {request.headers["Authorization"] for request in api.asked} == {"Bearer t"}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (httpx.Response(504, json={"reason": "no answer"}), NoAnswer),
        (httpx.Response(502, text="<html>"), NoAnswer),
        (httpx.ReadTimeout("slow"), NoAnswer),
        (httpx.RemoteProtocolError("cut"), NoAnswer),
        (httpx.DecodingError("garbled"), NoAnswer),
        (httpx.ConnectError("refused"), Unavailable),
        (httpx.Response(503, json={"reason": "no broker"}), Unavailable),
        (httpx.Response(429, json={"reason": "too often"}, headers={"Retry-After": "60"}), Unavailable),
    ],
)
def test_when_its_time_is_over_the_error_says_whether_it_may_be_done(
    ask: Ask, answer: Any, error: type[DelayLakeError]
) -> None:
    with pytest.raises(Unavailable) as raised:
        ask([answer], "restore", "orders", "7:0", request_id="mine", timeout=30)
    assert type(raised.value) is error
    assert raised.value.request_id == "mine"
    assert raised.value.deliver_at is None


def test_a_reschedule_after_some_time_without_an_answer_can_be_asked_again_as_it_was(ask: Ask) -> None:
    slow: Answers = [httpx.ReadTimeout("slow")]
    with pytest.raises(NoAnswer) as raised:
        ask(slow, "reschedule", "orders", "7:0", after=timedelta(hours=1), timeout=30)
    error = raised.value
    assert error.deliver_at is not None
    assert timedelta(minutes=59) < error.deliver_at - datetime.now(UTC) <= timedelta(hours=1)
    again: dict[str, Any] = {"at": error.deliver_at, "request_id": error.request_id}
    _, api = ask([*slow, done("APPLIED")], "reschedule", "orders", "7:0", **again)
    content = {"messageIds": ["7:0"], "deliverAt": round(error.deliver_at.timestamp() * 1000)}
    assert [json.loads(request.content) for request in api.asked] == [content] * 2
    assert {request.headers["Idempotency-Key"] for request in api.asked} == {error.request_id}


@pytest.mark.parametrize(
    ("results", "status", "error"),
    [
        (["TOO_LATE"], 404, TooLate),
        (["APPLIED", "TOO_LATE"], 412, TooLate),
        (["NOT_FOUND", "TOO_LATE"], 404, TooLate),
        (["NOT_FOUND"], 404, NotFound),
        (["NOT_ALLOWED", "TOO_LATE"], 405, NotAllowed),
        (["INVALID", "NOT_ALLOWED"], 400, Invalid),
        (["A_NEW_ONE"], 500, DelayLakeError),
    ],
)
def test_the_gravest_outcome_is_the_error(ask: Ask, results: list[str], status: int, error: type[Exception]) -> None:
    with pytest.raises(DelayLakeError, match="because") as raised:
        ask([done(*results, status=status)], "skip", "orders", "7:0")
    assert type(raised.value) is error
    assert [one.result for one in raised.value.outcomes] == results


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, Invalid),
        (401, Forbidden),
        (403, Forbidden),
        (404, NotFound),
        (405, NotAllowed),
        (410, Gone),
        (412, Invalid),
        (413, Invalid),
        (418, DelayLakeError),
        (421, Invalid),
        (500, DelayLakeError),
    ],
)
def test_without_outcomes_the_status_is_the_error(ask: Ask, status: int, error: type[Exception]) -> None:
    answers: Answers = [httpx.Response(status, json={"reason": "it says why"})]
    for method, arguments in (("deliver_now", ("orders", "7:0")), ("pending", ("orders",))):
        with pytest.raises(DelayLakeError, match="it says why") as raised:
            ask(answers, method, *arguments)
        assert type(raised.value) is error


@pytest.mark.parametrize(
    ("status", "body"),
    [
        *((200, body) for body in ("", "<html>", "[]", '{"detail": "all is well"}')),
        *((404, body) for body in ("", "<html>", "[]", '{"detail": "Not Found"}')),
        *((status, "<html>") for status in (302, 400, 405, 410, 412, 500, 501)),
    ],
)
def test_what_is_no_admin_api_is_said(ask: Ask, status: int, body: str) -> None:
    calls: dict[str, dict[str, Any]] = {
        "skip": {"message": "7:0"},
        "redrive": {"subscription": "a"},
        "pending": {},
        "schedules": {},
        "get": {"message": "7:0"},
    }
    for method, more in calls.items():
        with pytest.raises(DelayLakeError, match="is it delaylake's admin API") as raised:
            ask([httpx.Response(status, text=body)], method, "orders", **more)
        assert type(raised.value) is DelayLakeError
        assert str(raised.value).startswith(f"{URL}/admin/v2/persistent/public/default/orders/")


@pytest.mark.parametrize("token", ["t", "t\n", lambda: " t\n"])
def test_a_token_may_be_what_a_file_has(token: Any) -> None:
    api = Api([done("APPLIED")])
    with httpx.Client(transport=httpx.MockTransport(api)) as http:
        Client(URL, http=http, token=token).skip("orders", "7:0")
    assert api.asked[0].headers["Authorization"] == "Bearer t"


def test_an_outcome_that_names_no_message_is_of_the_one_asked_for(ask: Ask) -> None:
    whole = outcome("NOT_ALLOWED") | {"ledgerId": -1, "entryId": -1}
    with pytest.raises(NotAllowed, match=r"^7:0:2:3 a NOT_ALLOWED"):
        ask([httpx.Response(405, json={"outcomes": [whole], "reason": "no"})], "skip", "orders", "7:0:2:3")


def test_errors_show_no_password() -> None:
    with httpx.Client(transport=httpx.MockTransport(Api([httpx.Response(404)]))) as http:
        lake = Client("http://me:secret@api.example", http=http)
        with pytest.raises(DelayLakeError, match=r"^http://api\.example/admin/"):
            lake.skip("orders", "7:0")


@pytest.mark.parametrize(("status", "error"), [(401, Forbidden), (403, Forbidden), (413, Invalid)])
def test_a_proxy_may_refuse_without_a_reason(ask: Ask, status: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=str(status)):
        ask([httpx.Response(status, text="<html>")], "skip", "orders", "7:0")


def listed(entry: int, *subscriptions: str, batch_index: int = -1) -> dict[str, Any]:
    return {
        "messageId": f"7:{entry}:-1:{batch_index}",
        "ledgerId": 7,
        "entryId": entry,
        "partitionIndex": -1,
        "batchIndex": batch_index,
        "deliverAt": 1_896_091_200_000,
        "isHeld": False,
        "subscriptions": list(subscriptions),
        "key": None,
        "orderingKey": None,
        "properties": {},
        "eventTime": 0,
        "publishTime": 1,
        "producerName": "p",
    }


def page(*messages: dict[str, Any], cursor: str | None = None) -> httpx.Response:
    return httpx.Response(200, json={"version": 1, "asOf": 1, "messages": messages, "nextCursor": cursor})


def test_a_listing_goes_through_its_pages(ask: Ask) -> None:
    found, api = ask([page(listed(0, "a"), listed(1, "a"), cursor="next"), page(listed(2, "a"))], "pending", "orders")
    assert [one.id.entry_id for one in found] == [0, 1, 2]
    assert [request.url.params.get("cursor") for request in api.asked] == [None, "next"]
    some, api = ask(
        [page(listed(0, "a"), listed(1, "a"), cursor="next"), page(listed(2, "a"), cursor="more")],
        "pending",
        "orders",
        limit=3,
    )
    assert len(some) == 3
    assert [request.url.params["limit"] for request in api.asked] == ["3", "1"]


def recurring(entry: int, **more: Any) -> dict[str, Any]:
    progress = {
        "subscription": "a",
        "state": "waiting",
        "delivered": 1,
        "lastOccurrence": 1,
        "lastDeliverAt": NOON_MILLIS,
        "nextOccurrence": 2,
        "nextDeliverAt": NOON_MILLIS + 90_000,
    } | more
    return {
        "id": f"7:{entry}:-1:-1",
        "repeat": "@every 90s",
        "timeZone": "UTC",
        "repeatUntil": None,
        "repeatTimes": 3,
        "misfire": "once",
        "firstDeliverAt": NOON_MILLIS,
        "state": progress["state"],
        "nextOccurrence": progress["nextOccurrence"],
        "nextDeliverAt": progress["nextDeliverAt"],
        "key": None,
        "scheduleKey": "k",
        "publishTime": 1,
        "producerName": "p",
        "subscriptions": [progress],
    }


def test_schedules_are_listed(ask: Ask) -> None:
    held = {"state": "held", "nextDeliverAt": None}
    over = {"state": "takenBack", "nextOccurrence": None, "nextDeliverAt": None}
    pages = [
        {"schedules": [recurring(0), recurring(1, **held)], "nextCursor": "next"},
        {"schedules": [recurring(2, **over)], "nextCursor": None},
    ]
    found, api = ask([httpx.Response(200, json=page) for page in pages], "schedules", "orders", with_ended=True)
    assert {request.url.path for request in api.asked} == {"/admin/v2/persistent/public/default/orders/schedules"}
    assert [request.url.params.get("withEnded") for request in api.asked] == ["true", "true"]
    assert [one.state for one in found] == ["waiting", "held", "cancelled"]
    first = found[0]
    assert (first.repeat, first.repeat_times, first.schedule_key, first.first_deliver_at) == (
        "@every 90s",
        3,
        "k",
        NOON,
    )
    assert first.subscriptions == (ScheduleProgress("a", "waiting", 1, 1, 2, NOON + timedelta(seconds=90)),)
    assert [one.next_deliver_at for one in found] == [NOON + timedelta(seconds=90), None, None]
    assert [one.id.deliver_at for one in found] == [NOON + timedelta(seconds=90), None, None]


def test_an_end_is_repeated_under_its_id(ask: Ask) -> None:
    found, api = ask([httpx.ReadTimeout("slow"), done("APPLIED")], "end_schedule", "orders", "7:0:-1:-1")
    assert [one.result for one in found] == ["APPLIED"]
    assert {(one.method, one.url.path) for one in api.asked} == {
        ("DELETE", "/admin/v2/persistent/public/default/orders/schedules/7:0")
    }
    assert len({one.headers["Idempotency-Key"] for one in api.asked}) == 1
    assert not any(one.url.query for one in api.asked)
    _, api = ask([done("APPLIED")], "end_schedule", "orders", "7:0", request_id="mine")
    assert api.asked[0].headers["Idempotency-Key"] == "mine"
    _, api = ask([done("APPLIED")], "end_schedule", "orders", "7:0:2:3", subscription="a")
    assert api.asked[0].url.path == "/admin/v2/persistent/public/default/orders-partition-2/schedules/7:0:3"
    assert api.asked[0].url.params["subscriptionNames"] == "a"
    with pytest.raises(TooLate):
        ask([done("TOO_LATE", status=412)], "end_schedule", "orders", "7:0")


def test_a_message_may_wait_for_one_subscription_and_be_cancelled_for_another(ask: Ask) -> None:
    state, _ = ask([page(listed(0, "a")), page(listed(0, "b"))], "get", "orders", "7:0")
    assert (state.waiting_for, state.cancelled_for) == (("a",), ("b",))
    batch = page(listed(0, "a", batch_index=0), listed(0, "a", batch_index=1))
    state, _ = ask([batch, page()], "get", "orders", "7:0:1")
    assert state.message.id.batch_index == 1
    with pytest.raises(Invalid, match="batch"):
        ask([batch, page()], "get", "orders", "7:0")
    with pytest.raises(NotFound):
        ask([page()], "get", "orders", "7:0")


def test_a_client_serves_several_threads() -> None:
    api = Api([done("APPLIED")])
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(transport=httpx.MockTransport(api)))
        client = stack.enter_context(Client(URL, http=http))
        threads = [threading.Thread(target=client.skip, args=("orders", "7:0")) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({request.headers["Idempotency-Key"] for request in api.asked}) == 8


def test_a_re_drive_is_one_call_that_can_be_repeated(ask: Ask) -> None:
    counts = {"matched": 3, "redriven": 1, "alreadyRedriven": 2, "refused": 0, "unreadable": 4, "requestId": "r"}
    answers: Answers = [httpx.ReadTimeout("slow"), httpx.Response(200, json=counts)]
    asked = {"subscription": "a", "messages": ["7:0"], "reason": "no", "published_from": NOON, "request_id": "r"}
    found, api = ask(answers, "redrive", "orders", **asked, properties={"region": "eu"})
    assert found == Redriven(3, 1, 2, 0, 4)
    assert {request.headers["Idempotency-Key"] for request in api.asked} == {"r"}
    assert api.asked[0].url.path == "/admin/v2/persistent/public/default/orders/dlq/redrive"
    wanted = {"subscription": "a", "properties": {"region": "eu"}, "messageIds": ["7:0:-1"], "reason": "no"}
    sent = {"filter": wanted | {"publishedFrom": NOON_MILLIS}, "dryRun": False, "max": 10_000}
    assert json.loads(api.asked[0].content) == sent
    counted, _ = ask(
        [httpx.Response(200, json={"matched": 3, "messages": []})], "redrive", "orders", subscription="a", dry_run=True
    )
    assert counted == Redriven(3)
    with pytest.raises(DelayLakeError, match="another"):
        ask([httpx.Response(409, json={"reason": "another"})], "redrive", "orders", subscription="a")


SCHEDULED = {"messageId": "7:5:2:-1", "deliverAt": NOON_MILLIS}


def test_without_a_broker_the_api_sends_a_message_once(ask: Ask) -> None:
    answers: Answers = [httpx.ReadTimeout("slow"), httpx.Response(504), httpx.Response(201, json=SCHEDULED)]
    found, api = ask(
        answers,
        "schedule",
        "orders",
        "ü",
        at=NOON,
        key="k",
        ordering_key="o",
        event_time=NOON,
        properties={"region": "eu"},
        schedule_key="s",
        schedule_mode="debounce",
        debounce_max=timedelta(seconds=5),
    )
    assert (found, found.deliver_at) == (MessageId(7, 5, 2), NOON)
    assert api.asked[0].url.path == "/admin/v2/persistent/public/default/orders/delayed"
    [key] = {request.headers["Idempotency-Key"] for request in api.asked}
    [body] = {request.content for request in api.asked}
    assert re.fullmatch("[0-9a-f]{32}", key)
    assert json.loads(body) == {
        "payloadBase64": base64.b64encode("ü".encode()).decode(),
        "deliverAt": NOON_MILLIS,
        "key": "k",
        "orderingKey": "o",
        "eventTime": NOON_MILLIS,
        "properties": {"region": "eu"},
        "scheduleKey": "s",
        "scheduleMode": "debounce",
        "debounceMax": 5_000,
    }


def test_a_call_that_is_made_again_with_its_request_id_is_the_same(ask: Ask) -> None:
    bodies = set()
    for _ in range(2):
        _, api = ask(
            [httpx.Response(201, json=SCHEDULED)],
            "schedule",
            "orders",
            b"",
            after=timedelta(minutes=1),
            request_id="mine",
            repeat="@every 90s",
            repeat_times=3,
            repeat_until=NOON + timedelta(days=20_000),
            time_zone="UTC",
            misfire="all",
        )
        assert api.asked[0].headers["Idempotency-Key"] == "mine"
        bodies.add(api.asked[0].content)
    [body] = bodies
    assert json.loads(body)["deliverAfter"] == 60_000
    assert json.loads(body)["repeatTimes"] == 3


def test_what_is_not_scheduled_is_an_error(ask: Ask) -> None:
    for status, error in ((404, NotFound), (403, Forbidden), (413, Invalid), (422, Invalid)):
        with pytest.raises(error, match="the reason"):
            ask([httpx.Response(status, json={"reason": "the reason"})], "schedule", "orders", b"", at=NOON)
    with pytest.raises(NoAnswer) as raised:
        ask([httpx.ReadTimeout("slow")], "schedule", "orders", b"", at=NOON, request_id="mine")
    assert raised.value.request_id == "mine"
    for wrong in ("", "two words", "ü", "x" * 129):
        with pytest.raises(ValueError, match="request_id"):
            ask([httpx.Response(201, json=SCHEDULED)], "schedule", "orders", b"", at=NOON, request_id=wrong)
    with pytest.raises(ValueError, match="requestId"):
        ask([httpx.Response(201, json=SCHEDULED)], "schedule", "orders", b"", at=NOON, properties={"requestId": "r"})


def test_to_schedule_over_http_httpx_is_enough() -> None:
    program = """
        import sys
        from datetime import timedelta
        sys.modules.update(dict.fromkeys(["google", "google.protobuf", "pulsar", "_pulsar"]))
        import httpx
        from delaylake import Client
        answer = httpx.Response(201, json={"messageId": "7:5:-1:-1", "deliverAt": 1000})
        with httpx.Client(transport=httpx.MockTransport(lambda _: answer)) as http:
            print(Client("http://127.0.0.1:1", http=http).schedule("orders", b"x", after=timedelta(minutes=1)))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (str(MessageId(7, 5)), "")
