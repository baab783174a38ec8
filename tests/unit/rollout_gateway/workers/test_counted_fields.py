"""Whatever a worker counts leaves: each number of its statistics moves a metric of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from metric_points import all_points
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.metrics import EngineMetrics
from paceline.telemetry.metrics import use_meter
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.coordinator_pb2 import StepRecord

ROOT = Path(__file__).resolve().parents[4]
NO_FIGURES = {
    "versions": "which set serves, no count: paceline.coordinator.figure",
    "speculation.arm_drafted_rounds": "of a step, in its record: arms.mean_accept_length leaves",
    "speculation.arm_round_tokens": "of a step, in its record: arms.mean_accept_length leaves",
    "arms.batch_group": "a label of the arms' figures",
}
WHEN_A_REQUEST_ENDS = {
    "speculation.proposed_at": "paceline.engine.drafts_proposed",
    "speculation.accepted_at": "paceline.engine.drafts_accepted",
}


def numbers_of(message: Descriptor, above: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """Yield the paths of all numbers in a message, except NO_FIGURES."""
    for field in message.fields:
        path = f"{above}{field.name}"
        if path in NO_FIGURES or field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            continue
        if field.message_type is not None:
            yield from numbers_of(field.message_type, f"{path}.")
        else:
            yield path, field


COUNTED = dict(numbers_of(pb.WorkerHealth.DESCRIPTOR))


def health_with(*changed: str) -> pb.WorkerHealth:
    """Statistics in which no number is 0, each of `changed` larger than without."""
    health = pb.WorkerHealth(arms=[pb.ArmStats(arm="off"), pb.ArmStats(arm="eagle:5_1_6")])
    for number, path in enumerate(COUNTED):
        *parents, name = path.split(".")
        value = 40 + (30 if path in changed else 0) - min(number, 20)
        for one in _owners(health, parents):
            if COUNTED[path].is_repeated:
                getattr(one, name).append(value)
            else:
                setattr(one, name, value)
    return health


def _owners(message: Any, parents: list[str]) -> list[Any]:
    for name in parents:
        message = getattr(message, name)
    return list(message)[1:] if parents == ["arms"] else [message]


def looked_at(health: pb.WorkerHealth) -> dict[Any, float]:
    reader = InMemoryMetricReader()
    use_meter(MeterProvider([reader]))
    seen = EngineMetrics("embedded")
    seen.record_health(pb.WorkerReady(worker_index=1, pid=7, device_tflops=0.5), health)
    return all_points(reader)


def test_there_is_something_to_count() -> None:
    assert {"tokens_emitted", "rows_invalid", "arms.pulls", "split.nodes"} <= set(COUNTED)
    assert set(WHEN_A_REQUEST_ENDS) <= set(COUNTED)


@pytest.mark.parametrize("path", sorted(set(COUNTED) - set(WHEN_A_REQUEST_ENDS)))
def test_every_number_of_a_workers_statistics_moves_a_metric(
    path: str, metric_reader: InMemoryMetricReader
) -> None:
    assert looked_at(health_with()) != looked_at(health_with(path))


def test_drafts_by_position_are_told_when_their_request_ends(
    metric_reader: InMemoryMetricReader,
) -> None:
    generation = Generation(pb.EngineRequest(request_id=1), None)
    stats = tpb.SpeculationStats(proposed_at=[3, 2], accepted_at=[2, 1])
    chunk = pb.TokenChunk(request_id=1, token_ids=[4], speculation=stats)
    chunk.finish_reason = tpb.FINISH_REASON_STOP
    generation.accept(chunk)
    EngineMetrics("embedded").record_end(generation)
    named = {name for name, _ in all_points(metric_reader)}
    assert set(WHEN_A_REQUEST_ENDS.values()) <= named


@pytest.mark.slow
def test_no_attribute_is_counted_that_nobody_reads() -> None:
    counted: dict[str, str] = {}
    read: set[str] = set()
    fields = {field.name for field in pb.WorkerHealth.DESCRIPTOR.fields}
    for path in sorted((ROOT / "services").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.AugAssign(target=ast.Attribute(attr=name)):
                    counted[name] = f"{path.name}:{node.lineno}"
                case ast.Attribute(attr=name, ctx=ast.Load()):
                    read.add(name)
                case ast.Constant(value=str(name)):
                    read.add(name)
    read |= {field.name for field in StepRecord.DESCRIPTOR.fields}  # steps.jsonl has every field
    assert {name: where for name, where in counted.items() if name not in read} == {}
    assert {"rows_invalid", "rows_dropped"} <= set(counted) & fields
