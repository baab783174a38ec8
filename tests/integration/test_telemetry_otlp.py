"""Spans and metrics reach an OTLP collector when the standard variable names one, and nobody
otherwise.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from paceline import telemetry
from paceline.config import TelemetryConfig
from paceline.telemetry.metrics import Counter


class Collector(
    trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer
):
    """Keeps what arrives, in the order of arrival."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def Export(self, request: Any, context: object) -> Any:
        self.received.append(request)
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            return trace_service_pb2.ExportTraceServiceResponse()
        return metrics_service_pb2.ExportMetricsServiceResponse()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Collector, str]]:
    for variable in (
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_INSECURE",
        "OTEL_RESOURCE_ATTRIBUTES",
    ):
        monkeypatch.delenv(variable, raising=False)
    servicer = Collector()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield servicer, f"http://127.0.0.1:{port}"
        server.stop(0).wait()


def work() -> None:
    telemetry.setup("gateway", TelemetryConfig())
    Counter("tokens", "1", (), "of a test").record(5)
    with telemetry.span("step", step=1):
        pass
    telemetry.shutdown()


def test_spans_and_metrics_are_exported_under_the_services_name(
    collector: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, endpoint = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    work()
    (spans,) = [
        message.resource_spans[0]
        for message in servicer.received
        if hasattr(message, "resource_spans")
    ]
    (metrics,) = [
        message.resource_metrics[0]
        for message in servicer.received
        if hasattr(message, "resource_metrics")
    ]
    for found in (spans, metrics):
        names = {
            attribute.key: attribute.value.string_value for attribute in found.resource.attributes
        }
        assert names["service.name"] == "gateway"
    assert [span.name for span in spans.scope_spans[0].spans] == ["step"]
    (counter,) = metrics.scope_metrics[0].metrics
    assert (counter.name, counter.sum.data_points[0].as_int) == ("tokens", 5)


def test_nothing_is_exported_unless_asked(collector: tuple[Collector, str]) -> None:
    work()
    assert collector[0].received == []
