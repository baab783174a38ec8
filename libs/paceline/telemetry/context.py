"""Carries the trace context (W3C Trace Context) in gRPC metadata, stream fields and ZeroMQ frames.

A carrier that is missing or malformed yields an empty context: a broken trace never
breaks a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_TRACE_ID, SpanContext, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

KEYS = ("traceparent", "tracestate")
_propagator = TraceContextTextMapPropagator()


def inject(context: Context | None = None) -> dict[str, str]:
    """Carrier of the given or current context: `traceparent` and optionally `tracestate`; empty
    outside any span.
    """
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return carrier


def extract(carrier: Mapping[str, str | bytes]) -> Context:
    """Context of a carrier. Other keys are ignored, so a stream entry's header fields may be passed
    unchanged.
    """
    return extract_metadata(carrier.items())


def extract_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Context:
    """Context of gRPC metadata or any other pairs."""
    kept = {key: _text(value) for key, value in metadata if key in KEYS}
    return _propagator.extract(kept, Context())


def inject_frame() -> bytes:
    """The traceparent as one ZeroMQ frame; empty outside any span."""
    return inject().get("traceparent", "").encode()


def extract_frame(frame: bytes) -> Context:
    """Context of a ZeroMQ frame."""
    return extract({"traceparent": frame})


def span_context(traceparent: str) -> SpanContext | None:
    """The span context in a traceparent; None for an invalid one."""
    found = get_current_span(extract({"traceparent": traceparent})).get_span_context()
    return found if found.is_valid else None


def current_trace_id() -> str:
    """Trace id, 32 hex digits; empty outside any span."""
    trace_id = get_current_span().get_span_context().trace_id
    return "" if trace_id == INVALID_TRACE_ID else f"{trace_id:032x}"


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value
