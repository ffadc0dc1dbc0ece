"""Serves the job's metrics over HTTP, but only under known host names.

Otherwise any web page could make its own host name point here, and read them (see `admin.security.hosts`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socket import SHUT_RDWR, socket
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from admin.security.hosts import MISDIRECTED, host_name, host_names_check
from conf.settings import Settings

_MAX_CONNECTIONS = 16
_SECONDS = 5.0  # the longest time that a client may send or take nothing


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection. With more than _MAX_CONNECTIONS the oldest is cut off: a scrape takes no time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            if len(self._open) > _MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(SHUT_RDWR)  # its thread reads an end, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a connection that was lost: clients may cause any number."""


class _Handler(WSGIRequestHandler):
    timeout = _SECONDS

    def get_environ(self) -> dict[str, Any]:
        return super().get_environ() | {"delaylake.reached_at": self.connection.getsockname()[0]}

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: each scrape would be a line."""


def serve_metrics(settings: Settings, collector: Collector) -> tuple[WSGIServer, threading.Thread]:
    """Serves a collector's metrics at `metrics.host` and `metrics.port`, in a thread.

    The answer is 421 to a request under a host name other than `metrics.host`, those of `api.allowed_hosts`, loopback
    ones, and the address at which it came in.

    Returns:
        the server and its thread; the caller has to shut them down.

    Raises:
        OSError: the address can't be used.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    metrics = make_wsgi_app(registry)
    is_allowed = host_names_check((settings.metrics.host, *settings.api.allowed_hosts))

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        name = host_name(environ.get("HTTP_HOST", ""))
        if is_allowed(name, environ["delaylake.reached_at"]):
            answer: Iterable[bytes] = metrics(environ, start_response)
            return answer
        start_response(f"{MISDIRECTED} Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"not served under the name {name[:200]!r}: add it to api.allowed_hosts\n".encode()]

    server = make_server(settings.metrics.host, settings.metrics.port, app, _Server, _Handler)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread
