"""What of a page is sent when."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi.testclient import TestClient

from admin.app import create_app
from tests.messages import messages
from tests.unit.warehouse.test_pending import Warehouse
from warehouse.queries.listing import Page, VersionGoneError
from warehouse.queries.waiting import Pending


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
