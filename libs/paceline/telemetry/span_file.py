"""Writes finished spans as lines of a local file, through OpenTelemetry's batch processor.

No caller waits for the disk: with a full queue the processor drops spans and logs that. A file at
its size limit takes no more spans.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExportResult,
)

from paceline.telemetry import names

_QUEUE_SPANS, _BATCH_SPANS, _INTERVAL_MS = 16_384, 512, 500.0


class SpanFileExporter(ConsoleSpanExporter):
    """Appends a line per span until the file holds `max_bytes`."""

    def __init__(self, path: Path, service: str, max_bytes: int = 1 << 30) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(out=path.open("a", encoding="utf-8"), formatter=partial(line_of, service))
        self._path = path
        self._max_bytes = max_bytes
        self._dropped = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes a batch, or drops and counts it."""
        if self.out.tell() >= self._max_bytes:
            self._dropped += len(spans)
            return SpanExportResult.FAILURE
        return super().export(spans)

    def shutdown(self) -> None:
        """Closes the file and logs the number of dropped spans."""
        self.out.close()
        if self._dropped:
            structlog.get_logger().warning(
                "the span file is full", file=str(self._path), dropped=self._dropped
            )


def span_file_processor(path: Path, service: str) -> BatchSpanProcessor:
    """A processor that appends to the file from its own thread."""
    return BatchSpanProcessor(
        SpanFileExporter(path, service),
        max_queue_size=_QUEUE_SPANS,
        max_export_batch_size=_BATCH_SPANS,
        schedule_delay_millis=_INTERVAL_MS,
    )


def line_of(service: str, span: ReadableSpan) -> str:
    """The line of one span: ids in hex, times in nanoseconds since the Unix epoch, links as
    traceparent strings.
    """
    context = span.get_span_context()
    assert context is not None
    attributes = {key: _plain(value) for key, value in (span.attributes or {}).items()}
    if span.status.description:
        attributes[names.ERROR_MESSAGE] = span.status.description
    record: dict[str, Any] = {
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "name": span.name,
        "kind": span.kind.name.lower(),
        "service": service,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "attributes": attributes,
        "links": [
            f"00-{link.context.trace_id:032x}-{link.context.span_id:016x}-01" for link in span.links
        ],
        "status": span.status.status_code.name.lower(),
    }
    return json.dumps(record, separators=(",", ":")) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # JSON has no NaN.
    if isinstance(value, str | int) or value is None:
        return value
    return [_plain(item) for item in value] if isinstance(value, Iterable) else str(value)
