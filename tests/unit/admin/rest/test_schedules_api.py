"""Schedules over HTTP; without a broker, so that nothing can be ended, or with a job that is a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from delaylake.control import ControlRequest
from delaylake.message_ids import MessageId, Outcome
from starlette.testclient import TestClient

from admin.app import create_app
from tests.support.service.admin_api import ORDERS, reason, served
from tests.support.tracker.messages import messages
from tests.support.warehouse.schedule_tables import DAY, NINE, PUBLISHED, TOPIC, ScheduleTables
from tracker.commands.decode import decode
from tracker.schemas import SubscriptionRule

SCHEDULES = f"{ORDERS}/schedules"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    tables = ScheduleTables(tmp_path_factory.mktemp("warehouse"))
    for entry in range(3):
        tables.came(entry, timeZone="UTC", misfire="skip")
    tables.delivered("a", 1, 1, NINE)
    for name in ("a", "b"):
        tables.commanded("CANCEL", name, 2, sequence=5)
    with served(tables.settings) as client:
        yield client


@pytest.mark.slow
def test_schedules_are_listed_page_by_page(client: httpx.Client) -> None:
    first = client.get(SCHEDULES, params={"limit": 1}).json()
    second = client.get(SCHEDULES, params={"limit": 1, "cursor": first["nextCursor"]}).json()
    assert [page["schedules"][0]["id"] for page in (first, second)] == ["7:0:-1:-1", "7:1:-1:-1"]
    assert second["nextCursor"] is None
    ended = client.get(SCHEDULES, params={"withEnded": True, "subscription": "b"}).json()["schedules"]
    assert [(one["id"], one["state"]) for one in ended][-1] == ("7:2:-1:-1", "takenBack")
    assert [one["subscription"] for one in ended[0]["subscriptions"]] == ["b"]


def test_a_schedule_is_shown_with_its_next_occurrences(client: httpx.Client) -> None:
    shown = client.get(f"{SCHEDULES}/7:1", params={"next": 2, "subscription": "a"}).json()
    assert shown == {
        "id": "7:1:-1:-1",
        "repeat": "0 9 * * *",
        "timeZone": "UTC",
        "repeatUntil": None,
        "repeatTimes": None,
        "misfire": "skip",
        "firstDeliverAt": NINE,
        "state": "waiting",
        "nextOccurrence": 2,
        "nextDeliverAt": NINE + DAY,
        "key": "k1",
        "scheduleKey": None,
        "publishTime": PUBLISHED,
        "producerName": "p",
        "subscriptions": [
            {
                "subscription": "a",
                "state": "waiting",
                "delivered": 1,
                "lastOccurrence": 1,
                "lastDeliverAt": NINE,
                "nextOccurrence": 2,
                "nextDeliverAt": NINE + DAY,
            }
        ],
        "upcoming": [
            {"occurrence": 2, "deliverAt": NINE + DAY},
            {"occurrence": 3, "deliverAt": NINE + 2 * DAY},
        ],
    }
    assert client.get(f"{SCHEDULES}/7:1:-1:-1").json()["upcoming"][0] == {"occurrence": 1, "deliverAt": NINE}


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "?limit=0", 400),
        ("GET", "?cursor=x", 400),
        ("GET", "?subscription=nobody", 404),
        ("GET", "/nonsense", 400),
        ("GET", "/7:9", 404),
        ("GET", "/7:1?next=1001", 400),
        ("GET", "/7:1?subscription=nobody", 404),
        ("DELETE", "/nonsense", 400),
        ("DELETE", "/7:9", 404),
        ("DELETE", "/7:1?subscriptionNames=nobody", 404),
        ("DELETE", "/7:1", 503),
        ("POST", "/nonsense/skipNext", 400),
        ("POST", "/7:1/skipNext?subscriptionNames=nobody", 404),
        ("POST", "/7:1/skipNext", 503),
        ("POST", "/nonsense/pause", 400),
        ("POST", "/7:1/pause?subscriptionNames=nobody", 404),
        ("POST", "/7:1/pause", 503),
        ("POST", "/nonsense/resume", 400),
        ("POST", "/7:1/resume", 503),
        ("POST", "/7:1", 405),
        ("POST", "/pause", 400),
        ("POST", "/pause?scheduleKey=", 400),
        ("POST", "/resume?scheduleKey=" + 257 * "%C3%B6", 400),
        ("POST", "/skipNext?scheduleKey=k&subscriptionNames=nobody", 404),
        ("POST", "/pause?scheduleKey=k", 503),
        ("POST", "/resume?scheduleKey=k", 503),
        ("POST", "/skipNext?scheduleKey=k", 503),
    ],
)
def test_what_is_wrong_with_a_call_is_said(client: httpx.Client, method: str, path: str, code: int) -> None:
    assert reason(client.request(method, SCHEDULES + path), code)


class FakeControl:
    """In place of the control topic: has each command answered, and keeps what a shard knows a request id by."""

    is_connected = True

    def __init__(self) -> None:
        self.bodies: list[dict[str, int]] = []

    def partitions(self, topic: str) -> list[str] | None:
        return [f"{topic}-partition-{i}" for i in range(4)]

    async def send(self, requests: Iterable[ControlRequest], _: float) -> list[Outcome]:
        rules: Any = {TOPIC: [SubscriptionRule("a", False), SubscriptionRule("b", True)]}
        [request] = requests
        read = decode(messages([(9, 0, 0)], payload=request.command.SerializeToString()), rules)
        self.bodies.append(read.request_ids)
        return [Outcome("a", MessageId(7, 0), "APPLIED", "", is_done=True)]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_end_is_the_same_command_when_it_is_repeated(tmp_path: Path, batch_size: int) -> None:
    tables = ScheduleTables(tmp_path)
    tables.came(0, batch_index=min(batch_size - 2, 0), batch_size=batch_size)
    app = create_app(tables.settings)
    control = FakeControl()
    with TestClient(app, base_url="http://localhost") as client:
        app.state.control = control
        for number, name in enumerate(("7:0", "7:0:-1:0", "7:0"), 1):
            answer = client.delete(f"{SCHEDULES}/{name}", headers={"Idempotency-Key": "mine"})
            assert answer.status_code == 204
            for subscription in ("a", "b"):
                tables.delivered(subscription, 0, number, NINE + (number - 1) * DAY, min(batch_size - 2, 0))
    [body] = {tuple(bodies.items()) for bodies in control.bodies}
    assert [request_id for request_id, _ in body] == ["mine"]


@pytest.mark.slow
def test_an_end_is_told_again_also_when_the_tables_have_the_schedule_no_more(tmp_path: Path) -> None:
    tables = ScheduleTables(tmp_path)
    for name in ("a", "*"):
        tables.commanded("CANCEL", name, 0, sequence=5, request_id="mine", batch_id=3)
    tables.commanded("RESTORE", "a", 1, sequence=6, request_id="other", batch_id=4)
    with served(tables.settings) as client:

        def end(entry: int, request_id: str, **query: str) -> httpx.Response:
            headers = {"Idempotency-Key": request_id, "Prefer": "return=representation"}
            return client.delete(f"{SCHEDULES}/7:{entry}", headers=headers, params=query)

        for query in ({}, {"subscriptionNames": "a"}, {"subscriptionNames": "*,a"}):
            told = end(0, "mine", **query).json()["outcomes"]
            assert [(one["subscription"], one["entryId"], one["result"]) for one in told] == [
                ("*", 0, "APPLIED"),
                ("a", 0, "APPLIED"),
            ]
        reason(client.delete(f"{SCHEDULES}/7:0"), 404)
        for entry, request_id, names in ((0, "new", "a"), (1, "mine", "a"), (1, "other", "a"), (0, "mine", "b")):
            reason(end(entry, request_id, subscriptionNames=names), 404)
