"""Carries the caller's trace to the gateway: W3C headers of the current OpenTelemetry span.

Nothing is imported for it. A process in which nobody has imported opentelemetry has no current
span, and one that has brings what is needed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping

API = "opentelemetry.trace"
PROPAGATOR = f"{API}.propagation.tracecontext"


def trace_headers() -> dict[str, str]:
    """`traceparent`, and `tracestate` where there is one; empty outside any span."""
    carrier: dict[str, str] = {}
    if API in sys.modules:
        module = importlib.import_module(PROPAGATOR)
        module.TraceContextTextMapPropagator().inject(carrier)
    return carrier


class TraceHeaders(Mapping[str, str]):
    """What `trace_headers()` gives whenever it is looked up: for a client that is made once and
    asks for its headers with every request, while spans come and go.
    """

    def __getitem__(self, name: str) -> str:
        return trace_headers()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(trace_headers())

    def __len__(self) -> int:
        return len(trace_headers())

    def __bool__(self) -> bool:
        return True  # empty for now: what is given as `headers or {}` is still kept

    def __repr__(self) -> str:
        return f"{type(self).__name__}({trace_headers()})"
