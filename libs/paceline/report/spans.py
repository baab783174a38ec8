"""Reads the span files of a run, and the latency per edge between services.

It reads line by line, twice: the first pass records callers and producers, the second matches them
with servers and consumers. At most `_INDEXED` callers are kept; the rest is counted.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_INDEXED = 400_000


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


_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("trace_id", "span_id", "parent_id", "name", "kind", "service"), str),
    "start_ns": int,
    "end_ns": int,
    "links": tuple,
    "attributes": dict,
}


@dataclass(frozen=True, slots=True)
class Edge:
    """Latencies between two services over one method or stream, in seconds."""

    source: str
    target: str
    method: str  # gRPC method, or producer and consumer span
    transport: str  # "gRPC" or "Redis"
    count: int
    quantiles_s: tuple[float, ...]  # 50 %, 95 %, 99 %


@dataclass(frozen=True, slots=True)
class SpanReport:
    """The report's view of the spans."""

    edges: tuple[Edge, ...] = ()  # by transport, source, target, method
    spans: int = 0
    left_out: int = 0  # callers beyond the memory bound


def read_spans(directory: Path, holding: Sequence[str] = ("",)) -> Iterator[SpanRecord]:
    """Every span of every file, in file order, without invalid lines, which a kill leaves.

    `holding`: only lines that contain one of these texts are parsed.
    """
    for path in sorted(directory.glob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if any(text in line for text in holding) and (span := _span(line)) is not None:
                    yield span


def read_report(directory: Path) -> SpanReport:
    """Latencies of the edges of a run."""
    callers: dict[str, SpanRecord] = {}
    spans = left_out = 0
    for span in read_spans(directory):
        spans += 1
        if span.kind in ("client", "producer"):
            if len(callers) < _INDEXED:
                callers[span.span_id] = span
            else:
                left_out += 1
    seconds: dict[tuple[str, str, str, str], array[float]] = {}
    for span in read_spans(directory):
        for edge, latency_s in _latencies(span, callers):
            seconds.setdefault(edge, array("d")).append(latency_s)
    edges = tuple(_edge(*edge, seconds[edge]) for edge in sorted(seconds))
    return SpanReport(edges, spans, left_out)


def _edge(transport: str, source: str, target: str, method: str, seconds: array[float]) -> Edge:
    quantiles = np.quantile(seconds, (0.5, 0.95, 0.99)).tolist()
    return Edge(source, target, method, transport, len(seconds), tuple(quantiles))


def _latencies(
    span: SpanRecord, callers: dict[str, SpanRecord]
) -> Iterator[tuple[tuple[str, str, str, str], float]]:
    """Edges that end in this span: a call as its caller measured it, or the wait of an entry
    between append and read.
    """
    if span.kind == "server" and (caller := callers.get(span.parent_id)) is not None:
        yield ("gRPC", caller.service, span.service, caller.name), caller.duration_s
    if span.kind == "consumer":
        for span_id in (span.parent_id, *map(_span_id, span.links)):
            producer = callers.get(span_id)
            if producer is not None and producer.kind == "producer":
                method = f"{producer.name} → {span.name}"
                # A blocking read begins before its entry exists: such an entry did not wait.
                waited_s = max(0.0, (span.start_ns - producer.end_ns) / 1e9)
                yield ("Redis", producer.service, span.service, method), waited_s


def _span_id(traceparent: str) -> str:
    """The span id in a traceparent; empty for an invalid one."""
    parts = traceparent.split("-")
    return parts[2] if len(parts) == 4 else ""


def _span(line: str) -> SpanRecord | None:
    try:
        record = json.loads(line)
        return SpanRecord(**{name: cast(record[name]) for name, cast in _FIELDS.items()})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
