"""Records traces, metrics and logs of a process and carries the trace context on the wire."""

from paceline.telemetry import names
from paceline.telemetry.log import get_logger
from paceline.telemetry.setup import (
    PROMETHEUS_TYPE,
    last_span,
    prometheus_page,
    setup,
    shutdown,
)
from paceline.telemetry.trace import (
    Attributes,
    current_trace_id,
    extract,
    extract_frame,
    extract_metadata,
    inject,
    inject_frame,
    link_current,
    mark_failed,
    open_span,
    past_span,
    span,
    tracer,
)

__all__ = [
    "PROMETHEUS_TYPE",
    "Attributes",
    "current_trace_id",
    "extract",
    "extract_frame",
    "extract_metadata",
    "get_logger",
    "inject",
    "inject_frame",
    "last_span",
    "link_current",
    "mark_failed",
    "names",
    "open_span",
    "past_span",
    "prometheus_page",
    "setup",
    "shutdown",
    "span",
    "tracer",
]
