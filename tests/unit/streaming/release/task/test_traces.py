"""Spans of deliveries, as a collector gets them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from conf import opentelemetry
from status import otlp
from streaming.release.task import traces
from tests.support.servers.otlp import attributes, collector
from tests.support.service.harness import wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
DELIVERY = traces.Delivery(
    properties=[("a", "b"), ("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "x=y")],
    message_id="7:0:-1:3",
    source="persistent://public/default/orders",
    subscription="billing",
    destination="persistent://public/default/orders-billing",
    published_at=1_000,
    due=61_000,
    sent_at=61_004,
    attempt=None,
    occurrence=None,
)


def spans(monkeypatch: pytest.MonkeyPatch, *deliveries: traces.Delivery) -> list[Any]:
    """What a collector gets of deliveries, and one to end with."""
    with collector(monkeypatch) as received:
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        traces._provider.cache_clear()
        assert traces.are_traced()
        traces.trace([*deliveries, replace(DELIVERY, message_id="last")])
        wait_until(lambda: any(attributes(s)["messaging.message.id"] == "last" for s in received.spans), 30, "spans")
        traces._provider(os.getpid()).shutdown()
        traces._provider.cache_clear()
        assert attributes(received.traces[0].resource_spans[0].resource)["service.name"] == "delaylake"
        return [span for span in received.spans if attributes(span)["messaging.message.id"] != "last"]


@pytest.mark.slow
def test_a_delivery_is_a_span_of_the_messages_trace_from_publish_to_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    [span] = spans(monkeypatch, DELIVERY)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "x=y")
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (1_000 * 10**6, 61_004 * 10**6)
    assert [(event.name, event.time_unix_nano) for event in span.events] == [("due", 61_000 * 10**6)]
    assert attributes(span) == {
        "messaging.system": "pulsar",
        "messaging.operation.name": "deliver",
        "messaging.operation.type": "send",
        "messaging.destination.name": "persistent://public/default/orders-billing",
        "messaging.message.id": "7:0:-1:3",
        "delaylake.source": "persistent://public/default/orders",
        "delaylake.subscription": "billing",
        "delaylake.deliver_at": 61_000,
    }


@pytest.mark.slow
def test_each_delivery_has_one_span_however_often_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [replace(DELIVERY, subscription="audit"), replace(DELIVERY, attempt=1), replace(DELIVERY, occurrence=2)]
    found = spans(monkeypatch, DELIVERY, DELIVERY, *others)
    assert len(found) == 5
    assert len({span.span_id for span in found}) == 4
    assert [span.start_time_unix_nano // 10**6 for span in found] == [1_000, 1_000, 1_000, 61_000, 61_000]
    assert attributes(found[3])["delaylake.attempt"] == 1
    assert attributes(found[4])["delaylake.occurrence"] == 2


@pytest.mark.slow
def test_a_message_that_is_in_no_trace_or_not_sampled_has_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [(), *([("traceparent", value)] for value in (None, "", "nonsense", f"00-{TRACE}-{PARENT}-00"))]
    assert spans(monkeypatch, *(replace(DELIVERY, properties=properties) for properties in odd)) == []


@pytest.mark.parametrize(
    ("variables", "is_on"),
    [
        ({}, (False, False)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, (True, True)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, (True, False)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_METRICS_EXPORTER": "none"}, (True, False)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, (False, False)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, (False, False)),
    ],
)
def test_the_usual_variables_turn_it_on_and_off(
    variables: dict[str, str], is_on: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (opentelemetry.can_export("traces"), opentelemetry.can_export("metrics")) == is_on


WITHOUT_AN_ENDPOINT = """
import sys
from conf.settings import Settings
from jobs.commands.run import _reporting
from streaming.release.task import sender, traces

with _reporting(Settings(warehouse=sys.argv[1], metrics={"port": 0})):
    sender._trace([])
print("status.otlp" in sys.modules, [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"])

import jobs.metrics_server  # with FastAPI, which loads OpenTelemetry's API where that is installed, and no more
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""


@pytest.mark.slow
def test_without_an_endpoint_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    """Neither where the job sends messages nor where it tells its figures."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", WITHOUT_AN_ENDPOINT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "True []\n[]\n"


def test_where_the_packages_are_missing_or_the_protocol_is_not_spoken_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://x")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with otlp.exported(Counts()):
        pass
    assert "pip install -e '.[opentelemetry]'" in caplog.text
    monkeypatch.undo()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://x")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with otlp.exported(Counts()):
        pass
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is grpc" in caplog.text


class Counts(Collector):
    """A metric of each type."""

    def collect(self) -> Any:
        yield CounterMetricFamily("batches", "Batches.", 7)
        alerts = GaugeMetricFamily("troubles", "Troubles.", labels=["kind"])
        alerts.add_metric(["unwritable"], 2)
        yield alerts
        registry = CollectorRegistry()
        lateness = Histogram("lateness", "Lateness.", ["kind"], buckets=(0.01, 0.1), registry=registry)
        for late in (0.001, 0.05, 0.06, 3.0):
            lateness.labels("planned").observe(late)
        yield from registry.collect()


@pytest.mark.slow
def test_metrics_go_to_the_collector_as_prometheus_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector(monkeypatch) as received:
        with otlp.exported(Counts()):
            wait_until(lambda: received.metric("lateness") is not None, 30, "metrics")
        [batches] = received.metric("batches").sum.data_points
        assert (batches.as_double or batches.as_int, received.metric("batches").sum.is_monotonic) == (7, True)
        [alerts] = received.metric("troubles").gauge.data_points
        assert (attributes(alerts), alerts.as_double or alerts.as_int) == ({"kind": "unwritable"}, 2)
        [lateness] = received.metric("lateness").histogram.data_points
        assert (list(lateness.bucket_counts), list(lateness.explicit_bounds)) == ([1, 2, 1], [0.01, 0.1])
        assert (lateness.count, lateness.HasField("min"), attributes(lateness)) == (4, False, {"kind": "planned"})
        assert lateness.sum == pytest.approx(3.111)
