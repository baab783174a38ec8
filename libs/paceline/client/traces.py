"""Carries the caller's trace to the gateway: W3C headers of the current OpenTelemetry span.

It imports nothing. A process that has not imported opentelemetry has no current span; any other
process has the necessary modules.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping

API = "opentelemetry.trace"
PROPAGATOR = f"{API}.propagation.tracecontext"


def trace_headers() -> dict[str, str]:
    """`traceparent`, and `tracestate` if there is one; empty outside any span."""
    carrier: dict[str, str] = {}
    if API in sys.modules:
        module = importlib.import_module(PROPAGATOR)
        module.TraceContextTextMapPropagator().inject(carrier)
    return carrier


class TraceHeaders(Mapping[str, str]):
    """The result of `trace_headers()` at each access: for a client that is created once and reads
    its headers with every request, while spans change.
    """

    def __getitem__(self, name: str) -> str:
        return trace_headers()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(trace_headers())

    def __len__(self) -> int:
        return len(trace_headers())

    def __bool__(self) -> bool:
        return True  # may be empty now, but must survive `headers or {}`

    def __repr__(self) -> str:
        return f"{type(self).__name__}({trace_headers()})"
