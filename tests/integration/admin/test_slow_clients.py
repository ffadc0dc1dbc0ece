"""The API as it is served, while many callers send their heads and bodies a byte a second."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from admin.security.connections import BODY_SECONDS, HEAD_SECONDS
from tests.integration.admin.test_api_security import ACKNOWLEDGE, content
from tests.support.clients.tokens import token
from tests.support.service.harness import PATIENCE, Api
from warehouse.delta.tables import Tables

SLOW = 200  # of each kind, at once

BODY = f"POST {ACKNOWLEDGE} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HEADS = {
    "nobody": f"{BODY}Content-Length: 1000000\r\n\r\n",
    "a role": f"{BODY}Authorization: Bearer {{token}}\r\nContent-Length: 1000000\r\n\r\n",
    "in chunks": f"{BODY}Authorization: Bearer {{token}}\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n",
    "no end of the head": "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
}


class SlowClients(threading.Thread):
    """Connections that send a byte a second, until the server closes them."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(daemon=True)
        self._stopping = threading.Event()
        self._begun = time.monotonic()
        self._open: dict[socket.socket, str] = {}
        self.closed_after: dict[str, list[float]] = {kind: [] for kind in HEADS}
        for kind, head in HEADS.items():
            for _ in range(SLOW):
                one = socket.create_connection(address, timeout=60)
                one.sendall(head.format(token=token("ops-1")).encode())
                one.setblocking(False)
                self._open[one] = kind

    @property
    def n_open(self) -> int:
        return len(self._open)

    def run(self) -> None:
        while self._open and not self._stopping.wait(1):
            for one, kind in list(self._open.items()):
                if self._is_closed(one):
                    one.close()
                    del self._open[one]
                    self.closed_after[kind].append(time.monotonic() - self._begun)

    @staticmethod
    def _is_closed(one: socket.socket) -> bool:
        try:
            one.send(b"x")
            return not one.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def stop(self) -> None:
        self._stopping.set()
        self.join()
        for one in self._open:
            one.close()


@pytest.mark.long
def test_a_byte_a_second_holds_nobody_and_not_for_long(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    # Fewer connections than the slow ones would take.
    sections: dict[str, Any] = content(tmp_path, api={"max_connections": 3 * SLOW})
    file.write_text(yaml.safe_dump(sections))
    Tables(sections["warehouse"]).create()
    api = Api(file)
    slow: SlowClients | None = None
    try:
        url = httpx.URL(api.url)
        with httpx.Client(base_url=api.url, timeout=60, trust_env=False) as http:
            assert http.get("/healthz").status_code == 200
        process = psutil.Process(api.process.pid)
        before = process.memory_info().rss
        slow = SlowClients((url.host, url.port or 0))
        slow.start()
        took = []
        deadline = time.monotonic() + (BODY_SECONDS + 15) * PATIENCE
        while slow.n_open and time.monotonic() < deadline:
            begun = time.monotonic()
            with httpx.Client(base_url=api.url, timeout=60, trust_env=False) as http:  # a connection of its own
                headers = {"Authorization": f"Bearer {token('ops-1')}"}
                assert http.post(ACKNOWLEDGE, headers=headers, content=bytes(1 << 16)).status_code in (400, 412, 415)
                assert http.get("/healthz").status_code == 200
            took.append(time.monotonic() - begun)
            time.sleep(0.2)
        assert slow.n_open == 0, "each has a time"
        assert sorted(took)[len(took) // 2] < 1 * PATIENCE, took
        assert max(slow.closed_after["no end of the head"]) < (HEAD_SECONDS + 10) * PATIENCE
        assert process.memory_info().rss - before < 100 << 20
        with contextlib.suppress(psutil.Error):
            assert process.num_fds() < 100
        assert "Traceback" not in api.log
    finally:
        if slow is not None:
            slow.stop()
        api.kill()
