"""Schedules over HTTP; without a broker, so that nothing can be ended."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.unit.admin.rest.test_admin_app import ORDERS, reason, served
from tests.unit.schedule_tables import DAY, NINE, PUBLISHED, ScheduleTables

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
        ("POST", "/7:1", 405),
    ],
)
def test_what_is_wrong_with_a_call_is_said(client: httpx.Client, method: str, path: str, code: int) -> None:
    assert reason(client.request(method, SCHEDULES + path), code)
