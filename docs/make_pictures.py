"""Makes docs/images: each page of the dashboard, wide and narrow, light and dark. Takes three minutes.

usage: make_pictures.py [FOLDER]    to FOLDER instead of docs/images, and as PNG, not WebP
"""

from __future__ import annotations

import base64
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pulsar

from broker.client import connect
from broker.standalone import EmbeddedBroker
from tests.support.service.browser import chromium, wait_until_loaded
from tests.support.service.harness import Api, Job, now

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ORDERS, REMINDERS, REPORTS = (f"persistent://shop/web/{name}" for name in ("orders", "reminders", "reports"))
ROUTES: list[dict[str, Any]] = [
    {
        "source": ORDERS,
        "subscriptions": [
            {"name": "billing", "backoff": {"first": "1s", "attempts": 1}},
            {"name": "audit", "type": "Exclusive"},
        ],
    },
    {"source": REMINDERS, "subscriptions": [{"name": "mail"}, {"name": "sms", "rate": {"messages_per_second": 5}}]},
    {"source": REPORTS, "subscriptions": [{"name": "desk"}]},
]
RULES = [
    ("0 9 * * mon-fri", "Europe/Berlin"),
    ("@every 15m", "UTC"),
    ("FREQ=MONTHLY;BYMONTHDAY=-1", "America/New_York"),
]
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
WIDTHS = (1440, 390)
MOST_HIGH = 1600  # of a picture of a narrow page
WEBP_QUALITY = 82
LOAD_SECONDS = 75


def produce(client: pulsar.Client, stopped: threading.Event) -> None:
    """Some hundred messages a second, due soon, in some hours, or within three weeks."""
    chance = random.Random(4)
    producers = [client.create_producer(topic) for topic in (ORDERS, ORDERS, ORDERS, REMINDERS)]
    for i in range(1_000_000):
        if stopped.is_set():
            return
        near, nine, day, weeks = (
            chance.uniform(4, 12),
            chance.gauss(32_400, 4_000),
            chance.uniform(60, 86_400),
            1_728_000,
        )
        delay = max(2.0, chance.choice([near, near, nine, day, chance.uniform(3_600, weeks)]))
        properties = {
            "deliverAt": str(now() + int(delay * 1000)),
            "region": chance.choice(["eu", "us", "apac"]),
            "tenant": f"t{chance.randint(1, 30)}",
        }
        body = json.dumps({"order": i, "total": round(chance.uniform(5, 900), 2)}).encode()
        producers[i % 4].send_async(body, None, properties, f"customer-{chance.randint(1, 400)}")
        if i % 40 == 0:
            time.sleep(chance.uniform(0.1, 0.15))


def produce_few(client: pulsar.Client) -> str:
    """Sends recurring messages, and one to be retried, whose id is returned."""
    reports = client.create_producer(REPORTS)
    for rule, zone in RULES:
        reports.send(b'{"report": "sales"}', {"repeat": rule, "timeZone": zone}, partition_key=f"sales in {zone}")
    properties = {"deliverAt": str(now() + 20_000), "region": "eu"}
    sent = client.create_producer(ORDERS, batching_enabled=False).send(b'{"order": 0}', properties, "customer-7")
    return f"{sent.ledger_id()}:{sent.entry_id()}"


def act(url: str, failed: str) -> str:
    """Skips, moves, retries and delivers some messages, and pauses a subscription.

    Args:
        url: of the API.
        failed: the id of a message that becomes a dead letter.

    Returns:
        The id of one that was moved.
    """

    def post(topic: str, operation: str, content: Any = None) -> None:
        path = f"/admin/v2/{topic.replace('://', '/')}/subscription/{operation}"
        httpx.post(url + path, json=content, timeout=30).raise_for_status()

    for reason in ("no connection to the bank", "no connection to the bank, again"):
        post(ORDERS, "billing/retry", {"messageIds": [failed], "reason": reason})
        time.sleep(8)
    path = f"/admin/v2/{ORDERS.replace('://', '/')}/delayed?limit=9&dueFrom={now() + 600_000}"
    found = httpx.get(url + path).raise_for_status().json()["messages"]
    ids = [f"{m['ledgerId']}:{m['entryId']}:{m['batchIndex']}" for m in found]
    post(ORDERS, "billing/skipByMessageIds", ids[:5])
    post(ORDERS, "billing/reschedule", {"messageIds": ids[5:8], "deliverAt": now() + 7_200_000})
    post(ORDERS, "billing/deliverNow", ids[8:])
    post(ORDERS, "billing/restore", ids[1:3])
    post(ORDERS, "billing/skip", {"filter": {"properties": {"tenant": "t7"}}, "max": 100_000})
    post(REMINDERS, "mail/pause")
    return ids[5]


def pages(moved: str, failed: str) -> dict[str, str]:
    """Returns the path of each page, by the name of its pictures."""
    return {
        "overview": "/",
        "schedule": f"/ui/schedule?topic={ORDERS}&span=day",
        "shaped": f"/ui/schedule?topic={REMINDERS}&span=day",
        "messages": f"/ui/messages?topic={ORDERS}&dueFrom={now() + 3_600_000}",
        "message": f"/ui/message?topic={ORDERS}&id={moved}",
        "retried": f"/ui/message?topic={ORDERS}&id={failed}",
        "recurring": f"/ui/recurring?topic={REPORTS}",
        "retries": f"/ui/retries?topic={ORDERS}",
        "control": "/ui/control",
        "storage": "/ui/storage",
        "settings": "/ui/settings",
        "api": "/docs",
        "login": "/ui/login",
    }


def picture(browser: Browser, url: str, width: int, scheme: Scheme, file: Path, is_png: bool) -> None:
    """Writes a picture of a page: of a wide one its first 900 pixels, of a narrow one also what is scrolled to."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(url)
    wait_until_loaded(page)
    page.wait_for_timeout(500)  # what is drawn moves into its place
    if width < WIDTHS[0]:
        height = page.evaluate("document.documentElement.scrollHeight")
        page.set_viewport_size({"width": width, "height": min(height, MOST_HIGH)})
        page.wait_for_timeout(500)
        file = file.with_name(f"{file.name}-phone")
    if is_png:
        page.screenshot(path=f"{file}.png")
    else:
        file.with_suffix(".webp").write_bytes(webp(page))
    page.close()


def webp(page: Page) -> bytes:
    """Returns a picture in a tenth of the bytes of a PNG, as Chromium makes it."""
    session = page.context.new_cdp_session(page)
    shot = session.send("Page.captureScreenshot", {"format": "webp", "quality": WEBP_QUALITY})
    return base64.b64decode(shot["data"])


def main() -> None:
    is_png = len(sys.argv) > 1
    images = Path(sys.argv[1]) if is_png else Path(__file__).with_name("images")
    images.mkdir(exist_ok=True)
    stopped = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "broker")
        broker.start(port=0, http_port=0)
        admin = f"{broker.settings.admin_url}/admin/v2"
        httpx.put(f"{admin}/tenants/shop", json={"allowedClusters": ["standalone"]}).raise_for_status()
        httpx.put(f"{admin}/namespaces/shop/web").raise_for_status()
        job = Job(Path(folder), broker.settings, ROUTES)
        try:
            job.start()
            api = Api(job.file)
            client = connect(broker.settings)
            failed = produce_few(client)
            load = threading.Thread(target=produce, args=(client, stopped))
            load.start()
            time.sleep(LOAD_SECONDS)
            moved = act(api.url, failed)
            time.sleep(8)
            with chromium() as browser:
                for name, path in pages(moved, failed).items():
                    for width in WIDTHS:
                        for scheme in SCHEMES:
                            picture(browser, api.url + path, width, scheme, images / f"{name}-{scheme}", is_png)
            stopped.set()
            load.join()
            client.close()
            api.stop()
        finally:
            stopped.set()
            job.stop()
            broker.kill()


if __name__ == "__main__":
    main()
