"""Spans without a reader. They have ids, which are passed to other processes, and a name, and keep
nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    Tracer,
    TracerProvider,
    get_current_span,
    use_span,
)
from opentelemetry.util.types import Attributes

Ended = Callable[[str, int], None]
"""Receives the name of a finished span, and its end in ns since the epoch."""
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def new_trace_id() -> int:
    """A random id from the operating system: seeding `random` for a run must not give two processes
    the same ids.
    """
    return int.from_bytes(os.urandom(16)) or 1  # 0 is not a valid id


def new_span_id() -> int:
    """A random id from the operating system."""
    return int.from_bytes(os.urandom(8)) or 1


class UnexportedSpans(TracerProvider):
    """Provides spans for a process that exports none; `ended` receives each span at its end."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> Tracer:
        return _Tracer(self._ended)

    def shutdown(self) -> None:
        """Has no effect, since nothing is queued."""


class _Tracer(Tracer):
    def __init__(self, ended: Ended) -> None:
        self._ended = ended

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        parent = get_current_span(context).get_span_context()
        if parent.is_valid:  # the parent's sampling decision holds for its spans here
            trace_id, flags, state = parent.trace_id, parent.trace_flags, parent.trace_state
            found = SpanContext(trace_id, new_span_id(), False, flags, state)
        else:
            found = SpanContext(new_trace_id(), new_span_id(), False, _SAMPLED)
        return _Span(found, name, self._ended)

    @contextmanager
    def start_as_current_span(  # type: ignore[override]  # returns what it keeps private
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
    ) -> Iterator[Span]:
        with use_span(self.start_span(name, context), end_on_exit=end_on_exit) as opened:
            yield opened


class _Span(NonRecordingSpan):
    def __init__(self, context: SpanContext, name: str, ended: Ended) -> None:
        super().__init__(context)
        self._name = name
        self._ended = ended

    def end(self, end_time: int | None = None) -> None:
        self._ended(self._name, end_time or time.time_ns())
