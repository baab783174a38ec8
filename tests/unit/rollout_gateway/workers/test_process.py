"""What a worker is sent. Real processes are in tests/integration/gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import telemetry
from paceline.config import TelemetryConfig
from paceline.v1 import engine_pb2 as pb
from rollout_gateway.engines.worker.spec import WorkerSpec
from rollout_gateway.workers.process import WorkerProcess


class Wire:
    """A socket that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[pb.WorkerCommand] = []

    def send(self, raw: bytes) -> None:
        self.sent.append(pb.WorkerCommand.FromString(raw))


@pytest.fixture(autouse=True)
def _traced() -> Iterator[None]:
    telemetry.setup("gateway", TelemetryConfig())
    yield
    telemetry.shutdown()


async def test_a_command_carries_the_trace_of_the_span_that_sent_it(tmp_path: Path) -> None:
    process = WorkerProcess(
        WorkerSpec(worker_index=0, kind="scripted"), None, tmp_path, lambda *_: None
    )
    wire = Wire()
    process._socket = wire  # type: ignore[assignment]
    enqueue = pb.WorkerCommand(
        enqueue=pb.EnqueueRequests(requests=[pb.EngineRequest(request_id=4)])
    )
    with telemetry.span("engine.request"):
        trace_id, carrier = telemetry.current_trace_id(), telemetry.inject()
        process.send(enqueue)
    process.send(enqueue)
    traced, plain = wire.sent
    assert traced.traceparent == carrier["traceparent"]
    assert traced.traceparent.split("-")[1] == trace_id
    assert traced.enqueue.requests[0].request_id == 4
    assert plain.traceparent == ""
