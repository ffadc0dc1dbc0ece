"""The Python client's time-out is for a whole call, whatever the server does meanwhile."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from delaylake import AsyncClient, Client, NoAnswer, Unavailable
from delaylake.rest import Attempts, Call

from tests.support.clients.awaited_client import awaited

_AT_MOST_SECONDS = 20.0  # that an answer goes on for
_HEAD = b"HTTP/1.1 200 OK\r\n"
_BODY = b"Content-Length: 100000\r\n\r\n{"


@contextmanager
def trickling(at_once: bytes, then: bytes) -> Iterator[tuple[str, threading.Event]]:
    """A server that answers the first part at once, and then byte after byte; and whether it has come to its end."""
    stopped, ended = threading.Event(), threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(at_once)
            for _ in range(int(_AT_MOST_SECONDS / 0.05)):
                if stopped.wait(0.05):
                    return
                connection.sendall(then)
            ended.set()

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}", ended
        finally:
            stopped.set()
            with suppress(OSError):  # wakes what accepts
                server.shutdown(socket.SHUT_RDWR)


def client_of(kind: type[Any], url: str, **more: Any) -> Client:
    made = kind(url, timeout_seconds=0.4, **more)
    return awaited(made) if kind is AsyncClient else made


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(("at_once", "then"), [(b"", b"H"), (_HEAD, b"X"), (_HEAD + _BODY, b" ")])
def test_an_answer_that_comes_byte_by_byte_is_not_waited_for(kind: type[Any], at_once: bytes, then: bytes) -> None:
    with trickling(at_once, then) as (url, ended), client_of(kind, url) as lake:
        for call in (lambda: lake.skip("orders", "7:0", request_id="mine"), lambda: list(lake.pending("orders"))):
            with pytest.raises(Unavailable):
                call()
        assert not ended.is_set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_connection_that_takes_long_is_not_waited_for(kind: type[Any]) -> None:
    """As where a name is looked up, which httpx does not bound."""
    connected, is_late = threading.Event(), False

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal is_late
        is_late = not connected.wait(_AT_MOST_SECONDS)
        return httpx.Response(204)

    async def answer_later(request: httpx.Request) -> httpx.Response:
        return await asyncio.to_thread(answer, request)

    http: Any = (
        httpx.Client(transport=httpx.MockTransport(answer))
        if kind is Client
        else httpx.AsyncClient(transport=httpx.MockTransport(answer_later))
    )
    with client_of(kind, "http://api.example", http=http) as lake:
        try:
            with pytest.raises(NoAnswer):
                lake.skip("orders", "7:0")
            assert not is_late
        finally:
            connected.set()


def test_before_a_call_is_sent_httpx_ends_before_the_time_is_over() -> None:
    """So that it is known that nothing was sent."""
    for seconds in (0.4, 30.0):
        bounds = Attempts(Call("GET", "/", {}), seconds).timeout.as_dict()
        assert all(0 < (bounds[step] or 0) < (bounds["read"] or 0) <= seconds for step in ("connect", "pool"))
