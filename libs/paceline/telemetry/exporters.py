"""Exports the spans, metrics and log records of a process: to an OTLP endpoint by the standard
OTEL_* variables, spans as lines of a local file, and metrics to the Prometheus page.

No caller waits for the endpoint: records queue in OpenTelemetry's batch processor, which drops
records beyond its capacity.

No caller waits for the disk: with a full queue the processor drops spans and logs that. A file at
its size limit takes no more spans.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk import metrics as sdk_metrics
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from prometheus_client import CollectorRegistry, generate_latest

from paceline import telemetry
from paceline.addresses import proxied
from paceline.config import TelemetryConfig
from paceline.errors import NotFound
from paceline.telemetry import metrics, names
from paceline.telemetry.log import configure_log, exporting

SHUTDOWN_S = 2.0
"""Seconds that `stop` waits for a collector, over all signals."""
_CUT_S = 0.5
"""Seconds in which an exporter returns after its connection was closed."""
_log = logging.getLogger("opentelemetry.exporter.paceline")
_QUEUE_SPANS, _BATCH_SPANS, _INTERVAL_MS = 16_384, 512, 500.0
"""Limits of the spans on their way to the file, and its interval of writing."""


class _Running:
    """State between `start` and `stop`."""

    stops: tuple[Callable[[], object], ...] = ()  # of the providers
    exporters: tuple[Any, ...] = ()  # to an OTLP endpoint
    registry: CollectorRegistry | None = None  # of `prometheus_page`


def start(service: str, config: TelemetryConfig) -> None:
    """Implements telemetry.setup."""
    stop()
    resource = Resource.create({"service.name": service, "process.pid": os.getpid()})
    _start_logs(service, config, resource)
    _start_spans(service, config, resource)
    _start_metrics(resource)


def stop() -> None:
    """Implements telemetry.shutdown."""
    stops, exporters = _Running.stops, _Running.exporters
    _Running.stops, _Running.exporters, _Running.registry = (), (), None
    telemetry.use_tracer(trace.NoOpTracer())
    metrics.use_meter(NoOpMeterProvider())
    if exporters:
        _stop_in_time(stops, exporters)
    else:
        for each in stops:
            each()


def prometheus_page() -> bytes:
    """Implements telemetry.prometheus_page."""
    if _Running.registry is None:
        raise NotFound("this process has no metrics", allowed="a request while telemetry runs")
    return generate_latest(_Running.registry)


def _start_logs(service: str, config: TelemetryConfig, resource: Resource) -> None:
    export = None
    if exporter := _otlp_exporter("LOGS", "_log_exporter.OTLPLogExporter"):
        provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
        _Running.stops += (provider.shutdown,)
        export = exporting(provider)
    configure_log(service, config.log_level, config.log_json, export)


def _start_spans(service: str, config: TelemetryConfig, resource: Resource) -> None:
    processors: list[SpanProcessor] = []
    if config.spans_dir:
        path = Path(config.spans_dir) / f"{service}-{os.getpid()}.jsonl"
        file = SpanFileExporter(path, service)
        processors.append(BatchSpanProcessor(file, _QUEUE_SPANS, _INTERVAL_MS, _BATCH_SPANS))
    if exporter := _otlp_exporter("TRACES", "trace_exporter.OTLPSpanExporter"):
        processors.append(BatchSpanProcessor(exporter))
    if not processors:
        telemetry.use_tracer(_TraceIds())
        return
    provider = TracerProvider(resource=resource, id_generator=_SystemIds())
    for processor in (_LastSpan(), *processors):
        provider.add_span_processor(processor)
    _Running.stops += (provider.shutdown,)
    telemetry.use_tracer(provider.get_tracer(metrics.SCOPE))


def _start_metrics(resource: Resource) -> None:
    _Running.registry = CollectorRegistry()
    page = PrometheusMetricReader(scope_info_enabled=False, registry=_Running.registry)
    readers: list[MetricReader] = [page]
    # Exemplars are kept only for an endpoint: the Prometheus page cannot show them.
    exemplars: Any = sdk_metrics.AlwaysOffExemplarFilter()
    if exporter := _otlp_exporter("METRICS", "metric_exporter.OTLPMetricExporter"):
        readers.append(PeriodicExportingMetricReader(exporter))
        exemplars = None
    provider = sdk_metrics.MeterProvider(readers, resource, exemplar_filter=exemplars)
    _Running.stops += (provider.shutdown,)
    metrics.use_meter(provider)


def _otlp_exporter(signal: str, name: str) -> Any:
    """The exporter of a signal to the endpoint in the variables; None without an endpoint."""
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "")
    endpoint = own or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if not endpoint:
        return None
    module, _, kind = name.partition(".")
    found = import_module(f"opentelemetry.exporter.otlp.proto.grpc.{module}")
    # A collector on this machine needs no proxy.
    options = (("grpc.enable_http_proxy", int(proxied(endpoint))),)
    exporter = getattr(found, kind)(channel_options=options)
    _Running.exporters += (exporter,)
    return exporter


class _TraceIds(trace.NoOpTracer):
    """Passes on the caller's context. Without a caller, it begins a trace for log lines, errors and
    other processes.
    """

    def start_span(
        self, name: str, context: Context | None = None, *args: Any, **named: Any
    ) -> trace.Span:
        if trace.get_current_span(context).get_span_context().is_valid:
            return super().start_span(name, context)
        ids, sampled = _SystemIds(), trace.TraceFlags(trace.TraceFlags.SAMPLED)
        trace_id, span_id = ids.generate_trace_id(), ids.generate_span_id()
        return trace.NonRecordingSpan(trace.SpanContext(trace_id, span_id, False, sampled))


class _LastSpan(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        telemetry.note_end(span.name, span.end_time or time.time_ns())


class _SystemIds(IdGenerator):
    """Random ids from the operating system: seeding `random` for a run must not give two processes
    the same ids.
    """

    def generate_trace_id(self) -> int:
        return int.from_bytes(os.urandom(16)) or 1  # 0 is not a valid id

    def generate_span_id(self) -> int:
        return int.from_bytes(os.urandom(8)) or 1


def _stop_in_time(stops: Sequence[Callable[[], object]], exporters: Sequence[Any]) -> None:
    """Calls all stops at once; each sends its queue and ends its exporter.

    A failed export is not retried. Exports that take longer than SHUTDOWN_S seconds are cut off and
    lose their data; a warning names the endpoints.
    """
    for exporter in exporters:
        exporter._shutdown_in_progress.set()  # ends its backoff of up to 10 s; no public API does
    threads = [Thread(target=stop, daemon=True) for stop in stops]
    for thread in threads:
        thread.start()
    if _ended(threads, SHUTDOWN_S):
        return
    endpoints = ", ".join(sorted({exporter._endpoint for exporter in exporters}))
    _log.warning("telemetry is lost: no answer from %s in %g s", endpoints, SHUTDOWN_S)
    for exporter in exporters:
        exporter.shutdown()
    _ended(threads, _CUT_S)


def _ended(threads: Sequence[Thread], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


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
