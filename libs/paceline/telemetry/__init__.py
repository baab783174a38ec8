"""Records traces, metrics and logs of a process and carries the trace context on the wire.

A carrier that is missing or malformed yields an empty context: a broken trace never
breaks a message. The modules of the SDK are imported by `setup` alone.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import structlog
from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Span, SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from structlog.typing import FilteringBoundLogger

from paceline.config import TelemetryConfig
from paceline.telemetry import names as names

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
    """Context of a carrier: gRPC metadata, or the header fields of a stream entry. Other keys are
    ignored.
    """
    kept = {key: _text(value) for key, value in carrier.items() if key in KEYS}
    return _propagator.extract(kept, Context())


def span_context(traceparent: str) -> SpanContext | None:
    """The span context in a traceparent; None for an invalid one."""
    found = trace.get_current_span(extract({"traceparent": traceparent})).get_span_context()
    return found if found.is_valid else None


def current_trace_id() -> str:
    """Trace id, 32 hex digits; empty outside any span."""
    trace_id = trace.get_current_span().get_span_context().trace_id
    return "" if trace_id == trace.INVALID_TRACE_ID else f"{trace_id:032x}"


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


Kind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, AttributeValue]
"""By name; see `names`."""


class _Current:
    """The process's tracer, which passes on its caller's context alone before `setup`."""

    tracer: trace.Tracer = trace.NoOpTracer()
    ended: tuple[str, int] = ("", 0)  # name of the last span, and its end in ns since the epoch


def use_tracer(tracer: trace.Tracer) -> None:
    """Makes spans with this tracer from now on."""
    _Current.tracer = tracer


def tracer() -> trace.Tracer:
    """The process's tracer. Call it at each use, since `setup` replaces the tracer."""
    return _Current.tracer


def note_end(name: str, ended_ns: int) -> None:
    """Keeps the last finished span for `last_span`. Progress calls do not count."""
    if not name.startswith("ProgressService."):
        _Current.ended = (name, ended_ns)


def last_span() -> tuple[str, float]:
    """Name of the last finished span in this process and the seconds since then; "" and 0 before
    the first, and in a process that exports no spans.
    """
    name, ended_ns = _Current.ended
    return name, max(0.0, (time.time_ns() - ended_ns) / 1e9) if name else 0.0


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
        kind=trace.SpanKind[kind.upper()],
        links=_linked(links),
        attributes=attributes,
    )
    token = attach(trace.set_span_in_context(opened))
    try:
        yield opened
    except Exception as error:
        mark_failed(opened, error)
        raise
    finally:
        detach(token)
        opened.end()


def open_span(name: str, attributes: Attributes) -> Span:
    """A span below the current one. Its owner ends it, in any context."""
    return tracer().start_span(name, attributes=attributes)


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
    current = trace.get_current_span()
    for traceparent in sorted(traceparents):
        if (found := span_context(traceparent)) is not None:
            current.add_link(found)


def mark_failed(failed: Span, error: BaseException) -> None:
    """Sets the span's status and the kind of error."""
    failed.set_attribute(names.ERROR_TYPE, type(error).__name__)
    failed.set_status(trace.StatusCode.ERROR, str(error))


def _linked(traceparents: Iterable[str]) -> list[trace.Link]:
    return [trace.Link(found) for one in traceparents if (found := span_context(one)) is not None]


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger whose lines carry `source=name`; usable before `setup`."""
    logger: FilteringBoundLogger = structlog.get_logger(source=name)
    return logger


PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of `prometheus_page`."""


def setup(service: str, config: TelemetryConfig) -> None:
    """Starts logs, spans and metrics of this process; a second call ends the earlier providers.

    Spans go to `<spans_dir>/<service>-<pid>.jsonl` if a directory is set, and to
    OTEL_EXPORTER_OTLP_ENDPOINT if that is set (OTLP over gRPC). Without either, a trace
    has an id and no spans. Log records and metrics go to the same endpoint. Metrics
    also go to `prometheus_page`, at no cost until a request.
    """
    from paceline.telemetry import exporters

    exporters.start(service, config)


def shutdown() -> None:
    """Writes queued data and stops the exporters; no effect without a `setup` before.

    A collector that does not answer is abandoned after SHUTDOWN_S seconds, a refused connection at
    once.
    """
    from paceline.telemetry import exporters

    exporters.stop()


def prometheus_page() -> bytes:
    """All metrics of this process in Prometheus text format 0.0.4, with OpenTelemetry's mapping of
    names and units.

    Raises NotFound before `setup` and after `shutdown`.
    """
    from paceline.telemetry import exporters

    return exporters.prometheus_page()
