"""Metrics of the API and of the job, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from admin.dashboard.data import storage
from broker.client import PulsarError
from broker.pulsar_admin.admin_rest import AdminClient
from conf.errors import UnreadableWarehouseError
from conf.settings import Settings
from status.job_status import known_status
from status.metrics import JobCollector
from warehouse.queries.paused import paused_subscriptions
from warehouse.schedules.live_schedules import live_schedules

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class _TableCollector(Collector):
    """Metrics that are read every few seconds at most. There are none of tables that can't be read: /readyz says so."""

    seconds: float  # for which what was read serves

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._read_at = -self.seconds
        self._found: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        if time.monotonic() - self._read_at >= self.seconds:
            self._read_at = time.monotonic()
            self._found = list(self.read())
        yield from self._found

    def read(self) -> Iterator[Metric]:
        """Yields the metrics of this moment."""
        raise NotImplementedError


class StorageCollector(_TableCollector):
    """Metrics of the sizes of tables and of source topics' backlogs."""

    seconds = 10.0

    def read(self) -> Iterator[Metric]:
        yield from self._tables()
        yield from self._backlog()

    def _tables(self) -> Iterator[Metric]:
        try:
            found = storage(self._settings)
        except UnreadableWarehouseError:
            return
        for name, text, key in (
            ("files", "Files of a table's newest version.", "files"),
            ("rows", "Rows of a table's newest version.", "rows"),
            ("bytes", "Their size on disk.", "bytes"),
        ):
            metric = GaugeMetricFamily(f"delaylake_table_{name}", text, labels=["table"])
            for table in found:
                metric.add_metric([table["name"]], table[key])
            yield metric
        index = next((table for table in found if table["name"] == "delayed_index"), None)
        if index is not None:
            yield GaugeMetricFamily("pulsar_delayed_message_index_bucket_total", "Files of buckets.", index["files"])
            size = "pulsar_delayed_message_index_bucket_snapshot_size_bytes"
            yield GaugeMetricFamily(size, "Their size on disk.", index["bytes"])

    def _backlog(self) -> Iterator[Metric]:
        metric = GaugeMetricFamily(
            "delaylake_source_backlog_messages",
            "What the job has not acknowledged of a source topic: not read, or not written down yet.",
            labels=["topic"],
        )
        settings = self._settings.pulsar
        try:
            with AdminClient(settings, timeout_seconds=2) as admin:
                for route in self._settings.routes:
                    if (backlog := admin.backlog(route.source, settings.subscription)) is not None:
                        metric.add_metric([route.source], backlog)
        except PulsarError:
            pass  # /readyz says that the broker does not answer
        yield metric


class WarehouseCollector(_TableCollector):
    """Metrics of the routes' subscriptions."""

    seconds = 60.0

    def read(self) -> Iterator[Metric]:
        counts: dict[tuple[str, str], int] = {}
        paused: set[tuple[str, str]] = set()
        with suppress(UnreadableWarehouseError):
            paused = paused_subscriptions(self._settings.warehouse)
            counts = live_schedules(self._settings, time.time_ns() // 1_000_000)
        labels = ["topic", "subscription"]
        schedules = GaugeMetricFamily(
            "delaylake_schedules", "Recurring messages that have an occurrence to come.", labels=labels
        )
        pauses = GaugeMetricFamily("delaylake_paused", "1 while a subscription is paused.", labels=labels)
        for of, n in counts.items():
            schedules.add_metric(of, n)
            pauses.add_metric(of, of in paused)
        yield schedules
        yield pauses


class ApiMetrics:
    """The API's metrics. Requests are counted by their route's path template, so that there are few series."""

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
        self.registry.register(StorageCollector(settings))
        self.registry.register(WarehouseCollector(settings))
        self.registry.register(JobCollector(lambda: known_status(settings.warehouse)))


class CountRequests:
    """Middleware: counts every request and measures how long its answer takes."""

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
                # Callers may invent methods: only those of known routes are counted by name.
                method = scope["method"] if route != "unknown" else "any"
                self._metrics.requests.labels(method, route, str(code)).inc()
                self._metrics.seconds.labels(method, route).observe(time.perf_counter() - started)
