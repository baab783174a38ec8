"""How many requests a second have the spans of their stages."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.services.rollout_gateway.calls.call import StageSpans
from paceline.telemetry import use_tracer
from paceline.v1 import engine_pb2 as pb

STAGES = [
    pb.StageTime(stage="queue", start_ns=1, end_ns=2),
    pb.StageTime(stage="decode", arm="off"),
]


def test_stages_of_so_many_requests_a_second_become_spans_and_no_more() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    use_tracer(provider.get_tracer("test"))
    now = 0.0
    spans = StageSpans(2.0, lambda: now)
    chunk = pb.TokenChunk(stages=STAGES)

    def shown() -> int:
        exporter.clear()
        with provider.get_tracer("test").start_as_current_span("engine.request") as request:
            spans.show(request, 0, chunk)
        return sum(one.name != "engine.request" for one in exporter.get_finished_spans())

    assert [shown() for _ in range(4)] == [2, 2, 0, 0]
    now = 0.5  # half a second gives one more
    assert [shown() for _ in range(2)] == [2, 0]
    now = 1000.0  # never more than the allowance of one second
    assert [shown() for _ in range(4)] == [2, 2, 0, 0]
