"""Opens one trace per RL step and makes its span current for the step's calls."""

from __future__ import annotations

import contextvars

from opentelemetry import context as otel_context
from opentelemetry.trace import Span, set_span_in_context

from paceline.telemetry import extract, inject, names, tracer


class StepSpans:
    """The spans of the running steps; asynchronous schedules have several."""

    def __init__(self) -> None:
        self._spans: dict[int, Span] = {}

    def begin(self, run_id: str, step: int) -> str:
        """Starts a step's span, and replaces an existing span of the step; returns its
        traceparent.
        """
        self.end(step)
        attributes: dict[str, str | int] = {names.RUN: run_id, names.RL_STEP: step}
        # A root span regardless of the caller's span: one trace per RL step.
        root = otel_context.Context()
        span = tracer().start_span(names.STEP, context=root, attributes=attributes)
        self._spans[step] = span
        return inject(set_span_in_context(span)).get("traceparent", "")

    def take_up(self, step: int, traceparent: str) -> None:
        """Continues the trace of a step that a former coordinator began."""
        parent = extract({"traceparent": traceparent})
        self._spans[step] = tracer().start_span(
            names.STEP, context=parent, attributes={names.RL_STEP: step}
        )

    def context(self, step: int | None) -> contextvars.Context:
        """A copy of the caller's context, with the step's span as current span if the step runs."""
        context = contextvars.copy_context()
        span = None if step is None else self._spans.get(step)
        if span is not None:
            context.run(otel_context.attach, set_span_in_context(span))
        return context

    def end(self, step: int | None = None) -> None:
        """Ends the step's span, or all spans; without a span it has no effect."""
        for ended in [one for one in self._spans if step in (None, one)]:
            self._spans.pop(ended).end()
