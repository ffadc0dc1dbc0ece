"""The dashboard's pages do not wait for what they count: in a real browser, over millions of pending messages.

How soon they are painted is measured by benchmarks/dashboard.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
import yaml
from playwright.sync_api import Page, Route, expect

from benchmarks.pending import ROWS_A_FILE, TOPIC, write
from tests.support.service.browser import chromium, need_chromium, wait_until_loaded
from tests.support.service.harness import Api
from warehouse.delta.tables import Tables

pytestmark = pytest.mark.long

ROWS = 10_000_000
PAGES = {
    "overview": "/",
    "messages": "/ui/messages",
    "search by key": f"/ui/messages?{urlencode({'topic': TOPIC, 'key': 'customer-77'})}",
    "search by property": f"/ui/messages?{urlencode({'topic': TOPIC, 'property': 'order=5000000'})}",
    "message": f"/ui/message?{urlencode({'topic': TOPIC, 'id': '42:4242'})}",
    "schedule": "/ui/schedule?span=month",
    "recurring": "/ui/recurring",
    "retries": "/ui/retries",
    "control": "/ui/control",
    "storage": "/ui/storage",
}

_PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_ANSWERED = "performance.getEntriesByType('navigation')[0].responseEnd"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page of the dashboard that an API of its own serves, with ROWS pending messages; no job and no broker."""
    need_chromium()
    folder = tmp_path_factory.mktemp("millions")
    tables = Tables(f"file:{folder}/warehouse")
    tables.create()
    write(tables, time.time_ns() // 1_000_000, ROWS // ROWS_A_FILE)
    settings = {
        "warehouse": f"file:{folder}/warehouse",
        "routes": [{"source": TOPIC, "subscriptions": [{"name": "a"}, {"name": "b"}]}],
        "pulsar": {"service_url": "pulsar://127.0.0.1:1", "admin_url": "http://127.0.0.1:1"},
    }
    file = Path(folder / "settings.yaml")
    file.write_text(yaml.safe_dump(settings))
    api = Api(file)
    try:
        with chromium() as browser:
            page = browser.new_page(base_url=api.url)
            page.goto("/ui/settings")
            yield page
    finally:
        api.stop()


def painted_millis(page: Page) -> float:
    """Returns how long after its begin the page that is loading had its first contentful paint."""
    while (painted := page.evaluate(_PAINTED)) is None:
        page.wait_for_timeout(10)
    return float(painted)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_becomes_whole(page: Page, name: str) -> None:
    response = page.goto(PAGES[name], wait_until="commit")
    assert response is not None
    assert response.ok
    wait_until_loaded(page)
    expect(page.locator("h1")).to_be_visible()
    expect(page.locator(".problem:visible")).to_have_count(0)


def test_all_are_counted(page: Page) -> None:
    page.goto("/ui/messages")
    expect(page.locator("main")).to_contain_text(f"{ROWS:,}")


def test_a_search_through_all_shows_its_form_before_what_it_finds(page: Page) -> None:
    page.goto(PAGES["search by property"], wait_until="commit")
    painted = painted_millis(page)
    expect(page.locator("#messages tbody tr")).to_have_count(1)
    assert painted < page.evaluate(_ANSWERED)


@pytest.mark.parametrize("name", ["overview", "schedule"])
def test_a_page_is_there_before_its_numbers(page: Page, name: str) -> None:
    held: list[Route] = []
    page.route("**/ui/part/**", lambda route: held.append(route))
    page.route("**/ui/data/**", lambda route: held.append(route))
    try:
        page.goto(PAGES[name])
        expect(page.locator("h1")).to_be_visible()
        expect(page.get_by_role("navigation").first).to_be_visible()
        assert painted_millis(page) > 0
        assert held
    finally:
        for route in held:
            route.continue_()
        page.unroute_all()
    wait_until_loaded(page)
