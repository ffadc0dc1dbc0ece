"""Makes a span for each delivery of a traced message, from its publication until it was sent."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.opentelemetry import can_export, resource

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

# Properties of a message, as W3C's Trace Context names them.
_TRACEPARENT, _TRACESTATE = "traceparent", "tracestate"

_NANOS = 1_000_000  # a millisecond

# How long spans are collected before they are exported. A worker process ends without notice, and loses its last spans.
_DELAY_MILLIS = "1000"


@dataclass(frozen=True)
class Delivery:
    """A message that was sent to a subscription's destination. Times are ms since the epoch."""

    properties: Iterable[tuple[str, str | None]]  # of the source message
    message_id: str  # the message's position on the source topic
    source: str
    subscription: str
    destination: str
    published_at: int | None  # None: not known
    due: int
    sent_at: int
    attempt: int | None  # the number of the retry; None: it is no retry
    occurrence: int | None  # the number of the occurrence; None: the message does not recur

    @property
    def begins_at(self) -> int:
        """When the span begins: with the publication; of a retry, or of a later occurrence, when it is due."""
        is_first = self.attempt is None and self.occurrence in (None, 1)
        return min(self.published_at if is_first and self.published_at else self.due, self.sent_at)


def are_traced() -> bool:
    """Whether spans go to a collector, by OpenTelemetry's environment variables."""
    return can_export("traces")


def trace(deliveries: Iterable[Delivery]) -> None:
    """Makes the spans of deliveries; they are exported in the background.

    A message without a `traceparent` has no span. A delivery that is sent again has the same span id, so that a
    collector sees one span.
    """
    from opentelemetry.trace import SpanKind, get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()
    provider = _provider(os.getpid())
    tracer = provider.get_tracer("delaylake")
    for one in deliveries:
        carrier = {name: value for name, value in one.properties if name in (_TRACEPARENT, _TRACESTATE) and value}
        parent = propagator.extract(carrier)
        if not get_current_span(parent).get_span_context().is_valid:
            continue
        attributes: dict[str, Any] = {
            "messaging.system": "pulsar",
            "messaging.operation.name": "deliver",
            "messaging.operation.type": "send",
            "messaging.destination.name": one.destination,
            "messaging.message.id": one.message_id,
            "delaylake.source": one.source,
            "delaylake.subscription": one.subscription,
            "delaylake.deliver_at": one.due,
        }
        attributes |= {
            f"delaylake.{name}": number
            for name, number in (("attempt", one.attempt), ("occurrence", one.occurrence))
            if number is not None
        }
        provider.id_generator.next_span_id = _span_id(one)  # type: ignore[attr-defined]
        span = tracer.start_span(
            f"deliver {one.destination}",
            parent,
            SpanKind.PRODUCER,
            attributes,
            start_time=one.begins_at * _NANOS,
        )
        span.add_event("due", timestamp=one.due * _NANOS)
        span.end(one.sent_at * _NANOS)


def _span_id(one: Delivery) -> int:
    text = f"{one.message_id} {one.source} {one.subscription} {one.attempt} {one.occurrence}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") or 1


@functools.cache
def _provider(process: int) -> TracerProvider:
    """Makes this process's provider. A fork has another process id, and needs threads of its own."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        next_span_id = 0

        def generate_span_id(self) -> int:
            return self.next_span_id

    provider = TracerProvider(resource=resource(), id_generator=Ids())
    delay = os.environ.get("OTEL_BSP_SCHEDULE_DELAY") or _DELAY_MILLIS
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=float(delay)))
    return provider
