"""Reads the span files of a run: latency per edge between services, and the spans of one trace.

It reads line by line, twice: the first pass records callers and producers, the second matches them
with servers and consumers. Memory is bounded: at most `_INDEXED` callers and `_SAMPLES` latencies
per edge are kept; the rest is counted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.telemetry import names

_INDEXED = 400_000
_SAMPLES = 20_000
_TRACE_SPANS = 4_000
_MILESTONES = (
    names.SESSION,
    names.OPTIMIZER_STEP,
    names.DRAFTER_MICRO_STEP,
    names.DRAFTER_ACTIVATE,
)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One finished span, with times in nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str  # internal, client, server, producer, consumer
    service: str
    start_ns: int
    end_ns: int
    links: tuple[str, ...] = ()  # traceparents
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Edge:
    """Latencies between two services over one method or stream, in seconds."""

    source: str
    target: str
    what: str  # gRPC method, or producer and consumer span
    transport: str  # "gRPC" or "Redis"
    count: int
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class SpanReport:
    """The report's view of the spans."""

    edges: tuple[Edge, ...] = ()
    trace: tuple[SpanRecord, ...] = ()  # spans of the chosen trace, by start
    spans: int = 0  # lines read
    unreadable: int = 0  # invalid lines, e.g. cut by a kill
    left_out: int = 0  # callers beyond the memory bound


def read_spans(directory: Path, holding: Sequence[str] = ()) -> Iterator[SpanRecord | None]:
    """Every span of every file, in file order; None for an invalid line.

    `holding`: if not empty, only lines that contain one of these texts are parsed.
    """
    for path in sorted(directory.glob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not holding or any(text in line for text in holding):
                    yield _span(line)


def read_report(directory: Path, trace_id: str = "") -> SpanReport:
    """Edges and one trace of a run.

    Without `trace_id`, the newest trace that reaches both optimisers is chosen.
    """
    first = _first_pass(directory)
    chosen = trace_id or first.best_trace()
    edges: dict[tuple[str, str, str, str], _Sample] = {}
    trace: list[SpanRecord] = []
    for span in read_spans(directory):
        if span is None:
            continue
        if span.trace_id == chosen and len(trace) < _TRACE_SPANS:
            trace.append(span)
        for key, seconds in _hops(span, first.callers):
            edges.setdefault(key, _Sample()).add(seconds)

    return SpanReport(
        edges=tuple(sample.edge(*key) for key, sample in sorted(edges.items())),
        trace=tuple(sorted(trace, key=lambda span: span.start_ns)),
        spans=first.spans,
        unreadable=first.unreadable,
        left_out=first.left_out,
    )


@dataclass(slots=True)
class _Sample:
    """A uniform sample of at most _SAMPLES latencies. The seed is fixed, so a report can be
    reproduced.
    """

    count: int = 0
    values: list[float] = field(default_factory=list)
    draws: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, value: float) -> None:
        self.count += 1
        if len(self.values) < _SAMPLES:
            self.values.append(value)
        elif (place := self.draws.randrange(self.count)) < _SAMPLES:
            self.values[place] = value

    def edge(self, source: str, target: str, what: str, transport: str) -> Edge:
        p50, p95, p99 = np.quantile(self.values, (0.5, 0.95, 0.99)).tolist()
        return Edge(source, target, what, transport, self.count, p50, p95, p99)


@dataclass(slots=True)
class _FirstPass:
    """Callers by span id, and the milestones of each trace."""

    callers: dict[str, SpanRecord] = field(default_factory=dict)
    milestones: dict[str, set[str]] = field(default_factory=dict)
    spans: int = 0
    unreadable: int = 0
    left_out: int = 0

    def best_trace(self) -> str:
        best, most = "", 0
        for trace_id, reached in self.milestones.items():
            if len(reached) >= most:
                best, most = trace_id, len(reached)
        return best


def _first_pass(directory: Path) -> _FirstPass:
    seen = _FirstPass()
    for span in read_spans(directory):
        seen.spans += 1
        if span is None:
            seen.unreadable += 1
            continue
        if span.name in _MILESTONES:
            seen.milestones.setdefault(span.trace_id, set()).add(span.name)
        if span.kind in ("client", "producer"):
            if len(seen.callers) < _INDEXED:
                seen.callers[span.span_id] = span
            else:
                seen.left_out += 1
    return seen


def _hops(
    span: SpanRecord, callers: dict[str, SpanRecord]
) -> Iterator[tuple[tuple[str, str, str, str], float]]:
    """Edges that end in this span: a call as its caller measured it, or the wait of an entry
    between append and read.
    """
    if span.kind == "server" and (caller := callers.get(span.parent_id)) is not None:
        yield (caller.service, span.service, caller.name, "gRPC"), caller.duration_s
    if span.kind == "consumer":
        for span_id in (span.parent_id, *(span_id_of(link) for link in span.links)):
            producer = callers.get(span_id)
            if producer is not None and producer.kind == "producer":
                # A blocking read begins before its entry exists: such an entry did not wait.
                waited = max(0.0, (span.start_ns - producer.end_ns) / 1e9)
                yield (
                    (producer.service, span.service, f"{producer.name} → {span.name}", "Redis"),
                    waited,
                )


def span_id_of(traceparent: str) -> str:
    """The span id in a traceparent; empty for an invalid one."""
    parts = traceparent.split("-")
    return parts[2] if len(parts) == 4 else ""


def _span(line: str) -> SpanRecord | None:
    try:
        record = json.loads(line)
        return SpanRecord(
            trace_id=str(record["trace_id"]),
            span_id=str(record["span_id"]),
            parent_id=str(record["parent_id"]),
            name=str(record["name"]),
            kind=str(record["kind"]),
            service=str(record["service"]),
            start_ns=int(record["start_ns"]),
            end_ns=int(record["end_ns"]),
            links=tuple(record.get("links", ())),
            attributes=dict(record.get("attributes", {})),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
