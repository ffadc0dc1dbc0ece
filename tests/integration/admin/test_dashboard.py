"""The dashboard in a real browser, with the job and a real broker behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import pulsar
import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from broker.standalone import EmbeddedBroker
from tests.support.clients.tokens import SECRET, encoded, token
from tests.support.service.browser import chromium, need_chromium
from tests.support.service.harness import Api, Collector, Job, http, now, wait_until

PAGES = ["/", "/ui/schedule", "/ui/messages", "/ui/control", "/ui/storage", "/ui/settings"]
ATTACK = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"

Scheme = Literal["light", "dark"]


class Desk:
    """The job, the API, a browser, and messages to look at."""

    def __init__(self, folder: Path, broker: EmbeddedBroker, client: pulsar.Client, browser: Browser) -> None:
        self.topic = "persistent://public/default/desk"
        routes = [{"source": self.topic, "subscriptions": [{"name": "a"}, {"name": "b"}]}]
        self.job = Job(folder, broker.settings, routes, tracker={"max_seal_interval_millis": 1500}).start()
        self.api = Api(self.job.file)
        self.browser = browser
        self.collector = Collector(client).collect(f"{self.topic}-a").collect(f"{self.topic}-b")
        self.producer = client.create_producer(self.topic, batching_enabled=False)
        wait_until(lambda: http.get(f"{self.api.url}/readyz").status_code == 200, 20, f"the API\n{self.api.log}")
        self.problems: list[str] = []

    def send(self, text: str, seconds: float, key: str, **properties: str) -> str:
        due = str(now() + int(seconds * 1000))
        sent = self.producer.send(text.encode(), {"deliverAt": due, **properties}, key)
        return f"{sent.ledger_id()}:{sent.entry_id()}"

    def page(self, width: int = 1440, scheme: Scheme = "light", url: str | None = None) -> Page:
        context = self.browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, base_url=url or self.api.url
        )
        context.set_default_timeout(90_000)
        page = context.new_page()
        page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        return page

    def arrived(self, subscription: str) -> list[str]:
        return sorted(m.payload.decode() for m in self.collector.received[f"{self.topic}-{subscription}"])

    def search(self, page: Page, **fields: str) -> None:
        """Searches until something is found: a message is listed a few seconds after it came."""

        def found() -> bool:
            page.goto("/ui/messages")
            for name, value in fields.items():
                field = page.locator(f"form [name={name}]")
                if field.evaluate("e => e.tagName") == "SELECT":
                    field.select_option(value)
                else:
                    field.fill(value)
            page.get_by_role("button", name="Search").click()
            page.wait_for_load_state()  # the page is shown before its rows and scripts are there
            return page.locator("#messages tbody tr").count() > 0

        wait_until(found, 20, f"messages with {fields}\n{self.job.log}")

    def act(self, page: Page, action: str, says: str, when: str | None = None) -> str:
        """Presses an action's button and confirms; returns what the page answered."""
        page.get_by_role("button", name=f"{action}…").click()
        expect(page.get_by_role("dialog")).to_contain_text(says)
        if when is not None:
            page.get_by_label("Deliver at").fill(when)
        page.get_by_role("button", name="Do it").click()
        answer = page.locator("#answer")
        expect(answer).to_contain_text(re.compile(rf"^{action}: "))
        return answer.text_content() or ""

    def stop(self) -> None:
        self.collector.stop()
        self.api.stop()
        self.job.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    need_chromium()
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def desk(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory, broker: EmbeddedBroker, pulsar_client: pulsar.Client
) -> Iterator[Desk]:
    desk = Desk(tmp_path_factory.mktemp("desk"), broker, pulsar_client, browser)
    try:
        yield desk
        assert desk.problems == [], "errors in the browser's console"
    finally:
        desk.stop()


def test_actions_do_what_they_say(desk: Desk) -> None:
    for text in ("cancelled", "skipped", "moved", "now", "restored", "kept"):
        desk.send(text, 3600, f"key of {text}")
    for i in range(3):
        desk.send(f"many {i}", 3600, "many", color="red")
    page = desk.page()

    desk.search(page, key="key of cancelled")
    page.locator("#pick-all").check()
    assert desk.act(page, "Cancel", "Cancel 1 message?") == "Cancel: 2 APPLIED"
    expect(page.locator("td.result")).to_have_text("a: APPLIED, b: APPLIED")

    desk.search(page, key="key of skipped", subscription="b")
    page.locator(".pick").check()
    assert desk.act(page, "Skip", "(for b)") == "Skip: 1 APPLIED"

    desk.search(page, key="key of now")
    page.locator(".pick").check()
    assert desk.act(page, "Deliver now", "This can't be undone") == "Deliver now: 2 APPLIED"
    wait_until(lambda: desk.arrived("a") == desk.arrived("b") == ["now"], 20, f"what is delivered now\n{desk.job.log}")

    desk.search(page, key="key of moved", subscription="a")
    page.locator(".pick").check()
    page.get_by_role("button", name="Reschedule…").click()
    page.get_by_label("Deliver at").fill("tomorrow")
    page.get_by_role("button", name="Do it").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("Give a time with its zone")
    page.get_by_role("button", name="Back").click()
    due = now() + 4_000
    assert desk.act(page, "Reschedule", "Reschedule 1 message?", str(due)) == "Reschedule: 1 APPLIED"
    wait_until(lambda: desk.arrived("a") == ["moved", "now"], 20, f"what was moved\n{desk.job.log}")
    assert min(m.received_at for m in desk.collector.received[f"{desk.topic}-a"] if m.payload == b"moved") >= due

    # Many, by what they have in common: the dialog says how many before anything is done.
    desk.search(page, property="color=red", subscription="a")
    page.get_by_label("all that match").check()
    assert desk.act(page, "Skip", "Skip 3 messages?") == "Skip: 3 applied"
    desk.search(page, property="color=red", subscription="a", state="takenBack")
    page.get_by_label("all that match").check()
    assert desk.act(page, "Restore", "3 for a") == "Restore: 3 applied"
    desk.search(page, property="color=red", subscription="a")
    assert page.locator("#messages tbody tr").count() == 3

    # What was done is in the log, by whom, and in the message's own history.
    page.goto("/ui/control?result=APPLIED")
    expect(page.locator("main")).to_contain_text("RESCHEDULE")
    page.goto("/ui/messages?key=key+of+moved")
    page.locator("#messages a").first.click()
    events = page.locator(".events")
    for what in ("published", "kept until it is due", "rescheduled for a · anonymous", "delivered for a"):
        expect(events).to_contain_text(what)
    # Nothing that was cancelled has come.
    assert (desk.arrived("a"), desk.arrived("b")) == (["moved", "now"], ["now"])


def test_what_is_held_back_is_cancelled_from_the_list_and_from_its_page(desk: Desk) -> None:
    subscription = f"{desk.api.url}/admin/v2/{desk.topic.replace('://', '/')}/subscription/a"
    assert http.post(f"{subscription}/pause").status_code == 204
    try:
        listed, alone = (desk.send(text, 6, f"key of {text}") for text in ("held in a list", "held alone"))
        page = desk.page()
        desk.search(page, key="key of held in a list", state="held")
        page.locator(".pick").check()
        assert desk.act(page, "Cancel", "(for a, b)") == "Cancel: 1 APPLIED"
        expect(page.locator("td.result")).to_have_text("a: APPLIED")
        desk.search(page, id=alone, state="held")
        # Its page names b until b's delivery is in the tables, some seconds after the delivery.
        due = page.locator("main dl dd").first

        def waits_for() -> str:
            page.goto(f"/ui/message?topic={desk.topic}&id={alone}")
            return due.text_content() or ""

        wait_until(lambda: "it does not wait for b" in waits_for(), 20, f"the delivery for b\n{desk.job.log}")
        expect(due).to_contain_text("held back for a")
        answer = desk.act(page, "Cancel", "Cancel 1 message?")
        assert "1 APPLIED" in answer
        assert "INVALID" not in answer
        # It waits no more for b, and the browser's console tells of a call that is refused.
        desk.problems[:] = [problem for problem in desk.problems if "status of 412" not in problem]
        log = page.context.new_page()
        log.goto(f"/ui/control?topic={desk.topic}&result=INVALID")
        expect(log.get_by_role("region", name="Commands").locator("tbody tr")).to_have_count(0)
    finally:
        assert http.post(f"{subscription}/resume").status_code == 204
    assert not {m.payload for m in desk.collector.received[f"{desk.topic}-a"]} & {b"held in a list", b"held alone"}
    assert listed != alone


def test_what_a_message_has_is_text_and_never_a_program(desk: Desk) -> None:
    position = desk.send(ATTACK, 3600, ATTACK, **{ATTACK: ATTACK})
    page = desk.page()
    desk.search(page, id=position)
    for path in (page.url, f"/ui/message?topic={desk.topic}&id={position}"):
        page.goto(path)
        expect(page.locator("main")).to_contain_text(ATTACK)
        assert page.evaluate("window.hacked") is None
    expect(page.locator("pre")).to_have_text(ATTACK)
    page.goto(f"/ui/messages?key={httpx.QueryParams({'k': ATTACK})['k']}")
    expect(page.locator("form [name=key]")).to_have_value(ATTACK)
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_whole_and_can_be_used_by_everybody(desk: Desk, scheme: Scheme) -> None:
    position = desk.send("looked at", 1800, "looked at")
    desk.search(desk.page(), id=position)
    for width in (1440, 390):
        page = desk.page(width, scheme)
        for path in [*PAGES, f"/ui/message?topic={desk.topic}&id={position}", "/ui/login"]:
            page.goto(path)
            page.wait_for_load_state("networkidle") if path != "/" else page.wait_for_timeout(1500)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, "is wider than the window")
            if width == 1440:
                found = Axe().run(page).response["violations"]
                grave = [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]
                assert grave == [], path
        page.context.close()


def test_the_overview_is_of_now_and_says_when_the_job_is_gone(desk: Desk) -> None:
    page = desk.page()
    page.goto("/")
    expect(page.locator("[data-field=state]")).to_have_text("running")
    expect(page.locator("[data-field=pending]")).to_have_text(re.compile(r"^[\d,]+$"))
    expect(page.get_by_role("link", name="a", exact=True)).to_be_visible()
    _check_troubles(page)
    page.goto(f"/ui/schedule?topic={desk.topic}&span=day")
    expect(page.locator("#schedule-note")).to_contain_text("deliveries due in this window")
    page.get_by_text("As a table").click()
    page.locator("#bars-table a").first.click()
    expect(page).to_have_url(re.compile("dueFrom="))
    expect(page.locator("#messages tbody tr").first).to_be_visible()

    figures = http.get(f"{desk.api.url}/metrics").text
    n = len(desk.arrived("a") + desk.arrived("b"))
    assert f"delaylake_delivered_messages_total {n}.0" in figures
    assert "delaylake_job_up 1.0" in figures
    assert f'delaylake_source_backlog_messages{{topic="{desk.topic}"}}' in figures
    # Under Pulsar's names: the memory of the job's state, and the size of the delayed index on disk.
    for name in ("size_bytes", "bucket_snapshot_size_bytes", "bucket_total"):
        assert float(re.findall(rf"^pulsar_delayed_message_index_{name} (.*)$", figures, re.M)[0]) > 0, name
    desk.job.kill9()
    try:
        page.goto("/")
        expect(page.get_by_role("alert")).to_contain_text("no sign of life of the job", timeout=120_000)
        expect(page.locator("[data-field=pending]")).to_have_text("-")
        assert "delaylake_job_up 0.0" in http.get(f"{desk.api.url}/metrics").text
        assert "no sign of life" in http.get(f"{desk.api.url}/readyz").json()["job"]["trouble"]
    finally:
        desk.job.start()


def _check_troubles(page: Page) -> None:
    """What somebody has to look at is on the overview for as long as the job tells of it."""
    told = [{"kind": "standing", "name": "orders", "since": 0, "text": "<b>no</b> answer", "count": 1}]

    def with_troubles(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "troubles": told})

    expect(page.get_by_role("alert")).to_have_count(0)
    page.route("**/ui/data/overview", with_troubles)
    expect(page.get_by_role("alert")).to_have_text("orders: <b>no</b> answer (since 1970-01-01 00:00:00 UTC)")
    page.unroute("**/ui/data/overview")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_only_who_may_sees_and_acts(desk: Desk, tmp_path: Path) -> None:
    answer = http.post(
        f"{desk.api.url}/admin/v2/persistent/public/default/desk/subscription/a/pause",
        headers={"Origin": "https://elsewhere.example"},
    )
    assert answer.status_code == 403
    settings = yaml.safe_load(desk.job.file.read_text())
    other = {"source": "persistent://public/default/secret", "subscriptions": [{"name": "z"}]}
    roles = [{"role": "reader", "operations": ["read"], "topics": [desk.topic]}]
    auth = {"enabled": True, "token_secret_key": encoded(SECRET), "roles": roles}
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({**settings, "routes": [*settings["routes"], other], "auth": auth}))
    api = Api(file)
    problems = list(desk.problems)
    try:
        page = desk.page(url=api.url)
        for wrong in ("nonsense", token("nobody")):
            page.goto("/ui/messages")
            page.get_by_label("Pulsar token").fill(wrong)
            page.get_by_role("button", name="Log in").click()
            expect(page.get_by_role("alert").first).to_contain_text(re.compile("not accepted|may not read"))
            page.context.clear_cookies()
        page.goto("/")
        page.get_by_label("Pulsar token").fill(token("reader"))
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_text("reader")).to_be_visible()
        [cookie] = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        page.goto("/ui/settings")
        expect(page.locator("main")).to_contain_text("may not admin")
        expect(page.get_by_role("link", name="Settings")).to_have_count(0)
        page.goto("/ui/storage")
        assert "secret" not in (page.locator("main").text_content() or "")
        page.goto(f"/ui/messages?topic={desk.topic}&key=key+of+kept")
        page.locator(".pick").check()
        page.get_by_role("button", name="Skip…").click()
        page.get_by_role("button", name="Do it").click()
        expect(page.locator("#answer")).to_contain_text("the role reader may not skip")
        # The cookie acts for nobody else's page.
        stolen = http.post(
            f"{api.url}/admin/v2/persistent/public/default/desk/subscription/a/pause",
            headers={"Origin": "https://elsewhere.example", "Cookie": f"delaylake_token={token('reader')}"},
        )
        assert (stolen.status_code, "another site" in stolen.text) == (403, True)
        page.get_by_role("button", name="Log out").click()
        page.goto("/")
        expect(page.get_by_label("Pulsar token")).to_be_visible()
    finally:
        api.stop()
    # A browser's console tells of each call that is refused.
    assert all("status of 40" in problem for problem in desk.problems[len(problems) :])
    desk.problems[:] = problems
