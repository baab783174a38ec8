"""Shows an agent's session in traces: a span from its opening to its end.

An agent calls at any time, and its samples belong to the trace of the RL step that takes them. The
session's span connects both. It is below the request that opened the session, and so below the
agent's own span. Each generation's `engine.request` and each sample's `trajectory.append` link it.
"""

from __future__ import annotations

from opentelemetry.trace import Span, set_span_in_context

from paceline.services.rollout_gateway.sessions.assignment import Assignment
from paceline.telemetry import inject, link_current, names, open_span


class SessionTrace:
    """The span of one session; without a span nothing is shown."""

    def __init__(self, opened: Span | None = None) -> None:
        self._span = opened
        context = None if opened is None else set_span_in_context(opened)
        self.traceparent = "" if context is None else inject(context).get("traceparent", "")
        """Traceparent of the span; empty without one."""

    @classmethod
    def begun(cls, session_id: str, about: Assignment) -> SessionTrace:
        """Starts the trace of a session opened by an agent in the current request."""
        labels = {names.SESSION_ID: session_id, names.GEN_AI_CONVERSATION: session_id}
        if about.task_id:
            labels[names.TASK] = about.task_id
        return cls(open_span(names.AGENT_SESSION, labels))

    def link(self) -> None:
        """Links the current span to the session's span."""
        if self.traceparent:
            link_current([self.traceparent])

    def end(self, state: str, turns: int, reward: float | None) -> None:
        """Records the end of the session; call it once."""
        if self._span is None:
            return
        self._span.set_attribute(names.SESSION_STATE, state)
        self._span.set_attribute(names.SESSION_TURNS, turns)
        if reward is not None:
            self._span.set_attribute(names.REWARD, reward)
        self._span.end()
        self._span = None
