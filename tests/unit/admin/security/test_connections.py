"""Clients that send nothing, or take nothing, hold neither the API nor the job's metrics."""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client import ProcessCollector
from starlette.types import Receive, Scope, Send

from admin.security import connections
from admin.security.connections import TimedProtocol, TimedServer, allow_connections
from conf.settings import MetricsSettings, Settings
from jobs.metrics_server import serve_metrics
from tests.support.clients.tokens import certificate

pytestmark = pytest.mark.slow

BIG = 64 << 20  # of an answer: more than the system's buffers take


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the whole body, and answers with a little, or much."""
    if scope["type"] != "http":
        return
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    parts = BIG >> 16 if scope["path"] == "/big" else 1
    for i in range(parts):
        await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": i < parts - 1})


@contextmanager
def served(most: int = 1_000, **options: Any) -> Iterator[tuple[TimedServer, int]]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(app, log_config=None, lifespan="off", http=allow_connections(most), **options)
    server = TimedServer(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join(timeout=30)
        listener.close()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_SECONDS", "BODY_SECONDS", "TAKE_SECONDS", "HANDSHAKE_SECONDS"):
        monkeypatch.setattr(connections, name, 0.6)
    monkeypatch.setattr(connections, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(TimedProtocol, "max_connections", 1_000)


def connect(port: int, sent: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=60)
    made.sendall(sent)
    return made


def is_closed_soon(made: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while made.recv(1 << 16):
            pass
    return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT",  # the second request is never complete
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n123",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n123\r\n",
    ],
)
def test_what_is_never_complete_is_closed(sent: bytes) -> None:
    with served() as (_, port), connect(port, sent) as made:
        assert is_closed_soon(made)


def test_a_byte_now_and_then_gains_no_time() -> None:
    with served() as (_, port), connect(port) as made:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000:
                made.sendall(bytes([byte]))
                time.sleep(0.02)
        assert time.monotonic() - began < 60  # 200 s of bytes were to come


@pytest.mark.parametrize("head", [b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /big HTTP/1.0\r\n\r\n"])
def test_who_does_not_take_the_answer_is_cut_off(head: bytes) -> None:
    with served() as (server, port), connect(port, head):
        _until(lambda: server.server_state.tasks)
        _until(lambda: not server.server_state.tasks and not server.server_state.connections)


def test_who_takes_it_slowly_gets_all_of_it() -> None:
    with served() as (_, port), httpx.stream("GET", f"http://127.0.0.1:{port}/big", timeout=60) as answer:
        n = 0
        for i, part in enumerate(answer.iter_raw(1 << 20)):
            n += len(part)
            if i % 16 == 0:
                time.sleep(0.2)
        assert n == BIG


def test_a_request_that_is_at_work_is_not_cut_off() -> None:
    with served() as (_, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        for _ in range(3):
            assert http.post("/", content=bytes(1 << 20)).status_code == 200


def test_a_handshake_has_its_time(tmp_path: Path) -> None:
    tls = certificate(tmp_path)
    files: dict[str, Any] = {"ssl_certfile": str(tls.tls_certificate_file), "ssl_keyfile": str(tls.tls_key_file)}
    with served(**files) as (_, port):
        with connect(port) as silent:
            assert is_closed_soon(silent)
        trusted = ssl.create_default_context(cafile=tls.tls_certificate_file)
        assert httpx.get(f"https://127.0.0.1:{port}/", verify=trusted, timeout=60).status_code == 200


def test_a_flood_of_silent_connections_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times as many as there may be: those that are idle for longest go, and who asks is answered."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 600.0)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with served(200) as (server, port), contextlib.ExitStack() as open_ones:
        for _ in range(1_000):
            open_ones.enter_context(connect(port))
            if len(server.server_state.connections) % 100 == 0:
                assert httpx.get(f"http://127.0.0.1:{port}/", timeout=60).status_code == 200
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=60).status_code == 200
        _until(lambda: len(server.server_state.connections) <= 200)


SLOW_BODY = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"


def test_bodies_that_come_byte_by_byte_hold_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as many as there may be connections: of those that wait for their clients the first ones go."""
    monkeypatch.setattr(connections, "BODY_SECONDS", 600.0)
    with served(100) as (server, port), contextlib.ExitStack() as open_ones:
        slow = [open_ones.enter_context(connect(port, SLOW_BODY)) for _ in range(200)]
        _until(lambda: len(server.server_state.connections) == 100)
        for _ in range(5):
            for one in slow:
                with contextlib.suppress(OSError):
                    one.sendall(b"x")
            assert httpx.post(f"http://127.0.0.1:{port}/", content=bytes(1 << 20), timeout=60).status_code == 200
        _until(lambda: len(server.server_state.connections) <= 100)


def test_a_flood_of_silent_connections_does_not_hold_the_jobs_metrics() -> None:
    settings = Settings(metrics=MetricsSettings(port=_free_port()))
    server, thread = serve_metrics(settings, ProcessCollector(registry=None))
    before = threading.active_count()
    try:
        with contextlib.ExitStack() as open_ones:
            for i in range(500):
                open_ones.enter_context(connect(settings.metrics.port))
                if i % 100 == 99:
                    answer = httpx.get(f"http://127.0.0.1:{settings.metrics.port}/metrics", timeout=60)
                    assert "process_resident_memory_bytes" in answer.text
            _until(lambda: threading.active_count() - before <= 20)
        _until(lambda: threading.active_count() <= before)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
