"""Measures how soon a browser shows the dashboard's pages over ten million pending messages.

An argument gives another number of messages, in whole files. The table is that of pending.py, the browser Chromium, the
API a process without a broker. Prints one JSON object: for each page the milliseconds until something is painted, and
until all its parts are loaded, at a first load, and as the median and maximum of REPEATED later ones; and the pages
whose median first paint is over the budget.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import yaml

from benchmarks.pending import ROWS, ROWS_A_FILE, TOPIC, write
from tests.support.service.browser import chromium
from tests.support.service.harness import Api
from warehouse.delta.tables import Tables

REPEATED = 5
BUDGET_MILLIS = 300  # until something is painted
PAGES = {
    "overview": "/",
    "messages": "/ui/messages",
    "search_by_key": f"/ui/messages?{urlencode({'topic': TOPIC, 'key': 'customer-77'})}",
    "search_by_property": f"/ui/messages?{urlencode({'topic': TOPIC, 'property': 'order=5000000'})}",
    "search_by_id": f"/ui/messages?{urlencode({'topic': TOPIC, 'id': '42:4242'})}",
    "message": f"/ui/message?{urlencode({'topic': TOPIC, 'id': '42:4242'})}",
    "schedule_of_a_day": "/ui/schedule",
    "schedule_of_a_month": "/ui/schedule?span=month",
    "recurring": "/ui/recurring",
    "retries": "/ui/retries",
    "control": "/ui/control",
    "storage": "/ui/storage",
}
_PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def main() -> None:
    files = max(1, (int(sys.argv[1]) if len(sys.argv) > 1 else ROWS) // ROWS_A_FILE)
    with tempfile.TemporaryDirectory() as folder:
        tables = Tables(f"{folder}/warehouse")
        tables.create()
        write(tables, time.time_ns() // 1_000_000, files)
        file = Path(folder) / "settings.yaml"
        routes = [{"source": TOPIC, "subscriptions": [{"name": "a"}, {"name": "b"}]}]
        pulsar = {"service_url": "pulsar://127.0.0.1:1", "admin_url": "http://127.0.0.1:1"}
        file.write_text(yaml.safe_dump({"warehouse": f"file:{folder}/warehouse", "routes": routes, "pulsar": pulsar}))
        api = Api(file)
        millis: dict[str, dict[str, int]] = {}
        try:
            with chromium() as browser:
                page = browser.new_page(base_url=api.url)
                page.goto("/ui/settings")
                for name, path in PAGES.items():
                    painted, whole = [], []
                    for _ in range(1 + REPEATED):
                        began = time.perf_counter()
                        page.goto(path)
                        page.locator("[aria-busy=true]").wait_for(state="detached")
                        whole.append((time.perf_counter() - began) * 1000)
                        page.wait_for_load_state("networkidle")
                        while page.evaluate(_PAINTED) is None:
                            page.wait_for_timeout(20)
                        painted.append(page.evaluate(_PAINTED))
                    millis[name] = {
                        "painted_first": round(painted[0]),
                        "painted_p50": round(float(np.median(painted[1:]))),
                        "painted_max": round(max(painted[1:])),
                        "whole_first": round(whole[0]),
                        "whole_p50": round(float(np.median(whole[1:]))),
                        "whole_max": round(max(whole[1:])),
                    }
        finally:
            api.stop()
    over = [name for name, page_millis in millis.items() if page_millis["painted_p50"] > BUDGET_MILLIS]
    size = {"rows": files * ROWS_A_FILE, "files": files}
    print(json.dumps({"benchmark": "dashboard", **size, "millis": millis, "over_budget": over}))


if __name__ == "__main__":
    main()
