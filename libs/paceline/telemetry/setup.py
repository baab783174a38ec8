"""Starts and ends the telemetry of a process. OTLP export follows the standard OTEL_* variables."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    NoOpTracer,
    Span,
    SpanContext,
    TraceFlags,
    Tracer,
    TracerProvider,
    get_current_span,
)

from paceline.addresses import proxied
from paceline.config import TelemetryConfig
from paceline.errors import NotFound
from paceline.telemetry import log, metrics, trace

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.grpc.exporter import OTLPExporterMixin
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from prometheus_client import CollectorRegistry


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

    def get_tracer(self, *args: Any, **named: Any) -> Tracer:
        """A tracer of this process; its names are not kept."""
        return _Tracer(self._ended)

    def shutdown(self) -> None:
        """Has no effect, since nothing is queued."""


class _Tracer(NoOpTracer):
    def __init__(self, ended: Ended) -> None:
        self._ended = ended

    def start_span(
        self, name: str, context: Context | None = None, *args: Any, **more: Any
    ) -> Span:
        parent = get_current_span(context).get_span_context()
        if parent.is_valid:  # the parent's sampling decision holds for its spans here
            trace_id, flags, state = parent.trace_id, parent.trace_flags, parent.trace_state
            found = SpanContext(trace_id, new_span_id(), False, flags, state)
        else:
            found = SpanContext(new_trace_id(), new_span_id(), False, _SAMPLED)
        return _Span(found, name, self._ended)


class _Span(NonRecordingSpan):
    def __init__(self, context: SpanContext, name: str, ended: Ended) -> None:
        super().__init__(context)
        self._name = name
        self._ended = ended

    def end(self, end_time: int | None = None) -> None:
        self._ended(self._name, end_time or time.time_ns())


PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of `prometheus_page`."""


SHUTDOWN_S = 2.0
"""Seconds that `shutdown` waits for a collector, over all signals."""


class _Running:
    """Providers between `setup` and `shutdown`, and the reader behind `prometheus_page`."""

    providers: (
        tuple[SdkTracerProvider | UnexportedSpans, MeterProvider, LoggerProvider | None] | None
    ) = None
    exporters: tuple[OTLPExporterMixin[Any, Any, Any, Any], ...] = ()
    registry: CollectorRegistry | None = None
    ended: tuple[str, int] = ("", 0)  # name of the last span, and its end in ns since the epoch


def setup(service: str, config: TelemetryConfig) -> None:
    """Starts logs, spans and metrics of this process; a second call ends the earlier providers.

    Spans go to `<spans_dir>/<service>-<pid>.jsonl` if a directory is set, and to
    OTEL_EXPORTER_OTLP_ENDPOINT if that is set (OTLP over gRPC). Without either, spans have ids
    only. Log records and metrics go to the same endpoint. Metrics also go to
    `prometheus_page`, at no cost until a request.
    """
    from opentelemetry.sdk.resources import Resource

    shutdown()
    resource = Resource.create({"service.name": service, "process.pid": os.getpid()})
    logs = _logs(service, config, resource)
    _Running.providers = (_traces(service, config, resource), _metrics(resource), logs)
    trace.use_tracer(_Running.providers[0])
    metrics.use_meter(_Running.providers[1])


def shutdown() -> None:
    """Writes queued data and stops the exporters; no effect without a `setup` before.

    A collector that does not answer is abandoned after SHUTDOWN_S seconds, a refused connection at
    once.
    """
    if _Running.providers is None:
        return
    from opentelemetry.metrics import NoOpMeterProvider
    from opentelemetry.trace import NoOpTracerProvider

    providers, exporters = _Running.providers, _Running.exporters
    _Running.providers = _Running.registry = None
    _Running.exporters = ()
    trace.use_tracer(NoOpTracerProvider())
    metrics.use_meter(NoOpMeterProvider())
    stops = [provider.shutdown for provider in providers if provider is not None]
    if not exporters:
        for stop in stops:
            stop()
        return
    from paceline.telemetry.exporters import stop_in_time

    stop_in_time(stops, exporters, SHUTDOWN_S)


def last_span() -> tuple[str, float]:
    """Name of the last finished span in this process and the seconds since then; "" and 0 before
    the first. Progress calls do not count.
    """
    name, ended_ns = _Running.ended
    return name, max(0.0, (time.time_ns() - ended_ns) / 1e9) if name else 0.0


def prometheus_page() -> bytes:
    """All metrics of this process in Prometheus text format 0.0.4, with OpenTelemetry's mapping of
    names and units.

    Raises NotFound before `setup` and after `shutdown`.
    """
    if _Running.registry is None:
        raise NotFound("this process has no metrics", allowed="a request while telemetry runs")
    from prometheus_client import generate_latest

    return generate_latest(_Running.registry)


def _logs(service: str, config: TelemetryConfig, resource: Resource) -> LoggerProvider | None:
    """Logs to stderr, and to an OTLP endpoint if there is one."""
    if not _endpoint("LOGS"):
        log.configure_log(service, config.log_level, config.log_json)
        return None
    from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter

    from paceline.telemetry.exporters import exporting, otlp_logs

    exporter = OTLPLogExporter(channel_options=_channel_options("LOGS"))
    _Running.exporters += (exporter,)
    provider = otlp_logs(resource, exporter)
    log.configure_log(service, config.log_level, config.log_json, exporting(provider))
    return provider


def _traces(
    service: str, config: TelemetryConfig, resource: Resource
) -> SdkTracerProvider | UnexportedSpans:
    """Spans for a directory and an endpoint; without either, spans with ids only."""
    if not config.spans_dir and not _endpoint("TRACES"):
        return UnexportedSpans(_note_end)

    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class Last(SpanProcessor):
        """Keeps the name of the last finished span."""

        def on_end(self, span: ReadableSpan) -> None:
            _note_end(span.name, span.end_time or time.time_ns())

    class SystemIds(IdGenerator):
        """Makes the same kind of ids as unexported spans."""

        def generate_trace_id(self) -> int:
            return new_trace_id()

        def generate_span_id(self) -> int:
            return new_span_id()

    provider = TracerProvider(resource=resource, id_generator=SystemIds())
    provider.add_span_processor(Last())
    if config.spans_dir:
        from paceline.telemetry.exporters import span_file_processor

        path = Path(config.spans_dir) / f"{service}-{os.getpid()}.jsonl"
        provider.add_span_processor(span_file_processor(path, service))

    if _endpoint("TRACES"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = OTLPSpanExporter(channel_options=_channel_options("TRACES"))
        _Running.exporters += (exporter,)
        provider.add_span_processor(BatchSpanProcessor(exporter))

    return provider


def _note_end(name: str, ended_ns: int) -> None:
    if not name.startswith("ProgressService."):
        _Running.ended = (name, ended_ns)


def _metrics(resource: Resource) -> MeterProvider:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
    from prometheus_client import CollectorRegistry

    readers: list[MetricReader] = []
    if _endpoint("METRICS"):
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        exporter = OTLPMetricExporter(channel_options=_channel_options("METRICS"))
        _Running.exporters += (exporter,)
        readers.append(PeriodicExportingMetricReader(exporter))
    _Running.registry = CollectorRegistry()
    readers.append(PrometheusMetricReader(scope_info_enabled=False, registry=_Running.registry))
    # Exemplars are kept only for an endpoint: the Prometheus page cannot show them.
    examples = None if _endpoint("METRICS") else AlwaysOffExemplarFilter()
    return MeterProvider(metric_readers=readers, resource=resource, exemplar_filter=examples)


def _endpoint(signal: str) -> str:
    """The endpoint of a signal in the variables; "" without one."""
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "")
    return own or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")


def _channel_options(signal: str) -> Any:
    """gRPC options for the exporter of a signal: a collector on this machine needs no proxy."""
    return (("grpc.enable_http_proxy", int(proxied(_endpoint(signal)))),)
