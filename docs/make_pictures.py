"""Makes docs/images: the dashboard with a job at work on an embedded broker. Takes two minutes.

usage: make_pictures.py [FOLDER]    instead of docs/images, all pages at all sizes go to FOLDER
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal

import httpx
import pulsar
from playwright.sync_api import ViewportSize

from broker.client import connect
from broker.standalone import EmbeddedBroker
from tests.browser import chromium
from tests.harness import Api, Job, now

ORDERS, REMINDERS = "persistent://shop/web/orders", "persistent://shop/web/reminders"
ROUTES = [
    {"source": ORDERS, "subscriptions": [{"name": "billing"}, {"name": "audit", "type": "Exclusive"}]},
    {"source": REMINDERS, "subscriptions": [{"name": "mail"}]},
]
Scheme = Literal["light", "dark"]
PICTURES: list[tuple[str, int, Scheme]] = [  # page, width, scheme
    ("overview", 1440, "light"),
    ("schedule", 1440, "dark"),
    ("messages", 1440, "light"),
    ("overview", 390, "dark"),
]
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


def act(url: str) -> str:
    """Skips, moves and delivers some messages, and pauses a subscription; returns the id of one that was moved."""

    def post(topic: str, operation: str, content: Any = None) -> None:
        path = f"/admin/v2/{topic.replace('://', '/')}/subscription/{operation}"
        httpx.post(url + path, json=content, timeout=30).raise_for_status()

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


def main() -> None:
    everything = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    images = everything or Path(__file__).with_name("images")
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
            load = threading.Thread(target=produce, args=(client, stopped))
            load.start()
            time.sleep(LOAD_SECONDS)
            moved = act(api.url)
            time.sleep(8)
            pages = {
                "overview": "/",
                "schedule": f"/ui/schedule?topic={ORDERS}&span=day",
                "messages": f"/ui/messages?topic={ORDERS}&dueFrom={now() + 60_000}",
                "message": f"/ui/message?topic={ORDERS}&id={moved}",
                "control": "/ui/control",
                "storage": "/ui/storage",
                "settings": "/ui/settings",
            }
            schemes: tuple[Scheme, ...] = ("light", "dark")
            wanted = [(p, w, s) for p in pages for w in (1440, 390) for s in schemes] if everything else PICTURES
            with chromium() as browser:
                for name, width, scheme in wanted:
                    size = ViewportSize(width=width, height=900 if width > 400 else 844)
                    page = browser.new_page(viewport=size, color_scheme=scheme, base_url=api.url)
                    page.goto(pages[name])
                    page.wait_for_timeout(2_500)
                    suffix = "-phone" if width < 400 else ""
                    page.screenshot(path=images / f"{name}-{scheme}{suffix}.png")
                    page.close()
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
