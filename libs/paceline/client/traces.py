"""Carries the caller's trace to the gateway: W3C headers of the current OpenTelemetry span.

Nothing is imported for it. A process in which nobody has imported opentelemetry has no current
span, and one that has brings what is needed.
"""

from __future__ import annotations

import importlib
import sys

API = "opentelemetry.trace"
PROPAGATOR = f"{API}.propagation.tracecontext"


def trace_headers() -> dict[str, str]:
    """`traceparent`, and `tracestate` where there is one; empty outside any span."""
    carrier: dict[str, str] = {}
    if API in sys.modules:
        module = importlib.import_module(PROPAGATOR)
        module.TraceContextTextMapPropagator().inject(carrier)
    return carrier
