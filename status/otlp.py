"""Exports the job's figures to an OpenTelemetry collector, under the same names as for Prometheus."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from conf.opentelemetry import can_export, resource, why_not_exported

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData

_log = logging.getLogger(__name__)

_INTERVAL_MILLIS = "60000"  # the specification's default


@contextmanager
def exported(collector: Collector) -> Iterator[None]:
    """Exports metrics while the block runs, and once at its end, if the environment variables ask for it.

    A thread reads and sends them every OTEL_METRIC_EXPORT_INTERVAL ms, so that an OpenTelemetry collector that does not
    answer holds up nothing.

    Args:
        collector: has the metrics.
    """
    if (reason := why_not_exported()) is not None:
        _log.warning("no traces and metrics for OpenTelemetry: %s", reason)
    if not can_export("metrics"):
        yield
        return
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    exporter = OTLPMetricExporter()
    began = time.time_ns()
    stopped = threading.Event()
    interval = int(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or _INTERVAL_MILLIS) / 1000

    def export() -> None:
        is_last = False
        while not is_last:
            is_last = stopped.wait(interval)
            try:
                exporter.export(metrics_data(collector, began, time.time_ns()))
            except Exception as error:
                _log.warning("metrics were not exported: %s", error)

    thread = threading.Thread(target=export, name="export metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(timeout=5)
        exporter.shutdown()


def metrics_data(collector: Collector, began: int, now: int) -> MetricsData:
    """Converts Prometheus metrics to OpenTelemetry's.

    Args:
        collector: has the metrics: gauges, counters and histograms.
        began: when counters began to count, ns since the epoch.
        now: ns since the epoch.
    """
    from opentelemetry.sdk.metrics.export import Metric as Exported
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    metrics = [
        Exported(metric.name, metric.documentation, metric.unit, _data(metric, began, now))
        for metric in collector.collect()
    ]
    scope = ScopeMetrics(InstrumentationScope("delaylake"), metrics, "")
    return MetricsData([ResourceMetrics(resource(), [scope], "")])


def _data(metric: Metric, began: int, now: int) -> Any:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Histogram, NumberDataPoint, Sum

    if metric.type == "histogram":
        return Histogram(_histogram_points(metric, began, now), AggregationTemporality.CUMULATIVE)
    values = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    points = [NumberDataPoint(dict(sample.labels), began, now, float(sample.value)) for sample in values]
    if metric.type == "counter":
        return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return Gauge(points)


def _histogram_points(metric: Metric, began: int, now: int) -> list[Any]:
    """Returns a point for each set of labels. Buckets of OpenTelemetry are not cumulative, those of Prometheus are."""
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in metric.samples:
        labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        found.setdefault(labels, {})[sample.labels.get("le") or sample.name.removeprefix(metric.name)] = sample.value
    points = []
    for labels, values in found.items():
        total = values.pop("_sum", 0.0)
        values = {le: value for le, value in values.items() if not le.startswith("_")}
        bounds = sorted(values, key=float)
        counts = [int(of - before) for before, of in pairwise([0.0, *(values[le] for le in bounds)])]
        points.append(
            HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=began,
                time_unix_nano=now,
                count=sum(counts),
                sum=total,
                bucket_counts=counts,
                explicit_bounds=[float(le) for le in bounds if le != "+Inf"],
                min=None,  # type: ignore[arg-type]  # they are not known
                max=None,  # type: ignore[arg-type]
            )
        )
    return points
