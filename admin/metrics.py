"""The API's own figures, and the job's, for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conf.settings import Settings
from streaming.job_status import read_status
from streaming.metrics import JobCollector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ApiMetrics:
    """Counts requests, by the route's template, so that there are as many series as routes."""

    def __init__(self, settings: Settings) -> None:
        self.registry = CollectorRegistry()
        labels = ["method", "route"]
        self.requests = Counter(
            "delaylake_api_requests", "Requests that were answered.", [*labels, "code"], registry=self.registry
        )
        self.seconds = Histogram(
            "delaylake_api_request_seconds",
            "From a request to its answer.",
            labels,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.waiting = Gauge(
            "delaylake_api_requests_in_progress", "Requests that wait for an answer.", registry=self.registry
        )
        self.registry.register(JobCollector(lambda: read_status(settings.warehouse)))


class CountRequests:
    """Middleware: every request is counted."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        code = 500
        started = time.perf_counter()

        async def send_counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        with self._metrics.waiting.track_inprogress():
            try:
                await self._app(scope, receive, send_counted)
            finally:
                route = getattr(scope.get("route"), "path", "unknown")
                # A method is what a caller says, a route is not.
                method = scope["method"] if route != "unknown" else "any"
                self._metrics.requests.labels(method, route, str(code)).inc()
                self._metrics.seconds.labels(method, route).observe(time.perf_counter() - started)
