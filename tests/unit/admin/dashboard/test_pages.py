"""What of a page is sent when."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi.testclient import TestClient

from admin.app import create_app
from status.status_writer import StatusWriter
from tests.support.service.admin_api import served
from tests.support.tracker.messages import TOPIC, messages
from tests.support.warehouse.schedule_tables import NINE, ScheduleTables
from tests.support.warehouse.waiting import Warehouse
from tracker.message_state.changes import PAUSED_DELIVER_AT
from warehouse.queries.listing import Page, VersionGoneError
from warehouse.queries.pending_messages import Pending

LOOKAHEAD = 600_000  # ms


def parts_of(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch, find: Any) -> tuple[str, str]:
    """Returns what is sent of the page of messages before they are searched for, and after."""
    sent: list[bytes] = []
    before: list[str] = []

    def page(pending: Pending, limit: int) -> Page:
        before.append(b"".join(sent).decode())
        found: Page = find(pending, limit)
        return found

    async def receive() -> dict[str, Any]:
        await anyio.sleep_forever()  # there is no body, and the client is there to the end
        return {}

    async def send(event: Any) -> None:
        sent.append(event.get("body", b""))

    monkeypatch.setattr(Pending, "page", page)
    app = create_app(warehouse.settings)
    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http"},
        **{"path": "/ui/messages", "raw_path": b"/ui/messages", "query_string": b"", "root_path": ""},
        **{"headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "server": ("localhost", 80)},
    }
    with TestClient(app, base_url="http://localhost") as client:
        assert client.portal is not None
        client.portal.call(app, scope, receive, send)
    [start] = before
    whole = b"".join(sent).decode()
    assert whole.startswith(start)
    return start, whole[len(start) :]


@pytest.mark.slow
def test_the_form_is_sent_before_messages_are_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warehouse = Warehouse(tmp_path)
    warehouse.seal(messages([(1, i, time.time_ns() // 1_000_000 + 3_600_000) for i in range(3)]))
    start, rest = parts_of(warehouse, monkeypatch, Pending.page)
    assert "</form>" in start
    assert "<table" not in start
    assert rest.count('class="pick"') == 3
    assert rest.rstrip().endswith("</html>")


def test_what_goes_wrong_when_a_page_has_begun_is_said_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pending: Pending, limit: int) -> Page:
        raise VersionGoneError("begin again")

    _, rest = parts_of(Warehouse(tmp_path), monkeypatch, fail)
    assert '<p class="problem" role="alert">begin again</p>' in rest
    assert rest.rstrip().endswith("</html>")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paused", "offered"), [("", ["pause"]), ("a", ["pause", "resume"]), ("b", ["pause", "resume"]), ("ab", ["resume"])]
)
def test_a_schedule_can_be_resumed_where_any_subscription_is_paused_and_paused_where_any_is_not(
    tmp_path: Path, paused: str, offered: list[str]
) -> None:
    tables = ScheduleTables(tmp_path)
    tables.came(1)
    for name in paused:
        tables.waits(name, 1, 1, PAUSED_DELIVER_AT, sequence=5, by_rule=NINE)
    with TestClient(create_app(tables.settings), base_url="http://localhost") as client:
        page = client.get("/ui/recurring").text
    assert re.findall('data-action="(pause|resume)"', page) == offered


class AtWork(StatusWriter):
    """A job that has just finished a batch, and hands out messages LOOKAHEAD ms before their time."""

    def __init__(self, warehouse: str) -> None:
        super().__init__(warehouse, 100)
        self._state = "running"
        self._values |= {"last_batch_at": time.time_ns() // 1_000_000, "lookahead_millis": LOOKAHEAD}


@pytest.mark.slow
@pytest.mark.parametrize("page", ["messages", "recurring"])
@pytest.mark.parametrize(
    ("due_in", "at_work", "not_at_work"),
    [
        (-70_000, r"1\.\d min overdue", r"1\.\d min overdue"),
        (-1, "going out", "going out"),
        (LOOKAHEAD // 2, "going out", r"(4\.\d|5) min"),
        (2 * LOOKAHEAD, r"(19\.\d|20) min", r"(19\.\d|20) min"),
    ],
)
def test_what_is_handed_out_is_told_from_what_waits_and_what_is_overdue(
    tmp_path: Path, page: str, due_in: int, at_work: str, not_at_work: str
) -> None:
    warehouse = Warehouse(tmp_path)
    now = time.time_ns() // 1_000_000
    recurring: dict[str, Any] = {"properties": [("repeat", "@every 1d")], "publish_time": now, "occurrence": 1}
    warehouse.seal(messages([(1, 1, now + due_in)], **(recurring if page == "recurring" else {})))

    def shown() -> str:
        with served(warehouse.settings) as client:
            text = client.get(f"/ui/{page}", params={"topic": TOPIC}).text
        [row] = re.findall("<tr>\n(.*?)</tr>", text.split("<tbody>")[1], re.S)
        cells = re.findall("<td[^>]*>(.*?)</td>", row, re.S)
        return re.sub("<.*?>", "", cells[next(i for i, cell in enumerate(cells) if "<time" in cell) + 1])

    assert re.fullmatch(not_at_work, shown())
    with AtWork(warehouse.settings.warehouse) as job:
        job._write()
        assert re.fullmatch(at_work, shown())
