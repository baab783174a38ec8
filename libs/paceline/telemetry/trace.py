"""Makes spans with the process's tracer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NoOpTracerProvider,
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    TracerProvider,
    get_current_span,
)
from opentelemetry.util.types import AttributeValue

from paceline.telemetry.context import span_context
from paceline.telemetry.metrics import SCOPE

Kind = Literal["internal", "server", "client", "producer", "consumer"]


class _Current:
    """The process's tracer, which does nothing before `setup`."""

    tracer: Tracer = NoOpTracerProvider().get_tracer(SCOPE)


def use_tracer(provider: TracerProvider) -> None:
    """Make spans with this provider from now on."""
    _Current.tracer = provider.get_tracer(SCOPE)


def tracer() -> Tracer:
    """The process's tracer. Ask at each use: `setup` replaces it."""
    return _Current.tracer


@contextmanager
def span(
    name: str,
    *,
    kind: Kind = "internal",
    parent: Context | None = None,
    links: Sequence[str] = (),
    **attributes: AttributeValue,
) -> Iterator[Span]:
    """A span that is current inside the block; an exception marks it as failed and passes through.

    `parent` None is the current span; `links` are traceparent strings, invalid ones are left out.
    """
    linked = [
        Link(found) for traceparent in links if (found := span_context(traceparent)) is not None
    ]
    with tracer().start_as_current_span(
        name,
        context=parent,
        kind=SpanKind[kind.upper()],
        links=linked,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as opened:
        try:
            yield opened
        except Exception as error:
            mark_failed(opened, error)
            raise


def past_span(name: str, start_ns: int, **attributes: AttributeValue) -> None:
    """A span, of a trace of its own, that began at `start_ns` since the epoch and ends now."""
    tracer().start_span(name, context=Context(), start_time=start_ns, attributes=attributes).end()


def link_current(traceparents: Iterable[str]) -> None:
    """Link the current span to others that are known only when it ends; invalid ones are left
    out.
    """
    current = get_current_span()
    for traceparent in sorted(traceparents):
        if (found := span_context(traceparent)) is not None:
            current.add_link(found)


def mark_failed(failed: Span, error: BaseException) -> None:
    """Set the span's status and the kind of error."""
    failed.set_attribute("error.type", type(error).__name__)
    failed.set_status(StatusCode.ERROR, str(error))
