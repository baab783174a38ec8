"""Reads the span files of a run, line by line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
    attributes: dict[str, Any] = field(default_factory=dict)


_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("trace_id", "span_id", "parent_id", "name", "kind", "service"), str),
    "start_ns": int,
    "end_ns": int,
    "attributes": dict,
}


def read_spans(directory: Path, holding: Sequence[str] = ("",)) -> Iterator[SpanRecord]:
    """Every span of every file, in file order, without invalid lines, which a kill leaves.

    `holding`: only lines that contain one of these texts are parsed.
    """
    for path in sorted(directory.glob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if any(text in line for text in holding) and (span := _span(line)) is not None:
                    yield span


def _span(line: str) -> SpanRecord | None:
    try:
        record = json.loads(line)
        return SpanRecord(**{name: cast(record[name]) for name, cast in _FIELDS.items()})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
