"""Finds whole traces in the span files of a run: its steps' traces, and any trace by id.

Memory is bounded: at most `_SPANS` spans of a trace are kept, and at most `_PEERS` of several
traces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import InvalidInput, NotFound
from paceline.report.spans import SpanRecord, read_spans, span_id_of
from paceline.telemetry import names

_PEERS = 15
_SPANS = 20_000
_LEAST_ID = 6
"""Least number of hex digits that select a trace."""
_LISTED = 8


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step with a span in the files."""

    trace_id: str
    number: int
    seconds: float


def ended_steps(directory: Path) -> list[EndedStep]:
    """Finished steps, in order."""
    seconds: defaultdict[str, float] = defaultdict(float)
    numbers: dict[str, int] = {}
    for span in read_spans(directory, [f'"{names.STEP}"']):
        if span is not None and span.name == names.STEP:
            numbers[span.trace_id] = int(span.attributes.get(names.RL_STEP, -1))
            seconds[span.trace_id] += span.duration_s
    found = [EndedStep(trace, number, seconds[trace]) for trace, number in numbers.items()]
    return sorted(found, key=lambda one: one.number)


def trace_of(directory: Path, which: str) -> str:
    """The only trace with an id that begins with `which`.

    Raises NotFound without such a trace, InvalidInput for several traces or invalid digits.
    """
    digits = which.lower()
    if len(digits) < _LEAST_ID or not set(digits) <= set("0123456789abcdef"):
        raise InvalidInput(
            "neither a step nor a trace",
            seen=which,
            allowed=f"a step's number, or at least {_LEAST_ID} hex digits of a trace id",
        )
    found = {
        span.trace_id
        for span in read_spans(directory, [f'"{digits}'])
        if span is not None and span.trace_id.startswith(digits)
    }
    if not found:
        raise NotFound("no span of such a trace", seen=which)
    if len(found) > 1:
        listed = ", ".join(sorted(found)[:_LISTED])
        raise InvalidInput("several traces begin so", seen=which, allowed=listed)
    return found.pop()


def alike(directory: Path, root: SpanRecord) -> list[str]:
    """Other traces with a root of the same name."""
    found = {
        span.trace_id: span.start_ns
        for span in read_spans(directory, [f'"{root.name}"'])
        if span is not None and span.name == root.name and span.trace_id != root.trace_id
    }
    return spread(sorted(found, key=lambda trace: found[trace]))


def load(directory: Path, traces: Collection[str]) -> dict[str, list[SpanRecord]]:
    """The spans of these traces, including the agents' generations in their sessions."""
    found: dict[str, list[SpanRecord]] = {trace: [] for trace in traces}
    for span in read_spans(directory, list(traces)) if traces else ():
        kept = None if span is None else found.get(span.trace_id)
        if kept is not None and span is not None and len(kept) < _SPANS:
            kept.append(span)
    for asked in _of_agents(directory, found):
        found[asked.trace_id].append(asked)
    return {trace: spans for trace, spans in found.items() if spans}


def _of_agents(directory: Path, found: Mapping[str, Sequence[SpanRecord]]) -> list[SpanRecord]:
    """Generations of agent-led sessions, which belong to the agents' traces, with their stages.
    They are attached to the session.
    """
    led = {
        span_id_of(link): span
        for spans in found.values()
        for span in spans
        if span.name == names.SESSION
        for link in span.links
    }
    if not led:
        return []
    asked: dict[str, SpanRecord] = {}
    for span in read_spans(directory, [f'"{names.ENGINE_REQUEST}"']):
        if span is None or span.name != names.ENGINE_REQUEST:
            continue
        above = next((led[one] for one in map(span_id_of, span.links) if one in led), None)
        if above is not None and len(asked) < _SPANS:
            asked[span.span_id] = replace(span, trace_id=above.trace_id, parent_id=above.span_id)
    stages = [
        replace(span, trace_id=asked[span.parent_id].trace_id)
        for span in read_spans(directory, [f'"{names.engine_stage("")}'])
        if span is not None and span.parent_id in asked
    ]
    return [*asked.values(), *stages]


def spread(traces: Sequence[str]) -> list[str]:
    """At most `_PEERS` traces, spread evenly."""
    count = min(len(traces), _PEERS)
    return [traces[index * len(traces) // count] for index in range(count)]
