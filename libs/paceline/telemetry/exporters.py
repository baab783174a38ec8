"""Exports spans and log records: to an OTLP endpoint, or as lines of a local file.

No caller waits for the endpoint: records queue in OpenTelemetry's batch processor, which drops
records beyond its capacity.

No caller waits for the disk: with a full queue the processor drops spans and logs that. A file at
its size limit takes no more spans.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import structlog
from opentelemetry._logs import SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.exporter import OTLPExporterMixin
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExportResult
from structlog.typing import EventDict, Processor, WrappedLogger

from paceline.telemetry import metrics, names

_CUT_S = 0.5
"""Seconds in which an exporter returns after its connection was closed."""
_log = logging.getLogger("opentelemetry.exporter.paceline")


def stop_in_time(
    stops: Sequence[Callable[[], object]],
    exporters: Sequence[OTLPExporterMixin[Any, Any, Any, Any]],
    limit_s: float,
) -> None:
    """Calls all stops at once; each sends its queue and ends its exporter.

    A failed export is not retried. Exports that take longer than `limit_s` seconds are cut off and
    lose their data; a warning names the endpoints.
    """
    for exporter in exporters:
        exporter._shutdown_in_progress.set()  # ends its backoff of up to 10 s; no public API does
    threads = [Thread(target=stop, daemon=True) for stop in stops]
    for thread in threads:
        thread.start()
    if _ended(threads, limit_s):
        return
    endpoints = ", ".join(sorted({exporter._endpoint for exporter in exporters}))
    _log.warning("telemetry is lost: no answer from %s in %g s", endpoints, limit_s)
    for exporter in exporters:
        exporter.shutdown()
    _ended(threads, _CUT_S)


def _ended(threads: Sequence[Thread], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


_SEVERITY = {"warning": "WARN", "critical": "FATAL"}
"""OpenTelemetry's names of levels, where they differ from structlog's."""
_SENT_ELSEWHERE = frozenset(
    ("event", "timestamp", "level", "service", "trace_id", "span_id", "exc_info")
)
OWN = "opentelemetry"
"""OpenTelemetry's own records are not exported: a record about a failed export would be exported
next.
"""


def otlp_logs(resource: Resource, exporter: OTLPLogExporter) -> LoggerProvider:
    """A provider that sends its records to the exporter."""
    provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    return provider


def exporting(provider: LoggerProvider) -> Processor:
    """Passes each record to the provider and leaves the record unchanged."""
    logger = provider.get_logger(metrics.SCOPE)

    def export(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        if str(event.get("source", "")).startswith(OWN):
            return event
        level = str(event.get("level", "info"))
        attributes = {
            key: value if isinstance(value, str | bool | int | float) else str(value)
            for key, value in event.items()
            if key not in _SENT_ELSEWHERE and not key.startswith("_")
        }
        logger.emit(
            body=str(event.get("event", "")),
            severity_text=level,
            severity_number=_severity(level),
            attributes=attributes,
            exception=_exception(event.get("exc_info")),
        )
        return event

    return export


def _severity(level: str) -> SeverityNumber:
    """INFO for a level of a library's own."""
    name = _SEVERITY.get(level, level.upper())
    return SeverityNumber.__members__.get(name, SeverityNumber.INFO)


def _exception(info: Any) -> BaseException | None:
    """The exception in structlog's and logging's value of `exc_info`."""
    found = info[1] if isinstance(info, tuple) else info
    if found and not isinstance(found, BaseException):
        found = sys.exc_info()[1]
    return found or None


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
