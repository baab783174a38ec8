"""A real OTLP receiver: gRPC servers of OpenTelemetry's services that keep all received data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_INSECURE",
    "OTEL_RESOURCE_ATTRIBUTES",
)


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as received over the wire; ids in hex."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    links: tuple[str, ...]  # ids of spans
    attributes: dict[str, Any]


@dataclass(frozen=True)
class ReceivedLog:
    """A log record as received over the wire."""

    service: str
    body: str
    level: str
    trace_id: str
    span_id: str
    attributes: dict[str, Any]


@dataclass
class OtlpReceiver:
    """Spans, log records and metrics, in the order of arrival."""

    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    logs: list[ReceivedLog] = field(default_factory=list)
    metrics: dict[str, list[Any]] = field(default_factory=dict)  # by service
    news: threading.Condition = field(default_factory=threading.Condition)

    def named(self, name: str) -> list[ReceivedSpan]:
        """All spans of a name."""
        return [one for one in self.spans if one.name == name]

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Whether the condition holds within so many seconds."""
        with self.news:
            return self.news.wait_for(holds, seconds)

    def take_spans(self, request: Any) -> None:
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            self.spans += [
                _span(service, one) for scope in resource.scope_spans for one in scope.spans
            ]

    def take_logs(self, request: Any) -> None:
        for resource in request.resource_logs:
            service = _values(resource.resource.attributes)["service.name"]
            self.logs += [
                _log(service, one) for scope in resource.scope_logs for one in scope.log_records
            ]

    def take_metrics(self, request: Any) -> None:
        for resource in request.resource_metrics:
            service = _values(resource.resource.attributes)["service.name"]
            found = self.metrics.setdefault(service, [])
            found += [one for scope in resource.scope_metrics for one in scope.metrics]


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self.receiver = receiver

    def Export(self, request: Any, context: object) -> Any:
        with self.receiver.news:
            self.receiver.take_spans(request)
            self.receiver.news.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()


class _Logs(logs_service_pb2_grpc.LogsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self.receiver = receiver

    def Export(self, request: Any, context: object) -> Any:
        with self.receiver.news:
            self.receiver.take_logs(request)
            self.receiver.news.notify_all()
        return logs_service_pb2.ExportLogsServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self.receiver = receiver

    def Export(self, request: Any, context: object) -> Any:
        with self.receiver.news:
            self.receiver.take_metrics(request)
            self.receiver.news.notify_all()
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def receiving(host: str = "127.0.0.1") -> Iterator[OtlpReceiver]:
    """A receiver on a free port of the loopback for the time of the block."""
    receiver = OtlpReceiver()
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(receiver), server)
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(_Logs(receiver), server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(receiver), server)
        receiver.endpoint = f"http://{host}:{server.add_insecure_port(f'{host}:0')}"
        server.start()
        try:
            yield receiver
        finally:
            server.stop(0).wait()


def _span(service: str, one: Any) -> ReceivedSpan:
    links = tuple(link.span_id.hex() for link in one.links)
    ids = (one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex())
    return ReceivedSpan(service, one.name, *ids, links, _values(one.attributes))


def _log(service: str, one: Any) -> ReceivedLog:
    ids = (one.trace_id.hex(), one.span_id.hex())
    attributes = _values(one.attributes)
    return ReceivedLog(service, one.body.string_value, one.severity_text, *ids, attributes)


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
