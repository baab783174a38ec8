"""Makes spans with the process's tracer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import (
    Link,
    NoOpTracerProvider,
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    TracerProvider,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from paceline.telemetry import names
from paceline.telemetry.context import span_context
from paceline.telemetry.metrics import SCOPE

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, AttributeValue]
"""By name; see `names`."""


class _Current:
    """The process's tracer, which does nothing before `setup`."""

    tracer: Tracer = NoOpTracerProvider().get_tracer(SCOPE)


def use_tracer(provider: TracerProvider) -> None:
    """Makes spans with this provider from now on."""
    _Current.tracer = provider.get_tracer(SCOPE)


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
