"""The admin API in this process, on a port of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn

from admin.app import create_app
from conf.settings import Settings

ORDERS = "/admin/v2/persistent/public/default/orders"


def settings_of(folder: Path) -> Settings:
    return Settings.model_validate(
        {
            "pulsar": {"service_url": "pulsar://127.0.0.1:1"},
            "warehouse": f"file:{folder}",
            "api": {"max_body_bytes": 5_000, "max_ids_per_call": 10},
            "routes": [{"source": "persistent://public/default/orders", "subscriptions": [{"name": "a"}]}],
        }
    )


@contextmanager
def served(settings: Settings) -> Iterator[httpx.Client]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_config=None, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def reason(response: httpx.Response, code: int) -> str:
    assert response.status_code == code, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["reason"]
    assert "\n" not in body["reason"]
    assert "Traceback" not in body["reason"]
    text: str = body["reason"]
    assert text
    return text
