"""Reads from OpenTelemetry's environment variables whether traces and metrics go to a collector."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

Signal = Literal["traces", "metrics"]


def is_exported(signal: Signal) -> bool:
    """Whether the environment asks to export a signal: it names an endpoint, and nothing turns the export off.

    The SDK reads the other variables itself. Source: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
    """
    name = signal.upper()
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if os.environ.get(f"OTEL_{name}_EXPORTER", "otlp") != "otlp":
        return False
    return bool(os.environ.get(f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"))


def can_export(signal: Signal) -> bool:
    """Whether the environment asks to export a signal, and the necessary packages are installed."""
    return is_exported(signal) and why_not_exported() is None


def why_not_exported() -> str | None:
    """Returns why signals can't be exported that the environment asks for; None: they can, or it asks for none."""
    if not (is_exported("traces") or is_exported("metrics")):
        return None
    if importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        return "the packages are missing: pip install -e '.[opentelemetry]'"
    for name in ("", "TRACES_", "METRICS_"):
        variable = f"OTEL_EXPORTER_OTLP_{name}PROTOCOL"
        if os.environ.get(variable, "http/protobuf") != "http/protobuf":
            return f"{variable} is {os.environ[variable]}: only http/protobuf is spoken"
    return None


def resource() -> Resource:
    """Describes this process to a collector: the service is `delaylake`, unless the environment names another."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    own = Resource.create()
    if str(own.attributes[SERVICE_NAME]).startswith("unknown_service"):
        own = own.merge(Resource({SERVICE_NAME: "delaylake"}))
    return own
