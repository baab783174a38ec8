"""Makes spans with the process's tracer, and carries their context to other processes.

A carrier that is missing or malformed yields an empty context: a broken trace never
breaks a message.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import (
    INVALID_TRACE_ID,
    Link,
    NoOpTracerProvider,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    TracerProvider,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from paceline.telemetry import metrics, names

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


Kind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, AttributeValue]
"""By name; see `names`."""


class _Current:
    """The process's tracer, which does nothing before `setup`."""

    tracer: Tracer = NoOpTracerProvider().get_tracer(metrics.SCOPE)


def use_tracer(provider: TracerProvider) -> None:
    """Makes spans with this provider from now on."""
    _Current.tracer = provider.get_tracer(metrics.SCOPE)


def tracer() -> Tracer:
    """The process's tracer. Call it at each use, since `setup` replaces the tracer."""
    return _Current.tracer


@contextmanager
def span(
    name: str,
    attributes: Attributes | None = None,
    *,
    kind: Kind = "internal",
    parent: Context | None = None,
    links: Sequence[str] = (),
) -> Iterator[Span]:
    """A span that is current inside the block. An exception marks it as failed and propagates.

    `parent` None is the current span. `links` are traceparent strings; invalid ones are left out.
    """
    opened = tracer().start_span(
        name,
        context=parent,
        kind=SpanKind[kind.upper()],
        links=_linked(links),
        attributes=attributes,
    )
    token = attach(set_span_in_context(opened))
    try:
        yield opened
    except Exception as error:
        mark_failed(opened, error)
        raise
    finally:
        detach(token)
        opened.end()


def open_span(name: str, attributes: Attributes, links: Sequence[str] = ()) -> Span:
    """A span below the current one. Its owner ends it, in any context."""
    return tracer().start_span(name, attributes=attributes, links=_linked(links))


def past_span(
    name: str,
    attributes: Attributes,
    start_ns: int,
    end_ns: int | None = None,
    parent: Context | None = None,
) -> None:
    """A span for work that began at `start_ns` since the epoch and ended at `end_ns`, or ends now.

    `parent` None begins a new trace.
    """
    context = Context() if parent is None else parent
    made = tracer().start_span(name, context=context, start_time=start_ns, attributes=attributes)
    made.end(end_ns)


def link_current(traceparents: Iterable[str]) -> None:
    """Links the current span to spans that are known only at its end; invalid traceparents are left
    out.
    """
    current = get_current_span()
    for traceparent in sorted(traceparents):
        if (found := span_context(traceparent)) is not None:
            current.add_link(found)


def mark_failed(failed: Span, error: BaseException) -> None:
    """Sets the span's status and the kind of error."""
    failed.set_attribute(names.ERROR_TYPE, type(error).__name__)
    failed.set_status(StatusCode.ERROR, str(error))


def _linked(traceparents: Iterable[str]) -> list[Link]:
    return [Link(found) for one in traceparents if (found := span_context(one)) is not None]
