"""What the dashboard's pages show, and how they are used, in a real browser; without a job, on tables made for it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Response, Route, TimeoutError, expect

from admin.control.async_client import AsyncControlClient
from conf.settings import Settings
from docs.make_pictures import SCHEMES
from status.job_status import Point
from status.status_writer import StatusWriter
from tests.support.service.admin_api import served
from tests.support.service.browser import chromium, need_chromium, wait_until_loaded
from warehouse.delta.tables import Tables
from warehouse.schemas import SCHEMAS

HOUR = 3_600_000
NAMESPACE = "persistent://a-tenant-with-a-long-name/a-namespace-with-a-long-name"
ORDERS, MAIL = f"{NAMESPACE}/orders-of-all-customers", f"{NAMESPACE}/reminders-by-mail"
REPORTS = f"{NAMESPACE}/reports"
SCHEDULE_KEY = "reminder of order <b>7</b>"
PAGES = [
    "/",
    "/ui/schedule",
    "/ui/messages",
    "/ui/recurring",
    "/ui/retries",
    "/ui/control",
    "/ui/storage",
    "/ui/settings",
]
FILLED = [
    f"/ui/recurring?topic={REPORTS}",
    f"/ui/message?topic={ORDERS}&id=7:11",
    f"/ui/message?topic={MAIL}&id=8:1",
    "/ui/login",
]

PROBLEMS: list[str] = []  # what the browser's console has said


class Status(StatusWriter):
    """A job with a past, whose alert can be set."""

    def __init__(self, warehouse: str) -> None:
        super().__init__(warehouse, 100)
        self._state, self._most_per_second = "running", 4.0
        self._values |= {"pending": 123, "last_batch_at": 2**52}
        self.now = time.time_ns() // 1_000_000
        self._point_began = math.inf  # the past is all there is, however long the browser takes to start
        self._history.extend(Point(self.now - 60_000 + 5_000 * i, 30.0, 20.0 + i, 1.0, 9.0 + i) for i in range(12))

    def set(self, **values: object) -> None:
        with self._lock:
            self._values |= values


def write(tables: Tables, name: str, rows: list[dict[str, Any]]) -> None:
    columns = [pa.array([row.get(field.name) for row in rows], field.type) for field in SCHEMAS[name]]
    tables.append(name, pa.table(columns, schema=SCHEMAS[name]), {})


def keyed_messages(due: int) -> list[dict[str, Any]]:
    """Two messages of a schedule key, of which the second has taken the place of the first."""
    at = {"topic": MAIL, "partition": -1, "ledger_id": 8, "batch_index": -1, "batch_size": 1, "deliver_at": due}
    waits = {**at, "operation": "DELAY", "publish_time": due - HOUR, "producer_name": "p", "key": "customer-7"}
    waits |= {"schedule_key": SCHEDULE_KEY, "properties": [("scheduleKey", SCHEDULE_KEY)]}
    yields = {**at, "entry_id": 0, "subscription": "mail", "operation": "CANCEL", "sequence": 40}
    return [{**waits, "entry_id": 0}, {**waits, "entry_id": 1}, yields]


@pytest.fixture(scope="module")
def status(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Status]:
    warehouse = f"file:{tmp_path_factory.mktemp('pages')}"
    writer = Status(warehouse)
    now = writer.now
    tables = Tables(warehouse)
    tables.create()
    at = {"partition": -1, "ledger_id": 7, "batch_index": -1, "batch_size": 1, "producer_name": "p"}
    times = [now - 70_000, *(now + HOUR + i * 7_000 for i in range(500)), now + 400 * 24 * HOUR]
    waits = {**at, "operation": "DELAY", "publish_time": now}
    messages = [
        {**waits, "topic": topic, "entry_id": i, "deliver_at": due, "key": f"k{i}"}
        for topic in (ORDERS, MAIL)
        for i, due in enumerate(times)
    ]
    daily = [("repeat", "0 9 * * *"), ("timeZone", "Europe/Berlin"), ("repeatTimes", "2")]
    recurs = {**waits, "topic": REPORTS, "deliver_at": now + 2 * HOUR, "occurrence": 1}
    messages += [{**recurs, "entry_id": i, "properties": daily, "key": "report"} for i in range(2)]
    over = {**at, "topic": REPORTS, "entry_id": 1, "subscription": "desk", "occurrence": 2}
    write(tables, "deliveries", [{**over, "deliver_at": now - HOUR, "sent_at": now - HOUR}])
    cancel = {**at, "topic": ORDERS, "entry_id": 10, "subscription": "billing", "deliver_at": times[10], "sequence": 1}
    write(tables, "delayed_index", [*messages, {**cancel, "operation": "CANCEL"}])
    move = {**at, "topic": ORDERS, "entry_id": 21, "subscription": "audit", "sequence": 2}
    moved = {**waits, **move, "deliver_at": now + HOUR + HOUR // 2, "key": "k21"}
    write(tables, "delayed_index", [moved, {**move, "operation": "MOVE", "deliver_at": times[21]}])
    skipped = {**at, "topic": ORDERS, "operation": "SKIP", "subscription": "billing", "issued_by": "ops"}
    outcomes = [{**skipped, "entry_id": i, "sequence": i, "request_id": f"{'a' * 32}.{i // 5}"} for i in range(10, 20)]
    retry = {**at, "topic": MAIL, "subscription": "mail", "deliver_at": now, "issued_by": "mailer", "reason": "no line"}
    outcomes += [
        {**retry, "operation": "RETRY", "entry_id": 900, "attempt": 1, "sequence": 30, "request_id": "r.1"},
        {**retry, "operation": "RETRY", "entry_id": 900, "attempt": 2, "sequence": 31, "request_id": "r.2"},
        {**retry, "operation": "RETRY", "entry_id": 901, "attempt": 1, "sequence": 32, "request_id": "r.3"},
    ]
    keyed = keyed_messages(now + HOUR)
    write(tables, "delayed_index", keyed)
    told = {"result": "SUPERSEDED", "issued_by": "delaylake", "reason": "yields to 8:1:-1:-1"}
    outcomes.append({**keyed[-1], **told, "request_id": "8:1:-1:-1"})
    again = {**at, "topic": MAIL, "subscription": "mail", "entry_id": 900, "deliver_at": now}
    write(tables, "deliveries", [{**again, "sent_at": now, "attempt": 2, "destination": f"{MAIL}-mail-dlq"}])
    write(tables, "outcomes", [{"result": "APPLIED", **row, "applied_at": now} for row in outcomes])
    with writer:
        yield writer


@pytest.fixture(scope="module")
def page(status: Status) -> Iterator[Page]:
    """A page of the dashboard, in a browser far from UTC; nothing must be wrong in its console."""
    need_chromium()
    settings = Settings.model_validate(
        {
            "pulsar": {"service_url": "pulsar://127.0.0.1:1"},
            "warehouse": status._warehouse,
            "routes": [
                {"source": ORDERS, "subscriptions": [{"name": "billing"}, {"name": "audit"}]},
                {"source": MAIL, "subscriptions": [{"name": "mail"}]},
                {"source": REPORTS, "subscriptions": [{"name": "desk", "rate": {"messages_per_second": 2.5}}]},
            ],
        }
    )
    with pytest.MonkeyPatch.context() as patch, chromium() as browser:
        patch.setattr(AsyncControlClient, "_run", lambda self: setattr(self, "_has_tried", True))
        with served(settings) as client:
            yield _page(browser, str(client.base_url), PROBLEMS)
    assert PROBLEMS == [], "errors in the browser's console"


def _page(browser: Browser, url: str, problems: list[str]) -> Page:
    page = browser.new_context(
        viewport={"width": 1440, "height": 900}, base_url=url, timezone_id="Asia/Kolkata"
    ).new_page()
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    return page


def tile(page: Page, name: str) -> Any:
    return page.locator(f"#{name}")


def test_the_overview_answers_what_is_asked_first_and_has_colours_only_for_what_is_wrong(
    page: Page, status: Status
) -> None:
    page.goto("/")
    expect(tile(page, "on-time")).to_contain_text(re.compile("yes.*99 % went out within 20 ms, half within 1 ms", re.S))
    expect(tile(page, "keeps-up")).to_contain_text("30 messages in, 31 deliveries out a second")
    expect(tile(page, "stuck")).to_contain_text("nothing")
    expect(tile(page, "next")).to_contain_text(
        re.compile(r"3 deliveries in a minute.*\d deliveries in the next hour", re.S)
    )
    expect(page.locator(".tile.warn, .tile.bad")).to_have_count(0)
    # A legend has the last values before anybody points at the chart.
    expect(page.locator("#rates .legend")).to_have_text(re.compile("messages in 30 *deliveries out 31"))
    status.set(is_held_up=True)
    expect(tile(page, "keeps-up")).to_have_class(re.compile("bad"))
    status.set(is_held_up=False, last_batch_at=0)
    expect(page.locator("[data-field=pending]")).to_have_text("-")
    expect(page.locator("#trouble")).to_contain_text("finished no batch")
    status.set(last_batch_at=2**52)
    expect(page.locator("[data-field=pending]")).to_have_text("123")


def grave_faults(page: Page) -> list[tuple[str, str]]:
    """Returns what keeps people from using a page, light or dark, and where."""
    found = []
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        found += Axe().run(page).response["violations"]
    page.emulate_media(color_scheme=SCHEMES[0])
    return [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]


def test_tables_fit_and_topics_are_called_by_what_differs(page: Page) -> None:
    for path in [*PAGES, *FILLED]:
        page.goto(path)
        page.wait_for_load_state("networkidle")
        wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
        assert page.evaluate(wide) == 0, path
        assert grave_faults(page) == [], path
    page.goto("/")
    waits = page.get_by_role("region", name="What waits")
    expect(waits.get_by_text("reminders-by-mail", exact=True)).to_have_attribute("title", MAIL)


def test_the_overview_tells_when_what_is_put_off_of_any_topic_is_out(page: Page, status: Status) -> None:
    queues = page.get_by_role("region", name="Shaped queues")
    page.goto("/")
    expect(page.get_by_role("region", name="What waits")).to_be_visible()
    expect(queues).to_have_count(0)
    status.set(shaped_until={REPORTS: {"desk": status.now + HOUR}, MAIL: {"mail": status.now - HOUR}})
    status._write()
    page.reload()
    expect(queues.locator("tbody tr")).to_have_count(1)
    utc = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime((status.now + HOUR) / 1000))
    expect(queues.locator("tbody")).to_contain_text(re.compile(f"reports.*desk.*{utc}", re.S))
    status.set(shaped_until={})


def test_on_a_phone_a_row_is_a_card_that_says_what_each_of_its_cells_is(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    cards = 0
    for path in [*PAGES, *FILLED, "/docs"]:
        page.goto(path)
        page.wait_for_load_state("networkidle")
        wide = "[document.documentElement, ...document.querySelectorAll('.scroll')].map(e => e.scrollWidth)"
        assert max(page.evaluate(wide)) <= 390, path
        found = page.evaluate(
            "[...document.querySelectorAll('.scroll td:not(:empty)')].filter(e => e.checkVisibility()).map(e =>"
            " [e.dataset.name, e.getBoundingClientRect().right, e.innerHTML])"
        )
        cards += len(found)
        unnamed = [cell for cell in found if not cell[0] and "checkbox" not in cell[2]]
        assert unnamed == [], path
        assert all(right <= 390 for _, right, _ in found), path
        assert path == "/docs" or grave_faults(page) == [], path
    assert cards > 100
    page.goto(f"/ui/messages?topic={ORDERS}")
    first = page.locator("#messages tbody tr").first
    assert first.locator("td").nth(1).get_attribute("data-name") == "Due"
    page.get_by_label("Select all on this page").check()
    expect(page.locator("#picked")).to_have_text("50")
    page.goto("/ui/control")
    page.get_by_role("button", name="10 messages").click()
    expect(page.locator(".parts a").first).to_be_visible()
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/ui/settings")
    expect(page.locator("main")).to_contain_text("rate: {messages_per_second: 2.5, burst: null, per: subscription}")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/", "/ui/part/subscriptions"),
        (f"/ui/schedule?topic={ORDERS}", "/ui/data/"),
        ("/ui/messages", "/ui/part/count"),
    ],
)
def test_a_page_says_by_itself_when_it_has_all(page: Page, path: str, asked: str) -> None:
    """So pictures of it show what it shows."""
    held: list[Route] = []
    page.route(lambda url: asked in url and "overview" not in url, lambda route: held.append(route))
    page.goto(path)
    with pytest.raises(TimeoutError):
        wait_until_loaded(page, timeout_millis=1_000)
    assert held
    for route in held:
        route.continue_()
    page.unroute_all()
    wait_until_loaded(page)


def test_times_are_utc_or_local_as_the_switch_says_and_it_is_remembered(page: Page, status: Status) -> None:
    page.goto(f"/ui/messages?topic={ORDERS}&key=k1")
    due = page.locator("#messages time").first
    utc, local = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime((status.now + HOUR) / 1000 + shift)) for shift in (0, 5.5 * 3600)
    )
    expect(due).to_contain_text(utc)
    page.get_by_role("button", name="Times are UTC").click()
    expect(due).to_contain_text(local)
    page.reload()
    expect(due).to_contain_text(local)
    title = due.get_attribute("title") or ""
    assert utc in title
    assert local in title
    page.keyboard.press("z")
    expect(due).to_contain_text(utc)
    page.evaluate("localStorage.clear()")


def test_what_has_been_handed_out_is_not_shown_as_waiting(page: Page, status: Status) -> None:
    page.goto(f"/ui/messages?topic={ORDERS}&dueBefore={status.now + 1}")
    expect(page.locator("#messages tbody")).to_contain_text(re.compile(r"\d min overdue"))
    assert "-" not in (page.locator("#messages tbody td:nth-child(3)").first.text_content() or "")


def test_the_histogram_shows_most_of_what_is_due_by_subscription_and_is_used_by_keys(page: Page) -> None:
    page.goto(f"/ui/schedule?topic={ORDERS}")
    note = page.locator("#schedule-note")
    expect(note).to_have_text(
        re.compile(r"^\d+ deliveries due in this window, 2 min a bar · 2 going out now · \d+ later · ")
    )
    expect(note).to_contain_text("the senders' best so far: 4 a second")
    legend = page.locator("#bars .legend")
    billing, audit = (int(n) for n in re.findall(r"(?:billing|audit) (\d+)", legend.text_content() or ""))
    # Nearly all of 501 messages each, of which billing does not want one, and one is a year away.
    assert (audit - billing, 450 < audit < 500) == (1, True)
    expect(page.locator("#steep")).to_be_hidden()
    page.get_by_label("logarithmic").check()
    # A stack on a logarithmic scale would say nothing of its parts: a bar is the sum.
    series = "plot.series.slice(1).map(one => one.label)"
    assert page.evaluate(series) == ["all"]
    expect(legend).to_contain_text(f"all {billing + audit}")
    expect(legend).to_contain_text("the senders at their best so far 480")
    page.locator("#bars").focus()
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    expect(legend).to_contain_text("2 min:")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("dueFrom=.*dueBefore="))
    page.goto(f"/ui/schedule?topic={ORDERS}")
    plot = page.locator("#bars .u-over")
    plot.hover(position={"x": 700, "y": 50})
    page.mouse.down()
    plot.hover(position={"x": 900, "y": 50})
    page.mouse.up()
    expect(page).to_have_url(re.compile("start=.*end="))
    expect(note).to_contain_text(re.compile(r"\b(10|30) s a bar"))
    page.goto(f"/ui/schedule?topic={ORDERS}&span=all")
    expect(note).to_contain_text("1,001 deliveries due in this window")
    page.get_by_label("logarithmic").uncheck()
    assert page.evaluate(series) == ["audit", "billing"]
    page.get_by_text("As a table").click()
    expect(page.locator("#bars-table thead")).to_contain_text("billing")
    page.evaluate("localStorage.clear()")


def test_the_scale_is_logarithmic_only_for_who_asks_for_it(page: Page) -> None:
    def with_a_peak(route: Route) -> None:
        answer = route.fetch()
        found = answer.json()
        for i, bar in enumerate(found["bars"]):
            bar[1:] = [1_000_000, 500] if i == 5 else [3, 2]
        route.fulfill(response=answer, json=found)

    page.route("**/ui/data/schedule*", with_a_peak)
    page.goto(f"/ui/schedule?topic={ORDERS}")
    scale, hint = page.get_by_label("logarithmic"), page.locator("#steep")
    expect(hint).to_be_visible()
    expect(scale).not_to_be_checked()
    scale.check()
    expect(hint).to_be_hidden()
    page.reload()
    expect(scale).to_be_checked()
    page.unroute("**/ui/data/schedule*")
    page.evaluate("localStorage.clear()")


def test_recurring_messages_are_listed_with_their_next_occurrences_and_can_be_ended(page: Page) -> None:
    calls: list[tuple[str, str]] = []
    page.goto(f"/ui/recurring?topic={REPORTS}")
    row = page.locator("#messages tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text(re.compile("7:0.*0 9 .*Europe/Berlin.*1 of 2.*desk.*report", re.S))
    done = {"outcomes": [{"subscription": "desk", "result": "APPLIED"}]}

    def answer(route: Route) -> None:
        calls.append((route.request.method, route.request.url))
        route.fulfill(json=done)

    page.route("**/schedules/**", answer)
    for button, title in (
        ("Skip the next occurrence of 7:0", "Skip"),
        ("Pause 7:0", "Pause 7:0?"),
        ("End 7:0", "End 7:0?"),
    ):
        page.get_by_role("button", name=button).click()
        expect(page.locator("#confirm-title")).to_contain_text(title)
        expect(page.locator("#confirm-text")).to_contain_text("for all subscriptions")
        page.get_by_role("button", name="Do it").click()
        expect(page.locator("#answer")).to_contain_text("7:0 · desk: APPLIED")
    page.unroute("**/schedules/**")
    assert [method for method, _ in calls] == ["POST", "POST", "DELETE"]
    assert calls[0][1].endswith("/reports/schedules/7:0/skipNext")
    assert calls[1][1].endswith("/reports/schedules/7:0/pause")
    page.locator("select[name=which]").select_option("all")
    page.get_by_role("button", name="Search").click()
    expect(row).to_have_count(2)
    expect(row.nth(1)).to_contain_text("over")


def test_retries_are_listed_and_dead_letters_are_redriven_after_a_dry_run(page: Page) -> None:
    page.goto(f"/ui/retries?topic={MAIL}")
    rows = page.locator("#messages tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.filter(has_text="dead letter")).to_contain_text(re.compile("7:900.*mail.*2.*no line.*mailer", re.S))
    expect(rows.filter(has_text="waits")).to_have_count(2)
    page.get_by_label("Which").select_option("dead letters")
    page.get_by_role("button", name="Search").click()
    expect(rows).to_have_count(1)

    calls: list[tuple[dict[str, Any], str | None]] = []

    def answer(route: Route) -> None:
        body: dict[str, Any] = route.request.post_data_json or {}
        calls.append((body, route.request.headers.get("idempotency-key")))
        letters = [{"messageId": "7:0:-1:-1", "key": None, "reasons": ["no line", "<b>still none</b>"]}]
        found = {"matched": 1, "messages": letters} if body.get("dryRun") else {"matched": 1, "redriven": 1}
        if len(calls) == 2:
            route.fulfill(status=503, json={"reason": "the broker is away"})
        else:
            route.fulfill(json=found)

    page.route("**/dlq/redrive", answer)
    page.get_by_label("Reason").fill("line")
    for says in ("the broker is away", "1 re-driven"):
        page.get_by_role("button", name="Re-drive…").click()
        expect(page.locator("#confirm-title")).to_have_text("Re-drive 1 dead letter?")
        expect(page.locator("#confirm-text")).to_contain_text("for mail")
        expect(page.locator("#confirm-list")).to_have_text("7:0:-1:-1 · <b>still none</b>")
        page.get_by_role("button", name="Do it").click()
        expect(page.locator("#answer")).to_have_text(says)
    page.unroute("**/dlq/redrive")
    wanted = {"subscription": "mail", "reason": "line"}
    assert [call for call, _ in calls] == 2 * [{"filter": wanted, "dryRun": True}, {"filter": wanted, "max": 1_000_000}]
    # A call that failed is made again as the same one.
    assert calls[1][1]
    assert calls[1][1] == calls[3][1]
    PROBLEMS.remove(next(text for text in PROBLEMS if "503" in text))  # the browser's own line


def test_a_message_is_retried_for_one_subscription(page: Page) -> None:
    page.goto(f"/ui/message?topic={ORDERS}&id=7:3")
    calls: list[tuple[str, Any]] = []

    def answer(route: Route) -> None:
        calls.append((route.request.url, route.request.post_data_json))
        route.fulfill(json={"outcomes": [{"subscription": "audit", "result": "APPLIED", "ledgerId": 7, "entryId": 3}]})

    page.route("**/subscription/**", answer)
    page.locator("#retry-for").select_option("audit")
    page.get_by_role("button", name="Retry…").click()
    expect(page.locator("#confirm-text")).to_contain_text("(for audit)")
    page.get_by_label("Reason").fill("lost")
    page.get_by_role("button", name="Do it").click()
    expect(page.locator("#answer")).to_have_text("Retry: 1 APPLIED")
    page.unroute("**/subscription/**")
    [(url, body)] = calls
    assert url.endswith("/subscription/audit/retry")
    assert body == {"messageIds": ["7:3"], "reason": "lost"}


def test_a_message_is_cancelled_at_the_time_that_it_has_for_each_subscription(page: Page, status: Status) -> None:
    came, moved = status.now + HOUR + 20 * 7_000, status.now + HOUR + HOUR // 2
    page.goto(f"/ui/message?topic={ORDERS}&id=7:21")
    due = page.locator("main dl dd").first
    utc = [time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at / 1000)) for at in (came, moved)]
    expect(due.locator("div")).to_have_text(
        [re.compile(f"{utc[0]}.* for billing"), re.compile(f"{utc[1]}.* for audit")]
    )
    calls: list[Any] = []

    def answer(route: Route) -> None:
        calls.append(route.request.post_data_json)
        route.fulfill(json={"outcomes": []})

    page.route("**/cancelDelayedMessage", answer)
    page.get_by_role("button", name="Cancel…").click()
    expect(page.locator("#confirm-title")).to_have_text("Cancel 1 message?")
    page.get_by_role("button", name="Do it").click()
    expect(page.locator("#answer")).to_contain_text("Cancel: ")
    page.unroute("**/cancelDelayedMessage")
    named = {"ledgerId": "7", "entryId": "21"}
    assert calls == [
        {**named, "deliverAt": str(came), "subscriptionNames": ["billing"]},
        {**named, "deliverAt": str(moved), "subscriptionNames": ["audit"]},
    ]


def test_a_message_shows_its_schedule_key_and_what_took_its_place(page: Page) -> None:
    page.goto(f"/ui/message?topic={MAIL}&id=8:1")
    shown, events = page.locator("main dl"), page.locator(".events li")
    expect(shown).to_contain_text(re.compile(f"Key.*customer-7.*scheduleKey.*{SCHEDULE_KEY}", re.S))
    expect(events).to_have_count(1)
    page.goto(f"/ui/message?topic={MAIL}&id=8:0")
    expect(shown).to_contain_text(SCHEDULE_KEY)
    expect(events.last).to_contain_text("superseded for mail · delaylake · yields to 8:1:-1:-1")


def test_a_bulk_action_is_one_line_that_is_opened_to_its_messages(page: Page) -> None:
    page.goto(f"/ui/control?topic={ORDERS}")
    lines = page.get_by_role("region", name="Commands").locator("tbody tr")
    expect(lines).to_have_count(1)
    opens = page.get_by_role("button", name="10 messages")
    opens.click()
    expect(lines.nth(1).get_by_role("link")).to_have_count(10)
    opens.click()
    expect(lines).to_have_count(1)


def test_a_search_is_kept_as_a_link_and_keys_lead_to_pages_and_rows(page: Page) -> None:
    page.goto(f"/ui/messages?topic={ORDERS}&key=k7")
    page.once("dialog", lambda dialog: dialog.accept("<b>seven</b>"))
    page.get_by_role("button", name="Keep as a link").click()
    page.goto("/ui/messages")
    page.get_by_role("link", name="<b>seven</b>").click()
    expect(page.locator("form [name=key]")).to_have_value("k7")
    page.wait_for_load_state()  # the form is shown before the messages are there, and keys mean something
    page.locator("h1").click()
    for key in "jx":
        page.keyboard.press(key)
    expect(page.locator("#picked")).to_have_text("1")
    page.get_by_role("button", name="Remove the saved search").click()
    expect(page.locator("#searches")).to_be_hidden()
    page.locator("h1").click()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Control log")
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("c")
    expect(page).to_have_url(re.compile("/ui/control$"))


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_small(page: Page, path: str) -> None:
    """What it loads at first, without the answers that it asks for later."""
    sizes: dict[str, int] = {}

    def note(response: Response) -> None:
        if not re.search("/ui/(part|data)/", response.url):
            sizes[response.url] = len(response.body())

    page.on("response", note)
    page.goto(path)
    page.wait_for_load_state("networkidle")
    page.remove_listener("response", note)
    assert sum(sizes.values()) < 100_000, sizes
