"""Finished spans as lines of a local file. Owns the queue, the thread that writes and the form of a
line.

Nobody waits for the disk: spans that find the queue full, or the file at its limit, are dropped and
counted.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor


class SpanFile(SpanProcessor):
    """Appends each finished span to a JSONL file from a thread of its own, one write per batch."""

    def __init__(
        self,
        path: Path,
        service: str,
        *,
        capacity: int = 16384,
        batch: int = 512,
        interval_s: float = 0.5,
        max_bytes: int = 1 << 30,
    ) -> None:
        self.path = path
        self.dropped = 0
        self._service = service
        self._capacity = capacity
        self._batch = batch
        self._interval_s = interval_s
        self._room = max_bytes
        self._queue: list[ReadableSpan] = []
        self._busy = False
        self._flush = False
        self._closed = False
        self._changed = threading.Condition()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._thread = threading.Thread(target=self._write_batches, name="span-file", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing: only finished spans are written."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a finished span, or drop and count it."""
        with self._changed:
            if self._closed or len(self._queue) >= self._capacity:
                self.dropped += 1
                return
            self._queue.append(span)
            if len(self._queue) in (1, self._batch):
                self._changed.notify_all()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Wait until everything queued so far is written; False when the time is up first."""
        with self._changed:
            self._flush = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self._queue and not self._busy, timeout_millis / 1000
            )

    def shutdown(self) -> None:
        """Write what is queued and close the file; says how many spans were dropped."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=10)
        if self._thread.is_alive():
            self._log("the span file could not be finished in 10 s", spans=len(self._queue))
            return
        os.close(self._file)
        if self.dropped:
            self._log("spans were dropped", spans=self.dropped)

    def _write_batches(self) -> None:
        while batch := self._next_batch():
            try:
                self._write(batch)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _next_batch(self) -> list[ReadableSpan]:
        """Wait for spans, then a moment for more of them; empty once closed and drained."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._changed.wait_for(self._is_due, self._interval_s)
            taken, self._queue = self._queue, []
            self._busy = bool(taken)
            self._flush = False
            return taken

    def _is_due(self) -> bool:
        return self._closed or self._flush or len(self._queue) >= self._batch

    def _write(self, spans: list[ReadableSpan]) -> None:
        text = "".join(
            json.dumps(as_record(span, self._service), separators=(",", ":")) + "\n"
            for span in spans
        )
        data = text.encode()
        if len(data) > self._room:
            self._drop(len(spans))
            return
        self._room -= len(data)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._drop(len(spans))
            self._log("cannot write spans", error=str(error), spans=len(spans))

    def _drop(self, count: int) -> None:
        with self._changed:
            self.dropped += count

    def _log(self, message: str, **facts: object) -> None:
        structlog.get_logger().warning(message, file=str(self.path), **facts)


def as_record(span: ReadableSpan, service: str) -> dict[str, Any]:
    """The line of one span; ids in hex, times in nanoseconds since the Unix epoch, links as
    traceparent strings.
    """
    context = span.get_span_context()
    assert context is not None
    attributes = {key: _plain(value) for key, value in (span.attributes or {}).items()}
    if span.status.description:
        attributes["error.message"] = span.status.description
    return {
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


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # JSON has no NaN.
    if isinstance(value, str | int) or value is None:
        return value
    return [_plain(item) for item in value] if isinstance(value, Iterable) else str(value)
