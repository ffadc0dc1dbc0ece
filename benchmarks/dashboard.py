"""Measures how soon a browser shows the dashboard's pages over ten million pending messages.

The table is that of pending.py, the browser Chromium, the API a process without a broker. Prints one JSON object: for
each page the milliseconds until something is painted, and until all its parts are loaded, as the median and maximum of
REPEATED loads.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import yaml

from benchmarks.pending import FILES, ROWS, TOPIC, write
from tests.browser import chromium
from tests.harness import Api
from warehouse.tables import Tables

REPEATED = 5
PAGES = {
    "overview": "/",
    "messages": "/ui/messages",
    "search_by_key": f"/ui/messages?{urlencode({'topic': TOPIC, 'key': 'customer-77'})}",
    "search_by_property": f"/ui/messages?{urlencode({'topic': TOPIC, 'property': 'order=5000000'})}",
    "search_by_id": f"/ui/messages?{urlencode({'topic': TOPIC, 'id': '42:4242'})}",
    "message": f"/ui/message?{urlencode({'topic': TOPIC, 'id': '42:4242'})}",
    "schedule_of_a_day": "/ui/schedule",
    "schedule_of_a_month": "/ui/schedule?span=month",
    "storage": "/ui/storage",
}
_PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tables = Tables(f"{folder}/warehouse")
        tables.create()
        write(tables, time.time_ns() // 1_000_000)
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
                    for _ in range(REPEATED):
                        began = time.perf_counter()
                        page.goto(path)
                        page.locator("[aria-busy=true]").wait_for(state="detached")
                        whole.append((time.perf_counter() - began) * 1000)
                        page.wait_for_load_state("networkidle")
                        while page.evaluate(_PAINTED) is None:
                            page.wait_for_timeout(20)
                        painted.append(page.evaluate(_PAINTED))
                    millis[name] = {
                        "painted_p50": round(float(np.median(painted))),
                        "painted_max": round(max(painted)),
                        "whole_p50": round(float(np.median(whole))),
                        "whole_max": round(max(whole)),
                    }
        finally:
            api.stop()
    print(json.dumps({"benchmark": "dashboard", "rows": ROWS, "files": FILES, "millis": millis}))


if __name__ == "__main__":
    main()
