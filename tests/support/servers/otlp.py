"""A collector for OpenTelemetry, which keeps what it is sent: OTLP over HTTP, read with the protocol's own classes."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Received:
    """What has been sent so far."""

    def __init__(self) -> None:
        self.traces: list[Any] = []
        self.metrics: list[Any] = []

    @property
    def spans(self) -> list[Any]:
        return [span for one in self.traces for of in one.resource_spans for s in of.scope_spans for span in s.spans]

    def metric(self, name: str) -> Any:
        """The newest of a name; None: there is none."""
        found = [
            metric
            for one in self.metrics
            for of in one.resource_metrics
            for scope in of.scope_metrics
            for metric in scope.metrics
            if metric.name == name
        ]
        return found[-1] if found else None


@contextmanager
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    """Serves while the block runs; processes that are started in it export there."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            if self.path == "/v1/traces":
                received.traces.append(ExportTraceServiceRequest.FromString(body))
            elif self.path == "/v1/metrics":
                received.metrics.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()


def attributes(of: Any) -> dict[str, Any]:
    """The attributes of a span, a resource or a point."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}
