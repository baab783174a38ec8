"""Opens one trace per RL step and makes its span current for the step's calls."""

from __future__ import annotations

import contextvars

from opentelemetry import context as otel_context
from opentelemetry.trace import Span, set_span_in_context

from paceline.telemetry import extract, inject, tracer


class StepSpan:
    """The span of the running step, if one runs."""

    def __init__(self) -> None:
        self._span: Span | None = None

    def begin(self, run_id: str, step: int) -> str:
        """Ends the former step's span and begins the next; returns its traceparent."""
        self.end()
        attributes: dict[str, str | int] = {"paceline.run": run_id, "paceline.step": step}
        # A root of its own, whatever span the caller is in: one trace per RL step.
        root = otel_context.Context()
        self._span = tracer().start_span("step", context=root, attributes=attributes)
        return inject(set_span_in_context(self._span)).get("traceparent", "")

    def take_up(self, traceparent: str) -> None:
        """Goes on in the trace of a step that a former coordinator began."""
        parent = extract({"traceparent": traceparent})
        self._span = tracer().start_span("step", context=parent)

    def context(self) -> contextvars.Context:
        """A copy of the caller's context in which the span is current."""
        context = contextvars.copy_context()
        if self._span is not None:
            context.run(otel_context.attach, set_span_in_context(self._span))
        return context

    def end(self) -> None:
        """Ends the span; nothing without one."""
        if self._span is not None:
            self._span.end()
            self._span = None
