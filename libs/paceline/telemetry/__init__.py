"""Traces, metrics and logs of a process, and the trace context on the wire. Owns no exporter beyond the local file."""

from paceline.telemetry.context import (
    current_trace_id,
    extract,
    extract_frame,
    extract_metadata,
    inject,
    inject_frame,
)
from paceline.telemetry.log import get_logger
from paceline.telemetry.setup import TelemetrySettings, setup, shutdown
from paceline.telemetry.trace import mark_failed, meter, span, tracer

__all__ = [
    "TelemetrySettings",
    "current_trace_id",
    "extract",
    "extract_frame",
    "extract_metadata",
    "get_logger",
    "inject",
    "inject_frame",
    "mark_failed",
    "meter",
    "setup",
    "shutdown",
    "span",
    "tracer",
]
